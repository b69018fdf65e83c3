"""Losses and gradients that are not finite: skipped, counted, reported, and never written (case P9)."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gemworks.gem import checkpoint_files as files
from gemworks.gem.data import Source, open_source
from gemworks.gem.numerics import NonFiniteError, SpikeWatch, first_non_finite
from gemworks.gem.presets import load_config
from gemworks.gem.run_dir import RunDir
from gemworks.gem.train import train
from gemworks.gem.trainer import Trainer
from rich.console import Console
from torch import Tensor, nn

pytestmark = pytest.mark.reference

CPU = torch.device("cpu")
SETTINGS = (
    "data.num_samples=256",
    "data.batch_size=16",
    "data.max_length=8",
    "data.prefetch=0",
    "model.dim=32",
    "optimizer.warmup_steps=2",
    "train.log_every=1",
)
POISONED = 5  # the batch with a NaN, from 0


class Poisoned:
    """A source in which the float column 3 of some samples is NaN."""

    def __init__(self, source: Source, sample_ids: set[int]) -> None:
        self._source = source
        self._ids = sample_ids
        self.schema = source.schema

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, split: str, rows_B: Any) -> Any:
        batch = self._source.read(split, rows_B)
        if split == "train":
            bad_B = torch.tensor([i in self._ids for i in batch.sample_ids_B.tolist()])
            batch.dense_BC[bad_B, 3] = float("nan")
        return batch


def ids_of(batch: int, *settings: str) -> list[int]:
    config = load_config("tiny", sets=[*SETTINGS, *settings])
    trainer = Trainer(config, open_source(config.data), CPU)
    return list(trainer.loader)[batch].sample_ids_B.tolist()


def poisoned(*settings: str, bad: set[int]) -> Trainer:
    config = load_config("tiny", sets=[*SETTINGS, *settings])
    source: Any = Poisoned(open_source(config.data), bad)
    return Trainer(config, source, CPU)


def snapshot(trainer: Trainer) -> dict[str, Tensor]:
    tensors = {f"model.{k}": t.clone() for k, t in trainer.model.state_dict().items()}
    for name, entry in trainer.optimizers.state_dict()["state"].items():
        tensors |= {f"{name}.{k}": t.clone() for k, t in entry.items() if not (k == "step" and "sum" in entry)}
    return tensors


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    ids = ids_of(POISONED)
    trainer = poisoned(bad={ids[7]})
    steps = trainer.steps()
    for _ in range(POISONED):
        next(steps)
    trainer.take_row()
    before = snapshot(trainer)
    assert next(steps) == POISONED + 1
    after = snapshot(trainer)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert not trainer.last_step_finite
    (note,) = trainer.take_notes()
    assert (note.kind, note.step, note.facts["sample_ids"]) == ("skipped", POISONED + 1, ids)
    assert "skipped (1 of at most 10)" in note.text
    row = trainer.take_row()
    assert row.num_skipped == 1
    next(steps)
    assert trainer.last_step_finite
    assert any(not torch.equal(t, after[name]) for name, t in snapshot(trainer).items())
    assert trainer.take_row().loss < 1.0


def test_limit_ends_the_run_with_step_samples_and_place() -> None:
    ids = ids_of(POISONED)
    trainer = poisoned("train.max_skipped=0", bad={ids[7]})
    with pytest.raises(
        NonFiniteError, match=r"step 6 is not finite.*It begins at: dense column '\w+' of the data"
    ) as e:
        for _ in trainer.steps():
            pass
    assert e.value.report["step"] == POISONED + 1
    assert e.value.report["sample_ids"] == ids
    assert e.value.report["non_finite_sample_ids"] == [ids[7]]
    assert trainer.schema.dense_names[3] in e.value.report["first_non_finite"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("layers.1.gate", "output of layers.1.gate"),
        ("head", "output of head"),
        ("events.0.merge", "output of events.0"),
    ],
)
def test_first_module_whose_output_is_not_finite_is_named(where: str, expected: str) -> None:
    trainer = poisoned("train.max_skipped=0", bad=set())

    def spoil(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * float("inf")

    handle = trainer.model.get_submodule(where).register_forward_hook(spoil)
    with pytest.raises(NonFiniteError) as error:
        next(iter(trainer.steps()))
    handle.remove()
    assert error.value.report["first_non_finite"].startswith(expected)


def test_gradient_that_overflows_only_in_backward_is_named_and_no_table_moves() -> None:
    trainer = poisoned("train.max_skipped=0", bad=set())

    class Burst(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * float("nan")

    module = trainer.model.get_submodule("layers.0.interaction")
    module.register_forward_hook(lambda module, inputs, output: Burst.apply(output))
    before = snapshot(trainer)
    with pytest.raises(NonFiniteError) as error:
        next(iter(trainer.steps()))
    assert error.value.report["first_non_finite"].startswith("gradient of the output of layers.0.interaction.")
    assert torch.isfinite(torch.tensor(error.value.report["loss"]))
    for name, tensor in snapshot(trainer).items():
        assert torch.equal(tensor, before[name]), name


def test_parameter_that_is_not_finite_is_named_first() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert first_non_finite(model, lambda: model(torch.ones(1, 2)).sum()) is None
    with torch.no_grad():
        model.get_parameter("1.weight").fill_(float("inf"))
    assert first_non_finite(model, lambda: model(torch.ones(1, 2)).sum()) == "parameter 1.weight"
    assert not any(module._forward_hooks for module in model.modules())


def run(path: Path, monkeypatch: pytest.MonkeyPatch, bad: set[int], *settings: str) -> dict[str, Any]:
    monkeypatch.setattr("gemworks.gem.data.open_source", lambda config: Poisoned(open_source(config), bad))
    config = load_config("tiny", sets=[*SETTINGS, *settings])
    return train(config, path, console=Console(file=io.StringIO()))


def test_p9_no_checkpoint_and_no_evaluation_of_a_step_that_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case P9: steps 6 and the last are poisoned, checkpoints are due after each step."""
    few = "data.num_samples=176"
    last = len(poisoned(few, bad=set()).loader)
    bad = {ids_of(POISONED, few)[0], ids_of(last - 1, few)[0]}
    settings = (few, "train.save_every=1", "train.eval_every=6", "train.keep_last=99")
    summary = run(tmp_path / "run", monkeypatch, bad, *settings)
    folder = RunDir.open(tmp_path / "run")
    assert files.steps(folder.checkpoints) == [s for s in range(1, last) if s != POISONED + 1]
    assert [row["step"] for row in folder.rows("valid")] == [7, *range(12, last, 6)]  # 6 was put off to 7
    assert [row["step"] for row in folder.rows("skipped")] == [6, last]
    assert summary["num_skipped"] == 2
    assert "the best one before stays the best" in folder.log_path.read_text()
    rows = {row["step"]: row["loss"] for row in folder.rows("train")}
    assert rows[6] is None
    assert rows[7] is not None


