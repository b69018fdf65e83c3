"""Norms and BlockAttention against their peers on one GPU: checks, then times, then a table and a CSV.

    python libs/jagged/benchmarks/tile_kernels.py [--only PATTERN] [--csv FILE] [--sweep] [--smoke]

`norm_rows` and `block_rows` yield the same rows to a caller. `--sweep` times every configuration of the kernels instead
of the peers; `--smoke` runs tiny shapes, on a CPU too.

Letters: T packed rows, N heads, H head width.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged import (
    BlockSchedule,
    Rope,
    RopeTables,
    attention_flops,
    block_attention,
    block_attention_qkv,
    layer_norm,
    num_pairs,
    offsets_from_lengths,
    rms_norm,
)
from torch import Tensor
from torch.nn import functional

Row = dict[str, Any]
Run = Callable[[], Any]
COLUMNS = (
    *("op", "shape", "head_dim", "direction", "impl"),
    *("dtype", "law", "mean_len", "max_len", "seed", "ms", "ms_p20", "ms_p80", "tflops", "gbps", "bwd_factor"),
    *("roofline_fraction", "best_peer", "ratio_to_best_peer", "copy_gbps", "bf16_tflops"),
    *("gpu", "num_gpus", "clock_mhz", "command", "commit", "torch", "triton"),
)
OURS = "gemworks"
SEED = 0


def time_all(
    runs: dict[str, Run], device: torch.device, *, rounds: int = 5, repeats: int = 8
) -> dict[str, list[float]]:
    """Milliseconds of every call, the implementations taking turns so that clocks and heat meet them alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(3):
            run()
    for _ in range(rounds):
        for name, run in runs.items():
            run()  # refills the caches with its own data
            times[name] += [_time(run, device) for _ in range(repeats)]
    return times


def _time(run: Run, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    run()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event)


