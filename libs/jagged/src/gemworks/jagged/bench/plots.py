"""Plots of the benchmark's rows: `python -m gemworks.jagged.bench.plots docs/measured/jagged_h200.csv`.

Drawn from the file alone, so that rows of several runs can be drawn, and drawn again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gemworks.jagged.bench.cases import SWEEP_LAWS
from gemworks.jagged.bench.report import OURS, Row, read_csv

SWEPT = re.compile(r"B(256|1152) max(256|512|1024|2048|4096)( kv\d+)?")
FIRST_OF_SWEEP = ("uniform", "128", "B256 ")
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
# A name has one colour in every plot; ours are the dark ones.
COLORS = {
    OURS: "#1a365d", "flash_attention": "#1a365d", "gdpa": "#3182ce",
    "torch varlen_attn": "#dd6b20", "torch varlen_attn without rope": "#f6ad55", "flash-attn-4": "#38a169",
    "Meta Triton GDPA": "#b83280", "HSTU Triton": "#9f7aea", "FlexAttention": "#718096", "padded SDPA": "#cbd5e0",
}  # fmt: skip
BAR_INCHES, GAP_INCHES = 0.13, 0.1
EXECUTED = "executed (products computed twice included)"


def plots(path: Path, rows: Sequence[Row]) -> str:
    """Bars of every case that is no part of the sweep, and the sweep as lines beside it. Returns what was done.

    Of a case that was measured by several runs, the first row counts.
    """
    try:
        import matplotlib as mpl  # pyright: ignore[reportMissingImports]

        mpl.use("Agg")
        from matplotlib import pyplot as plt  # pyright: ignore[reportMissingImports]
    except ImportError:
        return "no plot: matplotlib is not installed"
    measured = [r for r in rows if r["tflops"]]
    swept = {id(r): m for r in measured if r["law"] in SWEEP_LAWS and (m := SWEPT.fullmatch(r["shape"]))}
    few = [r for r in measured if id(r) not in swept or (r["law"], r["head_dim"], r["shape"][:5]) == FIRST_OF_SWEEP]
    done = []
    if few:
        _bars(plt, path, few)
        done.append(str(path))
    if len({m[2] for m in swept.values()}) > 2:
        done.append(str(path.with_suffix(".sweep.png")))
        _lines(plt, Path(done[-1]), [(r, swept[id(r)]) for r in measured if id(r) in swept])
    return f"plots: {', '.join(done)}" if done else "no plot: no row has a rate"


def provenance(rows: Sequence[Row]) -> str:
    """What a plot's title says of where its rows come from."""
    values = (dict.fromkeys(r[name] for r in rows if r[name]) for name in ("gpu", "dtype", "commit"))
    gpus, dtypes, commits = (", ".join(found) for found in values)
    return f"{gpus or 'CPU'}, {dtypes}, commit {commits}"


def executed(r: Row) -> float | None:
    """TFLOP/s with the products that are computed twice, where there are any."""
    rate = float(r.get("executed_tflops") or 0)
    return rate if rate > 1.001 * float(r["tflops"]) else None


def _case(r: Row) -> str:
    return f"{r['op']} {r['shape']} {r['law']}, width {r['head_dim']}"


def bar_slots(rows: Sequence[Row]) -> Iterator[tuple[str, str, float]]:
    """(case, implementation, place from above in inches) of every bar: what a case has no row of takes no room."""
    order = list(dict.fromkeys(r["op"].split()[0] for r in rows))
    cases: dict[str, list[str]] = {}
    for r in sorted(rows, key=lambda r: order.index(r["op"].split()[0])):
        names = cases.setdefault(_case(r), [])
        if r["impl"] not in names:
            names.append(r["impl"])
    at = GAP_INCHES
    for case, names in cases.items():
        for name in sorted(names, key=lambda name: name != OURS):
            yield case, name, at + BAR_INCHES / 2
            at += BAR_INCHES
        at += GAP_INCHES


def _legend(axes: Iterable[Any]) -> dict[str, Any]:
    """Label -> handle, of all axes together."""
    found = (axis.get_legend_handles_labels() for axis in axes)
    return {label: handle for handles, labels in found for handle, label in zip(handles, labels, strict=True)}


