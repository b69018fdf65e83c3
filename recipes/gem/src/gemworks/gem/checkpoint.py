"""Checkpoints of a run: torch DCP, written in the background, complete or absent, never half.

A checkpoint holds the model, the optimizers, the random generators and the host's state (step, reader, metrics). It is
copied at once, written beside its final name by a thread, sealed, and renamed when it is whole (`checkpoint_files.py`).
Of several ranks each writes the parts it holds; the first one seals and renames. Any number of ranks can read it, from
a folder that all of them see.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gemworks.gem import checkpoint_files as files
from gemworks.gem.checkpoint_files import DamagedCheckpointError, find
from gemworks.gem.numerics import NonFiniteError
from gemworks.gem.ranks import Ranks
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

__all__ = ["CheckpointError", "DamagedCheckpointError", "Writer", "find", "load", "load_model", "newest_whole", "save"]

MAX_TENSORS_IN_A_MESSAGE = 6


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those before it are as they were."""


@dataclass(frozen=True)
class _Job:
    step: int
    best: dict[str, Any] | None
    done: Future[None]


class Writer:
    """Writes checkpoints into one folder, one at a time, in the background.

    Args:
        folder: the run's checkpoint folder.
        keep_last: newest checkpoints to keep beside the best one.
        ranks: every one of them has a writer and saves when the others do.

    A failure in the background is raised by the next call, of sealing and renaming on the first rank alone. Always end
    with `wait`.
    """

    def __init__(self, folder: Path, keep_last: int = 2, ranks: Ranks | None = None) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.ranks = ranks or Ranks()
        self._job: _Job | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizers: Stateful,
        host: dict[str, Any],
        *,
        best: dict[str, Any] | None = None,
    ) -> None:
        """Starts to write the checkpoint of `step`; returns when everything is copied.

        Args:
            step: steps done.
            model, optimizers: their tensors are copied before this returns.
            host: what lives on the host and is JSON: reader position, counters, best so far; the same on every rank.
            best: makes this checkpoint the best one, with these facts.

        Raises:
            CheckpointError: this one or the one before could not be written.
            NonFiniteError: the model holds a value that is not finite; nothing is written (case P9).
        """
        self.wait()
        state: dict[str, Any] = {
            "model": _model_state(model),
            "optimizers": optimizers.state_dict(),
            "rng": {_rank_key(self.ranks.rank): rng_state()},
        }
        if self.ranks.is_first:
            state["host"] = json.dumps({"step": step, **host})
        _refuse_non_finite(state["model"], step, self.ranks)
        partial = self.folder / f".partial_{files.step_dir(self.folder, step).name}"
        # DCP says so once per save, from its thread, when there is only one process
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        job = _Job(step, best, Future())
        try:
            if self.ranks.is_first:
                self.folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(partial, ignore_errors=True)
            written = async_save(
                state, checkpoint_id=str(partial), no_dist=self.ranks.alone, process_group=self.ranks.save_group
            )
        except (OSError, CheckpointException) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise self._error(step, error) from error
        assert isinstance(written, Future)
        self._job = job
        written.add_done_callback(lambda future: self._finish(future, partial, job))

    def _finish(self, written: Future[Any], partial: Path, job: _Job) -> None:
        """In DCP's thread, after the last byte: seal, rename, point to it, throw away what is not needed any more."""
        try:
            written.result()  # on the first rank it comes when every rank has written
            if self.ranks.is_first:
                files.seal(partial)
                files.publish(partial, files.step_dir(self.folder, job.step))
                if job.best is not None:
                    files.mark_best(self.folder, job.step, job.best)
                files.prune(self.folder, self.keep_last)
        except BaseException as error:  # it belongs to the thread that waits
            if self.ranks.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            job.done.set_exception(error)
        else:
            job.done.set_result(None)

    def wait(self) -> None:
        """Returns when nothing is being written any more.

        Raises:
            CheckpointError: the checkpoint under way could not be written.
        """
        job, self._job = self._job, None
        if job is None:
            return
        try:
            job.done.result()
        except (OSError, CheckpointException, RuntimeError) as error:
            raise self._error(job.step, error) from error

    def _error(self, step: int, error: BaseException) -> CheckpointError:
        kept = files.steps(self.folder)
        last = f"the checkpoint of step {kept[-1]} is whole" if kept else "there is no checkpoint before it"
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {str(self.folder)!r}: {_reason(error)}; {last}: "
            "make room or correct the folder's permissions and start the same command again"
        )


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizers: Stateful,
    host: dict[str, Any],
    *,
    keep_last: int = 2,
    ranks: Ranks | None = None,
) -> Path:
    """Writes the checkpoint of `step` and waits for it; returns its folder. See `Writer.save`."""
    writer = Writer(folder, keep_last, ranks)
    writer.save(step, model, optimizers, host)
    writer.wait()
    writer.ranks.on_first(lambda: None)  # on the others the end of their own part is no news of the whole
    return files.step_dir(folder, step)


