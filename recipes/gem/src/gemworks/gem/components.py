"""torchx components: how a training run is launched, on this machine or on a cluster.

torchx run -s local_cwd recipes/gem/src/gemworks/gem/components.py:train --preset small -- --set train.seed=1
data.seed=1

After `--` come arguments of `python -m gemworks.gem.train`. torchx refuses an option given twice, so several settings
follow one `--set`. With the local scheduler the run's output appears on standard error and a failed run ends with exit
code 1.
"""

# torchx reads the annotations of components as objects: no `from __future__ import annotations` here
import sys
from typing import Dict, Optional  # noqa: UP035  # torchx 0.7.0 knows Dict[str, str], not dict[str, str]

from torchx import specs

NOT_ASKED_FOR = -1  # torchx's value for a resource that the scheduler's script shall not mention


def train(
    *args: str,
    preset: str = "small",
    run_dir: Optional[str] = None,  # noqa: UP045
    name: str = "gem-train",
    image: str = "",
    cpus: int = NOT_ASKED_FOR,
    gpus: int = 0,
    memory_mb: int = NOT_ASKED_FOR,
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    max_retries: int = 0,
) -> specs.AppDef:
    """Trains a GEM in one process.

    Args:
        args: further arguments of the trainer, after `--`
        preset: tiny, small, base or large
        run_dir: new folder for the run; by default runs/<preset>-<source>-<date>-<time>
        name: of the job
        image: container image; without one this very Python runs the trainer
        cpus: processor cores to ask the scheduler for
        gpus: GPUs to ask the scheduler for; a local run sees the machine's GPUs anyway and takes one if there is one
        memory_mb: host memory to ask the scheduler for, in MB
        env: environment variables for the trainer, as NAME=value,NAME=value
        max_retries: how often the scheduler starts a failed run again
    """
    arguments = ["-m", "gemworks.gem.train", "--preset", preset]
    if run_dir:
        arguments += ["--run-dir", run_dir]
    return specs.AppDef(
        name=name,
        roles=[
            specs.Role(
                name="train",
                image=image,
                entrypoint="python" if image else sys.executable,
                args=[*arguments, *args],
                env={"PYTHONUNBUFFERED": "1", **(env or {})},
                num_replicas=1,
                max_retries=max_retries,
                resource=specs.Resource(cpu=cpus, gpu=gpus, memMB=memory_mb),
            )
        ],
    )
