"""What `gemworks doctor` finds out: versions, devices, and the backend of every op.

It must answer on a machine where things are broken, so every look is guarded and a failure is a finding.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

from gemworks.cli.remedies import advise, alternatives, ask_nvidia_smi, look_for_gpus, outside_ranges


@dataclass(frozen=True)
class Package:
    """A package worth looking at.

    Attributes:
        name: on the package index.
        module: what to import.
        needed_for: why one would install it; shown when it is missing.
        required: whether training needs it.
        install: what to tell pip, if that is not the name.
    """

    name: str
    module: str
    needed_for: str
    required: bool = False
    install: str = ""


PACKAGES = (
    Package("gemworks-cli", "gemworks.cli", "this command line", required=True),
    Package("gemworks-gem", "gemworks.gem", "the model and its training", required=True),
    Package("gemworks-jagged", "gemworks.jagged", "attention on sequences", required=True),
    Package("gemworks-precision", "gemworks.precision", "FP8 arithmetic", required=True),
    Package("gemworks-parallel", "gemworks.parallel", "training on several processes", required=True),
    Package("gemworks-netmem", "gemworks.netmem", "activation offload", required=True),
    Package("torch", "torch", "everything", required=True),
    Package("torchrec", "torchrec", "embedding tables", required=True),
    Package("fbgemm-gpu", "fbgemm_gpu", "embedding kernels of torchrec", required=True),
    Package("triton", "triton", "fast kernels on a GPU", install="gemworks-gem[triton]"),
    Package("torchx", "torchx", "launching on this machine or a cluster", install="gemworks-gem[launch]"),
    Package("pyarrow", "pyarrow", "parquet data"),
    Package("tensorboard", "tensorboard", "viewing a run's TensorBoard events"),
    Package("matplotlib", "matplotlib", "learning curves"),
    Package("safetensors", "safetensors", "gemworks checkpoint convert", install="gemworks-gem[export]"),
    Package("torchao", "torchao", "comparing FP8 numerics with a peer"),
    Package(
        "transformer-engine",
        "transformer_engine",
        "a peer's FP8 layers on a GPU",
        install="gemworks-precision[transformer-engine]",
    ),
)
Item = TypeVar("Item")
DTYPES = ("float32", "bfloat16")
PCIE = ("--query-gpu=uuid,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader")
LINEAR_SHAPE = (4096, 4096, 4096)  # rows, in and out features of the layer that stands for all linear layers


def examine() -> dict[str, Any]:
    """Everything, as plain values. Never raises because something on the machine is broken."""
    problems: list[str] = []
    packages = [look_at(package) for package in PACKAGES]
    required = {package.name for package in PACKAGES if package.required}
    problems += [
        f"{item['name']} is {item['state']}: training will not work; {item['advice']}"
        for item in packages
        if item["name"] in required and item["state"] != "ok"
    ]
    problems += _guarded("versions", lambda: outside_ranges(item["name"] for item in packages), problems)
    devices = _guarded("devices", _devices, problems)
    names = [device["name"] for device in devices]
    ops = [
        *_guarded("ops of gemworks.jagged", lambda: _jagged_ops(names), problems),
        *_guarded("ops of gemworks.precision", lambda: _precision_ops(names), problems),
        *_guarded("codecs of gemworks.netmem", lambda: _netmem_codecs(names), problems),
    ]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "devices": devices,
        "ops": ops,
        "advice": _guarded("GPUs", lambda: advise(look_for_gpus(), packages, ops), problems),
        "problems": problems,
    }


def look_at(package: Package) -> dict[str, Any]:
    """Version and state of one package: "ok", "missing", or "broken" when importing it fails."""
    try:
        version: str | None = metadata.version(package.name)
    except metadata.PackageNotFoundError:
        version = None
    finding: dict[str, Any] = {"name": package.name, "version": version, "state": "ok", "advice": ""}
    try:
        with _silence():
            importlib.import_module(package.module)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        if version is None and package.module.startswith(error.name or " "):
            prefix = "" if package.required else "optional, "
            what = package.install or package.name
            command = f"pip install '{what}'" if "[" in what else f"pip install {what}"
            return finding | {"state": "missing", "advice": f"{prefix}for {package.needed_for}: {command}"}
        return finding | {"state": "broken", "advice": _cause(error)}
    except BaseException as error:
        return finding | {"state": "broken", "advice": _cause(error)}
    return finding | {"version": version or "source tree"}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What packages print and log while they are imported is not ours to show, least of all on standard output."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _cause(error: BaseException) -> str:
    """One line about an import that failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"importing it fails: {type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def links_by_uuid(nvlink: Sequence[str], pcie: Sequence[str]) -> dict[str, str]:
    """What nvidia-smi says of the links of each GPU, by the GPU's uuid as torch writes it.

    >>> nvlink = ["GPU 0: NVIDIA H200 (UUID: GPU-5a)", "  Link 0: 26.562 GB/s", "  Link 1: 26.562 GB/s"]
    >>> links_by_uuid(nvlink, ["GPU-5a, 5, 16", "GPU-6b, 4, 8"])
    {'5a': '2 NVLinks of 26.562 GB/s each way, PCIe 5 x16', '6b': 'PCIe 4 x8'}
    """
    rates: dict[str, list[str]] = {}
    for line in nvlink:
        if found := re.search(r"UUID: GPU-([\w-]+)", line):
            rates[found[1]] = []
        elif rates and (found := re.search(r"Link \d+: ([\d.]+) GB/s", line)):
            rates[list(rates)[-1]].append(found[1])
    texts = {}
    for line in pcie:
        uuid, generation, width = (word.strip() for word in line.split(","))
        uuid = uuid.removeprefix("GPU-")
        each = rates.get(uuid)
        words = [f"{len(each)} NVLinks of {each[0]} GB/s each way"] if each else []
        texts[uuid] = ", ".join([*words, f"PCIe {generation} x{width}"])
    return texts