def load(path: Path, model: nn.Module, optimizers: Stateful, ranks: Ranks | None = None) -> dict[str, Any]:
    """Reads a checkpoint into a model, its optimizers and the random generators; of any number of ranks into any other.

    A rank that the checkpoint has no random generator of keeps its own.

    Returns:
        The host's state, with "step".

    Raises:
        DamagedCheckpointError: it is not what was written. The model is untouched.
        ValueError: it is of another model or vocabulary; says which tensors differ. The model is untouched.
    """
    ranks = ranks or Ranks()
    key = _rank_key(ranks.rank)
    state: dict[str, Any] = {
        "model": _model_state(model),
        "optimizers": optimizers.state_dict(),
        "rng": {key: rng_state()},
        "host": "",
    }
    _read(state, path, ranks)
    _give_back(model, state["model"])
    optimizers.load_state_dict(state["optimizers"])
    set_rng_state(state["rng"][key])
    return json.loads(state["host"])


def load_model(path: Path, model: nn.Module, ranks: Ranks | None = None) -> int:
    """Reads only the model's tensors; returns the step they come from.

    Raises:
        ValueError: as `load`.
    """
    state: dict[str, Any] = {"model": _model_state(model), "host": ""}
    _read(state, path, ranks or Ranks())
    _give_back(model, state["model"])
    return int(json.loads(state["host"])["step"])


