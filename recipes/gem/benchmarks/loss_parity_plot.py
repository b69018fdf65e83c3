"""The picture of a loss-parity run: how far each recipe is from the first one, with intervals over seeds.

    python recipes/gem/benchmarks/loss_parity_plot.py docs/measured/loss_parity_h200.csv

Drawn from the CSV and from `NAME.curves.csv` beside it, if that is there (loss and NE by recipe, seed and step). Curves
of recipes in parity lie on one another, so their difference is drawn too.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, str]
# Two-sided 97.5 % quantiles of Student's t with n - 1 degrees of freedom, n = 2 .. 10.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
WIDTH = 10  # steps that a curve's point is the mean of
DASHES = ("-", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)))
AIM = 0.1  # per cent
Interval = tuple[int, float, float, float]


def seeds_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval over seeds; the interval of one seed is unknown (NaN).

    >>> [round(x, 3) for x in seeds_interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = STUDENT[min(len(values) - 2, len(STUDENT) - 1)] * statistics.stdev(values)
    half /= math.sqrt(len(values))
    return mean, mean - half, mean + half


def differences_of(rows: Sequence[Row]) -> dict[str, list[tuple[float, float, float]]]:
    """Difference in NE (per cent of the first recipe's) and its interval over samples: a triple per recipe and seed."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        if row["ne"] and row["ne_difference_percent"]:
            triple = (float(row[name]) for name in ("ne_difference_percent", "low_percent", "high_percent"))
            found.setdefault(row["recipe"], []).append(tuple(triple))  # pyright: ignore[reportArgumentType]
    return found


def smooth_curves(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[list[int], list[float]]]:
    """Of each recipe and seed: examples so far, and the mean NE of the last `WIDTH` steps (fewer at the start)."""
    steps: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: int(row["step"])):
        steps.setdefault((row["recipe"], row["seed"]), []).append((int(row["examples"]), float(row["ne"])))
    found: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
    for key, pairs in steps.items():
        examples, ne = zip(*pairs, strict=True)
        found[key] = list(examples), [statistics.fmean(ne[max(i - WIDTH, 0) : i]) for i in range(1, len(ne) + 1)]
    return found


def mean_curves(rows: Sequence[Row]) -> dict[str, list[Interval]]:
    """(examples, mean, least, largest) of the NE in training by recipe, over seeds, as far as all of them are."""
    curves = smooth_curves(rows)
    found: dict[str, list[Interval]] = {}
    for name in dict.fromkeys(name for name, _ in curves):
        own = [curve for key, curve in curves.items() if key[0] == name]
        columns = zip(own[0][0], *(ne for _, ne in own), strict=False)
        found[name] = [(at, statistics.fmean(ne), min(ne), max(ne)) for at, *ne in columns]
    return found


def curve_differences(rows: Sequence[Row], first: str) -> dict[str, list[Interval]]:
    """(examples, mean, low, high) of the difference in NE to the first recipe in training, over the seeds that both
    have and as far as all of them are; in per cent of the first one's NE there."""
    curves = smooth_curves(rows)
    found: dict[str, list[Interval]] = {}
    for name in dict.fromkeys(name for name, _ in curves if name != first):
        seeds = [seed for other, seed in curves if other == name and (first, seed) in curves]
        if not seeds:
            continue
        differences = [
            [100 * (a - b) / b for a, b in zip(curves[name, seed][1], curves[first, seed][1], strict=False)]
            for seed in seeds
        ]
        columns = zip(curves[name, seeds[0]][0], *differences, strict=False)
        found[name] = [(at, *seeds_interval(values)) for at, *values in columns]
    return found


def plot(rows: Sequence[Row], curves: Sequence[Row], path: Path) -> bool:
    """NE in training and its difference to the first recipe, where curves are given, and the differences of the NE of
    held-out samples; False if there is nothing to compare.

    Args:
        rows: of the CSV.
        curves: of the curves' CSV, may be empty.
        path: the PNG.
    """
    differences = differences_of(rows)
    if not differences:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    facts, first = rows[0], rows[0]["recipe"]
    height = 1.6 + 0.7 * len(differences)
    figure, axes = pyplot.subplots(
        1, 3 if curves else 1, figsize=(20 if curves else 8, max(height, 5.5) if curves else height),
        layout="constrained", squeeze=False,
    )  # fmt: skip
    if curves:
        _curves(axes[0, 0], curves)
        _curve_differences(axes[0, 1], curves, first)
    _final(axes[0, -1], differences, first)
    num_seeds = max(len(values) for values in differences.values())
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows if row["ne"]))
    title = (
        f"{facts['preset']} on {facts['source']}, {facts['num_steps']} steps of {facts['batch_size']}, {num_seeds} "
        f"seeds, {int(facts['num_samples']):,} held-out samples; {facts['device']}, commit {commits}"
    )
    figure.suptitle(title, fontsize=11 if curves else 9)
    figure.savefig(path, dpi=90 if curves else 110)
    pyplot.close(figure)
    return True


