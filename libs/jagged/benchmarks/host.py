"""What a call costs on the host: forward and backward of small shapes, which the device finishes first.

    python libs/jagged/benchmarks/host.py --out host_jagged.csv

The peer is torch's own op of the same kind, through the same autograd. `ms` is wall time per forward + backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged import (
    BlockSchedule,
    TileSchedule,
    block_attention,
    flash_attention,
    gdpa,
    layer_norm,
    offsets_from_lengths,
    rms_norm,
)
from gemworks.jagged.bench import report
from gemworks.jagged.bench.timing import Clock, measure_ceilings
from torch import Tensor
from torch.nn import functional

CALLS, ROUNDS = 100, 9
Step = Callable[[], object]


def steps() -> dict[str, tuple[Step, Step, str]]:
    """Op -> (ours, peer, name of the peer)."""
    lengths = torch.tensor([64, 1, 128, 63])
    offsets, total = offsets_from_lengths(lengths).cuda(), int(lengths.sum())

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    q, k, v, x = leaf(total, 4, 128), leaf(total, 4, 128), leaf(total, 4, 128), leaf(total, 512)
    weight, bias = leaf(512), leaf(512)
    tiles, blocks = TileSchedule.build(offsets, total_q=total), BlockSchedule.make(offsets, total=total)

    def both(run: Callable[[], Tensor], *leaves: Tensor) -> Step:
        dout = torch.randn_like(run())
        return lambda: torch.autograd.grad(run(), leaves, dout)

    def padded() -> Tensor:
        q4, k4, v4 = (t.transpose(0, 1)[None] for t in (q, k, v))
        return functional.scaled_dot_product_attention(q4, k4, v4)

    sdpa = both(padded, q, k, v)
    bound: Any = {"max_length_q": 128}
    return {
        "flash_attention": (
            both(lambda: flash_attention(q, k, v, offsets, schedule=tiles, **bound), q, k, v), sdpa, "torch sdpa"
        ),
        "gdpa": (
            both(
                lambda: gdpa(q, k, v, offsets, scale=0.1, activation="fast_gelu", schedule=tiles, **bound), q, k, v
            ),
            sdpa,
            "torch sdpa",
        ),
        "block_attention": (
            both(lambda: block_attention(q, k, v, offsets, schedule=blocks, **bound), q, k, v), sdpa, "torch sdpa"
        ),
        "rms_norm": (
            both(lambda: rms_norm(x, weight), x, weight),
            both(lambda: functional.rms_norm(x, (512,), weight), x, weight),
            "torch rms_norm",
        ),
        "layer_norm": (
            both(lambda: layer_norm(x, weight, bias), x, weight, bias),
            both(lambda: functional.layer_norm(x, (512,), weight, bias), x, weight, bias),
            "torch layer_norm",
        ),
    }  # fmt: skip


def wall_ms(step: Step) -> list[float]:
    """Per call, sorted."""
    for _ in range(20):
        step()
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / CALLS * 1e3)
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("host_jagged.csv"))
    args = parser.parse_args()
    device = torch.device("cuda")
    context = report.Context(measure_ceilings(Clock(device), device), device, torch.bfloat16, ())
    rows = []
    for op, (ours, peer, name) in steps().items():
        times = {"gemworks": wall_ms(ours), name: wall_ms(peer)}
        for impl, ms in times.items():
            median = statistics.median(ms)
            ratio = statistics.median(times[name]) / median
            rows.append(
                dict.fromkeys(report.COLUMNS, "")
                | context.columns()
                | {
                    "command": "python libs/jagged/benchmarks/host.py", "op": f"{op} on the host", "shape": "B4 max128",
                    "head_dim": "" if "norm" in op else "128", "direction": "fwd+bwd", "impl": impl, "mean_len": "64",
                    "max_len": "128",
                    "ms": f"{median:.4f}", "ms_p20": f"{ms[len(ms) // 5]:.4f}", "ms_p80": f"{ms[-len(ms) // 5]:.4f}",
                    "best_peer": name, "ratio_to_best_peer": f"{ratio:.3f}",
                }
            )  # fmt: skip
    report.print_rows(rows)
    report.append_csv(args.out, rows)


if __name__ == "__main__":
    main()
