"""What people read: the tables of the commands, as golden texts of 80 columns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gemworks.cli import diagnose, output
from gemworks.cli.app import run
from gemworks.cli.compare import compare, print_comparison
from gemworks.parallel.profile import gem_like

pytestmark = pytest.mark.reference
Golden = Callable[[str, str], None]

FINDINGS: dict[str, Any] = {
    "python": "3.12.3",
    "platform": "Linux-6.1-x86_64",
    "packages": [
        {"name": "torch", "version": "2.11.0+cu130", "state": "ok", "advice": ""},
        {
            "name": "triton",
            "version": None,
            "state": "missing",
            "advice": "optional, for fast kernels on a GPU: pip install 'gemworks-gem[triton]'",
        },
        {
            "name": "torchrec",
            "version": "1.6.1",
            "state": "broken",
            "advice": "importing it fails: OSError: undefined symbol: x",
        },
    ],
    "devices": [
        {"name": "cpu", "description": "x86_64, 16 cores, 8 threads in use"},
        {
            "name": "cuda:0",
            "description": "NVIDIA H200, 139 GiB, sm_90",
            "links": "18 NVLinks of 26.562 GB/s each way, PCIe 5 x16",
        },
    ],
    "ops": [
        {
            "op": op,
            "device": device,
            "dtype": dtype,
            "backend": backend,
            "reason": f"takes {dtype} on {device}",
        }
        for op in ("rms_norm", "gdpa")
        for device, dtype, backend in (("cpu", "float32", "reference"), ("cuda:0", "bfloat16", "triton"))
    ],
    "advice": [
        {
            "do": "pip install 'gemworks-gem[triton]'",
            "why": "their kernels are written in Triton, which is not usable here",
            "ops": ["rms_norm", "gdpa"],
        },
        {"do": None, "why": "PyTorch code here, right and slow; kernels: triton on sm_90", "ops": ["gdpa"]},
    ],
    "problems": ["torchrec is broken: training will not work; importing it fails: OSError: undefined symbol: x"],
}


def test_doctor(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    output.print_findings(FINDINGS)
    golden("doctor.txt", capsys.readouterr().out)


def test_eval(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    figures = {"ne": 0.8375, "auc": 0.75, "calibration": None, "rate": 0.55, "num_samples": 12_345}
    result = {"run_dir": "runs/first", "checkpoint": "best", "split": "test", "tasks": {"like": figures}}
    output.print_evaluation(result | {"equals_training": True})
    golden("eval.txt", capsys.readouterr().out)


def test_checkpoint_inspect(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    whole = {
        "step": 20,
        "whole": True,
        "best": True,
        "last": False,
        "num_bytes": 3 << 20,
        "num_model_parameters": 54_321,
    }
    whole |= {"epoch": 0, "position": 640, "num_skipped": 0, "problem": None, "tensors": {"head.weight": [1, 32]}}
    torn = whole | {"step": 30, "whole": False, "best": False, "last": True, "num_bytes": 1 << 20}
    torn |= {"problem": "step_30: got 1 of 2 files; start again from step_20"}
    checkpoints = {
        "path": "runs/first",
        "checkpoints": [torn, whole],
        "differences": ["head.weight: [1, 32] against none"],
    }
    output.print_checkpoints(checkpoints, tensors=True)
    golden("checkpoint_inspect.txt", capsys.readouterr().out)


def test_mfu(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    result = {"training_flops": 4e14, "by_kind": {"attention.core": 3e14, "head": 1e14}, "num_samples": 2048}
    result |= {"length_law": "zipf", "max_length": 4096, "step_ms": 350, "num_gpus": 2, "mfu": 0.577}
    diagnose.print_mfu(result | {"peak_flops_per_second": 989e12})
    golden("mfu.txt", capsys.readouterr().out)


def test_data_inspect(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    sets = ["--set", "data.num_samples=256", "data.max_length=8"]
    assert run(["data", "inspect", "--preset", "tiny", *sets]) == 0
    golden("data_inspect.txt", capsys.readouterr().out)


def test_comparison(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    def row(op: str, ms: float) -> dict[str, str]:
        return {"op": op, "shape": "B8", "ms": str(ms), "ms_p20": str(ms * 0.95), "ms_p80": str(ms * 1.05)}

    found = compare([row("a", 1), row("b", 1), row("c", 1)], [row("a", 2), row("b", 1.01), row("d", 3)])
    print_comparison(found, Path("old.csv"))
    golden("bench_compare.txt", capsys.readouterr().out)


def test_config(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert run(["config", "--preset", "tiny"]) == 0
    golden("config.txt", capsys.readouterr().out)


ERRORS = """config,split,predicted_ms,measured_ms,error_pct,gpu
a,calibrate,1,1,50,H200
b,validate,9,10,-10,H200
c,validate,10,10,2,H200
"""


def test_plan_simulate(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    Path("error.csv").write_text(ERRORS, encoding="utf-8")
    plan = "--gpus 4096 --shard 256 --expert 2 --expert-shard 16 --table-group 256 --replica-shard 8"
    assert run(["plan", "simulate", *plan.split(), "--measured", "error.csv"]) == 0
    golden("plan_simulate.txt", capsys.readouterr().out)


def test_plan_search(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    Path("error.csv").write_text(ERRORS, encoding="utf-8")
    Path("model.json").write_text(gem_like(num_layers=2).to_json(), encoding="utf-8")
    arguments = "--gpus 64 --profile model.json --keep 2 --top 3 --measured error.csv"
    assert run(["plan", "search", *arguments.split()]) == 0
    text = re.sub(r"(plans fit, \d+ do not); [\d.]+ s", r"\1; SECONDS s", capsys.readouterr().out, count=1)
    golden("plan_search.txt", text)


def test_trace(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    """Two products, and a gather half under the first one."""
    gather = {"stream": 20, "Collective name": "all_gather", "grid": [24, 1, 1]}
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": us, "args": args}
        for name, start, us, args in (
            ("gemm", 0.0, 20.0, {"stream": 7}),
            ("ncclDevKernel_AllGather", 10.0, 30.0, gather),
            ("gemm", 40.0, 20.0, {"stream": 7}),
        )
    ]
    trace = {"traceEvents": events, "distributedInfo": {"rank": 0}, "deviceProperties": [{"id": 0, "numSms": 132}]}
    Path("trace.json").write_text(json.dumps(trace), encoding="utf-8")
    assert run(["trace", "trace.json"]) == 0
    golden("trace.txt", capsys.readouterr().out)