def _curves(axis: Any, rows: Sequence[Row]) -> None:
    """NE in training, with an enlargement of the last quarter."""
    inset = axis.inset_axes((0.42, 0.42, 0.55, 0.5))
    low, high = math.inf, -math.inf
    for number, (name, points) in enumerate(mean_curves(rows).items()):
        for place in (axis, inset):
            _band(place, points, name, number)
        tail = points[3 * len(points) // 4 :]
        low, high = min(low, *(point[2] for point in tail)), max(high, *(point[3] for point in tail))
        inset.set_xlim(tail[0][0], tail[-1][0])
    inset.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    inset.tick_params(labelsize=7)
    inset.set_title("last quarter", fontsize=8)
    inset.grid(alpha=0.3)
    axis.grid(alpha=0.3)
    axis.set_ylabel("NE in training")
    axis.set_xlabel(
        f"examples; NE of those of the last {WIDTH} steps, before they are trained on.\n"
        "Line: mean over seeds; band: from the least to the largest of them"
    )
    between = (0.97, 0.08)  # the enlargement and the curve
    axis.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=between, ncols=2)


def _curve_differences(axis: Any, rows: Sequence[Row], first: str) -> None:
    """Difference to the first recipe in training; differences of early steps are many times those of late ones."""
    for number, (name, points) in enumerate(curve_differences(rows, first).items(), 1):
        _band(axis, points, name, number)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.axhspan(-AIM, AIM, color="#c6f6d5", alpha=0.5, zorder=0)
    axis.set_yscale("symlog", linthresh=AIM, linscale=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)
    axis.set_ylabel("per cent (linear in the green)")
    axis.set_xlabel(
        f"examples; NE in training, difference to {first} of the same seed.\n"
        f"Line: mean over seeds; band: its 95 % interval; green: {AIM} per cent"
    )
    axis.legend(fontsize=8, frameon=False)


def _band(axis: Any, points: Sequence[Interval], name: str, number: int) -> None:
    """A line in its band; the first recipe's is wide and lies under the others."""
    examples, mean, low, high = zip(*points, strict=True)
    style = {"linewidth": 1.4, "linestyle": DASHES[number % len(DASHES)]} if number else {"linewidth": 5, "alpha": 0.35}
    axis.plot(examples, mean, label=name, color=f"C{number}", **style)
    axis.fill_between(examples, low, high, color=f"C{number}", alpha=0.12, linewidth=0)


def _final(axis: Any, differences: Mapping[str, Sequence[tuple[float, float, float]]], first: str) -> None:
    """A line for each recipe: seeds as dots with their intervals over samples, the mean with its interval over
    seeds."""
    for line, values in enumerate(differences.values()):
        offsets = [0.12 + 0.07 * i for i in range(len(values))]
        for offset, (value, low, high) in zip(offsets, values, strict=True):
            axis.plot([low, high], [line + offset] * 2, color="#a0aec0", linewidth=1)
            axis.plot(value, line + offset, "o", color="#718096", markersize=3)
        mean, low, high = seeds_interval([value for value, *_ in values])
        if not math.isnan(low):
            axis.plot([low, high], [line] * 2, color="#2b6cb0", linewidth=2.5, solid_capstyle="butt")
        axis.plot(mean, line, "D", color="#2b6cb0", markersize=6)
    axis.set_yticks(range(len(differences)), list(differences), fontsize=9)
    axis.set_ylim(len(differences) - 0.3, -0.4)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.axvspan(-AIM, AIM, color="#c6f6d5", alpha=0.5, zorder=0)
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel(
        f"NE of held-out samples, difference to {first} in per cent.\n"
        "Blue: mean and 95 % interval over seeds; grey: a seed\n"
        f"and its 95 % interval over samples; green: the aim of {AIM} per cent"
    )


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV, none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main(arguments: Sequence[str]) -> int:
    """Draw the picture of each CSV beside it; 1 if one has nothing to compare."""
    drawn = []
    for argument in map(Path, arguments):
        target = argument.with_suffix(".png")
        drawn.append(plot(read(argument), read(argument.with_suffix(".curves.csv")), target))
        print(target if drawn[-1] else f"{argument}: nothing to compare")
    return 0 if all(drawn) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
