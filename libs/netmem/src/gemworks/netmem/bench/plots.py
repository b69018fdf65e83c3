"""Plots of a benchmark CSV: `python -m gemworks.netmem.bench.plots docs/measured/netmem_h200.csv`.

Drawn from the file alone, so that a run that was cut short, or rows of several runs, can be drawn too.
"""

from __future__ import annotations

import csv
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# plans that move bytes say how long they wait; rows from before 7f10bf2 don't
_PREDICTED = re.compile(r"predicted ([\d.]+) ms(?: with [\d.]+ of waiting)?, ([\d.]+) GiB")
_CODED = "gemworks with codes"
_CURVES = {
    "one global budget": "one global budget",
    "gemworks": "a choice per region",
    _CODED: "a choice per region, codes too",
    "gemworks offload": "offload",
}


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Any, axes: Any, rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """The legend stands below what it explains; the title says where the rows come from."""
    gpus, commits = (", ".join(dict.fromkeys(r[name] for r in rows if r.get(name))) for name in ("gpu", "commit"))
    num = max((int(r.get("num_gpus") or 1) for r in rows), default=1)
    title = f"{f'{num} x ' if num > 1 else ''}{gpus or 'CPU'}, commit {commits or 'unknown'}"
    axes.set_title(textwrap.fill(title, 90), fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)


def plot_budgets(rows: Iterable[Mapping[str, str]], path: Path) -> bool:
    """Peak memory against step time, measured and predicted, of the stack that has the most rows; False if there is
    nothing to draw."""
    rows = [r for r in rows if r["op"] == "budget" and r["ms"]]
    shapes = [r["shape"] for r in rows]
    rows = [r for r in rows if r["shape"] == max(shapes, key=shapes.count)]
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    drawn = []
    for row in rows:
        predicted = _PREDICTED.search(row["setting"])
        if predicted is None:
            continue
        ms, gib = (float(g) for g in predicted.groups())
        impl = _CODED if row["impl"] == "gemworks" and "quantise" in row["setting"] else row["impl"]
        drawn.append(row)
        # a CPU has no peak counter; there the prediction stands in
        found.setdefault(impl, []).append((float(row["memory_gib"] or gib), float(row["ms"]), gib, ms))
    if not found:
        return False
    figure, axes = _axes()
    kept = found.get("keep everything", [])
    if kept:
        axes.plot([p[0] for p in kept], [p[1] for p in kept], "k*", markersize=10, label="keep everything")
    compared = [p[1] for impl in ("keep everything", "one global budget", "gemworks") for p in found.get(impl, [])]
    if compared:  # offload beyond what is free goes off the chart instead of flattening it
        axes.set_ylim(0.95 * min(compared), 1.1 * max(compared))
    for impl, label in _CURVES.items():
        points = sorted(found.get(impl, []))
        if points:
            # plans of one search are a curve; offloads are runs of their own
            style, dotted = ("o", "x") if impl == "gemworks offload" else ("o-", "x:")
            (line,) = axes.plot([p[0] for p in points], [p[1] for p in points], style, label=label)
            points.sort(key=lambda p: p[2])
            axes.plot(
                [p[2] for p in points], [p[3] for p in points], dotted, color=line.get_color(), alpha=0.6,
                label=f"{label}: predicted",
            )  # fmt: skip
            beyond = sum(p[1] > axes.get_ylim()[1] for p in points)
            if compared and beyond:
                axes.annotate(
                    f"{beyond} slower {'one' if beyond == 1 else 'ones'}, off the chart \u2191", (0.99, 0.97),
                    xycoords="axes fraction", ha="right", va="top", color=line.get_color(), fontsize=8,
                )  # fmt: skip
    axes.set_xlabel("peak memory of the step (GiB)")
    axes.set_ylabel("step (ms)")
    _save(figure, axes, drawn, path)
    return True


def plot_gathers(rows: Iterable[Mapping[str, str]], path: Path) -> bool:
    """Bandwidth of all-gathers by size; False if there is nothing to draw."""
    found: dict[str, list[tuple[int, float]]] = {}
    drawn = []
    for row in rows:
        if row["op"] == "all_gather" and row["gbps"]:
            drawn.append(row)
            found.setdefault(row["impl"], []).append((int(row["shape"].removesuffix("MiB")), float(row["gbps"])))
    if not found:
        return False
    figure, axes = _axes()
    for impl, points in found.items():
        points.sort()
        label = "copy engine" if impl == "gemworks" else impl.replace("nccl", "NCCL")
        axes.plot([p[0] for p in points], [p[1] for p in points], "o-", label=label)
    axes.set_xscale("log", base=2)
    sizes = sorted({size for points in found.values() for size, _ in points})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("gathered size (MiB)")
    axes.set_ylabel("received per GPU (GB/s)")
    _save(figure, axes, drawn, path)
    return True


def plot_file(path: Path) -> list[Path]:
    """Draw what a CSV has rows for, beside it.

    Returns:
        The files that were written.
    """
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    plots = {path.with_suffix(".budgets.png"): plot_budgets, path.with_suffix(".gathers.png"): plot_gathers}
    return [target for target, plot in plots.items() if plot(rows, target)]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(*plot_file(Path(name)))
