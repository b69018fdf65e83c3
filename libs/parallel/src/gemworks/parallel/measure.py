"""Measure the rates of a cluster with the processes at hand (gloo or NCCL)."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from gemworks.parallel.cluster import COLLECTIVES, ClusterSpec, Collective, Rate, Tier
from gemworks.parallel.costs import edge_bytes
from gemworks.parallel.meshes import members_group
from torch import Tensor

_AHEAD_CYCLES = 8_000_000  # about 4 ms of a GPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured collective.

    Attributes:
        tier, collective: which.
        nbytes: S.
        seconds: median of the slowest rank.
        fitted_seconds: what the fitted latency and bandwidth say.
    """

    tier: Tier
    collective: Collective
    nbytes: int
    seconds: float
    fitted_seconds: float


def ring_steps(collective: Collective, size: int) -> int:
    """Steps between neighbours: 2 (n-1) for an all-reduce, 1 for an all-to-all, n-1 for the others."""
    return 1 if collective == "all_to_all" else (2 if collective == "all_reduce" else 1) * (size - 1)


def fit_rate(collective: Collective, size: int, samples: Sequence[tuple[int, float]]) -> Rate:
    """Fit latency and bus bandwidth to measured times.

    Least squares on `t = steps * latency + edge_bytes / bandwidth`, weighted by 1/t so that small messages decide the
    latency and large ones the bandwidth. If that makes the latency negative it is 0, and the bandwidth is fitted alone.

    Args:
        collective: which.
        size: ranks of the group.
        samples: (message bytes S, seconds), at least two different sizes.

    Example:
        >>> rate = fit_rate("all_gather", 3, [(3_000, 2e-6 + 2e-6), (3_000_000, 2e-6 + 2e-3)])
        >>> round(rate.latency_us, 6), round(rate.bytes_per_s / 1e9, 6)
        (1.0, 1.0)
    """
    if len({s for s, _ in samples}) < 2:
        raise ValueError(f"samples: got sizes {sorted({s for s, _ in samples})}, expected at least two different ones")
    k = ring_steps(collective, size)
    rows = torch.tensor([[k / t, edge_bytes(collective, size, s) / t] for s, t in samples], dtype=torch.float64)
    scale = rows.abs().amax(dim=0)
    solution = torch.linalg.lstsq(rows / scale, torch.ones(len(samples), 1, dtype=torch.float64)).solution[:, 0] / scale
    latency, per_byte = float(solution[0]), float(solution[1])
    if latency < 0 or per_byte <= 0:
        alone = rows[:, 1]
        latency, per_byte = 0.0, float(alone.sum() / alone.square().sum())
    return Rate(bytes_per_s=1 / per_byte, latency_us=latency * 1e6)


