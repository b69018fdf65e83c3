"""What two GPUs do in test_netmem_two_gpus.py; of a module of its own, for processes that are spawned."""

from __future__ import annotations

import gc
import itertools
import logging
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from gemworks.netmem import CollectiveTimeoutError, copy_engine_all_gather
from gemworks.netmem.copy_engine import CopyEngineAllGather
from gemworks.netmem.symmetric import NUM_BUFFERS
from torch import nn


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def check_many_steps(rank: int, world: int, num_steps: int = 200, num_models: int = 3) -> None:
    """FSDP2 with copy-engine gathers, prefetch both ways: equal losses, whatever a rank holds of models before."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    warnings.simplefilter("ignore")
    device, kept, losses = torch.device("cuda", rank), [], []
    for model_index in range(num_models + 1):
        torch.manual_seed(0)
        # layers of several sizes, some of them small enough to share an allocation if anything shares
        widths = [64, 256, 1024, 256, 64]
        model = nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in itertools.pairwise(widths)]).to(
            device
        )
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        layers = [layer for layer in model if isinstance(layer, FSDPModule)]
        for a, b in itertools.pairwise(layers):
            a.set_modules_to_forward_prefetch([b])
            b.set_modules_to_backward_prefetch([a])
        if model_index:
            comm = copy_engine_all_gather(model, timeout_s=20)
            assert isinstance(comm, CopyEngineAllGather), comm.reason
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        loss = torch.zeros(())
        for step in range(num_steps):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step), device="cpu").to(device)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        # one rank lets its buffers go, the other holds them: what comes next must not depend on it
        if rank == model_index % world:
            kept.append(model)
        del model, layers, optimizer, loss
        gc.collect()
        print(f"rank {rank}: model {model_index}, {num_steps} steps, loss {losses[-1]:.9g}", flush=True)
    assert losses == losses[:1] * (num_models + 1), losses


def check_a_missing_peer(rank: int, world: int) -> None:
    """Rank 1 stays away, first from a rendezvous, then from a barrier: rank 0's waits end in time, and are named."""
    device, group = torch.device("cuda", rank), _world()
    comm = CopyEngineAllGather(group, device, timeout_s=3.0)

    def gather() -> None:
        out = comm.allocate((2048,), dtype=torch.float32, device=device)
        own = out[1024 * rank : 1024 * (rank + 1)].fill_(rank)
        comm(out, own, group)

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gemworks.netmem").addHandler(handler)
    for _ in range(NUM_BUFFERS):  # a ring that isn't full yet asks for a rendezvous, on the host, before any barrier
        gather()
    torch.cuda.synchronize()
    print(f"rank {rank}: {NUM_BUFFERS} gathers together", flush=True)
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="rendezvous for 16384 bytes begins: 1 of 2 ranks came"):
            comm.allocate((4096,), dtype=torch.float32, device=device)
        assert 2.0 < time.monotonic() - start < 5.0
        print("refused: a rendezvous that a peer stays away from", flush=True)
        start = time.monotonic()
        gather()
        with pytest.raises(RuntimeError, match=r"CUDA|failure|error"):
            torch.cuda.synchronize()
        assert 2.0 < time.monotonic() - start < 15.0
        assert any(f"rank 0: CopyEngineAllGather number {NUM_BUFFERS}" in text for text in records), records
        with pytest.raises(CollectiveTimeoutError, match="a peer did not come"):
            comm.allocate((2048,), dtype=torch.float32, device=device)
        print("named:", records, flush=True)
    else:
        time.sleep(14.0)  # the peer's memory stays until the wait is over
