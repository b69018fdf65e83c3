"""The memory and time of one training step as a function of what each region does with its activations.

This module is the definition; `solver` finds the best choices under it. Regions run in order in forward and in reverse
in backward. Bytes of region i with option c: `held` stay on the device from its forward to its backward, `moved` go to
host memory and come back, `forward` and `backward` are the most that are on the device *because of this region* while
its forward or backward runs.

Outgoing bytes drain at the link's rate `r` while compute goes on. At most `W` (the engine's window) may be leaving:
with `q` bytes in the queue when a region of forward time `f` starts,

    q <- max(0, q - r f) + moved;   stall = max(0, q - W) / r;   q <- min(q, W)

The way back is the same queue in reversed time (a buffer of W bytes between a link and its consumer takes as long
forwards as backwards), with the backward times and the other direction's rate: its `q` before region i is what has to
be back, of the regions before i, when the backward of region i ends. While region i runs its forward the device holds
what the regions before it hold, `q`, and its own `forward` bytes; in its backward, what the regions before hold, the
`q` of the way back, and its own `backward` bytes. Tensors move whole, so a queue that is not empty may hold one
*granule*, the largest tensor, more than its `q`, and never more than W.

`Plan.pace` hands both queues to the engine (`policy.apply_policy` with a plan). Where the memory of the moment is below
the peak, the pace leaves room up to it: bytes may leave later and come back earlier than the queues ask, so that a link
which is a little slower than its rate costs no time. Where there is no such room, compute waits for what is late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gemworks.netmem.checks import check_all, check_kind, check_number

KEEP = "keep"
RECOMPUTE = "recompute"
RECOMPUTE_CHEAP = "recompute_cheap"
QUANTISE = "quantise"
OFFLOAD = "offload"
QUANTISE_OFFLOAD = "quantise_offload"
# in the code of a compiled region, see policy.compile_with_budget; not among the choices measured by default
QUANTISE_FUSED = "quantise_fused"
CHOICES = (KEEP, RECOMPUTE_CHEAP, RECOMPUTE, QUANTISE, OFFLOAD, QUANTISE_OFFLOAD)


@dataclass(frozen=True)
class Option:
    """One way to treat a region's activations, with what it costs.

    Args:
        choice: its name, one of `CHOICES` or your own.
        forward_s, backward_s: compute time, without waiting for copies.
        held_bytes: on the device from forward to backward.
        forward_bytes, backward_bytes: most on the device for this region during its forward and its backward,
            `held_bytes` included.
        moved_bytes: to host memory after forward, back before backward.
        parcel_bytes: the sizes of the tensors that move, in the order of saving; empty: not known. The solver treats
            bytes as a fluid, `rehearsal.rehearse` moves these.
    """

    choice: str
    forward_s: float
    backward_s: float
    held_bytes: int
    forward_bytes: int
    backward_bytes: int
    moved_bytes: int = 0
    parcel_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_kind("choice", self.choice, str, "KEEP, OFFLOAD or a name of your own")
        for name in ("forward_s", "backward_s", "held_bytes", "forward_bytes", "backward_bytes", "moved_bytes"):
            check_number(f"{name} of option {self.choice!r}", getattr(self, name))
        check_kind(f"parcel_bytes of option {self.choice!r}", self.parcel_bytes, tuple)
        for size in self.parcel_bytes:
            check_number(f"parcel_bytes of option {self.choice!r}", size)
        if self.parcel_bytes and sum(self.parcel_bytes) != self.moved_bytes:
            raise ValueError(
                f"parcel_bytes of option {self.choice!r}: expected sizes that add up to moved_bytes = "
                f"{self.moved_bytes}, got {sum(self.parcel_bytes)}; leave them out if they are not known"
            )


@dataclass(frozen=True)
class Region:
    """A region and its options."""

    name: str
    options: tuple[Option, ...]

    def __post_init__(self) -> None:
        check_kind("name", self.name, str, "the module's name in the model")
        check_all(f"options of region {self.name!r}", self.options, Option)
        names = [o.choice for o in self.options]
        if not names or len(set(names)) != len(names):
            raise ValueError(
                f"options of region {self.name!r}: expected at least one and different choices, got {names}"
            )

    def option(self, choice: str) -> Option:
        """The option of that name, or a ValueError that lists the names."""
        for option in self.options:
            if option.choice == choice:
                return option
        raise ValueError(
            f"choice for region {self.name!r}: got {choice!r}, expected one of {[o.choice for o in self.options]}"
        )


@dataclass(frozen=True)
class StepProfile:
    """Everything the solver needs to know about a step.

    Args:
        regions: in forward order.
        base_bytes: on the device all the time: parameters, gradients, optimizer state, the batch.
        up_bytes_per_s, down_bytes_per_s: rates that offloading may use, out and back.
        window_bytes: `OffloadEngine.window_bytes`.
        other_s: time of the step outside the regions.
        granule_bytes: the largest tensor that moves.
    """

    regions: tuple[Region, ...]
    base_bytes: int = 0
    up_bytes_per_s: float = 50e9
    down_bytes_per_s: float = 50e9
    window_bytes: int = 256 << 20
    other_s: float = 0.0
    granule_bytes: int = 0

    def __post_init__(self) -> None:
        check_all("regions", self.regions, Region)
        names = [r.name for r in self.regions]
        if len(set(names)) != len(names):
            raise ValueError(f"regions: names must differ, got {names}")
        for name in ("up_bytes_per_s", "down_bytes_per_s"):
            check_number(name, getattr(self, name), above=True)
        for name in ("window_bytes", "base_bytes", "other_s", "granule_bytes"):
            check_number(name, getattr(self, name))

    def in_flight_bytes(self, queue: float) -> float:
        """Most bytes on the device for a queue of that many: a granule more, at most the window, nothing for none."""
        return min(queue + self.granule_bytes, self.window_bytes) if queue > 0 else 0.0


@dataclass(frozen=True)
class Peak:
    """Where the memory is highest.

    Attributes:
        bytes: device bytes at that moment.
        region: name of the region that runs; `"end of forward"` after the last one.
        phase: `"forward"` or `"backward"`.
        base_bytes, held_bytes, in_flight_bytes, own_bytes: what they consist of; `held_bytes` is what earlier regions
            hold.
    """

    bytes: float
    region: str
    phase: str
    base_bytes: float
    held_bytes: float
    in_flight_bytes: float
    own_bytes: float

    def explain(self) -> str:
        """One line for error messages and reports."""
        gib = 2**30
        return (
            f"{self.phase} of {self.region}: {self.base_bytes / gib:.3f} GiB base + {self.held_bytes / gib:.3f} held "
            f"by earlier "
            f"regions + {self.in_flight_bytes / gib:.3f} in flight + {self.own_bytes / gib:.3f} of its own"
        )


@dataclass(frozen=True)
class Pace:
    """How far copies should be when a region ends its forward and begins its backward.

    Attributes:
        leaving_bytes: may still be leaving after the region's forward: what the queue needs, and what the peak has room
            for.
        returning_bytes: of the regions before, may be on their way back when the region's backward begins; as above.
        staying_bytes: of the regions before, may be on the device when the region's backward begins, those included
            that are still leaving.
    """

    leaving_bytes: float
    returning_bytes: float
    staying_bytes: float = math.inf

    def __post_init__(self) -> None:
        for name in ("leaving_bytes", "returning_bytes", "staying_bytes"):
            check_number(name, getattr(self, name), finite=False)

    def scaled(self, factor: float) -> Pace:
        """The pace of the same step with tensors of another size."""
        return Pace(self.leaving_bytes * factor, self.returning_bytes * factor, self.staying_bytes * factor)


@dataclass(frozen=True)
class Plan:
    """Choices and what they give.

    Attributes:
        choices: by region name.
        step_s: `compute_s + stall_s + other_s`.
        compute_s: forward and backward of all regions.
        stall_s: waiting for copies.
        peak: the highest memory.
        moved_bytes: offloaded bytes, one way.
        gap_s: no plan within the budget is faster than `step_s - gap_s`; 0: this one is optimal.
        pace: by region name, for the engine.
    """

    choices: Mapping[str, str]
    step_s: float
    compute_s: float
    stall_s: float
    peak: Peak
    moved_bytes: int
    gap_s: float = 0.0
    pace: Mapping[str, Pace] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> float:
        """Bytes at the peak."""
        return self.peak.bytes


def check_plan(plan: Plan, profile: StepProfile) -> None:
    """Raise unless the plan is one, of the profile's regions."""
    check_kind("plan", plan, Plan, "solve() and evaluate() make one")
    if set(plan.choices) != {region.name for region in profile.regions}:
        raise ValueError(
            f"plan: expected choices for {[r.name for r in profile.regions]}, got {list(plan.choices)}; pass the "
            f"profile that the plan was made for"
        )


