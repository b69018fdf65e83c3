"""Starts the FP8 kernels; everything is decided from host values. Imported on the first call on a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from gemworks.jagged._triton.quick import quick
from gemworks.jagged.dispatch import num_multiprocessors
from gemworks.jagged.jagged import next_power_of_two
from gemworks.jagged.ops.attention_core import table
from gemworks.jagged.ops.attention_core.launch import Problem
from gemworks.jagged.ops.attention_fp8.kernel_dequantize import rows_kernel as _rows_kernel
from gemworks.jagged.ops.attention_fp8.kernel_dequantize import tiles_kernel as _tiles_kernel
from gemworks.jagged.ops.attention_fp8.reference import scale_block
from gemworks.jagged.ops.attention_fp8.tiles import TILE, num_tiles
from torch import Tensor

# Triton's kernels are not callables to a type checker.
rows_kernel: Any = quick(_rows_kernel)
tiles_kernel: Any = quick(_tiles_kernel)
SEARCH = 1024  # offsets that a kernel looks at together


@dataclass(frozen=True)
class HopperConfig:
    """The Gluon kernel: two consumer warpgroups of 64 query rows beside one warp that loads.

    Attributes:
        block: key rows of a step, a divisor of 128.
        stages: steps in flight, at least 2.
        query_stages: query tiles in flight.
        registers: per thread of a consumer.
    """

    block: int = 128
    stages: int = 4
    query_stages: int = 2
    registers: int = 240


HOPPER = HopperConfig()


def hopper_refusal(
    architecture: str, dtype: torch.dtype, width: int, value_width: int, activation: str, masked: bool, scale: float
) -> str | None:
    """Why the kernel of both products in FP8 does not take a call, or None."""
    if architecture not in table.GLUON_ARCHITECTURES:
        return f"it is for {', '.join(table.GLUON_ARCHITECTURES)}, not for {architecture}"
    if width not in table.GLUON_HEAD_DIMS or value_width != width or dtype not in table.GLUON_DTYPES:
        return f"it takes equal head widths of {table.GLUON_HEAD_DIMS} in bf16 or fp16"
    if activation != table.SOFTMAX:
        return "it has softmax only: other activations have no range for P"
    if scale <= 0.0:
        return "it takes a positive scale"
    return "it has no causal or window mask" if masked else None


def rows_values(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.dequantize_rows` on a device, in one pass."""
    total, heads, width = codes.shape
    rows, columns = scale_block("codes", codes, scales)
    codes, scales = codes if codes.stride(2) == 1 else codes.contiguous(), scales.contiguous()
    out = torch.empty(total, heads, width, dtype=dtype, device=codes.device)
    block_rows = 32
    grid = -(-total // block_rows) * heads
    if grid:
        rows_kernel[(grid,)](
            codes, scales, out, total, codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1),
            HEADS=heads, H=width, BH=next_power_of_two(width), R=rows, W=columns, BM=block_rows, num_warps=4,
        )  # fmt: skip
    return out


def tiles_values(codes: Tensor, scales: Tensor, offsets: Tensor, total: int, dtype: torch.dtype) -> Tensor:
    """`tiles.dequantize_tiles` on a device, in one pass; four dims of codes are transposed tiles."""
    heads, transposed = codes.shape[1], codes.dim() == 4
    width, num_sequences = codes.shape[2], offsets.shape[0] - 1
    out = torch.empty(total, heads, width, dtype=dtype, device=codes.device)
    if total:
        tiles_kernel[(num_tiles(total, num_sequences) * heads,)](
            codes, scales, offsets, out, total, num_sequences,
            HEADS=heads, H=width, SEARCH=SEARCH, TRANSPOSED=transposed, num_warps=4,
        )  # fmt: skip
    return out


def hopper_forward(p: Problem, scales: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(output [T, N, H] in `dtype`, log-sum-exp [N, T]) of tiles: `p.v` is [C, M, H, 128], see tiles.py."""
    config = HOPPER
    (total, heads, width), heads_k = p.q.shape, p.k.shape[1]
    out = torch.empty(total, heads, width, dtype=dtype, device=p.q.device)
    lse = torch.empty(heads, total, dtype=torch.float32, device=p.q.device)
    if total == 0 or p.k.shape[0] == 0:
        return out.zero_(), lse.fill_(float("inf"))
    sample, row, count = p.tiles("q128")
    bounds = p.schedule.bounds
    fp8_hopper_kernel()[(num_multiprocessors(p.q.device),)](
        _descriptor(p.q.view(total, heads * width), 64, width),
        _descriptor(p.k.view(p.k.shape[0], heads_k * width), config.block, width),
        _descriptor(p.v.view(-1, TILE), width, config.block),
        *scales, out, lse, bounds[0], bounds[3], sample, row, count, p.rule.scale,
        out.stride(0), out.stride(1), lse.stride(0),
        HEADS=heads, GROUP_HEADS=heads // heads_k, H=width, BN=config.block, STAGES=config.stages,
        QSTAGES=config.query_stages, CONSUMER_REGS=config.registers, num_warps=4,
    )  # fmt: skip
    return out, lse


@lru_cache(maxsize=1)
def fp8_hopper_kernel() -> Any:
    from gemworks.jagged.ops.attention_fp8.kernel_fp8_hopper import fp8_hopper_kernel as kernel

    return quick(kernel)


@lru_cache(maxsize=16)
def _layout(rows: int, columns: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.float8e4nv)


def _descriptor(codes: Tensor, rows: int, columns: int) -> Any:
    """Of contiguous codes, for boxes of `rows` x `columns`."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    codes = codes.view(torch.float8_e4m3fn)
    return TensorDescriptor(codes, list(codes.shape), list(codes.stride()), [rows, columns], _layout(rows, columns))
