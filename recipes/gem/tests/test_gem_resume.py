"""Runs that are interrupted and go on: killed, stopped, damaged, or started twice. Case L4: nothing is lost.

The course of a run is written down by the runs themselves: sample ids of every step, every loss, the final parameters.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gemworks.gem import checkpoint
from gemworks.gem import checkpoint_files as files
from gemworks.gem.data import open_source
from gemworks.gem.errors import REQUEUE, Preempted
from gemworks.gem.implement import probe_linears
from gemworks.gem.lock import RunLock
from gemworks.gem.presets import load_config
from gemworks.gem.run_dir import RunDir
from gemworks.gem.train import main, run_config, train
from gemworks.gem.trainer import Trainer
from rich.console import Console

pytestmark = pytest.mark.reference

CPU = torch.device("cpu")
SETTINGS = (
    "data.num_samples=192",
    "data.batch_size=8",
    "data.max_length=8",
    "data.prefetch=2",
    "data.shuffle_window=64",
    "model.dim=32",
    "model.num_layers=1",
    "model.num_experts=1",
    "model.dropout=0.1",
    "optimizer.warmup_steps=3",
    "train.epochs=2",
    "train.log_every=2",
    "train.save_every=5",
    "train.eval_every=16",
)
# One import, then a fork per attempt: the parent kills its child with SIGKILL once the child has done a given number
# of steps (and a random moment more, so that it also dies inside of evaluations, writes and renames).
KILLER = """
import json, os, random, signal, sys, time, warnings
warnings.simplefilter("ignore")
from gemworks.gem.process import prepare_process
prepare_process()
from gemworks.gem.presets import load_config
from gemworks.gem.train import train
from gemworks.gem.trainer import Trainer
import gemworks.gem.run, gemworks.gem.data, rich.console, torch.utils.tensorboard, torchrec.optim.rowwise_adagrad

folder, trace, num_kills, settings = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
original = Trainer._train_step

def traced(self, batches):
    original(self, batches)
    ids = [i for batch in batches for i in batch.sample_ids_B.tolist()]
    with open(trace, "a") as file:
        file.write(json.dumps([os.getpid(), self.step, ids]) + "\\n")

Trainer._train_step = traced
config = load_config("tiny", sets=settings)
dice, kills = random.Random(7), 0
while True:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with open(os.devnull, "w") as null:
                train(config, folder, console=rich.console.Console(file=null))
            code = 0
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr)
        finally:
            os._exit(code)
    if kills == num_kills:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    goal, seen, dead, first_s = dice.randint(2, 6), 0, False, 0.0
    while seen < goal and not dead:
        time.sleep(0.01)
        if os.path.exists(trace):
            with open(trace) as file:
                seen = sum(line.startswith(f"[{child},") for line in file)
        first_s = first_s or (time.monotonic() if seen else 0.0)
        dead = os.waitpid(child, os.WNOHANG)[0] == child
    if not dead:
        step_s = (time.monotonic() - first_s) / (goal - 1)  # on a fast machine a fixed time would be the whole run
        time.sleep(dice.random() * min(4 * step_s, 0.3))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        dead = not os.WIFSIGNALED(status)
    if dead:
        sys.exit("the run ended before it was killed often enough")
    kills += 1
