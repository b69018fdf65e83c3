"""Predicted against measured step time on the devices at hand: `torchrun ... -m gemworks.parallel.validate --out DIR`.

Blocks are timed on one GPU at three sizes, the host's part of a step on narrow blocks, where nothing
else takes long, and how much a collective slows the compute beside it on one sharded step (split "calibrate"); the
tiers are measured. From these alone the simulator predicts whole steps of other sizes, depths and plans (split
"validate"), which are then measured. Layers are the large matrix products of a GEM-like block; steps are forward and
backward without the optimizer. With one process, depths take the place of plans.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from gemworks.parallel import presets
from gemworks.parallel.cluster import ClusterSpec
from gemworks.parallel.fsdp import FsdpPolicy, apply_fsdp
from gemworks.parallel.gpu_bench import start_nccl
from gemworks.parallel.lengths import LengthLaw
from gemworks.parallel.measure import measure_cluster, slowest_seconds
from gemworks.parallel.measured_rows import ERROR_COLUMNS, merge_rows, stamp
from gemworks.parallel.meshes import build_meshes
from gemworks.parallel.plan import ParallelPlan
from gemworks.parallel.profile import LayerProfile, ModelProfile
from gemworks.parallel.simulation import simulate
from gemworks.parallel.stacks import ExpertStack, Stack, on_device
from gemworks.parallel.step_graph import SimulationConfig
from torch import Tensor, nn

Kind = Literal["alone", "shard", "replica", "expert"]
HOST_WIDTH, HOST_TOKENS, HOST_DEPTHS = 128, 64, (3, 6)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step: `depth` blocks of `width` on `tokens` rows, run as `kind` says."""

    kind: Kind
    depth: int
    width: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.depth}x{self.width} tokens {self.tokens}"


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """A row of simulator_error.csv; `error_pct` is (predicted - measured) / measured, `num_gpus` those of the run."""

    config: str
    split: Literal["calibrate", "validate"]
    predicted_ms: float
    measured_ms: float
    error_pct: float
    num_gpus: int


Times = tuple[float, float, float, float]  # of a block forward and backward, of the loss forward and backward, ms


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Of the host, ms.

    Attributes:
        forward, backward: to launch a block.
        forward_once, backward_once: of a step, whatever its depth: its first block's gather, the loss, the end of
            backward. A step begins on an idle device, so some of it nothing hides.
    """

    forward: float = 0.0
    backward: float = 0.0
    forward_once: float = 0.0
    backward_once: float = 0.0


class Timer:
    """Times steps of any length with one budget, the GPU warm: clocks fall within a fraction of a second of work.

    Args:
        device: of this rank.
        repeats: at least so many timed calls.
        budget_s: and at least so long, up to 25 calls; half of it before, to warm up.
    """

    def __init__(self, device: torch.device, repeats: int, budget_s: float) -> None:
        self.device, self.repeats, self.budget_s = device, repeats, budget_s

    def ms(self, run: Callable[[], object]) -> float:
        """Median over calls of the slowest rank's time."""
        once = slowest_seconds(run, self.device, 1)
        calls = max(self.repeats, min(25, int(self.budget_s / once)))
        return 1e3 * slowest_seconds(run, self.device, calls, num_warmup=1 + min(12, int(self.budget_s / 2 / once)))


