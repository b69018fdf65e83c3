"""What the page tells of the long run: trained time, starts, flatness, and the curves."""

from __future__ import annotations

from pathlib import Path

import pytest
from gemworks.gem.ladder.long_page import curves, long_run, spans, trained_seconds

KEYS = ("piece", "second", "step", "ne", "samples_per_s", "memory_mib", "event", "gpu", "commit", "note")


def event(piece: int, second: float, event: str, **more: str) -> dict[str, str]:
    return dict.fromkeys(KEYS, "") | {"piece": str(piece), "second": str(second), "event": event} | more


def line(piece: int, second: float, step: int, *, speed: float = 100.0, mib: float = 500.0) -> dict[str, str]:
    figures = {"ne": f"{1 - step / 1000}", "samples_per_s": str(speed), "memory_mib": str(mib)}
    return event(piece, second, "train", step=str(step), **figures)


ROWS = [
    event(1, 0.0, "first piece", gpu="NVIDIA H200", commit="abc1234", note="another GPU was measured beside it"),
    event(1, 0.0, "started"),
    line(1, 30.0, 50, speed=3.0, mib=100.0),
    line(1, 40.0, 100),
    line(1, 50.0, 150, speed=110.0),
    event(1, 55.0, "killed"),
    event(1, 56.0, "started again"),
    line(1, 76.0, 200, speed=4.0),
    line(1, 90.0, 250, mib=510.0),
    event(1, 100.0, "ended with code 75"),
    event(2, 0.0, "resumed from files", note="another GPU was measured beside it"),
    event(2, 1.0, "started"),
    line(2, 21.0, 300, speed=5.0),
    line(2, 61.0, 350),
    event(2, 70.0, "ended with code 75"),
]


def test_training_is_counted_without_starts_and_kills():
    assert [(span.event, span.start_s) for span in spans(ROWS)] == [
        ("started", 30.0), ("started again", 20.0), ("started", 20.0),
    ]  # fmt: skip
    assert trained_seconds(ROWS) == 20.0 + 14.0 + 40.0
    assert trained_seconds(ROWS[:2]) == 0.0


def test_the_page_tells_the_long_run():
    text = long_run(ROWS)
    assert "`base` on one NVIDIA H200, commit abc1234" in text
    assert "2 pieces, 1.2 minutes of training (20 were the aim) in 2.8 minutes; 1 kill, gone" in text
    assert "(50 steps): 30, 20, 20 s" in text
    assert "step 50 to 350: NE 0.8000 (first 7 lines)" in text
    assert "median 100, 10 % 100, 90 % 110; median from start to start 105, 100, 100." in text
    assert "memory in use: 500 to 510 MiB; at the end of each start 500, 510, 500." in text
    assert "cut off" not in text
    assert text.count("another GPU was measured beside it") == 1
    assert "there is no `long_run_h200.csv`" in long_run(ROWS[:2])


def test_a_piece_without_an_end_was_cut_off():
    assert "Piece 2 was cut off from outside" in long_run(ROWS[:-1])


def test_memory_read_after_the_trainer_had_gone_is_none():
    gone = line(2, 65.0, 400, mib=0.0)
    assert "memory in use: 500 to 510 MiB; at the end of each start 500, 510, 500." in long_run([*ROWS[:-1], gone])


def test_curves_need_a_line_after_a_start(tmp_path: Path):
    pytest.importorskip("matplotlib")
    assert not curves(tmp_path / "no.png", ROWS[:3])
    assert curves(tmp_path / "yes.png", ROWS)
    assert (tmp_path / "yes.png").stat().st_size > 1000
