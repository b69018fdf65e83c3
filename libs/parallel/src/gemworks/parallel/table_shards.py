"""The stored piece of a table group's rows, and its way to the whole buffer and back.

Letters: N rows of this group rank's buffer (padded so that `replica_shard` equal pieces make it), P = N /
replica_shard rows stored here, D width.

    gather    all-gather P -> N over the replica shards (forward, and again in backward)
    update    rows of the gathered buffer, by the row optimizer
    publish   reduce-scatter N -> P (mean over the replica shards), then, every `sync_every` times, all-reduce (mean
              over the outer replicas)

With one replica shard nothing is gathered: the buffer is the stored piece. The buffer is padded when it is made, so no
collective needs a padded copy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class ShardedBuffer:
    """One tensor of rows, sharded over replicas between uses.

    Attributes:
        shard: the stored piece, [P, ...]; current only after `settle`.
    """

    def __init__(
        self,
        shard: Tensor,
        shard_group: dist.ProcessGroup | None,
        replica_group: dist.ProcessGroup | None,
        sync_every: int = 1,
    ) -> None:
        self.shard = shard
        self._shard_group = shard_group
        self._replica_group = replica_group
        self._shards = 1 if shard_group is None else dist.get_world_size(shard_group)
        self._replicas = 1 if replica_group is None else dist.get_world_size(replica_group)
        self._sync_every = sync_every
        self._since_sync = 0
        self._full: Tensor | None = None
        self._work: Any = None
        self._publishing: tuple[Any, Tensor] | None = None
        self._averaging: Any = None
        self._side: Any = torch.cuda.Stream(shard.device) if shard.is_cuda else None

    def launch_gather(self) -> None:
        """Start the all-gather, unless one is under way; waits for a publication first."""
        if self._full is not None:
            return
        self.settle()
        if self._shards == 1:
            self._full = self.shard
            return
        self._full = self.shard.new_empty(self._shards * self.shard.shape[0], *self.shard.shape[1:])
        self._work = dist.all_gather_into_tensor(self._full, self.shard, group=self._shard_group, async_op=True)

    def full(self) -> Tensor:
        """The gathered buffer [N, ...]."""
        self.launch_gather()
        if self._work is not None:
            self._work.wait()
            self._work = None
        assert self._full is not None
        return self._full

    def release(self) -> None:
        """Drop the gathered copy without publishing it."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._full = None

    @property
    def is_gathered(self) -> bool:
        """Whether a gathered copy is alive."""
        return self._full is not None and self._shards > 1

    def launch_publish(self) -> None:
        """Start the mean over replicas of the (updated) gathered buffer and drop it."""
        full = self.full()
        self._full = None
        if self._side is not None:
            # Everything is queued on a side stream: the host does not wait, the update is ordered before, `settle`
            # after.
            self._side.wait_stream(torch.cuda.current_stream(self.shard.device))
            with torch.cuda.stream(self._side):
                self._reduce_scatter(full)
                self._average()
            full.record_stream(self._side)
            return
        self._reduce_scatter(full)

    def settle(self) -> None:
        """Wait until the stored piece is current."""
        if self._side is not None:
            torch.cuda.current_stream(self.shard.device).wait_stream(self._side)
            return
        self._average()
        if self._averaging is not None:
            self._averaging.wait()
            self._averaging = None
            self.shard.div_(self._replicas)

    def sync(self) -> None:
        """Average the outer replicas now if they may differ; all of them call it after the same number of updates."""
        self.settle()
        if self._since_sync:
            self._start_average()
            self.settle()

    def _reduce_scatter(self, full: Tensor) -> None:
        if self._shards == 1:
            self._publishing = (None, full)
            return
        work = dist.reduce_scatter_tensor(self.shard, full, group=self._shard_group, async_op=True)
        self._publishing = (work, full)

    def _average(self) -> None:
        if self._publishing is None:
            return
        work, _ = self._publishing
        self._publishing = None
        if work is not None:
            work.wait()
            self.shard.div_(self._shards)
        self._since_sync += 1
        if self._since_sync >= self._sync_every:
            self._start_average()

    def _start_average(self) -> None:
        self._since_sync = 0
        if self._replicas > 1:
            self._averaging = dist.all_reduce(self.shard, group=self._replica_group, async_op=True)
            if self._side is not None:
                self._averaging.wait()
                self._averaging = None
                self.shard.div_(self._replicas)
