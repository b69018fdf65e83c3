"""Who carries the bytes between device and host: streams on a GPU, plain copies on a CPU.

One small interface (`Mover`) with three implementations, so that the state machine above is the same everywhere:

- `CudaMover`: one stream each way, ~32 MiB chunks, no host synchronisation. Copy engines serve in order of arrival and
  ignore stream priority; all chunks of a copy are queued at once, so they bound the size of a transfer, not the wait of
  another copy behind it (decision 0186);
- `InlineMover`: copies at once, on the CPU;
- `DelayedMover`: copies on the CPU *later*, after a random number of further calls, holding its device-side tensors
  weakly as a stream does. A missing wait or a buffer reused too early gives wrong bytes here, as it would on a GPU.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from gemworks.netmem.arena import Fence
from torch.multiprocessing.reductions import StorageWeakRef

Way = Literal["up", "down"]
WAYS: tuple[Way, Way] = ("up", "down")
CHUNK_BYTES = 32 << 20
# Written instead of a source that is gone: NaN in every float format.
POISON = 0xFF


def nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor, for `new_empty`: half the host time of `torch.empty`. Not to be changed."""
    # Dispatch modes make tensors of their own kind, which must not be kept for calls outside of them.
    make = _nothing.__wrapped__ if torch._C._len_torch_dispatch_stack() else _nothing
    return make(dtype, device)


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8 `[storage.nbytes()]` over the whole storage, sharing it."""
    return nothing(torch.uint8, storage.device).new_empty(0).set_(storage)  # type: ignore[arg-type]


@runtime_checkable
class Mover(Protocol):
    """Moves bytes asynchronously, in order per direction."""

    def mark(self) -> Fence:
        """A point in the compute stream: what was issued so far."""
        ...

    def copy(self, way: Way, target: torch.Tensor, source: torch.Tensor, after: Sequence[Fence]) -> Fence:
        """Copy bytes (uint8, one dim, equal sizes) once `after` has happened; the fence ends the copy.

        The device-side tensor isn't kept alive: its owner keeps it until compute waits for the fence, or the fence is
        done.
        """
        ...

    def compute_waits(self, fence: Fence) -> None:
        """Work issued to the compute stream from now on runs after the fence."""
        ...

    def synchronize(self) -> None:
        """Block until everything issued is done."""
        ...


class _Now:
    def done(self) -> bool:
        return True


NOW: Fence = _Now()


class InlineMover:
    """Copies at once; every fence is already done."""

    def mark(self) -> Fence:
        return NOW

    def copy(self, way: Way, target: torch.Tensor, source: torch.Tensor, after: Sequence[Fence]) -> Fence:
        target.copy_(source)
        return NOW

    def compute_waits(self, fence: Fence) -> None:
        return None

    def synchronize(self) -> None:
        return None


class _Chunk:
    """One deferred copy and its fence."""

    def __init__(self, mover: DelayedMover, run: Callable[[], None], after: Sequence[Fence], delay: int) -> None:
        self.mover, self.run, self.after, self.delay = mover, run, after, delay
        self.finished = False

    def done(self) -> bool:
        self.mover.tick()
        return self.finished


def _weakly(x: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    reference = StorageWeakRef(x.untyped_storage())
    offset, size = x.storage_offset(), x.numel()

    def resolve() -> torch.Tensor | None:
        if reference.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        return None if storage is None else as_bytes(storage)[offset : offset + size]

    return resolve


class DelayedMover:
    """Copies later. For tests of everything above it, without a GPU.

    Args:
        seed: of the delays.
        max_delay: most calls that a chunk waits for, once it heads its lane.
        chunk_bytes: size of the pieces.
    """

    def __init__(self, seed: int = 0, max_delay: int = 8, chunk_bytes: int = 4096) -> None:
        self._random = random.Random(seed)
        self._max_delay = max_delay
        self._chunk_bytes = chunk_bytes
        self._lanes: dict[Way, deque[_Chunk]] = {"up": deque(), "down": deque()}
        self.num_expired_sources = 0
        self.num_expired_targets = 0

    def mark(self) -> Fence:
        self.tick()
        return NOW  # compute on a CPU has happened when it was issued

    def copy(self, way: Way, target: torch.Tensor, source: torch.Tensor, after: Sequence[Fence]) -> Fence:
        self.tick()
        device_side = _weakly(source if way == "up" else target)
        host_side = target if way == "up" else source
        fence: Fence = NOW
        lane = self._lanes[way]
        for start in range(0, max(1, host_side.numel()), self._chunk_bytes):
            end = min(start + self._chunk_bytes, host_side.numel())

            def run(start: int = start, end: int = end) -> None:
                device = device_side()
                if way == "up":
                    if device is None:
                        self.num_expired_sources += 1
                        host_side[start:end] = POISON
                    else:
                        host_side[start:end].copy_(device[start:end])
                elif device is None:
                    self.num_expired_targets += 1  # a GPU would write into memory that somebody else has now
                else:
                    device[start:end].copy_(host_side[start:end])

            chunk = _Chunk(self, run, list(after), self._random.randint(0, self._max_delay))
            lane.append(chunk)
            fence = chunk
        return fence

    def _run(self, chunk: _Chunk) -> None:
        """Run a chunk and whatever has to come before it."""
        for lane in self._lanes.values():
            if chunk in lane:
                while not chunk.finished:
                    head = lane[0]
                    for fence in head.after:
                        if isinstance(fence, _Chunk) and not fence.finished:
                            self._run(fence)
                    head.run()
                    head.finished = True
                    lane.popleft()
                return

    def tick(self) -> None:
        """Let time pass: each lane's head comes one call nearer."""
        for lane in self._lanes.values():
            if lane:
                head = lane[0]
                head.delay -= 1
                if head.delay < 0 and all(not isinstance(f, _Chunk) or f.finished for f in head.after):
                    head.run()
                    head.finished = True
                    lane.popleft()

    def compute_waits(self, fence: Fence) -> None:
        if isinstance(fence, _Chunk) and not fence.finished:
            self._run(fence)

    def synchronize(self) -> None:
        for lane in self._lanes.values():
            while lane:
                self._run(lane[-1])


