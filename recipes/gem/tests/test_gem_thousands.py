"""Predictions for thousands of GPUs from measured layers, and the parts of the page that tell of them."""

import csv
from pathlib import Path

import pytest
from gemworks.gem.ladder.page import write_page
from gemworks.gem.ladder.plan_page import predictions
from gemworks.gem.ladder.tables import chart, read
from gemworks.gem.ladder.thousands import layer_times, main, measured_profile, read_layers
from gemworks.gem.layers.report import COLUMNS, Row, append_csv
from gemworks.gem.presets import load_config

pytestmark = pytest.mark.reference


def layers_csv(folder: Path, *, without: str = "") -> Path:
    """A CSV of layers: one ms of tensor cores, one of other kernels, 989 GFLOP each, at batch 64."""
    facts = {
        "attention": "block", "setting": "fast_gelu", "batch": "64", "ms": "4.0", "tensor_core_ms": "1.0",
        "memory_ms": "1.0", "gap_ms": "2.0", "host_ms": "0.6", "tflops": f"{989e9 / 4.0 / 1e9:.6g}",
        "mean_len": "1024.0", "gpu": "a GPU", "commit": "abc",
    }  # fmt: skip
    names = [name for name in ("hsp", "pffn", "attention", "experts", "summary") if name != without]
    rows: list[Row] = [dict.fromkeys(COLUMNS, "") | facts | {"layer": name} for name in names]
    path = folder / "layers_h200.csv"
    append_csv(path, rows, COLUMNS)
    return path


def test_times_are_the_devices_and_grow_with_the_batch(tmp_path: Path):
    layers = read_layers(layers_csv(tmp_path), "block", "fast_gelu")
    forward, backward, host, host_backward = layer_times(layers["pffn"], 128)
    assert (forward + backward, backward) == pytest.approx((4000.0, 2 * 4000.0 / 3))
    assert (host + host_backward, host) == pytest.approx((600.0, 200.0))
    profile = measured_profile(load_config("large"), layers, batch=64, kept_bytes=1e6)
    assert profile.flops == pytest.approx(8 * 5 * 989e9, rel=1e-3)


def test_another_attention_lends_what_has_no_sequence(tmp_path: Path):
    path = layers_csv(tmp_path)
    rows = [row | {"attention": "full"} for row in read(path) if row["layer"] in ("hsp", "pffn", "attention")]
    append_csv(path, rows, COLUMNS)
    found = read_layers(path, "full", "fast_gelu")
    assert {name: row["attention"] for name, row in found.items()} == {
        "hsp": "full", "pffn": "full", "attention": "full", "experts": "block", "summary": "block",
    }  # fmt: skip


def test_predictions_say_where_a_step_goes(tmp_path: Path):
    layers_csv(tmp_path)
    assert main(["--attention", "block", "--gpus", "256", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "plan_predictions.csv")
    plans = {row["plan"] for row in rows}
    assert sum("without BBS" in plan for plan in plans) == sum("gathers on SMs" in plan for plan in plans) == 1
    for plan in plans:
        mine = {row["item"]: float(row["ms"]) for row in rows if row["plan"] == plan}
        step = mine.pop("step")
        assert sum(mine.values()) == pytest.approx(step, rel=1e-3)
    text = predictions([row | {"command": "python -m gemworks.gem.ladder.thousands"} for row in rows], [])
    assert "The simulator's error is not measured" in text
    assert "| large, block attention | 256 GPUs |" in text
    assert "\n| without BBS | " in text


def test_layers_that_are_missing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    layers_csv(tmp_path, without="experts")
    assert main(["--attention", "block", "--out", str(tmp_path)]) == 2
    assert "no traced row of experts" in capsys.readouterr().err


def test_the_page_says_which_files_are_missing(tmp_path: Path):
    write_page(tmp_path / "ladder.md", tmp_path)
    text = (tmp_path / "ladder.md").read_text()
    for name in ("ladder_h200", "leave_one_out_h200", "ladder_h200x2", "layers_h200", "long_run_h200"):
        assert f"there is no `{name}.csv`" in text
    assert "Not predicted yet" in text


def test_a_chart_needs_a_measured_row(tmp_path: Path):
    row = {"row": "norms", "batch": "8", "samples_per_s": "10", "step_mfu": "0.1"}
    assert not chart(tmp_path / "no.png", [row | {"samples_per_s": ""}], "none")
    assert chart(tmp_path / "yes.png", [row], "one")
    assert (tmp_path / "yes.png").stat().st_size > 1000


def test_errors_of_the_simulator_are_on_the_page():
    with (Path(__file__).parents[3] / "docs/measured/simulator_error.csv").open(newline="") as file:
        errors = list(csv.DictReader(file))
    row = {
        "gpus": "256",
        "plan": "large, block attention, all: dense shard 2",
        "e2e_mfu": "0.2",
        "scaling_ratio": "0.9",
    }
    row |= {"item": "step", "ms": "10", "command": "python -m gemworks.gem.ladder.thousands"}
    assert "the same simulator missed steps that it had not been fitted to by" in predictions([row], errors)
