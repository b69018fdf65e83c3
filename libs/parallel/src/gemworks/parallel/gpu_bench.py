"""What overlaps on the GPUs at hand, under torchrun: rates of collectives, and their exposed time in whole steps.

Exposed time is given twice: the step's time minus that of the same step on one GPU (rows "gpu step ..."), and per kind
of collective from a profiler trace (rows "gpu exposed ...").
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gemworks.parallel import presets
from gemworks.parallel.embeddings import FeatureSpec, FullyShardedEmbeddings
from gemworks.parallel.experts import EnsembleExperts
from gemworks.parallel.exposed import traced
from gemworks.parallel.fsdp import FsdpPolicy, apply_fsdp
from gemworks.parallel.measure import measure_cluster
from gemworks.parallel.meshes import build_meshes
from gemworks.parallel.plan import ParallelPlan
from gemworks.parallel.sparse_optim import RowWiseAdagrad
from gemworks.parallel.stacks import Block, Stack, on_device
from gemworks.parallel.tables import TableSpec
from torch import Tensor, nn

TIMEOUT = timedelta(seconds=60)


def start_nccl() -> torch.device:
    """This process' GPU, after joining torchrun's world with a time-out of a minute.

    Raises:
        ValueError: no CUDA device, or not under torchrun.
    """
    if not torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        raise ValueError(
            "needs CUDA and torchrun; run `torchrun --nproc-per-node 2 -m gemworks.parallel.bench gpu --out DIR`"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=TIMEOUT)
    return device


def gpu_rows(parts: Sequence[str] = ()) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Rows of one part after the other, and the number of GPUs; every rank of torchrun runs through it.

    Args:
        parts: of `PARTS`, in the order to run them; none: all.
    """
    device = start_nccl()
    world = dist.get_world_size()
    same = ceilings(device)
    for part in parts or PARTS:
        yield [{**same, **row} for row in PARTS[part](world, device)], world
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def _rate_rows(world: int, device: torch.device) -> list[dict[str, Any]]:
    spec = measure_cluster(presets.h200_host(world), device=device, sizes=(2**20, 2**28), repeats=9)
    return [
        {
            "op": f"gpu {collective}",
            "shape": "1-256 MiB",
            "setting": f"fitted; latency {rate.latency_us:.1f} us",
            "impl": "nccl",
            "gbps": rate.bytes_per_s / 1e9,
        }
        for collective, rate in spec.tiers.get("nvlink", {}).items()
    ]


