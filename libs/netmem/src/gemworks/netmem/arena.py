"""One region of pinned host memory, handed out in exact pieces.

The caching host allocator of torch rounds every block up to a power of two and so wastes up to half of what it pins.
Here one region is registered once, pieces are cut from it with 256-byte alignment, neighbours merge when they come
back, and a piece that a copy may still touch is handed out again only together with that copy's fence.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from gemworks.netmem.checks import check_kind, check_number
from gemworks.netmem.errors import PinnedMemoryExhaustedError

ALIGNMENT_BYTES = 256
# Pinned pages can't be swapped out, so leave the machine a tenth of what it has.
MAX_SHARE_OF_AVAILABLE = 0.9


class Fence(Protocol):
    """The end of some asynchronous work."""

    def done(self) -> bool:
        """Has it happened? Never blocks."""
        ...


@dataclass(frozen=True)
class ArenaStats:
    """Counters of an arena, all in bytes unless named otherwise.

    Attributes:
        capacity_bytes: size of the region.
        registered_bytes: what the region really pins: 0 before the first allocation.
        requested_bytes: sum of the sizes asked for, of the live pieces.
        reserved_bytes: the same with alignment.
        peak_reserved_bytes: highest `reserved_bytes` so far.
        num_live: live pieces.
        num_exhausted: refused requests.
    """

    capacity_bytes: int
    registered_bytes: int
    requested_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    num_live: int
    num_exhausted: int

    @property
    def waste(self) -> float:
        """Reserved beyond requested, as a share of requested."""
        return (self.reserved_bytes - self.requested_bytes) / self.requested_bytes if self.requested_bytes else 0.0


@dataclass
class Block:
    """A piece of the arena.

    Attributes:
        offset_bytes, size_bytes: where it lies and how much was asked for.
        data: uint8 `[size_bytes]`, a view of the region.
        fences: work on this memory that was not known to be finished when it was freed; a new owner's first write has
            to wait for them.
    """

    offset_bytes: int
    size_bytes: int
    data: torch.Tensor
    fences: list[Fence] = field(default_factory=list)


def available_memory_bytes() -> int | None:
    """Memory that new work can take without swapping, or None where the system doesn't say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _aligned(size_bytes: int) -> int:
    return max(1, -(-size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def _cudart() -> Any:
    return torch.cuda.cudart()


def _unregister(address: int) -> None:
    _cudart().cudaHostUnregister(address)


class PinnedArena:
    """Sub-allocator over one pinned region.

    Args:
        capacity_bytes: size of the region; it is allocated and registered at the first request.
        pin: register the region with CUDA; None: where CUDA is there. Without it the region is plain memory.

    Raises:
        ValueError: not above 0, or more than 90 % of the memory that the machine has available.

    >>> arena = PinnedArena(1 << 20, pin=False)
    >>> block = arena.allocate(1000)
    >>> block.data.numel(), arena.stats().reserved_bytes
    (1000, 1024)
    >>> arena.free(block)
    >>> arena.stats().num_live
    0
    """

    def __init__(self, capacity_bytes: int, *, pin: bool | None = None) -> None:
        check_number("capacity_bytes", capacity_bytes, above=True, whole=True, fix="16 << 30 is 16 GiB")
        available = available_memory_bytes()
        if available is not None and capacity_bytes > MAX_SHARE_OF_AVAILABLE * available:
            raise ValueError(
                f"capacity_bytes: expected at most {MAX_SHARE_OF_AVAILABLE:.0%} of the {available / 2**30:.2f} GiB "
                f"available, got {capacity_bytes / 2**30:.2f} GiB; pinned memory can't be swapped"
            )
        self.capacity_bytes = _aligned(capacity_bytes)
        self._pin = pin
        self._region: torch.Tensor | None = None
        self._lock = threading.RLock()
        # free pieces, sorted by offset: (offset, size) and the fences that still guard parts of them
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)]
        self._fences: list[tuple[int, int, Fence]] = []
        self._live: dict[int, Block] = {}
        self._reserved = 0
        self._peak = 0
        self._num_exhausted = 0

    @property
    def region(self) -> torch.Tensor | None:
        """uint8 `[capacity_bytes]`, or None before the first request."""
        return self._region

    def prepare(self) -> None:
        """Allocate and register the region now instead of at the first request."""
        with self._lock:
            self._ensure_region()

    def _ensure_region(self) -> torch.Tensor:
        if self._region is None:
            region = torch.empty(self.capacity_bytes, dtype=torch.uint8)
            if self._pin if self._pin is not None else torch.cuda.is_available():
                address = region.data_ptr()
                error = _cudart().cudaHostRegister(address, self.capacity_bytes, 0)
                if int(error) != 0:
                    raise PinnedMemoryExhaustedError(
                        f"capacity_bytes: CUDA refused to pin {self.capacity_bytes / 2**30:.2f} GiB (error "
                        f"{int(error)}); "
                        "ask for less, or raise the limit on locked memory"
                    )
                weakref.finalize(region, _unregister, address)
            self._region = region
        return self._region

    def allocate(self, size_bytes: int) -> Block:
        """A piece of exactly that size.

        Best fit among free pieces whose fences are done; failing that, among all free pieces, with the fences handed
        over.

        Raises:
            PinnedMemoryExhaustedError: no free piece is large enough.
            ValueError: negative size.
        """
        check_number("size_bytes", size_bytes, whole=True)
        need = _aligned(size_bytes)
        with self._lock:
            region = self._ensure_region()
            if self._fences:
                self._fences = [f for f in self._fences if not f[2].done()]
            fitting = [(size, offset) for offset, size in self._free if size >= need]
            if not fitting:
                self._num_exhausted += 1
                largest = max((size for _, size in self._free), default=0)
                raise PinnedMemoryExhaustedError(
                    f"size_bytes: {size_bytes} bytes asked, largest free piece {largest}, reserved "
                    f"{self._reserved} of {self.capacity_bytes}; give the arena more, or offload less"
                )
            quiet = [(s, o) for s, o in fitting if not self._fences_of(o, need)] if self._fences else fitting
            size, offset = min(quiet or fitting)
            fences = self._fences_of(offset, need)
            index = bisect.bisect_left(self._free, (offset, size))
            self._free[index : index + 1] = [(offset + need, size - need)] if size > need else []
            block = Block(offset, size_bytes, region[offset : offset + size_bytes], fences)
            self._live[offset] = block
            self._reserved += need
            self._peak = max(self._peak, self._reserved)
            return block

    def _fences_of(self, offset: int, size: int) -> list[Fence]:
        return [fence for start, end, fence in self._fences if start < offset + size and end > offset]

    def free(self, block: Block, fences: list[Fence] | None = None) -> None:
        """Give a piece back; `fences` end the work that may still read or write it.

        Raises:
            ValueError: the piece is not live: freed twice, or of another arena.
        """
        check_kind("block", block, Block, "what allocate() returns")
        with self._lock:
            if self._live.get(block.offset_bytes) is not block:
                raise ValueError(f"block: the piece at {block.offset_bytes} is not live in this arena; free it once")
            del self._live[block.offset_bytes]
            need = _aligned(block.size_bytes)
            self._reserved -= need
            start, end = block.offset_bytes, block.offset_bytes + need
            self._fences += [(start, end, f) for f in [*block.fences, *(fences or [])] if not f.done()]
            index = bisect.bisect_left(self._free, (start, 0))
            if index < len(self._free) and self._free[index][0] == end:
                end += self._free.pop(index)[1]
            if index > 0 and sum(self._free[index - 1]) == start:
                index -= 1
                start = self._free.pop(index)[0]
            self._free.insert(index, (start, end - start))

    def stats(self) -> ArenaStats:
        """Counters of this moment."""
        with self._lock:
            return ArenaStats(
                capacity_bytes=self.capacity_bytes,
                registered_bytes=0 if self._region is None else self.capacity_bytes,
                requested_bytes=sum(b.size_bytes for b in self._live.values()),
                reserved_bytes=self._reserved,
                peak_reserved_bytes=self._peak,
                num_live=len(self._live),
                num_exhausted=self._num_exhausted,
            )
