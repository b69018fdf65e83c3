"""Times block attention with its projections in front, on a GPU: computed again in the backward, and kept.

    python libs/jagged/benchmarks/projected.py --check             # compiles and compares
    python libs/jagged/benchmarks/projected.py --out projected.csv

`gemworks op` is block_attention_projected (nothing kept but x); `linear then block_attention_qkv` keeps the projection
for its backward. Letters: T packed rows, D width of x.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged import (
    BlockSchedule,
    Rope,
    RopeTables,
    block_attention_projected,
    block_attention_qkv,
    offsets_from_lengths,
)
from gemworks.jagged.bench import report
from gemworks.jagged.bench.bandwidth import assert_near
from gemworks.jagged.bench.blocks import Shape, block_lengths
from gemworks.jagged.bench.timing import Clock, measure_ceilings, time_in_turn
from torch import Tensor
from torch.nn import functional

HEADS, WIDTH = 4, 128
PEER = "linear then block_attention_qkv"


def measure(shape: Shape, dim: int, clock: Clock, context: report.Context, check: bool) -> list[report.Row]:
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = block_lengths(shape.num_sequences, shape.max_length)
    offsets, total = offsets_from_lengths(lengths).cuda(), int(lengths.sum())
    x = torch.randn(total, dim, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    weight = torch.randn(3 * HEADS * WIDTH, dim, device="cuda", generator=generator).mul_(dim**-0.5)
    weight = weight.to(torch.bfloat16).requires_grad_()
    dout = torch.randn(total, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)
    schedule = BlockSchedule.make(offsets, total=total)
    tables = Rope(time_fraction=0.0).tables(offsets, WIDTH, total=total)
    rope = RopeTables(tables.cos_TJ.half(), tables.sin_TJ.half())
    settings: dict[str, Any] = {"max_length": shape.max_length, "rope": rope, "qk_norm": True, "schedule": schedule}

    def op() -> Tensor:
        return block_attention_projected(x, weight, offsets, num_heads=HEADS, head_dim=WIDTH, **settings)

    def apart() -> Tensor:
        qkv = functional.linear(x, weight).unflatten(-1, (3 * HEADS, WIDTH))
        return block_attention_qkv(qkv, offsets, num_heads=HEADS, **settings)

    outs = {"gemworks op": op(), PEER: apart()}
    grads = {n: torch.autograd.grad(o, (x, weight), dout, retain_graph=True) for n, o in outs.items()}
    for got, exact in zip((outs["gemworks op"], *grads["gemworks op"]), (outs[PEER], *grads[PEER]), strict=True):
        assert_near(got, exact, f"op {dim}")
    if check:
        return []
    del grads
    runs: dict[str, dict[str, Callable[[], object]]] = {"fwd": {}, "bwd": {}}
    for name, f in {"gemworks op": op, PEER: apart}.items():

        def backward(out: Tensor = outs[name]) -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, (x, weight), dout, retain_graph=True)

        runs["bwd"][name] = backward
        runs["fwd"][name] = torch.no_grad()(f)
    rows = []
    for direction, by_name in runs.items():
        times, errors = time_in_turn(clock, by_name, rounds=2, repeats=6)
        if errors:
            raise next(iter(errors.values()))
        for name, t in times.items():
            rows.append(
                dict.fromkeys(report.COLUMNS, "")
                | context.columns()
                | {
                    "command": "python libs/jagged/benchmarks/projected.py", "op": "block_attention projected",
                    "shape": f"B{shape.num_sequences} max{shape.max_length} block64 D{dim}", "head_dim": str(WIDTH),
                    "direction": direction, "impl": name, "law": "mean70", "mean_len": f"{total / len(lengths):.1f}",
                    "max_len": str(int(lengths.max())), "seed": "0", "ms": f"{t.ms:.4f}", "ms_p20": f"{t.ms_p20:.4f}",
                    "ms_p80": f"{t.ms_p80:.4f}", "best_peer": PEER,
                    "ratio_to_best_peer": f"{times[PEER].ms / t.ms:.3f}",
                }
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("projected.csv"))
    parser.add_argument("--check", action="store_true", help="a small shape, no times")
    args = parser.parse_args()
    device = torch.device("cuda")
    clock = Clock(device)
    context = report.Context(measure_ceilings(clock, device), device, torch.bfloat16, ())
    for dim in (128, 512):
        rows = measure(Shape(9, 300) if args.check else Shape(), dim, clock, context, args.check)
        report.print_rows(rows)
        if rows:
            report.append_csv(args.out, rows)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