def ceilings(device: torch.device) -> dict[str, float]:
    """This GPU's device copy (read + write, GB/s) and bf16 matmul rate (TFLOP/s, 8192 cubed, random data)."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**28, device=device)
    target = torch.empty_like(source)
    return {
        "bf16_tflops": 2 * 8192**3 / _cuda_ms(lambda: a @ b)["ms"] / 1e9,
        "copy_gbps": 2 * 4 * 2**28 / _cuda_ms(lambda: target.copy_(source))["ms"] / 1e6,
    }


def _cuda_ms(run: Callable[[], object], repeats: int = 12) -> dict[str, float]:
    for _ in range(3):
        run()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for _ in range(repeats):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    times.sort()
    return {
        "ms": statistics.median(times),
        "ms_p20": times[repeats // 5],
        "ms_p80": times[-1 - repeats // 5],
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def check_close(what: str, got: Tensor, expected: Tensor, tolerance: float = 0.02) -> None:
    """Refuse to time what is wrong.

    Args:
        what: names the case.
        got: what the distributed form gives.
        expected: what one process gives, same shape.
        tolerance: of the norm of the difference over the norm of `expected`; bf16 products summed in another order.

    Raises:
        RuntimeError: beyond the tolerance, or not finite.
    """
    error = float((got.float() - expected.float()).norm() / expected.float().norm())
    if not error <= tolerance:
        raise RuntimeError(f"{what}: relative error {error:.3g} against one process, at most {tolerance:g}; not timed")


def _row(op: str, shape: str, setting: str, t: dict[str, float], flops: float, base_ms: float | None) -> dict[str, Any]:
    return {
        "op": op,
        "shape": shape,
        "setting": setting,
        "impl": "gemworks",
        "dtype": "bf16",
        "tflops": flops / t["ms"] / 1e9,
        "bwd_factor": 2,
        **({"num_gpus": 1} if base_ms is None else {"exposed_ms": t["ms"] - base_ms}),
        **t,
    }


def _exposed_rows(shape: str, setting: str, run: Callable[[], object]) -> list[dict[str, Any]]:
    return [
        {
            "op": f"gpu exposed {kind}",
            "shape": shape,
            "setting": f"{setting}; {e.calls:.0f} kernels a step, from the trace",
            "impl": "gemworks",
            "exposed_ms": e.exposed_ms,
            "ms": e.ms,
        }
        for kind, e in traced(run).items()
        if kind != "compute"
    ]


def fsdp_rows(
    world: int, device: torch.device, *, n: int = 8, width: int = 4096, sizes: Sequence[int] = (4096, 16384)
) -> list[dict[str, Any]]:
    """A stack of `n` blocks sharded over all GPUs, with and without prefetch, beside the same stack on one."""
    rows: list[dict[str, Any]] = []
    for tokens in sizes:
        torch.manual_seed(0)
        shape = f"{n} blocks {tokens}x{width}"
        x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
        torch.manual_seed(0)  # as of the sharded ones below
        alone = on_device(lambda: Stack(n, width), device, torch.bfloat16)

        def step(model: nn.Module, x: Tensor = x) -> None:
            model(x).float().pow(2).mean().backward()
            model.zero_grad(set_to_none=True)

        base = _cuda_ms(lambda m=alone: step(m))
        with torch.no_grad():
            expected = alone(x)
        flops = 3 * 2 * tokens * 8 * width * width * n
        rows.append(_row("gpu step alone", shape, "1 GPU", base, flops, None))
        del alone
        for prefetch in (True, False):
            torch.manual_seed(0)
            model = on_device(lambda: Stack(n, width), device)
            meshes = build_meshes(
                ParallelPlan.for_world(world, shard=world), presets.h200_host(world), device_type=device.type
            )
            policy = FsdpPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, prefetch=prefetch)
            apply_fsdp(model, meshes, [f"blocks.{i}" for i in range(n)], policy)
            setting = f"FSDP, prefetch {'on' if prefetch else 'off'}"
            with torch.no_grad():
                check_close(f"{shape}, {setting}", model(x), expected)
            got = _cuda_ms(lambda m=model: step(m))
            rows.append(_row("gpu step fsdp", shape, setting, got, flops, base["ms"]))
            rows += _exposed_rows(shape, setting, lambda m=model: step(m))
            del model
            torch.cuda.empty_cache()
    return rows


def expert_rows(world: int, device: torch.device, *, tokens: int = 8192, width: int = 2048) -> list[dict[str, Any]]:
    """Experts beside a dense block: all on one GPU, and one on each, with the exchange before or behind the block."""
    shape = f"{world} experts {tokens}x{width}"
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)

    def make(i: int) -> nn.Module:
        torch.manual_seed(i + 1)
        return on_device(lambda: Block(width), device, torch.bfloat16)

    side = make(-1)
    local = EnsembleExperts(make, world).to(device)
    spread = EnsembleExperts(make, world, dist.group.WORLD).to(device)
    counts = [tokens] * world

    def apart(experts: EnsembleExperts) -> None:
        (experts(x, counts) + side(x)).float().pow(2).mean().backward()

    def overlapped(experts: EnsembleExperts) -> None:
        sent = experts.start(x, counts)
        beside = side(x)
        (experts.finish(experts.run(sent)) + beside).float().pow(2).mean().backward()

    with torch.no_grad():
        check_close(shape, spread(x, counts), local(x, counts))
    flops = 3 * 2 * tokens * 8 * width * width * (world + 1)
    base = _cuda_ms(lambda: apart(local))
    rows = [_row("gpu experts alone", shape, "1 GPU", base, flops, None)]
    for name, run in (("one after the other", apart), ("overlapped", overlapped)):
        got = _cuda_ms(lambda r=run: r(spread))
        rows.append(_row("gpu experts spread", shape, f"experts {name}", got, flops, base["ms"]))
        rows += _exposed_rows(shape, f"experts {name}", lambda r=run: r(spread))
    return rows


def table_rows(
    world: int,
    device: torch.device,
    *,
    tokens: int = 8192,
    width: int = 2048,
    dim: int = 128,
    num_rows: int = 2**20,
    per_bag: int = 32,
) -> list[dict[str, Any]]:
    """A dense stack, tables, a dense stack; the tables' collectives may hide behind either."""
    torch.manual_seed(0)
    bottom, top, project = (
        on_device(make, device, torch.bfloat16)
        for make in (lambda: Stack(4, width), lambda: Stack(4, width), lambda: nn.Linear(dim, width))
    )
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    tables = [TableSpec(name=f"t{i}", num_rows=num_rows, dim=dim, sharding="row_wise") for i in range(2)]
    features = [FeatureSpec(name=f"f{i}", table=f"t{i}", pooling="sum") for i in range(2)]
    offsets = torch.arange(0, tokens * per_bag + 1, per_bag, device=device)
    batch = {f.name: (torch.randint(0, num_rows, (tokens * per_bag,), device=device), offsets) for f in features}

    def step(emb: FullyShardedEmbeddings, overlap: bool) -> None:
        if overlap:
            emb.prefetch()
        h = bottom(x)
        rows = emb(batch)
        y = top(h + project((rows["f0"] + rows["f1"]).to(torch.bfloat16)))
        if overlap:
            y = emb.gather_in_backward_of(y)
        y.float().pow(2).mean().backward()

    found: list[dict[str, Any]] = []
    flops = 3 * 2 * tokens * 8 * width * width * 8
    shape = f"2 tables {num_rows}x{dim}, {2 * tokens * per_bag} ids, 8 blocks {tokens}x{width}"
    for name, group, replica_shard, overlap in (
        ("tables whole on each GPU, averaged", 1, 1, False),
        ("table group over all GPUs", world, 1, False),
        ("replicas sharded over all GPUs", 1, world, False),
        ("replicas sharded over all GPUs, overlapped", 1, world, True),
    ):
        plan = ParallelPlan.for_world(world, shard=1, table_group=group, replica_shard=replica_shard)
        meshes = build_meshes(plan, presets.h200_host(world), device_type=device.type)
        emb = FullyShardedEmbeddings(
            tables,
            features,
            meshes,
            RowWiseAdagrad(lr=0.01),
            init=lambda t, rows: torch.full((len(rows), t.dim), 0.01),
            device=device,
        )
        with torch.no_grad():
            bags = emb(batch)["f0"]
        check_close(f"{shape}, {name}", bags, torch.full_like(bags, 0.01 * per_bag), 1e-5)
        got = _cuda_ms(lambda e=emb, o=overlap: step(e, o))
        # There is no one-GPU step with the same tables: what is exposed is the trace's.
        found.append({**_row("gpu step tables", shape, name, got, flops, 0.0), "exposed_ms": ""})
        found += _exposed_rows(shape, name, lambda e=emb, o=overlap: step(e, o))
        emb.settle()
        del emb
        torch.cuda.empty_cache()
    return found


PARTS: dict[str, Callable[[int, torch.device], list[dict[str, Any]]]] = {
    "rates": _rate_rows,
    "experts": expert_rows,
    "tables": table_rows,
    "fsdp": fsdp_rows,
}
