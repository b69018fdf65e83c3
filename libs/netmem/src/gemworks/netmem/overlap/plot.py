"""A picture of a trace: one bar row per lane, exposed communication marked below."""

from __future__ import annotations

from pathlib import Path

from gemworks.netmem.overlap.intervals import subtract, union
from gemworks.netmem.overlap.trace import Trace

_COLOURS = {"compute": "#4c72b0", "communication": "#dd8452", "copy": "#55a868"}


MAX_LANES = 16  # the busiest streams or threads


def plot_timeline(trace: Trace, path: str | Path) -> None:
    """Write a PNG timeline.

    Args:
        trace: what `read_trace` gave.
        path: of the PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plot_timeline needs matplotlib: pip install 'gemworks-netmem[plot]'") from None

    busy: dict[str, float] = {}
    for a in trace.activities:
        busy[a.lane] = busy.get(a.lane, 0.0) + a.end_us - a.start_us
    lanes = sorted(sorted(busy, key=lambda lane: -busy[lane])[:MAX_LANES])
    origin = min(a.start_us for a in trace.activities)
    figure = Figure(figsize=(12, 1.2 + 0.4 * (len(lanes) + 1)))
    axes = figure.add_subplot()
    for row, lane in enumerate(lanes):
        for kind, colour in _COLOURS.items():
            spans = union(a.span for a in trace.activities if a.lane == lane and a.kind == kind)
            bars = [((s - origin) / 1e3, (e - s) / 1e3) for s, e in spans]
            axes.broken_barh(bars, (row + 0.1, 0.8), color=colour)
    for device in sorted({a.device for a in trace.activities}):
        compute, communication = (
            union(a.span for a in trace.activities if a.device == device and a.kind == kind)
            for kind in ("compute", "communication")
        )
        exposed = subtract(communication, compute)
        axes.broken_barh([((s - origin) / 1e3, (e - s) / 1e3) for s, e in exposed], (-0.9, 0.8), color="#c44e52")
    axes.set_yticks([-0.5, *[row + 0.5 for row in range(len(lanes))]], ["exposed", *lanes])
    axes.set_xlabel("ms")
    for kind, colour in _COLOURS.items():
        axes.plot([], [], color=colour, linewidth=6, label=kind)
    axes.legend(loc="upper right", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
