"""Activation offload: tensors saved for backward leave for host memory and come back in time.

The engine works through autograd's saved-tensor hooks. Lossless policies give bit-equal gradients; a codec makes the
bytes fewer before they are kept or moved. What the hooks would otherwise switch off, autograd's check for in-place
changes of a saved tensor, is done here instead.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.checks import check_all, check_kind, check_number, checked_device
from gemworks.netmem.codec import Codec, get_codec
from gemworks.netmem.errors import PinnedMemoryExhaustedError
from gemworks.netmem.handles import (
    Coded,
    Codes,
    Filed,
    Handle,
    Kept,
    Moved,
    Part,
    Probe,
    alive,
    memory_order,
    movable,
    own_storage,
    row_major,
    view_of,
    whole_of,
)
from gemworks.netmem.movers import CHUNK_BYTES, Mover, mover_for
from gemworks.netmem.parcels import Parcel
from gemworks.netmem.queues import ParcelQueues
from torch.multiprocessing.reductions import StorageWeakRef

# A view of a much larger storage is copied out by itself instead of moving the whole storage.
MAX_STORAGE_PER_VIEW = 4
DEFAULT_MIN_BYTES = 1 << 20
DEFAULT_WINDOW_BYTES = 256 << 20


@dataclass(frozen=True)
class OffloadStats:
    """Counters since the engine was made.

    Attributes:
        saved_bytes: bytes of all tensors that autograd saved under the engine (a shared storage counts once per save).
        moved_up_bytes, moved_down_bytes: bytes copied to the host and back.
        coded_bytes: bytes of the codes that stand for tensors kept or moved in coded form.
        num_moved: parcels sent; num_kept: tensors left alone.
        num_exhausted: tensors kept because the arena was full.
        num_rescued: fetches that found the tensor still on the device.
        num_live: parcels not closed yet.
        largest_parcel_bytes: the largest storage sent.
        in_flight_bytes: leaving plus returning now; peak_in_flight_bytes: the highest value.
        host_bytes: live bytes in the arena.
    """

    saved_bytes: int = 0
    moved_up_bytes: int = 0
    moved_down_bytes: int = 0
    coded_bytes: int = 0
    num_moved: int = 0
    num_kept: int = 0
    num_exhausted: int = 0
    num_rescued: int = 0
    num_live: int = 0
    largest_parcel_bytes: int = 0
    in_flight_bytes: int = 0
    peak_in_flight_bytes: int = 0
    host_bytes: int = 0


class OffloadEngine:
    """Moves saved tensors to pinned host memory and back.

    Args:
        arena: host memory; None: 1 GiB (CPU) or 16 GiB (GPU), made on first use.
        device: where the tensors live; None: the current CUDA device, else the CPU, where the same state machine
            copies plainly.
        window_bytes: most bytes that may be in flight each way: leaving and still on the device, or back before they
            are needed. More hides better and holds more memory; the budget solver counts it.
        min_bytes: smaller tensors stay.
        chunk_bytes: size of the pieces of a copy.
        mover: who copies; None: chosen by the device.

    Raises:
        ValueError: a size below 0, a device that is not there, an arena or a mover that is none.

    >>> engine = OffloadEngine(PinnedArena(1 << 20, pin=False), device="cpu", min_bytes=0)
    >>> x = torch.ones(8, requires_grad=True)
    >>> with engine.saving():
    ...     y = (x * 2).exp().sum()
    >>> y.backward()
    >>> engine.stats().num_moved > 0, engine.stats().num_live
    (True, 0)

    One engine serves one device, several threads, and any number of graphs that are alive at once.
    """

    def __init__(
        self,
        arena: PinnedArena | None = None,
        *,
        device: str | torch.device | None = None,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        min_bytes: int = DEFAULT_MIN_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
        mover: Mover | None = None,
    ) -> None:
        if arena is not None and not isinstance(arena, PinnedArena):
            raise ValueError(f"arena: expected a PinnedArena, or None for one of 16 GiB, got {type(arena).__name__}")
        check_number("window_bytes", window_bytes)
        check_number("min_bytes", min_bytes)
        check_number("chunk_bytes", chunk_bytes, 1, whole=True)
        if mover is not None:
            check_kind("mover", mover, Mover, "a CopyArbiter's port, or None")
        self.device = checked_device(device)
        self.min_bytes = min_bytes
        self.arena = arena or PinnedArena((1 if self.device.type == "cpu" else 16) << 30)
        self._mover = mover or mover_for(self.device, chunk_bytes)
        self._queues = ParcelQueues(self.arena, self._mover, window_bytes)
        self._lock = threading.RLock()
        self._identity: dict[tuple[Any, ...], Any] = {}
        # storages coded whole; weakly, because their codes may be on the device
        self._wholes: dict[tuple[Any, ...], tuple[weakref.ref[Coded], StorageWeakRef]] = {}
        self._warned = False
        self._count = dict.fromkeys(("saved_bytes", "coded_bytes", "num_kept", "num_exhausted"), 0)

    @property
    def window_bytes(self) -> int:
        """Most bytes in flight each way."""
        return self._queues.window_bytes

    # -- what users call -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def saving(
        self,
        *modules: torch.nn.Module,
        codec: str | Codec | None = None,
        move: bool = True,
        exact_strides: bool = False,
    ) -> Iterator[OffloadEngine]:
        """While this is open, tensors that autograd saves go through the engine.

        Args:
            modules: their parameters and buffers are never moved or coded; nor are views of any parameter.
            codec: code floating-point tensors with it first; lossy. Where the modules have 16-bit parameters or
                autocast is on, float32 tensors (statistics of norms and of attention) are not coded.
            move: send to host memory; False with a codec: keep the codes on the device.
            exact_strides: every tensor comes back with the strides it had, as compiled code demands: tensors with gaps
                or overlaps are coded and move with their whole storage.
        """
        check_all("modules", modules, torch.nn.Module)
        coder = None if codec is None else get_codec(codec)
        self._queues.forget_pace()
        # beside 16-bit activations, float32 means statistics (a logsumexp, a mean): too few bytes to be worth the error
        wide = torch.is_autocast_enabled(self.device.type) or any(
            p.dtype in (torch.bfloat16, torch.float16) for module in modules for p in module.parameters()
        )
        uncoded = {torch.float32} if wide else set()
        pinned_here = {
            t.untyped_storage()._cdata
            for module in modules
            for t in (*module.parameters(), *module.buffers())
            if type(t) in (torch.Tensor, torch.nn.Parameter)
        }

        def pack(x: torch.Tensor) -> Any:
            try:
                return self._pack(x, None if x.dtype in uncoded else coder, move, pinned_here, exact_strides)
            except BaseException:  # an interrupt too
                with self._lock:
                    self._queues.close_orphans()
                raise

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield self
        with self._lock:
            self._tidy()

    def stats(self) -> OffloadStats:
        """Counters of this moment."""
        with self._lock:
            self._reap()
            queues = self._queues
            return OffloadStats(
                **self._count,
                moved_up_bytes=queues.moved_up_bytes,
                moved_down_bytes=queues.moved_down_bytes,
                num_moved=queues.num_sent,
                num_rescued=queues.num_rescued,
                num_live=queues.num_live,
                largest_parcel_bytes=queues.largest_parcel_bytes,
                in_flight_bytes=queues.in_flight_bytes,
                peak_in_flight_bytes=queues.peak_in_flight_bytes,
                host_bytes=self.arena.stats().requested_bytes,
            )

    def synchronize(self) -> None:
        """Wait for every copy and let the device memory of departed tensors go."""
        with self._lock:
            self._mover.synchronize()
            self._queues.drain(0)
            self._reap()

    # -- pace ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def paced(self) -> Iterator[None]:
        """Around a forward that `end_forward` follows: only the window and the pace decide what goes, and not which
        copies the host finds done.
        """
        with self._lock:
            self._queues.num_paced += 1
        try:
            yield
        finally:
            with self._lock:
                self._queues.num_paced -= 1

    @property
    def position(self) -> int:
        """Number of parcels sent so far. What a region sends lies between its position before and after."""
        return self._queues.num_sent

    def parcel_bytes(self, start: int) -> tuple[int, ...]:
        """Sizes of what was sent since `position` was `start` and is still needed, in that order."""
        with self._lock:
            self._reap()
            return self._queues.parcel_bytes(start)

    def end_forward(self, leaving_bytes: float) -> None:
        """Let device bytes go until at most that many, rounded up to a whole parcel, are leaving.

        Compute waits for their copies on the device, not on the host: if the link is as fast as the plan assumed they
        are done by then. Without this call a region that nobody saves after keeps its bytes until the next one that
        does.

        Raises:
            ValueError: a negative number of bytes, or a NaN.
        """
        check_number("leaving_bytes", leaving_bytes, finite=False)
        with self._lock, torch.no_grad():
            self._reap()
            self._queues.end_forward(leaving_bytes)

    def begin_backward(self, start: int, end: int, returning_bytes: float, staying_bytes: float = math.inf) -> None:
        """The backward of a region begins: bring its own parcels, and some of what is needed after it.

        Args:
            start, end: `position` before and after its forward.
            returning_bytes: of the parcels before `start`, to be on their way back, rounded up to a whole parcel.
            staying_bytes: of the parcels before `start`, may be on the device, rounded up likewise: of those that are
                still leaving, compute waits for the others' copies and lets them go.

        Raises:
            ValueError: a negative number of bytes, or a NaN; `end` before `start`.
        """
        check_number("start", start, whole=True)
        check_number("end", end, start, whole=True)
        check_number("returning_bytes", returning_bytes, finite=False)
        check_number("staying_bytes", staying_bytes, finite=False)
        with self._lock, torch.no_grad():
            self._reap()
            self._queues.begin_backward(start, end, returning_bytes, staying_bytes)

    # -- pack ----------------------------------------------------------------------------------------------------------

    def _pack(self, x: torch.Tensor, codec: Codec | None, move: bool, excluded: set[int], exact: bool) -> Any:
        with self._lock, torch.no_grad():
            self._tidy()
            self._count["saved_bytes"] += x.numel() * x.element_size()
            size_bytes = x.numel() * x.element_size()
            if not movable(x) or x.device != self.device or x.untyped_storage()._cdata in excluded:
                return self._keep(x)
            if min(size_bytes, x.untyped_storage().nbytes()) < max(1, self.min_bytes):
                return self._keep(x)
            codable = codec is not None and x.is_floating_point() and (not exact or memory_order(x) is not None)
            if codable and codec is not None and codec.nbytes(x.shape, x.dtype) < size_bytes:
                return self._code(x, codec, move)
            if codec is not None and x.is_floating_point() and exact and not codable:
                whole = whole_of(x, MAX_STORAGE_PER_VIEW * size_bytes)
                if whole is not None and codec.nbytes(whole.shape, whole.dtype) < whole.numel() * whole.element_size():
                    return self._part(x, whole, codec, move)
            if not move:
                return self._keep(x)
            try:
                return self._move(x, exact)
            except PinnedMemoryExhaustedError as error:
                self._exhausted(error)
                return self._keep(x)

    def _exhausted(self, error: PinnedMemoryExhaustedError) -> None:
        self._count["num_exhausted"] += 1
        if not self._warned:
            self._warned = True
            text = f"host memory for offloading is exhausted, tensors stay on the device from here on: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _keep(self, x: torch.Tensor) -> Kept:
        self._count["num_kept"] += 1
        return Kept(self._queues, x)

    def _look_up(self, key: tuple[Any, ...]) -> Any:
        filed = self._identity.get(key)
        return filed.content if filed is not None and filed.valid() else None

    def _file(self, key: tuple[Any, ...], content: Any, x: torch.Tensor) -> Probe:
        probe = Probe(x)
        self._identity[key] = Filed(content, StorageWeakRef(x.untyped_storage()), probe)
        return probe

    def _move(self, x: torch.Tensor, exact: bool) -> Moved:
        storage = x.untyped_storage()
        compact = storage.nbytes() > MAX_STORAGE_PER_VIEW * x.numel() * x.element_size()
        compact = compact and (not exact or x.is_contiguous())
        key: tuple[Any, ...] = (storage._cdata, x._version)
        if compact:
            key += (x.storage_offset(), x.shape, x.stride(), x.dtype)
        parcel, probe = self._look_up(key), None
        if parcel is None:
            source = x.clone(memory_format=torch.contiguous_format).untyped_storage() if compact else storage
            parcel = self._queues.send(source)
            probe = self._file(key, parcel, x)
        handle = Moved(self._queues, x, parcel, compact, probe)
        self._queues.drain(self.window_bytes)
        return handle

    def _code(self, x: torch.Tensor, codec: Codec, move: bool) -> Coded:
        key = (x.untyped_storage()._cdata, x._version, x.storage_offset(), x.shape, x.stride(), x.dtype, codec.name)
        codes: Codes | None = self._look_up(key) if move else None
        if codes is None:
            order = memory_order(x)
            source = x.detach() if order is None else x.detach().permute(order)
            tensors = [c.contiguous() for c in codec.encode(source)]
            self._count["coded_bytes"] += sum(c.numel() * c.element_size() for c in tensors)
            placed: list[Parcel | torch.Tensor] = []
            for c in tensors:
                try:
                    placed.append(self._queues.send(own_storage(c)) if move and c.numel() else c)
                except PinnedMemoryExhaustedError as error:
                    self._exhausted(error)
                    placed.append(c)
            codes = tuple((where, c.shape, c.dtype) for where, c in zip(placed, tensors, strict=True))
            # codes on the device aren't filed: the file would keep them alive
            if all(isinstance(where, Parcel) for where in placed):
                self._file(key, codes, x)
        handle = Coded(self._queues, x, codec, codes)
        self._queues.drain(self.window_bytes)
        return handle

    def _part(self, x: torch.Tensor, whole: torch.Tensor, codec: Codec, move: bool) -> Part:
        key = (x.untyped_storage()._cdata, x._version, whole.shape, x.dtype, codec.name, move)
        filed = self._wholes.get(key)
        coded = filed[0]() if filed is not None and not filed[1].expired() else None
        if coded is None:
            coded = self._code(whole, codec, move)
            self._wholes[key] = weakref.ref(coded), StorageWeakRef(x.untyped_storage())
        return Part(self._queues, x, coded)

    # -- unpack --------------------------------------------------------------------------------------------------------

    def _unpack(self, handle: Handle) -> torch.Tensor:
        with self._lock, torch.no_grad():
            self._reap()
            handle.check()
            if isinstance(handle, Kept):
                return handle.x
            if isinstance(handle, Part):
                storage = alive(handle.whole.decoded)
                if storage is None:
                    storage = self._unpack(handle.whole).untyped_storage()
                    handle.whole.decoded = StorageWeakRef(storage)
                return view_of(storage, handle.dtype, handle.offset, handle.shape, handle.stride)
            storages = {id(p): self._queues.fetch(p) for p in handle.parcels}
            if isinstance(handle, Moved):
                x = view_of(storages[id(handle.parcels[0])], handle.dtype, handle.offset, handle.shape, handle.stride)
            else:
                assert isinstance(handle, Coded)
                codes = tuple(
                    view_of(storages[id(c)], dtype, 0, shape, row_major(shape)) if isinstance(c, Parcel) else c
                    for c, shape, dtype in handle.codes
                )
                x = handle.restore(codes)
            if handle.parcels:
                self._queues.unpacked(handle.parcels)
            return x

    # -- housekeeping --------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Close the parcels whose handles have all died, and forget what was filed about storages that are gone."""
        self._queues.reap()
        if len(self._identity) > 2 * self._queues.num_live + 64:
            self._identity = {k: v for k, v in self._identity.items() if v.valid()}
        if len(self._wholes) > 2 * self._queues.num_live + 64:
            self._wholes = {k: v for k, v in self._wholes.items() if v[0]() is not None}

    def _tidy(self) -> None:
        """As above, and let the bytes go that have left."""
        self._reap()
        self._queues.let_go_of_done()
