"""Rows of the layers' CSV, the chart, and what is said at the end."""

from __future__ import annotations

import csv
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from gemworks.gem.efficiency import BWD_FACTOR, H200_BF16_PEAK_FLOPS
from gemworks.gem.ladder.tables import law_of
from gemworks.gem.layers.timing import Split, Time
from gemworks.gem.turns import without_options

PROTOCOL_COLUMNS = (
    *("dtype", "law", "mean_len", "max_len", "seed", "ms", "ms_p20", "ms_p80", "tflops", "gbps", "bwd_factor"),
    *("roofline_fraction", "best_peer", "ratio_to_best_peer", "copy_gbps", "bf16_tflops", "gpu", "num_gpus"),
    *("clock_mhz", "command", "commit", "torch", "triton"),
)
COLUMNS = (
    *("layer", "attention", "local_mfu", "share_of_time"),
    *("setting", "count", "batch", "tensor_core_ms", "memory_ms", "gap_ms", "host_ms", "bound_ms", "note"),
    *PROTOCOL_COLUMNS,
)
Row = dict[str, str]


NOTE_LENGTH = 240


def note_of(error: BaseException) -> str:
    """Why there is no number, for a CSV's `note`: one line, though a compiler's error has its reason in the second; of
    a long one the first sentences, whole ones if one fits.

    >>> note_of(RuntimeError("backend='inductor' raised:\\nValueError: no"))
    "RuntimeError: backend='inductor' raised: ValueError: no"
    >>> note_of(RuntimeError("no room. Set less. " + 99 * "more "))
    'RuntimeError: no room. Set less.'
    """
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= NOTE_LENGTH else text[: text.rfind(". ", 0, NOTE_LENGTH) + 1 or NOTE_LENGTH]


@dataclass(frozen=True)
class Measured:
    """One layer type, measured; without a time it could not run, and `note` says why."""

    name: str
    count: int
    flops: float
    is_sequence: bool
    time: Time | None
    split: Split | None
    bound_ms: float
    note: str = ""
    host_ms: float | None = None


@dataclass(frozen=True)
class Total:
    """Sums over a set of layers, each as often as the model has it.

    Attributes:
        flops, ms: of forward and backward.
        bound_ms: the least time by this run's rates; 0 where it is unknown.
    """

    flops: float
    ms: float
    bound_ms: float

    @property
    def local_mfu(self) -> float:
        """Sum of FLOPs / (bf16 peak x sum of times)."""
        return self.flops / (self.ms * 1e-3 * H200_BF16_PEAK_FLOPS) if self.ms else 0.0

    @property
    def bound_mfu(self) -> float:
        """Local MFU if every layer took its least time."""
        return self.flops / (self.bound_ms * 1e-3 * H200_BF16_PEAK_FLOPS) if self.bound_ms else 0.0


def total_of(layers: Sequence[Measured], *, sequence_only: bool) -> Total:
    """Sums of what could run.

    >>> a = Measured("a", 2, 989e9, True, Time(2.0, 2.0, 2.0), None, 1.0)
    >>> b = Measured("b", 1, 0.0, False, Time(4.0, 4.0, 4.0), None, 0.0)
    >>> total_of([a, b], sequence_only=False).local_mfu  # 2 x 989 GFLOP in 2 x 2 + 4 ms
    0.25
    >>> total_of([a, b], sequence_only=True).local_mfu
    0.5
    """
    chosen = [x for x in layers if x.time is not None and (x.is_sequence or not sequence_only)]
    return Total(
        sum(x.count * x.flops for x in chosen),
        sum(x.count * x.time.ms for x in chosen if x.time is not None),
        sum(x.count * x.bound_ms for x in chosen),
    )


def worst(layers: Sequence[Measured]) -> list[Measured]:
    """The three layers that cost most time beyond what their FLOPs need at the peak, worst first."""

    def lost(x: Measured) -> float:
        assert x.time is not None
        return x.count * (x.time.ms - 1e3 * x.flops / H200_BF16_PEAK_FLOPS)

    return sorted([x for x in layers if x.time is not None and x.count], key=lost, reverse=True)[:3]


def common_columns(device: torch.device, *, module: str, copy_gbps: float, tflops: float, mhz: float | None) -> Row:
    """What every row of a run repeats."""
    cuda = device.type == "cuda"
    return {
        "bwd_factor": f"{BWD_FACTOR:g}",
        "copy_gbps": f"{copy_gbps:.0f}",
        "bf16_tflops": f"{tflops:.4g}",
        "gpu": torch.cuda.get_device_name(device) if cuda else "",
        "num_gpus": "1" if cuda else "0",
        "clock_mhz": "" if mhz is None else f"{mhz:.0f}",
        "command": f"python -m {module} {shlex.join(without_options(sys.argv[1:]))}".strip(),
        "commit": commit(),
        "torch": torch.__version__,
        "triton": _triton_version(),
    }