class _CudaFence:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.query()


class CudaMover:
    """Two streams of one GPU.

    Args:
        device: the GPU.
        chunk_bytes: size of the pieces of a copy.
        delay: called with the way before each copy; the number of GPU clock cycles to wait first. For tests.
    """

    def __init__(
        self,
        device: torch.device,
        chunk_bytes: int = CHUNK_BYTES,
        delay: Callable[[Way], int] | None = None,
    ) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._delay = delay
        self._streams: dict[Way, torch.cuda.Stream] = {
            "up": torch.cuda.Stream(device),
            "down": torch.cuda.Stream(device),
        }

    def mark(self) -> Fence:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _CudaFence(event)

    def copy(self, way: Way, target: torch.Tensor, source: torch.Tensor, after: Sequence[Fence]) -> Fence:
        stream = self._streams[way]
        with torch.cuda.stream(stream):
            for fence in after:
                if isinstance(fence, _CudaFence):
                    stream.wait_event(fence.event)
            if self._delay is not None:
                torch.cuda._sleep(self._delay(way))
            # split is one call for all views: the host has other things to issue
            chunks = zip(target.split(self._chunk_bytes), source.split(self._chunk_bytes), strict=True)
            for to, what in chunks:
                to.copy_(what, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return _CudaFence(event)

    def compute_waits(self, fence: Fence) -> None:
        if isinstance(fence, _CudaFence):
            torch.cuda.current_stream(self._device).wait_event(fence.event)

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def mover_for(device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> Mover:
    """The mover of a device: streams on a GPU, plain copies on a CPU."""
    return CudaMover(device, chunk_bytes) if device.type == "cuda" else InlineMover()
