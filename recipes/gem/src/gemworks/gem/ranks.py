"""Which process this is among those that train together: the one place of the recipe that knows.

`Ranks()` is a process on its own, for which everything here is trivial. `world.py` has the other kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among `world_size` that take every step together.

    Unless it says otherwise every rank must call a method when one does, in the same order.

    Attributes:
        rank: from 0.
        world_size: 1 for a process on its own, which needs no process group.
        local_rank, local_world_size: the same among the ranks of this machine.

    >>> ranks = Ranks()
    >>> ranks.is_first, ranks.any(False), ranks.gather("mine"), ranks.on_first(lambda: 3)
    (True, False, ['mine'], 3)
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

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

    @property
    def save_group(self) -> ProcessGroup | None:
        """What checkpoints are written through, beside the training; None for a process on its own."""
        return None

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; in place."""
        return x

    def any(self, flag: bool) -> bool:
        """Whether it is true on some rank."""
        return flag

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order, on every rank; for small things."""
        return [value]

    def gather_to_first(self, value: T) -> list[T]:
        """Every rank's value, in order, on the first rank; only its own elsewhere."""
        return [value]

    def on_first(self, call: Callable[[], T]) -> T:
        """What `call` returns or raises on the first rank, on every rank. It may take any time, and may be the work of
        one process (reading, fitting, writing), but must not itself use other methods of this class."""
        return call()

    def share(self, num: int) -> range:
        """This rank's part of `num` things, contiguous; parts differ by one at most. Any rank may call it.

        >>> [Ranks(rank, 4).share(6) for rank in range(4)]
        [range(0, 1), range(1, 3), range(3, 4), range(4, 6)]
        """
        return range(num * self.rank // self.world_size, num * (self.rank + 1) // self.world_size)

    def explain(self, error: Exception) -> Exception:
        """What to end with after `error`: itself, or one that says which rank is to blame. Any rank may call it."""
        return error


def open_ranks(timeout_seconds: float, *, cuda: bool) -> AbstractContextManager[Ranks]:
    """The ranks that the environment describes (see `world.py`); `Ranks()` where WORLD_SIZE says nothing or 1."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return nullcontext(Ranks())
    from gemworks.gem.world import open_world  # seconds to import, and one process has no use for it

    return open_world(timeout_seconds, cuda=cuda)
