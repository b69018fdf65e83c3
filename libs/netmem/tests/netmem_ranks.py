"""Tests of several processes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _entry(rank: int, world: int, backend: str, path: str, work: Callable[[int, int], Any], queue: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        device = torch.device("cuda", rank) if backend == "nccl" else None
        if device is not None:
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            init_method=f"file://{path}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
            device_id=device,
        )
        work(rank, world)
        queue.put((rank, None))
    except BaseException:
        queue.put((rank, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(world: int, work: Callable[[int, int], Any], path: str, backend: str = "gloo") -> None:
    """Run `work(rank, world)` in that many processes; any failure fails the test with its traceback.

    With NCCL each rank has the GPU of its number, and `work` is of a module that can be imported by name.
    """
    # a forked process can't use CUDA
    context: Any = mp.get_context("fork" if backend == "gloo" else "spawn")
    queue = context.SimpleQueue()
    processes = [context.Process(target=_entry, args=(r, world, backend, path, work, queue)) for r in range(world)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(120)
    hung = [r for r, p in enumerate(processes) if p.is_alive()]
    for p in processes:
        if p.is_alive():
            p.kill()
            p.join()
    assert not hung, f"ranks {hung} hang"
    failures = [error for _, error in (queue.get() for _ in range(world)) if error]
    assert not failures, "\n".join(failures)
