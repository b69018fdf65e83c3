"""A rank that dies inside a collective, under torchrun: its report names it, with gloo and with NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

NCCL = pytest.param("nccl", marks=pytest.mark.gpu)
GLOO = pytest.param("gloo", marks=pytest.mark.dist)


@pytest.mark.parametrize("backend", [NCCL, GLOO])
@pytest.mark.parametrize(("fault", "says"), [("kill", "exitcode  : -9"), ("raise", "rank 1 is out of luck")])
def test_torchrun_names_the_rank_that_failed_in_a_collective(backend: str, fault: str, says: str) -> None:
    """The group's time-out is 12 s; torchrun gives the other rank 30 s to end after it has asked for that."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).parent / "parallel_nccl_death.py"), fault, backend]
    began = time.monotonic()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"},
    )
    assert done.returncode == 1
    report = done.stderr[done.stderr.rindex("Root Cause (first observed failure):") :]
    assert "rank      : 1 (local_rank: 1)" in report
    assert says in report
    print(f"{backend} {fault}: {time.monotonic() - began:.1f} s from start to end")
