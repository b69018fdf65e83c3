"""Launches of the BlockAttention kernels. Imported when a kernel first runs, never before.

Letters: T packed rows, N query heads, M key heads, H head width, V value width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from gemworks.jagged._triton.quick import quick
from gemworks.jagged.jagged import next_power_of_two
from gemworks.jagged.ops.block_attention.formulas import BlockArgs
from gemworks.jagged.ops.block_attention.kernel_block import block_bwd_kernel, block_fwd_kernel
from torch import Tensor

_block_fwd_kernel = quick(block_fwd_kernel)
_block_bwd_kernel = quick(block_bwd_kernel)


@dataclass(frozen=True)
class BlockConfig:
    """Warps per program, and a cap on registers per thread (None: the compiler's choice)."""

    num_warps: int
    max_registers: int | None = None


def block_config(
    block: int, direction: Literal["forward", "backward"], *, dtype: torch.dtype, group: int, rope: bool, qk_norm: bool
) -> BlockConfig:
    """One warpgroup per 64 rows, twice that where a thread would hold too much: float32, and backward over a group.

    Forward fits three programs on an SM; with rope alone it needs a cap to.

    >>> block_config(64, "backward", dtype=torch.bfloat16, group=1, rope=True, qk_norm=True)
    BlockConfig(num_warps=4, max_registers=None)
    """
    if block == 128 or (block == 64 and (dtype == torch.float32 or (group > 1 and direction == "backward"))):
        return BlockConfig(8)
    capped = direction == "forward" and block == 64 and rope and not qk_norm
    return BlockConfig(4, 168 if capped else None)


def _config(q: Tensor, k: Tensor, args: BlockArgs, direction: Literal["forward", "backward"]) -> BlockConfig:
    group, rope = q.shape[1] // k.shape[1], args.cos_TJ is not None
    return block_config(args.block, direction, dtype=q.dtype, group=group, rope=rope, qk_norm=args.qk_norm)


def _unit_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _constants(q: Tensor, k: Tensor, v: Tensor, args: BlockArgs, config: BlockConfig) -> dict[str, Any]:
    # Exact float32 takes three TF32 products: those of scalar units would spill all of these tiles.
    exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    options = {} if config.max_registers is None else {"maxnreg": config.max_registers}
    return options | {
        "GROUP": q.shape[1] // k.shape[1],
        "H": q.shape[2],
        "V": v.shape[2],
        "BLOCK": args.block,
        "BLOCK_J": max(next_power_of_two(q.shape[2] // 2), 16),  # the least that a matrix unit takes
        "BLOCK_V": max(next_power_of_two(v.shape[2]), 16),
        "NORM": args.qk_norm,
        "ROPE": args.cos_TJ is not None,
        "CAUSAL": args.causal,
        "PRECISION": "tf32x3" if exact else "tf32",
        "num_warps": config.num_warps,
        "num_stages": 1,  # the loop over a group must not double its tiles in shared memory
    }


def _tables(args: BlockArgs, unused: Tensor) -> tuple[Tensor, Tensor, int]:
    if args.cos_TJ is None or args.sin_TJ is None:
        return unused, unused, 0
    return args.cos_TJ.contiguous(), args.sin_TJ.contiguous(), args.cos_TJ.shape[1]


def _strides(*tensors: Tensor) -> list[int]:
    return [s for x in tensors for s in x.stride()[:2]]


def block_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, args: BlockArgs, *, out: Tensor | None = None, config: BlockConfig | None = None
) -> Tensor:
    """[T, N, V]; every row is written, those outside every sequence with 0."""
    if out is None:
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    config = config or _config(q, k, args, "forward")
    q, k, v = _unit_columns(q), _unit_columns(k), _unit_columns(v)
    cos, sin, table_stride = _tables(args, q)
    _block_fwd_kernel[(args.table_S3.shape[0] * q.shape[1],)](
        q,
        k,
        v,
        out,
        args.table_S3,
        cos,
        sin,
        args.scale * math.log2(math.e),
        args.eps,
        *_strides(q, k, v, out),
        table_stride,
        HEADS=q.shape[1],
        **_constants(q, k, v, args, config),
    )
    return out


def block_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    args: BlockArgs,
    *,
    config: BlockConfig | None = None,
) -> None:
    """Write every row of dq, dk and dv, which may be views of one packed gradient. Bit-equal from run to run."""
    if q.shape[0] == 0:
        return
    config = config or _config(q, k, args, "backward")
    q, k, v, dout = _unit_columns(q), _unit_columns(k), _unit_columns(v), _unit_columns(dout)
    cos, sin, table_stride = _tables(args, q)
    _block_bwd_kernel[(args.table_S3.shape[0] * k.shape[1],)](
        q,
        k,
        v,
        dout,
        dq,
        dk,
        dv,
        args.table_S3,
        cos,
        sin,
        args.scale * math.log2(math.e),
        args.scale,
        args.eps,
        *_strides(q, k, v, dout, dq, dk, dv),
        table_stride,
        KEY_HEADS=k.shape[1],
        **_constants(q, k, v, args, config),
    )
