"""Rows, their CSV columns, the table on the terminal and the plot."""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged.bench.cases import BWD_FACTOR, SWEEP_LAWS, Inputs
from gemworks.jagged.bench.timing import Ceilings, Time

OURS = "gemworks"
COLUMNS = (
    *("op", "shape", "head_dim", "direction", "impl", "dtype", "law", "mean_len", "max_len", "seed"),
    *("ms", "ms_p20", "ms_p80", "tflops", "gbps", "bwd_factor", "roofline_fraction", "best_peer", "ratio_to_best_peer"),
    *("copy_gbps", "bf16_tflops", "gpu", "num_gpus", "clock_mhz", "command", "commit", "torch", "triton"),
)
Row = dict[str, str]
SWEPT = re.compile(r"B(256|1152) max(256|512|1024|2048|4096)( kv\d+)?")
FIRST_OF_SWEEP = ("uniform", "128", "B256 ")


@dataclass(frozen=True)
class Context:
    """What every row of a run repeats."""

    ceilings: Ceilings
    device: torch.device
    dtype: torch.dtype
    arguments: Sequence[str]

    def columns(self) -> Row:
        cuda = self.device.type == "cuda"
        mhz = self.ceilings.clock_mhz
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "copy_gbps": f"{self.ceilings.copy_gbps:.0f}",
            "bf16_tflops": f"{self.ceilings.bf16_tflops:.4g}",
            "gpu": torch.cuda.get_device_name(self.device) if cuda else "",
            "num_gpus": "1" if cuda else "0",
            "clock_mhz": "" if mhz is None else f"{mhz:.0f}",
            "command": f"python -m gemworks.jagged.bench {shlex.join(self.arguments)}".strip(),
            "commit": commit(),
            "torch": torch.__version__,
            "triton": triton_version(),
        }


def commit() -> str:
    """The commit of the working tree, or of the environment variable GEMWORKS_COMMIT where there is no git."""
    if named := os.environ.get("GEMWORKS_COMMIT"):
        return named
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def triton_version() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return triton.__version__


def rows_of(x: Inputs, times: dict[str, dict[str, Time]], refusals: dict[str, str], context: Context) -> list[Row]:
    """One row per implementation and direction; peers that did not run have the reason in `ratio_to_best_peer`.

    Args:
        times: direction -> implementation -> time.
        refusals: implementation -> reason.
    """
    case, common, rows = x.case, context.columns(), []
    lengths = (x.lengths_k if case.kind == "pool" else x.lengths_q).double()
    for direction, by_impl in times.items():
        flops = x.flops * (BWD_FACTOR if direction == "bwd" else 1)
        moved = x.bytes_moved(direction)
        ceilings = context.ceilings
        roof_ms = max(flops / ceilings.bf16_tflops / 1e9, moved / ceilings.copy_gbps / 1e6)
        peers = {name: t.ms for name, t in by_impl.items() if name != OURS}
        best = min(peers, key=peers.__getitem__) if peers else ""
        for name in [*by_impl, *refusals]:
            time = by_impl.get(name)
            row = dict.fromkeys(COLUMNS, "") | common
            row |= {
                "op": case.op, "shape": case.shape, "head_dim": str(case.head_dim),
                "direction": direction, "impl": name,
                "law": case.law, "mean_len": f"{lengths.mean():.1f}", "max_len": str(int(lengths.max())),
                "seed": str(case.seed), "bwd_factor": str(BWD_FACTOR), "best_peer": best,
            }  # fmt: skip
            if time is None:
                row["ratio_to_best_peer"] = refusals[name]
            else:
                row |= {
                    "ms": f"{time.ms:.4f}", "ms_p20": f"{time.ms_p20:.4f}", "ms_p80": f"{time.ms_p80:.4f}",
                    "tflops": f"{flops / time.ms / 1e9:.4g}", "gbps": f"{moved / time.ms / 1e6:.4g}",
                    "roofline_fraction": f"{roof_ms / time.ms:.3f}",
                    "ratio_to_best_peer": f"{peers[best] / time.ms:.3f}" if best else "",
                }  # fmt: skip
            rows.append(row)
    return rows


