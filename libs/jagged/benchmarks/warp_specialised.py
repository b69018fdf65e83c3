"""The forward of jagged attention in plain Triton that the compiler specialises by warps: for comparison, not shipped.

Its loop over keys asks for `warp_specialize=True`; tiles come through descriptors of ragged tensors, since Triton 3.6
specialises no loads by pointer. Tiles of 64 query rows: at 128 the compiler fails, and so does an early return, so
programs without a tile walk over no keys (docs/measured/jagged_warp_specialize_compile.txt). Timed by variants.py.

Letters: M query rows of a tile, n key rows of a tile, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from gemworks.jagged._triton.activations import LOG2_E, activate
from gemworks.jagged.ops.attention_core.launch import Problem
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS = 64
MANY = 0x7FFF0000


@dataclass(frozen=True)
class SpecialisedConfig:
    """Tiles of 64 query rows and `block_n` key rows in four warps; the compiler adds those that load."""

    block_n: int
    num_stages: int
    specialised: bool = True


@triton.jit(do_not_specialize=["lse_sn"])
def specialised_forward_kernel(
    q, k, v, out, lse, bounds_q, bounds_k, tile_sample, tile_row, num_tiles, scale, o_st, o_sn, lse_sn,
    ACT: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SPECIALISED: tl.constexpr,
):  # fmt: skip
    """Full attention; q, k and v are descriptors whose boxes end where their sequence does."""
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    there = tile < tl.load(num_tiles)
    sample = tl.load(tile_sample + tile, mask=there, other=0)
    row = tl.load(tile_row + tile, mask=there, other=0)
    begin_q = tl.load(bounds_q + sample)
    length_q = tl.load(bounds_q + sample + 1) - begin_q
    begin_k = tl.load(bounds_k + sample)
    length_k = tl.where(there, tl.load(bounds_k + sample + 1) - begin_k, 0)
    first_q = 0 if SHARED else begin_q
    q_MH = q.load([1 << 30, first_q + length_q, (1 << 30) - length_q + row, head, 0]).reshape([BM, H])
    o_MH = tl.zeros([BM, H], tl.float32)
    max_M = tl.full([BM], float("-inf"), tl.float32)
    sum_M = tl.zeros([BM], tl.float32)
    end_k = begin_k + length_k
    back_k = (1 << 30) - length_k
    for n in tl.range(0, length_k, BN, warp_specialize=SPECIALISED):
        k_nH = k.load([1 << 30, end_k, back_k + n, head, 0]).reshape([BN, H])
        s_Mn = tl.dot(q_MH, k_nH.T)
        if ACT == "softmax":
            inside = n + tl.arange(0, BN) < length_k
            s_Mn = tl.where(inside[None, :], s_Mn * (scale * LOG2_E), float("-inf"))
            new_M = tl.maximum(max_M, tl.max(s_Mn, 1))
            p = tl.exp2(s_Mn - new_M[:, None])
            fix_M = tl.exp2(max_M - new_M)
            sum_M = sum_M * fix_M + tl.sum(p, 1)
            o_MH = o_MH * fix_M[:, None]
            max_M = new_M
        else:
            p = activate(s_Mn * scale, ACT)  # act(0) = 0 and V's surplus rows are zero
        v_nH = v.load([1 << 30, end_k, back_k + n, head, 0]).reshape([BN, H])
        o_MH = tl.dot(p.to(out.dtype.element_ty), v_nH, o_MH)
    r = row + tl.arange(0, BM)
    own = there & (r < length_q)
    if ACT == "softmax":
        safe_M = tl.where(sum_M > 0.0, sum_M, 1.0)
        o_MH = o_MH / safe_M[:, None]
        lse_M = tl.where(sum_M > 0.0, max_M + tl.log2(safe_M), float("inf"))
        tl.store(lse + head.to(tl.int64) * lse_sn + begin_q + r, lse_M, mask=own)
    at = out + (begin_q + r).to(tl.int64)[:, None] * o_st + head * o_sn + tl.arange(0, H)[None, :]
    tl.store(at, o_MH.to(out.dtype.element_ty), mask=own[:, None])


def ragged(x: Tensor, rows: int) -> TensorDescriptor:
    """Of `x` [T, N, H], as launch_hopper.ragged, for a kernel in Triton."""
    _total, heads, width = x.shape
    shape, strides = [MANY, MANY, 1 << 30, heads, width], [(1 << 34) - x.stride(0), x.stride(0), *x.stride()]
    return TensorDescriptor(x, shape, strides, [1, 1, rows, 1, width])


def forward(p: Problem, out: Tensor, lse: Tensor, config: SpecialisedConfig) -> None:
    """Fills out [rows, N, H] and, for softmax, lse [N, rows] in units of log2."""
    assert p.rule.mask.is_full
    assert p.bias is None
    assert p.q.shape == (p.q.shape[0], p.k.shape[1], p.v.shape[2])
    sample, row, count = p.tiles(f"q{ROWS}")
    heads, bounds = p.q.shape[1], p.schedule.bounds
    kernel: Any = specialised_forward_kernel
    kernel[(sample.shape[0] * heads,)](
        ragged(p.q, ROWS), ragged(p.k, config.block_n), ragged(p.v, config.block_n), out, lse, bounds[0], bounds[3],
        sample, row, count, p.rule.scale, out.stride(0), out.stride(1), lse.stride(0),
        ACT=p.rule.activation, SHARED=p.rule.shared_query, HEADS=heads, H=p.q.shape[2], BM=ROWS, BN=config.block_n,
        SPECIALISED=config.specialised, num_warps=4, num_stages=config.num_stages,
    )  # fmt: skip
