"""What torchx is given to submit: golden scripts for Slurm and Volcano, checked by documented rules.

A golden file is written anew with GEMWORKS_UPDATE_GOLDEN=1.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from gemworks.gem import components
from gemworks.gem.schedulers import slurm, volcano
from gemworks.gem.schedulers.slurm_script import SlurmScript
from torchx.schedulers.slurm_scheduler import SlurmScheduler
from torchx.specs import AppDef, AppState, Role

pytestmark = pytest.mark.reference

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).resolve().parents[3]
# Fields of a Volcano job and its tasks, events and actions for users: volcano-sh/apis, pkg/apis/batch/v1alpha1
# (JobSpec, TaskSpec, LifecyclePolicy) and pkg/apis/bus/v1alpha1 (events.go, actions.go); what they mean:
# volcano.sh/en/docs/vcjob and docs/design/job-api.md of volcano-sh/volcano.
JOB_FIELDS = {
    *("schedulerName", "minAvailable", "volumes", "tasks", "policies", "plugins", "runningEstimate", "queue"),
    *("maxRetry", "ttlSecondsAfterFinished", "priorityClassName", "minSuccess"),
}
TASK_FIELDS = {"name", "replicas", "minAvailable", "template", "policies", "topologyPolicy", "maxRetry", "dependsOn"}
DESERIALIZE = "_ApiClient__deserialize"  # the client offers it for HTTP answers only
POLICY_FIELDS = {"action", "event", "events", "exitCode", "timeout"}
EVENTS = {"*", "PodPending", "PodFailed", "PodEvicted", "Unknown", "TaskCompleted", "TaskFailed"}
ACTIONS = {"AbortJob", "RestartJob", "RestartTask", "TerminateJob", "CompleteJob", "ResumeJob"}


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("GEMWORKS_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"no {path}; GEMWORKS_UPDATE_GOLDEN=1 writes it"
    assert text == path.read_text(encoding="utf-8")


def slurm_script(app: AppDef, **cfg: Any) -> str:
    scheduler = slurm.create_scheduler("test")
    options = {"requeue": True, "signal_seconds": 300} | {
        name.replace("_to_", "-"): value for name, value in cfg.items()
    }
    return scheduler.submit_dryrun(app, options).request.materialize()  # pyright: ignore[reportArgumentType]


def volcano_job(app: AppDef, monkeypatch: pytest.MonkeyPatch, **cfg: Any) -> dict[str, Any]:
    monkeypatch.setattr(volcano.base, "make_unique", lambda name: f"{name}-1234")
    scheduler = volcano.create_scheduler("test", docker_client=object())
    monkeypatch.setattr(scheduler, "dryrun_push_images", lambda app, cfg: {})
    options: Any = {"queue": "default", "gpu_resource": volcano.GPU, **cfg}
    info = scheduler.submit_dryrun(app, options)
    return json.loads(json.dumps(yaml.safe_load(str(info.request))))


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Golden scripts don't name this machine's interpreter."""
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")


SCRIPTS = {
    "slurm_one_process.sh": (lambda: components.train(preset="small", cpus=8), {}),
    "slurm_4_nodes.sh": (
        lambda: components.train(
            "--set", "train.epochs=2", "train.seed=1", preset="base", run_dir="/data/runs/first", replicas=4, gpus=8,
            cpus=64, memory_mb=900000, max_retries=3, env={"NCCL_DEBUG": "WARN", "LIST": "a,b c"},
        ),
        {"partition": "h200", "time": "1-00:00:00", "account": "ads", "qos": "high", "exclusive": True},
    ),
    "slurm_eval.sh": (lambda: components.eval("/data/runs/first", gpus=1), {"partition": "h200"}),
    "slurm_bench.sh": (lambda: components.bench("--suite", "pair", suite="netmem", gpus=2), {"partition": "h200"}),
}  # fmt: skip


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("name", SCRIPTS)
def test_slurm_script(name: str, tmp_path: Path) -> None:
    make, cfg = SCRIPTS[name]
    text = slurm_script(make(), **cfg)
    check_golden(name, text)
    (tmp_path / "script.sh").write_text(text)
    subprocess.run(["bash", "-n", tmp_path / "script.sh"], check=True)


