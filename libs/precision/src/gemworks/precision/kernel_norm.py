# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false
"""Triton kernel: residual addition, RMSNorm or LayerNorm, and the cast of the result, in one pass over memory.

A program owns ROWS rows of `x [M, K]`: it reads them for the statistics and again (from cache) for the result, rounds
the normalised values to the input's dtype as an unfused norm would, and quantises them along columns and rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_cast import load_tile, store_both


@triton.jit
def load_sum(
    x_ptr,
    residual_ptr,
    row,
    first_column,
    num_rows,
    num_columns,
    HAS_RESIDUAL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """x, or x + residual rounded to x's dtype, as fp32."""
    x = load_tile(x_ptr, row, first_column, num_rows, num_columns, num_columns, 1, COLUMNS)
    if HAS_RESIDUAL:
        x += load_tile(residual_ptr, row, first_column, num_rows, num_columns, num_columns, 1, COLUMNS)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def norm_cast_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    codes_ptr,
    scales_ptr,
    codes_t_ptr,
    scales_t_ptr,
    inexact_ptr,
    num_rows,
    num_columns,
    eps,
    seed,
    step,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    WRITE_Y: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    row = first_row + tl.arange(0, ROWS)
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, num_columns, COLUMNS):
        x = load_sum(x_ptr, residual_ptr, row, first, num_rows, num_columns, HAS_RESIDUAL, COLUMNS)
        if HAS_RESIDUAL:
            column = first + tl.arange(0, COLUMNS)
            inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
            tl.store(sum_ptr + row[:, None] * num_columns + column[None, :], x.to(dtype), mask=inside)
        if SUBTRACT_MEAN:
            total += x
        else:
            total += x * x
    mean = tl.zeros([ROWS], tl.float32)
    if SUBTRACT_MEAN:
        mean = tl.sum(total, axis=1) / num_columns
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, num_columns, COLUMNS):
            x = load_sum(x_ptr, residual_ptr, row, first, num_rows, num_columns, HAS_RESIDUAL, COLUMNS)
            centred = tl.where((first + tl.arange(0, COLUMNS) < num_columns)[None, :], x - mean[:, None], 0.0)
            total += centred * centred
        tl.store(mean_ptr + row, mean, mask=row < num_rows)
    rstd = 1.0 / tl.sqrt(tl.sum(total, axis=1) / num_columns + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < num_rows)
    for first in range(0, num_columns, COLUMNS):
        x = load_sum(x_ptr, residual_ptr, row, first, num_rows, num_columns, HAS_RESIDUAL, COLUMNS)
        column = first + tl.arange(0, COLUMNS)
        weight = tl.load(weight_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)
        if SUBTRACT_MEAN:
            x = x - mean[:, None]
        y = x * rstd[:, None] * weight[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
        inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        y = tl.where(inside, y.to(dtype).to(tl.float32), 0.0)
        if WRITE_Y:
            tl.store(y_ptr + row[:, None] * num_columns + column[None, :], y.to(dtype), mask=inside)
        planes, noise = (codes_ptr, scales_ptr, codes_t_ptr, scales_t_ptr, inexact_ptr), (seed, step)
        place = (first_row, first, num_rows, num_columns)
        store_both(
            y, row, place, planes, noise, ROWS, COLUMNS, BLOCK, FORMAT, MODE, REGROUP, STOCHASTIC, DIRECTIONS, HARDWARE
        )
