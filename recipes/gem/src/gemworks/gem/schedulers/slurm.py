"""torchx's Slurm scheduler with a script that clusters accept, and status without job accounting."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gemworks.gem.schedulers.slurm_script import APP_ID, RANK0_ENV, REPLICA_ID, SlurmScript
from torchx.schedulers.api import AppDryRunInfo, DescribeAppResponse, Stream, filter_regex, split_lines_iterator
from torchx.schedulers.local_scheduler import LogIterator
from torchx.schedulers.slurm_scheduler import SLURM_STATES, SlurmScheduler, _get_job_dirs
from torchx.specs import AppDef, AppState, ReplicaStatus, Role, RoleStatus, macros, runopts

# States that torchx 0.7.0 does not know: it stops with an assertion while a job ends.
STATES = {**SLURM_STATES, "COMPLETING": AppState.RUNNING, "CONFIGURING": AppState.PENDING,
          "REQUEUE_HOLD": AppState.PENDING, "SPECIAL_EXIT": AppState.PENDING, "STOPPED": AppState.PENDING,
          "SIGNALING": AppState.RUNNING, "STAGE_OUT": AppState.RUNNING}  # fmt: skip
PASSED_ON = ("partition", "time", "constraint", "comment", "mail-user", "mail-type", "account", "qos", "reservation")


@dataclass
class SlurmRequest:
    """What `SlurmScheduler.schedule` submits: `cmd` and the script."""

    cmd: list[str]
    script: SlurmScript
    job_dir: str | None

    def materialize(self) -> str:
        return self.script.text()

    def __repr__(self) -> str:
        return f"{' '.join([*self.cmd, '$SBATCH_SCRIPT'])}\n\n{self.materialize()}"


class Log(LogIterator):
    """Lines of a log file. torchx 0.7.0 follows a running job's log whether it was asked to or not."""

    def __init__(self, app_id: str, log_file: str, scheduler: Any, should_tail: bool) -> None:
        super().__init__(app_id, log_file, scheduler, should_tail=should_tail)
        self._follow = should_tail

    def _check_finished(self) -> None:
        if self._follow:
            super()._check_finished()
        else:
            self._app_finished = True


class GemSlurmScheduler(SlurmScheduler):
    """Slurm for apps of one role; its replicas are the equal tasks of one job."""

    def _run_opts(self) -> runopts:
        opts = super()._run_opts()
        opts.add("account", type_=str, help="Account that the job is charged to.")
        opts.add("qos", type_=str, help="Quality of service.")
        opts.add("reservation", type_=str, help="Reservation to run in.")
        opts.add("exclusive", type_=bool, default=False, help="Ask for whole nodes.")
        opts.add("share_nodes", type_=bool, default=False, help="Let several replicas lie on one node.")
        opts.add(
            "requeue",
            type_=bool,
            default=True,
            help="Put a job that was stopped shortly before its time limit back into the queue.",
        )
        opts.add(
            "signal_seconds",
            type_=int,
            default=300,
            help="How long before its time limit a job is asked to save itself; only used with `time`.",
        )
        return opts

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[Any]:
        if len(app.roles) != 1:
            raise ValueError(
                f"roles: got {[role.name for role in app.roles]}, expected one; launch each role as a job of its own"
            )
        values = macros.Values(img_root="", app_id=APP_ID, replica_id=REPLICA_ID, rank0_env=RANK0_ENV)
        role = values.apply(app.roles[0])
        options: dict[str, str | None] = {name: str(cfg[name]) for name in PASSED_ON if cfg.get(name) is not None}
        if cfg.get("exclusive"):
            options["exclusive"] = None
        script = SlurmScript(
            name=f"{app.name}.{role.name}",
            role=role.name,
            command=[role.entrypoint, *role.args],
            env=role.env,
            num_tasks=role.num_replicas,
            share_nodes=bool(cfg.get("share_nodes")),
            gpus=max(role.resource.gpu, 0),
            cpus=max(role.resource.cpu, 0),
            memory_mb=max(role.resource.memMB, 0),
            options=options,
            max_retries=role.max_retries,
            requeue=bool(cfg.get("requeue", True)),
            signal_seconds=int(cfg.get("signal_seconds") or 0) if cfg.get("time") else 0,
        )
        return AppDryRunInfo(SlurmRequest(["sbatch", "--parsable"], script, cfg.get("job_dir")), repr)

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Lines of one task's log, from the folder that the job was submitted in; standard output unless `streams`
        says stderr. `since` and `until` are not known to Slurm."""
        if streams == Stream.COMBINED:
            raise ValueError("streams: got combined, expected stdout or stderr, which are files of their own")
        extension = "err" if streams == Stream.STDERR else "out"
        folder = _get_job_dirs().get(app_id, "")
        path = os.path.join(folder, f"slurm-{app_id}-{role_name}-{k}.{extension}")
        lines = split_lines_iterator(Log(app_id, path, self, should_tail))
        return filter_regex(regex, lines) if regex else lines

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """From the controller as long as it knows the job, then from accounting where there is any."""
        found = _ask("scontrol", "--oneliner", "show", "job", app_id)
        facts = None if found is None else parse_job(found)
        if facts is None:
            found = _ask(
                "sacct", "--parsable2", "--noheader", "--allocations", "-j", app_id, "-o", "JobName,State,NNodes"
            )
            facts = None if not found else parse_accounting(found)
        if facts is None:
            return None
        name, state, num_tasks = facts
        status = STATES.get(state, AppState.UNKNOWN)
        replicas = [ReplicaStatus(id=i, role=name, state=status, hostname="") for i in range(num_tasks)]
        return DescribeAppResponse(
            app_id=app_id,
            roles=[Role(name=name, num_replicas=num_tasks, image="")],
            roles_statuses=[RoleStatus(name, replicas)],
            state=status,
            msg=state,
        )


def parse_job(line: str) -> tuple[str, str, int] | None:
    """Role, state and number of tasks from a line of `scontrol --oneliner show job`.

    >>> parse_job("JobId=7 JobName=gem.train JobState=RUNNING Reason=None NumTasks=2 StdOut=/a/slurm-7.out")
    ('train', 'RUNNING', 2)
    """
    fields = dict(re.findall(r"(\w+)=(\S*)", line))
    if "JobState" not in fields:
        return None
    return _role(fields.get("JobName", "")), fields["JobState"], int(fields.get("NumTasks", "1"))


def parse_accounting(line: str) -> tuple[str, str, int]:
    """The same from a line of sacct.

    >>> parse_accounting("gem.train|CANCELLED by 1000|2")
    ('train', 'CANCELLED', 2)
    """
    name, state, nodes = line.strip().split("\n")[0].split("|")
    return _role(name), state.split()[0], int(nodes)


def _role(job_name: str) -> str:
    """Jobs are named <app>.<role>."""
    return job_name.rpartition(".")[2]


def _ask(*command: str) -> str | None:
    """What a program of Slurm's prints, None if it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if done.returncode else done.stdout


def create_scheduler(session_name: str, **kwargs: object) -> GemSlurmScheduler:
    """Entry point."""
    del kwargs
    return GemSlurmScheduler(session_name)
