"""The columns that every table of measurements ends with, and who measured."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_MEANING = ["dtype", "law", "mean_len", "max_len", "seed", "ms", "ms_p20", "ms_p80", "tflops", "gbps", "bwd_factor"]
_PEERS = ["roofline_fraction", "best_peer", "ratio_to_best_peer", "copy_gbps", "bf16_tflops"]
_RUN = ["gpu", "num_gpus", "clock_mhz", "command", "commit", "torch", "triton"]
TRAILING = [*_MEANING, *_PEERS, *_RUN]
BENCH_COLUMNS = ["op", "shape", "setting", "impl", "memory_gib", "exposed_ms", *TRAILING]
PREDICTION_COLUMNS = ["gpus", "plan", "e2e_mfu", "scaling_ratio", "item", "ms", *(c for c in TRAILING if c != "ms")]
ERROR_COLUMNS = ["config", "split", "predicted_ms", "measured_ms", "error_pct", *TRAILING]


def stamp(module: str, num_gpus: int) -> dict[str, Any]:
    """What is the same in every row of a run: device, command, commit, versions.

    Args:
        module: that runs, for the command.
        num_gpus: ranks that took part; a row may say otherwise.
    """
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else f"cpu {platform.machine()}",
        "num_gpus": num_gpus,
        "clock_mhz": _clock() if cuda else "",
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
        "commit": _commit(),
        "torch": torch.__version__,
        "triton": _triton() if cuda else "",
    }


def write_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """A CSV file; a column that a row lacks stays empty, floats get six figures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(columns), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def merge_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], key: Sequence[str]) -> None:
    """Like `write_rows`, keeping the file's rows whose `key` columns no new row has."""
    old: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            old = list(csv.DictReader(file))
    new = {tuple(str(r.get(k, "")) for k in key) for r in rows}
    write_rows(path, columns, [*(r for r in old if tuple(r.get(k, "") for k in key) not in new), *rows])


def _commit() -> str:
    # A copy of the tree without its history names its commit in the environment.
    given = os.environ.get("GEMWORKS_COMMIT")
    if given:
        return given[:7]
    try:
        out = subprocess.run(
            ["git", "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return out.stdout.strip()


def _clock() -> int | str:
    try:
        return torch.cuda.clock_rate()
    except (ImportError, RuntimeError):  # NVIDIA's management library is not installed
        return ""


def _triton() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