def test_diverged_run_stops_says_where_and_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    with pytest.raises(NonFiniteError, match=r"2 steps of this run have been skipped already.*Lower optimizer.lr"):
        run(
            path,
            monkeypatch,
            set(),
            "optimizer.lr=1e30",
            "optimizer.warmup_steps=0",
            "optimizer.clip_norm=1e30",
            "train.max_skipped=2",
        )
    assert not (path / "checkpoints").exists()
    report = json.loads((path / "non_finite.json").read_text())
    assert report["step"] == 4
    assert report["first_non_finite"].startswith(("output of", "parameter"))
    assert len(report["sample_ids"]) == 16
    assert "NonFiniteError" in (path / "train.log").read_text()


def test_run_that_ends_not_finite_without_a_checkpoint_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NonFiniteError, match=r"the last step, 6, is not finite: no evaluation and no checkpoint"):
        run(tmp_path / "run", monkeypatch, {ids_of(POISONED)[0]}, "train.max_steps=6")
    assert not (tmp_path / "run" / "summary.json").exists()


def test_spikes_are_noticed_and_do_not_move_the_mean_much() -> None:
    watch = SpikeWatch(3.0, horizon=10)
    assert [watch.see(1.0 + 0.01 * i) for i in range(10)] == [None] * 10
    assert watch.see(2.9) is None
    ratio = watch.see(1000.0)
    assert ratio is not None
    assert ratio > 500
    assert watch.mean < 2.0
    assert watch.see(1000.0) is not None
    other = SpikeWatch(3.0, horizon=10)
    other.load_state_dict(watch.state_dict())
    assert other.see(1000.0) == watch.see(1000.0)


def test_spike_is_logged_with_its_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Trainer._forward
    calls = {"train": 0}

    def forward(self: Trainer, batch: Any) -> Any:
        logits_BK, loss = whole(self, batch)
        calls["train"] += 1
        return logits_BK, loss * 50 if calls["train"] == 9 else loss

    monkeypatch.setattr(Trainer, "_forward", forward)
    monkeypatch.setattr("gemworks.gem.trainer.SpikeWatch", lambda factor: SpikeWatch(factor, horizon=4))
    run(tmp_path / "run", monkeypatch, set(), "train.max_steps=10")
    (row,) = RunDir.open(tmp_path / "run").rows("spike")
    assert row["step"] == 9
    assert row["ratio"] == pytest.approx(50, rel=0.1)
    assert row["sample_ids"] == ids_of(8)
    assert "loss spike in step 9" in (tmp_path / "run" / "train.log").read_text()