def commit() -> str:
    """GEMWORKS_COMMIT, or what git says of this checkout."""
    given = os.environ.get("GEMWORKS_COMMIT")
    if given:
        return given
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def rows_of(layers: Sequence[Measured], common: Mapping[str, str], *, whole_model: bool = True) -> list[Row]:
    """One row per layer, then the totals: "sequence layers", and of a `whole_model` its own."""
    whole = total_of(layers, sequence_only=False)
    rows = []
    for x in layers:
        row = dict.fromkeys(COLUMNS, "") | dict(common)
        row |= {"layer": x.name, "count": str(x.count), "note": x.note}
        if x.time is not None:
            row |= {
                "local_mfu": f"{x.flops / (x.time.ms * 1e-3 * H200_BF16_PEAK_FLOPS):.4f}",
                "share_of_time": f"{x.count * x.time.ms / whole.ms:.4f}" if x.count else "",
                "ms": f"{x.time.ms:.4f}", "ms_p20": f"{x.time.ms_p20:.4f}", "ms_p80": f"{x.time.ms_p80:.4f}",
                "tflops": f"{x.flops / x.time.ms / 1e9:.4g}", "bound_ms": f"{x.bound_ms:.4f}",
                "roofline_fraction": f"{x.bound_ms / x.time.ms:.3f}",
            }  # fmt: skip
        if x.split is not None:
            row |= {
                "tensor_core_ms": f"{x.split.tensor_core_ms:.4f}", "memory_ms": f"{x.split.memory_ms:.4f}",
                "gap_ms": f"{x.split.gap_ms:.4f}",
            }  # fmt: skip
        if x.host_ms is not None:
            row["host_ms"] = f"{x.host_ms:.4f}"
        rows.append(row)
    complete = whole_model and not {x.is_sequence for x in layers if x.time is not None} < {True, False}
    for name, only in (("sequence layers", True), ("whole model", False)) if complete else (("sequence layers", True),):
        total = total_of(layers, sequence_only=only)
        row = dict.fromkeys(COLUMNS, "") | dict(common)
        row |= {
            "layer": name, "count": "1", "local_mfu": f"{total.local_mfu:.4f}",
            "share_of_time": f"{total.ms / whole.ms:.4f}" if whole.ms else "", "ms": f"{total.ms:.4f}",
            "tflops": f"{total.flops / total.ms / 1e9:.4g}" if total.ms else "", "bound_ms": f"{total.bound_ms:.4f}",
            "roofline_fraction": f"{total.bound_ms / total.ms:.3f}" if total.ms else "",
            "note": f"the bound's Local MFU: {total.bound_mfu:.4f}",
        }  # fmt: skip
        rows.append(row)
    return rows


def done(path: Path) -> set[tuple[str, ...]]:
    """(attention, setting, batch, law) of what a CSV of layers has to the end."""
    if not path.is_file():
        return set()
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return {(r["attention"], r["setting"], r["batch"], law_of(r)) for r in rows if r["layer"] == "sequence layers"}


def check_columns(path: Path, columns: Sequence[str]) -> None:
    """Before rows are added to a file that may be there.

    Raises:
        ValueError: it has other columns, under which cells would be taken for others.
    """
    if not path.exists():
        return
    with path.open(newline="") as file:
        header = next(csv.reader(file), [])
    if header != list(columns):
        raise ValueError(
            f"path: got {path} with the columns {', '.join(header)}, expected {', '.join(columns)}; "
            "write to another folder"
        )


def append_csv(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Adds rows; the header when the file is new. Raises what `check_columns` does."""
    check_columns(path, columns)
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def parts_of(row: Row) -> tuple[float, float, float]:
    """Milliseconds of one step that tensor-core kernels, other kernels and neither take, by a layer's row.

    They add up to the time that was measured without a profiler. The trace says how it splits: what its kernels leave
    of that time is no kernel's, and where they leave less than nothing (the clock of that run was lower) they share it.

    >>> parts_of({"count": "2", "ms": "5", "tensor_core_ms": "2", "memory_ms": "1"})
    (4.0, 2.0, 4.0)
    >>> parts_of({"count": "1", "ms": "2", "tensor_core_ms": "2", "memory_ms": "2"})
    (1.0, 1.0, 0.0)
    """
    count, ms = float(row["count"]), float(row["ms"])
    kernels = float(row["tensor_core_ms"] or 0), float(row["memory_ms"] or 0)
    share = min(1.0, ms / sum(kernels)) if sum(kernels) else 0.0
    tensor, other = (count * share * x for x in kernels)
    return tensor, other, max(0.0, count * ms - tensor - other)


def chart_name(attention: str, setting: str, batch: str, law: str) -> str:
    """File of a run's chart."""
    return f"layers_{attention}_{setting}_b{batch}{'' if law == 'uniform' else f'_{law}'}.png"


def chart(path: Path, rows: Sequence[Row]) -> bool:
    """A bar per layer of one run (attention, setting, batch): its time in one step, split where a trace was taken.

    Returns:
        False if no row has a time.
    """
    totals = ("sequence layers", "whole model")
    shown = [r for r in rows if r["ms"] and int(r["count"]) and r["layer"] not in totals]
    if not shown:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.45 * len(shown) + 1.9), layout="constrained")
    names = [r["layer"] for r in shown]
    ends = [float(r["count"]) * float(r["ms"]) for r in shown]
    if any(r["tensor_core_ms"] for r in shown):
        kinds = ("tensor cores", "#2b6cb0"), ("other kernels", "#dd6b20"), ("no kernel ran", "#a0aec0")
        left = [0.0] * len(shown)
        for (label, color), values in zip(kinds, zip(*map(parts_of, shown), strict=True), strict=True):
            axes.barh(names, values, left=left, label=label, color=color)
            left = [a + b for a, b in zip(left, values, strict=True)]
        figure.legend(loc="outside upper center", ncols=3, fontsize=9)
    else:
        axes.barh(names, ends, color="#2b6cb0")
    for at, (row, end) in enumerate(zip(shown, ends, strict=True)):
        axes.text(end, at, f"  {100 * float(row['local_mfu']):.1f} %", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(right=1.1 * max(ends))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_xlabel("time in a step (ms), forward + backward, every layer alone; label: MFU against 989 TFLOP/s")
    first = shown[0]
    axes.set_title(
        f"{first['attention']} attention, {first['setting']}, batch {first['batch']}: {first['gpu'] or 'CPU'}, "
        f"{first['dtype']}, commit {first['commit'] or 'unknown'}",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
