"""Benchmarks of several GPUs of one host; one process per GPU: `torchrun --nproc-per-node 2 -m gemworks.netmem.bench
--suite pair`.

Times are between events on the device, every rank runs the same calls, rank 0 reports.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from gemworks.netmem.bench.groups import FEW_CTAS, ctas, few_group, native, trace_of
from gemworks.netmem.bench.pair_fsdp import pair_fsdp
from gemworks.netmem.bench.rows import Rows, synchronize, timed_ms, timed_on_device_ms
from gemworks.netmem.collectives import QuantizedCollective
from gemworks.netmem.copy_engine import (
    CopyEngineAllGather,
    CopyEngineReduceScatter,
    copy_engine_problem,
    verify_copy_engines,
)
from gemworks.netmem.movers import CHUNK_BYTES
from gemworks.netmem.overlap import read_trace

MIB = 1 << 20
SUITES = ("pair_gather", "pair_reduce", "pair_contention", "pair_quantized", "pair_fsdp")
_TIMEOUT = datetime.timedelta(seconds=60)


def _gather(o: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(o, x, group=group)


def _reduce(o: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce(o, x, group=group)


def _values_of(rows: Rows, device: torch.device, run: Callable[[], Any], moved_bytes: float, smoke: bool) -> dict:
    ms, p20, p80 = timed_on_device_ms(run, device, 3 if smoke else 11, 1 if smoke else 4)
    return {"ms": ms, "ms_p20": p20, "ms_p80": p80, "gbps": moved_bytes / ms / 1e6, "dtype": "bf16"}


def pair_gather(rows: Rows, device: torch.device, smoke: bool) -> None:
    """All-gathers of the same tensors: NCCL, NCCL with few CTAs, copy engines."""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    impls: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {native(device): _gather}
    if (few := few_group(device)) is not None:
        impls[f"nccl {FEW_CTAS} CTAs"] = lambda o, x: _gather(o, x, few)
    problem = copy_engine_problem(group, device)
    for mib in (1,) if smoke else (64, 128, 256, 512):
        n = mib * MIB // 2 // world
        x = torch.randn(n, generator=torch.Generator(device).manual_seed(rank), device=device).bfloat16()
        o = torch.empty(world * n, dtype=torch.bfloat16, device=device)
        _gather(o, x)
        expected, moved = o.clone(), (world - 1) * n * 2
        times: dict[str, float] = {}
        for name, run in impls.items():
            o.fill_(float("nan"))
            run(o, x)
            assert torch.equal(o, expected), f"{name}: wrong result"
            values = _values_of(rows, device, lambda run=run, o=o, x=x: run(o, x), moved, smoke)
            times[name] = values["ms"]
            num_ctas = ctas(trace_of(lambda run=run, o=o, x=x: run(o, x), device)) if device.type == "cuda" else ""
            rows.add(
                "all_gather", shape=f"{mib}MiB", impl=name, setting=f"CTAs {num_ctas}" if num_ctas else "", **values
            )
        if problem is not None:
            rows.add("all_gather", shape=f"{mib}MiB", impl="copy engine", setting=f"not run: {problem}")
            continue
        comm = CopyEngineAllGather(group, device)
        buffer = comm.allocate((world * n,), dtype=torch.bfloat16, device=device)
        buffer.fill_(float("nan"))
        own = buffer[rank * n : (rank + 1) * n]
        own.copy_(x)
        comm(buffer, own, group)
        assert torch.equal(buffer, expected), "copy engine: wrong result"

        def push(comm: CopyEngineAllGather = comm, buffer: torch.Tensor = buffer, own: torch.Tensor = own) -> None:
            comm(buffer, own, group)

        values = _values_of(rows, device, push, moved, smoke)
        trace = trace_of(push, device)
        check = verify_copy_engines(trace)
        if rank == 0:
            for a in read_trace(trace).activities:
                us = a.end_us - a.start_us
                print(f"  trace {mib}MiB: {a.name[:60]} {us:.1f} us, {a.num_bytes} B, {a.num_ctas} CTAs")
        best = min(times, key=lambda k: times[k])
        rows.add(
            "all_gather",
            shape=f"{mib}MiB",
            impl="gemworks",
            setting=f"on copy engines: {check.ok}, barriers {check.barrier_us:.1f} us, "
            f"SM kernels {dict(check.sm_kernels)}",
            best_peer=best,
            ratio_to_best_peer=times[best] / values["ms"],
            **values,
        )


def pair_reduce(rows: Rows, device: torch.device, smoke: bool) -> None:
    """Reduce-scatters of the same tensors."""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    impls: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {native(device): _reduce}
    if (few := few_group(device)) is not None:
        impls[f"nccl {FEW_CTAS} CTAs"] = lambda o, x: _reduce(o, x, few)
    problem = copy_engine_problem(group, device)
    for mib in (1,) if smoke else (64, 256):
        n = mib * MIB // 2 // world
        x = torch.randn(world * n, generator=torch.Generator(device).manual_seed(rank), device=device).bfloat16()
        o = torch.empty(n, dtype=torch.bfloat16, device=device)
        everyone = torch.empty(world * world * n, dtype=torch.bfloat16, device=device)
        _gather(everyone, x)
        expected = everyone.view(world, world, n)[:, rank].float().sum(0)
        del everyone
        moved = (world - 1) * n * 2
        times: dict[str, float] = {}
        for name, run in impls.items():
            run(o, x)
            assert (o.float() - expected).norm() <= 2e-2 * expected.norm(), f"{name}: wrong result"
            values = _values_of(rows, device, lambda run=run, o=o, x=x: run(o, x), moved, smoke)
            times[name] = values["ms"]
            rows.add("reduce_scatter", shape=f"{mib}MiB", impl=name, **values)
        if problem is not None:
            rows.add("reduce_scatter", shape=f"{mib}MiB", impl="copy engine", setting=f"not run: {problem}")
            continue
        comm = CopyEngineReduceScatter(group, device)
        buffer = comm.allocate((world * n,), dtype=torch.bfloat16, device=device)
        out = comm.allocate((n,), dtype=torch.bfloat16, device=device)
        buffer.copy_(x)
        out.fill_(float("nan"))

        def pull(comm: Any = comm, out: torch.Tensor = out, buffer: torch.Tensor = buffer) -> None:
            comm(out, buffer, group, dist.ReduceOp.SUM)

        pull()
        assert torch.equal(out, expected.bfloat16()), "copy engine: wrong result"
        values = _values_of(rows, device, pull, moved, smoke)
        best = min(times, key=lambda k: times[k])
        rows.add(
            "reduce_scatter",
            shape=f"{mib}MiB",
            impl="gemworks",
            setting="pulled by copy engines, one local sum",
            best_peer=best,
            ratio_to_best_peer=times[best] / values["ms"],
            **values,
        )


def pair_contention(rows: Rows, device: torch.device, smoke: bool) -> None:
    """Copy-engine gathers while bulk copies go over the host link: do they wait for each other?"""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    n, bulk, num = 128 * MIB // world, 1 << 30, 16
    shape = f"{num}x256MiB beside {bulk}B"
    if (problem := copy_engine_problem(group, device)) is not None:
        rows.add("gather_beside_offload", shape=shape, setting=f"not run: {problem}")
        return
    comm = CopyEngineAllGather(group, device)
    buffer = comm.allocate((world * n,), dtype=torch.bfloat16, device=device)
    own = buffer[rank * n : (rank + 1) * n].normal_()
    host = {way: torch.ones(bulk, dtype=torch.uint8).pin_memory() for way in ("up", "down")}
    there = {way: torch.zeros(bulk, dtype=torch.uint8, device=device) for way in ("up", "down")}
    streams = {way: torch.cuda.Stream(device) for way in ("up", "down")}

    def once(ways: Sequence[str], gathers: int) -> tuple[float, dict[str, float], bool]:
        """Milliseconds of the gathers and of each bulk copy, and whether the latter outlasted the former."""
        synchronize(device)
        dist.barrier()
        synchronize(device)
        events = {way: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for way in ("gather", *ways)}
        for way in ways:
            source, target = (there[way], host[way]) if way == "up" else (host[way], there[way])
            with torch.cuda.stream(streams[way]):
                events[way][0].record()
                for start in range(0, bulk, CHUNK_BYTES):
                    end = start + CHUNK_BYTES
                    target[start:end].copy_(source[start:end], non_blocking=True)
                events[way][1].record()
        events["gather"][0].record()
        for _ in range(gathers):
            comm(buffer, own, group)
        events["gather"][1].record()
        events["gather"][1].synchronize()
        outlasted = all(not events[way][1].query() for way in ways)
        synchronize(device)
        times = {way: begin.elapsed_time(end) for way, (begin, end) in events.items()}
        return times.pop("gather"), times, outlasted

    once((), 2)
    alone_ms: dict[str, float] = {}
    for way in ("up", "down"):
        alone_ms[way] = sorted(once((way,), 0)[1][way] for _ in range(3))[1]
    for ways in ((), ("up",), ("down",), ("up", "down")):
        found = sorted((once(ways, num) for _ in range(5)), key=lambda f: f[0])
        ms = found[2][0]
        alone_ms.setdefault("gather", ms)
        bulks = [f"{way} {found[2][1][way]:.2f} ms, alone {alone_ms[way]:.2f}" for way in ways]
        text = "; ".join([*bulks, f"bulk under way to the end in {sum(f[2] for f in found)} of 5"])
        rows.add(
            "gather_beside_offload",
            shape=shape,
            setting=text if ways else "idle host link",
            ms=ms,
            ms_p20=found[1][0],
            ms_p80=found[3][0],
            gbps=num * (world - 1) * n * 2 / ms / 1e6,
            best_peer="idle host link",
            ratio_to_best_peer=alone_ms["gather"] / ms,
            dtype="bf16",
        )


def pair_quantized(rows: Rows, device: torch.device, smoke: bool) -> None:
    """`QuantizedCollective` against the plain collectives of the same tensors."""
    world = dist.get_world_size()
    x = torch.randn((1 if smoke else 256) * MIB // 2 // 512, 512, device=device).bfloat16()
    x = x[: x.shape[0] // world * world]
    out = torch.empty(x.shape[0] // world, 512, device=device, dtype=x.dtype)
    everyone = torch.empty(world * x.shape[0], 512, device=device, dtype=x.dtype)
    cases = {
        "reduce_scatter": (lambda: _reduce(out, x), lambda q: q.reduce_scatter(x), (world - 1) / world),
        "all_gather": (lambda: _gather(everyone, x), lambda q: q.all_gather(x), world - 1),
    }
    repeats = 3 if smoke else 11
    for op, (plain, coded, share) in cases.items():
        moved = share * x.numel() * 2

        def add(
            impl: str, setting: str, run: Callable[[], Any], peer_ms: float | None = None, op=op, moved=moved
        ) -> float:
            ms, p20, p80 = timed_ms(run, device, repeats)
            values = {} if peer_ms is None else {"best_peer": native(device), "ratio_to_best_peer": peer_ms / ms}
            values |= {"ms": ms, "ms_p20": p20, "ms_p80": p80, "gbps": moved / ms / 1e6, "dtype": "bf16"}
            rows.add(f"quantized_{op}", shape=str(tuple(x.shape)), impl=impl, setting=setting, **values)
            return ms

        plain_ms = add(native(device), "plain", plain)
        expected = (out if op == "reduce_scatter" else everyone).float()
        checks: tuple[tuple[str, Literal["always", "never"]], ...] = (
            ("bf16", "never"),
            ("fp8_row", "always"),
            ("fp8_row", "never"),
            ("mxfp8", "never"),
        )
        for codec, check in checks:
            q = QuantizedCollective(codec=codec, check=check)
            assert (coded(q).float() - expected).norm() <= 5e-2 * expected.norm(), f"{op} {codec}: wrong result"
            add("gemworks", f"{codec}, check {check}", lambda q=q, coded=coded: coded(q), plain_ms)


def run(
    make_rows: Callable[[torch.device, int], Rows], suites: Sequence[str], smoke: bool, limit_s: float = 120
) -> Rows:
    """Run the suites on all ranks; every rank has rows, those of rank 0 count. A suite that takes longer than the limit
    ends the process, after the stacks of all its threads.
    """
    suites_by_name = {f.__name__: f for f in (pair_gather, pair_reduce, pair_contention, pair_quantized, pair_fsdp)}
    on_gpu = torch.cuda.is_available() and not smoke
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        # the communicator is made now, so that symmetric memory finds it
        dist.init_process_group("nccl", device_id=device, timeout=_TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        rows = make_rows(device, dist.get_world_size())
        dist.barrier()
        for suite in suites:
            # a rank that fails leaves the others in a barrier: say where everybody is, and end
            faulthandler.dump_traceback_later(limit_s, exit=True)
            suites_by_name[suite](rows, device, smoke)
            faulthandler.cancel_dump_traceback_later()
        return rows
    except BaseException:
        traceback.print_exc()  # first: to leave the group may take as long as the others wait in a barrier
        raise
    finally:
        dist.destroy_process_group()