def newest_whole(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that matches its seal; damaged ones are set aside, and said to be. None: there is none.

    Raises:
        DamagedCheckpointError: there are checkpoints, and all of them are damaged.
    """
    files.tidy(folder)
    found = files.steps(folder)
    damage: list[str] = []
    for step in reversed(found):
        path = files.step_dir(folder, step)
        try:
            files.verify(path)
        except DamagedCheckpointError as error:
            damage.append(str(error))
            if len(damage) < len(found):
                say(f"checkpoint {path.name} is damaged and set aside as {files.set_aside(path).name}: {error}")
            continue
        return path
    if damage:
        raise DamagedCheckpointError(
            f"{str(folder)!r}: got no whole checkpoint ({damage[0]}); restore one from a copy, or start a new run"
        )
    return None


def read_metadata(path: Path) -> Metadata:
    """What DCP wrote down about a checkpoint.

    Raises:
        DamagedCheckpointError: it cannot be read.
    """
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # unpickling damaged bytes raises anything
        raise DamagedCheckpointError(
            f"{str(path)!r}: its .metadata cannot be read ({type(error).__name__}); use another checkpoint of the run"
        ) from error


def tensor_shapes(metadata: Metadata, prefix: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors below `prefix`, such as "model.", without it."""
    return {
        name.removeprefix(prefix): tuple(item.size)
        for name, item in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(item, TensorStorageMetadata)
    }


def differences(
    first: dict[str, tuple[int, ...]],
    second: dict[str, tuple[int, ...]],
    first_name: str = "the checkpoint",
    second_name: str = "the model",
) -> list[str]:
    """What differs between two sets of tensors, given by their shapes; one line per tensor.

    >>> differences({"a": (2, 3), "b": (1,)}, {"a": (4, 3), "c": (1,)})
    ['a is [2, 3] in the checkpoint, [4, 3] in the model', 'b is only in the checkpoint', 'c is only in the model']
    """
    lines = []
    for name in sorted({*first, *second}):
        if name not in second:
            lines.append(f"{name} is only in {first_name}")
        elif name not in first:
            lines.append(f"{name} is only in {second_name}")
        elif first[name] != second[name]:
            lines.append(f"{name} is {list(first[name])} in {first_name}, {list(second[name])} in {second_name}")
    return lines


def _model_state(model: nn.Module) -> dict[str, Any]:
    """Its tensors; of a sharded table the pieces held here. They share memory with the model's own."""
    state = model.state_dict()
    return {name: table_pieces(t) if isinstance(t, ShardedTensor) else _as_stored(t) for name, t in state.items()}


def _as_stored(value: Any) -> Any:
    """A weight that is gathered in FP8 is wrapped for it; a checkpoint holds what is inside."""
    if isinstance(value, DTensor) and (inner := getattr(value.to_local(), "stored", None)) is not None:
        shape, stride = value.shape, value.stride()
        return DTensor.from_local(
            inner, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride
        )
    return value


def table_pieces(table: ShardedTensor) -> Tensor:
    """The rows of a torchrec table that are held here, sharing its memory.

    Unlike a `ShardedTensor` DCP can copy them for a write in the background.
    """
    from gemworks.parallel.table_checkpoint import TablePieces  # seconds to import, and one process has no use for it

    shards = table.local_shards()
    pieces = [(shard.metadata.shard_offsets[0], shard.tensor.detach()) for shard in shards]
    like = torch.empty(0, dtype=table.metadata().tensor_properties.dtype)
    return TablePieces(tuple(table.metadata().size), pieces, like)


def _give_back(model: nn.Module, state: dict[str, Any]) -> None:
    """Tables have been read in place; what remains is what `load_state_dict` does beyond copying."""
    tables = {name: t for name, t in model.state_dict().items() if isinstance(t, ShardedTensor)}
    model.load_state_dict({**state, **tables})


def _rank_key(rank: int) -> str:
    return f"rank_{rank}"


def _read(state: dict[str, Any], path: Path, ranks: Ranks) -> None:
    ranks.on_first(lambda: files.verify(path))
    shapes = {name: tuple(t.shape) for name, t in state["model"].items() if isinstance(t, Tensor)}
    own = {name: shape for found in ranks.gather(shapes) for name, shape in found.items()}
    metadata = read_metadata(path)
    lines = differences(tensor_shapes(metadata, "model."), own)
    if lines:
        shown = "; ".join(lines[:MAX_TENSORS_IN_A_MESSAGE])
        rest = len(lines) - MAX_TENSORS_IN_A_MESSAGE
        raise ValueError(
            f"{str(path)!r}: is of another model or vocabulary: {shown}{f'; and {rest} more' if rest > 0 else ''}; "
            "use the configuration and the data it was trained with"
        )
    wanted = _without_missing_generators(state, metadata)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        load_state(wanted, checkpoint_id=str(path), no_dist=ranks.alone, process_group=ranks.save_group)
        state["host"] = wanted["host"]
    except CheckpointException as error:
        raise ValueError(
            f"{str(path)!r}: cannot be read into this run ({_reason(error)}); "
            "use the configuration and the data it was trained with"
        ) from error


def read_into(state: dict[str, Any], path: Path) -> None:
    """Fill a state, of some or all entries of a checkpoint, in this process alone.

    Raises:
        DamagedCheckpointError: it cannot be read.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            load_state(state, checkpoint_id=str(path), no_dist=True)
        except CheckpointException as error:
            raise DamagedCheckpointError(f"{str(path)!r}: cannot be read; use another checkpoint of the run") from error


def _without_missing_generators(state: dict[str, Any], metadata: Metadata) -> dict[str, Any]:
    """The state to ask DCP for: generators of a rank or a device that the checkpoint has none of are left out."""
    kept = {
        key: {name: t for name, t in generators.items() if f"rng.{key}.{name}" in metadata.state_dict_metadata}
        for key, generators in state.get("rng", {}).items()
    }
    return {**state, "rng": kept}


def _local(value: Any) -> list[Tensor]:
    """The floating tensors of a state's entry that this process holds."""
    pieces = getattr(value, "pieces", None)  # of a sharded table
    if pieces is not None:
        found = [x for _, x in pieces]
    elif isinstance(value, DTensor):
        found = [value.to_local()]
    else:
        found = [value] if isinstance(value, Tensor) else []
    return [x for x in found if x.is_floating_point()]


def _refuse_non_finite(model_state: dict[str, Any], step: int, ranks: Ranks) -> None:
    own = [n for n, value in model_state.items() if not all(bool(torch.isfinite(x).all()) for x in _local(value))]
    place = {name: i for i, name in enumerate(model_state)}  # a rank has not the experts of others
    names = sorted({n for found in ranks.gather(own) for n in found}, key=lambda n: (place.get(n, len(place)), n))
    if names:
        raise NonFiniteError(
            f"no checkpoint is written at step {step}: {', '.join(names[:MAX_TENSORS_IN_A_MESSAGE])} "
            f"{'has' if len(names) == 1 else 'have'} values that are not finite; go on from an earlier checkpoint with "
            "a lower optimizer.lr or optimizer.sparse_lr",
            {"step": step, "parameters": names},
        )


def _reason(error: BaseException) -> str:
    """The first cause of a failure, on one line; DCP wraps it with a traceback per rank."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    while not isinstance(error, OSError) and error.__cause__ is not None:
        error = error.__cause__
    context = error.__context__
    if not isinstance(error, OSError) and isinstance(context, OSError):
        error = context  # torch.save reports the failed write of its own file, and hides why it failed
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def rng_state() -> dict[str, Tensor]:
    """The random generators' states: "cpu", and "cuda" of the current GPU."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Brings the random generators back to a `rng_state`."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
