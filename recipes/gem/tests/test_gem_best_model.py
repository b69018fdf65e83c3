"""What a run that goes on believes of its best model, of damaged files in its folder, and of a disk that is full."""

from __future__ import annotations

import errno
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gemworks.gem import checkpoint_files as files
from gemworks.gem.evaluate import evaluate_run
from gemworks.gem.presets import load_config
from gemworks.gem.run_dir import RunDir
from gemworks.gem.train import main, train
from rich.console import Console

pytestmark = pytest.mark.reference

SETTINGS = (
    *("data.num_samples=192", "data.batch_size=32", "data.max_length=8", "data.prefetch=0"),
    *("model.dim=32", "model.num_layers=1", "model.num_experts=1", "optimizer.warmup_steps=3"),
    *("train.max_steps=6", "train.log_every=2", "train.eval_every=2", "train.keep_last=1", "train.device=cpu"),
)


def run(path: Path, *settings: str) -> tuple[dict[str, Any], str]:
    out = io.StringIO()
    summary = train(load_config("tiny", sets=[*SETTINGS, *settings]), path, console=Console(file=out, width=200))
    return summary, out.getvalue()


def figures(path: Path) -> dict[str, Any]:
    summary = json.loads((path / "summary.json").read_text())
    return {key: summary[key] for key in ("ne", "auc", "tasks", "best_step", "valid_ne")}


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose best model is not its last one: steps with an ever larger learning rate make it worse."""
    path = tmp_path_factory.mktemp("best") / "run"
    run(path, "optimizer.lr=0.3")
    assert files.best_step(path / "checkpoints") == 2
    assert files.steps(path / "checkpoints") == [2, 6]
    return path


@pytest.fixture
def ended_early(complete: Path, tmp_path: Path) -> Path:
    """The same before its last evaluation: all steps are done, and the test part is to come."""
    path = tmp_path / "run"
    shutil.copytree(complete, path)
    (path / "summary.json").unlink()
    return path


@pytest.mark.parametrize("said", [None, "", '{"step": 6, "valid_ne": 0.5}'])
def test_the_best_step_is_what_the_checkpoint_says(complete: Path, ended_early: Path, said: str | None) -> None:
    """A run may be killed after it has renamed a checkpoint and before `best.json` says so."""
    best = ended_early / "checkpoints" / "best.json"
    best.unlink()
    if said is not None:
        best.write_text(said)
    run(ended_early, "optimizer.lr=0.3")
    assert json.loads(best.read_text())["step"] == 2
    assert figures(ended_early) == figures(complete)
    assert evaluate_run(ended_early)["equals_training"] is True


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_a_best_model_that_is_lost_is_said_and_the_run_ends_with_another(ended_early: Path, how: str) -> None:
    folder = files.step_dir(ended_early / "checkpoints", 2)
    if how == "gone":
        shutil.rmtree(folder)
    else:
        next(folder.glob("*.distcp")).write_bytes(b"no tensor")
    summary, text = run(ended_early, "optimizer.lr=0.3")
    assert "the best model so far, of step 2, is lost (" in text
    assert (
        ("kept as damaged_step_00000002" in text)
        == (how == "damaged")
        == folder.with_name("damaged_" + folder.name).is_dir()
    )
    assert summary["best_step"] == 6
    assert summary["valid_ne"] == RunDir(ended_early).rows("valid")[-1]["ne"]
    assert evaluate_run(ended_early)["equals_training"] is True


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "metrics.jsonl",
            b'{"kind": "train", "step": 1}\n\0\0\0\n',
            "metrics.jsonl', line 2: got something that is not JSON",
        ),
        (
            "metrics.jsonl",
            b"[]\n",
            r"metrics.jsonl', line 1: got \[\], expected a JSON object.*correct or delete that line",
        ),
        ("summary.json", b"", "summary.json': got something that is not JSON.*delete it, and the run's end"),
        ("config.toml", b"", "config.toml': missing key 'preset'.*changed or damaged"),
        ("config.toml", b"x = 1\n", "config.toml': unknown key 'x'.*another version wrote it"),
        ("linears.toml", b"[recipe]\nnam = 3\n", "linears.toml: recipe file: unknown keys"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, text: bytes, message: str) -> None:
    folder = RunDir(tmp_path)
    (tmp_path / name).write_bytes(text)
    read = {"metrics": folder.rows, "summary": folder.summary, "config": folder.config, "linears": folder.linears}
    with pytest.raises(ValueError, match=message):
        read[name.partition(".")[0]]()


def test_half_a_line_at_the_end_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "tr\xc3')
    assert [row["step"] for row in RunDir(tmp_path).rows()] == [1]


def test_a_disk_without_room_for_a_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the metrics nor the log can be written, so only the command itself can say it."""

    def full(*args: Any, **values: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunDir, "log", full)
    monkeypatch.setattr("gemworks.gem.reporting.LoggingDisplay.message", full)
    monkeypatch.setattr("gemworks.gem.run.Run._announce", lambda self: None)
    assert main(["--preset", "tiny", "--set", *SETTINGS, "--run-dir", str(tmp_path / "run")]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"run folder '{tmp_path / 'run'}': cannot be written any more (No space left on device); make room" in last


def test_a_disk_without_room_for_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gemworks.gem.run_dir.os.fsync", full)
    with pytest.raises(ValueError, match=r"cannot be written \(No space left on device\); correct that"):
        RunDir.claim(tmp_path / "run", load_config("tiny"))


@pytest.mark.filterwarnings("ignore::gemworks.precision.PrecisionCostWarning")
@pytest.mark.parametrize("linears", ["fp8_block128", "probe"])
def test_a_stored_model_is_evaluated_by_the_linears_it_was_trained_with(tmp_path: Path, linears: str) -> None:
    sets = ("model.dim=128", "model.expert_dim=128", "train.max_steps=2", f"kernels.linears={linears}")
    run(tmp_path / "run", *sets, "kernels.linears_min_features=128")
    assert evaluate_run(tmp_path / "run")["equals_training"] is True
    config = (tmp_path / "run" / "config.toml").read_text()
    (tmp_path / "run" / "config.toml").write_text(config.replace(f'linears = "{linears}"', 'linears = "bf16"'))
    assert evaluate_run(tmp_path / "run")["equals_training"] is False  # FP8 is another function
