"""The recipe on a real Slurm of one machine: submitted with torchx, followed, killed, requeued, resumed, cancelled.

The test starts munge, slurmctld and five slurmd (one node that runs jobs, four that pretend to have 8 GPUs each, for
`sbatch --test-only`) in a temporary folder, and takes them all down. It needs root and Debian's slurm-wlm and munge.
Cases L1 and L2: what Slurm itself says of torchx's script and of ours.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
ROOT = Path(__file__).resolve().parents[3]
SIZES = (
    "data.num_samples=8192 data.batch_size=8 data.max_length=16 data.prefetch=0 model.dim=32 train.log_every=5 "
    "train.save_every=10 train.max_steps=400"
)


def wait_for(what: str, seconds: float, look: Callable[[], bool]) -> None:
    """`seconds` are enough on a machine that does nothing else; a busy one gets three times as many."""
    end = time.monotonic() + 3 * seconds
    while not look():
        assert time.monotonic() < end, f"{what}: not within {3 * seconds:.0f} s"
        time.sleep(0.5)


@dataclass(frozen=True)
class Cluster:
    """A running Slurm.

    Attributes:
        folder: configuration, state and logs.
        env: for its programs.
    """

    folder: Path
    env: dict[str, str]

    def run(self, *command: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, env=self.env, cwd=self.folder / "work", input=stdin, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    def torchx(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-c", "from torchx.cli.main import main; main()", *arguments)

    def submit(self, options: str, *arguments: str) -> str:
        out = self.torchx("run", "--workspace", "", "-s", "slurm", "-cfg", options, "gem.train", *arguments).stdout
        handle = out.strip().splitlines()[-1]
        assert handle.startswith("slurm://")
        return handle

    def script(self, options: str, *arguments: str) -> str:
        done = self.torchx("run", "--dryrun", "--workspace", "", "-s", "slurm", "-cfg", options, *arguments)
        return done.stdout[done.stdout.index("#!/bin/bash") :]

    def job(self, handle: str) -> dict[str, str]:
        line = self.run("scontrol", "--oneliner", "show", "job", handle.rpartition("/")[2]).stdout
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def state(self, handle: str) -> str:
        return self.job(handle)["JobState"]

    def out(self, handle: str, task: int = 0) -> str:
        path = self.folder / "work" / f"slurm-{handle.rpartition('/')[2]}-train-{task}.out"
        return path.read_text(encoding="utf-8") if path.is_file() else ""


def started_from(folder: Path) -> list[int]:
    """Processes whose command names the folder: the daemons of this cluster."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return [pid for pid in found if pid != os.getpid()]


def free_ports(num: int) -> list[int]:
    sockets = [socket.socket() for _ in range(num)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def configuration(folder: Path, host: str, ports: list[int]) -> str:
    controller, *nodes = ports
    big = "\n".join(
        f"NodeName=big{i} NodeAddr=127.0.0.1 Port={port} CPUs=64 RealMemory=8000 Gres=gpu:8"
        for i, port in enumerate(nodes[1:], 1)
    )
    return f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=5
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName={host} NodeAddr=127.0.0.1 Port={nodes[0]} CPUs=2 RealMemory=4000
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE
{big}
PartitionName=gpu Nodes=big[1-4] MaxTime=INFINITE
"""


def entry_points(folder: Path) -> None:
    """Makes the recipe's entry points known, as an installation does, also where it is used from its sources."""
    import tomllib

    project = tomllib.loads((ROOT / "recipes/gem/pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"gemworks_gem-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gemworks-gem\nVersion: {project['version']}\n")
    groups = [
        "\n".join([f"[{group}]", *[f"{name} = {target}" for name, target in entries.items()]])
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups) + "\n")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None and not Path("/usr/sbin", name).is_file()]
    if missing or os.geteuid() != 0:
        pytest.skip(f"a Slurm of our own needs root and Debian's slurm-wlm and munge; missing: {missing or 'root'}")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "work", "site"):
        (folder / name).mkdir()
    entry_points(folder / "site")
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(configuration(folder, host, free_ports(6)))
    for i in range(8):
        (folder / f"gpu{i}").touch()
    (folder / "gres.conf").write_text(f"NodeName=big[1-4] Name=gpu File={folder}/gpu[0-7]\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
    sources = [str(p) for p in (*sorted(ROOT.glob("*/*/src")), ROOT / "tools/src", folder / "site")]
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")])
    here = Cluster(folder, env)
    munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "key-file", "pid-file", "log-file")]
    try:
        here.run("munged", "--force", *munge, f"--seed-file={folder}/munge.seed")
        here.run("slurmctld", "-f", env["SLURM_CONF"])
        for node in (host, "big1", "big2", "big3", "big4"):
            here.run("slurmd", "-N", node, "-f", env["SLURM_CONF"])
        wait_for(
            "idle nodes", 60,
            lambda: here.run("sinfo", "--noheader", "-N", "-o", "%T", check=False).stdout.split() == ["idle"] * 5,
        )  # fmt: skip
        yield here
    finally:
        subprocess.run(["scancel", "--user=root"], env=env, capture_output=True, timeout=60, check=False)
        end = time.monotonic() + 30  # steps that run on when their daemons are gone stay for ever
        while here.run("squeue", "--noheader", check=False).stdout.strip() and time.monotonic() < end:
            time.sleep(0.5)
        pids = [int(p.read_text()) for p in folder.glob("*.pid") if p.read_text().strip()]
        pids += [int(p.read_text()) for p in folder.glob("munge.pid") if int(p.read_text()) not in pids]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + 30
        while started_from(folder) and time.monotonic() < end:
            time.sleep(0.5)
        for pid in started_from(folder):  # a daemon whose pid file is gone
            os.kill(pid, signal.SIGKILL)


