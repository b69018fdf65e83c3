"""Times the backward of attention behind a norm and a rotation on a GPU: k's in its end, and in a pass of its own.

    python libs/jagged/benchmarks/norm_rope_back.py --out norm_rope_back.csv --budget-s 40

Both ways are timed in turns in one process: the whole backward of `flash_attention_pool` (256 seeds) and of
`flash_attention_qkv`, row sums of dO O and q's norm and rotation included, and beside them the backward of the same
attention of keys that are ready ("core"), which neither can beat. Gradients are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged import Rope, TileSchedule, flash_attention_pool, flash_attention_qkv, offsets_from_lengths
from gemworks.jagged.bench import report
from gemworks.jagged.bench.cases import draw_lengths
from gemworks.jagged.bench.timing import Clock, measure_ceilings, time_in_turn
from torch import Tensor

HEADS, WIDTH, SEEDS, LONGEST = 4, 128, 256, 2048
SHAPES = (("pool", 512), ("self", 512), ("pool", 256), ("self", 256))
WAYS = {"apart": False, "epilogue": True}
CORE = "core"
COLUMNS: tuple[str, ...] = (
    *("op", "shape", "head_dim", "direction", "impl", "setting", "error", "saved_ms", "passes", "note"),
    *report.COLUMNS[report.COLUMNS.index("dtype") :],
)


def gradient(out: Tensor, leaves: list[Tensor], d_out: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, d_out, retain_graph=True)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def backwards(
    kind: str, batch: int, longest: int, device: torch.device
) -> tuple[dict[str, Callable[[], tuple[Tensor, ...]]], Tensor]:
    """Backward by each way, {name: closure that returns the gradients}; lengths on the host."""
    torch.manual_seed(1)
    lengths = draw_lengths("uniform", batch, longest, 1)
    offsets = offsets_from_lengths(lengths).to(torch.int32).to(device)
    total, parts = int(lengths.sum()), 2 if kind == "pool" else 3
    x = torch.randn(total, parts * HEADS, WIDTH, device=device, dtype=torch.bfloat16).requires_grad_()
    rope = Rope().tables(offsets, WIDTH, total=total)
    if kind == "pool":
        q = torch.randn(SEEDS, HEADS, WIDTH, device=device, dtype=torch.bfloat16).requires_grad_()
        schedule = TileSchedule.build(None, offsets, total_q=SEEDS, total_k=total)
        leaves, call = [x, q], partial(flash_attention_pool, q, x, offsets, max_length=longest, schedule=schedule)
        norm = "k_norm"
    else:
        schedule = TileSchedule.build(offsets, total_q=total)
        leaves = [x]
        call = partial(flash_attention_qkv, x, offsets, num_heads=HEADS, max_length=longest, schedule=schedule)
        norm = "qk_norm"
    d_out: Tensor | None = None
    runs: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    for name in (*WAYS, CORE):
        front: dict[str, Any] = {} if name == CORE else {norm: True, "rope": rope, "backward_epilogue": WAYS[name]}
        out = call(**front)
        d_out = torch.randn_like(out) if d_out is None else d_out
        runs[name] = partial(gradient, out, leaves, d_out)
    return runs, lengths


def measure(shapes: tuple[tuple[str, int], ...], budget_s: float, smoke: bool) -> Iterator[dict[str, str]]:
    device = torch.device("cpu" if smoke else "cuda")
    begin = time.monotonic()
    clock = Clock(device)
    ceilings = measure_ceilings(clock, device)
    common = report.Context(ceilings, device, torch.bfloat16, ()).columns()
    common["command"] = "python libs/jagged/benchmarks/norm_rope_back.py"
    for kind, sequences in shapes:
        batch = 3 if smoke else sequences
        seeds = f" seeds{SEEDS}" if kind == "pool" else ""
        longest = 16 if smoke else LONGEST
        row = common | {"op": f"flash_attention_{'pool' if kind == 'pool' else 'qkv'} norm rope"}
        row |= {"shape": f"B{batch} max{longest}{seeds}", "head_dim": str(WIDTH), "direction": "bwd"}
        row |= {"impl": report.OURS, "law": "uniform", "seed": "1"}
        if time.monotonic() - begin > budget_s:
            yield row | {"note": "not run: no time left"}
            continue
        runs, lengths = backwards(kind, batch, longest, device)
        row |= {"mean_len": f"{lengths.double().mean():.1f}", "max_len": str(int(lengths.max()))}
        apart, ours = ([g.detach() for g in runs[name]()] for name in WAYS)
        error = max(relative(a, b) for a, b in zip(ours, apart, strict=True))
        if not error < 1e-2:
            yield row | {"setting": "epilogue", "error": f"{error:.1e}", "note": "WRONG: not timed"}
            continue
        times, errors = time_in_turn(clock, runs, rounds=2 if smoke else 6, repeats=1 if smoke else 5)
        # one pass over k in bf16, at the speed of a copy, which reads and writes
        pass_ms = int(lengths.sum()) * HEADS * WIDTH * 2 / ceilings.copy_gbps / 1e6
        for name in runs:
            if name in errors:
                yield row | {"setting": name, "note": f"{type(errors[name]).__name__}: {str(errors[name])[:160]}"}
                continue
            t = times[name]
            found = {"setting": name, "ms": f"{t.ms:.4f}", "ms_p20": f"{t.ms_p20:.4f}", "ms_p80": f"{t.ms_p80:.4f}"}
            if name == "epilogue":
                found["error"] = f"{error:.1e}"
            if name != "apart" and "apart" in times:
                saved = times["apart"].ms - t.ms
                found |= {"saved_ms": f"{saved:.4f}", "passes": f"{saved / pass_ms:.2f}"}
            yield row | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("norm_rope_back.csv"))
    parser.add_argument("--budget-s", type=float, default=120.0, help="no shape starts after it")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU, where both ways are the same")
    args = parser.parse_args()
    with args.out.open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for row in measure(SHAPES, args.budget_s, args.smoke):
            writer.writerow(row)
            file.flush()
            shown = ("op", "shape", "setting", "ms", "ms_p20", "ms_p80", "saved_ms", "passes", "error", "note")
            print("  ".join(row.get(c, "") for c in shown), flush=True)


if __name__ == "__main__":
    main()