def header(text: str) -> dict[str, str | None]:
    words = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]
    return {word.split("=")[0]: word.split("=", 1)[1] if "=" in word else None for word in words}


def test_l1_memory_only_when_asked_for() -> None:
    """Case L1: torchx asks for 1024 MB that nobody named, and clusters without such limits refuse the job."""
    assert "mem" not in header(slurm_script(components.train()))
    assert header(slurm_script(components.train(memory_mb=2048)))["mem"] == "2048M"


def test_l2_gpus_with_their_tasks() -> None:
    """Case L2: `--gpus-per-task` without `--ntasks` is refused by Slurm; torchx 0.7.0 still writes it."""
    app = components.train(gpus=8, replicas=4)
    theirs = SlurmScheduler("test").submit_dryrun(components.train(gpus=8), {}).request.materialize()
    assert "--gpus-per-task=8" in theirs
    assert "--ntasks=" not in theirs
    asked = header(slurm_script(app))
    assert (asked["nodes"], asked["ntasks"], asked["ntasks-per-node"], asked["gres"]) == ("4", "4", "1", "gpu:8")
    assert "gpus-per-task" not in asked
    shared = header(slurm_script(app, share_nodes=True))
    assert shared["ntasks"] == "4"
    assert "nodes" not in shared


def test_requeue_and_signal_are_asked_for_or_not() -> None:
    app = components.train()
    assert "requeue" in header(slurm_script(app))
    assert "no-requeue" in header(slurm_script(app, requeue=False))
    assert "signal" not in header(slurm_script(app))
    assert header(slurm_script(app, time="02:00:00"))["signal"] == "B:USR1@300"
    assert header(slurm_script(app, time="02:00:00", signal_seconds=60))["signal"] == "B:USR1@60"


def test_the_task_gets_its_words_as_they_were(tmp_path: Path) -> None:
    """Quotes, spaces, commas, dollars, the job's id and the task's number arrive through both shells."""
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['E']]))"
    words = ["-c", show, "a b", "c'd", 'e"f', "$HOME", "x,y", "", "job-@app_id@/@replica_id@"]
    script = SlurmScript(name="n", role="r", command=[sys.executable, *words], env={"E": "1,2 $X '"})
    line = next(line for line in script.text().splitlines() if line.strip().startswith("bash -c"))
    command = shlex.split(line.strip().removesuffix("&"))
    env = os.environ | {"SLURM_JOB_ID": "77", "SLURM_PROCID": "3"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout) == [[*words[2:-1], "job-77/3"], "1,2 $X '"]


def test_one_role_only() -> None:
    app = AppDef("two", [Role("a", image=""), Role("b", image="")])
    with pytest.raises(ValueError, match=r"roles: got \['a', 'b'\], expected one"):
        slurm_script(app)


def test_status_without_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"scontrol": "JobId=7 JobName=gem.train JobState=COMPLETING NumTasks=2", "sacct": "gem.train|TIMEOUT|3\n"}
    monkeypatch.setattr(slurm, "_ask", lambda *command: answers.get(command[0]))
    found = slurm.create_scheduler("test").describe("7")
    assert found is not None
    assert (found.state, found.roles[0].name, found.roles[0].num_replicas) == (AppState.RUNNING, "train", 2)
    del answers["scontrol"]
    found = slurm.create_scheduler("test").describe("7")
    assert found is not None
    assert (found.state, found.roles[0].num_replicas) == (AppState.FAILED, 3)
    del answers["sacct"]
    assert slurm.create_scheduler("test").describe("7") is None


