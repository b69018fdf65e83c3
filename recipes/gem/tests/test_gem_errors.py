"""What torchrun is told of a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gemworks.gem.errors import write_error_file
from gemworks.parallel.heartbeat import RankFailure


def _second(path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> int:
    """The time that torchrun reads in the file."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    try:
        raise error
    except Exception as caught:
        write_error_file(caught)
    return int(json.loads(path.read_text())["message"]["extraInfo"]["timestamp"])


def test_a_rank_that_fails_because_of_another_never_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun takes the earliest second for the root cause, and the lowest rank where two are equal."""
    cause = _second(tmp_path / "1.json", ValueError("data.path: row 7 is bad"), monkeypatch)
    follows = _second(tmp_path / "0.json", RankFailure("rank 1 failed", (1,)), monkeypatch)
    assert follows > cause
