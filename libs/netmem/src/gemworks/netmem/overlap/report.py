"""What overlapped with what, and who waited: figures from a classified trace.

Per device: *compute* is the union of compute kernels, *communication* the union of collectives and GPU-to-GPU copies.
Its part under compute is *hidden*, the rest *exposed*. A wait is an exposed stretch: the communication that ends it is
what was waited for, and the next compute to start is who waited. (A trace records order, not dependencies; a kernel
that only happened to start then is counted too.)
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gemworks.netmem.overlap.intervals import intersect, subtract, total, union
from gemworks.netmem.overlap.trace import Activity, Trace, read_trace

# lines of waits in the text of one device
MAX_WAITS = 10


@dataclass(frozen=True)
class LinkUse:
    """Copies over one link: how many, bytes, union of their time, and how much of it lies under compute."""

    link: str
    num_copies: int
    num_bytes: int
    busy_us: float
    hidden_us: float

    @property
    def bytes_per_s(self) -> float:
        """Achieved rate while busy."""
        return self.num_bytes / (self.busy_us * 1e-6) if self.busy_us else 0.0


@dataclass(frozen=True)
class Wait:
    """Exposed communication, summed over a step: `waiter` stood still for `waited_for`."""

    waiter: str
    waiter_lane: str
    waited_for: str
    waited_for_lane: str
    num_times: int
    total_us: float


@dataclass(frozen=True)
class DeviceReport:
    """Figures of one device; times are unions, in microseconds.

    Attributes:
        device: GPU index, -1 for the CPU.
        span_us: first start to last end. `idle_us`: nothing at all ran.
        sm_share: share of the SMs that communication kernels occupied while they ran, weighted by time; None where the
            trace lacks grids or the number of SMs. A copy on a copy engine counts as 0.
        communication_by_name: union of time by name of collective or kernel.
        waits: largest first.
    """

    device: int
    span_us: float
    compute_us: float
    communication_us: float
    hidden_us: float
    exposed_us: float
    copy_us: float
    exposed_copy_us: float
    idle_us: float
    sm_share: float | None
    communication_by_name: Mapping[str, float]
    links: tuple[LinkUse, ...]
    waits: tuple[Wait, ...]


@dataclass(frozen=True)
class OverlapReport:
    """Reports of all devices in a trace."""

    devices: tuple[DeviceReport, ...]
    rank: int | None
    on_gpu: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the keys are the field names."""
        return asdict(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """JSON text, also written to a file if a path is given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_text(self) -> str:
        """A table for people; of many waits the `MAX_WAITS` longest."""
        lines = []
        if not self.on_gpu:
            lines.append("no GPU activity in this trace: CPU operators stand for compute and communication")
        for d in self.devices:
            where = f"gpu{d.device}" if d.device >= 0 else "cpu"
            lines.append(f"{where}{f', rank {self.rank}' if self.rank is not None else ''}: {d.span_us / 1e3:.3f} ms")
            for name, value in (
                ("compute", d.compute_us),
                ("communication", d.communication_us),
                ("  hidden", d.hidden_us),
                ("  exposed", d.exposed_us),
                ("copies", d.copy_us),
                ("  exposed", d.exposed_copy_us),
                ("idle", d.idle_us),
            ):
                share = value / d.span_us if d.span_us else 0.0
                lines.append(f"  {name:<16} {value / 1e3:10.3f} ms {share:7.1%}")
            sms = "not in the trace" if d.sm_share is None else f"{d.sm_share:.1%} while it runs"
            lines.append(f"  SMs taken by communication: {sms}")
            by_time = sorted(d.communication_by_name.items(), key=lambda kv: -kv[1])
            lines += [f"  {us / 1e3:10.3f} ms  {_short(name)}" for name, us in by_time]
            for link in d.links:
                lines.append(
                    f"  link {link.link:<10} {link.num_copies:5} copies {link.num_bytes / 1e6:10.3f} MB "
                    f"{link.busy_us / 1e3:9.3f} ms {link.bytes_per_s / 1e9:8.2f} GB/s, {link.hidden_us / 1e3:.3f} ms "
                    f"hidden"
                )
            lines += [
                f"  {_short(w.waiter)} ({w.waiter_lane}) waited {w.total_us / 1e3:.3f} ms in {w.num_times} times "
                f"for {_short(w.waited_for)} ({w.waited_for_lane})"
                for w in d.waits[:MAX_WAITS]
            ]
            if rest := d.waits[MAX_WAITS:]:
                lines.append(f"  {len(rest)} more waited {sum(w.total_us for w in rest) / 1e3:.3f} ms; see the JSON")
        return "\n".join(lines)


def _short(name: str, width: int = 60) -> str:
    return name if len(name) <= width else name[: width - 3] + "..."


def _label(activity: Activity) -> str:
    return activity.collective or activity.name


def _waits(
    compute: list[Activity], communication: list[Activity], exposed: list[tuple[float, float]]
) -> tuple[Wait, ...]:
    found: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    at = begun = 0
    going: list[Activity] = []
    for start, end in exposed:
        while begun < len(communication) and communication[begun].start_us < end:
            going.append(communication[begun])
            begun += 1
        going = [a for a in going if a.end_us > start]
        # whatever of the communication was still going at the end of the stretch held it up
        culprit = max(going, key=lambda a, end=end: min(a.end_us, end))
        while at < len(compute) and compute[at].start_us < end:
            at += 1
        waiter, lane = (compute[at].name, compute[at].lane) if at < len(compute) else ("end of trace", "")
        found[waiter, lane, _label(culprit), culprit.lane].append(end - start)
    waits = [Wait(*key, num_times=len(us), total_us=sum(us)) for key, us in found.items()]
    return tuple(sorted(waits, key=lambda w: -w.total_us))


def _sm_share(communication: list[Activity], num_sms: int | None) -> float | None:
    kernels = [a for a in communication if not a.link]
    if not communication or (kernels and (num_sms is None or not all(a.num_ctas for a in kernels))):
        return None
    time = sum(a.end_us - a.start_us for a in communication)
    if not kernels or num_sms is None or time == 0:
        return 0.0
    return sum(min(a.num_ctas, num_sms) * (a.end_us - a.start_us) for a in kernels) / (num_sms * time)


def _device_report(device: int, activities: list[Activity], num_sms: int | None) -> DeviceReport:
    by_kind: dict[str, list[Activity]] = {"compute": [], "communication": [], "copy": []}
    for a in activities:
        by_kind[a.kind].append(a)
    compute, communication, copies = (union(a.span for a in by_kind[k]) for k in ("compute", "communication", "copy"))
    hidden, exposed = intersect(communication, compute), subtract(communication, compute)
    everything = union([*compute, *communication, *copies])
    names: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for a in by_kind["communication"]:
        names[_label(a)].append(a.span)
    by_link: dict[str, list[Activity]] = defaultdict(list)
    for a in activities:
        if a.link:
            by_link[a.link].append(a)
    links = []
    for link, moved in sorted(by_link.items()):
        busy = union(a.span for a in moved)
        links.append(
            LinkUse(link, len(moved), sum(a.num_bytes for a in moved), total(busy), total(intersect(busy, compute)))
        )
    span = everything[-1][1] - everything[0][0] if everything else 0.0
    return DeviceReport(
        device=device,
        span_us=span,
        compute_us=total(compute),
        communication_us=total(communication),
        hidden_us=total(hidden),
        exposed_us=total(exposed),
        copy_us=total(copies),
        exposed_copy_us=total(subtract(copies, union([*compute, *communication]))),
        idle_us=span - total(everything),
        sm_share=_sm_share(by_kind["communication"], num_sms),
        communication_by_name={name: total(union(spans)) for name, spans in names.items()},
        links=tuple(links),
        waits=_waits(by_kind["compute"], by_kind["communication"], exposed),
    )


def overlap_report(source: str | Path | Mapping[str, Any] | Trace) -> OverlapReport:
    """Report on a trace.

    Args:
        source: a file that `torch.profiler` exported, its parsed content, or a `Trace`.

    Raises:
        ValueError: as in `read_trace`.
    """
    trace = source if isinstance(source, Trace) else read_trace(source)
    by_device: dict[int, list[Activity]] = defaultdict(list)
    for a in trace.activities:
        by_device[a.device].append(a)
    reports = [_device_report(device, found, trace.num_sms.get(device)) for device, found in sorted(by_device.items())]
    return OverlapReport(tuple(reports), trace.rank, trace.on_gpu)


@dataclass(frozen=True)
class RankWaits:
    """Who waited for whom across ranks, from one trace per rank.

    Attributes:
        waited_us: by rank: time in collectives spent waiting for later ranks.
        caused_us: by rank: how long the other ranks, together, waited for it.
        num_collectives: matched ones.
    """

    waited_us: Mapping[int, float]
    caused_us: Mapping[int, float]
    num_collectives: int

    def to_text(self) -> str:
        """A table for people."""
        lines = [f"{self.num_collectives} collectives matched over {len(self.waited_us)} ranks"]
        lines += [
            f"  rank {rank}: waited {self.waited_us[rank] / 1e3:.3f} ms, "
            f"kept others waiting {self.caused_us[rank] / 1e3:.3f} ms"
            for rank in sorted(self.waited_us)
        ]
        return "\n".join(lines)


def rank_waits(traces: Iterable[Trace]) -> RankWaits:
    """Match the collectives of several ranks and say who arrived late.

    Clocks of different hosts don't agree, durations do: a collective ends on all ranks at about the same time, so the
    rank on which it took least arrived last, and the others waited for it by the difference.

    Raises:
        ValueError: fewer than two traces, ranks missing or doubled, or different collectives on different ranks.
    """
    by_rank: dict[int, dict[tuple[str, str], list[float]]] = {}
    for trace in traces:
        if trace.rank is None or trace.rank in by_rank:
            raise ValueError(
                f"traces: expected one per rank, each with its rank; got {trace.rank} besides {sorted(by_rank)}"
            )
        calls: dict[tuple[str, str], list[float]] = defaultdict(list)
        for a in trace.activities:
            if a.kind == "communication" and a.collective:
                calls[a.group, a.collective].append(a.end_us - a.start_us)
        by_rank[trace.rank] = calls
    if len(by_rank) < 2:
        raise ValueError(f"traces: expected at least 2 ranks, got {len(by_rank)}")
    waited, caused = dict.fromkeys(by_rank, 0.0), dict.fromkeys(by_rank, 0.0)
    num = 0
    for key in sorted({k for calls in by_rank.values() for k in calls}):
        members = {r: calls[key] for r, calls in by_rank.items() if key in calls}
        counts = {r: len(c) for r, c in members.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(
                f"traces: {key[1]!r} in group {key[0]!r} was called {counts} times by rank; record the same steps "
                f"everywhere"
            )
        for durations in zip(*members.values(), strict=True):
            num += 1
            least = min(durations)
            late = list(members)[durations.index(least)]
            for rank, us in zip(members, durations, strict=True):
                waited[rank] += us - least
                caused[late] += us - least
    return RankWaits(waited, caused, num)
