# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""128 rows of one sequence and head under one scale, stored as they lie or transposed: what Hopper's attention reads.

One program a tile and head; which sequence a tile belongs to is searched for, so nothing is built beforehand. Letters:
T rows, N heads, H head width, C tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_common import encode, factor_of, magnitude, nan_code_of, scale_byte


@triton.jit
def rows_of_tile(tile, offsets_ptr, num_rows, num_sequences, SEARCH: tl.constexpr):
    """(first row of a tile, end of its sequence); rows past the last offset count as one more sequence.

    The sequence is found by counting those that begin at or before the tile, SEARCH offsets at a time: all loads are
    under way at once, where a bisection would wait for each.
    """
    lane = tl.arange(0, SEARCH)
    sequence = tile * 0 - 1
    for first in range(0, num_sequences + 1, SEARCH):
        known = first + lane <= num_sequences
        place = tl.load(offsets_ptr + first + lane, mask=known, other=0).to(tl.int32) // 128 + first + lane
        sequence += tl.sum((known & (place <= tile)).to(tl.int32), 0)
    begin = tl.load(offsets_ptr + sequence).to(tl.int32)
    end = tl.load(offsets_ptr + tl.minimum(sequence + 1, num_sequences)).to(tl.int32)
    end = tl.where(sequence < num_sequences, end, num_rows)
    return begin + (tile - begin // 128 - sequence) * 128, end


@triton.jit
def key_order():
    """Which key of a transposed tile lies at a place: `head_tiles.KEY_ORDER`."""
    place = tl.arange(0, 128)
    return place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2


@triton.jit
def tile_codes(x, inside, MIN_BYTE: tl.constexpr, FORMAT: tl.constexpr, MODE: tl.constexpr, HARDWARE: tl.constexpr):
    """(uint8 codes, byte) of a tile under one scale, zeros outside even if the tile is not finite."""
    byte = scale_byte(tl.max(tl.max(magnitude(x), 1), 0), FORMAT, MODE, MIN_BYTE)
    code = encode(x * factor_of(byte, HARDWARE), 0, FORMAT, False, HARDWARE)
    code = tl.where(byte == 255, nan_code_of(FORMAT), code)
    return tl.where(inside, code, 0).to(tl.uint8), byte.to(tl.uint8)


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])
def head_tile_kernel(
    x_ptr,
    offsets_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    num_sequences,
    stride_row,
    stride_head,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    SEARCH: tl.constexpr,
    MIN_BYTE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Tile `t // HEADS` of head `t % HEADS` of x [T, N, H]: codes [T, N, H], or [C, N, H, 128] with keys in the order
    of the matrix unit's fragments."""
    head = tl.program_id(0) % HEADS
    first_row, end = rows_of_tile(tl.program_id(0) // HEADS, offsets_ptr, num_rows, num_sequences, SEARCH)
    place = tl.arange(0, 128)
    row = first_row + (key_order() if TRANSPOSED else place)
    column = tl.arange(0, H)
    inside = (row < end)[:, None] & (column < H)[None, :]
    at = row.to(tl.int64)[:, None] * stride_row + column[None, :]
    x = tl.load(x_ptr + head.to(tl.int64) * stride_head + at, mask=inside, other=0.0).to(tl.float32)
    code, byte = tile_codes(x, inside, MIN_BYTE, FORMAT, MODE, HARDWARE)
    tl.store(scales_ptr + tl.program_id(0), byte)
    if TRANSPOSED:
        target = codes_ptr + tl.program_id(0).to(tl.int64) * (H * 128)
        tl.store(target + column[:, None] * 128 + place[None, :], tl.trans(code))
    else:
        target = (row.to(tl.int64) * HEADS + head)[:, None] * H + column[None, :]
        tl.store(codes_ptr + target, code, mask=inside)