def _bars(plt: Any, path: Path, rows: Sequence[Row]) -> None:
    slots = list(bar_slots(rows))
    names = list(dict.fromkeys(name for _, name, _ in slots))
    height = slots[-1][2] + BAR_INCHES / 2 + GAP_INCHES
    figure, axes = plt.subplots(1, 2, figsize=(13, height + 1.6), layout="constrained", sharey=True)
    ticks: dict[str, list[float]] = {}
    for case, _, at in slots:
        ticks.setdefault(case, []).append(at)
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        found = {(_case(r), r["impl"]): float(r["tflops"]) for r in reversed(rows) if r["direction"] == direction}
        for name in names:
            mine = [(at, found[case, name]) for case, n, at in slots if n == name and (case, name) in found]
            axis.barh(
                [at for at, _ in mine], [rate for _, rate in mine], BAR_INCHES, color=COLORS.get(name), label=name
            )
        twice = {_case(r): x for r in reversed(rows) if r["direction"] == direction and (x := executed(r))}
        if twice:  # behind ours, so that only what goes beyond is seen
            at = [at for case, n, at in slots if n == OURS and case in twice]
            rates = [twice[case] for case, n, _ in slots if n == OURS and case in twice]
            axis.barh(at, rates, BAR_INCHES, color=COLORS[OURS], alpha=0.25, zorder=0.5, label=EXECUTED)
        axis.set_yticks([sum(at) / len(at) for at in ticks.values()], list(ticks), fontsize=7)
        axis.set_ylim(height, 0)
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
        axis.set_xlabel(f"{DIRECTIONS[direction]}: useful TFLOP/s")
    legend = _legend(axes)
    title = f"attention of 4 heads: {provenance(rows)}"
    figure.legend(legend.values(), legend, fontsize=8, ncols=4, loc="outside upper center", title=title)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _lines(plt: Any, path: Path, rows: Sequence[tuple[Row, re.Match[str]]]) -> None:
    """One panel for each law and number of sequences and width; forward solid, backward dashed.

    A peer that was not swept (it has rows of one length alone) is left to the bars.
    """
    kept = [(r, m) for r, m in rows if not m[3]]
    lines = [(r["op"] if r["impl"] == OURS else r["impl"], r, m) for r, m in kept]
    lengths: dict[str, set[str]] = {}
    for name, _, m in lines:
        lengths.setdefault(name, set()).add(m[2])
    names = [name for name, found in lengths.items() if len(found) > 1]
    columns = list(dict.fromkeys(r["law"] for r, _ in kept))
    panels = sorted({(int(m[1]), int(r["head_dim"])) for r, m in kept})
    figure, axes = plt.subplots(
        len(panels), len(columns), figsize=(13, 2.8 * len(panels) + 0.8), layout="constrained", squeeze=False,
        sharex=True,
    )  # fmt: skip
    ticks = sorted({int(m[2]) for name, _, m in lines if name in names})
    for (batch, width), line in zip(panels, axes, strict=True):
        for law, axis in zip(columns, line, strict=True):
            axis.set_title(f"{batch} sequences, {law} lengths, 4 heads of {width}", fontsize=9)
            for name in names:
                for direction, style in (("fwd", "-o"), ("bwd", "--o")):
                    here = {
                        int(m[2]): r
                        for n, r, m in reversed(lines)
                        if (n, r["law"], r["direction"], r["head_dim"], m[1])
                        == (name, law, direction, str(width), str(batch))
                    }
                    at = sorted(here)
                    axis.plot(at, [float(here[n]["tflops"]) for n in at], style, color=COLORS.get(name), markersize=3,
                              label=f"{name}, {DIRECTIONS[direction]}")  # fmt: skip
                    twice = {n: x for n in at if (x := executed(here[n]))}
                    if twice:
                        axis.plot(list(twice), list(twice.values()), ":", color=COLORS.get(name), linewidth=1,
                                  label=f"{name}, {DIRECTIONS[direction]}, {EXECUTED}")  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        line[0].set_ylabel("useful TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("longest sequence (rows)")
    legend = _legend(axes.flat)
    title = provenance([r for r, _ in kept])
    figure.legend(legend.values(), legend, fontsize=8, ncols=4, loc="outside upper center", title=title)
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    for argument in map(Path, sys.argv[1:]):
        print(plots(argument.with_suffix(".png"), read_csv(argument)))
