"""Which device a run uses, its peak, and autocast on it."""

from __future__ import annotations

import os

import torch
from gemworks.gem.config import GemConfig
from gemworks.gem.efficiency import H200_BF16_PEAK_FLOPS


def resolve_device(name: str) -> torch.device:
    """The device that `train.device` names; "auto" takes a GPU if there is one. Of several processes on a machine each
    has its own GPU, by LOCAL_RANK.

    Raises:
        ValueError: "cuda" without a usable GPU, fewer GPUs than processes on this machine, or an unknown name.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"train.device: got {name!r}, expected 'auto', 'cpu' or 'cuda'")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "train.device: got 'cuda', but PyTorch sees no GPU; use 'auto' or 'cpu' (`gemworks doctor` says more)"
        )
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if name == "cpu" or local_size == 1:
        return torch.device(name)
    if torch.cuda.device_count() < local_size:
        raise ValueError(
            f"train.device: got {local_size} processes on a machine with {torch.cuda.device_count()} GPUs, expected a "
            "GPU for each; start fewer processes, or set train.device=cpu"
        )
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def select_device(device: torch.device) -> None:
    """Makes one of several GPUs the one that this process means when it names none, as NCCL and torchrec do."""
    torch.cuda.set_device(device)


def autocast(config: GemConfig, device: torch.device) -> torch.autocast:
    """Autocast of the dense part to `train.dtype`; does nothing for float32."""
    enabled = config.train.dtype == "bfloat16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def peak_flops_per_second(device: torch.device) -> float | None:
    """The dense bf16 peak that MFU divides by; None for devices whose peak we do not state: they have no MFU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return H200_BF16_PEAK_FLOPS if "H100" in name or "H200" in name else None


def device_name(device: torch.device) -> str:
    """For people: the GPU's name, or the CPU and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"
