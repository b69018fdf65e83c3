"""Full and read-only file systems as they really are: a small one in memory, where the machine lets tests mount it."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gemworks.gem import checkpoint_files as files
from gemworks.gem.checkpoint import CheckpointError
from gemworks.gem.presets import load_config
from gemworks.gem.run_dir import RunDir
from gemworks.gem.train import train
from rich.console import Console

pytestmark = [pytest.mark.reference, pytest.mark.slow]

SETTINGS = (
    "data.num_samples=192",
    "data.batch_size=8",
    "data.max_length=8",
    "model.dim=32",
    "model.num_layers=1",
    "train.save_every=3",
    "train.keep_last=50",
)


def run(path: Path) -> tuple[dict[str, Any], str]:
    out = io.StringIO()
    summary = train(load_config("tiny", sets=SETTINGS), path, console=Console(file=out, width=120))
    return summary, out.getvalue()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A file system of 6 MiB, and how to mount it anew with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")

    def remount(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)

    try:
        yield folder, remount
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_disk_that_fills_up(small_disk: tuple[Path, Callable[[str], None]], tmp_path: Path) -> None:
    folder, remount = small_disk
    with pytest.raises(CheckpointError, match=r"step \d+ could not be written.*No space left on device.*is whole"):
        run(folder / "run")
    kept = files.steps(folder / "run" / "checkpoints")
    assert kept
    for step in kept:
        files.verify(files.step_dir(folder / "run" / "checkpoints", step))
    remount("size=100m")
    summary, text = run(folder / "run")
    assert f"going on after step {kept[-1]} of" in text
    unbroken, _ = run(tmp_path / "unbroken")
    assert summary["tasks"] == unbroken["tasks"]
    losses = [[row["loss"] for row in RunDir.open(p).rows("train")] for p in (folder / "run", tmp_path / "unbroken")]
    assert losses[0] == losses[1]


def test_disk_that_is_read_only(small_disk: tuple[Path, Callable[[str], None]]) -> None:
    folder, remount = small_disk
    remount("ro")
    with pytest.raises(ValueError, match=r"run folder .*cannot be written \(Read-only file system"):
        run(folder / "run")
    assert not list(folder.iterdir())
