"""The gemworks command line: exit codes, errors, JSON; training, evaluation, configurations, checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from gemworks.cli.app import run
from gemworks.gem.errors import Preempted
from gemworks.gem.presets import get_preset

pytestmark = pytest.mark.reference

TINY = (
    "data.num_samples=128 data.batch_size=32 data.max_length=8 data.prefetch=0 model.dim=32 train.max_steps=2 "
    "train.log_every=1"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trani"], "error: No such command 'trani'. Did you mean "),
        (["train", "--presett", "x"], "error: No such option: --presett"),
        (["eval"], "error: Missing argument 'RUN_DIR'"),
        (["config", "--preset", "smal"], "error: preset: got 'smal', expected one of"),
        (["train", "--preset", "frontier"], "error: preset: got 'frontier', which is for the planner only"),
        (["config", "--config", "."], "error: configuration file '.' is a folder; expected the path of a TOML file"),
        (["config", "--set", "data.num_ids=9"], "error: data.num_ids: got 9, expected it unset: it has no effect"),
        (["config", "--set", "model.dmi=3"], "error: unknown key 'model.dmi'; did you mean 'model.dim'?"),
        (["config", "--config", "none.toml"], "error: configuration file 'none.toml' does not exist"),
        (["train", "--set", "train.epochs=0"], "error: train.epochs: got 0, expected a positive integer"),
        (["checkpoint", "inspect", "nowhere"], "error: 'nowhere': got no folder, expected that of a run"),
        (["eval", "nowhere"], "error: run folder 'nowhere': got no config.toml in it"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_errors_are_red_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NO_COLOR")
    run(["trani"])
    assert "\x1b" not in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    run(["trani"])
    assert capsys.readouterr().err.startswith("\x1b[31merror: ")
    run(["config", "--preset", "smal"])
    assert capsys.readouterr().err.startswith("\x1b[31merror: ")


def test_a_traceback_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GEMWORKS_TRACEBACK", "1")
    assert run(["config", "--preset", "smal"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_failed_run_shows_its_traceback_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr("gemworks.gem.train.train", fail)
    assert run(["train", "--preset", "tiny"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "the run failed: RuntimeError: the disk is full"


def test_interrupted_run_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gemworks.gem.train.train", interrupt)
    assert run(["train", "--preset", "tiny"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_config_prints_what_a_run_would_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["config", "--preset", "tiny"]) == 0
    assert capsys.readouterr().out == get_preset("tiny").to_toml()
    overlay = tmp_path / "overlay.toml"
    overlay.write_text('preset = "tiny"\n[train]\nseed = 7\nepochs = 3\n', encoding="utf-8")
    assert run(["config", "--config", str(overlay), "--set", "train.epochs=4", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["preset"], values["train"]["seed"], values["train"]["epochs"]) == ("tiny", 7, 4)


def test_set_takes_one_or_several_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "--set", "train.seed=7", "train.epochs=3", "--json", "--set", "model.num_layers=4"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["train"]["seed"], values["train"]["epochs"], values["model"]["num_layers"]) == (7, 3, 4)
    assert run(["config", "--set", "train.seed=7", "first"]) == 2
    assert "cannot read the setting 'first'; expected KEY=VALUE" in capsys.readouterr().err


def test_train_then_eval_print_json_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [argument for setting in TINY.split() for argument in ("--set", setting)]
    assert run(["train", "--preset", "tiny", *settings, "--run-dir", "first", "--json"]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary == json.loads(Path("first/summary.json").read_text(encoding="utf-8"))
    assert "2/2  loss" in err
    assert run(["eval", "first", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ne"], result["auc"]) == (summary["ne"], summary["auc"])
    assert result["equals_training"] is True
    assert run(["eval", "first", "--split", "valid"]) == 0
    assert "the same figures as in training, bit for bit" in " ".join(capsys.readouterr().out.split())
    assert run(["eval", "first", "--split", "tests"]) == 2
    assert "error: split: got 'tests'" in capsys.readouterr().err
    assert run(["train", "--preset", "tiny", "--run-dir", "first"]) == 2
    assert "holds a run with another configuration: model.dim is 32 in the folder, 64 now" in capsys.readouterr().err
    assert run(["train", "--run-dir", "first", "--json"]) == 0  # the folder's own configuration; nothing left to do
    assert json.loads(capsys.readouterr().out) == summary


def test_the_name_of_a_folder_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever rich would make of it."""
    settings = [argument for setting in TINY.split() for argument in ("--set", setting)]
    for name in ("[/x]", "[red]", ":smile:"):
        assert run(["train", "--preset", "tiny", *settings, "--run-dir", name]) == 0
        assert f"run folder: {name}\n" in capsys.readouterr().out
        assert run(["eval", name]) == 0
        assert f"{name}, step_00000002, test part" in capsys.readouterr().out
        assert run(["checkpoint", "inspect", name]) == 0
        assert capsys.readouterr().out.startswith(f"{name} ")


@pytest.mark.parametrize(("rank", "out"), [("0", '{"ne": 0.9}'), ("1", "")])
def test_of_several_processes_the_first_prints_the_summary(
    rank: str, out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gemworks.gem.train.train", lambda *args, **kwargs: {"ne": 0.9})
    monkeypatch.setenv("RANK", rank)
    assert run(["train", "--preset", "tiny", "--json"]) == 0
    assert "".join(capsys.readouterr().out.split()) == out.replace(" ", "")


def test_checkpoint_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [argument for setting in TINY.split() for argument in ("--set", setting)]
    eval_often = ["--set", "train.eval_every=1"]
    assert run(["train", "--preset", "tiny", *settings, *eval_often, "--run-dir", "first"]) == 0
    capsys.readouterr()
    assert run(["checkpoint", "inspect", "first", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(c["step"], c["last"], c["whole"]) for c in found] == [(1, False, True), (2, True, True)]
    assert sum(c["best"] for c in found) == 1
    assert found[1]["num_model_parameters"] == sum(math.prod(shape) for shape in found[1]["tensors"].values())
    assert (found[0]["position"], found[1]["position"]) == (32, 64)
    assert run(["checkpoint", "inspect", "first", "--tensors", "--against", "first/checkpoints/step_00000001"]) == 0
    text = capsys.readouterr().out
    assert "no tensor differs in name or shape" in text
    assert "head.out.bias" in text or "head" in text
    victim = next(Path("first/checkpoints/step_00000001").glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-7])
    assert run(["checkpoint", "inspect", "first"]) == 1
    assert f"{victim.name} has {victim.stat().st_size} bytes, expected" in capsys.readouterr().out
    assert run(["checkpoint", "inspect", "first/checkpoints/step_00000002"]) == 0


def test_a_run_stopped_by_its_scheduler_exits_75(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise Preempted("stopped by SIGTERM")

    monkeypatch.setattr("gemworks.gem.train.train", stop)
    assert run(["train", "--preset", "tiny"]) == 75
    assert capsys.readouterr().err == "to be continued: stopped by SIGTERM\n"