class LayerTimes:
    """Forward and backward of one block, and of the loss, as lines between sizes; measured on one device.

    Two depths separate the block from the loss: none, and several. Clocks change between timings by some percent, and a
    difference of two depths that are both large would multiply that.

    Attributes:
        points: (tokens, depth, forward ms, forward + backward ms), as measured.
    """

    def __init__(
        self,
        kind: Literal["dense", "expert"],
        width: int,
        sizes: Sequence[int],
        timer: Timer,
        dtype: torch.dtype,
        depths: tuple[int, int] = (0, 4),
    ) -> None:
        device = timer.device
        self.kind, self.width = kind, width
        self.points: list[tuple[int, int, float, float]] = []
        for depth in depths:

            def make(depth: int = depth) -> nn.Module:
                return Stack(depth, width) if kind == "dense" else ExpertStack(depth, width, None)

            stack = on_device(make, device, dtype)
            for tokens in sizes:
                x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)

                def forward(x: Tensor = x, stack: nn.Module = stack) -> Tensor:
                    return stack(x).float().pow(2).mean()

                def both(stack: nn.Module = stack, forward: Callable[[], Tensor] = forward) -> None:
                    forward().backward()
                    stack.zero_grad(set_to_none=True)

                ahead, whole = timer.ms(forward), timer.ms(both)
                self.points.append((tokens, depth, ahead, whole))

    def at(self, tokens: int) -> Times:
        """By the line through the two measured sizes around it, or nearest to it, ms."""
        by_size: dict[int, list[tuple[int, float, float]]] = {}
        for size, depth, ahead, whole in self.points:
            by_size.setdefault(size, []).append((depth, ahead, whole - ahead))
        columns: list[tuple[int, Times]] = []
        for size, ((d0, f0, b0), (d1, f1, b1)) in sorted(by_size.items()):
            f, b = (f1 - f0) / (d1 - d0), (b1 - b0) / (d1 - d0)
            columns.append((size, (f, b, f0 - d0 * f, b0 - d0 * b)))
        i = min(sum(size <= tokens for size, _ in columns[1:]), len(columns) - 2)
        (s0, low), (s1, high) = columns[i : i + 2]
        share = (tokens - s0) / (s1 - s0)
        f, b, lf, lb = (p + share * (q - p) for p, q in zip(low, high, strict=True))
        return f, b, lf, lb


def host_times(kind: Kind, timer: Timer, dtype: torch.dtype) -> HostTimes:
    """What the host needs: steps so small that the device waits for it, at two depths."""
    found: list[tuple[float, float]] = []
    for depth in HOST_DEPTHS:
        case = Case(kind=kind, depth=depth, width=HOST_WIDTH, tokens=HOST_TOKENS)
        forward, step = case_steps(case, timer.device, dtype)
        ahead, whole = timer.ms(forward), timer.ms(step)
        found.append((ahead, whole - ahead))
    (f0, b0), (f1, b1) = found
    blocks = HOST_DEPTHS[1] - HOST_DEPTHS[0]
    f, b = max(0.0, (f1 - f0) / blocks), max(0.0, (b1 - b0) / blocks)
    # Of the deeper one, whose depth is nearer to a step's: a slope that is off is made up for there.
    return HostTimes(
        forward=f,
        backward=b,
        forward_once=max(0.0, f1 - HOST_DEPTHS[1] * f),
        backward_once=max(0.0, b1 - HOST_DEPTHS[1] * b),
    )


def predict_ms(
    case: Case,
    times: Times,
    cluster: ClusterSpec,
    dtype: torch.dtype,
    *,
    host: HostTimes | None = None,
    sm_slowdown: float | None = None,
) -> float:
    """The simulator's step time of a case.

    Args:
        case: what is run.
        times: of the block at the case's tokens (for experts: of the joint batch), and of the loss at the case's.
        cluster: with measured tiers.
        dtype: of weights on the wire; gradients travel in float32 when sharded, in `dtype` when replicated.
        host: None: takes no time.
        sm_slowdown: of compute beside a collective; None: the simulator's own.
    """
    world = 1 if case.kind == "alone" else cluster.num_gpus
    params = 8 * case.width**2
    expert = case.kind == "expert"
    host = host or HostTimes()
    forward, backward, loss_forward, loss_backward = times
    layers = tuple(
        LayerProfile(
            name=f"block{i}",
            params=params * (world if expert else 1),
            flops=2.0 * params * case.tokens,
            # The loss belongs to the last block.
            forward_us=1e3 * (forward + (loss_forward if i == case.depth - 1 else 0.0)),
            backward_us=1e3 * (backward + (loss_backward if i == case.depth - 1 else 0.0)),
            length_share=0.0,
            exchange_bytes=case.tokens * case.width * dtype.itemsize if expert else 0.0,
            kind="expert" if expert else "dense",
            forward_host_us=1e3 * (host.forward + (host.forward_once if i == 0 else 0.0)),
            backward_host_us=1e3 * (host.backward + (host.backward_once if i == 0 else 0.0)),
        )
        for i in range(case.depth)
    )
    model = ModelProfile(
        name=case.name,
        layers=layers,
        num_experts=world if expert else 0,
        weight_bytes=dtype.itemsize,
        gradient_bytes=4 if case.kind == "shard" else dtype.itemsize,
        optimizer_us_per_million=0.0,
        law=LengthLaw(name="uniform", max_len=1),
    )
    plan = ParallelPlan.for_world(world, shard=world if case.kind == "shard" else 1, expert=world if expert else None)
    config = SimulationConfig(balance="none", overlap_exchange=False)
    if sm_slowdown is not None:
        config = dataclasses.replace(config, sm_slowdown=sm_slowdown)
    return simulate(plan, model, cluster.resized(world), config, check_memory=False).step_us / 1e3


