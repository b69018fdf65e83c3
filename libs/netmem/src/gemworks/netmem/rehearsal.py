"""A plan rehearsed: the offload engine itself, with clocks in the place of streams.

The solver's model (`budget`) treats bytes as a fluid. The engine moves whole tensors: at the window compute waits until
the tensor at the head of the queue has left altogether, and what is still leaving when backward asks for it never
leaves. A rehearsal runs the engine's own code on a profile's times and tensor sizes and says what the step then takes.

Clocks: compute is one, each direction of the link serves in order of arrival at its rate, and both directions share
what the link gives both ways at once. The host has a clock too: it issues a region and the copies of a tensor in given
times, and finds a copy done if that has ended by then. If they are 0 it is ahead of the device at every moment, finds
nothing done and only makes compute wait, as on a GPU with short launches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gemworks.netmem.arena import Fence, PinnedArena
from gemworks.netmem.budget import Option, Plan, StepProfile, check_plan
from gemworks.netmem.checks import check_kind, check_number
from gemworks.netmem.movers import WAYS, Way
from gemworks.netmem.offload import OffloadEngine
from gemworks.netmem.policy import paced_forward

# Host bytes that stand for all tensors of a step: of a step of gigabytes, one of them is a kilobyte.
_SCALE_BYTES = 1 << 22


@dataclass(frozen=True)
class Rehearsal:
    """What a plan's step takes when whole tensors move.

    Attributes:
        step_s: compute, waiting, and the rest of the step.
        wait_s: compute's waiting for copies.
        moved_up_bytes, moved_down_bytes: copied to the host and back. What had not left when backward asked for it does
            not come back.
    """

    step_s: float
    wait_s: float
    moved_up_bytes: float
    moved_down_bytes: float


@dataclass
class _Copy:
    clocks: _Clocks
    ready_s: float
    left: float
    after: tuple[_Copy, ...]
    end_s: float = math.inf

    def done(self) -> bool:
        """Has it ended by the host's present?"""
        return self.clocks.ended_for_the_host(self)


class _Clocks:
    """A `Mover` whose copies take time instead of moving bytes."""

    def __init__(
        self, up_bytes_per_s: float, down_bytes_per_s: float, duplex_bytes_per_s: float, scale: float, send_s: float
    ) -> None:
        self.now_s = 0.0  # of compute
        self.host_s = 0.0  # of the host, which issues
        self.wait_s = 0.0
        self.moved: dict[Way, float] = {"up": 0.0, "down": 0.0}
        self._rates: dict[Way, float] = {"up": up_bytes_per_s, "down": down_bytes_per_s}
        self._both = min(1.0, duplex_bytes_per_s / (up_bytes_per_s + down_bytes_per_s))
        self._scale, self._send_s = scale, send_s
        self._lanes: dict[Way, deque[_Copy]] = {"up": deque(), "down": deque()}
        self._played_s = 0.0  # until when the copies are known

    def compute(self, seconds: float, issue_s: float = 0.0) -> None:
        self.now_s = max(self.now_s, self.host_s) + seconds
        self.host_s += issue_s

    def ended_for_the_host(self, copy: _Copy) -> bool:
        # no copy that is issued from now on can start before the host's present, whichever clock is ahead
        self._play(self.host_s)
        return copy.end_s <= self.host_s

    def mark(self) -> Fence:
        present_s = max(self.now_s, self.host_s)
        return _Copy(self, present_s, 0.0, (), end_s=present_s)

    def copy(self, way: Way, target: torch.Tensor, source: torch.Tensor, after: Sequence[Fence]) -> Fence:
        # nothing that is issued from now on can start before compute's present: what went before is settled
        self._play(self.now_s)
        self.host_s += self._send_s
        num_bytes = source.numel() * self._scale
        before = tuple(f for f in after if isinstance(f, _Copy))
        copy = _Copy(self, max(self.now_s, self.host_s), num_bytes, before)
        self._lanes[way].append(copy)
        self.moved[way] += num_bytes
        return copy

    def compute_waits(self, fence: Fence) -> None:
        if not isinstance(fence, _Copy):
            return
        self._play(self.now_s)
        while fence.end_s > self.now_s and math.isinf(fence.end_s):
            self._play(math.inf, until=fence)
        if fence.end_s > self.now_s:
            self.wait_s += fence.end_s - self.now_s
            self.now_s = fence.end_s

    def synchronize(self) -> None:
        self._play(math.inf)

    def _start_s(self, copy: _Copy) -> float:
        return max([copy.ready_s, *[f.end_s for f in copy.after]])

    def _play(self, end_s: float, until: _Copy | None = None) -> None:
        """Let copies run until a time, or until one of them has ended."""
        while self._played_s < end_s:
            heads: dict[Way, _Copy] = {way: lane[0] for way, lane in self._lanes.items() if lane}
            starts = {way: self._start_s(head) for way, head in heads.items()}
            active: list[Way] = [way for way in heads if starts[way] <= self._played_s]
            share = self._both if len(active) == 2 else 1.0
            waiting = [s for s in starts.values() if self._played_s < s < math.inf]
            ends = {way: self._played_s + heads[way].left / (share * self._rates[way]) for way in active}
            events = [end_s, *waiting, *ends.values()]
            then = min(events)
            if not active and math.isinf(then):
                return
            for way in active:
                head = heads[way]
                head.left -= (then - self._played_s) * share * self._rates[way]
                if ends[way] <= then:
                    head.end_s = then
                    self._lanes[way].popleft()
            self._played_s = then
            if until is not None and not math.isinf(until.end_s):
                return


