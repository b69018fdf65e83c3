"""The plot of a benchmark CSV: `python -m gemworks.precision.bench_plot docs/measured/precision_h200.csv`.

Drawn from the file alone, so that it can be drawn again when rows of another run have been merged into it.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, str]
CASTS = {
    "cast_rows": ("rows", "#1a365d"), "cast_columns": ("columns", "#3182ce"),
    "cast_both": ("both in one read", "#dd6b20"), "cast_square": ("squares", "#38a169"),
}  # fmt: skip
LAYERS = {
    ("fp8_block128", "gemworks"): ("fp8_block128, input saved", "#90cdf4"),
    ("fp8_block128", "gemworks_save_both"): ("fp8_block128, its plane saved", "#3182ce"),
    ("fp8_block128", "gemworks_squares"): ("squares of inputs and gradients", "#1a365d"),
    ("fp8_block128", "gemworks_square_inputs"): ("squares of inputs", "#38a169"),
    ("fp8_block128", "gemworks_wgrad_bf16"): ("weight gradient in bf16", "#b83280"),
    ("mxfp8_regroup128", "gemworks"): ("mxfp8_regroup128", "#dd6b20"),
    ("mxfp8", "gemworks_save_both"): ("mxfp8, exact in bf16", "#a0aec0"),
    ("fp8_tensor", "gemworks_save_both"): ("one scale a tensor", "#d69e2e"),
    ("fp8_tensor", "gemworks_e4m3"): ("one scale a tensor, E4M3, no fast accumulation", "#f6e05e"),
    ("block_scaling", "transformer_engine"): ("Transformer Engine, block scaling", "#e53e3e"),
    ("current_scaling", "transformer_engine"): ("Transformer Engine, current scaling", "#feb2b2"),
}
ATTENTION = {
    ("tiles", "gemworks"): ("FP8 products, tiles of 128 rows", "#1a365d"),
    ("tiles", "gemworks_with_casts"): ("the same with the casts of q, k, v", "#3182ce"),
    ("squares", "gemworks"): ("squares of 32, exact in bf16", "#a0aec0"),
    ("squares", "gemworks_prologue"): ("squares, multiplied out as they are loaded", "#38a169"),
    ("squares_p_ds", "gemworks"): ("the same, P and dS rounded to MXFP8", "#b83280"),
}
FUSED = {
    ("linear_fused", "fp8_block128", "gemworks_unfused"): ("squares of inputs, casts by themselves", "#90cdf4"),
    ("linear_fused", "fp8_block128", "gemworks_norm"): ("the input's cast in the norm", "#3182ce"),
    ("linear_fused", "fp8_block128", "gemworks_norm_and_gradient"): (
        "and dy's in the activation's gradient",
        "#1a365d",
    ),
    ("linear_fused", "fp8_block128", "gemworks_norm_and_gradient_wgrad_bf16"): ("the same, dW in bf16", "#b83280"),
    ("mlp", "fp8_block128", "gemworks_unfused"): ("two layers and GELU, casts by themselves", "#fbd38d"),
    ("mlp", "fp8_block128", "gemworks"): ("two layers and GELU: mx_mlp", "#dd6b20"),
}
BAR_INCHES, GAP_INCHES = 0.15, 0.12
LONGEST_OF_THREE = 35  # letters of a label of which three stand side by side


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Casts as shares of the copy bandwidth, layers and attention as speed over bf16; False: nothing to draw.

    Args:
        rows: of the benchmark's CSV.
        path: the PNG.
    """
    casts = [(f"{r['shape']} {r['format']}", CASTS[r["op"]], float(r["roofline_fraction"]), r["commit"])
             for r in rows if r["op"] in CASTS and r["impl"] == "gemworks" and r["roofline_fraction"]]  # fmt: skip
    layers = [(r["shape"], LAYERS[r["format"], r["impl"]], float(r["ratio_to_bf16"]), r["commit"])
              for r in rows if r["op"] == "linear" and r["direction"] == "fwd_bwd" and r["ratio_to_bf16"]
              and (r["format"], r["impl"]) in LAYERS]  # fmt: skip
    attention = [(f"{r['shape']} {r['direction']}", ATTENTION[r["format"], r["impl"]], float(r["ratio_to_bf16"]),
                  r["commit"]) for r in rows if r["op"] == "attention_fp8" and (r["format"], r["impl"])
                 in ATTENTION]  # fmt: skip
    fused = [(r["shape"], FUSED[r["op"], r["format"], r["impl"]], float(r["ratio_to_bf16"]), r["commit"])
             for r in rows if (r["op"], r["format"], r["impl"]) in FUSED and r["ratio_to_bf16"]]  # fmt: skip
    panels = [
        (bars, text)
        for bars, text in (
            (casts, "casts: share of the copy bandwidth of the same run"),
            (layers, "linear M x K x N, forward + backward: speed over bf16 of the same run"),
            (fused, "layers M x K x N with their neighbours, less what the neighbours take in bf16: speed over bf16"),
            (attention, "attention on FP8 planes: speed over bf16 attention of the same run"),
        )
        if bars
    ]
    if not panels:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [_height(bars) for bars, _ in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(10, sum(heights) + 1.4 * len(panels)), layout="constrained",
        height_ratios=heights, squeeze=False,
    )  # fmt: skip
    gpus = ", ".join(dict.fromkeys(r["gpu"] for r in rows if r["gpu"])) or "CPU"
    for axis, (bars, text) in zip(axes[:, 0], panels, strict=True):
        _panel(axis, bars)
        commits = ", ".join(dict.fromkeys(commit for *_, commit in bars if commit))
        axis.set_xlabel(f"{text}\n{gpus}, commit {commits or 'unknown'}")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return True


def _height(bars: Sequence[tuple[str, Any, float, str]]) -> float:
    return len(bars) * BAR_INCHES + (1 + len({case for case, *_ in bars})) * GAP_INCHES


def _panel(axis: Any, bars: Sequence[tuple[str, tuple[str, str], float, str]]) -> None:
    """A group of bars for each case; what a case has no row of takes no room."""
    cases: dict[str, list[tuple[tuple[str, str], float]]] = {}
    for case, kind, value, _ in bars:
        cases.setdefault(case, []).append((kind, value))
    places: dict[tuple[str, str], list[tuple[float, float]]] = {}
    ticks, at = [], GAP_INCHES
    order = [*CASTS.values(), *LAYERS.values(), *FUSED.values(), *ATTENTION.values()]
    for found in cases.values():
        ticks.append(at + BAR_INCHES * len(found) / 2)
        for kind, value in sorted(found, key=lambda bar: order.index(bar[0])):
            places.setdefault(kind, []).append((at + BAR_INCHES / 2, value))
            at += BAR_INCHES
        at += GAP_INCHES
    for (label, color), mine in sorted(places.items(), key=lambda item: order.index(item[0])):
        axis.barh([y for y, _ in mine], [value for _, value in mine], BAR_INCHES, color=color, label=label)
    axis.set_yticks(ticks, list(cases), fontsize=8)
    axis.set_ylim(at, 0)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    columns = 3 if max(len(label) for label, _ in places) <= LONGEST_OF_THREE else 2
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, fontsize=8, frameon=False)


if __name__ == "__main__":
    for argument in map(Path, sys.argv[1:]):
        with argument.open(newline="", encoding="utf-8") as file:
            target = argument.with_suffix(".png")
            print(target if plot(list(csv.DictReader(file)), target) else f"{argument}: nothing to draw")
