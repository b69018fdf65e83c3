"""The two-GPU benchmark's steps run (on gloo, untimed), and exposed time is read rightly from a trace."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from gemworks.parallel import bench, gpu_bench
from gemworks.parallel.exposed import Exposure, exposure
from gemworks.parallel.measured_rows import BENCH_COLUMNS
from parallel_spawn import spawn


def _kernel(name: str, start: float, us: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": us}


def test_exposed_time_is_what_no_kernel_and_no_copy_covers() -> None:
    events = [
        _kernel("ncclDevKernel_AllGather_RING_LL(x)", 0, 100),
        _kernel("gemm", 20, 30),
        _kernel("gemm2", 40, 20),
        _kernel("Memcpy DtoD", 90, 5, "gpu_memcpy"),
        _kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", 200, 50),
        _kernel("ncclDevKernel_SendRecv(x)", 300, 10),
        _kernel("gemm", 300, 10),
        _kernel("cudaLaunchKernel", 0, 1000, "cuda_runtime"),
        {"ph": "f", "cat": "kernel", "name": "ncclDevKernel_AllGather", "ts": 0},
    ]
    found = exposure(events, num_steps=2)
    assert found["all_gather"] == Exposure(calls=0.5, ms=0.05, exposed_ms=(100 - 40 - 5) / 2e3)
    assert found["reduce_scatter"].exposed_ms == pytest.approx(0.025)
    assert found["all_to_all"].exposed_ms == 0.0
    assert found["compute"].ms == pytest.approx((40 + 5 + 10) / 2e3)


def _bench(rank: int, world: int) -> list[dict[str, Any]]:
    def timed(run, repeats: int = 2) -> dict[str, float]:
        start = time.perf_counter()
        run()
        run()
        return {"ms": 1e3 * (time.perf_counter() - start)}

    gpu_bench._cuda_ms = timed
    gpu_bench.traced = lambda run: run() or {"all_gather": Exposure(calls=1, ms=1.0, exposed_ms=0.5)}
    device = torch.device("cpu")
    return (
        gpu_bench.fsdp_rows(world, device, n=2, width=16, sizes=(8,))
        + gpu_bench.expert_rows(world, device, tokens=8, width=16)
        + gpu_bench.table_rows(world, device, tokens=8, width=16, dim=4, num_rows=64, per_bag=3)
    )


@pytest.mark.dist
def test_every_step_of_the_gpu_section_runs() -> None:
    rows = spawn(_bench, 2)[0]
    ops = [r["op"] for r in rows]
    assert ops.count("gpu step fsdp") == 2
    assert ops.count("gpu experts spread") == 2
    assert ops.count("gpu step tables") == 4
    assert ops.count("gpu exposed all_gather") == 2 + 2 + 4
    assert all(set(r) <= set(BENCH_COLUMNS) for r in rows)
    assert all(r["num_gpus"] == 1 for r in rows if r["op"].endswith("alone"))


def test_parts_run_in_the_order_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(gpu_bench, "start_nccl", lambda: torch.device("cpu"))
    monkeypatch.setattr(gpu_bench, "ceilings", lambda device: {"copy_gbps": 1.0})
    monkeypatch.setattr(gpu_bench.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(gpu_bench.dist, "destroy_process_group", lambda: None)
    parts = {name: lambda world, device, n=name: ran.append(n) or [{"op": n}] for name in gpu_bench.PARTS}
    monkeypatch.setattr(gpu_bench, "PARTS", parts)
    assert list(gpu_bench.gpu_rows(["fsdp", "rates"])) == [
        ([{"copy_gbps": 1.0, "op": "fsdp"}], 2),
        ([{"copy_gbps": 1.0, "op": "rates"}], 2),
    ]
    assert len(list(gpu_bench.gpu_rows())) == 4
    assert ran == ["fsdp", "rates", "rates", "experts", "tables", "fsdp"]


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(["gpu", "--gpu-parts", "fsdp", "fsdq"])
    assert stopped.value.code == 2
    assert "unknown --gpu-parts ['fsdq']" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_a_wrong_answer_is_not_timed(wrong: float) -> None:
    right = torch.ones(4)
    gpu_bench.check_close("experts", 1.01 * right, right)
    with pytest.raises(RuntimeError, match=r"experts: relative error .* not timed"):
        gpu_bench.check_close("experts", wrong * right, right)
