"""Symmetric memory of W ranks in one process, a thread each: shared by the tests of what is built on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


class Shared:
    """What the ranks have in common."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.barrier = threading.Barrier(world, timeout=20)
        self.buffers: dict[tuple[int, int], torch.Tensor] = {}


class Rank:
    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared, self._rank, self.num = shared, rank, 0

    def size(self) -> int:
        return self.shared.world

    def rank(self) -> int:
        return self._rank

    def empty(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def rendezvous(self, buffer: torch.Tensor, group: Any) -> Handle:
        self.shared.buffers[self._rank, self.num] = buffer
        self.num += 1
        return Handle(self.shared, self.num - 1)


class Handle:
    def __init__(self, shared: Shared, index: int) -> None:
        self.shared, self.index = shared, index

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        self.shared.barrier.wait()

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        whole = self.shared.buffers[rank, self.index].view(dtype)
        return whole[storage_offset : storage_offset + sizes[0]]


def run_ranks(world: int, work: Callable[[int, Shared, Any], None]) -> None:
    """Call `work(rank, shared, group and memory of the rank)` in a thread per rank; raise what any of them raised."""
    shared, errors = Shared(world), []

    def guarded(rank: int) -> None:
        try:
            work(rank, shared, Rank(shared, rank))
        except BaseException as error:
            errors.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=guarded, args=(r,)) for r in range(world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not errors, errors
