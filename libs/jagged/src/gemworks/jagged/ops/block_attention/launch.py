"""Launches of the BlockAttention kernels. Imported when a kernel first runs, never before.

Letters: T packed rows, N query heads, M key heads, H head width, V value width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import torch
from gemworks.jagged._triton.quick import quick
from gemworks.jagged.dispatch import architecture_of
from gemworks.jagged.jagged import next_power_of_two
from gemworks.jagged.ops.block_attention.formulas import BlockArgs
from gemworks.jagged.ops.block_attention.kernel_block import block_bwd_kernel, block_fwd_kernel
from torch import Tensor

_block_fwd_kernel = quick(block_fwd_kernel)
_block_bwd_kernel = quick(block_bwd_kernel)


@dataclass(frozen=True)
class BlockConfig:
    """Warps per program, a cap on registers per thread (None: the compiler's choice), and in which language."""

    num_warps: int
    max_registers: int | None = None
    gluon: bool = False


@lru_cache(maxsize=256)
def block_config(
    block: int, direction: Literal["forward", "backward"], *, dtype: torch.dtype, group: int, rope: bool, qk_norm: bool
) -> BlockConfig:
    """One warpgroup per 64 rows, twice that where a thread would hold too much: float32, and backward over a group.

    Forward fits three programs on an SM; with rope alone it needs a cap to.

    >>> block_config(64, "backward", dtype=torch.bfloat16, group=1, rope=True, qk_norm=True)
    BlockConfig(num_warps=4, max_registers=None, gluon=False)
    """
    if block == 128 or (block == 64 and (dtype == torch.float32 or (group > 1 and direction == "backward"))):
        return BlockConfig(8)
    capped = direction == "forward" and block == 64 and rope and not qk_norm
    return BlockConfig(4, 168 if capped else None)


@cache
def gluon_config(block: int, direction: Literal["forward", "backward"]) -> BlockConfig:
    """Three programs of 64 rows on an SM, four in a forward: 168 and 128 registers a thread.

    Of 128 rows two in a forward; a backward has shared memory for one, whatever its registers.

    >>> gluon_config(64, "backward")
    BlockConfig(num_warps=4, max_registers=168, gluon=True)
    """
    if block == 128:
        return BlockConfig(8, 128 if direction == "forward" else None, gluon=True)
    return BlockConfig(4, 128 if direction == "forward" else 168, gluon=True)


# (block, head width) of kernel_block_hopper.py: V and the two tiles that take its place have to match in size
GLUON_SHAPES = ((64, 64), (64, 128), (128, 128))


def gluon_takes(args: BlockArgs, q: Tensor, k: Tensor, *others: Tensor) -> bool:
    """Whether the Gluon kernels can run the call: one query head per key head, rows and heads on 16-byte boundaries."""
    _, heads, width = q.shape
    if (
        q.device.type != "cuda"
        or q.dtype not in (torch.float16, torch.bfloat16)
        or k.shape[1] != heads
        or (args.block, width) not in GLUON_SHAPES
        or architecture_of(q.device) != "sm_90"
    ):
        return False
    for x in (q, k, *others):
        row, head, column = x.stride()
        if x.shape[2] != width or row % 8 or head % 8 or column != 1 or x.data_ptr() % 16:
            return False
    return True


def _config(
    args: BlockArgs, direction: Literal["forward", "backward"], q: Tensor, k: Tensor, *others: Tensor
) -> BlockConfig:
    if gluon_takes(args, q, k, *others):
        return gluon_config(args.block, direction)
    group, rope = q.shape[1] // k.shape[1], args.cos_TJ is not None
    return block_config(args.block, direction, dtype=q.dtype, group=group, rope=rope, qk_norm=args.qk_norm)


@cache
def _hopper() -> tuple[Any, Any]:
    """Gluon, imported where it runs only: forward and backward."""
    from gemworks.jagged.ops.block_attention import kernel_block_hopper

    return quick(kernel_block_hopper.block_fwd_hopper_kernel), quick(kernel_block_hopper.block_bwd_hopper_kernel)


def _unit_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _constants(q: Tensor, k: Tensor, v: Tensor, args: BlockArgs, config: BlockConfig) -> dict[str, Any]:
    # Exact float32 takes three TF32 products: those of scalar units would spill all of these tiles.
    exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    group = q.shape[1] // k.shape[1]
    rope = args.cos_TJ is not None
    return _constants_of(q.shape[2], v.shape[2], group, exact, rope, args.block, args.causal, args.qk_norm, config)


@lru_cache(maxsize=256)
def _constants_of(
    width: int, value_dim: int, group: int, exact: bool, rope: bool, block: int, causal: bool, norm: bool,
    config: BlockConfig,
) -> dict[str, Any]:  # fmt: skip
    """What a kernel's binary depends on beside the types of its arguments; not to be changed."""
    constants = {"H": width, "BLOCK": block, "NORM": norm, "ROPE": rope, "CAUSAL": causal}
    constants["num_warps"] = config.num_warps
    if config.max_registers is not None:
        constants["maxnreg"] = config.max_registers
    if config.gluon:
        return constants
    return constants | {
        "GROUP": group,
        "V": value_dim,
        "BLOCK_J": max(next_power_of_two(width // 2), 16),  # the least that a matrix unit takes
        "BLOCK_V": max(next_power_of_two(value_dim), 16),
        "PRECISION": "tf32x3" if exact else "tf32",
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
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    if out.numel() == 0:
        return out
    q, k, v = _unit_columns(q), _unit_columns(k), _unit_columns(v)
    config = config or _config(args, "forward", q, k, v, out)
    cos, sin, table_stride = _tables(args, q)
    kernel = _hopper()[0] if config.gluon else _block_fwd_kernel
    kernel[(args.table_S3.shape[0] * q.shape[1],)](
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
    q, k, v, dout = _unit_columns(q), _unit_columns(k), _unit_columns(v), _unit_columns(dout)
    config = config or _config(args, "backward", q, k, v, dout, dq, dk, dv)
    cos, sin, table_stride = _tables(args, q)
    kernel = _hopper()[1] if config.gluon else _block_bwd_kernel
    kernel[(args.table_S3.shape[0] * k.shape[1],)](
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
