"""Copy-engine gathers between two GPUs: many steps without a hang, and a peer that stays away is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from netmem_ranks import run_ranks
from netmem_two_gpus import check_many_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.dist,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or not dist.is_nccl_available(), reason="needs two CUDA devices, NCCL"
    ),
]


def test_many_fsdp2_steps_of_several_models_do_not_hang(tmp_path):
    run_ranks(2, check_many_steps, str(tmp_path / "rendezvous"), backend="nccl")


# NCCL aborts a process whose device is lost, so ranks are processes that print before they end
_RANK = """
import faulthandler, os, sys
faulthandler.dump_traceback_later(45, exit=True)  # says where a rank waits
import torch, torch.distributed as dist
from netmem_two_gpus import check_a_missing_peer
rank = int(sys.argv[1])
torch.cuda.set_device(rank)
dist.init_process_group("cpu:gloo,cuda:nccl", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
check_a_missing_peer(rank, 2)
print("rank", rank, "done", flush=True)
os._exit(0)
"""


def test_a_peer_that_stays_away_is_named_and_nothing_hangs(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), f"{tmp_path}/rendezvous"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [p.communicate(timeout=60)[0] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
        for p in ranks:
            p.wait(10)
    for rank, text in enumerate(texts):
        assert f"rank {rank} done" in text, text
    assert "named:" in texts[0]
