"""What would give an op a faster backend on this machine, and why: the last part of `gemworks doctor`.

The rules are the libraries' (`support()`, and the refusals of `explain`); this file knows what people install.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

PLAIN_TORCH = ("reference", "torch", None)  # backends without kernels of their own; None: there is none at all


@dataclass(frozen=True)
class Gpus:
    """GPUs as the driver and as torch see them.

    Attributes:
        of_driver: names that nvidia-smi lists.
        of_torch: how many torch can use.
        torch_version, torch_cuda: of the installed build; None for the second is a build without CUDA.
        error: why torch can't use them, in the driver's words.
    """

    of_driver: tuple[str, ...]
    of_torch: int
    torch_version: str
    torch_cuda: str | None
    error: str = ""


def look_for_gpus() -> Gpus:
    """Ask nvidia-smi and torch."""
    import torch

    seen = tuple(line.strip() for line in ask_nvidia_smi("--query-gpu=name", "--format=csv,noheader"))
    usable, error = torch.cuda.device_count(), ""
    if seen and not usable and torch.version.cuda is not None:
        try:
            torch.cuda.init()
        except Exception as why:
            error = " ".join(str(why).split())
    return Gpus(seen, usable, torch.__version__, torch.version.cuda, error)


def ask_nvidia_smi(*arguments: str) -> list[str]:
    """Its lines; none where it is missing, hangs or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def alternatives(
    table: Iterable[tuple[str, str, str]], dtype: str, architecture: str, chosen: str
) -> list[dict[str, Any]]:
    """The backends that come before the chosen one and would take this dtype, another one, or another GPU.

    Args:
        table: (backend, dtype or recipe, architecture) that an op has kernels for, the preferred backend first.
        dtype: of the call; `architecture`: "cpu" or such as "sm_90"; `chosen`: the backend that it got.

    Returns:
        One dict per backend: its name, and the dtypes and architectures of which one is needed; empty where this
        machine and call have what it needs.

    >>> table = [("gluon", "bf16", "sm_90"), ("triton", "bf16", "sm_80"), ("triton", "fp32", "sm_80")]
    >>> for found in alternatives(table, "fp32", "sm_80", "reference"): print(found)
    {'backend': 'gluon', 'dtypes': ['bf16'], 'architectures': ['sm_90']}
    """
    rows = list(table)
    found = []
    for backend in dict.fromkeys(row[0] for row in rows):
        if backend == chosen:
            break
        dtypes, places = (list(dict.fromkeys(row[i] for row in rows if row[0] == backend)) for i in (1, 2))
        needs = {
            "dtypes": [] if dtype in dtypes else dtypes,
            "architectures": [] if architecture in places else places,
        }
        if any(needs.values()):  # otherwise it was refused for its shape, which the reason says
            found.append({"backend": backend, **needs})
    return found


def advise(gpus: Gpus, packages: Sequence[Mapping[str, Any]], ops: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What to do for faster backends.

    Args:
        gpus: from `look_for_gpus`; `packages`, `ops`: as `examine` lists them.

    Returns:
        One dict per remedy: `do` (an instruction, or None where nothing that can be installed helps), `why`, and
        `ops`, the names that it is for.
    """
    slow = [item for item in ops if item["alternatives"] and item["backend"] in PLAIN_TORCH]
    if not gpus.of_torch:
        if gpus.of_driver and gpus.torch_cuda is None:
            do = "install the CUDA build of torch"
            why = f"the driver sees {_count(gpus.of_driver)}, and torch {gpus.torch_version} is built without CUDA"
        elif gpus.of_driver:
            do = "make the GPU usable for torch: CUDA_VISIBLE_DEVICES, and a driver new enough for its CUDA"
            why = f"the driver sees {_count(gpus.of_driver)}, torch (CUDA {gpus.torch_cuda}) none. {gpus.error}".strip()
        else:
            return _other_gpus(slow)
        return [{"do": do, "why": why, "ops": _names(slow)}]
    advice: list[dict[str, Any]] = []
    state = {item["name"]: item["state"] for item in packages}
    on_gpu = [item for item in ops if item["device"] != "cpu"]
    kernels = [item for item in on_gpu if item["backend"] in ("gluon", "triton") or _lacks_triton(item)]
    if state.get("triton") != "ok" and kernels:
        do, why = "pip install 'gemworks-gem[triton]'", "their kernels are written in Triton, which is not usable here"
        advice.append({"do": do, "why": why, "ops": _names(kernels)})
    if any(item["name"] == "fbgemm-gpu" and str(item["version"]).endswith("stub") for item in packages):
        do, why = "make install MACHINE=cuda, or pip install fbgemm-gpu", "the fbgemm here is the one for CPUs"
        advice.append({"do": do, "why": why, "ops": ["embedding tables"]})
    if state.get("transformer-engine") == "missing":
        do = "pip install 'gemworks-precision[transformer-engine]'"
        why = "optional: Transformer Engine's FP8 layers, for recipes that ask for that backend by name"
        advice.append({"do": do, "why": why, "ops": ["linear"]})
    return advice + _other_gpus([item for item in slow if item["device"] != "cpu"])


def _other_gpus(slow: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What no installation changes: ops of PyTorch code, and the GPUs or dtypes that have kernels for them."""
    kernels: dict[str, dict[str, tuple[list[str], list[str]]]] = {}  # op -> backend -> dtypes, architectures
    for item in slow:
        for other in item["alternatives"]:
            dtypes, places = kernels.setdefault(item["op"].split()[0], {}).setdefault(other["backend"], ([], []))
            if item["library"] == "jagged":  # a recipe is chosen for its numbers, not for its kernels
                dtypes += [name for name in other["dtypes"] if name not in dtypes]
            places += [name for name in other["architectures"] if name not in places]
    groups: dict[str, list[str]] = {}
    for op, backends in kernels.items():
        words = [
            f"{backend}" + (f" on {_either(places)}" if places else "") + (f" in {_either(dtypes)}" if dtypes else "")
            for backend, (dtypes, places) in backends.items()
        ]
        groups.setdefault("; ".join(words), []).append(op)
    return [
        {"do": None, "why": f"PyTorch code here, right and slow; kernels: {words}", "ops": names}
        for words, names in groups.items()
    ]


def outside_ranges(distributions: Iterable[str]) -> list[str]:
    """Installed versions that a package of ours does not ask for, as sentences."""
    from packaging.requirements import Requirement

    found: list[str] = []
    for name in distributions:
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for line in lines:
            wanted = Requirement(line)
            if wanted.marker is not None and not any(
                wanted.marker.evaluate({"extra": extra}) for extra in ("", "triton", "launch")
            ):
                continue
            try:
                version = metadata.version(wanted.name)
            except metadata.PackageNotFoundError:
                continue
            if not wanted.specifier.contains(version, prereleases=True):
                asked = line.partition(";")[0].strip()
                found.append(f"{wanted.name} is {version}, and {name} asks for {asked}: pip install '{asked}'")
    return list(dict.fromkeys(found))


def _lacks_triton(item: Mapping[str, Any]) -> bool:
    return "triton is not installed" in item["reason"].lower()


def _names(items: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(item["op"] for item in items))


def _either(words: Sequence[str]) -> str:
    """
    >>> _either(["a", "b", "c"])
    'a, b or c'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _count(names: Sequence[str]) -> str:
    """
    >>> _count(["NVIDIA H200", "NVIDIA H200"])
    '2 x NVIDIA H200'
    """
    return " and ".join(
        f"{sum(n == name for n in names)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)
    )
