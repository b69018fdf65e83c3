# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""128 rows of one sequence and head under one scale, stored as they lie or transposed: what Hopper's attention reads.

One program a tile and head; which sequence a tile belongs to is searched for, so nothing is built beforehand.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_common import encode, factor_of, magnitude, nan_code_of, scale_byte


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
    of the matrix unit's fragments. Rows past the last offset count as one more sequence. SEARCH: steps of bisection."""
    tile = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    low = tile * 0
    high = low + num_sequences
    for _ in tl.static_range(SEARCH):
        middle = (low + high + 1) // 2
        first = tl.load(offsets_ptr + middle).to(tl.int32) // 128 + middle
        here = first <= tile
        low = tl.where(here, middle, low)
        high = tl.where(here, high, middle - 1)
    begin = tl.load(offsets_ptr + low).to(tl.int32)
    end = tl.load(offsets_ptr + tl.minimum(low + 1, num_sequences)).to(tl.int32)
    end = tl.where(low < num_sequences, end, num_rows)
    first_row = begin + (tile - begin // 128 - low) * 128
    place = tl.arange(0, 128)
    key = place
    if TRANSPOSED:
        key = place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2
    row = first_row + key
    column = tl.arange(0, H)
    inside = (row < end)[:, None] & (column < H)[None, :]
    at = row.to(tl.int64)[:, None] * stride_row + column[None, :]
    x = tl.load(x_ptr + head.to(tl.int64) * stride_head + at, mask=inside, other=0.0).to(tl.float32)
    byte = scale_byte(tl.max(tl.max(magnitude(x), 1), 0), FORMAT, MODE, MIN_BYTE)
    code = encode(x * factor_of(byte, HARDWARE), 0, FORMAT, False, HARDWARE)
    code = tl.where(byte == 255, nan_code_of(FORMAT), code).to(tl.uint8)
    tl.store(scales_ptr + tl.program_id(0), byte.to(tl.uint8))
    if TRANSPOSED:
        code = tl.where(inside, code, 0)  # a row past the end of a tile that is not finite
        target = codes_ptr + tl.program_id(0).to(tl.int64) * (H * 128)
        tl.store(target + column[:, None] * 128 + place[None, :], tl.trans(code))
    else:
        target = (row.to(tl.int64) * HEADS + head)[:, None] * H + column[None, :]
        tl.store(codes_ptr + target, code, mask=inside)
