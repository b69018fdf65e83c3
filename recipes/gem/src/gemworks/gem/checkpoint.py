"""Checkpoints of a run: torch DCP, complete or absent, never half.

`checkpoints/step_00000500/` holds model, optimizers and the host's state (step, loader, RNG, metrics);
`checkpoints/best.json` and `checkpoints/last.json` name one each. A checkpoint is written beside its final name and
renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from gemworks.gem.optim import Optimizers
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

Which = Literal["best", "last"]


def step_dir(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:08d}"


def save(folder: Path, step: int, model: nn.Module, optimizers: Optimizers, host: dict[str, Any]) -> Path:
    """Writes the checkpoint of `step` and makes it the last one.

    Args:
        folder: the run's checkpoint folder.
        step: steps done.
        host: what lives on the host and is JSON: loader position, counters, best so far.

    Returns:
        The checkpoint's folder.
    """
    target = step_dir(folder, step)
    partial = folder / f".partial_{target.name}"
    shutil.rmtree(partial, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizers": optimizers.state_dict(),
        "rng": _rng_state(),
        "host": json.dumps({"step": step, **host}),
    }
    with _one_process():
        save_state(state, checkpoint_id=str(partial), no_dist=True)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    mark(folder, "last", step)
    return target


def load(path: Path, model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Reads a checkpoint into a model, its optimizers and the random generators.

    Returns:
        The host's state, with "step".
    """
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizers": optimizers.state_dict(),
        "rng": _rng_state(),
        "host": "",
    }
    _read(state, path)
    model.load_state_dict(state["model"])
    optimizers.load_state_dict(state["optimizers"])
    _set_rng_state(state["rng"])
    return json.loads(state["host"])


def load_model(path: Path, model: nn.Module) -> int:
    """Reads only the model's tensors; returns the step they come from.

    Raises:
        ValueError: the checkpoint is missing, damaged, or of another model.
    """
    state: dict[str, Any] = {"model": model.state_dict(), "host": ""}
    _read(state, path)
    model.load_state_dict(state["model"])
    return int(json.loads(state["host"])["step"])


def mark(folder: Path, which: Which, step: int, **facts: Any) -> None:
    """Makes the checkpoint of `step` the best or the last one, in one atomic step."""
    partial = folder / f".partial_{which}.json"
    partial.write_text(json.dumps({"step": step, **facts}) + "\n", encoding="utf-8")
    os.replace(partial, folder / f"{which}.json")


def find(folder: Path, which: str) -> Path:
    """The folder of the "best" or the "last" checkpoint.

    Raises:
        ValueError: there is none, or `which` is another word.
    """
    if which not in get_args(Which):
        raise ValueError(f"checkpoint: got {which!r}, expected 'best' or 'last'")
    pointer = folder / f"{which}.json"
    if not pointer.is_file():
        raise ValueError(
            f"{str(folder)!r}: got no {which} checkpoint, expected {pointer.name} in it; "
            "pass the folder of a run that has trained past its first evaluation"
        )
    return step_dir(folder, int(json.loads(pointer.read_text(encoding="utf-8"))["step"]))


def prune(folder: Path) -> None:
    """Removes every checkpoint but the best and the last one."""
    keep = {find(folder, which) for which in ("best", "last") if (folder / f"{which}.json").is_file()}
    for path in folder.glob("step_*"):
        if path not in keep:
            shutil.rmtree(path)


def _read(state: dict[str, Any], path: Path) -> None:
    if not (path / ".metadata").is_file():
        raise ValueError(f"{str(path)!r}: got no checkpoint, expected a folder with .metadata; it may have been moved")
    try:
        with _one_process():
            load_state(state, checkpoint_id=str(path), no_dist=True)
    except CheckpointException as error:
        reason = str(next(iter(error.failures.values()))[0]) if error.failures else str(error)
        raise ValueError(
            f"{str(path)!r}: cannot be read into this model ({reason}); "
            "use the configuration and the data it was trained with"
        ) from error


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """DCP warns that it works without a process group, which is what one process means."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
