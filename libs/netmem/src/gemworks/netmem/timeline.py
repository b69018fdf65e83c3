"""Predicted time line of one step under a ledger's links.

A fluid model: compute segments run one after another; a transfer starts when its segment has ended, waits for a copy
engine of its link (first come, first served), pays the link's latency, and then flows. Flows that are active together
share every resource max-min fairly; a compute segment that reads device memory is a flow too, so that it slows down
when transfers need that memory's bandwidth, as real kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from gemworks.netmem.checks import check_all, check_kind, check_number
from gemworks.netmem.ledger import HBM, BandwidthLedger


@dataclass(frozen=True)
class Segment:
    """A stretch of compute.

    Args:
        name: of the layer or region.
        duration_s: time it takes alone.
        hbm_bytes: device-memory traffic that it needs in that time; 0 leaves contention out.
    """

    name: str
    duration_s: float
    hbm_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_number(f"duration_s of segment {self.name!r}", self.duration_s)
        check_number(f"hbm_bytes of segment {self.name!r}", self.hbm_bytes)


@dataclass(frozen=True)
class Transfer:
    """Bytes over one link.

    Args:
        name: of the tensor or bucket.
        num_bytes: bytes to move.
        link: name of the ledger's link.
        after: index of the segment whose end makes the bytes ready; -1: ready at the start.
        before: index of the segment that cannot start without them; the number of segments: the step's end waits for
            them; None: nobody waits.
    """

    name: str
    num_bytes: float
    link: str
    after: int = -1
    before: int | None = None

    def __post_init__(self) -> None:
        check_number(f"num_bytes of transfer {self.name!r}", self.num_bytes)
        check_kind(f"link of transfer {self.name!r}", self.link, str, "a link of the ledger")
        check_number(f"after of transfer {self.name!r}", self.after, -1, whole=True)


@dataclass(frozen=True)
class Stall:
    """Compute stood still before a segment, waiting for a transfer."""

    segment: str
    transfer: str
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """What a step costs.

    Attributes:
        total_s: end of the last segment, and of the transfers that the end of the step waits for.
        compute_s: sum of the segments' own durations.
        exposed_s: `total_s - compute_s`.
        slowdown_s: the part of it lost to shared device-memory bandwidth while computing; the rest is stalls.
        stalls: who waited for what, in time order.
        start_s, finish_s: by transfer name; a transfer starts when a copy engine takes it.
        moved_bytes: by resource; device memory counts compute's traffic too.
        busy_s: by resource: time during which it carried anything.
    """

    total_s: float
    compute_s: float
    exposed_s: float
    slowdown_s: float
    stalls: tuple[Stall, ...]
    start_s: dict[str, float]
    finish_s: dict[str, float]
    moved_bytes: dict[str, float]
    busy_s: dict[str, float]


@dataclass
class _Flow:
    path: tuple[str, ...]
    left: float
    cap: float = math.inf  # bytes per second that it can use
    rate: float = field(default=0.0)


def _share(flows: list[_Flow], capacity: dict[str, float]) -> None:
    """Max-min fair rates by progressive filling: raise all rates together, freeze whoever meets a full resource or its
    own cap.
    """
    left = dict(capacity)
    active = list(flows)
    for flow in flows:
        flow.rate = 0.0
    while active:
        users: dict[str, int] = {}
        for flow in active:
            for resource in flow.path:
                users[resource] = users.get(resource, 0) + 1
        step = min([left[r] / n for r, n in users.items()] + [f.cap - f.rate for f in active])
        step = max(step, 0.0)
        for flow in active:
            flow.rate += step
        for resource, n in users.items():
            left[resource] -= n * step
        full = {r for r in users if left[r] <= 1e-12 * capacity[r]}
        active = (
            [f for f in active if f.cap - f.rate > 1e-12 * f.cap and not full.intersection(f.path)]
            if step > 0 or full
            else []
        )


def _validate(ledger: BandwidthLedger, segments: list[Segment], transfers: list[Transfer]) -> None:
    names = [t.name for t in transfers]
    if len(set(names)) != len(names):
        raise ValueError(
            f"transfers: names must differ, got {sorted(n for n in set(names) if names.count(n) > 1)} more than once"
        )
    for segment in segments:
        if segment.hbm_bytes > segment.duration_s * ledger.capacity[HBM] * (1 + 1e-6):
            raise ValueError(
                f"segment {segment.name!r}: {segment.hbm_bytes:.4g} bytes in {segment.duration_s:.4g} s is more than "
                f"device memory gives "
                f"({ledger.capacity[HBM]:.4g} bytes/s); measure its duration again"
            )
    for transfer in transfers:
        ledger.link(transfer.link)
        last = len(segments) if transfer.before is None else transfer.before
        if not (-1 <= transfer.after < len(segments) and transfer.after < last <= len(segments)):
            raise ValueError(
                f"transfer {transfer.name!r}: expected -1 <= after < before <= {len(segments)}, got "
                f"after={transfer.after}, before={transfer.before}"
            )


def predict(ledger: BandwidthLedger, segments: Iterable[Segment], transfers: Iterable[Transfer]) -> Prediction:
    """Play one step and say what of its traffic is exposed.

    Args:
        ledger: links and rates. Its reservations are not counted: give every user of a link as a transfer.
        segments: compute, in order.
        transfers: traffic; equal names are refused, the order breaks ties in a queue.

    Raises:
        ValueError: unknown link, impossible order, negative size, a segment with more memory traffic than the memory
            gives.
    """
    segments = check_all("segments", segments, Segment)
    transfers = check_all("transfers", transfers, Transfer)
    _validate(ledger, segments, transfers)
    return _Play(ledger, segments, transfers).run()


class _Play:
    """One step from event to event: a copy engine is free, a transfer or a segment is over."""

    def __init__(self, ledger: BandwidthLedger, segments: list[Segment], transfers: list[Transfer]) -> None:
        self.ledger, self.segments, self.transfers = ledger, segments, transfers
        self.now = 0.0
        self.total_s: float | None = None
        # compute
        self.current = 0
        self.running = False
        self.work: _Flow | None = None  # its device-memory traffic
        self.work_left_s = 0.0
        self.slowdown = 0.0
        self.stalled_since = 0.0
        self.stalls: list[Stall] = []
        # transfers, by index
        self.queued: list[int] = []  # ready, waiting for a copy engine, in order of arrival
        self.waking: dict[int, float] = {}  # has its engine; bytes flow from that time on
        self.flowing: dict[int, _Flow] = {}
        self.done: set[int] = set()
        self.start_s: dict[str, float] = {}
        self.finish_s: dict[str, float] = {}
        self.moved = dict.fromkeys(ledger.capacity, 0.0)
        self.busy = dict.fromkeys(ledger.capacity, 0.0)

    def run(self) -> Prediction:
        self.arrive(-1)
        while True:
            self.hand_out_engines()
            if self.end_transfers() or self.end_segment() or self.begin_segment():
                continue
            if self.total_s is not None and len(self.done) == len(self.transfers):
                break
            self.advance()
        compute_s = sum(s.duration_s for s in self.segments)
        return Prediction(
            total_s=self.total_s,
            compute_s=compute_s,
            exposed_s=self.total_s - compute_s,
            slowdown_s=self.slowdown,
            stalls=tuple(self.stalls),
            start_s=self.start_s,
            finish_s=self.finish_s,
            moved_bytes=self.moved,
            busy_s=self.busy,
        )

    def arrive(self, segment: int) -> None:
        self.queued.extend(i for i, t in enumerate(self.transfers) if t.after == segment)

    def blockers(self) -> list[int]:
        """What compute waits for before the current segment."""
        return [
            i
            for i, t in enumerate(self.transfers)
            if t.before is not None and t.before <= self.current and i not in self.done
        ]

    def hand_out_engines(self) -> None:
        """Free copy engines go to the head of each link's queue."""
        transfers = self.transfers
        for link in self.ledger.links.values():
            mine = [i for i in self.queued if transfers[i].link == link.name]
            serving = sum(transfers[i].link == link.name for i in (*self.waking, *self.flowing))
            slots = len(mine) if link.num_copy_engines == 0 else max(0, link.num_copy_engines - serving)
            for i in mine[:slots]:
                self.queued.remove(i)
                self.start_s[transfers[i].name] = self.now
                self.waking[i] = self.now + link.latency_s
        for i in [i for i, t in self.waking.items() if t <= self.now]:
            del self.waking[i]
            self.flowing[i] = _Flow(self.ledger.links[transfers[i].link].path, transfers[i].num_bytes)

    def is_over(self, i: int) -> bool:
        return self.flowing[i].left <= 1e-9 * max(1.0, self.transfers[i].num_bytes)

    def end_transfers(self) -> bool:
        finished = [i for i in self.flowing if self.is_over(i)]
        for i in finished:
            awaited = self.total_s is None and not self.running and i in self.blockers()
            del self.flowing[i]
            self.done.add(i)
            self.finish_s[self.transfers[i].name] = self.now
            if awaited and not self.blockers() and self.now > self.stalled_since:
                name = self.segments[self.current].name if self.current < len(self.segments) else "end of step"
                self.stalls.append(Stall(name, self.transfers[i].name, self.now - self.stalled_since))
        return bool(finished)

    def end_segment(self) -> bool:
        if not self.running or self.work_left_s > 0.0:
            return False
        self.running = False
        self.arrive(self.current)
        self.current += 1
        self.stalled_since = self.now
        return True

    def begin_segment(self) -> bool:
        """The next one, if nothing holds it up; after the last one the step is over."""
        if self.running or self.total_s is not None or self.blockers():
            return False
        if self.current == len(self.segments):
            self.total_s = self.now
            return False
        self.running = True
        segment = self.segments[self.current]
        self.work_left_s = segment.duration_s
        self.work = None
        if segment.hbm_bytes > 0:
            self.work = _Flow((HBM,), segment.hbm_bytes, segment.hbm_bytes / segment.duration_s)
        return True

    def advance(self) -> None:
        """To the next event, at the rates of now."""
        work = self.work if self.running else None
        flows = [*self.flowing.values(), *([work] if work is not None else [])]
        _share(flows, self.ledger.capacity)
        speed = work.rate / work.cap if work is not None else 1.0
        horizon = [t - self.now for t in self.waking.values()]
        horizon += [f.left / f.rate for f in self.flowing.values() if f.rate > 0]
        if self.running:
            horizon.append(self.work_left_s / speed if speed > 0 else math.inf)
        dt = min(horizon)
        assert math.isfinite(dt), "no event can happen: a flow has no rate"
        for flow in flows:
            flow.left -= flow.rate * dt
            for resource in flow.path:
                self.moved[resource] += flow.rate * dt
        for resource in {r for f in flows if f.rate > 0 for r in f.path}:
            self.busy[resource] += dt
        if self.running:
            finishing = self.work_left_s / speed <= dt if speed > 0 else False
            self.work_left_s = 0.0 if finishing else self.work_left_s - speed * dt
            self.slowdown += (1.0 - speed) * dt
        due = [i for i, t in self.waking.items() if t - self.now <= dt]
        self.now += dt
        for i in due:
            self.waking[i] = self.now
        for i, flow in self.flowing.items():
            if self.is_over(i):
                flow.left = 0.0
