"""What a run lets people see: log file, phases, traces, other sinks, and the snapshot of a full GPU."""

from __future__ import annotations

import io
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from gemworks.gem.data import open_source
from gemworks.gem.instruments import memory_snapshot
from gemworks.gem.presets import load_config
from gemworks.gem.run_dir import RunDir
from gemworks.gem.timing import PhaseTimer, StepClock
from gemworks.gem.train import train
from gemworks.gem.trainer import Trainer
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.reference

CPU = torch.device("cpu")
SETTINGS = (
    "data.num_samples=128",
    "data.batch_size=8",
    "data.max_length=8",
    "data.prefetch=0",
    "model.dim=32",
    "model.num_layers=1",
    "train.max_steps=8",
    "train.log_every=2",
)


def run(path: Path, *settings: str) -> str:
    out = io.StringIO()
    train(load_config("tiny", sets=[*SETTINGS, *settings]), path, console=Console(file=out, width=120))
    return out.getvalue()


def test_log_file_has_the_lines_of_the_screen_with_time_and_phases(tmp_path: Path) -> None:
    text = run(tmp_path / "run")
    lines = (tmp_path / "run" / "train.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \S", line) for line in lines)
    steps = [line for line in lines if "  loss " in line]
    assert len(steps) == 4
    assert all(re.search(r"\(data \d+, forward \d+, backward \d+, optimizer \d+\)$", line) for line in steps)
    said = [line for line in text.splitlines() if line.startswith(("data:", "model:", "valid at"))]
    assert len(said) == 3
    assert all(any(line.endswith(words) for line in lines) for words in said)


def test_phases_add_up_to_the_step(tmp_path: Path) -> None:
    run(tmp_path / "run")
    for row in RunDir.open(tmp_path / "run").rows("train"):
        parts = [row[f"{phase}_ms"] for phase in ("data_wait", "forward", "backward", "optimizer")]
        assert all(ms > 0 for ms in parts)
        assert sum(parts) <= row["step_ms"]


def test_phase_timer_and_clock() -> None:
    timer = PhaseTimer(CPU)
    for _ in range(2):
        with timer("backward"):
            torch.ones(2).sum()
    drained = timer.drain()
    assert drained["backward"] > 0
    assert drained["forward"] == 0
    clock, other = StepClock(), StepClock()
    other.backward_seconds, other.num_steps = 0.5, 2
    clock.add(other)
    assert clock.per_step_ms("backward") == 250
    assert StepClock().per_step_ms("wait") == 0


def test_traces_by_schedule(tmp_path: Path) -> None:
    run(tmp_path / "run", "train.profile_every=4", "train.profile_steps=2", "train.max_steps=10")
    traces = sorted((tmp_path / "run" / "profile").glob("trace_*.json"))
    assert [p.name for p in traces] == ["trace_00000004.json", "trace_00000008.json"]
    for path in traces:
        names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
        assert names.count("gem::forward") == 2
        assert names.count("gem::backward") == 2
        assert names.count("gem::optimizer") == 2


def test_no_trace_without_a_schedule(tmp_path: Path) -> None:
    run(tmp_path / "run", "train.max_steps=2")
    assert not (tmp_path / "run" / "profile").exists()


class FakeWandb(types.ModuleType):
    """Stands in for the package, which is optional: records what it is told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.starts: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.num_finished = 0

    def init(self, **arguments: Any) -> FakeWandb:
        self.starts.append(arguments)
        return self

    def log(self, values: dict[str, Any]) -> None:
        self.rows.append(values)

    def finish(self) -> None:
        self.num_finished += 1


def test_weights_and_biases_gets_every_row_and_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run(tmp_path / "first", "train.wandb_project=ads")
    rows = RunDir.open(tmp_path / "first").rows("train")
    sent = [row for row in fake.rows if "train/loss" in row]
    assert [row["train/loss"] for row in sent] == [row["loss"] for row in rows]
    assert [row["trained_steps"] for row in sent] == [2, 4, 6, 8]
    (start,) = fake.starts
    assert (start["project"], start["name"], start["resume"]) == ("ads", "first", "allow")
    assert start["config"]["train"]["max_steps"] == 8
    assert fake.num_finished == 1
    folder = RunDir.claim(tmp_path / "first", RunDir.open(tmp_path / "first").config())
    folder.log("train", 9, loss=0.5)
    folder.close()
    assert len(start["id"]) == 12
    assert fake.starts[1]["id"] == start["id"]


def test_weights_and_biases_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"train.wandb_project: got 'ads', but wandb cannot be imported.*pip install"):
        run(tmp_path / "run", "train.wandb_project=ads")


def test_resumed_tensorboard_events_have_no_step_twice(tmp_path: Path) -> None:
    config = load_config("tiny", sets=SETTINGS)
    first = RunDir.claim(tmp_path, config)
    for step in (1, 2, 3, 4):
        first.log("train", step, loss=float(step))
    first.close()
    second = RunDir.claim(tmp_path, config)
    second.rewind(2)
    for step in (3, 4, 5):
        second.log("train", step, loss=10.0 * step)
    second.close()
    assert [(row["step"], row["loss"]) for row in second.rows()] == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]


def test_memory_snapshot_does_nothing_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError), memory_snapshot(tmp_path, CPU, history=True):
        raise torch.OutOfMemoryError("no GPU is involved")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_full_gpu_leaves_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Trainer._forward

    def greedy(self: Trainer, batch: Any) -> Any:
        if self.step == 2:
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
        return forward(self, batch)

    monkeypatch.setattr(Trainer, "_forward", greedy)
    with pytest.raises(RuntimeError, match=r"out of GPU memory; .*memory_snapshot.pickle shows.*train.accumulate"):
        run(tmp_path / "run", "train.device=cuda", "train.memory_history=true")
    assert (tmp_path / "run" / "memory_snapshot.pickle").stat().st_size > 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_phases_on_a_gpu() -> None:
    config = load_config("tiny", sets=[*SETTINGS, "train.device=cuda"])
    trainer = Trainer(config, open_source(config.data), torch.device("cuda"))
    for _ in trainer.steps():
        pass
    row = trainer.take_row()
    assert min(row.forward_ms, row.backward_ms, row.optimizer_ms) > 0
    assert row.forward_ms + row.backward_ms + row.optimizer_ms <= row.step_ms
