# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""One scale for a tensor: its largest magnitude by a first kernel, codes both ways by a second.

Tiles of 128 x 128 as `kernel_words` holds them. The second kernel takes the tiles in the opposite order, so that what
the first read last is still in the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_common import emax_of, nan_code_of
from gemworks.precision.kernel_square import store_codes
from gemworks.precision.kernel_tile import load_tile
from gemworks.precision.kernel_words import largest, largest_halves, maximum_of_halves, pack4, value


@triton.constexpr_function
def largest_of(FORMAT):
    """Largest value of E4M3 (0) and E5M2 (1)."""
    return 1.75 * 2.0 ** emax_of(FORMAT)


@triton.jit
def factor_of_amax(amax, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """`tensor_scaling.tensor_factor` of the bits of amax (int32)."""
    divisor = tl.where(amax == 0, 0x3F800000, amax).to(tl.float32, bitcast=True)
    top: tl.constexpr = largest_of(FORMAT)
    bits = tl.div_rn(divisor * 0 + top, divisor).to(tl.int32, bitcast=True)
    bits = tl.minimum(bits, 0x7F7FFFFF)
    if POWER_OF_TWO:
        bits = bits & 0x7F800000
    bits = tl.where(amax == 0, 0x3F800000, bits)
    return tl.where(amax >= 0x7F800000, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_column_tiles", "num_tiles", "real_rows"])
def amax_kernel(
    x_ptr,
    amax_ptr,
    num_columns,
    stride_row,
    num_column_tiles,
    num_tiles,
    real_rows,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Bits of the largest magnitude of `x [real_rows, K]` into an int32 that was zero; x as in `cast_tensor_kernel`."""
    first = tl.zeros([16, 32], tl.int32)
    second = tl.zeros([16, 32], tl.int32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        first_row = (tile // num_column_tiles).to(tl.int64) * 128
        base = x_ptr + first_row * stride_row
        column = (tile % num_column_tiles) * 128
        xs = load_tile(base, stride_row, real_rows - first_row, column, num_columns, 16, 128, PACKED, RAGGED, False)
        if PACKED:
            first = maximum_of_halves(first, largest_halves(xs, 0, HARDWARE), HARDWARE)
            second = maximum_of_halves(second, largest_halves(xs, 1, HARDWARE), HARDWARE)
        else:
            first = tl.maximum(first, tl.maximum(largest(xs, 0), largest(xs, 1)))
            second = tl.maximum(second, tl.maximum(largest(xs, 2), largest(xs, 3)))
    if PACKED:
        both = maximum_of_halves(first, second, HARDWARE)
        amax = tl.max(tl.maximum(both & 0xFFFF, (both >> 16) & 0xFFFF)) << 16
    else:
        amax = tl.max(tl.maximum(first, second))
    tl.atomic_max(amax_ptr, amax, sem="relaxed")


@triton.jit(do_not_specialize=["num_column_tiles", "num_tiles", "real_rows"])
def cast_tensor_kernel(
    x_ptr,
    codes_ptr,
    codes_t_ptr,
    amax_ptr,
    scale_ptr,
    num_rows,
    num_columns,
    stride_row,
    num_column_tiles,
    num_tiles,
    real_rows,
    DIRECTIONS: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """x: `[real_rows, K]`, columns contiguous, bf16 as int32 (PACKED) or any floating point. Codes as in
    `store_codes`; K is a multiple of 16, num_rows of 128, zero behind the real rows. The scale goes to `scale_ptr`."""
    tile = num_tiles - 1 - tl.program_id(0)
    first_row = (tile // num_column_tiles).to(tl.int64) * 128
    first_column = (tile % num_column_tiles) * 128
    base = x_ptr + first_row * stride_row
    xs = load_tile(base, stride_row, real_rows - first_row, first_column, num_columns, 16, 128, PACKED, RAGGED, True)
    amax = tl.load(amax_ptr)
    factor = factor_of_amax(amax, FORMAT, POWER_OF_TWO)
    words = ()
    for i in tl.static_range(8):
        v0 = value(xs[i], 0, PACKED, False, HARDWARE) * factor
        v1 = value(xs[i], 1, PACKED, False, HARDWARE) * factor
        v2 = value(xs[i], 2, PACKED, False, HARDWARE) * factor
        v3 = value(xs[i], 3, PACKED, False, HARDWARE) * factor
        word = pack4(v0, v1, v2, v3, FORMAT, HARDWARE)
        if not HARDWARE:
            word = tl.where(amax >= 0x7F800000, nan_code_of(FORMAT) * 0x01010101, word)
        words = words + (word,)  # noqa: RUF005
    store_codes(words, codes_ptr, codes_t_ptr, first_row, first_column, num_rows, num_columns, DIRECTIONS, HARDWARE)
    if tile == 0:
        tl.store(scale_ptr, tl.div_rn(factor * 0 + 1.0, factor))
