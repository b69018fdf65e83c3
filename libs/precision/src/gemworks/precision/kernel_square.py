# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""128 x 128 squares of bf16, quantised once and stored both ways: codes, and the same codes transposed.

One scale serves both contractions, so an element is rounded once; the transposed codes are bytes exchanged between the
eight rows that a thread owns. How a tile is held: `kernel_words`. R8 = R / 8, C4 = C / 4.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_common import nan_code_of, scale_byte
from gemworks.precision.kernel_tile import load_tile, wide_value
from gemworks.precision.kernel_words import (
    half_factor,
    high_half,
    largest,
    largest_halves,
    low_half,
    pack4,
    pick_bytes,
    scaled_pairs,
    unquads,
    value,
    wide_word,
)


@triton.jit
def transpose4(w0, w1, w2, w3, HARDWARE: tl.constexpr):
    """Four words of four bytes, transposed."""
    a, b = pick_bytes(w0, w1, 0x5140, HARDWARE), pick_bytes(w2, w3, 0x5140, HARDWARE)
    c, d = pick_bytes(w0, w1, 0x7362, HARDWARE), pick_bytes(w2, w3, 0x7362, HARDWARE)
    return (
        pick_bytes(a, b, 0x5410, HARDWARE),
        pick_bytes(a, b, 0x7632, HARDWARE),
        pick_bytes(c, d, 0x5410, HARDWARE),
        pick_bytes(c, d, 0x7632, HARDWARE),
    )


