"""Times GDPA with a shared query on a GPU, of whole sequences and in chunks of keys (`gdpa(..., key_chunk=...)`).

    python libs/jagged/benchmarks/pool_chunks.py --prepare                # beforehand: compiles what is timed
    python libs/jagged/benchmarks/pool_chunks.py --out pool_chunks.csv

Two batches of 256 queries: 16 sequences of up to 16,384 keys, where whole sequences are 64 programs backward on a GPU
of 132 multiprocessors, and 128 of up to 2,048, where chunks should cost something. Chunks are compared with whole
sequences before anything is timed, and timed in turns with them.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged import gdpa, offsets_from_lengths
from gemworks.jagged.bench import report
from gemworks.jagged.bench.bandwidth import assert_near
from gemworks.jagged.bench.cases import draw_lengths
from gemworks.jagged.bench.timing import Clock, measure_ceilings, time_in_turn
from torch import Tensor

HEADS, WIDTH, SEEDS = 4, 128, 256
BATCHES = ((16, 16384), (128, 2048))
CHUNKS = (None, 1024, 2048, 4096)
SEED = 0
COLUMNS: tuple[str, ...] = (
    *("op", "shape", "head_dim", "direction", "impl", "setting", "error", "note"),
    *report.COLUMNS[report.COLUMNS.index("dtype") :],
)


class Batch:
    """One shared query over keys and values of `lengths`, and the gradient of what comes out."""

    def __init__(self, lengths: Tensor, longest: int, seeds: int, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(SEED)
        total = int(lengths.sum())

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator).to(dtype)

        self.longest, self.offsets = longest, offsets_from_lengths(lengths).to(device)
        self.leaves = [random(n, HEADS, WIDTH).requires_grad_() for n in (seeds, total, total)]
        self.d_out = random(len(lengths), seeds, HEADS, WIDTH)

    def forward(self, chunk: int | None) -> Tensor:
        q, k, v = self.leaves
        return gdpa(
            q, k, v, None, self.offsets, max_length_k=self.longest, scale=WIDTH**-0.5, activation="fast_gelu",
            shared_query=True, key_chunk=chunk,
        )  # fmt: skip

    def runs(self, chunk: int | None) -> dict[str, Callable[[], object]]:
        out = self.forward(chunk)

        def forward() -> None:
            with torch.no_grad():
                self.forward(chunk)

        return {
            "fwd": forward,
            "bwd": partial(torch.autograd.grad, out, self.leaves, self.d_out, retain_graph=True),
        }

    def compare(self, chunk: int | None) -> float:
        """The worst relative error against whole sequences, of values and gradients."""
        worst, results = 0.0, []
        for c in (chunk, None):
            out = self.forward(c)
            results.append([out.detach(), *torch.autograd.grad(out, self.leaves, self.d_out)])
        for got, whole in zip(*results, strict=True):
            assert bool(got.isfinite().all()), "not finite"
            assert_near(got, whole, f"chunks of {chunk}", 1.2e-2)
            worst = max(worst, float((got.double() - whole.double()).norm() / whole.double().norm()))
        return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("pool_chunks.csv"))
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument(
        "--scale-down", type=int, default=1, help="divides lengths and queries, for tests without a GPU"
    )
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    down = args.scale_down
    if args.prepare:
        for _, longest in BATCHES:
            batch = Batch(torch.tensor([longest, 3]), longest, SEEDS // down, device, dtype)
            for chunk in CHUNKS:
                batch.compare(chunk)
        return
    clock = Clock(device)
    ceilings = measure_ceilings(clock, device)
    common = report.Context(ceilings, device, dtype, ()).columns()
    common["command"] = f"python libs/jagged/benchmarks/pool_chunks.py {shlex.join(sys.argv[1:])}"
    common |= {"op": "gdpa", "head_dim": str(WIDTH), "impl": report.OURS, "law": "uniform", "seed": str(SEED)}
    with args.out.open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for size, longest in BATCHES:
            longest, seeds = longest // down, SEEDS // down
            lengths = draw_lengths("uniform", size, longest, SEED)
            batch = Batch(lengths, longest, seeds, device, dtype)
            common |= {"shape": f"B{size} max{longest} seeds{seeds}", "mean_len": f"{lengths.double().mean():.1f}"}
            common["max_len"] = str(int(lengths.max()))
            flops = 4.0 * seeds * int(lengths.sum()) * HEADS * WIDTH
            runs: dict[str, dict[str, Callable[[], object]]] = {"fwd": {}, "bwd": {}}
            notes: dict[str, dict[str, Any]] = {}
            for chunk in CHUNKS:
                size_of_chunk = None if chunk is None else max(chunk // down, 1)
                name = "whole" if size_of_chunk is None else f"key_chunk={size_of_chunk}"
                notes[name] = {"error": f"{batch.compare(size_of_chunk):.1e}"}
                for direction, run in batch.runs(size_of_chunk).items():
                    runs[direction][name] = run
            for direction, by_name in runs.items():
                times, errors = time_in_turn(clock, by_name, rounds=3, repeats=5)
                for name in by_name:
                    row = common | {"direction": direction, "setting": name} | notes[name]
                    if name in errors:
                        row["note"] = f"{type(errors[name]).__name__}: {' '.join(str(errors[name]).split())[:120]}"
                    else:
                        t, factor = times[name], 2.5 if direction == "bwd" else 1.0
                        row |= {"ms": f"{t.ms:.4f}", "ms_p20": f"{t.ms_p20:.4f}", "ms_p80": f"{t.ms_p80:.4f}"}
                        row |= {"tflops": f"{factor * flops / t.ms / 1e9:.4g}", "bwd_factor": "2.5"}
                    writer.writerow(row)
                    print("  ".join(row.get(c, "") for c in ("shape", "direction", "setting", "ms", "tflops", "error")))
                file.flush()


if __name__ == "__main__":
    main()
