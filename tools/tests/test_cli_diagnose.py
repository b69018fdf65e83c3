"""gemworks trace, probe and mfu: the libraries' own answers; the model, the trace and the numbers are the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gemworks.cli.app import run
from gemworks.gem.data import open_source
from gemworks.gem.efficiency import count_expected_flops, mfu
from gemworks.gem.presets import load_config
from gemworks.netmem.overlap import kernel_table, overlap_report
from gemworks.precision.recipe import recipe

pytestmark = pytest.mark.reference

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    return model, [torch.randn(64, 128) for _ in range(2)]

def step():
    return *make(), lambda model, batch: model(batch).sum()

def wrong():
    return make()[0]

def narrow():
    print("makes a model")
    return nn.Linear(64, 64), [torch.randn(64, 64)]
"""


def kernel(name: str, start: float, us: float, stream: int = 7, **args: object) -> dict:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": us, "args": {"stream": stream, **args}}


def gpu_trace(rank: int = 0, gather_us: float = 30.0) -> dict:
    """Two products, a gather under the first one and half under nothing."""
    events = [
        kernel("gemm", 0.0, 20.0),
        kernel("ncclDevKernel_AllGather", 10.0, gather_us, 20, **{"Collective name": "all_gather", "grid": [24, 1, 1]}),
        kernel("gemm", 10.0 + gather_us, 20.0),
    ]
    return {"traceEvents": events, "distributedInfo": {"rank": rank}, "deviceProperties": [{"id": 0, "numSms": 132}]}


def test_trace_is_the_overlap_report_and_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.json").write_text(json.dumps(gpu_trace()))
    assert run(["trace", "t.json", "--png", "t.png"]) == 0
    text = capsys.readouterr().out
    assert overlap_report("t.json").to_text() in text
    assert kernel_table("t.json").to_text() in text
    assert "gemm (gpu0 stream 7) waited 0.020 ms" in text
    assert Path("t.png").stat().st_size > 0
    assert run(["trace", "t.json", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["traces"]
    assert found["devices"][0]["exposed_us"] == 20.0
    assert found["kernels"][0] == {
        "name": "gemm", "kind": "compute", "device": 0, "num_calls": 2, "self_us": 40.0, "share": 40 / 70,
        "max_us": 20.0,
    }  # fmt: skip


def test_several_traces_say_who_waited_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    for rank, us in ((0, 30.0), (1, 12.0)):
        Path(f"{rank}.json").write_text(json.dumps(gpu_trace(rank, us)))
    assert run(["trace", "0.json", "1.json", "--json"]) == 0
    waits = json.loads(capsys.readouterr().out)["rank_waits"]
    assert waits["waited_us"] == {"0": 18.0, "1": 0.0}


def test_trace_of_operators_counts_their_own_time_only(capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU operators call one another; what a call inside took is not the caller's."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        torch.nn.functional.linear(torch.randn(64, 64), torch.randn(64, 64))
    profiled.export_chrome_trace("cpu.json")
    assert run(["trace", "cpu.json", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["traces"]
    by_name = {k["name"]: k for k in found["kernels"]}
    assert by_name["aten::linear"]["self_us"] < by_name["aten::linear"]["max_us"]
    assert sum(k["self_us"] for k in found["kernels"]) == pytest.approx(found["devices"][0]["compute_us"], rel=1e-3)


def test_trace_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "none.json"]) == 2
    assert capsys.readouterr().err.startswith("error: 'none.json': got no file, expected a trace")
    Path("0.json").write_text(json.dumps(gpu_trace()))
    Path("t.json").write_text("{}")
    assert run(["trace", "0.json", "t.json"]) == 2
    assert capsys.readouterr().err.startswith("error: 't.json': expected a Chrome trace")
    assert run(["trace", "t.json", "--png", "t.xyz"]) == 2
    assert capsys.readouterr().err == "error: --png: got 't.xyz', expected a file that ends in .png or .svg or .pdf\n"
    assert run(["trace", "t.json", "--png", "nowhere/t.png"]) == 2
    assert "but there is no folder 'nowhere'; make it first" in capsys.readouterr().err
    assert run(["probe", "their_model:make", "--csv", "."]) == 2
    assert capsys.readouterr().err == "error: --csv: got '.', which is a folder; name a file in it\n"


def test_probe_writes_a_recipe_that_convert_reads(capsys: pytest.CaptureFixture[str]) -> None:
    Path("their_model_1.py").write_text(MODEL)
    arguments = ["probe", "their_model_1:make", "--candidate", "mxfp8", "--out", "r.toml", "--csv", "r.csv"]
    assert run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["layer"] for row in found["layers"]} == {"0", "2"}
    assert found["recipe"] == recipe("r.toml").layers == {"0": "mxfp8", "2": "mxfp8"}
    assert len(Path("r.csv").read_text().splitlines()) == 1 + len(found["layers"]) == 7
    assert run(["probe", "their_model_1:step", "--candidate", "mxfp8", "--min-sqnr-db", "90"]) == 0
    assert "-> bf16: mxfp8: worst product" in capsys.readouterr().out


def test_probe_of_layers_that_no_format_takes_has_no_rows_and_what_the_model_prints_is_no_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("their_model_3.py").write_text(MODEL)
    assert run(["probe", "their_model_3:narrow", "--csv", "r.csv", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"layers": [], "recipe": {"": "bf16"}}
    assert "makes a model" in err
    assert Path("r.csv").read_text() == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("their_model", "error: MODULE:FUNCTION: got 'their_model', expected such as"),
        ("no_such_module:make", "error: MODULE:FUNCTION: got 'no_such_module:make', but there is no module"),
        ("their_model_2:made", "error: MODULE:FUNCTION: got 'their_model_2:made', but their_model_2 has no function"),
        ("their_model_2:wrong", "error: their_model_2:wrong: returned Sequential, expected (model, batches)"),
    ],
)
def test_probe_of_something_else(source: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("their_model_2.py").write_text(MODEL)
    assert run(["probe", source]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_mfu_of_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration means the same step on any number of GPUs: `data.batch_size` is over all of them."""
    settings = ["--preset", "tiny", "--set", "data.length_law=zipf", "train.accumulate=3"]
    assert run(["mfu", *settings, "--step-ms", "100", "--gpus", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    config = load_config("tiny", sets=["data.length_law=zipf"])
    flops = count_expected_flops(config, open_source(config.data).schema, 3 * config.data.batch_size).training
    assert found["training_flops"] == flops == pytest.approx(sum(found["by_kind"].values()))
    assert found["mfu"] == mfu(flops, 0.1, num_gpus=2)
    assert run(["mfu", *settings, "--step-ms", "100"]) == 0
    assert "lengths zipf up to 64" in capsys.readouterr().out


def test_mfu_of_plain_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["--flops", "2e15", "--step-ms", "200", "--gpus", "16", "--peak-tflops", "1000"]
    assert run(["mfu", *numbers]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2000 TFLOP in 200 ms on 16 GPUs of 1000 TFLOP/s",
        "MFU 62.50%",
    ]
    assert run(["mfu", *numbers, "--preset", "tiny"]) == 2
    assert "error: --flops: got it beside a configuration" in capsys.readouterr().err
    assert run(["mfu", *numbers, "--samples", "8"]) == 2
    assert "error: --flops: got it beside a configuration" in capsys.readouterr().err
    assert run(["mfu", "--flops", "1e15", "--step-ms", "0"]) == 2
    assert "error: --step-ms: got 0.0, expected a positive number" in capsys.readouterr().err