def evaluate(profile: StepProfile, choices: Mapping[str, str] | Sequence[str], gap_s: float = 0.0) -> Plan:
    """Memory and time of given choices: the definition that the solver optimises.

    Args:
        profile: the regions.
        choices: by region name, or in region order.

    Raises:
        ValueError: a region without a choice, a choice that it does not have, or a choice for no region.

    >>> keep = Option("keep", 1.0, 2.0, held_bytes=10, forward_bytes=12, backward_bytes=14)
    >>> away = Option("offload", 1.0, 2.0, held_bytes=0, forward_bytes=12, backward_bytes=14, moved_bytes=10)
    >>> regions = (Region("a", (keep, away)), Region("b", (keep, away)))
    >>> step = StepProfile(regions, up_bytes_per_s=5, down_bytes_per_s=5, window_bytes=4)
    >>> evaluate(step, ["keep", "keep"]).step_s, evaluate(step, ["keep", "keep"]).peak_bytes
    (6.0, 24.0)
    >>> plan = evaluate(step, ["offload", "keep"])
    >>> plan.stall_s, plan.peak_bytes  # of 10 bytes 4 may be on their way when b runs: it waits for 6, out and back
    (2.4, 18.0)
    """
    check_kind("profile", profile, StepProfile, "profile() measures one")
    if not isinstance(choices, Mapping):
        check_all("choices", choices, str, "one per region, or a mapping by region name")
        if len(choices) != len(profile.regions):
            raise ValueError(f"choices: expected {len(profile.regions)}, one per region, got {len(choices)}")
        choices = {region.name: choice for region, choice in zip(profile.regions, choices, strict=True)}
    if unknown := [name for name in choices if name not in {r.name for r in profile.regions}]:
        raise ValueError(f"choices: no region is called {unknown[0]!r}, expected {[r.name for r in profile.regions]}")
    window, base = profile.window_bytes, profile.base_bytes
    held = queue_up = queue_down = 0.0
    queues: list[tuple[float, float]] = []
    there: list[float] = []  # of the regions before, when a backward begins
    forward_bytes: list[float] = []
    backward_bytes: list[float] = []
    compute_s = stall_s = 0.0
    moved = 0
    peak = Peak(base, "start", "forward", base, 0, 0, 0)

    def note(region: str, phase: str, in_flight: float, own: float) -> float:
        nonlocal peak
        total = base + held + in_flight + own
        if total > peak.bytes:
            peak = Peak(total, region, phase, base, held, in_flight, own)
        return total

    for region in profile.regions:
        if region.name not in choices:
            raise ValueError(
                f"choices: region {region.name!r} is missing, expected all of {[r.name for r in profile.regions]}"
            )
        o = region.option(choices[region.name])
        returning = queue_down
        forward_bytes.append(note(region.name, "forward", profile.in_flight_bytes(queue_up), o.forward_bytes))
        # what is still leaving when the last region turns round is on the device with what already comes back
        late = 0.0
        if region is profile.regions[-1]:
            late = max(0.0, queue_up - profile.up_bytes_per_s * o.forward_s)
        there.append(late + queue_down)
        in_flight = profile.in_flight_bytes(late) + profile.in_flight_bytes(queue_down)
        backward_bytes.append(note(region.name, "backward", in_flight, o.backward_bytes))
        compute_s += o.forward_s + o.backward_s
        queue_up = max(0.0, queue_up - profile.up_bytes_per_s * o.forward_s) + o.moved_bytes
        queue_down = max(0.0, queue_down - profile.down_bytes_per_s * o.backward_s) + o.moved_bytes
        stall_s += max(0.0, queue_up - window) / profile.up_bytes_per_s
        stall_s += max(0.0, queue_down - window) / profile.down_bytes_per_s
        queue_up, queue_down = min(queue_up, window), min(queue_down, window)
        held += o.held_bytes
        moved += o.moved_bytes
        queues.append((queue_up, returning))
    at_the_turn = note("end of forward", "forward", profile.in_flight_bytes(queue_up), 0)

    def with_room(queue: float, at_that_moment: float, most: float = window) -> float:
        if queue == 0:  # an empty queue was not charged with the tensor that it may be rounded up by
            at_that_moment += profile.granule_bytes
        return max(queue, min(most, queue + peak.bytes - at_that_moment))

    # what is leaving after a region's forward is there in the next one's, or when the last one turns round
    after = [*forward_bytes[1:], *[max(at_the_turn, last) for last in backward_bytes[-1:]]]
    pace: dict[str, Pace] = {}
    most_back = 0.0  # what comes back early is there until it is needed: in every backward up to then
    for region, (up, down), stay, then, now in zip(profile.regions, queues, there, after, backward_bytes, strict=True):
        most_back = max(down, min(with_room(down, now), most_back))
        pace[region.name] = Pace(with_room(up, then), most_back, with_room(stay, now, math.inf))
        most_back += region.option(choices[region.name]).moved_bytes
    return Plan(
        choices=dict(choices),
        step_s=compute_s + stall_s + profile.other_s,
        compute_s=compute_s,
        stall_s=stall_s,
        peak=peak,
        moved_bytes=moved,
        gap_s=gap_s,
        pace=pace,
    )
