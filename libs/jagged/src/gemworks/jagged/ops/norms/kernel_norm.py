"""LayerNorm and RMSNorm with residual in Triton, forward and backward, bound by memory.

Nothing but the normalised rows is kept for backward: it reads them anyway, and computes mean and scale again in
registers, where they cost no traffic.

Letters: R rows of a tile, D width. A row index counts the rows of [..., D]; row r starts at
`(r // INNER) * outer + (r % INNER) * inner`, so heads inside a wider projection are normalised without a copy.
Both strides count UNIT elements. Triton knows of a run-time number only whether 16 divides it: without the factor rows
of 1,000 columns would be read value by value, and not ahead of time (an asynchronous copy takes 4 bytes at least).
"""

# pyright: reportArgumentType=false, reportOptionalOperand=false, reportOperatorIssue=false
# (Triton's functions are annotated for its tracer, not for type checkers.)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_start(row_R, outer, inner, INNER: tl.constexpr, UNIT: tl.constexpr):
    """Where rows begin, in elements."""
    if INNER == 1:
        return row_R * outer * UNIT
    return ((row_R // INNER) * outer + (row_R % INNER) * inner) * UNIT


@triton.jit
def _statistics(h_RD, inside_D, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, CENTER: tl.constexpr):
    """Centred rows and 1 / sqrt(mean square + eps); columns past D must hold 0 and still do."""
    if CENTER:
        h_RD = h_RD - (tl.sum(h_RD, axis=1) / D)[:, None]
        if D != BLOCK_D:
            h_RD = tl.where(inside_D, h_RD, 0.0)
    scale_R = tl.rsqrt(tl.sum(h_RD * h_RD, axis=1) / D + eps)
    return h_RD, scale_R


@triton.jit(do_not_specialize=["num_rows"])  # or every other batch would be compiled anew
def norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, add_ptr, y_ptr, h_ptr, num_rows, eps,
    x_outer, x_inner, residual_outer, residual_inner, add_outer, add_inner,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, UNIT: tl.constexpr,
    CENTER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ADD: tl.constexpr,
):  # fmt: skip
    """One tile of rows: y and, with a residual, h. y and h are contiguous."""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col_D = tl.arange(0, BLOCK_D)[None, :]
    inside_D = col_D < D
    inside = (row_R < num_rows)[:, None]
    if D != BLOCK_D:
        inside = inside & inside_D
    h_RD = tl.load(x_ptr + row_start(row_R, x_outer, x_inner, INNER, UNIT)[:, None] + col_D, mask=inside, other=0.0)
    h_RD = h_RD.to(tl.float32)
    target = row_R[:, None] * D + col_D
    if HAS_RESIDUAL:
        start_R = row_start(row_R, residual_outer, residual_inner, INNER, UNIT)
        h_RD += tl.load(residual_ptr + start_R[:, None] + col_D, mask=inside, other=0.0).to(tl.float32)
        tl.store(h_ptr + target, h_RD.to(h_ptr.dtype.element_ty), mask=inside)
    if HAS_ADD:  # asked for before the reductions, so that both loads are in flight together
        start_R = row_start(row_R, add_outer, add_inner, INNER, UNIT)
        add_RD = tl.load(add_ptr + start_R[:, None] + col_D, mask=inside, other=0.0)
    h_RD, scale_R = _statistics(h_RD, inside_D, eps, D, BLOCK_D, CENTER)
    y_RD = h_RD * scale_R[:, None]
    if HAS_WEIGHT:
        y_RD *= tl.load(weight_ptr + col_D, mask=inside_D, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y_RD += tl.load(bias_ptr + col_D, mask=inside_D, other=0.0).to(tl.float32)
    if HAS_ADD:
        y_RD += add_RD.to(tl.float32)
    tl.store(y_ptr + target, y_RD.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "end_at"])
def norm_bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, end_ptr, end_at, num_rows, eps,
    dy_outer, dy_inner, dh_outer, dh_inner, h_outer, h_inner,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, UNIT: tl.constexpr,
    CENTER: tl.constexpr, HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_DWEIGHT: tl.constexpr,
    HAS_DBIAS: tl.constexpr, HAS_END: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of every P-th tile, and this program's share of dweight and dbias in row `program_id` of [P, D].

    With g = dy * weight and n the normalised row: dx = scale * (g - n mean(g n) - mean(g)) + dh, the last mean for
    LayerNorm only. HAS_END: rows from end_ptr[end_at] on get 0 and share in nothing, whatever they hold.
    """
    program = tl.program_id(0)
    end = num_rows
    if HAS_END:
        end = tl.minimum(tl.load(end_ptr + end_at).to(tl.int32), num_rows)
    col_D = tl.arange(0, BLOCK_D)[None, :]
    inside_D = col_D < D
    if HAS_WEIGHT:
        weight_D = tl.load(weight_ptr + col_D, mask=inside_D, other=0.0).to(tl.float32)
    # Kept per row of the tile: one reduction over the rows at the end instead of one in every step.
    dweight_RD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    dbias_RD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for tile in tl.range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row_R = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row_R < end)[:, None]
        if D != BLOCK_D:
            inside = inside & inside_D
        h_start_R = row_start(row_R, h_outer, h_inner, INNER, UNIT)
        dy_start_R = row_start(row_R, dy_outer, dy_inner, INNER, UNIT)
        h_RD = tl.load(h_ptr + h_start_R[:, None] + col_D, mask=inside, other=0.0).to(tl.float32)
        g_RD = tl.load(dy_ptr + dy_start_R[:, None] + col_D, mask=inside, other=0.0).to(tl.float32)
        if HAS_DH:
            dh_start_R = row_start(row_R, dh_outer, dh_inner, INNER, UNIT)
            dh_RD = tl.load(dh_ptr + dh_start_R[:, None] + col_D, mask=inside, other=0.0)
        h_RD, scale_R = _statistics(h_RD, inside_D, eps, D, BLOCK_D, CENTER)
        n_RD = h_RD * scale_R[:, None]
        if HAS_DWEIGHT:
            # A row past the end has g = 0, but eps = 0 makes its n NaN.
            dweight_RD += tl.where(inside, g_RD * n_RD, 0.0)
        if HAS_DBIAS:
            dbias_RD += g_RD
        if HAS_WEIGHT:
            g_RD *= weight_D
        dx_RD = g_RD - n_RD * (tl.sum(g_RD * n_RD, axis=1) / D)[:, None]
        if CENTER:
            dx_RD -= (tl.sum(g_RD, axis=1) / D)[:, None]
        dx_RD *= scale_R[:, None]
        if HAS_DH:
            dx_RD += dh_RD.to(tl.float32)
        stored = inside
        if HAS_END:
            dx_RD = tl.where(inside, dx_RD, 0.0)
            stored = (row_R < num_rows)[:, None] & inside_D
        tl.store(dx_ptr + row_R[:, None] * D + col_D, dx_RD.to(dx_ptr.dtype.element_ty), mask=stored)
    partial = tl.cast(program, tl.int64) * D + tl.arange(0, BLOCK_D)
    if HAS_DWEIGHT:
        tl.store(dweight_ptr + partial, tl.sum(dweight_RD, axis=0), mask=tl.arange(0, BLOCK_D) < D)
    if HAS_DBIAS:
        tl.store(dbias_ptr + partial, tl.sum(dbias_RD, axis=0), mask=tl.arange(0, BLOCK_D) < D)


@triton.jit(do_not_specialize=["num_partials"])
def column_sums_kernel(
    first_ptr, second_ptr, first_out_ptr, second_out_ptr, num_partials, D, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Sum [P, D] over P, always in the same order, of one matrix or of two (grid [D / COLS, 1 or 2]); an output may be
    narrower than float32. Few programs have many rows in flight: it is latency that such a small sum would wait for.
    """
    partial_ptr = first_ptr
    if tl.program_id(1) == 1:
        partial_ptr = second_ptr
    col_C = tl.program_id(0) * COLS + tl.arange(0, COLS)
    sum_RC = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, num_partials, ROWS):
        row_R = first + tl.arange(0, ROWS)
        inside = (row_R < num_partials)[:, None] & (col_C < D)[None, :]
        sum_RC += tl.load(partial_ptr + row_R[:, None].to(tl.int64) * D + col_C[None, :], mask=inside, other=0.0)
    sum_C = tl.sum(sum_RC, axis=0)
    if tl.program_id(1) == 0:
        tl.store(first_out_ptr + col_C, sum_C.to(first_out_ptr.dtype.element_ty), mask=col_C < D)
    else:
        tl.store(second_out_ptr + col_C, sum_C.to(second_out_ptr.dtype.element_ty), mask=col_C < D)
