"""Run a function on several gloo processes (or NCCL ones, a GPU each) and collect what each returns.

Functions must be importable by name from a test module's file: children load that file.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any


def _load(path: str, name: str) -> Callable[..., Any]:
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(path).stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _child(
    path: str, name: str, rank: int, world: int, backend: str, store: str, args: tuple[Any, ...], queue: Any
) -> None:
    import warnings

    import torch
    import torch.distributed as dist

    # On GPUs torch warns about settings of the machine, which are not the test's subject: shown, not raised.
    warnings.simplefilter("error" if backend == "gloo" else "default")
    # torch's own use of a type that it deprecates; nothing of ours.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.*")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.*")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        device = torch.device("cuda", rank) if backend == "nccl" else None
        if device is not None:
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
            device_id=device,
        )
        result = _load(path, name)(rank, world, *args)
        dist.barrier()
        dist.destroy_process_group()
        queue.put((rank, True, result))
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))


def spawn(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float = 120.0,
    expect_dead: tuple[int, ...] = (),
    backend: str = "gloo",
) -> list[Any]:
    """Call `function(rank, world, *args)` on `world` processes; returns their results by rank.

    Ranks in `expect_dead` leave without a result and are left out of the list.

    Results must be picklable without tensors' shared memory: return lists, numbers or numpy arrays.
    """
    if backend == "nccl":
        # fbgemm's GPU build starts CUDA when it is imported, and CUDA does not survive a fork.
        context: Any = multiprocessing.get_context("spawn")
    else:
        # The server imports torch once; every process is a fork of it, before any thread of torch's has started.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torchrec", "gemworks.parallel", "pytest"])
    queue = context.Queue()
    path = str(Path(sys.modules[function.__module__].__file__ or "").resolve())
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_child,
                args=(path, function.__name__, r, world, backend, f"{folder}/store", args, queue),
                daemon=True,
            )
            for r in range(world)
        ]
        for p in processes:
            p.start()
        results: dict[int, Any] = {}
        try:
            for _ in range(world - len(expect_dead)):
                rank, good, value = queue.get(timeout=timeout_s)
                if not good:
                    raise AssertionError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        finally:
            for p in processes:
                if len(results) < world - len(expect_dead):
                    p.terminate()
                p.join(20)
    return [results[r] for r in range(world) if r not in expect_dead]
