"""RMS norm per head and rotation in one pass over packed rows, forward and backward, in Triton; bound by memory.

Nothing is kept for backward but the rows that came in: norm and rotation are made again in registers. Attention whose
own backward goes back through both wants the norm's scales instead.

Letters: R rows of a tile, N heads of a tile, J rotated pairs of a head: pair j is (x[j], x[j + J]).
"""

# pyright: reportArgumentType=false, reportOptionalOperand=false, reportOperatorIssue=false
# (Triton's functions are annotated for its tracer, not for type checkers.)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_pair(ptr, at_RJ, inside_RJ, J: tl.constexpr):
    a_RJ = tl.load(ptr + at_RJ, mask=inside_RJ, other=0.0).to(tl.float32)
    b_RJ = tl.load(ptr + at_RJ + J, mask=inside_RJ, other=0.0).to(tl.float32)
    return a_RJ, b_RJ


@triton.jit
def _mean_product(a_RJ, b_RJ, c_RJ, d_RJ, J: tl.constexpr):
    """Mean over a head of the product of two rows, each given as a pair of halves."""
    return (tl.sum(a_RJ * c_RJ, axis=1) + tl.sum(b_RJ * d_RJ, axis=1)) / (2 * J)


@triton.jit
def _turn(a_RJ, b_RJ, cos_RJ, sin_RJ):
    return a_RJ * cos_RJ - b_RJ * sin_RJ, b_RJ * cos_RJ + a_RJ * sin_RJ


@triton.jit(do_not_specialize=["num_rows"])  # or every other batch would be compiled anew
def norm_rope_kernel(
    x_ptr, dy_ptr, cos_ptr, sin_ptr, end_ptr, out_ptr, scale_ptr, num_rows, eps,
    x_st, x_sn, dy_st, dy_sn, out_st, out_sn,
    N: tl.constexpr, J: tl.constexpr, BLOCK_J: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, TURN: tl.constexpr, HAS_END: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """One tile of rows and HEADS of their heads; 0 past the end of the last sequence.

    Forward: out = turn(n), with the normalised row n = scale x. BACKWARD: g = dy turned back, and
    out = dx = scale (g - n mean(g n)). Without TURN or NORM that step is left out. scale_ptr [num_rows, N] gets the
    scales, float32; None where nobody wants them.
    """
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
            if NORM or not BACKWARD:
                a_RJ, b_RJ = _load_pair(x_ptr, (row_R * x_st + head * x_sn)[:, None] + col_J, inside_RJ, J)
            if NORM:
                scale_R = tl.rsqrt(_mean_product(a_RJ, b_RJ, a_RJ, b_RJ, J) + eps)
                a_RJ, b_RJ = a_RJ * scale_R[:, None], b_RJ * scale_R[:, None]
                if scale_ptr is not None:
                    tl.store(scale_ptr + row_R * N + head, scale_R, mask=row_R < num_rows)
            if BACKWARD:
                ga_RJ, gb_RJ = _load_pair(dy_ptr, (row_R * dy_st + head * dy_sn)[:, None] + col_J, inside_RJ, J)
                if TURN:
                    ga_RJ, gb_RJ = _turn(ga_RJ, gb_RJ, cos_RJ, -sin_RJ)
                if NORM:
                    mean_R = _mean_product(ga_RJ, gb_RJ, a_RJ, b_RJ, J)
                    ga_RJ = (ga_RJ - a_RJ * mean_R[:, None]) * scale_R[:, None]
                    gb_RJ = (gb_RJ - b_RJ * mean_R[:, None]) * scale_R[:, None]
                a_RJ, b_RJ = ga_RJ, gb_RJ
            elif TURN:
                a_RJ, b_RJ = _turn(a_RJ, b_RJ, cos_RJ, sin_RJ)
            at_RJ = (row_R * out_st + head * out_sn)[:, None] + col_J
            tl.store(out_ptr + at_RJ, a_RJ.to(out_ptr.dtype.element_ty), mask=stored_RJ)
            tl.store(out_ptr + at_RJ + J, b_RJ.to(out_ptr.dtype.element_ty), mask=stored_RJ)
