"""A whole tiny run on synthetic data: files, figures, reproducibility, reload, and what goes wrong.

The reload tests are case L5: the evaluation of a reloaded checkpoint equals the one before saving, bit for bit.
"""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gemworks.gem import checkpoint
from gemworks.gem.config import GemConfig
from gemworks.gem.data import Source, open_source
from gemworks.gem.device import resolve_device
from gemworks.gem.errors import report
from gemworks.gem.evaluate import evaluate_run
from gemworks.gem.loss import task_loss
from gemworks.gem.optim import Optimizers, learning_rate_factor
from gemworks.gem.presets import load_config
from gemworks.gem.run_dir import RunDir
from gemworks.gem.train import main, train
from gemworks.gem.trainer import Trainer
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.reference

SETTINGS = (
    "data.num_samples=384",
    "data.batch_size=32",
    "data.max_length=16",
    "data.prefetch=0",
    "model.dim=32",
    "model.dropout=0.1",  # so that evaluation mode and the random generators matter
    "optimizer.warmup_steps=3",
    "train.log_every=2",
    "train.eval_every=5",
)
CPU = torch.device("cpu")


def tiny(*settings: str) -> GemConfig:
    return load_config("tiny", sets=[*SETTINGS, *settings])


def run(path: Path, *settings: str) -> tuple[dict[str, Any], str]:
    out = io.StringIO()
    summary = train(tiny(*settings), path, console=Console(file=out, width=120))
    return summary, out.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    path = tmp_path_factory.mktemp("runs") / "first"
    summary, text = run(path)
    return path, summary, text


