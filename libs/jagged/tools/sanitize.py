"""Every kernel once on small shapes, for compute-sanitizer: no result is looked at, its accesses are.

    python libs/jagged/tools/sanitize.py      # compiles, so that the next lines only run
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1   # or a read past one tensor lands in another
    compute-sanitizer --tool memcheck --error-exitcode 9 python libs/jagged/tools/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python libs/jagged/tools/sanitize.py attention --shard 0/4

Prints a line per call, so that a report below it belongs to that call.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gemworks.jagged import (
    AttentionBias,
    NormEpilogue,
    Rope,
    apply_rope,
    block_attention_qkv,
    flash_attention,
    flash_attention_fp8,
    flash_attention_qkv,
    gdpa,
    gdpa_fp8,
    layer_norm,
    offsets_from_lengths,
    rms_norm,
    token_map,
)
from gemworks.jagged.ops.attention_fp8.tiles import TILE, num_tiles
from gemworks.jagged.ops.token_map.op import MAX_IN, MAX_OUT
from torch import Tensor

LENGTHS = [0, 1, 63, 64, 65, 130, 0, 200]
Call = Callable[[], Tensor]


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def attention() -> Iterator[tuple[str, Call]]:
    offsets = offsets_from_lengths(torch.tensor(LENGTHS)).cuda()
    total, b = sum(LENGTHS), len(LENGTHS)
    for width, causal, dtype in itertools.product((64, 128), (False, True), (torch.bfloat16, torch.float32)):
        q, k, v = (leaf(total, 2, width, dtype=dtype) for _ in range(3))
        options: dict[str, Any] = {"max_length_q": 256, "causal": causal}
        name = f"{width} causal {causal} {dtype}"
        yield f"flash_attention {name}", lambda q=q, k=k, v=v, o=options: flash_attention(q, k, v, offsets, **o)
        yield (
            f"gdpa {name}",
            lambda q=q, k=k, v=v, o=options: gdpa(q, k, v, offsets, scale=0.1, activation="fast_gelu", **o),
        )
    for window in (40, (150, 0)):
        q, k, v = (leaf(total, 2, 128) for _ in range(3))
        options = {"max_length_q": 256, "window": window}
        yield (
            f"flash_attention window {window}",
            lambda q=q, k=k, v=v, o=options: flash_attention(q, k, v, offsets, **o),
        )
        yield (
            f"gdpa window {window}",
            lambda q=q, k=k, v=v, o=options: gdpa(q, k, v, offsets, scale=0.1, activation="silu", **o),
        )
    q, k, v = leaf(total, 2, 128), leaf(b, 256, 2, 128), leaf(b, 256, 2, 128)
    yield "gdpa kv256", lambda: gdpa(q, k, v, offsets, max_length_q=256, scale=0.1, activation="fast_gelu")
    for rows in (64, 200):
        s, k2, v2 = leaf(rows, 2, 128), leaf(total, 2, 128), leaf(total, 2, 128)
        yield (
            f"flash_attention seeds{rows}",
            lambda s=s, k=k2, v=v2: flash_attention(s, k, v, None, offsets, max_length_k=256, shared_query=True),
        )
        yield (
            f"gdpa seeds{rows}",
            lambda s=s, k=k2, v=v2: gdpa(s, k, v, None, offsets, max_length_k=256, shared_query=True, scale=0.1),
        )


def fronts() -> Iterator[tuple[str, Call]]:
    """What is fused before and after attention: QK-norm, rope, bias, the norm of a residual stream."""
    offsets = offsets_from_lengths(torch.tensor(LENGTHS)).cuda()
    total, b = sum(LENGTHS), len(LENGTHS)
    rope = Rope().tables(offsets, 128, total=total)
    yield "apply_rope", lambda: apply_rope(leaf(total, 2, 128), rope)
    for norm, tables, end in ((True, None, False), (True, rope, False), (False, rope, False), (True, rope, True)):
        yield (
            f"flash_attention_qkv norm {norm} rope {tables is not None} epilogue {end}",
            lambda n=norm, t=tables, e=end: flash_attention_qkv(
                leaf(total, 6, 128), offsets, num_heads=2, max_length=256, qk_norm=n, rope=t, backward_epilogue=e
            ),
        )
    times = torch.randint(0, 5000, (total,), device="cuda")
    for position, time in ((9, 0), (0, 8), (9, 8)):
        tables = [leaf(n, 2, dtype=torch.float32) if n else None for n in (position, time)]
        bias = AttentionBias(tables[0], tables[1], times if time else None)
        x = leaf(total, 2, 64)
        yield (
            f"flash_attention bias {position} {time}",
            lambda x=x, bias=bias: flash_attention(x, x, x, offsets, max_length_q=256, bias=bias),
        )
    for kind, full in itertools.product(("rms", "layer"), (False, True)):
        extra: dict[str, Any] = {"kind": kind}
        if full:
            extra |= {"residual": leaf(total, 2, 128), "add": leaf(total, 2, 128), "weight": leaf(256)}
        w = leaf(b, 256, 2, 128)
        yield (
            f"gdpa epilogue {kind} full {full}",
            lambda e=extra, w=w: gdpa(
                leaf(total, 2, 128), w, w, offsets, max_length_q=256, scale=0.1, epilogue=NormEpilogue(**e)
            ),
        )


def blocks() -> Iterator[tuple[str, Call]]:
    offsets = offsets_from_lengths(torch.tensor(LENGTHS)).cuda()
    total = sum(LENGTHS) + 3
    tables = Rope().tables(offsets, 128, total=total)
    for block, norm, rope in itertools.product((32, 64, 128), (False, True), (None, tables)):
        qkv = leaf(total, 6, 128)
        options: dict[str, Any] = {"num_heads": 2, "max_length": 256, "block": block, "qk_norm": norm, "rope": rope}
        yield (
            f"block_attention {block} norm {norm} rope {rope is not None}",
            lambda x=qkv, o=options: block_attention_qkv(x, offsets, **o),
        )


def fp8() -> Iterator[tuple[str, Call]]:
    """Attention of codes: in tiles, which the FP8 units multiply, and in rows, which are multiplied out."""
    offsets = offsets_from_lengths(torch.tensor(LENGTHS)).cuda()
    total, count = sum(LENGTHS), num_tiles(sum(LENGTHS), len(LENGTHS))

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 0x70, shape, dtype=torch.uint8, device="cuda")

    def ones(*shape: int) -> Tensor:
        return torch.full(shape, 127, dtype=torch.uint8, device="cuda")

    for width, tiled in itertools.product((64, 128), (True, False)):
        rows, blocks = (total, 2, width), (count, 2) if tiled else (total, 2)
        args = (codes(*rows), codes(*rows), codes(count, 2, width, TILE) if tiled else codes(*rows))
        args += (ones(*blocks), ones(*blocks), ones(*blocks), offsets)
        origins = (leaf(*rows), leaf(*rows), leaf(*rows))
        name, options = f"{width} {'tiles' if tiled else 'rows'}", {"max_length_q": 256, "origins": origins}
        yield f"flash_attention_fp8 {name}", lambda a=args, o=options: flash_attention_fp8(*a, **o)
        yield f"gdpa_fp8 {name}", lambda a=args, o=options: gdpa_fp8(*a, scale=0.1, activation="fast_gelu", **o)


def norms() -> Iterator[tuple[str, Call]]:
    for width in (7, 96, 128, 1000, 8192):
        x, r, w, b = leaf(33, width), leaf(33, width), leaf(width), leaf(width)
        yield f"layer_norm {width}", lambda x=x, r=r, w=w, b=b: layer_norm(x, w, b, residual=r)[0]
        yield f"rms_norm {width}", lambda x=x, r=r: rms_norm(x, add=r)


def maps() -> Iterator[tuple[str, Call]]:
    """Sizes that fill tiles and that do not, up to the largest that the kernel takes."""
    for b, n, k, d in ((5, 32, 256, 512), (1, 1, 1, 1), (3, 17, 100, 70), (2, MAX_IN, MAX_OUT, 129)):
        x, weight, base = leaf(b, n, d), leaf(k, n, dtype=torch.float32), leaf(k, d, dtype=torch.float32)
        yield f"token_map {b} {n} {k} {d}", lambda x=x, w=weight, y=base: token_map(x, w, y)


def main() -> None:
    made = (attention, fronts, blocks, fp8, norms, maps)
    suites = {make.__name__: make for make in made}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="*", default=list(suites), help=f"of {', '.join(suites)}; all by default")
    parser.add_argument("--only", default="", help="calls whose name contains this")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every n-th call, for n processes side by side")
    args = parser.parse_args()
    index, count = map(int, args.shard.split("/"))
    calls = [call for suite in args.suite for call in suites[suite]() if args.only in call[0]]
    for name, call in calls[index::count]:
        print(name, flush=True)
        call().float().sum().backward()
        torch.cuda.synchronize()
    print("done", flush=True)


if __name__ == "__main__":
    main()