"""


def tiny(*settings: str) -> Any:
    return load_config("tiny", sets=[*SETTINGS, *settings])


def run(path: Path, *settings: str) -> tuple[dict[str, Any], str]:
    out = io.StringIO()
    summary = train(tiny(*settings), path, console=Console(file=out, width=120))
    return summary, out.getvalue()


def figures(path: Path) -> list[tuple[Any, ...]]:
    """What must not depend on interruptions, of every line."""
    keys = ("kind", "step", "loss", "ne", "grad_norm", "lr", "sparse_lr", "auc", "best")
    return [tuple(row.get(key) for key in keys) for row in RunDir.open(path).rows()]


def parameters(path: Path) -> dict[str, torch.Tensor]:
    folder = RunDir.open(path)
    trainer = Trainer(folder.config(), open_source(folder.config().data), CPU)
    host = trainer.load(checkpoint.find(folder.checkpoints, "last"))
    assert host["step"] == trainer.total_steps
    state = trainer.optimizers.state_dict()["state"]
    moments = {f"{n}/{k}": t for n, entry in state.items() for k, t in entry.items()}
    return trainer.model.state_dict() | moments


def assert_equal_runs(one: Path, other: Path) -> None:
    assert figures(one) == figures(other)
    first, second = parameters(one), parameters(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    a, b = RunDir.open(one).summary(), RunDir.open(other).summary()
    assert a is not None
    assert b is not None
    assert a["tasks"] == b["tasks"]
    assert (a["best_step"], a["num_steps"]) == (b["best_step"], b["num_steps"])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "unbroken"
    run(path)
    return path


def killed_run(tmp_path: Path, num_kills: int, *settings: str) -> tuple[Path, list[tuple[int, int, list[int]]]]:
    path, trace = tmp_path / "killed", tmp_path / "trace"
    command = [sys.executable, "-c", KILLER, str(path), str(trace), str(num_kills), *SETTINGS, *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return path, [tuple(json.loads(line)) for line in trace.read_text().splitlines()]


def check_trace(steps: list[tuple[int, int, list[int]]], path: Path, num_kills: int) -> None:
    """Case L4: whatever was done twice was the same, and in the end every step was done with the right samples."""
    config = RunDir.open(path).config()
    trainer = Trainer(config, open_source(config.data), CPU)
    expected: list[list[int]] = []
    for _ in range(config.train.epochs):
        expected += [batch.sample_ids_B.tolist() for batch in trainer.loader]
    assert len({pid for pid, _, _ in steps}) == num_kills + 1
    assert {step for _, step, _ in steps} == set(range(1, len(expected) + 1))
    for _, step, ids in steps:
        assert ids == expected[step - 1], step


def test_l4_killed_twice_equals_unbroken(unbroken: Path, tmp_path: Path) -> None:
    path, steps = killed_run(tmp_path, 2)
    check_trace(steps, path, 2)
    assert_equal_runs(unbroken, path)


@pytest.mark.slow
def test_l4_killed_twenty_times_equals_unbroken(tmp_path: Path) -> None:
    longer = ("train.epochs=8", "data.num_samples=256", "train.save_every=3")
    run(tmp_path / "unbroken", *longer)
    path, steps = killed_run(tmp_path, 20, *longer)
    check_trace(steps, path, 20)
    assert_equal_runs(tmp_path / "unbroken", path)


@pytest.mark.filterwarnings("ignore::gemworks.precision.PrecisionCostWarning")
def test_a_run_that_goes_on_does_not_probe_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a probe chose is part of the model: it is kept in the folder, told, and read by the next start."""
    settings = ("model.dim=128", "kernels.linears=probe", "kernels.linears_min_features=128", "train.max_steps=4")
    step, probe, probed = Trainer._train_step, probe_linears, []

    def counted(*args: Any) -> Any:
        probed.append(args)
        return probe(*args)

    def stopped(self: Trainer, batches: Any) -> None:
        if self.step == 2:
            raise RuntimeError("stopped")
        step(self, batches)

    monkeypatch.setattr("gemworks.gem.trainer.probe_linears", counted)
    run(tmp_path / "unbroken", *settings)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", stopped)
        with pytest.raises(RuntimeError, match="stopped"):
            run(tmp_path / "run", *settings)
    kept = (tmp_path / "run" / "linears.toml").read_text()
    assert len(probed) == 2
    _, told = run(tmp_path / "run", *settings)
    assert len(probed) == 2
    assert (tmp_path / "run" / "linears.toml").read_text() == kept
    assert re.search(r"linears as a probe chose \(linears.toml\): fp8_block128 in \d+ layers \(", told)
    assert figures(tmp_path / "run") == figures(tmp_path / "unbroken")
    (tmp_path / "run" / "linears.toml").write_text("[recipe]\nnam = 3\n")
    with pytest.raises(ValueError, match=r"linears.toml: recipe file: unknown keys .* delete it to probe again"):
        run(tmp_path / "run", *settings)


