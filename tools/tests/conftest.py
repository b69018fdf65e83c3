"""Shared fixtures: a terminal of fixed width without colour, and golden texts.

A golden text lies in golden/. When a change of it is wanted, `GEMWORKS_UPDATE_GOLDEN=1 make test
PYTEST_ARGS=tools/tests` writes the new ones; read them with git diff.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
TERMINAL = {"COLUMNS": "80", "TERMINAL_WIDTH": "80", "NO_COLOR": "1", "TERM": "dumb"}


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in TERMINAL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GEMWORKS_TRACEBACK", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """`golden(name, text)` fails unless golden/<name> holds the text, apart from spaces at line ends."""

    def check(name: str, text: str) -> None:
        text = "".join(line.rstrip() + "\n" for line in text.strip("\n").splitlines())
        path = GOLDEN / name
        if os.environ.get("GEMWORKS_UPDATE_GOLDEN") == "1":
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no {path}; GEMWORKS_UPDATE_GOLDEN=1 writes it"
        assert text == path.read_text(encoding="utf-8")

    return check
