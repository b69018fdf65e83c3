"""Time the reference backend on one CPU thread at the shapes of the GEM `small` preset: ms of forward and backward.

    OMP_NUM_THREADS=1 python libs/jagged/benchmarks/reference_cpu.py [--only NAME]

Lengths: two thirds of the batch uniform on [0, 40], the rest on [40, 256]; B 128, N 2, H 64, PFFN K 128, 64 seeds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from gemworks.jagged import (
    AttentionBias,
    Rope,
    block_attention,
    flash_attention,
    gdpa,
    layer_norm,
    mean_pool,
    offsets_from_lengths,
    rms_norm,
    seed_pool,
)
from torch import Tensor


def time_ms(run: Callable[[], Tensor], leaves: list[Tensor], repeats: int) -> tuple[float, float]:
    """Smallest CPU time of forward and backward, in ms: what other processes on the machine take does not count."""
    forward, backward = [], []
    grad = torch.randn_like(run())
    for _ in range(repeats + 2):
        for x in leaves:
            x.grad = None
        t0 = time.process_time()
        out = run()
        t1 = time.process_time()
        out.backward(grad)
        t2 = time.process_time()
        forward.append((t1 - t0) * 1e3)
        backward.append((t2 - t1) * 1e3)
    return min(forward[2:]), min(backward[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the rows whose name contains this")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seed = 0
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 41, (128,), generator=generator)
    lengths[::3] = torch.randint(40, 257, (43,), generator=generator)
    offsets = offsets_from_lengths(lengths)
    total, num_heads, head_dim, rows, seeds = int(offsets[-1]), 2, 64, 128, 64
    shape = (total, num_heads, head_dim)

    def leaf(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).requires_grad_()

    q, k, v, kv_k, kv_v = leaf(*shape), leaf(*shape), leaf(*shape), leaf(128, rows, 2, 64), leaf(128, rows, 2, 64)
    shared, x, y = leaf(seeds, num_heads, head_dim), leaf(total, 128), leaf(total, 128)
    leaves = [q, k, v, kv_k, kv_v, shared, x, y]
    rope = Rope(time_fraction=0.5).tables(offsets, head_dim, total=total, dt=torch.rand(total) * 1e6)
    bias = AttentionBias(leaf(129, 2), leaf(32, 2), torch.arange(total) * 60, None, 60)
    length: Any = {"max_length_q": 256}
    cases: dict[str, Callable[[], Tensor]] = {
        "flash full": lambda: flash_attention(q, k, v, offsets, **length),
        "flash causal": lambda: flash_attention(q, k, v, offsets, causal=True, **length),
        "flash window 100": lambda: flash_attention(q, k, v, offsets, window=100, **length),
        "flash qk_norm rope": lambda: flash_attention(q, k, v, offsets, qk_norm=True, rope=rope, **length),
        "flash bias": lambda: flash_attention(q, k, v, offsets, bias=bias, **length),
        "block 64": lambda: block_attention(q, k, v, offsets, **length),
        "block 64 qk_norm rope": lambda: block_attention(q, k, v, offsets, qk_norm=True, rope=rope, **length),
        "pffn gelu": lambda: gdpa(q, kv_k, kv_v, offsets, scale=0.125, activation="gelu", **length),
        "pffn fast_gelu": lambda: gdpa(q, kv_k, kv_v, offsets, scale=0.125, activation="fast_gelu", **length),
        "gdpa self gelu": lambda: gdpa(q, k, v, offsets, scale=0.125, activation="gelu", **length),
        "seed pool softmax": lambda: seed_pool(shared, k, v, offsets, max_length_k=256),
        "seed pool gelu": lambda: seed_pool(shared, k, v, offsets, max_length_k=256, activation="gelu"),
        "layer_norm": lambda: layer_norm(x),
        "rms_norm add": lambda: rms_norm(x, add=y),
        "mean pool": lambda: mean_pool(x, offsets),
    }
    print(f"seed {seed}, B 128, T {total}, mean {total / 128:.1f}, max {int(lengths.max())}, torch {torch.__version__}")
    print("matmul ceiling: ", end="")
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    start = time.process_time()
    for _ in range(3):
        torch.mm(a, b)
    print(f"{3 * 2 * 1024**3 / (time.process_time() - start) / 1e9:.0f} GFLOP/s")
    for name, run in cases.items():
        if args.only in name:
            forward, backward = time_ms(run, leaves, args.repeats)
            print(f"{name:24s} forward {forward:8.2f} ms   backward {backward:8.2f} ms")


if __name__ == "__main__":
    main()
