"""torchx components: how a training run is launched, on this machine or on a cluster.

torchx run -s local_cwd recipes/gem/src/gemworks/gem/components.py:train --preset small -j 1x2 -- --set train.seed=1
data.seed=1

`-j 1x2` starts two processes on one machine, `-j 2x8` eight on each of two. They need a run folder that all see. After `--` come arguments of `python -m gemworks.gem.train`. torchx refuses an option given twice, so several settings
follow one `--set`. With the local scheduler the run's output appears on standard error and a failed run ends with exit
code 1.
"""

# torchx reads the annotations of components as objects: no `from __future__ import annotations` here
import shlex
import sys
from typing import Dict, Optional  # noqa: UP035  # torchx 0.7.0 knows Dict[str, str], not dict[str, str]

from torchx import specs

RENDEZVOUS_PORT = 29500  # on the first of several machines
NOT_ASKED_FOR = -1  # torchx's value for a resource that the scheduler's script shall not mention


def train(
    *args: str,
    preset: str = "small",
    run_dir: Optional[str] = None,  # noqa: UP045
    j: str = "1x1",
    name: str = "gem-train",
    image: str = "",
    cpus: int = NOT_ASKED_FOR,
    gpus: int = 0,
    memory_mb: int = NOT_ASKED_FOR,
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    max_retries: int = 0,
) -> specs.AppDef:
    """Trains a GEM in one or several processes.

    Args:
        args: further arguments of the trainer, after `--`
        preset: tiny, small, base or large
        run_dir: folder of the run, new or to be gone on with; by default runs/<preset>-<source>-<date>-<time>
        j: machines x processes on each, such as 1x2
        name: of the job
        image: container image; without one this very Python runs the trainer
        cpus: processor cores to ask the scheduler for, per machine
        gpus: GPUs to ask the scheduler for, per machine; a local run sees the machine's GPUs anyway and takes one if there is one
        memory_mb: host memory to ask the scheduler for, in MB
        env: environment variables for the trainer, as NAME=value,NAME=value
        max_retries: how often the scheduler starts a failed run again
    """
    trainer = ["--preset", preset]
    if run_dir:
        trainer += ["--run-dir", run_dir]
    trainer += args
    num_machines, num_processes = _shape(j)
    entrypoint = "python" if image else sys.executable
    if num_machines * num_processes == 1:
        arguments = ["-m", "gemworks.gem.train", *trainer]
    else:
        launcher = ["-m", "gemworks.gem.launch", "--nnodes", str(num_machines), "--nproc-per-node", str(num_processes)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-id", specs.macros.app_id]
        if num_machines == 1:
            arguments = [*launcher, "--rdzv-endpoint", "localhost:0", "--", *trainer]
        else:
            # Only a shell knows where the first machine is: the scheduler says so in a variable of its own.
            where = f"$${{{specs.macros.rank0_env}:=localhost}}:{RENDEZVOUS_PORT}"
            words = f"{shlex.join([entrypoint, *launcher])} --rdzv-endpoint {where} -- {shlex.join(trainer)}"
            entrypoint, arguments = "bash", ["-c", words.replace(shlex.quote(specs.macros.app_id), specs.macros.app_id)]
    return specs.AppDef(
        name=name,
        roles=[
            specs.Role(
                name="train",
                image=image,
                entrypoint=entrypoint,
                args=arguments,
                env={"PYTHONUNBUFFERED": "1", **(env or {})},
                num_replicas=num_machines,
                port_map={"c10d": RENDEZVOUS_PORT},
                max_retries=max_retries,
                resource=specs.Resource(cpu=cpus, gpu=gpus, memMB=memory_mb),
            )
        ],
    )


def _shape(j: str) -> tuple[int, int]:
    """Machines and processes on each.

    >>> _shape("2x8")
    (2, 8)
    """
    machines, _, processes = j.partition("x")
    if not (machines.isdecimal() and processes.isdecimal() and int(machines) > 0 and int(processes) > 0):
        raise ValueError(f"j: got {j!r}, expected machines x processes on each, such as 1x2")
    return int(machines), int(processes)
