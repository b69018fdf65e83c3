"""Starts the Gluon BlockAttention kernel (sm_90): descriptors, one persistent program per multiprocessor.

Letters: T packed rows, N heads, H head width, V value width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from gemworks.jagged.ops.block_attention.formulas import BlockArgs
from gemworks.jagged.ops.block_attention.kernel_block_hopper import block_hopper_kernel as _kernel
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

block_hopper_kernel: Any = _kernel
HEAD_DIMS = (64, 128)
BLOCK = 64
_GL_DTYPES: dict[torch.dtype, Any] = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True)
class BlockHopperConfig:
    """Tiles in flight (a tile is q, k and v of one block and head, in the backward dO too), registers of a thread that
    computes. Two warpgroups compute: below three tiles they would wait for their own loads.
    """

    stages: int
    registers: int = 240


FORWARD, BACKWARD = BlockHopperConfig(4), BlockHopperConfig(3)


def refusal(q: Tensor, k: Tensor, v: Tensor, args: BlockArgs) -> str | None:
    """Why these tensors are plain Triton's, or None."""
    if args.block != BLOCK:
        return f"gluon takes blocks of {BLOCK}, not of {args.block}"
    if q.dtype not in _GL_DTYPES:
        return f"gluon does not take {q.dtype}"
    if q.shape[2] not in HEAD_DIMS or v.shape[2] != q.shape[2]:
        return f"gluon takes equal head widths of q, k and v in {HEAD_DIMS}, not {q.shape[2]} and {v.shape[2]}"
    if q.shape[1] != k.shape[1]:
        return "gluon has no grouped heads"
    if args.qk_norm and args.cos_TJ is None:
        return "gluon's QK-norm comes with rope alone"  # without it the assembler serialises the backward's products
    return None


@lru_cache(maxsize=16)
def _num_programs(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _aligned(x: Tensor) -> Tensor:
    """`x` [T, N, H] as TMA can read it: heads side by side, rows on 16-byte boundaries; copied only if it is not."""
    ok = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if ok else x.clone(memory_format=torch.contiguous_format)


def _descriptor(x: Tensor, columns: int) -> TensorDescriptor:
    """Tiles of BLOCK rows and so many columns of one head."""
    total, heads, width = x.shape
    layout: Any = gl.NVMMASharedLayout.get_default_for([BLOCK, columns], _GL_DTYPES[x.dtype])
    flat = x.as_strided((total, heads * width), (x.stride(0), 1))
    return TensorDescriptor(flat, [total, heads * width], [x.stride(0), 1], [BLOCK, columns], layout)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, outs: list[Tensor], args: BlockArgs, config: BlockHopperConfig,
    *, backward: bool,
) -> None:  # fmt: skip
    """outs: the output, or dq, dk and dv; all of them TMA must be able to write."""
    q, k, v, dout = (_aligned(x) for x in (q, k, v, dout))
    half, heads = q.shape[2] // 2, q.shape[1]
    x, y, z = outs if backward else (outs[0],) * 3
    cos, sin, table_stride = q, q, 0
    if args.cos_TJ is not None and args.sin_TJ is not None:
        cos, sin, table_stride = args.cos_TJ.contiguous(), args.sin_TJ.contiguous(), half
    described = [_descriptor(q, half), _descriptor(k, half), _descriptor(v, 2 * half), _descriptor(dout, 2 * half)]
    described += [_descriptor(x, half if backward else 2 * half), _descriptor(y, half if backward else 2 * half)]
    block_hopper_kernel[(_num_programs(q.device.index or 0),)](
        *described, _descriptor(z, 2 * half), x, y, z, args.table_S3, cos, sin, args.table_S3.shape[0] * heads,
        args.scale * math.log2(math.e), args.scale, args.eps,
        x.stride(0), x.stride(1), y.stride(0), y.stride(1), z.stride(0), z.stride(1), table_stride,
        HEADS=heads, J=half, V=2 * half, BLOCK=BLOCK, STAGES=config.stages, BACKWARD=backward, NORM=args.qk_norm,
        ROPE=args.cos_TJ is not None, CAUSAL=args.causal, REGISTERS=config.registers, num_warps=4,
    )  # fmt: skip


def block_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, args: BlockArgs, out: Tensor, config: BlockHopperConfig = FORWARD
) -> None:
    """Write every row of `out` [T, N, V], contiguous."""
    _launch(q, k, v, q, [out], args, config, backward=False)


def block_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    args: BlockArgs,
    config: BlockHopperConfig = BACKWARD,
) -> None:
    """Write every row of dq, dk and dv, contiguous or views of one packed gradient. Bit-equal from run to run."""
    _launch(q, k, v, dout, [dq, dk, dv], args, config, backward=True)
