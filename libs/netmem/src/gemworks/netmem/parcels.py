"""A parcel: one storage on its way from the device to host memory and back.

States and what moves between them (every edge is ordered by fences, never by a host synchronisation):

    resident --send--> leaving --depart--> away --bring--> returning --fetch--> resident --settle--> away

`leaving` still has its device bytes, so a fetch then is free. `depart` drops them once compute is ordered after the
outgoing copy; `bring` allocates on the compute stream and copies on the other; `fetch` makes compute wait for that
copy. The host copy stays until the parcel is closed, so that a second backward finds it again.
"""

from __future__ import annotations

import enum

import torch
from gemworks.netmem.arena import Block, Fence, PinnedArena
from gemworks.netmem.movers import Mover, as_bytes


class State(enum.Enum):
    """Where the bytes of a parcel are."""

    LEAVING = "leaving"
    AWAY = "away"
    RETURNING = "returning"
    RESIDENT = "resident"
    CLOSED = "closed"


class Parcel:
    """One storage, sent when it is made.

    Args:
        sequence: position in the order of saving.
        storage: device-side storage; held until its bytes have left.
        arena: where the host copy goes.
        mover: who copies.

    Raises:
        PinnedMemoryExhaustedError: the arena has no room; nothing was started.
    """

    def __init__(self, sequence: int, storage: torch.UntypedStorage, arena: PinnedArena, mover: Mover) -> None:
        self.sequence = sequence
        self.nbytes = storage.nbytes()
        self.device = storage.device
        self.num_handles = 0
        self.num_unpacked = 0
        self.num_passes = 0  # backward passes that are through with it
        self._arena, self._mover = arena, mover
        self.block: Block = arena.allocate(self.nbytes)
        self._bytes: torch.Tensor | None = as_bytes(storage)
        self.state = State.LEAVING
        try:
            self._up: Fence = mover.copy("up", self.block.data, self._bytes, [mover.mark(), *self.block.fences])
        except BaseException:
            arena.free(self.block, list(self.block.fences))
            raise
        self.block.fences.clear()
        self._down: Fence | None = None

    def has_left(self) -> bool:
        """Is the outgoing copy done? Never blocks."""
        return self._up.done()

    def depart(self) -> None:
        """leaving -> away: let the device bytes go."""
        assert self.state is State.LEAVING, self.state
        # memory freed now may be handed to the next kernel, so that kernel has to run after the copy. Whether the host
        # finds the copy done is not asked: a wait for what is done holds nothing up
        self._mover.compute_waits(self._up)
        self._bytes = None
        self.state = State.AWAY

    def bring(self) -> None:
        """away -> returning: start the copy back."""
        assert self.state is State.AWAY, self.state
        self._bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        # the mark: this memory may still be in use by kernels that were issued before its last owner freed it. The
        # outgoing copy is behind the mark too if one compute stream did everything; its fence covers a backward on
        # another stream.
        self._down = self._mover.copy("down", self._bytes, self.block.data, [self._mover.mark(), self._up])
        self.state = State.RETURNING

    def fetch(self) -> torch.UntypedStorage:
        """The bytes on the device, usable on the compute stream from now on."""
        if self.state is State.AWAY:
            self.bring()
        if self.state is State.RETURNING:
            assert self._down is not None
            self._mover.compute_waits(self._down)
            self.state = State.RESIDENT
        assert self._bytes is not None, self.state
        return self._bytes.untyped_storage()

    def unpacked(self) -> None:
        """One of its handles was asked for. After the last one this backward pass is through with it."""
        self.num_unpacked += 1
        if self.num_unpacked >= self.num_handles:
            self.num_unpacked = 0
            self.num_passes += 1
            self.settle()

    def settle(self) -> None:
        """resident or returning -> away: drop the device bytes, the host copy stays."""
        if self.state is State.RETURNING:
            assert self._down is not None
            self._mover.compute_waits(self._down)
        if self.state in (State.RETURNING, State.RESIDENT):
            self._bytes = None
            self.state = State.AWAY

    def close(self) -> None:
        """Nobody needs it any more: give the host memory back, fenced by the copies that may still touch it."""
        if self.state is State.CLOSED:
            return
        if self.state is State.LEAVING:
            self.depart()
        self.settle()
        self._arena.free(self.block, [self._up, *([self._down] if self._down is not None else [])])
        self.state = State.CLOSED
