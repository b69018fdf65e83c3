"""Rows, their CSV columns and the table on the terminal."""

from __future__ import annotations

import csv
import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from gemworks.jagged.bench.cases import BWD_FACTOR, Inputs
from gemworks.jagged.bench.timing import Ceilings, Time
from gemworks.jagged.dispatch import architecture_of
from gemworks.jagged.ops.attention_core import table

OURS = "gemworks"
COLUMNS = (
    *("op", "shape", "head_dim", "direction", "impl", "executed_tflops"),
    *("dtype", "law", "mean_len", "max_len", "seed"),
    *("ms", "ms_p20", "ms_p80", "tflops", "gbps", "bwd_factor", "roofline_fraction", "best_peer", "ratio_to_best_peer"),
    *("copy_gbps", "bf16_tflops", "gpu", "num_gpus", "clock_mhz", "command", "commit", "torch", "triton"),
)
Row = dict[str, str]


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


def executed_share(x: Inputs, architecture: str) -> float | None:
    """Products that our backward computes over the five that count: 7 / 5 where two kernels share it; None on a CPU."""
    case = x.case
    shape = table.Shape(
        case.computes, x.q.dtype, case.head_dim, case.head_dim,
        masked=bool(case.window) or case.causal, shared_query=case.kind == "pool", grouped=False,
        max_length_k=case.rows if case.kind == "pffn" else case.maximum,
        shared_rows=case.rows if case.kind == "pool" else 0,
    )  # fmt: skip
    products = table.backward_products(shape, architecture)
    return None if products is None else products / (2 * BWD_FACTOR)


def rows_of(x: Inputs, times: dict[str, dict[str, Time]], refusals: dict[str, str], context: Context) -> list[Row]:
    """One row per implementation and direction; peers that did not run have the reason in `ratio_to_best_peer`.

    `executed_tflops`, of our backward, counts what two kernels compute twice; `tflops` and the rest do not.

    Args:
        times: direction -> implementation -> time.
        refusals: implementation -> reason.
    """
    case, common, rows = x.case, context.columns(), []
    lengths = (x.lengths_k if case.kind == "pool" else x.lengths_q).double()
    share = executed_share(x, architecture_of(context.device))
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
                if name == OURS and direction == "bwd" and share is not None:
                    row["executed_tflops"] = f"{share * flops / time.ms / 1e9:.4g}"
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
