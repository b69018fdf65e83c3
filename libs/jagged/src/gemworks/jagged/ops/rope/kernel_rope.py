"""RMS norm per head and rotation in one pass over packed rows, forward and backward, in Triton; bound by memory.

Nothing is kept for backward but the rows that came in: norm and rotation are made again in registers.

Letters: R rows of a tile, N heads of a tile, J rotated pairs of a head: pair j is (x[j], x[j + J]).
"""

# pyright: reportArgumentType=false, reportOptionalOperand=false, reportOperatorIssue=false
# (Triton's functions are annotated for its tracer, not for type checkers.)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_pair(ptr, start_R, inside_RJ, J: tl.constexpr, BLOCK_J: tl.constexpr):
    col_J = tl.arange(0, BLOCK_J)[None, :]
    at_RJ = start_R[:, None] + col_J
    a_RJ = tl.load(ptr + at_RJ, mask=inside_RJ, other=0.0).to(tl.float32)
    b_RJ = tl.load(ptr + at_RJ + J, mask=inside_RJ, other=0.0).to(tl.float32)
    return a_RJ, b_RJ


@triton.jit
def _inverse_rms(a_RJ, b_RJ, eps, J: tl.constexpr):
    return tl.rsqrt((tl.sum(a_RJ * a_RJ, axis=1) + tl.sum(b_RJ * b_RJ, axis=1)) / (2 * J) + eps)


@triton.jit(do_not_specialize=["num_rows"])  # or every other batch would be compiled anew
def norm_rope_fwd_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    end_ptr,
    y_ptr,
    num_rows,
    eps,
    x_st,
    x_sn,
    N: tl.constexpr,
    J: tl.constexpr,
    BLOCK_J: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    TURN: tl.constexpr,
    HAS_END: tl.constexpr,
):
    """One tile of rows and HEADS of their heads; y [T, N, 2 J] is contiguous, 0 past the end of the last sequence."""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col_J = tl.arange(0, BLOCK_J)[None, :]
    stored_RJ = (row_R < num_rows)[:, None] & (col_J < J)
    inside_RJ = stored_RJ
    if HAS_END:
        inside_RJ = inside_RJ & (row_R < tl.load(end_ptr))[:, None]
    if TURN:
        cos_RJ = tl.load(cos_ptr + row_R[:, None] * J + col_J, mask=inside_RJ, other=0.0).to(tl.float32)
        sin_RJ = tl.load(sin_ptr + row_R[:, None] * J + col_J, mask=inside_RJ, other=0.0).to(tl.float32)
    for i in tl.static_range(HEADS):
        head = tl.program_id(1) * HEADS + i
        if head < N:
            a_RJ, b_RJ = _load_pair(x_ptr, row_R * x_st + head * x_sn, inside_RJ, J, BLOCK_J)
            if NORM:
                scale_R = _inverse_rms(a_RJ, b_RJ, eps, J)
                a_RJ, b_RJ = a_RJ * scale_R[:, None], b_RJ * scale_R[:, None]
            if TURN:
                a_RJ, b_RJ = a_RJ * cos_RJ - b_RJ * sin_RJ, b_RJ * cos_RJ + a_RJ * sin_RJ
            at_RJ = (row_R * N + head)[:, None] * (2 * J) + col_J
            tl.store(y_ptr + at_RJ, a_RJ.to(y_ptr.dtype.element_ty), mask=stored_RJ)
            tl.store(y_ptr + at_RJ + J, b_RJ.to(y_ptr.dtype.element_ty), mask=stored_RJ)


@triton.jit(do_not_specialize=["num_rows"])
def norm_rope_bwd_kernel(
    dy_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    end_ptr,
    dx_ptr,
    num_rows,
    eps,
    dy_st,
    dy_sn,
    x_st,
    x_sn,
    N: tl.constexpr,
    J: tl.constexpr,
    BLOCK_J: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    TURN: tl.constexpr,
    HAS_END: tl.constexpr,
):
    """g = dy turned back; dx = scale (g - n mean(g n)) with the normalised row n = scale x; dx is contiguous."""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col_J = tl.arange(0, BLOCK_J)[None, :]
    stored_RJ = (row_R < num_rows)[:, None] & (col_J < J)
    inside_RJ = stored_RJ
    if HAS_END:
        inside_RJ = inside_RJ & (row_R < tl.load(end_ptr))[:, None]
    if TURN:
        cos_RJ = tl.load(cos_ptr + row_R[:, None] * J + col_J, mask=inside_RJ, other=0.0).to(tl.float32)
        sin_RJ = tl.load(sin_ptr + row_R[:, None] * J + col_J, mask=inside_RJ, other=0.0).to(tl.float32)
    for i in tl.static_range(HEADS):
        head = tl.program_id(1) * HEADS + i
        if head < N:
            ga_RJ, gb_RJ = _load_pair(dy_ptr, row_R * dy_st + head * dy_sn, inside_RJ, J, BLOCK_J)
            if TURN:
                ga_RJ, gb_RJ = ga_RJ * cos_RJ + gb_RJ * sin_RJ, gb_RJ * cos_RJ - ga_RJ * sin_RJ
            if NORM:
                a_RJ, b_RJ = _load_pair(x_ptr, row_R * x_st + head * x_sn, inside_RJ, J, BLOCK_J)
                scale_R = _inverse_rms(a_RJ, b_RJ, eps, J)
                a_RJ, b_RJ = a_RJ * scale_R[:, None], b_RJ * scale_R[:, None]
                mean_R = (tl.sum(ga_RJ * a_RJ, axis=1) + tl.sum(gb_RJ * b_RJ, axis=1)) / (2 * J)
                ga_RJ = (ga_RJ - a_RJ * mean_R[:, None]) * scale_R[:, None]
                gb_RJ = (gb_RJ - b_RJ * mean_R[:, None]) * scale_R[:, None]
            at_RJ = (row_R * N + head)[:, None] * (2 * J) + col_J
            tl.store(dx_ptr + at_RJ, ga_RJ.to(dx_ptr.dtype.element_ty), mask=stored_RJ)
            tl.store(dx_ptr + at_RJ + J, gb_RJ.to(dx_ptr.dtype.element_ty), mask=stored_RJ)