@lru_cache(maxsize=1)
def ceilings(device: torch.device) -> tuple[float, float]:
    """Measured (copy GB/s counting read and write, bf16 matmul TFLOP/s) of this device, on random data."""
    cuda = device.type == "cuda"
    x = torch.randn(1 << (29 if cuda else 18), device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    size = 8192 if cuda else 64
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = time_all({"copy": lambda: y.copy_(x), "mm": lambda: torch.mm(a, b)}, device)
    copy_ms, mm_ms = (statistics.median(times[name]) for name in ("copy", "mm"))
    return 4 * x.numel() / copy_ms / 1e6, 2 * size**3 / mm_ms / 1e9


@lru_cache(maxsize=1)
def provenance(device: torch.device) -> Row:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    copy_gbps, bf16_tflops = ceilings(device)
    cuda = device.type == "cuda"
    return {
        "copy_gbps": round(copy_gbps, 1),
        "bf16_tflops": round(bf16_tflops, 1),
        "gpu": torch.cuda.get_device_name(device) if cuda else "cpu",
        "num_gpus": int(cuda),
        "clock_mhz": _output("nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits") if cuda else "",
        "command": " ".join(["python", *sys.argv]),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "torch": torch.__version__,
        "triton": triton_version,
    }


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().splitlines()[0]


def assert_near(got: Tensor, truth: Tensor, what: str, bound: float = 2e-2) -> None:
    """Relative error in the norm; a benchmark whose check fails prints no number."""
    got, truth = got.detach().double(), truth.detach().double()
    error = float((got - truth).norm() / truth.norm().clamp(min=1e-30))
    if not error <= bound:
        raise AssertionError(f"{what}: relative error {error:.2e}, expected <= {bound:.0e}")


def rows_of(
    runs: dict[str, Run], device: torch.device, *, num_bytes: float, flops: float | None, common: Row
) -> Iterator[Row]:
    """One row per implementation; the ratio is to the fastest that is not ours."""
    times = time_all(runs, device)
    median = {name: statistics.median(ts) for name, ts in times.items()}
    peers = {name: ms for name, ms in median.items() if not name.startswith(OURS)}
    best = min(peers, key=lambda name: peers[name]) if peers else ""
    copy_gbps = ceilings(device)[0]
    for name, ts in times.items():
        deciles = statistics.quantiles(ts, n=10)
        gbps = num_bytes / median[name] / 1e6
        yield (
            common
            | provenance(device)
            | {
                "impl": name,
                "ms": round(median[name], 4),
                "ms_p20": round(deciles[1], 4),
                "ms_p80": round(deciles[7], 4),
                "tflops": "" if flops is None else round(flops / median[name] / 1e9, 1),
                "gbps": round(gbps, 1),
                "roofline_fraction": round(gbps / copy_gbps, 4),
                "best_peer": best,
                "ratio_to_best_peer": round(median[best] / median[name], 3) if best else "",
            }
        )


def backward_of(out: Tensor | tuple[Tensor, ...], leaves: list[Tensor], cotangents: list[Tensor]) -> Run:
    outs = [out] if isinstance(out, Tensor) else list(out)
    return lambda: torch.autograd.grad(outs, leaves, cotangents, retain_graph=True)


# Norms

NORM_VARIANTS = ("rms_norm", "rms_norm residual", "rms_norm add", "layer_norm", "layer_norm affine residual")


def _peer_norm(variant: str) -> Callable[..., Any]:
    """The same function in plain PyTorch, for eager mode and for torch.compile."""

    def norm(x: Tensor, *rest: Tensor) -> Any:
        others = list(rest)
        h = x + others.pop(0) if "residual" in variant else x
        weight, bias = (others.pop(0), others.pop(0)) if "affine" in variant else (None, None)
        width = h.shape[-1:]
        if variant.startswith("layer"):
            y = functional.layer_norm(h, width, weight, bias, 1e-5)
        else:
            y = functional.rms_norm(h, width, weight, 1e-5)
        if "add" in variant:
            y = y + others.pop(0)
        return (y, h) if "residual" in variant else y

    return norm


def _our_norm(variant: str) -> Callable[..., Any]:
    public: Any = layer_norm if variant.startswith("layer") else rms_norm

    def norm(x: Tensor, *rest: Tensor) -> Any:
        others = list(rest)
        kwargs: dict[str, Any] = {"residual": others.pop(0)} if "residual" in variant else {}
        if "affine" in variant:
            kwargs |= {"weight": others.pop(0), "bias": others.pop(0)}
        if "add" in variant:
            kwargs |= {"add": others.pop(0)}
        return public(x, eps=1e-5, **kwargs)

    return norm


def norm_rows(
    device: torch.device,
    *,
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192),
    num_values: int = 1 << 28,
    dtype: torch.dtype = torch.bfloat16,
    variants: tuple[str, ...] = NORM_VARIANTS,
) -> Iterator[Row]:
    """Forward and backward of every variant at every width; `num_values` elements per tensor."""
    for variant in variants:
        for width in widths:
            torch._dynamo.reset()  # each width its own graph, or it would become a symbol and slow the peer down
            rows = num_values // width
            generator = torch.Generator(device).manual_seed(SEED)

            def random(*shape: int, generator: torch.Generator = generator, dtype: torch.dtype = dtype) -> Tensor:
                return torch.randn(*shape, generator=generator, device=device, dtype=dtype).requires_grad_()

            args = [random(rows, width)]
            if "residual" in variant or "add" in variant:
                args.append(random(rows, width))
            if "affine" in variant:
                args += [random(width), random(width)]
            runs: dict[str, Callable[..., Any]] = {OURS: _our_norm(variant)}
            runs |= {"torch.compile": torch.compile(_peer_norm(variant)), "torch eager": _peer_norm(variant)}
            outs = {name: run(*args) for name, run in runs.items()}
            pairs = {n: list(o) if isinstance(o, tuple) else [o] for n, o in outs.items()}
            cotangents = [random(rows, width).detach() for _ in pairs[OURS]]
            _check_norm(variant, args, pairs[OURS], cotangents)
            streams = len(pairs[OURS])
            common: Row = {
                "op": variant,
                "shape": f"{rows}x{width}",
                "dtype": str(dtype).removeprefix("torch."),
                "seed": SEED,
            }
            tensor_bytes = rows * width * dtype.itemsize

            def forward(run: Callable[..., Any], args: list[Tensor] = args) -> Run:
                def call() -> None:
                    with torch.no_grad():
                        run(*args)

                return call

            # Each tensor once: x (and residual or add) in, y (and h) out; then dy (and dh) and h in, dx out.
            forward_bytes = tensor_bytes * (len([a for a in args if a.dim() == 2]) + streams)
            yield from rows_of(
                {name: forward(run) for name, run in runs.items()},
                device,
                num_bytes=forward_bytes,
                flops=None,
                common=common | {"direction": "fwd"},
            )
            yield from rows_of(
                {name: backward_of(tuple(p), args, cotangents) for name, p in pairs.items()},
                device,
                num_bytes=tensor_bytes * (2 + streams),
                flops=None,
                common=common | {"direction": "bwd"},
            )


