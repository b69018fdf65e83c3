# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""Gradient of RMSNorm and LayerNorm in one pass: dy and the normed input are read once, dx is written.

    xhat = (h - mean) * rstd,  s = dy * weight
    dx = rstd * (s - xhat * mean(s * xhat) - [layer] mean(s)) + d_hidden
    d_weight = sum over rows of dy * xhat,  d_bias = sum over rows of dy

A program owns a range of rows and whole columns, and leaves its sums for the weight in a row of `[programs, K]` that is
added up behind it, so repeats are bit-equal. Letters: M rows, K features.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_backward_kernel(
    dy_ptr,
    hidden_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    d_hidden_ptr,
    dx_ptr,
    d_weight_ptr,
    d_bias_ptr,
    num_rows,
    num_columns,
    rows_per_program,
    SUBTRACT_MEAN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
):
    """dy, hidden, d_hidden, dx: `[M, K]` contiguous; sums: fp32 `[programs, K]`. C: K rounded up to a power of two."""
    program = tl.program_id(0)
    column = tl.arange(0, C)
    real = column < num_columns
    weight = tl.load(weight_ptr + column, mask=real, other=0.0).to(tl.float32)[None, :]
    d_weight = tl.zeros([ROWS, C], tl.float32)
    d_bias = tl.zeros([ROWS, C], tl.float32)
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, num_rows)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & real[None, :]
        at = row.to(tl.int64)[:, None] * num_columns + column[None, :]
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        xhat = tl.load(hidden_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < last, other=0.0)[:, None]
        if SUBTRACT_MEAN:
            mean = tl.load(mean_ptr + row, mask=row < last, other=0.0)[:, None]
            xhat = tl.where(inside, xhat - mean, 0.0)
        xhat = xhat * rstd
        d_weight += dy * xhat
        scaled = dy * weight
        dx = scaled - xhat * (tl.sum(scaled * xhat, axis=1) / num_columns)[:, None]
        if SUBTRACT_MEAN:
            dx = dx - (tl.sum(scaled, axis=1) / num_columns)[:, None]
        dx = dx * rstd
        if HAS_BIAS:
            d_bias += dy
        if ADD:
            dx += tl.load(d_hidden_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    target = program * num_columns + column
    tl.store(d_weight_ptr + target, tl.sum(d_weight, axis=0), mask=real)
    if HAS_BIAS:
        tl.store(d_bias_ptr + target, tl.sum(d_bias, axis=0), mask=real)