def schedule_row(x: Inputs, build: Time, forward: Time, context: Context) -> Row:
    """What the tiles of a batch cost, beside the forward of one layer that uses them."""
    return (
        dict.fromkeys(COLUMNS, "")
        | context.columns()
        | {
            "op": "tile_schedule", "shape": x.case.shape, "head_dim": str(x.case.head_dim), "direction": "fwd",
            "impl": OURS, "law": x.case.law, "mean_len": f"{x.lengths_q.double().mean():.1f}",
            "max_len": str(int(x.lengths_q.max())), "seed": str(x.case.seed),
            "ms": f"{build.ms:.4f}", "ms_p20": f"{build.ms_p20:.4f}", "ms_p80": f"{build.ms_p80:.4f}",
            "best_peer": "one flash_attention forward", "ratio_to_best_peer": f"{forward.ms / build.ms:.3f}",
        }
    )  # fmt: skip


def read_csv(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append_csv(path: Path, rows: Sequence[Row]) -> None:
    """Written case by case, so that an interrupted run keeps what it measured."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def print_rows(rows: Sequence[Row]) -> None:
    for r in rows:
        measured = ""
        if r["ms"]:
            measured = f"{r['ms']:>9} ms {r['tflops']:>7} TF {r['gbps']:>7} GB/s roof {r['roofline_fraction']}"
        ratio = (
            f"x{r['ratio_to_best_peer']} of {r['best_peer']}" if r["ms"] and r["best_peer"] else r["ratio_to_best_peer"]
        )
        print(f"  {r['direction']} {r['impl']:<18} {measured} {ratio}", flush=True)


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
    _bars(plt, path, few)
    done = [str(path)]
    if len({m[2] for m in swept.values()}) > 2:
        done.append(str(path.with_suffix(".sweep.png")))
        _lines(plt, Path(done[-1]), [(r, swept[id(r)]) for r in measured if id(r) in swept])
    return f"plots: {', '.join(done)}"


def _bars(plt: Any, path: Path, rows: Sequence[Row]) -> None:
    def label_of(r: Row) -> str:
        return f"{r['op']} {r['shape']} {r['law']} H{r['head_dim']}"

    labels = list(dict.fromkeys(map(label_of, rows)))
    names = list(dict.fromkeys(r["impl"] for r in rows))
    figure, axes = plt.subplots(1, 2, figsize=(14, 2 + 0.5 * len(labels)), layout="constrained", sharey=True)
    for axis, direction in zip(axes, ("fwd", "bwd"), strict=True):
        for i, name in enumerate(names):
            found = {
                label_of(r): float(r["tflops"])
                for r in reversed(rows)
                if (r["impl"], r["direction"]) == (name, direction)
            }
            at = [j + (i - len(names) / 2) * 0.85 / len(names) for j in range(len(labels))]
            axis.barh(at, [found.get(label, 0.0) for label in labels], 0.85 / len(names), label=name)
        axis.set_yticks(range(len(labels)), labels, fontsize=7)
        axis.set_xlabel(f"{'forward' if direction == 'fwd' else 'backward'}: useful TFLOP/s")
    axes[0].invert_yaxis()
    axes[0].margins(y=0.01)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lines(plt: Any, path: Path, rows: Sequence[tuple[Row, re.Match[str]]]) -> None:
    """One panel for each law and number of sequences and width; forward solid, backward dashed."""
    kept = [(r, m) for r, m in rows if not m[3]]
    lines = [(r["op"] if r["impl"] == OURS else r["impl"], r, m) for r, m in kept]
    names = list(dict.fromkeys(name for name, _, _ in lines))
    columns = list(dict.fromkeys(r["law"] for r, _ in kept))
    panels = sorted({(int(m[1]), int(r["head_dim"])) for r, m in kept})
    figure, axes = plt.subplots(
        len(panels), len(columns), figsize=(14, 3 * len(panels)), layout="constrained", squeeze=False, sharex=True
    )
    for (batch, width), line in zip(panels, axes, strict=True):
        for law, axis in zip(columns, line, strict=True):
            axis.set_title(f"B{batch}, {law}, 4 heads of {width}", fontsize=9)
            for i, name in enumerate(names):
                for direction, style in (("fwd", "-o"), ("bwd", "--o")):
                    here = {
                        int(m[2]): float(r["tflops"])
                        for n, r, m in reversed(lines)
                        if (n, r["law"], r["direction"], r["head_dim"], m[1])
                        == (name, law, direction, str(width), str(batch))
                    }
                    if here:
                        at = sorted(here)
                        axis.plot(at, [here[n] for n in at], style, color=f"C{i}", markersize=3,
                                  label=name if direction == "fwd" else None)  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("longest sequence")
    axes[0][0].set_ylabel("useful TFLOP/s (backward dashed)")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)