def parameters(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a run's best model."""
    folder = RunDir.open(path)
    trainer = Trainer(folder.config(), open_source(folder.config().data), CPU)
    checkpoint.load_model(checkpoint.find(folder.checkpoints, "best"), trainer.model)
    return trainer.model.state_dict()


def losses(path: Path) -> list[float]:
    return [row["loss"] for row in RunDir.open(path).rows("train")]


def test_run_folder_holds_everything(finished: tuple[Path, dict[str, Any], str]) -> None:
    path, summary, _ = finished
    assert RunDir.open(path).config() == tiny()
    kinds = [row["kind"] for row in RunDir.open(path).rows()]
    assert set(kinds) == {"train", "valid", "test"}
    assert (path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((path / "summary.json").read_text())["ne"] == summary["ne"]
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/ne", "train/samples_per_s", "valid/ne", "test/auc"} <= set(events.Tags()["scalars"])
    logged = [(e.step, round(e.value, 5)) for e in events.Scalars("valid/ne")]
    assert logged == [(r["step"], round(r["ne"], 5)) for r in RunDir.open(path).rows("valid")]
    steps = sorted(p.name for p in (path / "checkpoints").glob("step_*"))
    assert 2 <= len(steps) <= 3  # the last two and the best
    assert not list(path.rglob(".partial*"))


def test_summary_has_the_promised_keys_and_consistent_figures(finished: tuple[Path, dict[str, Any], str]) -> None:
    path, summary, _ = finished
    promised = (
        "ne auc calibration baseline_ne baseline_auc history_baseline_ne history_baseline_auc samples_per_s "
        "tokens_per_s flops_per_s mfu train_seconds seeds versions"
    )
    assert set(promised.split()) <= set(summary)
    assert summary["num_steps"] == 12
    assert summary["seeds"] == {"train": 0, "data": 0}
    assert summary["tasks"][summary["task"]]["ne"] == summary["ne"]
    assert summary["baseline_ne"] is None  # synthetic data has no users and items
    assert 0 < summary["bayes_ne"] < 1
    valid = RunDir.open(path).rows("valid")
    assert summary["valid_ne"] == min(row["ne"] for row in valid)
    assert summary["best_step"] == min(valid, key=lambda row: row["ne"])["step"]
    assert [row["step"] for row in valid] == [5, 10, 12]
    # 12 steps of 32 samples, evaluations not counted
    assert summary["samples_per_s"] * summary["step_ms"] / 1e3 == pytest.approx(32)
    assert summary["step_ms"] * 12 / 1e3 == pytest.approx(summary["train_seconds"])
    assert summary["eval_seconds"] > 0
    phases = [summary[f"{phase}_ms"] for phase in ("data_wait", "forward", "backward", "optimizer")]
    assert all(ms > 0 for ms in phases)
    assert 0.7 * summary["step_ms"] < sum(phases) <= summary["step_ms"]
    assert summary["num_skipped"] == 0


def test_status_lines_name_every_figure(finished: tuple[Path, dict[str, Any], str]) -> None:
    _, _, text = finished
    lines = [line for line in text.splitlines() if "/12  loss" in line]
    assert [int(line.split("/")[0].split()[-1]) for line in lines] == [2, 4, 5, 6, 8, 10, 12]
    for figure in ("NE", "samples/s", "tokens/s", "FLOP/s", "ms/step"):
        assert all(figure in line for line in lines)
    assert "valid at step 12" in text
    assert text.count("run folder:") == 2  # at the start, for whoever has to go on with it, and at the end
    assert "Bayes" in text


def test_same_seed_same_bits_other_seed_other_bits(finished: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    path, summary, _ = finished
    again, _ = run(tmp_path / "again")
    other, _ = run(tmp_path / "other", "train.seed=1")
    assert losses(tmp_path / "again") == losses(path)
    assert again["tasks"] == summary["tasks"]
    first, second = parameters(path), parameters(tmp_path / "again")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert losses(tmp_path / "other") != losses(path)
    assert other["ne"] != summary["ne"]


def test_prefetch_changes_no_bit(finished: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    path, summary, _ = finished
    ahead, _ = run(tmp_path / "ahead", "data.prefetch=2")
    assert losses(tmp_path / "ahead") == losses(path)
    assert ahead["tasks"] == summary["tasks"]


def test_l5_reloaded_checkpoint_evaluates_to_the_bits_of_training(finished: tuple[Path, dict[str, Any], str]) -> None:
    """Case L5. The validation figures were taken before the checkpoint was written, the test figures after."""
    path, summary, _ = finished
    test = evaluate_run(path)
    assert test["equals_training"] is True
    for name, task in test["tasks"].items():
        assert task == summary["tasks"][name]
    before_saving = {row["step"]: row["tasks"] for row in RunDir.open(path).rows("valid")}
    for which in ("best", "last"):
        valid = evaluate_run(path, split="valid", which=which)
        assert valid["tasks"] == before_saving[valid["step"]]
        assert valid["equals_training"] is True


def test_l5_notices_a_changed_checkpoint(finished: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    """Case L5 the other way round: with another model in the checkpoint the figures differ and that is said."""
    path, _, _ = finished
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    config = tiny("train.seed=5")
    stranger = Trainer(config, open_source(config.data), CPU)
    stranger.step = checkpoint_step = evaluate_run(copy)["step"]
    stranger.save(copy / "checkpoints")
    result = evaluate_run(copy)
    assert result["step"] == checkpoint_step
    assert result["equals_training"] is False


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    config = tiny("model.dropout=0.1", "train.epochs=2", "train.max_steps=15")  # dropout: the generators matter too
    source = open_source(config.data)
    unbroken = Trainer(config, source, CPU)
    for _ in unbroken.steps():
        pass
    broken = Trainer(config, source, CPU)
    for step in broken.steps():
        if step == 7:
            break
    broken.take_row()
    path = broken.save(tmp_path)
    torch.manual_seed(99)
    resumed = Trainer(config, source, CPU)
    resumed.load(path)
    assert resumed.step == 7
    for _ in resumed.steps():
        pass
    assert resumed.step == 15
    for (name, a), b in zip(unbroken.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_schedule_reaches_both_optimizers() -> None:
    config = tiny("optimizer.lr=0.01", "optimizer.sparse_lr=0.5", "optimizer.warmup_steps=4", "optimizer.decay=cosine")
    trainer = Trainer(config, open_source(config.data), CPU)
    seen = []
    for step in trainer.steps():
        seen.append(trainer.optimizers.learning_rates())
        factor = learning_rate_factor(step - 1, config.optimizer, 12)
        assert seen[-1] == pytest.approx((0.01 * factor, 0.5 * factor))
    assert seen[0][0] == pytest.approx(0.0025)
    assert max(rate for rate, _ in seen) == pytest.approx(0.01)
    assert seen[-1][0] < 0.001


def test_dense_gradient_is_clipped_and_unseen_rows_stay() -> None:
    config = tiny("optimizer.clip_norm=0.001")
    trainer = Trainer(config, open_source(config.data), CPU)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    tables = {id(p) for p in trainer.model.sparse_parameters()}
    next(iter(trainer.steps()))
    clipped = torch.stack([p.grad.norm() for p in trainer.model.dense_parameters() if p.grad is not None]).norm()
    assert float(clipped) == pytest.approx(0.001, rel=1e-3)
    assert trainer.take_row().grad_norm > 0.001
    batch = next(iter(Trainer(config, open_source(config.data), CPU).loader))
    seen = _rows_seen(batch, trainer.schema)
    for name, p in trainer.model.named_parameters():
        if id(p) in tables:
            assert p.grad is None, name
            touched = torch.zeros(p.shape[0], dtype=torch.bool)
            touched[seen[name.split(".")[-2]]] = True
            assert touched.any()
            assert torch.equal(p.detach()[~touched], before[name][~touched]), name
            assert bool((p.detach()[touched] != before[name][touched]).any()), name


def _rows_seen(batch: Any, schema: Any) -> dict[str, list[int]]:
    """Ids of a batch by table."""
    found: dict[str, list[int]] = {}
    for feature in schema.ids:
        found.setdefault(feature.table, []).extend(batch.ids[feature.name].values().tolist())
    for event in schema.events:
        for feature in event.ids:
            key = schema.event_key(event.name, feature.name)
            found.setdefault(feature.table, []).extend(batch.event_ids[key].values().tolist())
    return found


def test_tables_have_one_accumulator_per_row() -> None:
    config = tiny()
    trainer = Trainer(config, open_source(config.data), CPU)
    state = trainer.optimizers.state_dict()["state"]
    rows = {name: p.shape[0] for name, p in trainer.model.named_parameters() if name.startswith("embeddings.")}
    assert rows
    for name, num_rows in rows.items():
        assert state[name]["sum"].numel() == num_rows


def test_loss_is_the_weighted_mean_of_the_tasks() -> None:
    logits, labels = torch.tensor([[2.0, -1.0], [0.5, 3.0]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    one, two = (torch.nn.functional.binary_cross_entropy_with_logits(logits[:, k], labels[:, k]).item() for k in (0, 1))
    assert task_loss(logits, labels, torch.tensor([3.0, 1.0])).item() == pytest.approx((3 * one + two) / 4)
    assert task_loss(logits[:0], labels[:0], torch.ones(2)).item() == 0.0


def test_bf16_autocast_runs_and_keeps_parameters_in_fp32() -> None:
    config = tiny("train.dtype=bfloat16", "train.max_steps=2")
    trainer = Trainer(config, open_source(config.data), CPU)
    for _ in trainer.steps():
        pass
    assert math.isfinite(trainer.take_row().loss)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_run_on_a_gpu(tmp_path: Path) -> None:
    summary, text = run(tmp_path / "gpu", "train.device=cuda", "train.dtype=bfloat16", "data.prefetch=2")
    assert math.isfinite(summary["ne"])
    assert evaluate_run(tmp_path / "gpu")["equals_training"] is True
    assert "MFU" in text or summary["mfu"] is None


class OneClass:
    """A source whose labels are all 0."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.schema = source.schema

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, split: str, rows: Any) -> Any:
        batch = self._source.read(split, rows)
        batch.labels_BK.zero_()
        return batch


def test_validation_part_of_one_class_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gemworks.gem.data.open_source", lambda config: OneClass(open_source(config)))
    with pytest.raises(ValueError, match="validation part: got 48 labels of one class"):
        run(tmp_path / "run", "train.max_steps=1")
    assert not (tmp_path / "run" / "summary.json").exists()


def test_used_folder_is_refused_and_untouched(finished: tuple[Path, dict[str, Any], str]) -> None:
    path, summary, _ = finished
    before = (path / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"another configuration: train.seed is 0 in the folder, 3 now; go on with"):
        run(path, "train.seed=3")
    again, text = run(path)
    assert again["ne"] == summary["ne"]
    assert "holds a complete run" in text
    assert (path / "metrics.jsonl").read_bytes() == before


def test_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="a file is in the way"):
        run(tmp_path / "file")


def test_checkpoint_of_another_model_names_the_tensor(
    finished: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    path, _, _ = finished
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    (copy / "config.toml").write_text(tiny("model.head_hidden_dim=48").to_toml())
    with pytest.raises(ValueError, match=r"another model or vocabulary: head.*in the checkpoint"):
        evaluate_run(copy)


def test_missing_and_damaged_runs_are_named(finished: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got no config.toml in it"):
        evaluate_run(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(finished[0], copy)
    with pytest.raises(ValueError, match="checkpoint: got 'newest', expected 'best' or 'last'"):
        evaluate_run(copy, which="newest")
    (checkpoint.find(copy / "checkpoints", "best") / ".metadata").unlink()
    with pytest.raises(ValueError, match=r".metadata is missing; it was damaged"):
        evaluate_run(copy)
    (copy / "checkpoints" / "best.json").unlink()
    with pytest.raises(ValueError, match="got no best checkpoint"):
        evaluate_run(copy)


def test_task_weights_must_fit_the_tasks() -> None:
    config = tiny("train.task_weights=[1.0]")
    with pytest.raises(ValueError, match=r"train.task_weights: got 1 weights, expected 2"):
        Trainer(config, open_source(config.data), CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_an_error_and_auto_is_not() -> None:
    with pytest.raises(ValueError, match=r"train.device: got 'cuda', but PyTorch sees no GPU"):
        resolve_device("cuda")
    assert resolve_device("auto") == CPU


def test_main_exit_codes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--preset", "tinny"]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: preset: got 'tinny'")
    assert main(["--preset", "tiny", "--set", "model.dmi=3"]) == 2
    assert "did you mean 'model.dim'" in capsys.readouterr().err
    bad = ["optimizer.lr=1e30", "optimizer.warmup_steps=0", "optimizer.clip_norm=1e30"]
    assert main(["--preset", "tiny", "--set", *SETTINGS, *bad]) == 1
    assert "the run failed: NonFiniteError" in capsys.readouterr().err
    assert main(["--preset", "tiny", "--set", *SETTINGS, "train.max_steps=2", "--run-dir", "here"]) == 0
    assert (tmp_path / "here" / "summary.json").exists()


def test_a_value_error_is_the_users_mistake_only_if_our_code_raised_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="got an empty parameter list") as theirs:
        torch.optim.SGD([])
    assert report(theirs.value) == 1
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(ValueError, match="preset: got 'tinny'") as ours:
        load_config("tinny")
    assert report(ours.value) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_optimizers_leave_no_parameter_out() -> None:
    config = tiny()
    trainer = Trainer(config, open_source(config.data), CPU)
    optimizers: Optimizers = trainer.optimizers
    groups = [*optimizers.dense.param_groups, *optimizers.tables.param_groups]
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in trainer.model.parameters())
