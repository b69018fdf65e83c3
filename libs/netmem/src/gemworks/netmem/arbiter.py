"""Turns on the copy engines: several users, and a queue that stays short.

A copy engine serves in order of arrival and ignores stream priority, so an urgent copy waits for everything that was
queued before it, in whatever pieces. `CopyArbiter` therefore keeps the queue on the host: each direction has at most
`depth` pieces under way, and the next one comes from the most urgent user that has any. An urgent copy then waits for
`depth` pieces instead of for all that others have asked for.

A port of the arbiter is a `Mover`, so the offload engine, the stash and host batches share one arbiter by being given
its ports. What compute is about to wait for is queued at once, whoever's turn it is.
"""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch
from gemworks.netmem.arena import Fence
from gemworks.netmem.checks import check_kind, check_number
from gemworks.netmem.movers import CHUNK_BYTES, WAYS, Mover, Way
from gemworks.netmem.sealed import at_work

# The pieces under way last longer than this, so the engine doesn't run dry between two looks.
POLL_S = 2e-4


class _Job:
    """A copy that may still be waiting for its turn, and its fence."""

    def __init__(
        self,
        arbiter: CopyArbiter,
        order: tuple[int, int],
        way: Way,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Fence],
    ) -> None:
        self.arbiter, self.order = arbiter, order
        self.way: Way = way
        self.tensors: tuple[torch.Tensor, torch.Tensor] | None = (target, source)  # until every piece is queued
        self.after = tuple(after)
        self.queued_bytes = 0
        self.last: Fence | None = None  # of the last piece that was queued

    def done(self) -> bool:
        return self.arbiter._is_done(self)


class Port:
    """One user's access to an arbiter; a `Mover`."""

    def __init__(self, arbiter: CopyArbiter, urgency: int) -> None:
        self._arbiter, self.urgency = arbiter, urgency

    def mark(self) -> Fence:
        """A point in the compute stream: what was issued so far."""
        return self._arbiter._mark()

    def copy(self, way: Way, target: torch.Tensor, source: torch.Tensor, after: Sequence[Fence]) -> Fence:
        """Copy bytes when it is this user's turn and `after` has happened. Both tensors are held until then.

        Raises:
            ValueError: a way that is neither `"up"` nor `"down"`; tensors that are not uint8, one dim, and of one size.
        """
        if way not in WAYS:
            raise ValueError(f"way: expected 'up' or 'down', got {way!r}")
        for name, x in (("target", target), ("source", source)):
            check_kind(name, x, torch.Tensor)
            if x.dtype != torch.uint8 or x.dim() != 1 or x.numel() != source.numel():
                raise ValueError(f"{name}: expected uint8 {tuple(source.shape)}, got {x.dtype} {tuple(x.shape)}")
        return self._arbiter._submit(self.urgency, way, target, source, after)

    def compute_waits(self, fence: Fence) -> None:
        """Work issued to the compute stream from now on runs after the fence; its copy has no more turns to wait."""
        self._arbiter._compute_waits(fence)

    def synchronize(self) -> None:
        """Block until every user's copies are done."""
        self._arbiter.synchronize()

    def to_device(self, x: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Fence]:
        """A contiguous host tensor (pinned, for a GPU) on its way to the device; `compute_waits` on the fence before
        use.

        Raises:
            ValueError: `x` is not contiguous.
        """
        check_kind("x", x, torch.Tensor)
        if not x.is_contiguous():
            raise ValueError(f"x: expected a contiguous tensor, got strides {x.stride()}; call contiguous() first")
        out = torch.empty_like(x, device=device)
        target, source = (t.view(-1).view(torch.uint8) for t in (out, x))
        return out, self.copy("down", target, source, [self.mark()])


