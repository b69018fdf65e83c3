# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""Residual + norm + cast of bf16 in one pass: a tile of the sum stays in registers while its rows' others are summed.

The programs of a block of rows exchange their parts of each row's statistics through memory, and add them in order when
all have arrived. Programs start in the order of their number, so those of a block run together.

Tiles are held as in `kernel_words`: a tuple of eight rows modulo 8, each two int32 `[R8, C4]` of bf16 pairs. T programs
a block, R = 8 R8 rows, C columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_norm_tile import normalise
from gemworks.precision.kernel_tile import load_tile, store_pairs, store_tile
from gemworks.precision.kernel_words import high_half, low_half, sum_of_pairs


@triton.jit
def interleaved(v, R8: tl.constexpr):
    """Eight `[R8]`, of rows modulo 8, as `[R]`."""
    even = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))
    odd = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
    return tl.reshape(tl.join(even, odd), [R8 * 8])


@triton.jit
def store_statistics(
    hs,
    parts_ptr,
    num_rows,
    first_column,
    num_columns,
    parts,
    SUBTRACT_MEAN: tl.constexpr,
    R8: tl.constexpr,
    C: tl.constexpr,
):
    """Of each row of a tile the sum of squares, or its mean and the squares' distance from it; `[parts, num_rows]`
    each, parts_ptr at the tile's first row."""
    row = tl.arange(0, R8 * 8)
    squares, means = (), ()
    if SUBTRACT_MEAN:
        quad = first_column // 4 + tl.arange(0, C // 4)
        real = (quad < num_columns // 4)[None, :]
        width = tl.minimum(num_columns - first_column, C)
    for i in tl.static_range(8):
        a, b = low_half(hs[i][0]), high_half(hs[i][0])
        c, d = low_half(hs[i][1]), high_half(hs[i][1])
        if SUBTRACT_MEAN:
            mean = tl.sum(a + b + (c + d), axis=1) / width
            m = mean[:, None]
            a, b = tl.where(real, a - m, 0.0), tl.where(real, b - m, 0.0)
            c, d = tl.where(real, c - m, 0.0), tl.where(real, d - m, 0.0)
            means = means + (mean,)  # noqa: RUF005
        squares = squares + (tl.sum(a * a + b * b + (c * c + d * d), axis=1),)  # noqa: RUF005
    tl.store(parts_ptr + row, interleaved(squares, R8))
    if SUBTRACT_MEAN:
        tl.store(parts_ptr + parts.to(tl.int64) * num_rows + row, interleaved(means, R8))


@triton.jit
def add_statistics(
    parts_ptr,
    mean_ptr,
    rstd_ptr,
    left_rows,
    num_rows,
    num_columns,
    parts,
    eps,
    SUBTRACT_MEAN: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Mean and reciprocal deviation of a block's rows from what its tiles stored; pointers are at its first row."""
    row, part = tl.arange(0, R), tl.arange(0, PARTS)
    at = part.to(tl.int64)[:, None] * num_rows + row[None, :]
    real = (part < parts)[:, None] & (row >= 0)[None, :]
    squares = tl.load(parts_ptr + at, mask=real, other=0.0)
    if SUBTRACT_MEAN:
        # Chan, Golub, LeVeque (1983): squares of the parts, and of their means' distances.
        width = tl.where(part < parts, tl.minimum(num_columns - part * C, C), 0).to(tl.float32)[:, None]
        means = tl.load(parts_ptr + parts.to(tl.int64) * num_rows + at, mask=real, other=0.0)
        mean = tl.sum(means * width, axis=0) / num_columns
        distance = means - mean[None, :]
        squares += distance * distance * width
        tl.store(mean_ptr + row, mean, mask=row < left_rows)
    rstd = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / num_columns + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < left_rows)


# Else widths of 16 tiles and lucky numbers of rows are other kernels.
@triton.jit(do_not_specialize=["num_column_tiles", "real_rows"])
def norm_pass_kernel(
    x_ptr,
    residual_ptr,
    sum_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    parts_ptr,
    ready_ptr,
    codes_ptr,
    scales_ptr,
    codes_t_ptr,
    scales_t_ptr,
    inexact_ptr,
    num_rows,
    num_columns,
    num_column_tiles,
    real_rows,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    WRITE_Y: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    PARTS: tl.constexpr,
    PHASE: tl.constexpr,
    EACH: tl.constexpr,
    R8: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """x, residual, sum, y: bf16 `[real_rows, K]` contiguous as int32; planes as in `store_tile`.

    parts: fp32 `[1 or 2, T, num_rows]`, of no use afterwards; PARTS: T rounded up to a power of two. ready: int32
    zeros, a block's programs that have arrived. PHASE: 0, or where programs do not run together, 1 and then 2. EACH:
    every program adds up the statistics; otherwise the last to arrive does, and counts once more.
    """
    R: tl.constexpr = R8 * 8
    block = tl.program_id(0) // num_column_tiles
    column_tile = tl.program_id(0) % num_column_tiles
    first_row = block.to(tl.int64) * R
    first_column = column_tile * C
    left_rows = real_rows - first_row
    half = (num_columns // 16) * 8
    offset = first_row * half
    hs = ()
    if PHASE == 2:
        hs = load_tile(sum_ptr + offset, half, left_rows, first_column, num_columns, R8, C, True, RAGGED, True)
    elif HAS_RESIDUAL:
        xs = load_tile(x_ptr + offset, half, left_rows, first_column, num_columns, R8, C, True, RAGGED, True)
        rs = load_tile(residual_ptr + offset, half, left_rows, first_column, num_columns, R8, C, True, RAGGED, True)
        for i in tl.static_range(8):
            pair = (sum_of_pairs(xs[i][0], rs[i][0], HARDWARE), sum_of_pairs(xs[i][1], rs[i][1], HARDWARE))
            store_pairs(pair, sum_ptr + offset, i, first_column, left_rows, num_columns, R8, C)
            hs = hs + (pair,)  # noqa: RUF005
    else:
        hs = load_tile(x_ptr + offset, half, left_rows, first_column, num_columns, R8, C, True, RAGGED, False)
    if PHASE != 2:
        first = parts_ptr + column_tile.to(tl.int64) * num_rows + first_row
        store_statistics(hs, first, num_rows, first_column, num_columns, num_column_tiles, SUBTRACT_MEAN, R8, C)
        tl.debug_barrier()
        seen = tl.atomic_add(ready_ptr + block, 1, sem="acq_rel") + 1
        if EACH and PHASE == 0:
            while seen < num_column_tiles:
                seen = tl.atomic_add(ready_ptr + block, 0, sem="acquire")
        if seen == num_column_tiles:
            add_statistics(
                parts_ptr + first_row,
                mean_ptr + first_row,
                rstd_ptr + first_row,
                left_rows,
                num_rows,
                num_columns,
                num_column_tiles,
                eps,
                SUBTRACT_MEAN,
                PARTS,
                R,
                C,
            )
            tl.debug_barrier()
            if not EACH:
                tl.atomic_add(ready_ptr + block, 1, sem="release")
    if PHASE == 0 and not EACH:
        seen = tl.atomic_add(ready_ptr + block, 0, sem="acquire")
        while seen <= num_column_tiles:
            seen = tl.atomic_add(ready_ptr + block, 0, sem="acquire")
    if PHASE != 1:
        octet = tl.arange(0, R8) * 8
        means = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        if SUBTRACT_MEAN:
            means = ()
            for i in tl.static_range(8):
                mean = tl.load(mean_ptr + first_row + octet + i, mask=octet + i < left_rows, other=0.0)
                means = means + (mean,)  # noqa: RUF005
        rstds = ()
        for i in tl.static_range(8):
            rstd = tl.load(rstd_ptr + first_row + octet + i, mask=octet + i < left_rows, other=0.0)
            rstds = rstds + (rstd,)  # noqa: RUF005
        ys = normalise(
            hs,
            means,
            rstds,
            weight_ptr,
            bias_ptr,
            y_ptr + offset,
            first_column,
            left_rows,
            num_columns,
            HAS_BIAS,
            SUBTRACT_MEAN,
            WRITE_Y,
            R8,
            C,
            HARDWARE,
        )
        store_tile(
            ys,
            first_row,
            first_column,
            codes_ptr,
            scales_ptr,
            codes_t_ptr,
            scales_t_ptr,
            inexact_ptr,
            num_rows,
            num_columns,
            R8,
            C,
            B,
            FORMAT,
            MODE,
            REGROUP,
            DIRECTIONS,
            True,
            HARDWARE,
        )
