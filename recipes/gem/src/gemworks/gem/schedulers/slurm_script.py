"""The batch script of one job: one role, as many equal tasks as it has replicas. Text only; nothing is run here.

What torchx 0.7.0 writes is refused or misunderstood by many clusters: `--gpus-per-task` without `--ntasks`
(torchx#1100), 1 GB of memory that nobody asked for (torchx#359), one heterogeneous component per replica, environment
values cut at commas, `${...}` in single quotes. This script asks for nodes, tasks, GPUs and what was given.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

REQUEUE_CODE = 75  # of a run that saved itself and wants to go on; errors.REQUEUE
APP_ID, REPLICA_ID = "@app_id@", "@replica_id@"  # stand-ins that survive quoting
SHELL_VALUES = {APP_ID: '"$SLURM_JOB_ID"', REPLICA_ID: '"$SLURM_PROCID"'}
RANK0_ENV = "GEMWORKS_RANK0_HOST"


@dataclass(frozen=True, kw_only=True)
class SlurmScript:
    """One job. The attributes are what sbatch shall be asked for; None or 0 asks for nothing.

    Attributes:
        name: of the job. `role`: of its tasks, in the names of their logs.
        command: program and arguments of every task, with the stand-ins APP_ID and REPLICA_ID.
        env: environment of every task.
        num_tasks: replicas.
        share_nodes: tasks may lie on one node; otherwise every task has its own.
        gpus, cpus, memory_mb: of each task.
        options: more of sbatch's, by long name; None is an option without a value.
        max_retries: how often a failed job is put back into the queue.
        requeue: a job that was stopped before its time limit is put back into the queue, as often as that happens.
        signal_seconds: how long before the time limit the tasks get SIGTERM.
    """

    name: str
    role: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    num_tasks: int = 1
    share_nodes: bool = False
    gpus: int = 0
    cpus: int = 0
    memory_mb: int = 0
    options: Mapping[str, str | None] = field(default_factory=dict)
    max_retries: int = 0
    requeue: bool = True
    signal_seconds: int = 0

    def header(self) -> list[str]:
        """The `#SBATCH` lines."""
        asked: dict[str, str | None] = {"job-name": self.name}
        if not self.share_nodes:
            asked |= {"nodes": str(self.num_tasks), "ntasks-per-node": "1"}
        asked["ntasks"] = str(self.num_tasks)
        if self.cpus > 0:
            asked["cpus-per-task"] = str(self.cpus)
        if self.gpus > 0:
            # GPUs belong to the node, so that every process of a task sees all of them and LOCAL_RANK is an index
            asked["gres"] = f"gpu:{self.gpus}"
        if self.memory_mb > 0:
            asked["mem"] = f"{self.memory_mb}M"
        asked["requeue" if self.requeue or self.max_retries else "no-requeue"] = None
        asked["open-mode"] = "append"
        if self.signal_seconds > 0:
            asked["signal"] = f"B:USR1@{self.signal_seconds}"
        asked |= self.options
        return [f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={value}" for name, value in asked.items()]

    def task(self) -> str:
        """The shell command of one task."""
        exports = [f"export {name}={_quoted(value)};" for name, value in self.env.items()]
        return " ".join([*exports, "exec", *[_quoted(word) for word in self.command]])

    def text(self) -> str:
        """The whole script."""
        header = "\n".join(self.header())
        out = f"slurm-%j-{self.role}-%t"
        return f"""#!/bin/bash
{header}
set -u
export PYTHONUNBUFFERED=1 TORCHX_MAX_RETRIES={self.max_retries}
{RANK0_ENV}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export {RANK0_ENV}

# Shortly before the time limit the tasks are asked to save themselves. A cancelled job gets SIGTERM instead, ends this
# script too, and is not put back.
stopped=0
trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

srun --output={out}.out --error={out}.err --open-mode=append --kill-on-bad-exit=1 --wait=60 \\
    bash -c {shlex.quote(self.task())} &
step=$!
wait "$step"
code=$?
while [ "$stopped" -eq 1 ] && [ "$code" -gt 128 ] && kill -0 "$step" 2>/dev/null; do
    wait "$step" # it was the signal that ended the wait, not the tasks
    code=$?
done
echo "tasks ended with code $code, restarts so far: ${{SLURM_RESTART_COUNT:-0}}"
[ "$code" -eq 0 ] && exit 0
again=0
if [ "$stopped" -eq 1 ] || [ "$code" -eq {REQUEUE_CODE} ]; then again={int(self.requeue)}; fi
if [ "${{SLURM_RESTART_COUNT:-0}}" -lt "$TORCHX_MAX_RETRIES" ]; then again=1; fi
if [ "$again" -eq 1 ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _quoted(word: str) -> str:
    """A word for the shell of a task; stand-ins become variables.

    >>> _quoted("run-@app_id@ of you")
    'run-"$SLURM_JOB_ID"\\' of you\\''
    """
    parts = [(word, False)]
    for stand_in in SHELL_VALUES:
        parts = [
            piece for text, is_value in parts for piece in ([(text, True)] if is_value else _split(text, stand_in))
        ]
    quoted = "".join(SHELL_VALUES[text] if is_value else shlex.quote(text) for text, is_value in parts if text)
    return quoted or "''"


def _split(text: str, stand_in: str) -> list[tuple[str, bool]]:
    pieces: list[tuple[str, bool]] = []
    for i, part in enumerate(text.split(stand_in)):
        pieces += ([(stand_in, True)] if i else []) + [(part, False)]
    return pieces
