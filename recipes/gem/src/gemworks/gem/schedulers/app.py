"""The app that every component of the recipe makes: one role that runs a Python module in one process or in many."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from torchx import specs
from torchx.specs import macros

TRAINER = "gemworks.gem.train"
LAUNCHER = "gemworks.gem.launch"  # torchrun that hands on exit codes
NOT_ASKED_FOR = -1  # torchx's value for a resource that the scheduler's script shall not mention
RENDEZVOUS_PORT = 29500
RENDEZVOUS_SECONDS = 1800  # nodes of a large job do not start together; images are pulled first
SAVE_SECONDS = 300  # what a process gets to save itself after SIGTERM


def make_app(
    name: str,
    role: str,
    module: str,
    arguments: list[str],
    replicas: int,
    gpus: int,
    processes: int,
    image: str,
    cpus: int,
    memory_mb: int,
    env: Mapping[str, str] | None,
    mounts: list[str] | None,
    max_retries: int,
) -> specs.AppDef:
    """One role: a Python module, in one process or in several under torchrun."""
    for argument, value in (("replicas", replicas - 1), ("gpus", gpus), ("processes", processes)):
        if value < 0:
            least = 1 if argument == "replicas" else 0
            raise ValueError(f"{argument}: got {value + least}, expected {least} or more")
    python = "python" if image else sys.executable
    per_replica = processes or max(gpus, 1)
    environment = {"PYTHONUNBUFFERED": "1"}
    if replicas * per_replica == 1:
        entrypoint, command = python, ["-m", module, *arguments]
    else:
        assert module == TRAINER, "the launcher starts the trainer only"
        # torchrun gives its processes 30 seconds after SIGTERM; a checkpoint of large tables takes longer
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SAVE_SECONDS)
        entrypoint = "bash"
        command = ["-c", _launcher(python, arguments, replicas, per_replica)]
    return specs.AppDef(
        name=name,
        roles=[
            specs.Role(
                name=role,
                image=image,
                entrypoint=entrypoint,
                args=command,
                env={**environment, **(env or {})},
                num_replicas=replicas,
                max_retries=max_retries,
                resource=specs.Resource(cpu=cpus, gpu=gpus, memMB=memory_mb),
                port_map={"c10d": RENDEZVOUS_PORT} if replicas > 1 else {},
                mounts=specs.parse_mounts(mounts) if mounts else [],
            )
        ],
    )


def _launcher(
    python: str,
    arguments: list[str],
    replicas: int,
    processes: int,
) -> str:
    """A shell command: the processes of one replica. They meet at the first replica's name, which the scheduler puts
    into a variable of the environment; only the shell of the replica itself knows it."""
    words = [python, "-m", LAUNCHER, "--nnodes", str(replicas), "--nproc-per-node", str(processes)]
    if replicas == 1:
        meeting = "--standalone"
    else:
        conf = f"timeout={RENDEZVOUS_SECONDS},join_timeout={RENDEZVOUS_SECONDS}"
        place = f'"$${{{macros.rank0_env}:-localhost}}:{RENDEZVOUS_PORT}"'  # $$ is torchx's way to write $
        meeting = f"--rdzv-backend c10d --rdzv-endpoint {place} --rdzv-id {macros.app_id} --rdzv-conf {conf}"
    return f"exec {shlex.join(words)} {meeting} -- {shlex.join(arguments)}".rstrip()