def _devices() -> list[dict[str, Any]]:
    import torch

    devices: list[dict[str, Any]] = [
        {
            "name": "cpu",
            "description": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in use",
        }
    ]
    num_gpus = torch.cuda.device_count()
    links = links_by_uuid(ask_nvidia_smi("nvlink", "--status"), ask_nvidia_smi(*PCIE)) if num_gpus else {}
    for index in range(num_gpus):
        peers = [f"cuda:{j}" for j in range(num_gpus) if j != index and torch.cuda.can_device_access_peer(index, j)]
        reach = f", reaches {', '.join(peers)} directly" if peers else ", reaches other GPUs through the host only"
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": f"cuda:{index}",
                "description": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
                f"sm_{properties.major}{properties.minor}{reach if num_gpus > 1 else ''}",
                "links": links.get(str(getattr(properties, "uuid", "")), ""),
            }
        )
    return devices


def _jagged_ops(devices: list[str]) -> list[dict[str, Any]]:
    """What `gemworks.jagged.explain` says for every op; one row per device and dtype."""
    import torch
    from gemworks import jagged

    tables: dict[str, list[tuple[str, str, str]]] = {}
    for line in jagged.support():  # in the order in which backends are tried
        tables.setdefault(line.op, []).append((line.backend, line.dtype, line.architecture))
    rows: list[dict[str, Any]] = []
    for op, table in tables.items():
        for device in devices:
            for dtype in DTYPES:
                row: dict[str, Any] = {"library": "jagged", "op": op, "device": device, "dtype": dtype}
                try:
                    chosen = jagged.explain(op, dtype=getattr(torch, dtype), device=device)
                except Exception as error:
                    rows.append(row | _none(error))
                    continue
                found = {"backend": chosen.backend, "config": chosen.config, "reason": chosen.reason}
                rows.append(row | found | {"alternatives": alternatives(table, dtype, _place(device), chosen.backend)})
    return rows


def _place(device: str) -> str:
    """ "cpu", or a GPU's architecture such as "sm_90"."""
    import torch

    if device == "cpu":
        return device
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _none(error: Exception) -> dict[str, Any]:
    reason = " ".join(str(error).split())
    return {"backend": None, "config": None, "reason": reason, "alternatives": []}


def _precision_ops(devices: list[str]) -> list[dict[str, Any]]:
    """What `gemworks.precision.explain` says for a linear layer under every preset recipe; one row per product or cast.

    `dtype` is the recipe's name. The layer has a shape that every recipe's blocks divide.
    """
    from gemworks import precision
    from gemworks.precision.backends import ORDER
    from gemworks.precision.recipe import PRESETS

    tables: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for place, op, kind, kernel in precision.support_table():
        tables.setdefault((op, kind), []).append((kernel.partition(":")[0], kind, place))
    for table in tables.values():
        table.sort(key=lambda row: ORDER.index(row[0]))
    rows: list[dict[str, Any]] = []
    for device in devices:
        for recipe in PRESETS:
            row: dict[str, Any] = {"library": "precision", "device": device, "dtype": recipe}
            try:
                explained = precision.explain(LINEAR_SHAPE, recipe, device)
            except Exception as error:
                rows.append(row | {"op": "linear"} | _none(error))
                continue
            for product, choice in explained.choices:
                refused = "; ".join(f"not {backend}: {why}" for backend, why in choice.rejected)
                kind = choice.kind.value
                better = alternatives(tables[choice.op, kind], kind, _place(device), choice.backend)
                rows.append(
                    row
                    | {
                        "op": f"linear {product} {choice.op}",
                        "backend": choice.backend,
                        "config": choice.kernel,
                        "reason": refused or "the first choice",
                        "alternatives": better,
                    }
                )
    return rows


def _netmem_codecs(devices: list[str]) -> list[dict[str, Any]]:
    """What `gemworks.netmem.explain_codec` says of the built-in codecs for saved tensors; one row per codec."""
    import torch
    from gemworks.netmem import explain_codec
    from gemworks.netmem.codec import BUILTIN

    rows: list[dict[str, Any]] = []
    for codec in BUILTIN:
        for device in devices:
            row: dict[str, Any] = {"library": "netmem", "op": f"codec {codec}", "device": device, "dtype": "bfloat16"}
            try:
                chosen = explain_codec(codec, torch.zeros(4096, dtype=torch.bfloat16, device=device))
            except Exception as error:
                rows.append(row | _none(error))
                continue
            backend, _, reason = chosen.partition(": ")
            better = [{"backend": "triton", "dtypes": [], "architectures": ["a CUDA GPU"]}]
            found = {"backend": backend, "config": None, "reason": reason}
            rows.append(row | found | {"alternatives": better if backend == "torch" and device == "cpu" else []})
    return rows


def _guarded(what: str, look: Callable[[], list[Item]], problems: list[str]) -> list[Item]:
    try:
        return look()
    except Exception as error:
        problems.append(f"could not look at the {what}: {type(error).__name__}: {' '.join(str(error).split())}")
        return []
