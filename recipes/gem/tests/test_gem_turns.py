"""Processes that get ready side by side and measure in turn."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from gemworks.gem.turns import Turns

pytestmark = pytest.mark.reference
WORKER = """
import sys, time
from pathlib import Path
from gemworks.gem.turns import Turns
folder, order = Path(sys.argv[1]), int(sys.argv[2])
turns = Turns(folder, 3, order=order, patience_s=60.0)
time.sleep(0.1 * (3 - order))
turns.wait()
with turns.turn():
    for what in ("in", "out"):
        with (folder / "log").open("a") as log:
            log.write(f"{order} {what}\\n")
        time.sleep(0.05)
"""


def test_turns_come_in_order_and_never_overlap(tmp_path: Path):
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), str(order)]) for order in (2, 0, 1)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0, 0]
    assert (tmp_path / "log").read_text().split("\n")[:-1] == ["0 in", "0 out", "1 in", "1 out", "2 in", "2 out"]


def test_nobody_waits_longer_than_its_patience(tmp_path: Path):
    began = time.monotonic()
    turns = Turns(tmp_path, 2, patience_s=0.2, order=1)
    assert turns.wait() == 1
    with turns.turn():
        pass
    assert 0.3 < time.monotonic() - began < 60  # unasked, two minutes each


def test_a_process_that_ended_without_a_word_has_had_its_turn(tmp_path: Path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f"ready.{ended.pid}").touch()
    turns = Turns(tmp_path, 2, patience_s=30.0, order=1)
    began = time.monotonic()
    assert turns.wait() == 2
    with turns.turn():
        assert time.monotonic() - began < 15.0
    turns.patience_s = 0.1
    assert turns.after(3) == 2  # each once: the one that ended, and this one