def measure_cluster(
    base: ClusterSpec,
    *,
    device: torch.device | str = "cpu",
    sizes: Sequence[int] = (64 * 1024, 16 * 2**20),
    repeats: int = 5,
    record: list[Sample] | None = None,
) -> ClusterSpec:
    """`base` with its tiers' rates replaced by measurements; every rank of the world calls it.

    A tier is measured on groups that cross only it: all GPUs of a domain; GPUs of equal index, one from each domain of
    a zone; GPUs of equal place, one from each zone. All groups run at once, as they do in training, so contention is in
    the figures. Every rank returns the same spec (the median over repeats of the slowest rank's time).

    Args:
        base: its shape must be the world's; its other figures are kept.
        device: where the buffers live.
        sizes: message bytes S, two or more.
        repeats: timed runs per size, after two to warm up.
        record: filled with every measured time and what the fitted rate says of it (this rank's view).

    Raises:
        ValueError: no process group, or the shape is not the world's.
    """
    if not dist.is_initialized() or dist.get_world_size() != base.num_gpus:
        got = dist.get_world_size() if dist.is_initialized() else 0
        raise ValueError(
            f"base: got {base.num_gpus} GPUs, expected the {got} ranks of the initialised world; use "
            f"base.resized({got})"
        )
    target = torch.device(device)
    tiers: dict[Tier, dict[Collective, Rate]] = {}
    for tier in base.needed_tiers():
        group = _tier_group(base, tier)
        tiers[tier] = {}
        for collective in COLLECTIVES:
            samples = [
                (
                    size,
                    _collective_seconds(_runner(collective, group, size, target), target, repeats, size),
                )
                for size in sizes
            ]
            size = dist.get_world_size(group)
            rate = tiers[tier][collective] = fit_rate(collective, size, samples)
            if record is not None:
                latency = ring_steps(collective, size) * rate.latency_us * 1e-6
                record += [
                    Sample(
                        tier=tier,
                        collective=collective,
                        nbytes=s,
                        seconds=t,
                        fitted_seconds=latency + edge_bytes(collective, size, s) / rate.bytes_per_s,
                    )
                    for s, t in samples
                ]
    # Least squares may round differently in two processes: all take rank 0's result.
    box = [tiers]
    dist.broadcast_object_list(box, src=0, device=target)
    tiers = box[0]
    what = (
        f"measured: {dist.get_backend()}, torch {torch.__version__}, {base.num_gpus} processes, {target.type}, "
        f"{time.strftime('%Y-%m-%d')}"
    )
    kept = {
        k: v
        for k, v in base.sources.items()
        if not any(k == f"tiers.{t}" or k.startswith(f"tiers.{t}.") for t in tiers)
    }
    return dataclasses.replace(
        base, tiers={**base.tiers, **tiers}, sources={**kept, **{f"tiers.{t}": what for t in tiers}}
    )


def _tier_group(base: ClusterSpec, tier: Tier) -> dist.ProcessGroup:
    ranks = torch.arange(base.num_gpus).reshape(base.num_zones, base.domains_per_zone, base.gpus_per_domain)
    dim = {"cross_zone": 0, "zone": 1, "nvlink": 2}[tier]
    lines = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    mine = next(line for line in lines if dist.get_rank() in line)
    return members_group(mine)


def slowest_seconds(
    run: Callable[[], object], device: torch.device, repeats: int, *, num_warmup: int = 2, num_calls: int = 1
) -> float:
    """Median over repeats of the slowest rank's time for one call; every rank of the world calls it.

    Args:
        run: what is timed; all ranks start it together.
        device: waited for before and after, if it is a GPU.
        repeats: timed calls.
        num_warmup: calls before them that do not count.
        num_calls: calls in a row that one timing covers: ranks do not start a timing together to the microsecond, and
            what a collective waits for that is not its own time.
    """
    times: list[float] = []
    for i in range(repeats + num_warmup):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(num_calls):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slowest = torch.tensor((time.perf_counter() - start) / num_calls, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if i >= num_warmup:
            times.append(float(slowest))
    return statistics.median(times)


def _collective_seconds(run: Callable[[], object], device: torch.device, repeats: int, nbytes: int) -> float:
    """One collective's time; on a GPU without that of the host to launch it, which a step hides."""
    if device.type != "cuda":
        return slowest_seconds(run, device, repeats, num_calls=max(1, min(8, 2**22 // nbytes)))
    num_calls = max(4, min(16, 2**24 // nbytes))
    times: list[float] = []
    for i in range(repeats + 2):
        dist.barrier()
        torch.cuda.synchronize(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_AHEAD_CYCLES)  # the device waits until all calls are queued
        begin.record()
        for _ in range(num_calls):
            run()
        end.record()
        end.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end) / num_calls * 1e-3, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if i >= 2:
            times.append(float(slowest))
    return statistics.median(times)


def _runner(
    collective: Collective, group: dist.ProcessGroup, nbytes: int, device: torch.device
) -> Callable[[], object]:
    n = dist.get_world_size(group)
    part = max(1, nbytes // 4 // n)
    full: Tensor = torch.rand(part * n, device=device)
    piece = torch.rand(part, device=device)
    out = torch.empty_like(full)
    root = dist.get_global_rank(group, 0)
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(out, piece, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(piece, full, group=group),
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_to_all": lambda: dist.all_to_all_single(out, full, group=group),
        "broadcast": lambda: dist.broadcast(full, src=root, group=group),
    }[collective]
