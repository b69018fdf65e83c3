# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""Residual + norm + cast of bf16: the sum and each row's statistics, and tiles of the sum, in one grid that reads the
sum back from cache.

Tiles are held as in `kernel_words`: a tuple of eight rows modulo 8, each two int32 `[R8, C4]` of bf16 pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_planes import store_planes
from gemworks.precision.kernel_tile import load_tile, store_pairs
from gemworks.precision.kernel_words import high_half, low_half, quads, round_to_bf16, sum_of_pairs, value


@triton.jit
def normalise(
    hs,
    means,
    rstds,
    weight_ptr,
    bias_ptr,
    y_ptr,
    first_column,
    left_rows,
    num_columns,
    HAS_BIAS: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    WRITE_Y: tl.constexpr,
    R8: tl.constexpr,
    C: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """(h - mean) * rstd * weight + bias of a tile, rounded to bf16 (and stored at y_ptr, the tile's first row). Past
    the end h, mean and rstd are 0."""
    octet = tl.arange(0, R8)
    column = first_column + tl.arange(0, C)
    weight = tl.load(weight_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)
    w = quads(tl.broadcast_to(weight[None, :], [R8, C]), R8, C)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)
        b = quads(tl.broadcast_to(bias[None, :], [R8, C]), R8, C)
    ys = ()
    for i in tl.static_range(8):
        v = ()
        for j in tl.static_range(4):
            h = value(hs[i], j, True, True, HARDWARE)
            if SUBTRACT_MEAN:
                h = h - means[i][:, None]
            y = h * rstds[i][:, None] * w[j]
            if HAS_BIAS:
                y += b[j]
            v = v + (y,)  # noqa: RUF005
        pair = (round_to_bf16(v[0], v[1], HARDWARE), round_to_bf16(v[2], v[3], HARDWARE))
        if HAS_BIAS:
            # Rows past the end, whose rstd is 0, must not show in the column blocks.
            real = (octet * 8 + i < left_rows)[:, None]
            pair = (tl.where(real, pair[0], 0), tl.where(real, pair[1], 0))
        if WRITE_Y:
            store_pairs(pair, y_ptr, i, first_column, left_rows, num_columns, R8, C)
        ys = ys + (pair,)  # noqa: RUF005
    return ys