@dataclass(frozen=True)
class _Work:
    """What one region does: seconds, and the sizes of what it sends."""

    clocks: _Clocks = field(repr=False)
    forward_s: float
    backward_s: float
    sizes: tuple[int, ...]
    issue_s: float  # of the host, each way


class _Compute(torch.autograd.Function):
    """A node that takes its region's time and saves its region's tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, work: _Work) -> torch.Tensor:
        work.clocks.compute(work.forward_s, work.issue_s)
        ctx.work = work
        ctx.save_for_backward(*[torch.empty(n, dtype=torch.uint8) for n in work.sizes])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        assert len(ctx.saved_tensors) == len(ctx.work.sizes)  # asks for all of them, in the order of saving
        ctx.work.clocks.compute(ctx.work.backward_s, ctx.work.issue_s)
        return grads[0].clone(), None


def _sizes(profile: StepProfile, option: Option) -> tuple[int, ...]:
    """What the option sends: its parcels, or pieces of a granule where the profile doesn't know them."""
    if option.parcel_bytes or not option.moved_bytes:
        return option.parcel_bytes
    granule = profile.granule_bytes or option.moved_bytes
    whole, rest = divmod(option.moved_bytes, granule)
    return (granule,) * whole + ((rest,) if rest else ())


def rehearse(
    profile: StepProfile,
    plan: Plan,
    *,
    duplex_bytes_per_s: float | None = None,
    issue_s: float = 0.0,
    send_s: float = 0.0,
    num_steps: int = 1,
) -> Rehearsal:
    """The step time of a plan with whole tensors, under the engine's own rules.

    Args:
        profile: that the plan was made for.
        plan: choices and pace.
        duplex_bytes_per_s: what the link gives both ways at once (`ledger.capacity["host.duplex"]`); None: both
            directions in full.
        issue_s: of the host for the forward of a region, and for its backward. 0: it is ahead of the device at every
            moment. The engine's decisions in backward don't depend on it; a host that is too slow for the device makes
            the step longer.
        send_s: of the host for the copy of a tensor, each way. After a synchronisation the device waits for the host
            to issue the first region's copies; in the midst of steps the host is ahead.
        num_steps: in a row, without a synchronisation between them. What one leaves under way the next one meets.

    Returns:
        Time and traffic of a step, the mean of them. Without moved bytes it is `plan.step_s`.

    Raises:
        ValueError: a negative time, no step, or a plan for other regions.

    >>> from gemworks.netmem.budget import Region, evaluate
    >>> keep = Option("keep", 1.0, 2.0, held_bytes=10, forward_bytes=12, backward_bytes=14)
    >>> away = Option("offload", 1.0, 2.0, 0, 12, 14, moved_bytes=10, parcel_bytes=(5, 5))
    >>> step = StepProfile((Region("a", (keep, away)), Region("b", (keep,))), 0, 5, 5, window_bytes=7, granule_bytes=5)
    >>> plan = evaluate(step, ["offload", "keep"])
    >>> plan.step_s  # 3 of 10 bytes have to leave before b may run, and to be back before it has: 0.6 s each
    7.2
    >>> round(rehearse(step, plan).step_s, 3)  # a tensor of 5 leaves in 1 s, and the other one is there all the time
    7.0
    """
    check_kind("profile", profile, StepProfile, "the one that the plan was made for")
    check_plan(plan, profile)
    check_number("issue_s", issue_s)
    check_number("send_s", send_s)
    check_number("num_steps", num_steps, 1, whole=True)
    if duplex_bytes_per_s is not None:
        check_number("duplex_bytes_per_s", duplex_bytes_per_s, above=True)
    chosen = [region.option(plan.choices[region.name]) for region in profile.regions]
    sizes = [_sizes(profile, option) for option in chosen]
    total = sum(map(sum, sizes))
    if not total:
        return Rehearsal(plan.step_s, plan.stall_s, 0.0, 0.0)
    scale = total / _SCALE_BYTES
    both = profile.up_bytes_per_s + profile.down_bytes_per_s
    clocks = _Clocks(profile.up_bytes_per_s, profile.down_bytes_per_s, duplex_bytes_per_s or both, scale, send_s)
    engine = OffloadEngine(
        PinnedArena(2 * _SCALE_BYTES, pin=False),
        device="cpu",
        window_bytes=round(profile.window_bytes / scale),
        min_bytes=1,
        mover=clocks,
    )
    forwards: list[Callable[..., torch.Tensor]] = []
    for region, option, parcels in zip(profile.regions, chosen, sizes, strict=True):
        scaled = tuple(max(1, round(n / scale)) for n in parcels)
        work = _Work(clocks, option.forward_s, option.backward_s, scaled, issue_s)

        def forward(y: torch.Tensor, work: _Work = work) -> torch.Tensor:
            with engine.saving():
                return _Compute.apply(y, work)  # type: ignore[return-value]

        forwards.append(paced_forward(forward, engine, plan.pace[region.name].scaled(1 / scale)))
    for _ in range(num_steps):
        y = torch.ones(1, requires_grad=True)
        for run in forwards:
            y = run(y)
        clocks.compute(profile.other_s)
        y.sum().backward()
    up, down = (clocks.moved[way] / num_steps for way in WAYS)
    played = Rehearsal(clocks.now_s / num_steps, clocks.wait_s / num_steps, up, down)
    assert engine.stats().num_exhausted == 0, "the host memory that stands for the arena is too small"
    return played
