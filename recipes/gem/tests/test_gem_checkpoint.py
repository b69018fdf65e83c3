"""Checkpoints: whole or absent, kept or thrown away by rule, flat in memory, and what is said when they go wrong."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gemworks.gem import checkpoint
from gemworks.gem import checkpoint_files as files
from gemworks.gem.checkpoint import CheckpointError, DamagedCheckpointError, Writer
from gemworks.gem.data import open_source
from gemworks.gem.inspect_checkpoint import inspect
from gemworks.gem.numerics import NonFiniteError
from gemworks.gem.presets import load_config
from gemworks.gem.trainer import Trainer
from torch import nn
from torch.distributed.checkpoint import filesystem

pytestmark = pytest.mark.reference

CPU = torch.device("cpu")
SETTINGS = ("data.num_samples=256", "data.batch_size=16", "data.max_length=8", "data.prefetch=0", "model.dim=32")


def make(*settings: str) -> Trainer:
    config = load_config("tiny", sets=[*SETTINGS, *settings])
    return Trainer(config, open_source(config.data), CPU)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    trainer = make()
    next(iter(trainer.steps()))
    return trainer


def write(writer: Writer, trainer: Trainer, step: int, best: dict[str, Any] | None = None) -> None:
    writer.save(step, trainer.model, trainer.optimizers, trainer.host_state(), best=best)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_keeps_the_newest_and_the_best(trainer: Trainer, tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep_last=2)
    for step in range(1, 7):
        write(writer, trainer, step, best={"valid_ne": 0.5} if step == 2 else None)
    writer.wait()
    assert files.steps(tmp_path) == [2, 5, 6]
    assert files.find(tmp_path, "best").name == "step_00000002"
    assert files.find(tmp_path, "last").name == "step_00000006"
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 2, "valid_ne": 0.5}
    assert not list(tmp_path.glob(".*"))
    for step in (2, 5, 6):
        files.verify(files.step_dir(tmp_path, step))


def test_what_is_written_is_what_was_there_when_save_returned(tmp_path: Path) -> None:
    """The write happens in the background: training goes on and must not change it."""
    trainer = make()
    steps = trainer.steps()
    next(steps)
    before = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    state = trainer.optimizers.state_dict()["state"]
    moments = {name: t["exp_avg"].clone() for name, t in state.items() if "exp_avg" in t}
    sums = {name: t["sum"].clone() for name, t in state.items() if "sum" in t}
    writer = Writer(tmp_path)
    write(writer, trainer, 1)
    next(steps)
    writer.wait()
    other = make("train.seed=9")
    assert other.load(files.find(tmp_path, "last"))["step"] == 1
    assert all(torch.equal(t, before[name]) for name, t in other.model.state_dict().items())
    assert not all(torch.equal(t, before[name]) for name, t in trainer.model.state_dict().items())
    restored = other.optimizers.state_dict()["state"]
    assert len(moments) > 10
    assert len(sums) > 2
    assert all(torch.equal(restored[name]["exp_avg"], t) for name, t in moments.items())
    assert all(torch.equal(restored[name]["sum"], t) for name, t in sums.items())
    assert any(float(t.sum()) > 0 for t in sums.values())


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: 60 checkpoints on a disk spend their time in fsync."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shm) as name:
        yield Path(name)


def test_fifty_in_a_row_with_flat_memory(memory_folder: Path) -> None:
    model = nn.Sequential(
        nn.Linear(1024, 256), nn.Linear(256, 1024)
    )  # few tensors of some size: DCP's cost is per tensor
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()

    def resident_bytes() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    writer = Writer(memory_folder, keep_last=2)
    for step in range(1, 11):  # the allocator settles
        writer.save(step, model, optimizer, {"lines": list(range(1000))})
    writer.wait()
    before = resident_bytes()
    for step in range(11, 61):
        writer.save(step, model, optimizer, {"lines": list(range(1000))})
    writer.wait()
    size = sum(p.stat().st_size for p in files.find(memory_folder, "last").iterdir())
    assert size > 1 << 20
    # one checkpoint left behind by each save would be 50 times its size
    assert resident_bytes() - before < 5 * size
    assert files.steps(memory_folder) == [59, 60]


class FullDisk:
    """Takes the place of an open file: `room` bytes fit, then the disk is full."""

    def __init__(self, file: Any, room: int) -> None:
        self._file = file
        self._room = room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data)


@pytest.mark.parametrize("room", [0, 1000, 200_000])
def test_full_disk_loses_nothing_and_says_so(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    writer = Writer(tmp_path)
    write(writer, trainer, 1, best={"valid_ne": 0.9})
    writer.wait()
    before = content(tmp_path)
    whole = filesystem.FileSystem.create_stream

    @contextmanager
    def full(self: Any, path: Any, mode: str) -> Iterator[Any]:
        with whole(self, path, mode) as stream:
            yield FullDisk(stream, room) if mode == "wb" else stream

    monkeypatch.setattr(filesystem.FileSystem, "create_stream", full)
    write(writer, trainer, 2, best={"valid_ne": 0.8})
    with pytest.raises(CheckpointError, match=r"step 2 could not be written.*No space left on device.*step 1 is whole"):
        writer.wait()
    assert content(tmp_path) == before
    monkeypatch.undo()
    write(writer, trainer, 2)  # there is room again
    writer.wait()
    assert files.steps(tmp_path) == [1, 2]


def test_failure_while_sealing_loses_nothing(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path)
    write(writer, trainer, 1)
    writer.wait()
    before = content(tmp_path)

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "seal", fail)
    write(writer, trainer, 2)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write(writer, trainer, 3)  # the failure of 2 is raised here at the latest
    assert content(tmp_path) == before


def test_folder_that_cannot_be_written(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match=r"Read-only file system.*no checkpoint before it.*permissions"):
        write(Writer(tmp_path / "checkpoints"), trainer, 1)


def test_p9_poisoned_model_is_not_written(tmp_path: Path) -> None:
    """Case P9, the last line of defence: whatever made a parameter NaN, it does not reach the disk."""
    trainer = make()
    writer = Writer(tmp_path)
    write(writer, trainer, 1)
    writer.wait()
    before = content(tmp_path)
    name, victim = next((n, p) for n, p in trainer.model.named_parameters() if p.ndim == 2)
    with torch.no_grad():
        victim[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=rf"no checkpoint is written at step 2: {name} has values"):
        write(writer, trainer, 2)
    assert content(tmp_path) == before


@pytest.mark.parametrize("what", ["cut", "flip", "missing", "metadata", "seal", "no seal"])
def test_damage_is_found_and_nothing_is_read(trainer: Trainer, tmp_path: Path, what: str) -> None:
    path = trainer.save(tmp_path)
    data = next(path.glob("*.distcp"))
    raw = bytearray(data.read_bytes())
    if what == "cut":
        data.write_bytes(raw[: len(raw) // 2])
    elif what == "flip":
        raw[len(raw) // 2] ^= 1
        data.write_bytes(raw)
    elif what == "missing":
        data.unlink()
    elif what == "metadata":
        (path / ".metadata").write_bytes(b"")
    elif what == "seal":
        (path / "files.json").write_text("{")
    else:
        (path / "files.json").unlink()
    expected = {
        "cut": f"{data.name} has {len(raw) // 2} bytes, expected {len(raw)}",
        "flip": f"the content of {data.name} has changed",
        "missing": f"{data.name} is missing",
        "metadata": r"\.metadata has 0 bytes",
        "seal": "not JSON",
        "no seal": "got no files.json",
    }[what]
    other = make("train.seed=3")
    before = {name: t.clone() for name, t in other.model.state_dict().items()}
    with pytest.raises(DamagedCheckpointError, match=rf"{expected}.*use another checkpoint"):
        other.load(path)
    assert all(torch.equal(t, before[name]) for name, t in other.model.state_dict().items())
    assert inspect(tmp_path)["checkpoints"][0]["whole"] is False


def test_newest_whole_checkpoint_is_found_past_damage(trainer: Trainer, tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        write(writer, trainer, step)
    writer.wait()
    next(files.step_dir(tmp_path, 3).glob("*.distcp")).write_bytes(b"")
    said: list[str] = []
    assert checkpoint.newest_whole(tmp_path, said.append) == files.step_dir(tmp_path, 2)
    assert len(said) == 1
    assert "step_00000003 is damaged and set aside as damaged_step_00000003" in said[0]
    assert (tmp_path / "damaged_step_00000003").is_dir()
    for step in (1, 2):
        (files.step_dir(tmp_path, step) / ".metadata").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"got no whole checkpoint .*restore one from a copy"):
        checkpoint.newest_whole(tmp_path, said.append)
    assert checkpoint.newest_whole(tmp_path / "nothing", said.append) is None


def test_what_a_dead_process_left_is_tidied(trainer: Trainer, tmp_path: Path) -> None:
    path = trainer.save(tmp_path)
    (tmp_path / ".partial_step_00000009").mkdir()
    (tmp_path / ".partial_step_00000009" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".partial_best.json").write_text("{")
    old = path.with_name(f".old_{path.name}")
    shutil.move(path, old)  # killed between the two renames of `publish`
    assert checkpoint.newest_whole(tmp_path, lambda text: None) == path
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]


def test_other_model_and_other_vocabulary_name_the_tensors(trainer: Trainer, tmp_path: Path) -> None:
    path = trainer.save(tmp_path)
    before = content(tmp_path)
    vocabulary = make("data.num_ids=500")
    with pytest.raises(ValueError, match=r"vocabulary: embeddings.* is \[1000, 16\] in the .*\[500, 16\]"):
        vocabulary.load(path)
    deeper = make("model.num_layers=3")
    with pytest.raises(ValueError, match=r"layers\.2\.\S+ is only in the model.*and \d+ more; use the configuration"):
        deeper.load(path)
    assert content(tmp_path) == before


def test_writing_the_same_step_again_replaces_it(trainer: Trainer, tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.save(4, trainer.model, trainer.optimizers, {"which": "first"})
    writer.save(4, trainer.model, trainer.optimizers, {"which": "second"})
    writer.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000004"]
    other = make()
    assert checkpoint.load(files.step_dir(tmp_path, 4), other.model, other.optimizers)["which"] == "second"


def test_rng_is_restored(tmp_path: Path) -> None:
    trainer = make()
    torch.manual_seed(5)
    path = trainer.save(tmp_path)
    expected = torch.rand(4)
    torch.manual_seed(6)
    trainer.load(path)
    assert torch.equal(torch.rand(4), expected)
