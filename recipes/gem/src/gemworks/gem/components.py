"""torchx components: how training, evaluation and benchmarks are launched, on this machine or on a cluster.

    torchx run -s local_cwd gem.train --preset small -- --set train.seed=1 data.seed=1
    torchx run -s local_cwd gem.train --preset tiny -j 1x2
    torchx run -s slurm -cfg partition=gpu,time=08:00:00 gem.train --replicas 4 --gpus 8 --run_dir runs/first
    torchx run -s kubernetes -cfg queue=default gem.train --replicas 4 --gpus 8 --image repo/gem:1 --run_dir /runs/first

After `--` come arguments of the program. torchx refuses an option given twice, so several settings follow one `--set`.
With the local scheduler a run's output appears on standard error and a failed run ends with exit code 1. Without
installing the package, `gem.train` is `recipes/gem/src/gemworks/gem/components.py:train`.
"""

# torchx reads the annotations of components as objects: no `from __future__ import annotations` here
from typing import Dict, List, Optional, Tuple  # noqa: UP035  # torchx 0.7.0 knows Dict[str, str], not dict[str, str]

from gemworks.gem.schedulers.app import NOT_ASKED_FOR, TRAINER, make_app
from torchx import specs


def train(
    *args: str,
    preset: Optional[str] = None,  # noqa: UP045
    config: Optional[str] = None,  # noqa: UP045
    run_dir: Optional[str] = None,  # noqa: UP045
    replicas: int = 1,
    gpus: int = 0,
    processes: int = 0,
    j: Optional[str] = None,  # noqa: UP045
    name: str = "gem",
    image: str = "",
    cpus: int = NOT_ASKED_FOR,
    memory_mb: int = NOT_ASKED_FOR,
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
    max_retries: int = 0,
) -> specs.AppDef:
    """Trains a GEM in replicas x gpus processes.

    Args:
        args: further arguments of the trainer, after `--`, such as --set train.epochs=2
        preset: tiny, small, base or large; small if neither this nor config nor an existing run_dir says otherwise
        config: TOML file laid over the preset, as the job sees it
        run_dir: folder of the run and its checkpoints, new or to be gone on with, as the job sees it; a job that may
            be started again needs one
        replicas: machines (with Slurm's share_nodes: groups of processes)
        gpus: GPUs of each replica to ask the scheduler for, one process each; a local run of one process sees the
            machine's GPUs anyway and takes one if there is one
        processes: processes of each replica; gpus, or 1 without GPUs, if not given
        j: replicas x processes in one word, as torchx's dist.ddp has it: 1x2 is two processes on one machine
        name: of the job
        image: container image; without one this very Python runs the trainer
        cpus: processor cores of each replica to ask the scheduler for
        memory_mb: host memory of each replica to ask the scheduler for, in MB
        env: environment variables, as NAME=value,NAME=value
        mounts: for container images, as torchx has them: type=bind,src=/a,dst=/b
        max_retries: how often the scheduler starts a failed run again; it goes on from its last checkpoint
    """
    if j is not None:
        replicas, processes = _shape(j)
    arguments = [*_option("--preset", preset), *_option("--config", config), *_option("--run-dir", run_dir), *args]
    if max_retries > 0 and not run_dir:
        raise ValueError("run_dir: got nothing, expected a folder: a run that is started again goes on from it")
    return make_app(
        name, "train", TRAINER, arguments, replicas, gpus, processes, image, cpus, memory_mb, env, mounts,
        max_retries,
    )  # fmt: skip


def eval(  # the name that a user types: gem.eval
    run_dir: str,
    split: str = "test",
    checkpoint: str = "best",
    gpus: int = 0,
    name: str = "gem",
    image: str = "",
    cpus: int = NOT_ASKED_FOR,
    memory_mb: int = NOT_ASKED_FOR,
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
) -> specs.AppDef:
    """Evaluates the stored model of a run in one process.

    Args:
        run_dir: folder of a training run, as the job sees it
        split: train, valid or test
        checkpoint: best (by validation NE) or last
        gpus: GPUs to ask the scheduler for, 0 or 1
        name: of the job
        image: container image; without one this very Python runs it
        cpus: processor cores to ask the scheduler for
        memory_mb: host memory to ask the scheduler for, in MB
        env: environment variables, as NAME=value,NAME=value
        mounts: for container images, as torchx has them: type=bind,src=/a,dst=/b
    """
    arguments = ["eval", run_dir, "--split", split, "--checkpoint", checkpoint, "--json"]
    return make_app(
        name, "eval", "gemworks.cli.app", arguments, 1, gpus, 1, image, cpus, memory_mb, env, mounts, 0
    )  # fmt: skip


def bench(
    *args: str,
    suite: str,
    out: Optional[str] = None,  # noqa: UP045
    compare: Optional[str] = None,  # noqa: UP045
    gpus: int = 1,
    name: str = "gem",
    image: str = "",
    cpus: int = NOT_ASKED_FOR,
    memory_mb: int = NOT_ASKED_FOR,
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
) -> specs.AppDef:
    """Runs a benchmark on the GPUs of one machine.

    Args:
        args: arguments of the benchmark program itself, after `--`
        suite: jagged, precision, parallel, netmem, layers or ladder
        out: new folder for CSV, plots and log, as the job sees it
        compare: CSV of an earlier run to compare with
        gpus: GPUs to ask the scheduler for; suites that use several get a process for each
        name: of the job
        image: container image; without one this very Python runs it
        cpus: processor cores to ask the scheduler for
        memory_mb: host memory to ask the scheduler for, in MB
        env: environment variables, as NAME=value,NAME=value
        mounts: for container images, as torchx has them: type=bind,src=/a,dst=/b
    """
    several = ["--nproc", str(gpus)] if gpus > 1 and suite in ("parallel", "netmem") else []
    arguments = ["bench", suite, *several, *_option("--out", out), *_option("--compare", compare)]
    return make_app(
        name, "bench", "gemworks.cli.app", [*arguments, *(["--", *args] if args else [])], 1, gpus, 1, image, cpus,
        memory_mb, env, mounts, 0,
    )  # fmt: skip


def _shape(j: str) -> Tuple[int, int]:  # noqa: UP006
    """Replicas and processes of each.

    >>> _shape("2x8")
    (2, 8)
    """
    replicas, _, processes = j.partition("x")
    if not (replicas.isdecimal() and processes.isdecimal() and int(replicas) > 0 and int(processes) > 0):
        raise ValueError(f"j: got {j!r}, expected replicas x processes of each, such as 1x2")
    return int(replicas), int(processes)


def _option(name: str, value: Optional[str]) -> List[str]:  # noqa: UP006, UP045
    return [name, value] if value else []
