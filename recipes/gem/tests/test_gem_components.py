"""The torchx components: torchx accepts it, asks a scheduler only for what was asked, and passes failure on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gemworks.gem import components
from torchx.specs import finder, macros

pytestmark = pytest.mark.reference

FILE = Path(components.__file__)
TINY = [
    "data.num_samples=128",
    "data.batch_size=32",
    "data.max_length=8",
    "data.prefetch=0",
    "model.dim=32",
    "train.max_steps=2",
    "train.log_every=1",
]


def torchx(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = "from torchx.cli.main import main; main()"
    command = [sys.executable, "-c", program, "run", "--scheduler", "local_cwd", f"{FILE}:train", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["train", "eval", "bench"])
def test_torchx_accepts_the_component(name: str) -> None:
    assert finder.get_component(f"{FILE}:{name}").validation_errors == []


def test_default_asks_for_nothing_and_runs_this_python() -> None:
    role = components.train("--set", "train.seed=1").roles[0]
    assert role.entrypoint == sys.executable
    assert role.args == ["-m", "gemworks.gem.train", "--set", "train.seed=1"]
    assert (role.resource.cpu, role.resource.gpu, role.resource.memMB) == (-1, 0, -1)


def test_what_is_asked_for_is_passed_on() -> None:
    app = components.train(
        preset="tiny", config="x.toml", run_dir="runs/x", image="image:1", cpus=4, gpus=1, memory_mb=512,
        env={"A": "b"}, max_retries=2,
    )  # fmt: skip
    role = app.roles[0]
    assert role.entrypoint == "python"
    assert role.args[2:] == ["--preset", "tiny", "--config", "x.toml", "--run-dir", "runs/x"]
    assert (role.resource.cpu, role.resource.gpu, role.resource.memMB) == (4, 1, 512)
    assert role.env["A"] == "b"
    assert (role.image, role.max_retries) == ("image:1", 2)


def test_several_processes_run_under_the_launcher() -> None:
    one_machine = components.train(gpus=8).roles[0]
    assert one_machine.entrypoint == "bash"
    assert "-m gemworks.gem.launch --nnodes 1 --nproc-per-node 8 --standalone --" in one_machine.args[1]
    assert components.train(j="1x8").roles[0].args == one_machine.args
    several = components.train(replicas=2, processes=3).roles[0]
    assert components.train(j="2x3").roles[0] == several
    assert several.num_replicas == 2
    assert "--nnodes 2 --nproc-per-node 3 --rdzv-backend c10d" in several.args[1]
    assert "timeout=1800" in several.args[1]


def test_several_machines_meet_at_the_first() -> None:
    app = components.train("--set", "data.path=my data", preset="tiny", image="image:1", replicas=2, gpus=8)
    values = macros.Values(img_root="", app_id="app", replica_id="0", rank0_env="FIRST_HOST")
    assert values.apply(app.roles[0]).args == [
        "-c",
        "exec python -m gemworks.gem.launch --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d "
        '--rdzv-endpoint "${FIRST_HOST:-localhost}:29500" --rdzv-id app --rdzv-conf timeout=1800,join_timeout=1800 '
        "-- --preset tiny --set 'data.path=my data'",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replicas": 0}, "replicas: got 0, expected 1 or more"),
        ({"gpus": -1}, "gpus: got -1, expected 0 or more"),
        ({"j": "2"}, "j: got '2', expected replicas x processes of each, such as 1x2"),
        ({"max_retries": 2}, "run_dir: got nothing, expected a folder"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        components.train(**arguments)


def test_torchx_shows_the_error_and_fails(tmp_path: Path) -> None:
    done = torchx("--preset", "tiny", "--", "--set", "train.max_steps=x", cwd=tmp_path)
    assert done.returncode == 1
    assert "error: train.max_steps: got 'x', expected an integer or 'none'" in done.stderr


@pytest.mark.slow
def test_torchx_trains(tmp_path: Path) -> None:
    done = torchx("--preset", "tiny", "--run_dir", "first", "--", "--set", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2/2  loss" in done.stderr
    assert "calibration" in done.stderr
    assert (tmp_path / "first" / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.dist
def test_torchx_trains_with_two_processes(tmp_path: Path) -> None:
    done = torchx("--preset", "tiny", "--run_dir", "two", "-j", "1x2", "--", "--set", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["num_ranks"] == 2
    assert done.stderr.count("2/2  loss") == 1, "one rank reports"
