"""Where a trace's time went by name: kernels and copies on a GPU, operators on a CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gemworks.netmem.overlap.trace import Activity, Kind, Trace, read_trace


@dataclass(frozen=True)
class KernelUse:
    """All calls of one name on one device.

    Attributes:
        self_us: without what ran inside of it (operators on a CPU call one another; kernels don't).
        share: of the self time of everything on that device.
        max_us: the longest call, with what ran inside of it.
    """

    name: str
    kind: Kind
    device: int
    num_calls: int
    self_us: float
    share: float
    max_us: float


@dataclass(frozen=True)
class KernelTable:
    """What `kernel_table` found, largest self time first."""

    kernels: tuple[KernelUse, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the keys are the field names."""
        return asdict(self)

    def to_text(self, top: int = 10, width: int = 60) -> str:
        """The first `top` lines for people, names cut to `width`."""
        lines = [f"  {'self ms':>10} {'share':>7} {'calls':>6} {'mean us':>10}  kernel"]
        for k in self.kernels[:top]:
            name = k.name if len(k.name) <= width else k.name[: width - 3] + "..."
            mean = k.self_us / k.num_calls
            lines.append(f"  {k.self_us / 1e3:>10.3f} {k.share:>7.1%} {k.num_calls:>6} {mean:>10.1f}  {name}")
        rest = self.kernels[top:]
        if rest:
            us, share = sum(k.self_us for k in rest), sum(k.share for k in rest)
            lines.append(
                f"  {us / 1e3:>10.3f} {share:>7.1%} {sum(k.num_calls for k in rest):>6} {'':>10}  {len(rest)} more"
            )
        return "\n".join(lines)


def kernel_table(source: str | Path | Mapping[str, Any] | Trace) -> KernelTable:
    """Sum calls by name.

    Args:
        source: a file that `torch.profiler` exported, its parsed content, or a `Trace`.

    Raises:
        ValueError: as in `read_trace`.
    """
    trace = source if isinstance(source, Trace) else read_trace(source)
    lanes: dict[tuple[int, str], list[Activity]] = defaultdict(list)
    for a in trace.activities:
        lanes[a.device, a.lane].append(a)
    uses: dict[tuple[str, Kind, int], list[tuple[float, float]]] = defaultdict(list)
    for (device, _), activities in lanes.items():
        for a, self_us in _self_times(activities):
            uses[a.name, a.kind, device].append((self_us, a.end_us - a.start_us))
    totals: dict[int, float] = defaultdict(float)
    for (_, _, device), times in uses.items():
        totals[device] += sum(us for us, _ in times)
    found = [
        KernelUse(
            name=name,
            kind=kind,
            device=device,
            num_calls=len(times),
            self_us=(us := sum(t for t, _ in times)),
            share=us / totals[device] if totals[device] else 0.0,
            max_us=max(whole for _, whole in times),
        )
        for (name, kind, device), times in uses.items()
    ]
    return KernelTable(tuple(sorted(found, key=lambda k: (k.device, -k.self_us, k.name))))


def _self_times(activities: list[Activity]) -> list[tuple[Activity, float]]:
    """Each activity of a lane with its time less that of the activities directly inside of it."""
    inside: list[float] = []
    open_at: list[int] = []
    ordered = sorted(activities, key=lambda a: (a.start_us, -a.end_us))
    for i, a in enumerate(ordered):
        inside.append(0.0)
        while open_at and ordered[open_at[-1]].end_us <= a.start_us:
            open_at.pop()
        if open_at and ordered[open_at[-1]].end_us >= a.end_us:
            inside[open_at[-1]] += a.end_us - a.start_us
        open_at.append(i)
    return [(a, max(0.0, a.end_us - a.start_us - inside[i])) for i, a in enumerate(ordered)]
