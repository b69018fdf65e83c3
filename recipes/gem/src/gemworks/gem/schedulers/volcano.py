"""torchx's Kubernetes scheduler (Volcano) with what clusters of GPUs ask for: tolerations, node selectors, image pull,
resource names, a bounded /dev/shm, and a fresh start of the whole job when a pod fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Dict, List  # noqa: UP035

from torchx.schedulers import kubernetes_scheduler as base
from torchx.schedulers.api import AppDryRunInfo
from torchx.specs import AppDef, runopts

SHARED_MEMORY = "dshm"  # torchx's name of the volume at /dev/shm
GPU = "nvidia.com/gpu"
# torchx 0.7.0 reads options of these types, and not of list[str] and dict[str, str].
STRINGS, STRINGS_BY_NAME = List[str], Dict[str, str]  # noqa: UP006
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
# All ranks of a job live and die together. Volcano's reference: event PodFailed, PodEvicted; action RestartJob.
POLICIES = ({"event": "PodEvicted", "action": "RestartJob"}, {"event": "PodFailed", "action": "RestartJob"})


class GemKubernetesScheduler(base.KubernetesScheduler):
    """Volcano jobs for clusters of GPUs."""

    def _run_opts(self) -> runopts:
        opts = super()._run_opts()
        opts.add(
            "tolerations",
            type_=STRINGS,
            help="Taints to bear: key, key:Effect or key:value:Effect, separated by commas.",
        )
        opts.add("node_selector", type_=STRINGS_BY_NAME, help="Labels that nodes must have: label:value,label:value.")
        opts.add("image_pull_policy", type_=str, help=f"One of {', '.join(PULL_POLICIES)}.")
        opts.add("image_pull_secret", type_=str, help="Name of the secret that the image's registry asks for.")
        opts.add("gpu_resource", type_=str, default=GPU, help="The cluster's name of a GPU.")
        opts.add("resources", type_=STRINGS_BY_NAME, help="More resources of each pod: name:count,name:count.")
        opts.add("shared_memory", type_=str, help="Limit of /dev/shm, such as 64Gi; a pod's memory if not given.")
        return opts

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[base.KubernetesJob]:
        with warnings.catch_warnings():
            # torchx warns that Volcano 1.4 did not retry tasks; whole jobs are restarted here
            warnings.filterwarnings("ignore", message="(?s).*Volcano.*does NOT support retries")
            info = super()._submit_dryrun(app, cfg)
        resource = base.sanitize_for_serialization(info.request.resource)
        assert isinstance(resource, dict)
        _adapt_job(resource["spec"], cfg)
        info.request.resource = resource
        return info


def _adapt_job(spec: dict[str, Any], cfg: Mapping[str, Any]) -> None:
    """Put the options into a Volcano job's spec, in place."""
    spec["minAvailable"] = sum(task.get("minAvailable", task["replicas"]) for task in spec["tasks"])
    if spec.get("maxRetry", 0) > 0:
        spec["policies"] = [dict(policy) for policy in POLICIES]
    tolerations = parse_tolerations(cfg.get("tolerations") or [])
    selector, more = cfg.get("node_selector") or {}, cfg.get("resources") or {}
    policy = cfg.get("image_pull_policy")
    if policy is not None and policy not in PULL_POLICIES:
        raise ValueError(f"image_pull_policy: got {policy!r}, expected one of {', '.join(PULL_POLICIES)}")
    for task in spec["tasks"]:
        # a task's own policies would restart one pod, whose peers could not go on
        task.pop("policies", None)
        task.pop("maxRetry", None)
        pod = task["template"]["spec"]
        if tolerations:
            pod["tolerations"] = tolerations
        if selector:
            pod["nodeSelector"] = {**pod.get("nodeSelector", {}), **selector}
        if cfg.get("image_pull_secret"):
            pod["imagePullSecrets"] = [{"name": cfg["image_pull_secret"]}]
        if cfg.get("shared_memory"):
            (volume,) = [v for v in pod["volumes"] if v["name"] == SHARED_MEMORY]
            volume["emptyDir"]["sizeLimit"] = cfg["shared_memory"]
        for container in pod["containers"]:
            if policy is not None:
                container["imagePullPolicy"] = policy
            for kind in ("limits", "requests"):
                amounts = container["resources"].setdefault(kind, {})
                if cfg.get("gpu_resource", GPU) != GPU and GPU in amounts:
                    amounts[cfg["gpu_resource"]] = amounts.pop(GPU)
                amounts |= more


def parse_tolerations(taints: Sequence[str]) -> list[dict[str, str]]:
    """Kubernetes tolerations from text.

    >>> parse_tolerations(["nvidia.com/gpu:NoSchedule", "team:ads:NoExecute"])
    [{'key': 'nvidia.com/gpu', 'operator': 'Exists', 'effect': 'NoSchedule'}, \
{'key': 'team', 'operator': 'Equal', 'value': 'ads', 'effect': 'NoExecute'}]
    """
    found = []
    for taint in taints:
        key, *rest = taint.split(":")
        effect = rest.pop() if rest and rest[-1] in EFFECTS else None
        if not key or len(rest) > 1:
            raise ValueError(f"tolerations: got {taint!r}, expected key, key:value or key:value:{'|'.join(EFFECTS)}")
        toleration = {"key": key, "operator": "Equal" if rest else "Exists"}
        toleration |= {"value": rest[0]} if rest else {}
        found.append(toleration | ({"effect": effect} if effect else {}))
    return found


def create_scheduler(session_name: str, **kwargs: Any) -> GemKubernetesScheduler:
    """Entry point."""
    return GemKubernetesScheduler(session_name, client=kwargs.get("client"), docker_client=kwargs.get("docker_client"))
