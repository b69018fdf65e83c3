"""Several processes, the longer tests: four ranks, changing their number, ranks that die or hang, the real launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gem_ranks import Faults, Outcome, assert_close_runs, figures, parameters, run_ranks, trained
from gemworks.gem import checkpoint_files as files
from gemworks.gem.errors import REQUEUE, RUN_FAILED, WRONG_INPUT
from gemworks.gem.run_dir import RunDir
from test_gem_inputs import write_parquet
from test_gem_ranks import SETTINGS

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TIMEOUT_SECONDS = 5


def good(outcomes: list[Outcome]) -> list[Any]:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [outcome.value for outcome in outcomes]


def stopped_at(path: Path, world: int, step: int, *settings: str) -> None:
    """A SIGTERM to the last rank after a step."""
    faults = Faults(rank=world - 1, step=step, kind="terminate")
    outcomes = run_ranks(trained, world, str(path), (*SETTINGS, *settings), faults)
    assert [outcome.error and outcome.error[0] for outcome in outcomes] == ["Preempted"] * world
    assert files.steps(path / "checkpoints")[-1] == step


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "one"
    good(run_ranks(trained, 1, str(path), SETTINGS))
    return path


def test_m2_four_processes_equal_one(one: Path, tmp_path: Path) -> None:
    """In the last step three of four ranks have no sample (case M2)."""
    traces = good(run_ranks(trained, 4, str(tmp_path / "four"), SETTINGS))
    assert sorted(len(trace[6][1]) for trace in traces) == [0, 0, 0, 1]
    seen = [i for trace in traces for _, ids, _ in trace[:7] for i in ids]
    assert sorted(seen) == sorted(set(seen))
    assert len(seen) == 49
    assert_close_runs(one, tmp_path / "four")


def test_checkpoints_go_from_one_to_two_to_four_to_one_process(one: Path, tmp_path: Path) -> None:
    """Model, optimizers, reader, metrics of the open window and random generators, in the middle of epochs."""
    path = tmp_path / "run"
    settings = ("train.log_every=4",)  # so that a window of figures is open when it stops
    good(run_ranks(trained, 1, str(tmp_path / "unbroken"), (*SETTINGS, *settings)))
    stopped_at(path, 1, 3, *settings)
    stopped_at(path, 2, 6, *settings)
    stopped_at(path, 4, 10, *settings)
    (rest,) = good(run_ranks(trained, 1, str(path), (*SETTINGS, *settings)))
    assert [step for step, _, _ in rest] == list(range(11, 15))
    assert_close_runs(tmp_path / "unbroken", path)
    assert RunDir.open(path).summary()["num_steps"] == RunDir.open(one).summary()["num_steps"]  # type: ignore[index]


def test_the_same_number_of_ranks_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Dropout's generators are each rank's own, and saved for each."""
    settings = ("model.dropout=0.1",)
    good(run_ranks(trained, 2, str(tmp_path / "unbroken"), (*SETTINGS, *settings)))
    stopped_at(tmp_path / "run", 2, 10, *settings)
    good(run_ranks(trained, 2, str(tmp_path / "run"), (*SETTINGS, *settings)))
    keys = ("kind", "step", "loss", "ne", "grad_norm", "auc")
    rows = [[[row.get(key) for key in keys] for row in figures(tmp_path / name)] for name in ("unbroken", "run")]
    assert rows[0] == rows[1]
    first, second = parameters(tmp_path / "unbroken"), parameters(tmp_path / "run")
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_killed_rank_of_four_is_named_by_all_and_nothing_is_lost(one: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    outcomes = run_ranks(trained, 4, str(path), SETTINGS, Faults(rank=2, step=8, kind="kill"))
    for rank in (0, 1, 3):
        error = outcomes[rank].error
        assert error is not None
        assert error[0] == "RankFailure"
        assert error[1].startswith("rank 2 stopped without a word"), error
    good(run_ranks(trained, 4, str(path), SETTINGS))
    assert_close_runs(one, path)


def test_a_hanging_rank_stops_the_other_within_the_time_out(tmp_path: Path) -> None:
    settings = (*SETTINGS, f"train.rank_timeout_seconds={TIMEOUT_SECONDS}")
    faults = Faults(rank=1, step=7, kind="stop")
    outcomes = run_ranks(trained, 2, str(tmp_path / "run"), settings, faults, stopped=(1,))
    assert outcomes[0].error is not None
    assert outcomes[0].error[0] == "RankFailure"
    assert outcomes[0].error[1].startswith("rank 1 stopped without a word")
    assert outcomes[0].seconds < 60  # the time-out of SETTINGS


def test_a_rank_that_finds_bad_data_alone_gives_its_reason_to_all(tmp_path: Path) -> None:
    outcomes = run_ranks(trained, 2, str(tmp_path / "run"), SETTINGS, Faults(rank=1, step=7, kind="raise"))
    assert outcomes[1].error == ("ValueError", "data.path: row 7 is bad")
    assert outcomes[0].error == ("RankFailure", "rank 1 failed: ValueError: data.path: row 7 is bad")


def test_accumulated_batches_and_two_ranks_equal_one(tmp_path: Path) -> None:
    settings = (*SETTINGS, "train.accumulate=3", "train.eval_every=2")
    for world, name in ((1, "one"), (2, "two")):
        good(run_ranks(trained, world, str(tmp_path / name), settings))
    assert_close_runs(tmp_path / "one", tmp_path / "two")


def test_ranks_with_row_groups_of_their_own_equal_one(tmp_path: Path) -> None:
    """Parquet, dealt to lanes: every sample once, and the same steps."""
    write_parquet(tmp_path / "data", ("train", "valid", "test"))
    settings = (
        *SETTINGS[1:],
        "data.source=parquet",
        f"data.path={tmp_path / 'data'}",
        "data.num_lanes=4",
        "data.max_length=64",
        "train.epochs=1",
        "train.eval_every=16",
        "model.num_experts=2",  # the gate of a single one has a gradient of rounding errors: norms undo its scale
    )
    settings = tuple(
        s
        for s in settings
        if s not in ("data.max_length=8", "model.num_experts=1", "train.eval_every=7", "train.epochs=2")
    )
    good(run_ranks(trained, 1, str(tmp_path / "one"), settings))
    traces = good(run_ranks(trained, 2, str(tmp_path / "two"), settings))
    seen = [i for trace in traces for _, ids, _ in trace for i in ids]
    assert sorted(seen) == sorted(set(seen))
    assert len(seen) == 256
    assert_close_runs(tmp_path / "one", tmp_path / "two")


def launch(path: Path, *settings: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gemworks.gem.launch", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "--", "--preset", "tiny", "--run-dir", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [*command, "--set", *SETTINGS, *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def wait_for_steps(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not RunDir(path).rows("train"):
        assert process.poll() is None, f"ended before its first step: {process.communicate()}"
        assert time.monotonic() < deadline, "no step within two minutes"
        time.sleep(0.05)


def children(process: subprocess.Popen[str]) -> list[int]:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


def rank_of(pid: int) -> str | None:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((v[5:].decode() for v in variables if v.startswith(b"RANK=")), None)


def test_launcher_names_the_rank_that_was_killed(tmp_path: Path) -> None:
    process = launch(tmp_path / "run", "train.epochs=200")
    wait_for_steps(tmp_path / "run", process)
    (victim,) = [pid for pid in children(process) if rank_of(pid) == "1"]
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == RUN_FAILED, err[-3000:]
    assert "exitcode  : -9" in err
    assert "Signal 9 (SIGKILL)" in err
    assert "RankFailure: rank 1 stopped without a word" in err


def test_launcher_passes_on_the_requeue_code_and_the_wrong_input_code(tmp_path: Path) -> None:
    """A SIGTERM to the launcher alone: both ranks save, and the same command goes on."""
    path = tmp_path / "run"
    good(run_ranks(trained, 1, str(tmp_path / "one"), (*SETTINGS, "train.epochs=6")))
    process = launch(path, "train.epochs=6")
    wait_for_steps(path, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == REQUEUE, err[-3000:]
    last = files.steps(path / "checkpoints")[-1]
    again = launch(path, "train.epochs=6")
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err[-3000:]
    assert f"going on after step {last} of 42" in (path / "train.log").read_text()
    assert_close_runs(tmp_path / "one", path)
    wrong = launch(tmp_path / "other", "data.batch_size=9")
    _, err = wrong.communicate(timeout=120)
    assert wrong.returncode == WRONG_INPUT, err[-3000:]
    assert "data.batch_size: got 9, expected a multiple of the number of ranks, 2" in err
