"""Starts the FP8 kernels; everything is decided from host values. Imported on the first call on a device.

They are off unless the environment variable GEMWORKS_FP8_KERNELS names them ("plain", "gluon", or both with a comma):
the Gluon kernel is slower than bf16 attention on an H200 (docs/decisions/0233), and the plain one has not run on a GPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
from gemworks.jagged.ops.attention_core import table
from gemworks.jagged.ops.attention_core.launch import Problem
from gemworks.jagged.ops.attention_fp8.kernel_fp8 import factors_kernel as _factors_kernel
from gemworks.jagged.ops.attention_fp8.kernel_fp8 import fp8_kernel as _fp8_kernel
from gemworks.jagged.ops.attention_fp8.reference import scale_block
from torch import Tensor

# Triton's kernels are not callables to a type checker.
fp8_kernel: Any = _fp8_kernel
factors_kernel: Any = _factors_kernel
UNBOUNDED = 1 << 30
BLOCK_N, STAGES, REGISTERS = 128, 3, 240
PLAIN_ROWS, PLAIN_KEYS = 64, 32
_TRITON_DTYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: triton.language.bfloat16,
    torch.float16: triton.language.float16,
    torch.float32: triton.language.float32,
}


def enabled() -> set[str]:
    """Kernels that the environment asks for."""
    return set(os.environ.get("GEMWORKS_FP8_KERNELS", "").split(",")) & {"plain", "gluon"}


def gluon_refusal(p: Problem, sq: Tensor, sk: Tensor, sv: Tensor | None, dtype: torch.dtype) -> str | None:
    """Why the fast kernel does not take a call, or None."""
    if p.architecture not in table.GLUON_ARCHITECTURES:
        return f"it is for {', '.join(table.GLUON_ARCHITECTURES)}, not for {p.architecture}"
    if sq.dim() != 2 or sk.dim() != 2:
        return "it takes one scale for each row and head of q and k, not squares"
    if sv is not None:
        return "it takes v in bf16 or fp16, not as codes"
    if p.q.shape[2] not in table.GLUON_HEAD_DIMS or p.v.shape[2] != p.q.shape[2] or dtype not in table.GLUON_DTYPES:
        return f"it takes equal head widths of {table.GLUON_HEAD_DIMS} in bf16 or fp16"
    return None if p.rule.mask.is_full else "it has no causal or window mask"


def forward(p: Problem, sq: Tensor, sk: Tensor, sv: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(output [T, N, V] in `dtype`, log-sum-exp [N, T] or [N, 0]); `p.q`, `p.k` (and `p.v`) hold codes as uint8."""
    heads = p.q.shape[1]
    out = torch.empty(p.rows_q, heads, p.v.shape[2], dtype=dtype, device=p.q.device)
    lse = torch.empty(heads, p.rows_q if p.rule.is_softmax else 0, dtype=torch.float32, device=p.q.device)
    if p.rows_q == 0 or p.k.shape[0] == 0:
        return out.zero_(), lse.fill_(float("inf"))
    if "gluon" in enabled() and gluon_refusal(p, sq, sk, sv, dtype) is None:
        hopper_forward(p, sq, sk, out, lse)
    else:
        triton_forward(p, sq, sk, sv, out, lse)
    return out, lse


def triton_forward(p: Problem, sq: Tensor, sk: Tensor, sv: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """The plain kernel: every arrangement of scales, masks, grouped heads."""
    q, k, v, heads = p.q.contiguous(), p.k.contiguous(), p.v.contiguous(), p.q.shape[1]
    rows, width = scale_block("q", q, sq)
    rows_v, width_v = (1, v.shape[2]) if sv is None else scale_block("v", v, sv)
    values = sk if sv is None else sv  # not read without codes
    sq, sk, values = sq.contiguous(), sk.contiguous(), values.contiguous()
    wide = out.dtype == torch.float32
    block_m, block_n = (32, 32) if wide or p.q.shape[2] > 128 else (PLAIN_ROWS, PLAIN_KEYS)
    sample, row, count = p.tiles(f"q{block_m}")
    bounds, mask = p.schedule.bounds, p.rule.mask
    strides = [x.stride(i) for x in (q, k, v, sq, sk, values, out) for i in (0, 1)]
    fp8_kernel[(sample.shape[0] * heads,)](
        q, k, v, sq, sk, values, out, lse, bounds[0], bounds[3], sample, row, count, p.rule.scale,
        min(mask.left, UNBOUNDED), min(mask.right, UNBOUNDED), *strides, lse.stride(0),
        ACT=p.rule.activation, MASKED=not mask.is_full, BOTTOM_RIGHT=mask.align == "bottom_right", HEADS=heads,
        GROUP=heads // k.shape[1], H=q.shape[2], V=v.shape[2], R=rows, W=width, RV=rows_v, WV=width_v,
        V_CODES=sv is not None, DTYPE=_TRITON_DTYPES[out.dtype], BM=block_m, BN=block_n,
        PRECISION="ieee", num_warps=4 if wide else 8, num_stages=1 if wide else 2,
    )  # fmt: skip


def factors(scales: Tensor) -> Tensor:
    """float32 [N, T] of bytes [T, N]."""
    rows, heads = scales.shape
    out = torch.empty(heads, rows, dtype=torch.float32, device=scales.device)
    factors_kernel[(-(-rows // 256),)](
        scales, out, rows, *scales.stride(), out.stride(0),
        HEADS=heads, BH=triton.next_power_of_2(heads), BT=256, num_warps=4,
    )  # fmt: skip
    return out


def hopper_forward(
    p: Problem, sq: Tensor, sk: Tensor, out: Tensor, lse: Tensor, block_n: int = BLOCK_N, stages: int = STAGES
) -> None:
    """The Gluon kernel: Q K^T on the FP8 units."""
    from gemworks.jagged.ops.attention_core.launch_hopper import _device_allocator, _num_programs, streamable
    from gemworks.jagged.ops.attention_fp8.kernel_fp8_hopper import fp8_hopper_kernel as kernel
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    sample, row, count = p.tiles("q128")
    q, k = (x.contiguous().view(torch.float8_e4m3fn) for x in (p.q, p.k))
    v, bounds, (total, heads, width) = streamable(p.v), p.schedule.bounds, p.q.shape
    layout: Any = gl.NVMMASharedLayout.get_default_for([64, width], gl.float8e4nv)
    q_desc = TensorDescriptor(
        q.view(total, heads * width), [total, heads * width], [heads * width, 1], [64, width], layout
    )
    factors_q, factors_k = factors(sq), factors(sk)
    launch: Any = kernel
    with _device_allocator(q.device):
        launch[(_num_programs(q.device.index or 0),)](
            q_desc, factors_k, k, v, factors_q, out, lse, bounds[0], bounds[3], sample, row, count, p.rule.scale,
            factors_k.stride(0), k.stride(0), k.stride(1), v.stride(0), v.stride(1), factors_q.stride(0),
            out.stride(0), out.stride(1), lse.stride(0),
            ACT=p.rule.activation, HEADS=heads, GROUP_HEADS=heads // k.shape[1], H=width, BN=block_n,
            STAGES=stages, CONSUMER_REGS=REGISTERS, num_warps=4,
        )  # fmt: skip
