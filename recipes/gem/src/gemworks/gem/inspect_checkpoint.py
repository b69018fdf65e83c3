"""What lies in a run's checkpoints, without building its model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from gemworks.gem import checkpoint_files as files
from gemworks.gem.checkpoint import differences, read_into, read_metadata, tensor_shapes
from gemworks.gem.checkpoint_files import DamagedCheckpointError

NO_RUN = "expected the folder of a run with checkpoints, or one checkpoint"


def inspect(path: str | Path, *, against: str | Path | None = None) -> dict[str, Any]:
    """Every checkpoint of a run, or one.

    Args:
        path: a run's folder, its `checkpoints` folder, or one `step_*` folder.
        against: another checkpoint, to be compared tensor by tensor with the newest one of `path`.

    Returns:
        `checkpoints`, oldest first: `step`, `path`, `num_bytes`, `whole`, `problem` (why it is not), `best`,
        `last`, `num_model_parameters`, `epoch`, `position`, `num_skipped`, `best_valid_ne`, `tensors` (shapes of the
        model's by name). `differences`: lines, None without `against`.

    Raises:
        ValueError: there is no checkpoint.
    """
    folders = _folders(Path(path))
    last, best = files.steps(folders[0].parent), files.best_step(folders[0].parent)
    found = [_one(folder, is_last=last[-1:], is_best=best) for folder in folders]
    return {
        "path": str(path),
        "checkpoints": found,
        "differences": None if against is None else _compare(folders[-1], _folders(Path(against))[-1]),
    }


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ValueError(f"{str(path)!r}: got no folder, {NO_RUN}")
    if path.name.startswith(("step_", "damaged_step_")):
        return [path]
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = [files.step_dir(folder, step) for step in files.steps(folder)]
    if not found:
        raise ValueError(f"{str(path)!r}: got no checkpoint in it, {NO_RUN}")
    return found


def _one(path: Path, *, is_last: list[int], is_best: int | None) -> dict[str, Any]:
    step = int(path.name.split("_")[-1]) if path.name.startswith("step_") else None
    facts: dict[str, Any] = {
        "step": step,
        "path": str(path),
        "num_bytes": sum(p.stat().st_size for p in path.iterdir() if p.is_file()),
        "whole": True,
        "problem": None,
        "best": step is not None and step == is_best,
        "last": step is not None and [step] == is_last,
    }
    try:
        files.verify(path)
        shapes = tensor_shapes(read_metadata(path), "model.")
        host = _host(path)
    except DamagedCheckpointError as error:
        return facts | {"whole": False, "problem": str(error)}
    run = host.get("run", {})
    return facts | {
        "num_model_parameters": sum(math.prod(shape) for shape in shapes.values()),
        "epoch": host["loader"]["epoch"],
        "position": host["loader"]["position"],
        "num_skipped": host["num_skipped"],
        "best_valid_ne": run.get("best_ne"),
        "tensors": {name: list(shape) for name, shape in sorted(shapes.items())},
    }


def _host(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = {"host": ""}
    read_into(state, path)
    return json.loads(state["host"])


def _compare(one: Path, other: Path) -> list[str]:
    """Tensors of two checkpoints that differ in name or shape."""
    first, second = (tensor_shapes(read_metadata(path), "model.") for path in (one, other))
    return differences(first, second, str(one), str(other))
