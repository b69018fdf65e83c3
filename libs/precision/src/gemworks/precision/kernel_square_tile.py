# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""Squares of bf16 stored once: a tile is read with 16-byte loads, neighbouring programs take neighbouring columns.

How a tile is held: `kernel_words`. Shape letters: R, C the tile's rows and columns; R8 = R / 8, C4 = C / 4; B the side
of a square; G, H squares along the tile's rows and columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_common import nan_code_of, scale_byte
from gemworks.precision.kernel_pairs import merged_rows, scaled, word_of
from gemworks.precision.kernel_tile import load_tile, wide_value
from gemworks.precision.kernel_words import half_factor, largest_halves, maximum_of_halves, total_lost


@triton.jit
def square_amax(xs, R8: tl.constexpr, C: tl.constexpr, B: tl.constexpr, HARDWARE: tl.constexpr):
    """fp32 bits `[G, H]` of the largest magnitudes of squares."""
    m = maximum_of_halves(largest_halves(xs, 0, HARDWARE), largest_halves(xs, 1, HARDWARE), HARDWARE)
    m = tl.maximum(m & 0xFFFF, m >> 16)
    m = tl.max(tl.reshape(m, [R8, C // B, B // 4]), axis=2)
    return tl.max(tl.reshape(m, [R8 * 8 // B, B // 8, C // B]), axis=1) << 16


@triton.jit
def spread_squares(v, R8: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    """`[G, H]` as `[R8, C4]`, in the steps of the reduction, backwards."""
    G: tl.constexpr = R8 * 8 // B
    H: tl.constexpr = C // B
    v = tl.reshape(tl.broadcast_to(v[:, None, :], [G, B // 8, H]), [R8, H])
    return tl.reshape(tl.broadcast_to(v[:, :, None], [R8, H, B // 4]), [R8, C // 4])


# Else widths of 16 tiles and lucky numbers of rows are other kernels.
@triton.jit(do_not_specialize=["num_column_tiles", "num_padded", "real_rows"])
def cast_square_tile_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    wide_ptr,
    inexact_ptr,
    num_columns,
    stride_row,
    num_column_tiles,
    num_padded,
    real_rows,
    R8: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """x: bf16 `[M, K]` as int32, K a multiple of 16; codes as int32 `[M, K / 4]`; scale bytes, one a square.

    Scales of 128 x 128 (one a program) also go to wide `[M / 128, num_padded]` as fp32, padded with ones. inexact:
    count of the codes that regrouping changed, int64.
    """
    tile = tl.program_id(0)
    row_tile, column_tile = tile // num_column_tiles, tile % num_column_tiles
    first_row = row_tile.to(tl.int64) * (R8 * 8)
    first_column = column_tile * C
    left_rows = real_rows - first_row
    base = x_ptr + first_row * stride_row
    xs = load_tile(base, stride_row, left_rows, first_column, num_columns, R8, C, True, RAGGED, False)
    WIDE: tl.constexpr = B == 128 or REGROUP
    byte = scale_byte(square_amax(xs, R8, C, B, HARDWARE), FORMAT, MODE, 1 if B == 128 else 0)
    own = spread_squares(byte << 7, R8, C, B)
    if WIDE:
        one = tl.max(byte)
        one = tl.where(one == 255, 255, tl.maximum(one, 1))
        f = own * 0 + half_factor(one) * 0x10001
        wide = own * 0 + (one << 7)
        tl.store(scales_ptr + row_tile.to(tl.int64) * num_column_tiles + column_tile, one.to(tl.uint8))
        line = wide_ptr + row_tile.to(tl.int64) * num_padded
        tl.store(line + column_tile, wide_value(one))
        # What pads a contraction must be finite.
        past = num_column_tiles + tl.arange(0, 4)
        tl.store(line + past, 1.0, mask=(past < num_padded) & (column_tile == num_column_tiles - 1))
    else:
        f = spread_squares(half_factor(byte) * 0x10001, R8, C, B)
        wide = own
        num_squares = (num_columns + B - 1) // B
        g = first_row // B + tl.arange(0, R8 * 8 // B)
        h = first_column // B + tl.arange(0, C // B)
        inside = (g * B < real_rows)[:, None] & (h < num_squares)[None, :]
        tl.store(scales_ptr + g[:, None] * num_squares + h[None, :], byte.to(tl.uint8), mask=inside)
    num_quads = (num_columns // 16) * 4
    octet = tl.arange(0, R8)
    quad = first_column // 4 + tl.arange(0, C // 4)
    at = (octet * 8 * num_quads)[:, None] + quad[None, :]
    real = (quad < num_quads)[None, :]
    inside_octet = (octet < (left_rows // 16) * 2)[:, None] & real
    codes_ptr += first_row * num_quads
    lost = tl.zeros([R8, C // 4], tl.int32)
    for j in tl.static_range(4):
        words = ()
        for h in tl.static_range(2):
            y0, y1 = scaled(xs[2 * j + h][0], f, HARDWARE), scaled(xs[2 * j + h][1], f, HARDWARE)
            words = words + (word_of(y0, y0, y1, y1, f, f, f, f, 0x0101, FORMAT, HARDWARE),)  # noqa: RUF005
        if REGROUP:
            xa, xb = xs[2 * j], xs[2 * j + 1]
            a, b, lost = merged_rows(words[0], words[1], xa, xb, own, wide, lost, False, MODE, HARDWARE)
            words = (a, b)
        for h in tl.static_range(2):
            word = words[h]
            if not HARDWARE:
                word = tl.where((wide >> 7) == 255, nan_code_of(FORMAT) * 0x01010101, word)
            mask = inside_octet
            if RAGGED:
                mask = (octet * 8 + 2 * j + h < left_rows)[:, None] & real
            tl.store(codes_ptr + (2 * j + h) * num_quads + at, word, mask=mask)
    if REGROUP:
        count = total_lost(lost, HARDWARE)
        if count > 0:
            tl.atomic_add(inexact_ptr, count.to(tl.int64))
