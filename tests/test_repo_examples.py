"""The adoption examples run, each as a program of its own in an empty folder; they check their own results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
QUICK = ("cu_seqlens_transformer.py", "offload_trainer.py")  # the others import torchrec or start processes


def run_example(name: str, folder: Path) -> str:
    sources = [str(p) for p in (*sorted(ROOT.glob("*/*/src")), ROOT / "tools/src")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)], cwd=folder, env=env, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", QUICK)
def test_example(name: str, tmp_path: Path) -> None:
    assert run_example(name, tmp_path)
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in QUICK])
def test_slow_example(name: str, tmp_path: Path) -> None:
    assert run_example(name, tmp_path)
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUICK)
def test_example_on_a_gpu(name: str, tmp_path: Path) -> None:
    """These two move their model to a GPU that is there, and say so."""
    assert "on cuda" in run_example(name, tmp_path)
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


def test_the_table_names_every_example() -> None:
    text = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[(\w+\.py)\]", text, re.MULTILINE)) == PROGRAMS
