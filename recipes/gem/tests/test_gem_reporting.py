"""What people see: status lines, the live bar, the summary table, the learning curve."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gemworks.gem.curve import draw
from gemworks.gem.presets import get_preset
from gemworks.gem.reporting import BarDisplay, LineDisplay, StepRow, figures, left, open_display
from gemworks.gem.run_dir import RunDir, default_run_dir, json_ready
from gemworks.gem.summary import table
from rich.console import Console

pytestmark = pytest.mark.reference


def row(step: int = 5, mfu: float | None = None) -> StepRow:
    return StepRow(
        step=step,
        total_steps=200,
        loss=0.51234,
        ne=0.87654,
        samples_per_s=312.0,
        tokens_per_s=45_678.0,
        flops_per_s=12.3e9,
        mfu=mfu,
        step_ms=410.4,
        data_wait_ms=1.0,
        lr=1e-3,
        sparse_lr=1e-2,
        grad_norm=1.0,
    )


def test_figures_on_a_cpu_and_on_a_gpu() -> None:
    assert figures(row()) == "loss 0.5123  NE 0.8765  312 samples/s  45.7k tokens/s  12.3 GFLOP/s  410 ms/step"
    assert "MFU 23.4%" in figures(row(mfu=0.234))
    assert "FLOP/s" not in figures(row(mfu=0.234))


def test_piped_output_is_one_plain_line_per_row() -> None:
    out = io.StringIO()
    display = open_display(Console(file=out, width=20))
    assert isinstance(display, LineDisplay)
    display.start(200)
    display.advance()
    display.row(row(step=50))
    display.message("a long message that a narrow console must not wrap in the middle of its figures")
    display.stop()
    first, second = out.getvalue().splitlines()
    assert first.startswith("█████░░░░░░░░░░░░░░░  50/200  loss")
    assert first.endswith("410 ms/step  62 s left")  # 150 steps of 410 ms
    assert second.endswith("its figures")
    assert "\x1b" not in out.getvalue()


def test_time_that_is_left() -> None:
    assert left(row(step=200)) == ""
    assert left(replace(row(step=0), total_steps=2000)) == "  14 min left"


def test_terminal_gets_a_bar_that_ends_full() -> None:
    out = io.StringIO()
    display = open_display(Console(file=out, force_terminal=True, width=80, height=20))
    assert isinstance(display, BarDisplay)
    display.message("before the start")
    display.start(3)
    for _ in range(3):
        display.advance()
    display.row(row())
    display.message("in between")
    display.stop()
    display.stop()  # a failed run stops twice
    text = out.getvalue()
    for piece in ("before the start", "in between", "3/3", "0:00:0", "NE 0.8765", "410 ms/step"):
        assert piece in text


SUMMARY: dict[str, Any] = {
    "preset": "small",
    "source": "movielens",
    "task": "like",
    "ne": 0.845,
    "baseline_ne": 0.8925,
    "history_baseline_ne": 0.8579,
    "bayes_ne": None,
    "baselines": {
        "history": {
            "ne": 0.8579,
            "auc": 0.7447,
            "gain": {"ne_gain_percent": 1.5, "ne_difference_low": -0.017158, "ne_difference_high": -0.008579},
        }
    },
    "tasks": {
        "like": {"ne": 0.845, "auc": 0.76, "calibration": 1.01},
        "love": {"ne": None, "auc": None, "calibration": None},
    },
    "best_step": 500,
    "num_steps": 625,
    "train_seconds": 300.0,
    "samples_per_s": 300.0,
    "tokens_per_s": 40_000.0,
    "flops_per_s": 12e9,
    "mfu": None,
    "step_ms": 400.0,
    "device": "CPU, 2 threads",
}


def test_table_turns_differences_into_gains() -> None:
    """NE(model) - NE(baseline) in [-0.0172, -0.0086] of 0.8579 is a gain of 1 % to 2 %."""
    out = io.StringIO()
    Console(file=out, width=120).print(table(SUMMARY))
    text = out.getvalue()
    assert "+1.50 % [+1.00, +2.00]" in text
    assert "best step 500 of 625" in text
    assert "│ GEM: love" in text


def curve_rows(num: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"kind": "baseline", "step": 0, "name": "history", "valid_ne": 0.8747}]
    rows += [{"kind": "train", "step": s, "ne": 0.85 + 2.0 / (s + 5)} for s in range(1, num)]
    rows += [{"kind": "valid", "step": s, "ne": 0.86 + 1.0 / (s + 5)} for s in range(10, num, 10)]
    return rows


@pytest.mark.parametrize("num", [1, 2, 60])
@pytest.mark.parametrize("complete", [True, False])
def test_curve_is_drawn_from_much_little_and_nothing(num: int, complete: bool, tmp_path: Path) -> None:
    rows = curve_rows(num) if num > 1 else []
    rows.append({"kind": "train", "step": 61, "ne": None})
    draw(tmp_path / "curve.png", rows, SUMMARY if complete else {})
    data = (tmp_path / "curve.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert (width, height) == (1500, 750)


def test_run_folder_name_says_what_ran() -> None:
    assert default_run_dir(get_preset("tiny")).name.startswith("tiny-synthetic-")


def test_metrics_are_strict_json(tmp_path: Path) -> None:
    run = RunDir.claim(tmp_path / "run", get_preset("tiny"))
    run.log("train", 3, ne=float("nan"), loss=float("inf"), lr=0.5, name="x")
    run.close()
    (logged,) = run.rows("train")
    assert (logged["ne"], logged["loss"], logged["lr"], logged["name"]) == (None, None, 0.5, "x")
    assert "NaN" not in run.metrics_path.read_text()
    assert json_ready({"a": [float("nan")]}) == {"a": [None]}