@pytest.mark.parametrize("when", ["step", "evaluation", "test"])
def test_sigterm_saves_and_the_next_start_goes_on(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    path = tmp_path / "run"
    # trains 36 steps; a SIGTERM in step 20, in the evaluation after step 16, or while the test part is evaluated
    original = Trainer._train_step
    whole = open_source

    def step(self: Trainer, batches: Any) -> None:
        original(self, batches)
        if when == "step" and self.step == 20:
            os.kill(os.getpid(), signal.SIGTERM)

    class Signalling:
        def __init__(self, source: Any) -> None:
            self._source = source
            self.schema = source.schema

        def __getattr__(self, name: str) -> Any:
            return getattr(self._source, name)

        def read(self, split: str, rows: Any) -> Any:
            if {"evaluation": "valid", "test": "test"}.get(when) == split:
                os.kill(os.getpid(), signal.SIGTERM)
            return self._source.read(split, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", step)
        patch.setattr("gemworks.gem.data.open_source", lambda config: Signalling(whole(config)))
        with pytest.raises(Preempted, match="stopped by SIGTERM"):
            run(path, "data.prefetch=0") if when != "step" else run(path)
    stopped_at = {"step": 20, "evaluation": 16, "test": None}[when]
    if stopped_at is not None:
        assert files.steps(path / "checkpoints")[-1] == stopped_at
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    _, text = run(path, "data.prefetch=0") if when != "step" else run(path)
    if stopped_at is not None:
        assert f"going on after step {stopped_at} of" in text
    assert_equal_runs(unbroken, path)


def test_command_line_exits_with_the_requeue_code_and_goes_on(tmp_path: Path) -> None:
    """The real thing once: a process, a signal from outside, its exit code, and the same command again."""
    path = tmp_path / "run"
    command = [sys.executable, "-m", "gemworks.gem.train", "--run-dir", str(path)]
    first = [*command, "--preset", "tiny", "--set", *SETTINGS, "train.epochs=50"]
    process = subprocess.Popen(first, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (path / "metrics.jsonl").exists():
        assert process.poll() is None, f"ended before its first step: {process.communicate()}"
        assert time.monotonic() < deadline, "no step within two minutes"
        time.sleep(0.05)
    with pytest.raises(ValueError, match=rf"that process {process.pid} on \S+ is using.*wait for that job"):
        RunDir.claim(path, tiny("train.epochs=50"))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == REQUEUE == 75
    assert err.splitlines()[-1].startswith("to be continued: stopped by SIGTERM")
    assert "Traceback" not in err
    last = files.steps(path / "checkpoints")[-1]
    assert run_config(None, None, (), path) == tiny("train.epochs=50")
    again = RunDir.claim(path, tiny("train.epochs=50"))
    assert again.resumed
    again.close()
    rows = RunDir.open(path).rows("train")
    assert rows[-1]["step"] <= last


def test_other_configuration_is_refused_with_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunDir.claim(tmp_path / "run", tiny()).close()
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.name != "lock"}
    command = ["--preset", "tiny", "--run-dir", str(tmp_path / "run"), "--set", *SETTINGS]
    assert main([*command, "model.dim=64", "train.seed=4"]) == 2
    err = capsys.readouterr().err
    assert "model.dim is 32 in the folder, 64 now; train.seed is 0 in the folder, 4 now; go on with its own" in err
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.name != "lock"} == before


def test_damaged_newest_checkpoint_is_passed_over_and_the_result_is_the_same(unbroken: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gemworks.gem.signals.StopRequest.check", _stop_at(path, 21))
        with pytest.raises(Preempted):
            run(path)
    newest, older = files.steps(path / "checkpoints")[-1], files.steps(path / "checkpoints")[-2]
    next(files.step_dir(path / "checkpoints", newest).glob("*.distcp")).write_bytes(b"")
    _, text = run(path)
    assert f"step_{newest:08d} is damaged and set aside" in text
    assert f"going on after step {older} of" in text
    assert_equal_runs(unbroken, path)
    assert (path / "checkpoints" / f"damaged_step_{newest:08d}").is_dir()


def _stop_at(path: Path, step: int) -> Any:
    """Stops a run once its log has reached a step."""

    def check(self: Any) -> None:
        rows = RunDir(path).rows("train")
        if rows and rows[-1]["step"] >= step:
            raise Preempted("stopped")

    return check


def test_run_killed_before_its_first_checkpoint_starts_over(unbroken: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    claimed = RunDir.claim(path, tiny())
    claimed.log("train", 1, loss=99.0)
    claimed.close()
    with claimed.metrics_path.open("a") as file:
        file.write('{"kind": "train", "st')  # and in the middle of a line
    _, text = run(path)
    assert "going on after step 0 of" in text
    assert_equal_runs(unbroken, path)


def test_full_disk_ends_the_run_and_room_lets_it_go_on(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seal = tmp_path / "run", files.seal

    def full(folder: Path) -> None:
        if folder.name.endswith("step_00000010"):
            raise OSError(28, "No space left on device")
        seal(folder)

    with monkeypatch.context() as patch:
        patch.setattr(files, "seal", full)
        with pytest.raises(checkpoint.CheckpointError, match=r"step 10 could not .*No space left.*step 5 is whole"):
            run(path)
    assert files.steps(path / "checkpoints") == [5]
    assert "No space left on device" in (path / "train.log").read_text()
    run(path)
    assert_equal_runs(unbroken, path)


def test_stale_lock_is_taken_over_and_a_held_one_is_not(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time, pathlib; from gemworks.gem.lock import RunLock; "
            "lock = RunLock(pathlib.Path(sys.argv[1])); print('held', flush=True); time.sleep(60)",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=rf"process {holder.pid} on \S+ is using, expected a free one"):
        RunLock(tmp_path)
    holder.kill()
    holder.communicate()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == holder.pid  # stale
    lock = RunLock(tmp_path)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    lock.release()
    RunLock(tmp_path).release()


def test_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="a file is in the way"):
        RunDir.claim(tmp_path / "file", tiny())

    def refuse(*args: Any, **kwargs: Any) -> int:
        raise OSError(30, "Read-only file system", str(tmp_path / "run" / "lock"))

    monkeypatch.setattr("gemworks.gem.lock.os.open", refuse)
    with pytest.raises(ValueError, match=r"cannot be written \(Read-only file system: .*lock\); correct that"):
        RunDir.claim(tmp_path / "run", tiny())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission_is_named(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ValueError, match="Permission denied"):
        RunDir.claim(tmp_path / "closed" / "run", tiny())
