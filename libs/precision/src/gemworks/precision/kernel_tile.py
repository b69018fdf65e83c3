# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""The fast cast: a tile is read once with 16-byte loads, stays in registers, and is quantised both ways from there.

Shape letters: R, C the tile's rows and columns; R8 = R / 8, C4 = C / 4; B elements per block. How a tile is held:
`kernel_words`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_pairs import column_pair_words, row_pair_words, store_row_pairs
from gemworks.precision.kernel_words import column_words, high_half, low_half, quads, row_words, total_lost


@triton.jit
def wide_value(byte):
    """fp32 2^(byte - 127) of bytes 1 to 254, NaN of 255."""
    return tl.where(byte == 255, 0x7FC00000, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_tile(
    xs,
    place,
    planes,
    R8: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    PACKED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Quantise a tile (zero outside) along its rows (DIRECTIONS & 1) and its columns (DIRECTIONS & 2), and store it.

    place: first row and column of the tile, rows and columns of the matrix.
    planes: pointers to codes, scales, transposed codes, their scales, and the int64 count of inexact codes. Codes are
    int32 `[M, K / 4]`, transposed codes int64 `[K, M / 8]`. Scales lie block by block, so that a tile
    writes whole lines: `[K / width, M]` and `[M / width, K]`, as bytes or, where blocks are 128 wide, as the fp32 that
    cuBLAS takes. K is a multiple of 16, M (num_rows) of 128: products read no more than was written, whatever the
    number of rows that are real. Offsets inside a tile fit 32 bits (the launcher checks).
    """
    first_row, first_column, num_rows, num_columns = place
    codes_ptr, scales_ptr, codes_t_ptr, scales_t_ptr, inexact_ptr = planes
    WIDTH: tl.constexpr = 128 if REGROUP else B
    C4: tl.constexpr = C // 4
    # Regrouped E5M2 is rare enough for the plain way alone.
    PAIRS: tl.constexpr = PACKED and not (REGROUP and FORMAT != 0)
    octet = tl.arange(0, R8)
    # In this form the compiler sees that masks are constant over whole vectors.
    num_quads = (num_columns // 16) * 4
    num_octets = (num_rows // 16) * 2
    left_octets = num_octets - first_row // 8
    lost = tl.zeros([R8, C4], tl.int32)
    if DIRECTIONS & 1:
        num_groups = (num_columns + WIDTH - 1) // WIDTH
        quad = first_column // 4 + tl.arange(0, C4)
        inside = (octet < left_octets)[:, None] & (quad < num_quads)[None, :]
        codes_ptr += first_row * num_quads
        at = (octet * 8 * num_quads)[:, None] + quad[None, :]
        group = tl.arange(0, C // WIDTH)
        first_group = first_column // WIDTH
        start = num_rows.to(tl.int64) * first_group + first_row
        inside_group = (octet < left_octets)[:, None] & (group < num_groups - first_group)[None, :]
        at_scale = scales_ptr + start + (group * num_rows)[None, :] + (octet * 8)[:, None]
        b = ()
        if PAIRS:
            for j in tl.static_range(4):
                even, odd, scale, lost = row_pair_words(xs, lost, j, R8, C, B, FORMAT, MODE, REGROUP, HARDWARE)
                tl.store(codes_ptr + (2 * j) * num_quads + at, even, mask=inside)
                tl.store(codes_ptr + (2 * j + 1) * num_quads + at, odd, mask=inside)
                b = b + (scale,)  # noqa: RUF005
            store_row_pairs(b[0], b[1], b[2], b[3], at_scale, inside_group, WIDTH, HARDWARE)
        else:
            for i in tl.static_range(8):
                word, byte, lost = row_words(xs[i], lost, R8, C, B, FORMAT, MODE, REGROUP, PACKED, HARDWARE)
                tl.store(codes_ptr + i * num_quads + at, word, mask=inside)
                store_scales(byte, at_scale + i, inside_group, WIDTH)
    if DIRECTIONS & 2:
        num_groups_t = (num_rows + WIDTH - 1) // WIDTH
        column = tl.arange(0, C)
        left_columns = num_columns - first_column
        inside = (column < left_columns)[:, None] & (octet < left_octets)[None, :]
        target = codes_t_ptr + num_octets.to(tl.int64) * first_column + first_row // 8
        group = tl.arange(0, R8 * 8 // WIDTH)
        first_group = first_row // WIDTH
        start = num_columns.to(tl.int64) * first_group + first_column
        inside_group = (group < num_groups_t - first_group)[:, None] & (column < left_columns)[None, :]
        at_scale = scales_t_ptr + start + (group * num_columns)[:, None] + column[None, :]
        if PAIRS:
            word, scale, lost = column_pair_words(xs, lost, R8, C, B, FORMAT, MODE, REGROUP, HARDWARE)
            if WIDTH == 128:
                both = tl.join(low_half(scale), high_half(scale))
            else:
                both = tl.join((scale >> 7) & 0xFF, (scale >> 23) & 0xFF).to(tl.uint8)
            tl.store(at_scale, tl.reshape(both, [R8 * 8 // WIDTH, C]), mask=inside_group)
        else:
            word, byte, lost = column_words(xs, lost, R8, C, B, FORMAT, MODE, REGROUP, PACKED, HARDWARE)
            store_scales(byte, at_scale, inside_group, WIDTH)
        target += (column * num_octets)[:, None] + octet[None, :]
        tl.store(target, tl.trans(word), mask=inside)
    if REGROUP:
        count = total_lost(lost, PAIRS and HARDWARE)
        if count > 0:
            tl.atomic_add(inexact_ptr, count.to(tl.int64))


@triton.jit
def store_scales(byte, ptr, inside, WIDTH: tl.constexpr):
    """Scale bytes, or the fp32 that they mean where blocks are wide."""
    if WIDTH == 128:
        tl.store(ptr, wide_value(byte), mask=inside)
    else:
        tl.store(ptr, byte.to(tl.uint8), mask=inside)


@triton.jit
def load_tile(
    x_ptr,
    stride_row,
    left_rows,
    first_column,
    num_columns,
    R8: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
    LAST_USE: tl.constexpr,
):
    """Rows 0 to 7 modulo 8, each a tuple of its columns modulo 4, zero outside; `x_ptr` is at the tile's first row.

    PACKED: x as int32 `[M, K / 2]`, stride_row in int32. Without RAGGED, rows are a multiple of 16, and one mask serves
    all eight loads. LAST_USE: nobody reads x again soon.
    """
    policy: tl.constexpr = "evict_first" if LAST_USE else ""
    octet = tl.arange(0, R8)
    left_octets = (left_rows // 16) * 2
    xs = ()
    if PACKED:
        column = first_column // 2 + tl.arange(0, C // 2)
        real = (column < (num_columns // 16) * 8)[None, :]
    else:
        column = first_column + tl.arange(0, C)
        real = (column < num_columns)[None, :]
    inside = (octet < left_octets)[:, None] & real
    at = (octet * 8 * stride_row)[:, None] + column[None, :]
    for i in tl.static_range(8):
        mask = inside
        if RAGGED:
            mask = (octet * 8 + i < left_rows)[:, None] & real
        x = tl.load(x_ptr + i * stride_row + at, mask=mask, other=0, eviction_policy=policy)
        if PACKED:  # noqa: SIM108
            xs = xs + (tl.split(tl.reshape(x, [R8, C // 4, 2])),)  # noqa: RUF005
        else:
            xs = xs + (quads(x.to(tl.float32), R8, C),)  # noqa: RUF005
    return xs


@triton.jit
def store_pairs(pair, x_ptr, i: tl.constexpr, first_column, left_rows, num_columns, R8: tl.constexpr, C: tl.constexpr):
    """Row i of every eight of a tile of bf16 pairs, `[M, K]` contiguous, x_ptr at the tile's first row."""
    row = tl.arange(0, R8) * 8 + i
    column = first_column // 2 + tl.arange(0, C // 2)
    half = (num_columns // 16) * 8
    inside = (row < left_rows)[:, None] & (column < half)[None, :]
    x = tl.reshape(tl.join(pair[0], pair[1]), [R8, C // 2])
    tl.store(x_ptr + (row * half)[:, None] + column[None, :], x, mask=inside)


# Else widths of 16 tiles and lucky numbers of rows are other kernels.
@triton.jit(do_not_specialize=["num_column_tiles", "real_rows"])
def cast_tile_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    codes_t_ptr,
    scales_t_ptr,
    inexact_ptr,
    num_rows,
    num_columns,
    stride_row,
    num_column_tiles,
    real_rows,
    R8: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Planes of `x [real_rows, K]` (columns contiguous) out of one read, with zero rows up to num_rows; neighbouring
    programs take neighbouring columns."""
    tile = tl.program_id(0)
    first_row = (tile // num_column_tiles).to(tl.int64) * (R8 * 8)
    first_column = (tile % num_column_tiles) * C
    base = x_ptr + first_row * stride_row
    xs = load_tile(base, stride_row, real_rows - first_row, first_column, num_columns, R8, C, PACKED, RAGGED, False)
    planes = (codes_ptr, scales_ptr, codes_t_ptr, scales_t_ptr, inexact_ptr)
    place = (first_row, first_column, num_rows, num_columns)
    store_tile(xs, place, planes, R8, C, B, FORMAT, MODE, REGROUP, DIRECTIONS, PACKED, HARDWARE)
