"""The learning curve of a run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
MODEL, TRAIN, HISTORY, IDENTITY = "#0b6e99", "#9fc9db", "#c2571a", "#8a8f98"
SMOOTHING = 0.8  # of the training NE, which is noisy from window to window


def draw(path: Path, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Writes a PNG: left NE on the training stream and on the validation part, right the test part against the
    baselines.

    Args:
        path: where to write.
        rows: lines of `metrics.jsonl`.
        summary: the content of `summary.json`; it may be incomplete (no test figures: no right panel).
    """
    # half a second to import, and only needed here
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [(r["step"], r["ne"]) for r in rows if r["kind"] == "train" and r["ne"] is not None]
    valid = [(r["step"], r["ne"]) for r in rows if r["kind"] == "valid" and r["ne"] is not None]
    lines = {r["name"]: r["valid_ne"] for r in rows if r["kind"] == "baseline"}
    has_test = summary.get("ne") is not None

    figure = Figure(figsize=(10, 5), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1, 2, width_ratios=(2.6, 1)) if has_test else figure.add_gridspec(1, 1)
    left = figure.add_subplot(grid[0])
    _style(left)
    if train:
        steps, values = zip(*train, strict=True)
        left.plot(steps, values, color=TRAIN, linewidth=0.8, alpha=0.6)
        left.plot(steps, _smooth(values), color=TRAIN, linewidth=2.0, label="train (as seen, smoothed)")
    if valid:
        steps, values = zip(*valid, strict=True)
        left.plot(steps, values, color=MODEL, linewidth=2.4, marker="o", markersize=4.5, label="valid")
        best = min(valid, key=lambda point: point[1])
        left.plot(*best, marker="o", markersize=11, markerfacecolor="none", markeredgecolor=MODEL, markeredgewidth=1.6)
        left.annotate(
            f"best {best[1]:.4f}",
            best,
            xytext=(0, -18),
            textcoords="offset points",
            ha="right",
            color=MODEL,
            fontsize=9,
        )
    for name, color in (("identity", IDENTITY), ("history", HISTORY)):
        if lines.get(name) is not None:
            left.axhline(lines[name], color=color, linewidth=1.4, linestyle=(0, (5, 3)))
            left.annotate(
                f"logistic regression, {name}: {lines[name]:.4f} (valid)",
                (0.99, lines[name]),
                xycoords=("axes fraction", "data"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="right",
                color=color,
                fontsize=9,
            )
    _limits(left, [v for _, v in train], [v for _, v in valid], list(lines.values()))
    left.set_xlabel("step", color=INK)
    left.set_ylabel("normalised entropy (lower is better)", color=INK)
    left.set_title(
        f"GEM {summary.get('preset', '')} on {summary.get('source', '')}", loc="left", color=INK, weight="bold"
    )
    if train or valid:
        # beside the title: inside, it lay over the baselines of short runs
        left.legend(
            frameon=False,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            borderaxespad=0,
            ncols=2,
            fontsize=9,
            labelcolor=INK,
        )
    if has_test:
        _test_panel(figure.add_subplot(grid[1]), summary)
    figure.savefig(path)


def _test_panel(axes: Any, summary: dict[str, Any]) -> None:
    _style(axes)
    bars = [
        ("identity", summary.get("baseline_ne"), IDENTITY),
        ("history", summary.get("history_baseline_ne"), HISTORY),
        ("Bayes", summary.get("bayes_ne"), MUTED),
        ("GEM", summary["ne"], MODEL),
    ]
    bars = [bar for bar in bars if bar[1] is not None]
    for x, (_, value, color) in enumerate(bars):
        axes.vlines(x, 0, value, color=color, linewidth=1.2, alpha=0.35)
        axes.plot(x, value, marker="o", markersize=9, color=color)
        axes.annotate(
            f"{value:.4f}",
            (x, value),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            color=color,
            weight="bold",
        )
    values = [value for _, value, _ in bars]
    spread = max(max(values) - min(values), 0.01)
    axes.set_ylim(min(values) - 0.35 * spread, max(values) + 0.35 * spread)
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_xticks(range(len(bars)), [name for name, _, _ in bars])
    axes.set_title("test part", loc="left", color=INK, weight="bold")


def _style(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _smooth(values: tuple[float, ...]) -> list[float]:
    smooth: list[float] = []
    for value in values:
        smooth.append(value if not smooth else SMOOTHING * smooth[-1] + (1 - SMOOTHING) * value)
    return smooth


def _limits(axes: Any, train: list[float], valid: list[float], lines: list[float]) -> None:
    """The first windows of training lie far above everything that matters: cut them off."""
    inside = valid + lines + sorted(train)[: max(1, int(0.95 * len(train)))]
    if inside:
        low, high = min(inside), max(inside)
        margin = 0.08 * max(high - low, 0.01)
        axes.set_ylim(low - margin, min(high, 1.3) + margin)