def test_l1_l2_slurm_accepts_our_script_and_refuses_torchx_s(cluster: Cluster) -> None:
    """Cases L1 and L2, judged by Slurm: 4 nodes x 8 GPUs are accepted; torchx's options are not, nor is too much."""
    script = cluster.script(
        "partition=gpu,time=08:00:00", "gem.train", "--replicas", "4", "--gpus", "8", "--cpus", "32"
    )
    assert "nodes big[1-4]" in cluster.run("sbatch", "--test-only", stdin=script).stderr
    assert "--mem" not in script  # L1
    asked = "#SBATCH --mem=9000M\n"  # a node has 8000
    refused = cluster.run(
        "sbatch", "--test-only", stdin=script.replace("#SBATCH --", asked + "#SBATCH --", 1), check=False
    )
    assert "not available" in refused.stderr
    lines = [line for line in script.splitlines() if not line.startswith(("#SBATCH --n", "#SBATCH --gres"))]
    theirs = "\n".join([lines[0], "#SBATCH --gpus-per-task=8", *lines[1:]])
    refused = cluster.run("sbatch", "--test-only", stdin=theirs, check=False)
    assert refused.returncode != 0
    assert "--gpus-per-task used without either --gpus or -n/--ntasks is not allowed" in refused.stderr


def test_a_killed_job_is_requeued_and_goes_on(cluster: Cluster) -> None:
    """Two tasks, one rank each. Killed by force, the job goes on from its checkpoint; asked to stop before its time
    limit, it saves itself first."""
    arguments = ["--replicas", "2", "--preset", "tiny", "--run_dir", "first", "--max_retries", "1"]
    options = "partition=all,time=00:30:00,share_nodes=True"
    handle = cluster.submit(options, *arguments, "--", "--set", *SIZES.split())
    wait_for("15 steps", 120, lambda: " 15/400 " in cluster.out(handle))
    assert "RUNNING" in cluster.torchx("status", handle).stdout
    log = cluster.torchx("log", "--regex", "data: synthetic", f"{handle}/train/0")
    assert log.stdout.startswith("train/0 data: synthetic: 8,192 train")

    os.kill(trainer(cluster, handle), signal.SIGKILL)
    wait_for("the requeue", 60, lambda: cluster.job(handle)["Restarts"] == "1")
    # Slurm waits two minutes, and counts in seconds: a start in the second that revoked the credential is refused
    time.sleep(2)
    cluster.run("scontrol", "update", f"JobId={handle.rpartition('/')[2]}", "StartTime=now")
    wait_for("the second start", 120, lambda: "going on after step" in cluster.out(handle))
    resumed = int(cluster.out(handle).split("going on after step ")[1].split()[0])
    assert resumed >= 10
    assert resumed % 10 == 0
    wait_for("more steps", 120, lambda: f" {resumed + 10}/400 " in cluster.out(handle).split("going on after")[1])

    # what `#SBATCH --signal=B:USR1@300` does; retries are used up, but this is no failure
    cluster.run("scancel", "--batch", "--signal=USR1", handle.rpartition("/")[2])
    wait_for("the second requeue", 60, lambda: cluster.job(handle)["Restarts"] == "2")
    script_log = (cluster.folder / "work" / f"slurm-{handle.rpartition('/')[2]}.out").read_text()
    assert "restarts so far: 0" in script_log
    # 143: srun told a task once more when the other one had ended
    assert re.search(r"tasks ended with code (75|143), restarts so far: 1", script_log)
    saved = max(int(path.name[5:]) for path in (cluster.folder / "work/first/checkpoints").glob("step_*"))
    assert saved >= resumed + 10
    cluster.torchx("cancel", handle)
    wait_for("the cancellation", 60, lambda: cluster.state(handle) == "CANCELLED")
    assert "CANCELLED" in cluster.torchx("status", handle).stdout


def test_a_cancelled_job_stays_cancelled(cluster: Cluster) -> None:
    arguments = ["--preset", "tiny", "--run_dir", "second", "--max_retries", "3"]
    handle = cluster.submit("partition=all,time=00:30:00", *arguments, "--", "--set", *SIZES.split())
    wait_for("a step", 120, lambda: " 5/400 " in cluster.out(handle))
    cluster.torchx("cancel", handle)
    wait_for("the cancellation", 60, lambda: cluster.state(handle) == "CANCELLED")
    time.sleep(5)
    assert (cluster.state(handle), cluster.job(handle)["Restarts"]) == ("CANCELLED", "0")
    assert cluster.run("squeue", "--noheader").stdout == ""


def test_wrong_input_is_not_tried_again(cluster: Cluster) -> None:
    """Without retries a failed job ends with the program's exit code, and its error is in the task's log."""
    handle = cluster.submit("partition=all", "--preset", "smal")
    wait_for("the end", 60, lambda: cluster.state(handle) == "FAILED")
    assert cluster.job(handle)["ExitCode"] == "2:0"
    error = (cluster.folder / "work" / f"slurm-{handle.rpartition('/')[2]}-train-0.err").read_text()
    assert "error: preset: got 'smal'" in error


def trainer(cluster: Cluster, handle: str) -> int:
    """The process id of a rank."""
    host = socket.gethostname().split(".")[0]
    listed = cluster.run("scontrol", "listpids", handle.rpartition("/")[2], host).stdout.splitlines()[1:]
    for pid in [line.split()[0] for line in listed]:
        command = Path(f"/proc/{pid}/cmdline")
        if command.is_file() and b"gemworks.gem.train" in command.read_bytes().split(b"\0"):
            return int(pid)
    raise AssertionError(listed)
