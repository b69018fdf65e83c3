# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false
"""Triton cast kernels: along one dim, along both in one read, in squares.

Shape letters: M, N the tile's rows and columns; G blocks along a dim; B elements per block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_common import (
    butterfly,
    encode,
    inverse_power,
    magnitude,
    merge_scales,
    nan_code_of,
    random_words,
    scale_byte,
    shift_codes,
)


@triton.jit
def quantise_last(
    x,
    words,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Codes int32 `[ROWS, COLUMNS]`, scale bytes `[ROWS, COLUMNS / width]`, inexact count, of fp32 x in blocks along
    the last dim; width is BLOCK, or 128 when regrouping."""
    GROUPS: tl.constexpr = COLUMNS // BLOCK
    blocks = tl.reshape(x, [ROWS, GROUPS, BLOCK])
    amax = tl.max(magnitude(blocks), axis=2)
    byte = scale_byte(amax, FORMAT, MODE, 0 if BLOCK == 32 else 1)
    scaled = blocks * inverse_power(byte)[:, :, None]
    code = encode(scaled, tl.reshape(words, [ROWS, GROUPS, BLOCK]), FORMAT, STOCHASTIC, HARDWARE)
    lost = 0
    if REGROUP:
        merged = merge_scales(tl.reshape(byte, [ROWS, GROUPS // 4, 4]))
        wide = tl.reshape(tl.broadcast_to(merged[:, :, None], [ROWS, GROUPS // 4, 4]), [ROWS, GROUPS])
        code, inexact = shift_codes(code, (byte - wide)[:, :, None], FORMAT, HARDWARE)
        poisoned = (wide == 255)[:, :, None]
        code = tl.where(poisoned, nan_code_of(FORMAT), code)
        lost = tl.sum((inexact & (poisoned == 0)).to(tl.int32))
        byte = merged
    else:
        code = tl.where((amax >= 0x7F800000)[:, :, None], nan_code_of(FORMAT), code)
    return tl.reshape(code, [ROWS, COLUMNS]), byte, lost


@triton.jit
def cast_rows_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    inexact_ptr,
    signs_ptr,
    num_rows,
    num_columns,
    stride_row,
    stride_column,
    stride_scale_row,
    stride_scale_group,
    padded_columns,
    seed,
    step,
    normalise,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STREAM: tl.constexpr,
    HADAMARD: tl.constexpr,
    SWAP: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """x viewed as `[num_rows, num_columns]` with any strides; codes `[num_rows, padded_columns]` contiguous.

    SWAP puts the columns on the first grid axis, the only one that may be longer than 65,535.
    """
    row = tl.program_id(1 if SWAP else 0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0 if SWAP else 1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    pointers = x_ptr + row[:, None] * stride_row + column.to(tl.int64)[None, :] * stride_column
    x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    if HADAMARD > 0:
        signs = tl.load(signs_ptr + tl.arange(0, HADAMARD))
        LEAD: tl.constexpr = ROWS * (COLUMNS // HADAMARD)
        groups = tl.reshape(x, [LEAD, HADAMARD]) * signs[None, :]
        x = tl.reshape(butterfly(groups, LEAD, HADAMARD) * normalise, [ROWS, COLUMNS])
    words = x.to(tl.int32, bitcast=True).to(tl.uint32, bitcast=True)
    if STOCHASTIC:
        words = random_words(row, first, seed, step, STREAM, ROWS, COLUMNS)
    code, byte, lost = quantise_last(x, words, ROWS, COLUMNS, BLOCK, FORMAT, MODE, REGROUP, STOCHASTIC, HARDWARE)
    WIDTH: tl.constexpr = 128 if REGROUP else BLOCK
    group = (first // WIDTH) + tl.arange(0, COLUMNS // WIDTH)
    inside_group = (row < num_rows)[:, None] & (group * WIDTH < padded_columns)[None, :]
    scale_pointers = scales_ptr + row[:, None] * stride_scale_row + group.to(tl.int64)[None, :] * stride_scale_group
    tl.store(scale_pointers, byte.to(tl.uint8), mask=inside_group)
    if FORMAT == 2:
        low, high = tl.split(tl.reshape(code, [ROWS, COLUMNS // 2, 2]))
        packed_columns = (padded_columns + 1) // 2
        packed = first // 2 + tl.arange(0, COLUMNS // 2)
        target = codes_ptr + row[:, None] * packed_columns + packed[None, :]
        inside_packed = (row < num_rows)[:, None] & (packed < packed_columns)[None, :]
        tl.store(target, (low | (high << 4)).to(tl.uint8), mask=inside_packed)
    else:
        target = codes_ptr + row[:, None] * padded_columns + column[None, :]
        inside_code = (row < num_rows)[:, None] & (column < padded_columns)[None, :]
        tl.store(target, code.to(tl.uint8), mask=inside_code)
    if REGROUP and lost > 0:
        tl.atomic_add(inexact_ptr, lost.to(tl.int64))


@triton.jit
def quantise_first(
    x,
    words,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Like `quantise_last`, in blocks along the first dim: codes `[ROWS, COLUMNS]`, scale bytes `[ROWS/width,
    COLUMNS]`."""
    GROUPS: tl.constexpr = ROWS // BLOCK
    blocks = tl.reshape(x, [GROUPS, BLOCK, COLUMNS])
    amax = tl.max(magnitude(blocks), axis=1)
    byte = scale_byte(amax, FORMAT, MODE, 0 if BLOCK == 32 else 1)
    scaled = blocks * inverse_power(byte)[:, None, :]
    code = encode(scaled, tl.reshape(words, [GROUPS, BLOCK, COLUMNS]), FORMAT, STOCHASTIC, HARDWARE)
    lost = 0
    if REGROUP:
        merged = tl.max(tl.reshape(byte, [GROUPS // 4, 4, COLUMNS]), axis=1)
        merged = tl.where(merged == 255, 255, tl.maximum(merged, 1))
        wide = tl.reshape(tl.broadcast_to(merged[:, None, :], [GROUPS // 4, 4, COLUMNS]), [GROUPS, COLUMNS])
        code, inexact = shift_codes(code, (byte - wide)[:, None, :], FORMAT, HARDWARE)
        poisoned = (wide == 255)[:, None, :]
        code = tl.where(poisoned, nan_code_of(FORMAT), code)
        lost = tl.sum((inexact & (poisoned == 0)).to(tl.int32))
        byte = merged
    else:
        code = tl.where((amax >= 0x7F800000)[:, None, :], nan_code_of(FORMAT), code)
    return tl.reshape(code, [ROWS, COLUMNS]), byte, lost


@triton.jit
def store_both(
    x,
    row,
    place,
    planes,
    noise,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Quantise one tile (fp32, zero outside) along its columns (DIRECTIONS & 1) and its rows (DIRECTIONS & 2), and
    store codes `[M, K]`, scales `[M, K/width]`, transposed codes `[K, M]`, transposed scales `[K, M/width]`."""
    first_row, first_column, num_rows, num_columns = place
    codes_ptr, scales_ptr, codes_t_ptr, scales_t_ptr, inexact_ptr = planes
    seed, step = noise
    WIDTH: tl.constexpr = 128 if REGROUP else BLOCK
    column = first_column + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    column_wide = column.to(tl.int64)
    nothing = x.to(tl.int32, bitcast=True).to(tl.uint32, bitcast=True)
    lost = 0
    if DIRECTIONS & 1:
        words = nothing
        if STOCHASTIC:
            words = random_words(row, first_column, seed, step, 0, ROWS, COLUMNS)
        code, byte, lost_rows = quantise_last(
            x, words, ROWS, COLUMNS, BLOCK, FORMAT, MODE, REGROUP, STOCHASTIC, HARDWARE
        )
        lost += lost_rows
        tl.store(codes_ptr + row[:, None] * num_columns + column[None, :], code.to(tl.uint8), mask=inside)
        num_groups = (num_columns + WIDTH - 1) // WIDTH
        group = first_column // WIDTH + tl.arange(0, COLUMNS // WIDTH)
        inside_group = (row < num_rows)[:, None] & (group < num_groups)[None, :]
        tl.store(scales_ptr + row[:, None] * num_groups + group[None, :], byte.to(tl.uint8), mask=inside_group)
    if DIRECTIONS & 2:
        words = nothing
        if STOCHASTIC:
            words = tl.trans(random_words(column, first_row, seed, step, 1, COLUMNS, ROWS))
        code, byte, lost_columns = quantise_first(
            x, words, ROWS, COLUMNS, BLOCK, FORMAT, MODE, REGROUP, STOCHASTIC, HARDWARE
        )
        lost += lost_columns
        tl.store(codes_t_ptr + column_wide[None, :] * num_rows + row[:, None], code.to(tl.uint8), mask=inside)
        num_groups_t = (num_rows + WIDTH - 1) // WIDTH
        group_t = first_row // WIDTH + tl.arange(0, ROWS // WIDTH)
        inside_t = (group_t < num_groups_t)[:, None] & (column < num_columns)[None, :]
        tl.store(
            scales_t_ptr + column_wide[None, :] * num_groups_t + group_t[:, None], byte.to(tl.uint8), mask=inside_t
        )
    if REGROUP and lost > 0:
        tl.atomic_add(inexact_ptr, lost.to(tl.int64))


@triton.jit
def load_tile(x_ptr, row, first_column, num_rows, num_columns, stride_row, stride_column, COLUMNS: tl.constexpr):
    """fp32 tile of x, zero outside."""
    column = first_column + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    pointers = x_ptr + row[:, None] * stride_row + column.to(tl.int64)[None, :] * stride_column
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def cast_both_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    codes_t_ptr,
    scales_t_ptr,
    inexact_ptr,
    num_rows,
    num_columns,
    stride_row,
    stride_column,
    seed,
    step,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUB_ROWS: tl.constexpr,
    SUB_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Both planes of `x [M, K]` out of one read of memory: a tile is read in row strips and again in column strips, the
    second time from the first-level cache, which takes half the registers of holding it."""
    planes, noise = (codes_ptr, scales_ptr, codes_t_ptr, scales_t_ptr, inexact_ptr), (seed, step)
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    first_column = tl.program_id(1) * COLUMNS
    for start in range(0, ROWS, SUB_ROWS):
        row = first_row + start + tl.arange(0, SUB_ROWS)
        x = load_tile(x_ptr, row, first_column, num_rows, num_columns, stride_row, stride_column, COLUMNS)
        place = (first_row + start, first_column, num_rows, num_columns)
        store_both(
            x, row, place, planes, noise, SUB_ROWS, COLUMNS, BLOCK, FORMAT, MODE, REGROUP, STOCHASTIC, 1, HARDWARE
        )
    row = first_row + tl.arange(0, ROWS)
    for start in range(0, COLUMNS, SUB_COLUMNS):
        column = first_column + start
        x = load_tile(x_ptr, row, column, num_rows, num_columns, stride_row, stride_column, SUB_COLUMNS)
        place = (first_row, column, num_rows, num_columns)
        store_both(
            x, row, place, planes, noise, ROWS, SUB_COLUMNS, BLOCK, FORMAT, MODE, REGROUP, STOCHASTIC, 2, HARDWARE
        )


@triton.jit
def store_wide_square(wide_ptr, byte, num_squares, padded_squares):
    """fp32 scale of this program's square, and ones behind the last of its line."""
    line = wide_ptr + tl.program_id(0).to(tl.int64) * padded_squares
    bits = tl.where(byte == 255, 0x7FC00000, byte << 23)
    tl.store(line + tl.program_id(1), bits.to(tl.float32, bitcast=True))
    past = num_squares + tl.arange(0, 4)
    tl.store(line + past, 1.0, mask=(past < padded_squares) & (tl.program_id(1) == num_squares - 1))


@triton.jit
def cast_square_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    wide_ptr,
    inexact_ptr,
    num_rows,
    num_columns,
    stride_row,
    stride_column,
    seed,
    step,
    padded_squares,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Squares of BLOCK x BLOCK (merged to 128 x 128 when regrouping); codes row-major, scales one per square.

    Scales of 128 x 128 (one a program) also go to wide `[M / 128, padded_squares]` as fp32, padded with ones.
    """
    SIDE: tl.constexpr = TILE // BLOCK
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    first_column = tl.program_id(1) * TILE
    column = first_column + tl.arange(0, TILE)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    pointers = x_ptr + row[:, None] * stride_row + column.to(tl.int64)[None, :] * stride_column
    x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    words = x.to(tl.int32, bitcast=True).to(tl.uint32, bitcast=True)
    if STOCHASTIC:
        words = random_words(row, first_column, seed, step, 2, TILE, TILE)
    blocks = tl.reshape(x, [SIDE, BLOCK, SIDE, BLOCK])
    amax = tl.max(tl.max(magnitude(blocks), axis=3), axis=1)
    byte = scale_byte(amax, FORMAT, MODE, 0 if BLOCK == 32 else 1)
    scaled = blocks * inverse_power(byte)[:, None, :, None]
    code = encode(scaled, tl.reshape(words, [SIDE, BLOCK, SIDE, BLOCK]), FORMAT, STOCHASTIC, HARDWARE)
    if REGROUP:
        merged = tl.max(byte)
        merged = tl.where(merged == 255, 255, tl.maximum(merged, 1))
        code, inexact = shift_codes(code, (byte - merged)[:, None, :, None], FORMAT, HARDWARE)
        lost = tl.sum(inexact.to(tl.int32))
        lost = tl.where(merged == 255, 0, lost)
        code = tl.where(merged == 255, nan_code_of(FORMAT), code)
        num_squares = (num_columns + TILE - 1) // TILE
        tl.store(scales_ptr + tl.program_id(0) * num_squares + tl.program_id(1), merged.to(tl.uint8))
        store_wide_square(wide_ptr, merged, num_squares, padded_squares)
        if lost > 0:
            tl.atomic_add(inexact_ptr, lost.to(tl.int64))
    else:
        code = tl.where((amax >= 0x7F800000)[:, None, :, None], nan_code_of(FORMAT), code)
        num_squares = (num_columns + BLOCK - 1) // BLOCK
        square_row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
        square_column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
        inside_square = (square_row * BLOCK < num_rows)[:, None] & (square_column < num_squares)[None, :]
        target = scales_ptr + square_row.to(tl.int64)[:, None] * num_squares + square_column[None, :]
        tl.store(target, byte.to(tl.uint8), mask=inside_square)
        if BLOCK == 128:
            store_wide_square(wide_ptr, tl.max(byte), num_squares, padded_squares)
    flat = tl.reshape(code, [TILE, TILE]).to(tl.uint8)
    tl.store(codes_ptr + row[:, None] * num_columns + column[None, :], flat, mask=inside)
