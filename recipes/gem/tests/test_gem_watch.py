"""A rank that is gone while the others' main threads wait where no exception comes, as in a collective on GPUs."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from gem_ranks import Outcome, run_ranks

pytestmark = pytest.mark.dist


def _wait(rank: int, world: int, folder: str, fault: str) -> Any:
    """The last rank fails; the others' main threads sleep, deaf to everything."""
    from gemworks.gem.world import open_world

    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{rank}.json"
    with open_world(6, cuda=False, watched=True, grace_seconds=1) as ranks:
        ranks.any(False)
        if rank < world - 1:
            if fault in ("none", "slow"):
                return "left"
            time.sleep(14 if fault == "early" else 60)
        elif fault == "kill":
            (Path(folder) / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "raise":
            error = ValueError("data.path: row 7 is bad")
            raise ranks.explain(error)
        elif fault == "slow":
            time.sleep(3)
        return "left"


def messages(folder: Path, outcomes: list[Outcome]) -> list[str]:
    assert all(outcome.code == 1 and outcome.error is None for outcome in outcomes)
    return [json.loads((folder / f"{rank}.json").read_text())["message"]["message"] for rank in range(len(outcomes))]


def test_a_killed_rank_is_named_in_the_error_files_of_those_that_wait_for_the_device(tmp_path: Path) -> None:
    outcomes = run_ranks(_wait, 3, str(tmp_path), "kill", timeout_s=100)
    assert outcomes[2].code == -9
    for text in messages(tmp_path, outcomes[:2]):
        assert text.startswith("RankFailure: rank 2 stopped without a word")
    told = max((tmp_path / f"{rank}.json").stat().st_mtime for rank in (0, 1))
    assert told - (tmp_path / "died").stat().st_mtime < 30  # main threads sleep for 60


def test_the_reason_of_a_rank_that_failed_reaches_those_that_wait_for_the_device(tmp_path: Path) -> None:
    outcomes = run_ranks(_wait, 2, str(tmp_path), "raise", timeout_s=100)
    assert outcomes[1].error == ("ValueError", "data.path: row 7 is bad")
    (text,) = messages(tmp_path, outcomes[:1])
    assert text == "RankFailure: rank 1 failed: ValueError: data.path: row 7 is bad"


@pytest.mark.slow
def test_a_hanging_rank_is_named_before_the_time_out(tmp_path: Path) -> None:
    outcomes = run_ranks(_wait, 2, str(tmp_path), "stop", timeout_s=100, stopped=(1,))
    (text,) = messages(tmp_path, outcomes[:1])
    assert text.startswith("RankFailure: rank 1 stopped without a word")


@pytest.mark.parametrize("fault", ["none", *(pytest.param(f, marks=pytest.mark.slow) for f in ("slow", "early"))])
def test_a_good_end_ends_nobody(tmp_path: Path, fault: str) -> None:
    """Also when the ranks leave one after the other, and one long after the other's heart has stopped."""
    outcomes = run_ranks(_wait, 2, str(tmp_path), fault, timeout_s=100)
    assert [outcome.value for outcome in outcomes] == ["left", "left"]