def fit_slowdown(predict: Callable[[float], float], measured_ms: float, high: float = 4.0) -> float:
    """The slowdown of compute beside collectives with which the prediction is the measured time, in 0..high.

    >>> round(fit_slowdown(lambda slowdown: 10 + 4 * slowdown, 11.0), 3)
    0.25
    """
    low = 0.0
    if predict(low) >= measured_ms:
        return low
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if predict(middle) < measured_ms else (low, middle)
    return low


def case_steps(
    case: Case, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward alone and a whole step of a case, ready to be timed."""
    world = dist.get_world_size()
    x = torch.randn(case.tokens, case.width, device=device, dtype=dtype, requires_grad=True)
    torch.manual_seed(0)
    if case.kind == "expert":
        model: nn.Module = on_device(lambda: ExpertStack(case.depth, case.width, dist.group.WORLD), device, dtype)
    elif case.kind == "alone":
        model = on_device(lambda: Stack(case.depth, case.width), device, dtype)
    else:
        stored = torch.float32 if case.kind == "shard" else dtype
        model = on_device(lambda: Stack(case.depth, case.width), device, stored)
        plan = ParallelPlan.for_world(world, shard=world if case.kind == "shard" else 1)
        meshes = build_meshes(plan, presets.h200_host(8).resized(world), device_type=device.type)
        policy = FsdpPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        apply_fsdp(model, meshes, [f"blocks.{i}" for i in range(case.depth)], policy)

    def forward() -> Tensor:
        return model(x).float().pow(2).mean()

    def step() -> None:
        forward().backward()
        model.zero_grad(set_to_none=True)

    return forward, step


def validate(
    device: torch.device,
    *,
    widths: Sequence[int] = (2048, 4096),
    calibrate_tokens: Sequence[int] = (4096, 10240, 28672),
    validate_tokens: Sequence[int] = (6144, 12288),
    depths: Sequence[int] | None = None,
    repeats: int = 5,
    budget_s: float = 0.12,
    report: Callable[[Sequence[ErrorRow]], None] = lambda rows: None,
) -> tuple[list[ErrorRow], ClusterSpec]:
    """Calibrate, predict, measure; every rank of the world calls it and gets the same rows but for rounding.

    Args:
        device: of this rank.
        widths, calibrate_tokens, validate_tokens: of the blocks.
        depths: of the steps that are predicted; None: 6, on one process 6 and 10.
        repeats, budget_s: of `Timer`.
        report: called with every new row, so that a run that is cut off leaves what it has.

    Returns:
        Rows of both splits, and the cluster with measured tiers.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    world = dist.get_world_size()
    sizes = (2**20, 2**25, 2**28) if device.type == "cuda" else (2**14, 2**20)
    timer = Timer(device, repeats, budget_s)
    cluster = presets.h200_host(8).resized(world)
    if world > 1:
        cluster = measure_cluster(cluster, device=device, sizes=sizes)
    rows: list[ErrorRow] = []

    def add(config: str, split: Literal["calibrate", "validate"], predicted: float, measured: float) -> None:
        rows.append(error_row(config, split, predicted, measured, world))
        report(rows[-1:])

    kinds: tuple[Kind, ...] = ("alone",) if world == 1 else ("shard", "replica", "expert")
    hosts: dict[Kind, HostTimes] = {}
    if world > 1:
        hosts = {kind: host_times(kind, timer, dtype) for kind in kinds}
        for kind, host in hosts.items():
            block, once = host.forward + host.backward, host.forward_once + host.backward_once
            add(f"{kind} launch of a block", "calibrate", block, block)
            add(f"{kind} launch of a step itself", "calibrate", once, once)
    for width in widths:
        layers = {"dense": LayerTimes("dense", width, calibrate_tokens, timer, dtype)}
        if "expert" in kinds:
            layers["expert"] = LayerTimes("expert", width, calibrate_tokens, timer, dtype)
        for layer in layers.values():
            for tokens, at_depth, _, whole in layer.points:
                f, b, lf, lb = layer.at(tokens)
                config = f"{layer.kind} blocks {at_depth}x{width} tokens {tokens}"
                add(config, "calibrate", at_depth * (f + b) + lf + lb, whole)

        def predict(case: Case, slowdown: float | None, layers: Mapping[str, LayerTimes] = layers) -> float:
            layer = layers["expert" if case.kind == "expert" else "dense"]
            # An expert sees the joint batch; each rank runs one expert.
            joint = case.tokens * (world if case.kind == "expert" else 1)
            times = (*layer.at(joint)[:2], *layer.at(case.tokens)[2:])
            return predict_ms(case, times, cluster, dtype, host=hosts.get(case.kind), sm_slowdown=slowdown)

        slowdown: float | None = None
        if world > 1:
            # Where the device is what a step waits for, or else at the largest size.
            blocks_ms = {tokens: sum(layers["dense"].at(tokens)[:2]) for tokens in calibrate_tokens}
            long_enough = [
                t for t, ms in blocks_ms.items() if ms > 1.5 * (hosts["shard"].forward + hosts["shard"].backward)
            ]
            box: list[Any] = [min(long_enough, default=calibrate_tokens[-1])]
            dist.broadcast_object_list(box, src=0, device=device)  # ranks' own times differ by their rounding
            beside = Case(kind="shard", depth=4, width=width, tokens=box[0])
            measured = timer.ms(case_steps(beside, device, dtype)[1])
            slowdown = fit_slowdown(lambda s, case=beside, predict=predict: predict(case, s), measured)
            # All ranks predict alike.
            box = [slowdown]
            dist.broadcast_object_list(box, src=0, device=device)
            (slowdown,) = box
            add(f"{beside.name} (slowdown {slowdown:.3f})", "calibrate", predict(beside, slowdown), measured)
        for tokens in validate_tokens:
            for kind in kinds:
                for depth in depths or ((6, 10) if world == 1 else (6,)):
                    case = Case(kind=kind, depth=depth, width=width, tokens=tokens)
                    measured = timer.ms(case_steps(case, device, dtype)[1])
                    add(case.name, "validate", predict(case, slowdown), measured)
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
    return rows, cluster


def error_row(
    config: str, split: Literal["calibrate", "validate"], predicted: float, measured: float, num_gpus: int
) -> ErrorRow:
    """A row whose error is computed."""
    return ErrorRow(
        config=config,
        split=split,
        predicted_ms=predicted,
        measured_ms=measured,
        error_pct=100 * (predicted - measured) / measured if predicted != measured else 0.0,
        num_gpus=num_gpus,
    )


def write_errors(path: Path, rows: Sequence[ErrorRow], same: Mapping[str, object]) -> None:
    """Put rows into simulator_error.csv; rows of other configurations stay.

    Args:
        path: of the file.
        rows: new.
        same: columns that all rows share, from `measured_rows.stamp`.
    """
    found = [
        {**same, **dataclasses.asdict(r), "ms": r.measured_ms, "num_gpus": r.num_gpus, "bwd_factor": 2} for r in rows
    ]
    merge_rows(path, ERROR_COLUMNS, found, key=("config", "num_gpus", "gpu"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run under torchrun with one process per GPU; writes simulator_error.csv and cluster.toml."""
    parser = argparse.ArgumentParser(prog="python -m gemworks.parallel.validate", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        parser.error(
            "needs CUDA and torchrun: torchrun --nproc-per-node 2 -m gemworks.parallel.validate --out docs/measured"
        )
    device = start_nccl()
    lead, world = dist.get_rank() == 0, dist.get_world_size()

    def report(rows: Sequence[ErrorRow]) -> None:
        if lead:
            write_errors(args.out / "simulator_error.csv", rows, stamp("gemworks.parallel.validate", world))
            for r in rows:
                text = f"{r.config:36} {r.split:9} {r.predicted_ms:9.3f} {r.measured_ms:9.3f} {r.error_pct:+7.2f} %"
                print(text, flush=True)

    rows, cluster = validate(device, report=report)
    if lead:
        cluster.to_toml(args.out / f"cluster_x{world}.toml")
        errors = sorted(abs(r.error_pct) for r in rows if r.split == "validate")
        print(f"validate: median {statistics.median(errors):.2f} %, worst {errors[-1]:.2f} %")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