def _check_norm(variant: str, args: list[Tensor], outs: list[Tensor], cotangents: list[Tensor]) -> None:
    """The first and last rows against float64, and finite everywhere."""
    grads = torch.autograd.grad(outs, args, cotangents, retain_graph=True)
    assert all(bool(x.isfinite().all()) for x in (*outs, *grads)), variant
    for part in (slice(0, 64), slice(-64, None)):
        cut = [(a[part] if a.dim() == 2 else a).detach().double().requires_grad_() for a in args]
        truth = _peer_norm(variant)(*cut)
        truths = list(truth) if isinstance(truth, tuple) else [truth]
        exact = torch.autograd.grad(truths, cut, [c[part].double() for c in cotangents])
        for got, expected in zip(outs, truths, strict=True):
            assert_near(got[part], expected, f"{variant} forward")
        for arg, got, expected in zip(args, grads, exact, strict=True):
            if arg.dim() == 2:  # the sums over all rows are checked in the tests
                assert_near(got[part], expected, f"{variant} backward")


# BlockAttention

BLOCK_VARIANTS = ("plain", "rope", "rope fp16 tables", "norm rope", "norm rope qkv")


def block_lengths(num_sequences: int, max_length: int) -> Tensor:
    """Uniform on [0.4, 1] of the longest: mean 0.7."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(int(0.4 * max_length), max_length + 1, (num_sequences,), generator=generator)


def _varlen(device: torch.device) -> Callable[..., Any] | None:
    if device.type != "cuda":
        print("torch varlen_attn: not on a CPU", file=sys.stderr)
        return None
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def block_rows(
    device: torch.device,
    *,
    num_sequences: int = 1152,
    max_length: int = 2000,
    num_heads: int = 4,
    head_dim: int = 128,
    block: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    variants: tuple[str, ...] = BLOCK_VARIANTS,
) -> Iterator[Row]:
    """Forward and backward; the peer attends over the same blocks, with compiled norm and rope where we fuse them."""
    lengths = block_lengths(num_sequences, max_length)
    offsets = offsets_from_lengths(lengths).to(device)
    total = int(lengths.sum())
    schedule = BlockSchedule.make(offsets, total=total, block=block)
    table = schedule.table_S3[schedule.table_S3[:, 1] > 0]
    cuts = torch.cat([table[:, 0], table.new_full((1,), total)]).to(torch.int32)
    ages = torch.rand(total, device=device) * 1e6
    tables = Rope(time_fraction=0.5).tables(offsets, head_dim, total=total, dt=ages)
    half = RopeTables(tables.cos_TJ.half(), tables.sin_TJ.half())
    generator = torch.Generator(device).manual_seed(SEED)
    shape = (total, num_heads, head_dim)
    qkv = torch.randn(total, 3 * num_heads, head_dim, generator=generator, device=device, dtype=dtype)
    q, k, v = (x.contiguous().requires_grad_() for x in qkv.split(num_heads, dim=1))
    qkv.requires_grad_()
    dout = torch.randn(*shape, generator=generator, device=device, dtype=dtype)
    varlen = _varlen(device)
    flops = attention_flops(int(num_pairs(lengths, block=block)), num_heads, head_dim)
    tensor_bytes = total * num_heads * head_dim * dtype.itemsize
    for variant in variants:
        rope = None if "rope" not in variant else half if "fp16" in variant else tables
        kwargs: dict[str, Any] = {"block": block, "rope": rope, "qk_norm": "norm" in variant, "schedule": schedule}
        leaves, peer_leaves = ([qkv] if "qkv" in variant else [q, k, v]), [q, k, v]

        def ours(kwargs: dict[str, Any] = kwargs, packed: bool = "qkv" in variant) -> Tensor:
            if packed:
                return block_attention_qkv(qkv, offsets, num_heads=num_heads, max_length=max_length, **kwargs)
            return block_attention(q, k, v, offsets, max_length_q=max_length, **kwargs)

        def front(x: Tensor, rope: RopeTables | None = rope, norm: bool = "norm" in variant) -> Tensor:
            if norm:
                x = functional.rms_norm(x, x.shape[-1:], None, 1e-6)
            if rope is None:
                return x
            a, b = x.float().chunk(2, dim=-1)
            cos, sin = rope.cos_TJ[:, None], rope.sin_TJ[:, None]
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

        _check_block(ours(), leaves, dout, offsets, kwargs, num_heads)
        runs: dict[str, Callable[[], Tensor]] = {OURS: ours}
        if varlen is not None:
            torch._dynamo.reset()
            prepare = torch.compile(front) if variant != "plain" else front

            def peer(prepare: Any = prepare) -> Tensor:
                return varlen(prepare(q), prepare(k), v, cuts, cuts, block, block)

            runs["varlen_attn"] = peer
            assert_near(peer(), ours(), f"varlen_attn {variant}")
        if varlen is not None and variant != "plain":  # the harder bar: the peer need not norm or turn anything
            runs["varlen_attn without rope"] = lambda: varlen(q, k, v, cuts, cuts, block, block)
        table_bytes = 0 if rope is None else 2 * rope.cos_TJ.numel() * rope.cos_TJ.element_size()
        common: Row = {
            "op": f"block_attention {variant}",
            "shape": f"B{num_sequences} max {max_length} block {block} {num_heads}x{head_dim}",
            "head_dim": head_dim,
            "dtype": str(dtype).removeprefix("torch."),
            "law": "uniform 0.4-1",
            "mean_len": round(total / num_sequences, 1),
            "max_len": int(lengths.max()),
            "seed": SEED,
        }

        def forward(run: Callable[[], Tensor]) -> Run:
            def call() -> None:
                with torch.no_grad():
                    run()

            return call

        yield from rows_of(
            {name: forward(run) for name, run in runs.items()},
            device,
            num_bytes=4 * tensor_bytes + table_bytes,
            flops=flops,
            common=common | {"direction": "fwd"},
        )
        outs = {name: run() for name, run in runs.items()}
        yield from rows_of(
            {n: backward_of(o, leaves if n == OURS else peer_leaves, [dout]) for n, o in outs.items()},
            device,
            num_bytes=7 * tensor_bytes + table_bytes,
            flops=2.5 * flops,
            common=common | {"direction": "bwd", "bwd_factor": 2.5},
        )


def _check_block(
    out: Tensor, leaves: list[Tensor], dout: Tensor, offsets: Tensor, kwargs: dict[str, Any], num_heads: int
) -> None:
    """A few sequences against float64, and finite everywhere."""
    grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert all(bool(x.isfinite().all()) for x in (out, *grads))
    qkv, grad = (torch.cat(list(xs), dim=1) if len(xs) == 3 else xs[0] for xs in (leaves, grads))
    edges = offsets.tolist()
    rope, settings = kwargs["rope"], {name: kwargs[name] for name in ("block", "qk_norm")}
    for b in (0, len(edges) // 2, len(edges) - 2):
        part = slice(edges[b], edges[b + 1])
        exact = qkv[part].detach().double().requires_grad_()
        tables = None if rope is None else RopeTables(rope.cos_TJ[part].double(), rope.sin_TJ[part].double())
        alone = torch.tensor([0, exact.shape[0]], device=out.device)
        truth = block_attention_qkv(
            exact, alone, num_heads=num_heads, max_length=exact.shape[0], rope=tables, **settings
        )
        assert_near(out[part], truth, "block_attention forward")
        (expected,) = torch.autograd.grad(truth, exact, dout[part].double())
        assert_near(grad[part], expected, "block_attention backward")


# Configurations


def sweep(device: torch.device, pattern: str = "") -> Iterator[tuple[str, str, float, float]]:
    """(kernel, configuration, ms, fraction of the copy bandwidth) of every configuration worth trying."""
    from gemworks.jagged.ops.block_attention.formulas import BlockArgs
    from gemworks.jagged.ops.block_attention.launch import (
        BlockConfig,
        block_attention_backward,
        block_attention_forward,
    )
    from gemworks.jagged.ops.norms.launch import NormConfig, norm_backward, norm_forward

    copy_gbps = ceilings(device)[0]

    def timed(kernel: str, config: Any, run: Run, num_bytes: float) -> Iterator[tuple[str, str, float, float]]:
        if not re.search(pattern, kernel):
            return
        try:
            ms = statistics.median(time_all({"": run}, device, rounds=3)[""])
        except Exception as error:  # a configuration that needs more registers or memory than there are
            print(f"{kernel} {config}: {type(error).__name__} {str(error)[:120]}", file=sys.stderr)
            return
        yield kernel, str(config), ms, num_bytes / ms / 1e6 / copy_gbps

    for width in (64, 128, 256, 512, 1024, 2048, 8192):
        x, r, dy = (torch.randn((1 << 28) // width, width, device=device, dtype=torch.bfloat16) for _ in range(3))
        weight = torch.randn(width, device=device)
        size = x.numel() * 2
        for values in (512, 1024, 2048, 4096, 8192):
            for warps in (1, 2, 4, 8, 16):
                if values < width or not 8 <= values // (32 * warps) <= 64:
                    continue
                config = NormConfig(values // width, warps)

                def run_forward(x: Tensor = x, r: Tensor = r, config: NormConfig = config) -> Any:
                    return norm_forward(x, None, None, r, None, eps=1e-6, center=False, config=config)

                def run_backward(
                    x: Tensor = x,
                    dy: Tensor = dy,
                    weight: Tensor | None = None,
                    bias: torch.dtype | None = None,
                    config: NormConfig = config,
                ) -> Any:
                    return norm_backward(dy, None, x, weight, bias, eps=1e-6, center=bias is not None, config=config)

                yield from timed(f"rms_norm residual fwd {width}", config, run_forward, 4 * size)
                yield from timed(f"rms_norm bwd {width}", config, run_backward, 3 * size)
                for stages in (1, 3):
                    staged = NormConfig(config.rows, config.num_warps, stages)

                    def run_affine(run: Any = run_backward, weight: Tensor = weight, staged: Any = staged) -> Any:
                        return run(weight=weight, bias=torch.float32, config=staged)

                    yield from timed(f"layer_norm affine bwd {width}", staged, run_affine, 3 * size)
    lengths = block_lengths(1152, 2000)
    offsets, total = offsets_from_lengths(lengths).to(device), int(lengths.sum())
    q, k, v, dout, dq, dk, dv = (torch.randn(total, 4, 128, device=device, dtype=torch.bfloat16) for _ in range(7))
    tables = Rope(time_fraction=0.0).tables(offsets, 128, total=total)
    size = q.numel() * 2
    for block in (64, 32, 128):
        table = BlockSchedule.make(offsets, total=total, block=block).table_S3
        for rope, norm in ((None, False), (torch.float32, False), (torch.float32, True), (torch.float16, True)):
            cos, sin = (None, None) if rope is None else (tables.cos_TJ.to(rope), tables.sin_TJ.to(rope))
            args = BlockArgs(table, cos, sin, 128**-0.5, block, False, norm, 1e-6)
            extra = 0 if cos is None else 2 * cos.numel() * cos.element_size()
            for warps in (4, 8):
                for cap in (None, 80, 128, 168, 200):
                    if cap is not None and cap * warps * 32 > 65536:
                        continue
                    config = BlockConfig(warps, cap)

                    def block_forward(args: BlockArgs = args, config: BlockConfig = config) -> Any:
                        return block_attention_forward(q, k, v, args, out=dq, config=config)

                    def block_backward(args: BlockArgs = args, config: BlockConfig = config) -> Any:
                        return block_attention_backward(dout, q, k, v, dq, dk, dv, args, config=config)

                    what = f"{block} rope {rope} norm {norm}"
                    yield from timed(f"block fwd {what}", config, block_forward, 4 * size + extra)
                    yield from timed(f"block bwd {what}", config, block_backward, 7 * size + extra)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="ops whose name matches this pattern")
    parser.add_argument("--csv", type=Path, help="write the rows here")
    parser.add_argument("--sweep", action="store_true", help="time configurations of the kernels, not peers")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes: does it run, are the checks right")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not options.smoke:
        parser.error("no CUDA device here; --smoke runs tiny shapes on the CPU")
    print("copy {:.0f} GB/s, bf16 matmul {:.0f} TFLOP/s".format(*ceilings(device)), flush=True)
    if options.sweep:
        for kernel, config, ms, fraction in sweep(device, options.only):
            print(f"{kernel:44s} {config:60s} {ms:8.3f} ms {100 * fraction:5.1f} %", flush=True)
        return
    tiny: dict[str, Any] = {"num_sequences": 5, "max_length": 150, "num_heads": 2, "head_dim": 16}
    norms = tuple(name for name in NORM_VARIANTS if re.search(options.only, name))
    blocks = tuple(name for name in BLOCK_VARIANTS if re.search(options.only, f"block_attention {name}"))
    rows: list[Row] = []
    sources = (
        block_rows(device, variants=blocks, **(tiny if options.smoke else {})),
        norm_rows(device, variants=norms, **({"widths": (64,), "num_values": 1 << 14} if options.smoke else {})),
    )
    for source in sources:
        for row in source:
            rows.append(row)
            print(
                f"{row['op']:32s} {row['shape']:40s} {row['direction']} {row['impl']:26s} {row['ms']:9.4f} ms "
                f"{row['gbps']:8.1f} GB/s {100 * row['roofline_fraction']:5.1f} % of copy, "
                f"x{row['ratio_to_best_peer']} of {row['best_peer']}",
                flush=True,
            )
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS, restval="")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
