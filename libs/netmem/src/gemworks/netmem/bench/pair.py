"""Benchmarks of several GPUs of one host; one process per GPU: `torchrun --nproc-per-node 2 -m gemworks.netmem.bench
--suite pair`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from gemworks.netmem.bench.rows import Rows, synchronize, timed_ms
from gemworks.netmem.bench.stack import SMOKE, StackSize, make_stack
from gemworks.netmem.collectives import QuantizedCollective
from gemworks.netmem.copy_engine import (
    CopyEngineAllGather,
    copy_engine_all_gather,
    copy_engine_problem,
    few_ctas_options,
    verify_copy_engines,
)
from gemworks.netmem.overlap import overlap_report
from torch import nn

MIB = 1 << 20


def _gather_rows(rows: Rows, device: torch.device, smoke: bool, out: Path) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    impls: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {}
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    impls["nccl" if device.type == "cuda" else "gloo"] = lambda o, x: gather(o, x)
    problem = copy_engine_problem(group, device)
    if device.type == "cuda":
        few = dist.new_group(pg_options=few_ctas_options(4))
        impls["nccl 4 CTAs"] = lambda o, x: gather(o, x, group=few)
    for mib in (1,) if smoke else (64, 128, 256, 512):
        n = mib * MIB // 2 // world
        x = torch.full((n,), float(rank), dtype=torch.bfloat16, device=device)
        o = torch.empty(world * n, dtype=torch.bfloat16, device=device)
        times: dict[str, float] = {}
        for name, run in impls.items():
            run(o, x)
            assert o.view(world, n)[:, 0].tolist() == [float(r) for r in range(world)]
            times[name], p20, p80 = timed_ms(lambda run=run, o=o, x=x: run(o, x), device, 3 if smoke else 20)
            rows.add(
                "all_gather",
                shape=f"{mib}MiB",
                impl=name,
                ms=times[name],
                ms_p20=p20,
                ms_p80=p80,
                dtype="bf16",
                gbps=(world - 1) * n * 2 / times[name] / 1e6,
            )
        if problem is not None:
            rows.add("all_gather", shape=f"{mib}MiB", impl="copy engine", setting=f"not run: {problem}")
            continue
        comm = CopyEngineAllGather(group, device)
        buffer = comm.allocate((world * n,), dtype=torch.bfloat16, device=device)
        own = buffer[rank * n : (rank + 1) * n]
        own.copy_(x)
        comm(buffer, own, group)
        assert buffer.view(world, n)[:, 0].tolist() == [float(r) for r in range(world)]
        ms, p20, p80 = timed_ms(lambda comm=comm, buffer=buffer, own=own: comm(buffer, own, group), device, 20)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            comm(buffer, own, group)
            synchronize(device)
        path = out / f"copy_engine_{mib}mib_rank{rank}.json"
        prof.export_chrome_trace(str(path))
        check = verify_copy_engines(path)
        best = min(times, key=lambda k: times[k])
        rows.add(
            "all_gather",
            shape=f"{mib}MiB",
            impl="gemworks",
            setting=f"on copy engines: {check.ok}, SM kernels {dict(check.sm_kernels)}",
            ms=ms,
            ms_p20=p20,
            ms_p80=p80,
            dtype="bf16",
            gbps=(world - 1) * n * 2 / ms / 1e6,
            best_peer=best,
            ratio_to_best_peer=times[best] / ms,
        )


def _quantized_rows(rows: Rows, device: torch.device, smoke: bool) -> None:
    world = dist.get_world_size()
    x = torch.randn((1 if smoke else 64) * MIB // 2 // 512, 512, device=device, dtype=torch.bfloat16)
    for codec in ("bf16", "fp8_row", "mxfp8"):
        for check in ("always", "never"):
            q = QuantizedCollective(codec=codec, check=check)
            ms, p20, p80 = timed_ms(lambda q=q: q.reduce_scatter(x), device, 3 if smoke else 20)
            rows.add(
                "reduce_scatter",
                shape=str(tuple(x.shape)),
                setting=f"{codec}, check {check}",
                ms=ms,
                ms_p20=p20,
                ms_p80=p80,
                dtype="bf16",
                gbps=(world - 1) / world * x.numel() * 2 / ms / 1e6,
            )


def _fsdp_rows(rows: Rows, device: torch.device, size: StackSize, out: Path, repeats: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))
    losses = {}
    for impl in ("nccl" if device.type == "cuda" else "gloo", "copy engine"):
        model, batch = make_stack(size, device)
        for part in model.parts:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        setting = ""
        if impl == "copy engine":
            problem = copy_engine_problem(mesh.get_group(), device)
            if problem is not None:
                rows.add("fsdp_stack", shape=size.label, impl=impl, setting=f"not run: {problem}")
                continue
            copy_engine_all_gather(model, mesh.get_group())

        def step(model: nn.Module = model, batch: torch.Tensor = batch) -> torch.Tensor:
            loss = model(batch)
            loss.backward()
            return loss

        losses[impl] = step().item()
        assert len(set(losses.values())) == 1, losses
        ms, p20, p80 = timed_ms(step, device, repeats)
        activities = [
            torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
        ]
        with torch.profiler.profile(activities=activities) as prof:
            step()
            synchronize(device)
        path = out / f"fsdp_{impl.replace(' ', '_')}_rank{dist.get_rank()}.json"
        prof.export_chrome_trace(str(path))
        report = overlap_report(path).devices[0]
        if report.sm_share is not None:
            setting = f"SM share of communication {report.sm_share:.3f}"
        rows.add(
            "fsdp_stack",
            shape=size.label,
            impl=impl,
            setting=setting,
            ms=ms,
            ms_p20=p20,
            ms_p80=p80,
            exposed_ms=report.exposed_us / 1e3,
            dtype=str(batch.dtype),
        )


def run(make_rows: Callable[[torch.device, int], Rows], smoke: bool, out: Path) -> Rows | None:
    """Run on all ranks; returns the rows on rank 0."""
    on_gpu = torch.cuda.is_available() and not smoke
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        rows = make_rows(device, dist.get_world_size())
        _gather_rows(rows, device, smoke, out)
        _quantized_rows(rows, device, smoke)
        _fsdp_rows(rows, device, SMOKE if smoke else StackSize(), out, 3 if smoke else 20)
        return rows if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()
