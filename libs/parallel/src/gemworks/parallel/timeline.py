"""Operations on queues: when each starts and ends, and what the compute queue waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gemworks.parallel._spans import covered, union

Queue = Literal["compute", "nvlink", "network", "host"]


@dataclass
class Op:
    """One operation of the step.

    Attributes:
        name, queue: what and where.
        us: its duration.
        deps: indices of operations that must have ended.
        label: what its time, or the waiting for it, is booked as.
        parts: label -> us, for a compute operation whose time has several causes.
        start, end: filled in by `run_ops`.
    """

    name: str
    queue: Queue
    us: float
    deps: list[int]
    label: str
    parts: dict[str, float] = field(default_factory=dict)
    start: float = 0.0
    end: float = 0.0


def run_ops(ops: list[Op], sm_slowdown: float) -> dict[str, float]:
    """Schedule operations and book every microsecond of the compute queue.

    Operations are in launch order, so dependencies point backwards. While a collective overlaps a compute operation
    the latter advances at 1 / (1 + sm_slowdown) of its speed; since the overlap depends on the schedule, it is
    iterated (4 times).

    Args:
        ops: start and end are filled in.
        sm_slowdown: see above.

    Returns:
        label -> us; they sum to the end of the last operation.
    """
    stretch = [0.0] * len(ops)
    for _ in range(4 if sm_slowdown > 0 else 1):
        _schedule(ops, stretch)
        if sm_slowdown > 0:
            busy = union([(o.start, o.end) for o in ops if o.queue in ("nvlink", "network") and o.end > o.start])
            new = [
                sm_slowdown / (1 + sm_slowdown) * min(covered(o.start, o.end, busy), o.us * (1 + sm_slowdown))
                if o.queue == "compute"
                else 0.0
                for o in ops
            ]
            if max((abs(a - b) for a, b in zip(new, stretch, strict=True)), default=0.0) < 1e-6:
                break
            stretch = new
            _schedule(ops, stretch)
    return _book(ops, stretch)


def _schedule(ops: list[Op], stretch: Sequence[float]) -> None:
    free: dict[str, float] = {}
    for i, o in enumerate(ops):
        ready = max((ops[d].end for d in o.deps), default=0.0)
        o.start = max(ready, free.get(o.queue, 0.0))
        o.end = o.start + o.us + stretch[i]
        free[o.queue] = o.end


def _book(ops: Sequence[Op], stretch: Sequence[float]) -> dict[str, float]:
    items: dict[str, float] = {}

    def add(label: str, us: float) -> None:
        if us:
            items[label] = items.get(label, 0.0) + us

    at = 0.0
    for i, o in enumerate(ops):
        if o.queue != "compute":
            continue
        if o.start > at:
            blocker = max((ops[d] for d in o.deps), key=lambda d: d.end)
            _book_gap(ops, blocker, at, o.start, add)
        for label, us in (o.parts or {o.label: o.us}).items():
            add(label, us)
        add("SM contention", stretch[i])
        at = o.end
    last = max(ops, key=lambda o: o.end)
    if last.end > at:
        _book_gap(ops, last, at, last.end, add)
    return items


def _book_gap(ops: Sequence[Op], blocker: Op, start: float, end: float, add: Callable[[str, float], None]) -> None:
    """Charge an idle gap of the compute queue to what ran meanwhile on the queue that it waits for, then to what that
    queue itself waited for on the other, the rest to the blocker."""
    free = [(start, end)]
    networks: tuple[Queue, ...] = ("nvlink", "network")
    for queue in (blocker.queue, *(q for q in networks if q != blocker.queue)):
        for o in ops:
            if o.queue == queue and o.end > start and o.start < end:
                left: list[tuple[float, float]] = []
                for a, b in free:
                    low, high = max(a, o.start), min(b, o.end)
                    if high > low:
                        add(o.label, high - low)
                        left += [(x, y) for x, y in ((a, low), (high, b)) if y > x]
                    else:
                        left.append((a, b))
                free = left
    rest = sum(b - a for a, b in free)
    if rest > 1e-9 * max(end, 1.0):
        add(blocker.label, rest)
