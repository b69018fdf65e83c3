"""Rows of a benchmark CSV, and timing.

`exposed_ms`, in milliseconds, is what copies cost a step, and there are three ways to know it:

- op `stash`: how much longer a step is than without a stash, by medians.
- op `budget`: how long compute stood still for copies, by events around every wait, in a step of its own.
- op `budget` of commits before 7f10bf2 (in `docs/measured/netmem_h200.csv` all but 6a08a5d and 4999828): the waiting
  that the plan predicted, nothing measured.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

COLUMNS = (
    *("op", "shape", "setting", "impl", "memory_gib", "exposed_ms"),
    *("dtype", "law", "mean_len", "max_len", "seed", "ms", "ms_p20", "ms_p80", "tflops", "gbps", "bwd_factor"),
    *("roofline_fraction", "best_peer", "ratio_to_best_peer", "copy_gbps", "bf16_tflops"),
    *("gpu", "num_gpus", "clock_mhz", "command", "commit", "torch", "triton"),
)


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_ms(run: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile of wall milliseconds, warmed up once."""
    run()
    synchronize(device)
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    times.sort()
    last = len(times) - 1
    return times[len(times) // 2], times[round(0.2 * last)], times[round(0.8 * last)]


def timed_on_device_ms(
    run: Callable[[], Any], device: torch.device, repeats: int, inner: int = 1, ahead_cycles: int = 2_000_000
) -> tuple[float, float, float]:
    """As `timed_ms`, by events around `inner` calls, divided by it: host time stays out as long as the host keeps up.

    The device first sleeps `ahead_cycles` per call, a millisecond by default, so that the calls are queued when the
    clock starts.
    """
    if device.type != "cuda":
        return timed_ms(run, device, repeats)
    run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        synchronize(device)
        torch.cuda._sleep(ahead_cycles * inner)
        begin.record()
        for _ in range(inner):
            run()
        end.record()
        synchronize(device)
        times.append(begin.elapsed_time(end) / inner)
    times.sort()
    last = len(times) - 1
    return times[len(times) // 2], times[round(0.2 * last)], times[round(0.8 * last)]


def _commit() -> str:
    if os.environ.get("GEMWORKS_COMMIT"):
        return os.environ["GEMWORKS_COMMIT"]
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _triton() -> str:
    try:
        from importlib.metadata import version

        return version("triton")
    except ImportError:
        return ""


def _clock_mhz(device: torch.device) -> str:
    try:
        return str(torch.cuda.clock_rate(device)) if device.type == "cuda" else ""
    except (RuntimeError, ImportError):
        return ""


class Rows:
    """Collects rows, fills the columns that are the same in all of them, writes the CSV.

    Args:
        device: benchmarked device.
        copy_gbps, bf16_tflops: this run's ceilings.
        path: written again after every row, so that a run that is cut short leaves the rows it had.
        quiet: print nothing: this rank's rows are not kept.
    """

    def __init__(
        self,
        device: torch.device,
        copy_gbps: float,
        bf16_tflops: float,
        num_gpus: int = 1,
        path: str | Path | None = None,
        quiet: bool = False,
    ) -> None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._device = device
        self._path, self._quiet = path, quiet
        self._start = time.perf_counter()
        self._same = {
            "copy_gbps": f"{copy_gbps:.1f}",
            "bf16_tflops": f"{bf16_tflops:.2f}",
            "gpu": name,
            "num_gpus": num_gpus if device.type == "cuda" else 0,
            "command": " ".join(["python -m gemworks.netmem.bench", *sys.argv[1:]]),
            "commit": _commit(),
            "torch": torch.__version__,
            "triton": _triton(),
        }
        self.rows: list[dict[str, Any]] = []

    def add(self, op: str, **values: Any) -> dict[str, Any]:
        """One row; prints it too."""
        unknown = set(values) - set(COLUMNS)
        assert not unknown, unknown
        row = {"op": op, "impl": "gemworks", "clock_mhz": _clock_mhz(self._device), **self._same, **values}
        self.rows.append(row)
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in values.items() if v != ""}
        if not self._quiet:
            print(op, *[f"{k}={v}" for k, v in shown.items()], flush=True)
        if self._path is not None:
            self.write(self._path)
        return row

    def note(self, text: str) -> None:
        """Say how far it is, with the time since these rows were made."""
        if not self._quiet:
            print(f"[{time.perf_counter() - self._start:6.1f} s] {text}", flush=True)

    def write(self, path: str | Path) -> None:
        """Write the CSV."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="")
            writer.writeheader()
            writer.writerows(self.rows)
