"""One region of pinned host memory, handed out in exact pieces.

The caching host allocator of torch rounds every block up to a power of two and so wastes up to half of what it pins.
Here one region is registered once, pieces are cut from it with 256-byte alignment, neighbours merge when they come
back, and a piece that a copy may still touch is handed out again only together with that copy's fence.
"""

from __future__ import annotations

import bisect
import gc
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from gemworks.netmem.checks import check_kind, check_number
from gemworks.netmem.errors import PinnedMemoryExhaustedError

ALIGNMENT_BYTES = 256
# Pinned pages can't be swapped out, so leave the machine a tenth of what it has.
MAX_SHARE_OF_AVAILABLE = 0.9
_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


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
    """Memory that new work can take without swapping or reaching a container's limit; None where nobody says."""
    found = [n for n in (_machine_bytes(), *_control_group_bytes()) if n is not None]
    return max(0, min(found)) if found else None


def _machine_bytes() -> int | None:
    try:
        for line in (_PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _control_group_bytes() -> Iterator[int]:
    """What each limit on this process's control group and on those above it leaves. Versions 1 and 2."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number == "0":
            root, limit_name, used_name, cache = _CGROUP, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit_name, used_name = _CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        # in a container the path may be that of the host, of which only the root is mounted
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents):
            try:
                limit = (root / group / limit_name).read_text().strip()
                used = int((root / group / used_name).read_text())
                stat = dict(line.split() for line in (root / group / "memory.stat").read_text().splitlines())
            except OSError:
                continue
            if limit != "max":
                yield int(limit) - used + int(stat.get(cache, 0))  # the file cache goes when memory is asked for


def _aligned(size_bytes: int) -> int:
    return max(1, -(-size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def _cudart() -> Any:
    return torch.cuda.cudart()


def _unregister(address: int) -> None:
    _cudart().cudaHostUnregister(address)


_arenas: weakref.WeakSet[PinnedArena] = weakref.WeakSet()


def _fits(num_bytes: int) -> bool:
    available = available_memory_bytes()
    return available is None or num_bytes <= MAX_SHARE_OF_AVAILABLE * available


def _too_much(num_bytes: int) -> str:
    return (
        f"expected at most {MAX_SHARE_OF_AVAILABLE:.0%} of the {(available_memory_bytes() or 0) / 2**30:.2f} GiB "
        f"available, got {num_bytes / 2**30:.2f} GiB; pinned memory can't be swapped"
    )


class PinnedArena:
    """Sub-allocator over one pinned region.

    Args:
        capacity_bytes: size of the region; it is allocated and registered at the first request.
        pin: register the region with CUDA; None: where CUDA is there. Without it the region is plain memory.

    Raises:
        ValueError: not above 0, or together with what the process's other arenas have not taken yet more than 90 % of
            the memory that is available, to the machine and within the limits of its container.

    The same share is asked for again when the region is pinned, since others may have taken memory meanwhile. A region
    that is refused then is not tried again before the next `prepare()`: each request raises the same error.

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
        others = sum(arena._untaken_bytes() for arena in _arenas)
        if others and not _fits(capacity_bytes + others):
            gc.collect()  # arenas that only reference cycles hold
            others = sum(arena._untaken_bytes() for arena in _arenas)
        if not _fits(capacity_bytes + others):
            besides = f" besides {others / 2**30:.2f} GiB that other arenas may still take" if others else ""
            raise ValueError(f"capacity_bytes: {_too_much(capacity_bytes)}{besides}")
        self.capacity_bytes = _aligned(capacity_bytes)
        self._pin = pin
        self._region: torch.Tensor | None = None
        self._lock = threading.RLock()
        # free pieces, sorted by offset: (offset, size) and the fences that still guard parts of them
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)]
        self._fences: list[tuple[int, int, Fence]] = []
        self._abandoned: deque[tuple[Block, Sequence[Fence]]] = deque()
        self._live: dict[int, Block] = {}
        self._reserved = 0
        self._peak = 0
        self._num_exhausted = 0
        self._refused: str | None = None
        _arenas.add(self)

    @property
    def region(self) -> torch.Tensor | None:
        """uint8 `[capacity_bytes]`, or None before the first request."""
        return self._region

    def prepare(self) -> None:
        """Allocate and register the region now instead of at the first request.

        Raises:
            PinnedMemoryExhaustedError: the memory is not there any more, or CUDA refused to pin it.
        """
        with self._lock:
            self._refused = None
            self._ensure_region()

    def _untaken_bytes(self) -> int:
        """What this arena may still take: pinned pages are taken at once, plain ones when they are written."""
        if self._region is None:
            return 0 if self._refused else self.capacity_bytes
        return 0 if self._pins() else self.capacity_bytes - self._peak

    def _pins(self) -> bool:
        return self._pin if self._pin is not None else torch.cuda.is_available()

    def _ensure_region(self) -> torch.Tensor:
        if self._refused is not None:
            raise PinnedMemoryExhaustedError(self._refused)
        if self._region is None:
            if self._pins() and not _fits(self.capacity_bytes):
                self._refuse(_too_much(self.capacity_bytes))
            region = torch.empty(self.capacity_bytes, dtype=torch.uint8)
            if self._pins():
                address = region.data_ptr()
                error = _cudart().cudaHostRegister(address, self.capacity_bytes, 0)
                if int(error) != 0:
                    self._refuse(
                        f"CUDA refused to pin {self.capacity_bytes / 2**30:.2f} GiB (error {int(error)}); "
                        "ask for less, or raise the limit on locked memory"
                    )
                weakref.finalize(region, _unregister, address)
            self._region = region
        return self._region

    def _refuse(self, why: str) -> NoReturn:
        self._refused = f"capacity_bytes: {why}"
        raise PinnedMemoryExhaustedError(self._refused)

    def allocate(self, size_bytes: int) -> Block:
        """A piece of exactly that size.

        Best fit among free pieces whose fences are done; failing that, among all free pieces, with the fences handed
        over.

        Raises:
            PinnedMemoryExhaustedError: no free piece is large enough, or the region could not be had.
            ValueError: negative size.
        """
        check_number("size_bytes", size_bytes, whole=True)
        need = _aligned(size_bytes)
        with self._lock:
            region = self._ensure_region()
            self._take_back()
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

    def free(self, block: Block, fences: Sequence[Fence] = ()) -> None:
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
            # those that came with the piece are still in the list, as long as they are not done
            self._fences += [(start, end, f) for f in fences if not f.done()]
            index = bisect.bisect_left(self._free, (start, 0))
            if index < len(self._free) and self._free[index][0] == end:
                end += self._free.pop(index)[1]
            if index > 0 and sum(self._free[index - 1]) == start:
                index -= 1
                start = self._free.pop(index)[0]
            self._free.insert(index, (start, end - start))

    def abandon(self, block: Block, fences: Sequence[Fence] = ()) -> None:
        """As `free`, for finalisers: it leaves a note for the next call, whatever this one interrupts."""
        self._abandoned.append((block, fences))

    def _take_back(self) -> None:
        while self._abandoned:
            self.free(*self._abandoned.popleft())

    def stats(self) -> ArenaStats:
        """Counters of this moment."""
        with self._lock:
            self._take_back()
            return ArenaStats(
                capacity_bytes=self.capacity_bytes,
                registered_bytes=0 if self._region is None else self.capacity_bytes,
                requested_bytes=sum(b.size_bytes for b in self._live.values()),
                reserved_bytes=self._reserved,
                peak_reserved_bytes=self._peak,
                num_live=len(self._live),
                num_exhausted=self._num_exhausted,
            )