class CopyArbiter:
    """Shares the two directions of the host link between users.

    Args:
        mover: who copies. Called under one lock, so it need not be safe for threads.
        piece_bytes: size of a turn.
        depth: pieces under way in each direction; at least 2 keep the engine busy.
        thread: hand out turns from a thread, which lives while copies wait. False: only calls of the ports do, for
            tests.

    Raises:
        ValueError: a size below 1.

    >>> from gemworks.netmem.movers import InlineMover
    >>> port = CopyArbiter(InlineMover()).port(urgency=1)
    >>> target, source = torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    >>> port.copy("down", target, source, []).done(), int(target.sum())
    (True, 4)
    """

    def __init__(self, mover: Mover, *, piece_bytes: int = CHUNK_BYTES, depth: int = 2, thread: bool = True) -> None:
        check_kind("mover", mover, Mover, "movers.mover_for(device) makes one")
        check_number("piece_bytes", piece_bytes, 1, whole=True)
        check_number("depth", depth, 1, whole=True)
        self._mover = mover
        self._piece_bytes, self._depth, self._threaded = piece_bytes, depth, thread
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._num_jobs = 0
        self._waiting: dict[Way, list[_Job]] = {"up": [], "down": []}  # most urgent first, then oldest
        self._under_way: dict[Way, deque[Fence]] = {"up": deque(), "down": deque()}

    def port(self, urgency: int = 0) -> Port:
        """Access for one user. The higher the urgency, the sooner its turn; equals take turns in order of asking."""
        check_number("urgency", urgency, -math.inf, whole=True)
        return Port(self, urgency)

    def synchronize(self) -> None:
        """Queue everything that waits and block until it is done."""
        with self._lock:
            for jobs in self._waiting.values():
                while jobs:
                    self._queue_all(jobs[0])
            self._mover.synchronize()

    def _mark(self) -> Fence:
        with self._lock:
            return self._mover.mark()

    def _submit(
        self, urgency: int, way: Way, target: torch.Tensor, source: torch.Tensor, after: Sequence[Fence]
    ) -> _Job:
        with self._lock:
            self._num_jobs += 1
            job = _Job(self, (-urgency, self._num_jobs), way, target, source, after)
            bisect.insort(self._waiting[way], job, key=lambda j: j.order)
            self._hand_out(way)
            if self._threaded and self._waiting[way] and self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="gemworks-copy-arbiter", daemon=True)
                self._thread.start()
        return job

    def _hand_out(self, way: Way) -> None:
        """Queue pieces until `depth` are under way."""
        waiting, under_way = self._waiting[way], self._under_way[way]
        while under_way and under_way[0].done():
            under_way.popleft()
        while waiting and len(under_way) < self._depth:
            self._queue_piece(waiting[0])

    def _queue_piece(self, job: _Job) -> None:
        after: list[Fence] = []
        if job.last is None:
            # later pieces of a job follow the first one in their stream
            for fence in job.after:
                if isinstance(fence, _Job):
                    self._queue_all(fence)
                    assert fence.last is not None
                    fence = fence.last
                after.append(fence)
        assert job.tensors is not None
        target, source = job.tensors
        start, end = job.queued_bytes, min(job.queued_bytes + self._piece_bytes, target.numel())
        with at_work():  # the thread may be under the guard of a stash
            job.last = self._mover.copy(job.way, target[start:end], source[start:end], after)
        job.after = ()
        job.queued_bytes = end
        self._under_way[job.way].append(job.last)
        if end == target.numel():
            job.tensors = None
            self._waiting[job.way].remove(job)

    def _queue_all(self, job: _Job) -> None:
        while job.tensors is not None:
            self._queue_piece(job)

    def _is_done(self, job: _Job) -> bool:
        with self._lock:
            for way in WAYS:
                self._hand_out(way)
            return job.tensors is None and job.last is not None and job.last.done()

    def _compute_waits(self, fence: Fence) -> None:
        with self._lock:
            if isinstance(fence, _Job):
                self._queue_all(fence)
                assert fence.last is not None
                fence = fence.last
            self._mover.compute_waits(fence)

    def _serve(self) -> None:
        while True:
            with self._lock:
                for way in WAYS:
                    self._hand_out(way)
                if not any(self._waiting.values()):
                    self._thread = None
                    return
            time.sleep(POLL_S)
