"""The checks that run before anything is timed, by name, and their run: on a GPU in a process each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from gemworks.precision import bench_cast_checks as casts
from gemworks.precision import bench_gemm_checks as gemms
from gemworks.precision.backends import PrecisionCostWarning
from gemworks.precision.bench_run import KINDS

CHECKS: dict[str, Callable[[torch.device], None]] = {
    "cast:contract": casts.check_contract,
    "cast:tile": casts.check_tile_casts,
    "cast:squares": casts.check_squares,
    "cast:general": casts.check_general_casts,
    **{f"cast:noise:{kind.value}": partial(casts.check_noise, kind=kind) for kind in KINDS},
    "cast:formats": casts.check_formats,
    "cast:codec": casts.check_codec,
    "norm": casts.check_norm,
    "norm:backward": casts.check_norm_backward,
    "activation": casts.check_activation,
    "projection": casts.check_projection,
    "cast:tensor": gemms.check_tensor_casts,
    "gemm": gemms.check_products,
    "gemm:tensor": gemms.check_tensor_products,
    "gemm:exact": gemms.check_exact_products,
    "gemm:pieces": gemms.check_pieces,
    "linear": gemms.check_linear,
    "linear:ways": gemms.check_ways,
    "cast:large": casts.check_large,
}
NEED_GPU = ("cast:large",)


def _run_one(name: str, device: torch.device) -> str:
    """Empty if the check passed, otherwise what went wrong."""
    start = time.perf_counter()
    try:
        CHECKS[name](device)
    except Exception as error:  # whatever goes wrong, the op must not be timed
        return f"{type(error).__name__}: {str(error)[:500]}"
    print(f"check {name}: passed in {time.perf_counter() - start:.1f} s", flush=True)
    return ""


def run_in_processes(names: list[str]) -> dict[str, str]:
    """Run checks on the GPU in a process each, as many at a time as there are processors: what takes time is compiling
    their kernels. Failures by name, empty when all passed."""
    failures: dict[str, str] = {}

    def run(name: str) -> None:
        command = [sys.executable, "-m", "gemworks.precision.bench_checks", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        print(done.stdout, end="", flush=True)
        if done.returncode:
            failures[name] = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]

    with ThreadPoolExecutor(max(1, min(len(names), os.cpu_count() or 1))) as pool:
        list(pool.map(run, names))
    return failures


def run_checks(device: torch.device, smoke: bool) -> dict[str, str]:
    """Run all checks; failures by name, empty when all passed."""
    names = [name for name in CHECKS if not (name in NEED_GPU and (device.type != "cuda" or smoke))]
    if device.type == "cuda":
        return run_in_processes(names)
    return {name: problem for name in names if (problem := _run_one(name, device))}


def main(names: list[str]) -> int:
    """Run the named checks on the GPU."""
    warnings.filterwarnings("ignore", category=PrecisionCostWarning)
    problems = [problem for name in names if (problem := _run_one(name, torch.device("cuda")))]
    print(*problems, sep="\n", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
