"""Which process this is among those that train together: the one place of the recipe that knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among `world_size` that take every step together.

    Attributes:
        rank: from 0.
        world_size: 1 for a process on its own, which needs no process group.

    >>> Ranks().is_first
    True
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank: got {self.rank} of {self.world_size}, expected 0 <= rank < world_size")

    @property
    def is_first(self) -> bool:
        """Whether this process writes what there is one of: log lines, pointers, the lock."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.world_size == 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same on each; every rank must call it."""
        if not self.alone:
            dist.all_reduce(x)
        return x
