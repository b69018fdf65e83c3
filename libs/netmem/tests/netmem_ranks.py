"""Tests of several processes."""

from __future__ import annotations

import faulthandler
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _entry(
    rank: int, world: int, backend: str, path: str, work: Callable[[int, int], Any], queue: Any, limit_s: float
) -> None:
    faulthandler.dump_traceback_later(0.9 * limit_s, exit=True)  # says where a rank waits
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
        traceback.print_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(
    world: int, work: Callable[[int, int], Any], path: str, backend: str = "gloo", limit_s: float = 120.0
) -> None:
    """Run `work(rank, world)` in that many processes; any failure fails the test with its traceback.

    A rank that takes longer than `limit_s` prints where it waits and is killed, and the test fails.

    With NCCL each rank has the GPU of its number, and `work` is of a module that can be imported by name.
    """
    # a forked process can't use CUDA
    context: Any = mp.get_context("fork" if backend == "gloo" else "spawn")
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=_entry, args=(r, world, backend, path, work, queue, limit_s)) for r in range(world)
    ]
    end = time.monotonic() + limit_s
    try:
        for p in processes:
            p.start()
        for p in processes:
            p.join(max(0.0, end - time.monotonic()))
    finally:  # also where the test itself is interrupted: no rank may keep its GPU
        for p in processes:
            if p.is_alive():
                p.kill()
                p.join()
    results: dict[int, str | None] = {}
    while not queue.empty():
        rank, error = queue.get()
        results[rank] = error
    # the traceback of one rank before the news that its peers waited for it
    failures = [f"rank {rank}: {error}" for rank, error in sorted(results.items()) if error]
    ended = [p.exitcode for p in processes]
    assert not failures, "\n".join(failures)
    lost = [r for r in range(world) if r not in results or ended[r]]
    assert not lost, f"ranks {lost} did not end within {limit_s:g} s or died; exit codes {ended}"
