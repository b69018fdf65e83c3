"""The picture of a loss-parity run: how far each recipe is from the first one, with intervals over seeds.

    python recipes/gem/benchmarks/loss_parity_plot.py docs/measured/loss_parity_h200.csv

Drawn from the CSV alone, beside which `NAME.curves.csv` may lie (what `loss_parity.py --curve` writes: training losses
by recipe, seed and step). Curves of recipes in parity lie on one another, so what is drawn is their difference.
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
WIDTH = 20


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


def curve_differences(rows: Sequence[Row], first: str) -> dict[str, list[tuple[int, float, float, float]]]:
    """(step, mean, low, high) of the difference in training loss to the first recipe, averaged over `WIDTH` steps and
    then over the seeds that both have; in per cent of the first one's loss there."""
    losses: dict[tuple[str, str], list[float]] = {}
    for row in sorted(rows, key=lambda row: int(row["step"])):
        losses.setdefault((row["recipe"], row["seed"]), []).append(float(row["loss"]))
    smooth = {key: [statistics.fmean(v[i - WIDTH : i]) for i in range(WIDTH, len(v) + 1)] for key, v in losses.items()}
    found: dict[str, list[tuple[int, float, float, float]]] = {}
    for name in dict.fromkeys(name for name, _ in smooth if name != first):
        seeds = [seed for other, seed in smooth if other == name and (first, seed) in smooth]
        pairs = [(smooth[name, seed], smooth[first, seed]) for seed in seeds]
        steps = min((min(len(a), len(b)) for a, b in pairs), default=0)
        found[name] = [
            (WIDTH + i, *seeds_interval([100 * (a[i] - b[i]) / b[i] for a, b in pairs])) for i in range(steps)
        ]
    return found


def plot(rows: Sequence[Row], curves: Sequence[Row], path: Path) -> bool:
    """Differences in NE, and in training loss where curves are given; False if there is nothing to compare.

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
    figure, axes = pyplot.subplots(
        1, 2 if curves else 1, figsize=(14 if curves else 8, 1.6 + 0.6 * len(differences)), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    _final(axes[0, 0], differences, first)
    if curves:
        for name, points in curve_differences(curves, first).items():
            steps, mean, low, high = zip(*points, strict=True)
            axes[0, 1].plot(steps, mean, label=name, linewidth=1)
            axes[0, 1].fill_between(steps, low, high, alpha=0.15)
        axes[0, 1].axhline(0, color="black", linewidth=0.8)
        axes[0, 1].set_xlabel(f"step; training loss over the last {WIDTH} steps, difference to {first} in per cent")
        axes[0, 1].legend(fontsize=8, frameon=False)
    num_seeds = max(len(values) for values in differences.values())
    title = (
        f"{facts['preset']} on {facts['source']}, {facts['num_steps']} steps of {facts['batch_size']}, {num_seeds} "
        f"seeds, {int(facts['num_samples']):,} held-out samples; {facts['device']}, commit {facts['commit']}"
    )
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


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
    axis.axvspan(-0.1, 0.1, color="#c6f6d5", alpha=0.5, zorder=0)
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel(
        f"NE, difference to {first} in per cent. Blue: mean and 95 % interval over seeds;\n"
        "grey: a seed and its 95 % interval over samples; green: the aim of 0.1 per cent"
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