@triton.jit
def sum_rows(
    x_ptr,
    residual_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    first_row,
    num_rows,
    num_columns,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """The sum of ROWS rows, and each row's mean and reciprocal deviation. bf16 `[M, K]` as int32."""
    row = tl.arange(0, ROWS)
    half = (num_columns // 16) * 8
    offset = first_row * half
    x_ptr += offset
    residual_ptr += offset
    sum_ptr += offset
    inside_row = row < num_rows - first_row
    total = tl.zeros([ROWS, C // 2], tl.float32)
    for first in range(0, num_columns, C):
        pair = first // 2 + tl.arange(0, C // 2)
        at = (row * half)[:, None] + pair[None, :]
        inside = inside_row[:, None] & (pair < half)[None, :]
        h = tl.load(x_ptr + at, mask=inside, other=0)
        if HAS_RESIDUAL:
            r = tl.load(residual_ptr + at, mask=inside, other=0)
            h = sum_of_pairs(h, r, HARDWARE)
            tl.store(sum_ptr + at, h, mask=inside)
        low, high = low_half(h), high_half(h)
        if SUBTRACT_MEAN:
            total += low + high
        else:
            total += low * low + high * high
    if SUBTRACT_MEAN:
        mean = tl.sum(total, axis=1) / num_columns
        tl.store(mean_ptr + first_row + row, mean, mask=inside_row)
        total = tl.zeros([ROWS, C // 2], tl.float32)
        # The sum is read back by other threads than wrote it where the compiler chooses so.
        tl.debug_barrier()
        for first in range(0, num_columns, C):
            pair = first // 2 + tl.arange(0, C // 2)
            inside = inside_row[:, None] & (pair < half)[None, :]
            h = tl.load(sum_ptr + (row * half)[:, None] + pair[None, :], mask=inside, other=0)
            low = tl.where(inside, low_half(h) - mean[:, None], 0.0)
            high = tl.where(inside, high_half(h) - mean[:, None], 0.0)
            total += low * low + high * high
    rstd = 1.0 / tl.sqrt(tl.sum(total, axis=1) / num_columns + eps)
    tl.store(rstd_ptr + first_row + row, rstd, mask=inside_row)


@triton.jit
def apply_tile(
    sum_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    planes,
    first_row,
    first_column,
    num_rows,
    num_columns,
    real_rows,
    HAS_BIAS: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    WRITE_Y: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    R8: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    HARDWARE: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """A tile of the sum, normalised and quantised; planes as in `store_planes`."""
    left_rows = real_rows - first_row
    octet = tl.arange(0, R8) * 8
    half = (num_columns // 16) * 8
    offset = first_row * half
    hs = load_tile(sum_ptr + offset, half, left_rows, first_column, num_columns, R8, C, True, RAGGED, True)
    means = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    if SUBTRACT_MEAN:
        means = ()
        for i in tl.static_range(8):
            mean = tl.load(mean_ptr + first_row + octet + i, mask=octet + i < left_rows, other=0.0)
            means = means + (mean,)  # noqa: RUF005
    rstds = ()
    for i in tl.static_range(8):
        rstds = rstds + (tl.load(rstd_ptr + first_row + octet + i, mask=octet + i < left_rows, other=0.0),)  # noqa: RUF005
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
    place = (first_row, first_column, num_rows, num_columns)
    store_planes(ys, place, planes, R8, C, B, FORMAT, MODE, REGROUP, DIRECTIONS, SQUARES, HARDWARE)


# Else widths of 16 tiles and every length of a turn are other kernels.
@triton.jit(do_not_specialize=["num_column_tiles", "real_rows", "blocks_per_turn"])
def norm_cast_kernel(
    x_ptr,
    residual_ptr,
    sum_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
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
    blocks_per_turn,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    WRITE_Y: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    R8: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    HARDWARE: tl.constexpr,
    SQUARES: tl.constexpr = False,
):
    """Two kinds of programs in one grid, so that the sum is read back from cache and one kind computes while the other
    waits for memory: STEPS times ROWS rows of the sum with their statistics, and tiles of R8 * 8 rows of it, normalised
    and quantised.

    A turn holds the sums of `blocks_per_turn` blocks of rows, evenly mixed with the tiles of the turn before. Programs
    start in the order of their number, so what a tile waits for (`ready_ptr`, int32 zeros, counts a block's finished
    sums) has started before it.
    """
    R: tl.constexpr = R8 * 8
    SHARE: tl.constexpr = ROWS * STEPS
    sums = blocks_per_turn * (R // SHARE)
    tiles = blocks_per_turn * num_column_tiles
    turn = tl.program_id(0) // (sums + tiles)
    i = tl.program_id(0) % (sums + tiles)
    tile = i * tiles // (sums + tiles)
    if (i + 1) * tiles // (sums + tiles) == tile:
        first_row = turn.to(tl.int64) * (blocks_per_turn * R) + (i - tile) * SHARE
        if first_row < real_rows:
            for step in range(STEPS):
                sum_rows(
                    x_ptr,
                    residual_ptr,
                    sum_ptr,
                    mean_ptr,
                    rstd_ptr,
                    first_row + step * ROWS,
                    real_rows,
                    num_columns,
                    eps,
                    HAS_RESIDUAL,
                    SUBTRACT_MEAN,
                    ROWS,
                    WIDTH,
                    HARDWARE,
                )
            tl.debug_barrier()
            tl.atomic_add(ready_ptr + first_row // R, 1, sem="release")
    else:
        block = (turn - 1) * blocks_per_turn + tile // num_column_tiles
        first_row = block.to(tl.int64) * R
        if (turn > 0) & (first_row < num_rows):
            awaited = (tl.minimum(real_rows - first_row, R) + SHARE - 1) // SHARE
            seen = tl.atomic_add(ready_ptr + block, 0, sem="acquire")
            while seen < awaited:
                seen = tl.atomic_add(ready_ptr + block, 0, sem="acquire")
            apply_tile(
                sum_ptr,
                weight_ptr,
                bias_ptr,
                y_ptr,
                mean_ptr,
                rstd_ptr,
                (codes_ptr, scales_ptr, codes_t_ptr, scales_t_ptr, inexact_ptr),
                first_row,
                (tile % num_column_tiles) * C,
                num_rows,
                num_columns,
                real_rows,
                HAS_BIAS,
                SUBTRACT_MEAN,
                WRITE_Y,
                DIRECTIONS,
                R8,
                C,
                B,
                FORMAT,
                MODE,
                REGROUP,
                RAGGED,
                HARDWARE,
                SQUARES,
            )