def check_volcano(job: dict[str, Any]) -> None:
    """What the cluster's admission would look at, from the sources named above."""
    from kubernetes import client

    assert (job["apiVersion"], job["kind"]) == ("batch.volcano.sh/v1alpha1", "Job")
    spec = job["spec"]
    assert spec.keys() <= JOB_FIELDS
    assert spec["minAvailable"] <= sum(task["replicas"] for task in spec["tasks"])
    names = [task["name"] for task in spec["tasks"]]
    assert len(set(names)) == len(names)
    api = client.ApiClient()
    for task in spec["tasks"]:
        assert task.keys() <= TASK_FIELDS
        # through the Kubernetes client's own model of a pod: an unknown field or a wrong type does not come back
        pod = getattr(api, DESERIALIZE)(task["template"], "V1PodTemplateSpec")
        assert api.sanitize_for_serialization(pod) == task["template"]
        for container in task["template"]["spec"]["containers"]:
            for name, amount in container["resources"]["requests"].items():
                assert name in container["resources"]["limits"]
                assert isinstance(amount, str)
            ports = [port["name"] for port in container.get("ports", [])]
            assert all(len(port) <= 15 for port in ports)
    for policy in spec.get("policies", []):
        assert policy.keys() <= POLICY_FIELDS
        assert policy["event"] in EVENTS
        assert policy["action"] in ACTIONS


def test_volcano_job(monkeypatch: pytest.MonkeyPatch) -> None:
    app = components.train(
        "--set", "train.epochs=2", preset="base", run_dir="/runs/first", replicas=2, gpus=8, cpus=64,
        memory_mb=900000, image="repo/gem:1", max_retries=3, mounts=["type=volume", "src=runs", "dst=/runs"],
    )  # fmt: skip
    job = volcano_job(
        app, monkeypatch, tolerations=["nvidia.com/gpu:NoSchedule", "team:ads:NoExecute"],
        node_selector={"pool": "h200"}, image_pull_policy="IfNotPresent", image_pull_secret="registry",
        resources={"rdma/ib": "8"}, shared_memory="256Gi",
    )  # fmt: skip
    check_volcano(job)
    check_golden("volcano_2_pods.yaml", yaml.safe_dump(job, width=1000))
    assert job["spec"]["minAvailable"] == 2, "all pods or none"


def test_volcano_job_of_one_process_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = volcano_job(components.train(image="repo/gem:1"), monkeypatch)
    check_volcano(job)
    (task,) = job["spec"]["tasks"]
    assert task["template"]["spec"]["containers"][0]["resources"] == {"limits": {}, "requests": {}}
    assert "policies" not in job["spec"]


def test_the_volcano_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    job = volcano_job(components.train(image="repo/gem:1"), monkeypatch)
    job["spec"]["tasks"][0]["template"]["spec"]["tolerationz"] = []
    with pytest.raises(AssertionError):
        check_volcano(job)


def test_other_names_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    job = volcano_job(components.train(image="i", gpus=1), monkeypatch, gpu_resource="nvidia.com/mig-1g.18gb")
    resources = job["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["resources"]
    assert resources == {"limits": {"nvidia.com/mig-1g.18gb": "1"}, "requests": {"nvidia.com/mig-1g.18gb": "1"}}


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"tolerations": ["a:b:c:d"]}, "tolerations: got 'a:b:c:d', expected key, key:value or key:value:NoSchedule"),
        ({"image_pull_policy": "Sometimes"}, "image_pull_policy: got 'Sometimes', expected one of Always"),
    ],
)
def test_wrong_options(cfg: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        volcano_job(components.train(image="i"), monkeypatch, **cfg)


def test_entry_points_name_what_is_there_and_keep_torchx_s_own() -> None:
    """Registering schedulers hides torchx's own; the list must therefore be complete."""
    import importlib

    from torchx.schedulers import DEFAULT_SCHEDULER_MODULES

    project = tomllib.loads((ROOT / "recipes/gem/pyproject.toml").read_text(encoding="utf-8"))["project"]
    schedulers = project["entry-points"]["torchx.schedulers"]
    assert schedulers.keys() == DEFAULT_SCHEDULER_MODULES.keys()
    for name, target in schedulers.items():
        module, _, function = target.partition(":")
        if module.startswith("gemworks."):
            assert callable(getattr(importlib.import_module(module), function))
        else:
            assert module == DEFAULT_SCHEDULER_MODULES[name]
    assert project["entry-points"]["torchx.components"]["gem"] == components.__name__
