"""The folder of checkpoints: names, the pointer to the best one, seals, and what may be thrown away. No torch here.

| name | what |
|---|---|
| `step_00000500/` | a whole checkpoint; `files.json` in it seals every other file with its size and CRC-32 |
| `best.json` | which step is the best, and why |
| `.partial_*` | being written, or left by a process that died while writing |
| `.old_step_*` | what a checkpoint of the same step replaces, for the moment between two renames |
| `damaged_step_*` | did not match its seal when a run wanted to go on from it; kept for whoever wants to look |
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any, Literal, get_args

Which = Literal["best", "last"]
SEAL = "files.json"
BEST = "best.json"
_STEP = re.compile(r"step_(\d{8,})")
_READ_BYTES = 1 << 22


class DamagedCheckpointError(ValueError):
    """A checkpoint is not what was written."""


def step_dir(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:08d}"


def steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending."""
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))


def best_step(folder: Path) -> int | None:
    """The step that `best.json` names, if its checkpoint is there."""
    try:
        step = int(json.loads((folder / BEST).read_text(encoding="utf-8"))["step"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return step if step_dir(folder, step).is_dir() else None


def find(folder: Path, which: str) -> Path:
    """The folder of the "best" or the "last" checkpoint.

    Raises:
        ValueError: there is none, or `which` is another word.
    """
    if which not in get_args(Which):
        raise ValueError(f"checkpoint: got {which!r}, expected 'best' or 'last'")
    step = best_step(folder) if which == "best" else (steps(folder) or [None])[-1]
    if step is None:
        raise ValueError(
            f"{str(folder)!r}: got no {which} checkpoint in it; "
            "pass the folder of a run that has trained past its first evaluation"
        )
    return step_dir(folder, step)


def mark_best(folder: Path, step: int, facts: dict[str, Any]) -> None:
    """Makes the checkpoint of `step` the best one, in one atomic step."""
    partial = folder / ".partial_best.json"
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **facts}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / BEST)


def prune(folder: Path, keep_last: int) -> None:
    """Removes every checkpoint but the best one and the newest `keep_last`."""
    found = steps(folder)
    for step in found[:-keep_last]:
        if step != best_step(folder):
            shutil.rmtree(step_dir(folder, step))


def seal(path: Path) -> None:
    """Writes down the size and CRC-32 of every file of a checkpoint."""
    files = {p.name: [p.stat().st_size, _crc32(p)] for p in sorted(path.iterdir()) if p.name != SEAL}
    with (path / SEAL).open("w", encoding="utf-8") as file:
        json.dump(files, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def verify(path: Path) -> None:
    """Compares a checkpoint with its seal.

    Raises:
        DamagedCheckpointError: naming the first file that is missing, short or changed.
    """
    fix = "it was damaged after it was written; use another checkpoint of the run (`gemworks checkpoint inspect`)"
    if not path.is_dir():
        raise DamagedCheckpointError(f"{str(path)!r}: got no folder, expected a checkpoint; it may have been moved")
    try:
        files = json.loads((path / SEAL).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{str(path)!r}: got no {SEAL}, expected a sealed checkpoint; {fix}") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{str(path / SEAL)!r}: got something that is not JSON; {fix}") from error
    for name, (num_bytes, crc32) in files.items():
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{str(path)!r}: {name} is missing; {fix}")
        if file.stat().st_size != num_bytes:
            raise DamagedCheckpointError(
                f"{str(path)!r}: {name} has {file.stat().st_size} bytes, expected {num_bytes}; {fix}"
            )
        if _crc32(file) != crc32:
            raise DamagedCheckpointError(f"{str(path)!r}: the content of {name} has changed; {fix}")


def publish(partial: Path, target: Path) -> None:
    """Gives a whole checkpoint its name; at every moment there is the old one, the new one, or `.old_` of it."""
    old = target.with_name(f".old_{target.name}")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)
    _sync_folder(target.parent)


def tidy(folder: Path) -> None:
    """Removes what a process that died left half-done, and brings back what it was about to replace."""
    if not folder.is_dir():
        return
    for old in folder.glob(".old_step_*"):
        target = folder / old.name.removeprefix(".old_")
        if target.exists():
            shutil.rmtree(old)
        else:
            os.replace(old, target)
    for partial in folder.glob(".partial_*"):
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink()


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint, so that it is neither used nor lost."""
    target, number = path.with_name(f"damaged_{path.name}"), 1
    while target.exists():
        number += 1
        target = path.with_name(f"damaged_{path.name}_{number}")
    os.replace(path, target)
    return target


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            value = zlib.crc32(block, value)
    return value


def _sync_folder(path: Path) -> None:
    """A rename survives a power cut once its folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