@triton.jit
def square_words(xs, byte, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """Words of four codes along each of the eight rows, under one scale."""
    words = ()
    if HARDWARE:
        factor = half_factor(byte) * 0x10001
        for i in tl.static_range(8):
            a, b = scaled_pairs(xs[i][0], factor), scaled_pairs(xs[i][1], factor)
            word = pack4(low_half(a), high_half(a), low_half(b), high_half(b), FORMAT, True)
            words = words + (word,)  # noqa: RUF005
    else:
        factor = (tl.maximum(254 - byte, 0) << 23).to(tl.float32, bitcast=True)
        for i in tl.static_range(8):
            v0 = value(xs[i], 0, True, False, False) * factor
            v1 = value(xs[i], 1, True, False, False) * factor
            v2 = value(xs[i], 2, True, False, False) * factor
            v3 = value(xs[i], 3, True, False, False) * factor
            word = pack4(v0, v1, v2, v3, FORMAT, False)
            words = words + (tl.where(byte == 255, nan_code_of(FORMAT) * 0x01010101, word),)  # noqa: RUF005
    return words


@triton.jit
def store_codes(
    words,
    codes_ptr,
    codes_t_ptr,
    first_row,
    first_column,
    num_rows,
    num_columns,
    DIRECTIONS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Words of 128 x 128 codes into int32 `[M, K / 4]` (DIRECTIONS & 1) and, transposed, int64 `[K, M / 8]` (2)."""
    R8: tl.constexpr = 16
    C: tl.constexpr = 128
    octet = tl.arange(0, R8)
    num_quads = (num_columns // 16) * 4
    num_octets = (num_rows // 16) * 2
    left_octets = num_octets - first_row // 8
    if DIRECTIONS & 1:
        quad = first_column // 4 + tl.arange(0, C // 4)
        inside = (octet < left_octets)[:, None] & (quad < num_quads)[None, :]
        at = (octet * 8 * num_quads)[:, None] + quad[None, :]
        codes_ptr += first_row * num_quads
        for i in tl.static_range(8):
            tl.store(codes_ptr + i * num_quads + at, words[i], mask=inside)
    if DIRECTIONS & 2:
        low = transpose4(words[0], words[1], words[2], words[3], HARDWARE)
        high = transpose4(words[4], words[5], words[6], words[7], HARDWARE)
        word = unquads(
            wide_word(low[0], high[0]),
            wide_word(low[1], high[1]),
            wide_word(low[2], high[2]),
            wide_word(low[3], high[3]),
            R8,
            C,
        )
        column = tl.arange(0, C)
        inside_t = (column < num_columns - first_column)[:, None] & (octet < left_octets)[None, :]
        target = codes_t_ptr + num_octets.to(tl.int64) * first_column + first_row // 8
        tl.store(target + (column * num_octets)[:, None] + octet[None, :], tl.trans(word), mask=inside_t)


@triton.jit
def store_line(value, ptr, start, first, num_lines, LENGTH: tl.constexpr):
    """One value into `LENGTH` neighbours from `start + first` on, up to `num_lines`."""
    line = tl.arange(0, LENGTH)
    tl.store(ptr + start + first + line, tl.broadcast_to(value, [LENGTH]), mask=line < num_lines - first)


@triton.jit
def store_square(
    xs,
    place,
    codes_ptr,
    codes_t_ptr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """A tile of 128 x 128 under one scale, which is returned: codes both ways."""
    first_row, first_column, num_rows, num_columns = place
    m = tl.maximum(largest_halves(xs, 0, HARDWARE), 0)
    n = tl.maximum(largest_halves(xs, 1, HARDWARE), 0)
    amax = tl.max(tl.maximum(tl.maximum(m & 0xFFFF, m >> 16), tl.maximum(n & 0xFFFF, n >> 16)))
    byte = scale_byte(amax << 16, FORMAT, MODE, 1)
    words = square_words(xs, byte, FORMAT, HARDWARE)
    store_codes(words, codes_ptr, codes_t_ptr, first_row, first_column, num_rows, num_columns, 3, HARDWARE)
    return wide_value(byte)


@triton.jit
def store_squares(
    xs,
    place,
    planes,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Quantise a tile of 128 x 128 bf16 (zero outside) under one scale and store it both ways; planes as in
    `store_tile`, without a count.

    Codes as int32 `[M, K / 4]` with the scale for each row, fp32 `[K / 128, M]`, and as int64 `[K, M / 8]` with one
    scale a square, `[K / 128, M / 128]`, whose rows are padded to four.
    """
    first_row, first_column, num_rows, _ = place
    codes_ptr, scales_ptr, codes_t_ptr, square_ptr, _ = planes
    tl.static_assert(xs[0][0].shape[0] == 16 and xs[0][0].shape[1] == 32, "squares take tiles of 128 x 128")
    scale = store_square(xs, place, codes_ptr, codes_t_ptr, FORMAT, MODE, HARDWARE)
    column_tile = first_column // 128
    store_line(scale, scales_ptr, column_tile.to(tl.int64) * num_rows, first_row, num_rows, 128)
    num_padded = (num_rows + 511) // 512 * 4
    tl.store(square_ptr + column_tile.to(tl.int64) * num_padded + first_row // 128, scale)


@triton.jit(do_not_specialize=["num_column_tiles", "num_padded", "real_rows"])
def cast_squares_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    codes_t_ptr,
    scales_t_ptr,
    square_ptr,
    num_rows,
    num_columns,
    stride_row,
    num_column_tiles,
    num_padded,
    real_rows,
    RAGGED: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """x: bf16 `[real_rows, K]` as int32. Codes as int32 `[M, K / 4]`, transposed as int64 `[K, M / 8]`; K is a multiple
    of 16, M (num_rows) of 128, zero behind the real rows.

    The scale of a square as fp32, three times: for each row `[K / 128, M]`, for each column `[M / 128, K]`, and once in
    `[K / 128, M / 128]` (rows padded to `num_padded`), as its three readers take it.
    """
    R8: tl.constexpr = 16
    C: tl.constexpr = 128
    tile = tl.program_id(0)
    row_tile = tile // num_column_tiles
    column_tile = tile % num_column_tiles
    first_row = row_tile.to(tl.int64) * 128
    first_column = column_tile * 128
    base = x_ptr + first_row * stride_row
    xs = load_tile(base, stride_row, real_rows - first_row, first_column, num_columns, R8, C, True, RAGGED, False)
    place = (first_row, first_column, num_rows, num_columns)
    scale = store_square(xs, place, codes_ptr, codes_t_ptr, FORMAT, MODE, HARDWARE)
    store_line(scale, scales_ptr, column_tile.to(tl.int64) * num_rows, first_row, num_rows, 128)
    store_line(scale, scales_t_ptr, row_tile.to(tl.int64) * num_columns, first_column, num_columns, 128)
    tl.store(square_ptr + column_tile * num_padded + row_tile, scale)


@triton.jit
def plain_square_words(xs, byte, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """`square_words` of fp32 elements."""
    factor = (tl.maximum(254 - byte, 0) << 23).to(tl.float32, bitcast=True)
    words = ()
    for i in tl.static_range(8):
        word = pack4(xs[i][0] * factor, xs[i][1] * factor, xs[i][2] * factor, xs[i][3] * factor, FORMAT, HARDWARE)
        words = words + (tl.where(byte == 255, nan_code_of(FORMAT) * 0x01010101, word),)  # noqa: RUF005
    return words


@triton.jit
def cast_weight_kernel(
    w_ptr,
    codes_ptr,
    square_ptr,
    codes_t_ptr,
    square_t_ptr,
    num_rows,
    num_columns,
    num_padded,
    num_padded_t,
    DIRECTIONS: tl.constexpr,
    PACKED: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """A weight `[N, K]` in 128 x 128 squares, sizes multiples of 128, for forward (DIRECTIONS & 1) and dgrad (2).

    w: contiguous, bf16 as int32 (PACKED) or fp32. Codes as in `store_codes`; scales as fp32, `[N / 128, num_padded]`
    and `[K / 128, num_padded_t]`.
    """
    column_tiles = num_columns // 128
    row_tile = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) % column_tiles
    first_row = row_tile.to(tl.int64) * 128
    first_column = column_tile * 128
    stride = num_columns // 2 if PACKED else num_columns
    base = w_ptr + first_row * stride
    xs = load_tile(base, stride, num_rows - first_row, first_column, num_columns, 16, 128, PACKED, False, False)
    if PACKED:
        m, n = largest_halves(xs, 0, HARDWARE), largest_halves(xs, 1, HARDWARE)
        amax = tl.max(tl.maximum(tl.maximum(m & 0xFFFF, m >> 16), tl.maximum(n & 0xFFFF, n >> 16))) << 16
        byte = scale_byte(amax, FORMAT, MODE, 1)
        words = square_words(xs, byte, FORMAT, HARDWARE)
    else:
        a, b = tl.maximum(largest(xs, 0), largest(xs, 1)), tl.maximum(largest(xs, 2), largest(xs, 3))
        byte = scale_byte(tl.max(tl.maximum(a, b)), FORMAT, MODE, 1)
        words = plain_square_words(xs, byte, FORMAT, HARDWARE)
    store_codes(words, codes_ptr, codes_t_ptr, first_row, first_column, num_rows, num_columns, DIRECTIONS, HARDWARE)
    scale = wide_value(byte)
    if DIRECTIONS & 1:
        tl.store(square_ptr + row_tile * num_padded + column_tile, scale)
    if DIRECTIONS & 2:
        tl.store(square_t_ptr + column_tile * num_padded_t + row_tile, scale)
