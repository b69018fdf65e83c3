# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""Words of codes out of a tile in registers: what the fast casts share, alone and behind a norm or an activation.

A thread owns eight consecutive rows by eight consecutive columns: its row codes pack into words along the row, its
column codes into 8-byte words along the column, so that only whole words cross shared memory on their way to the
transposed plane. The tile is held as a tuple of eight rows modulo 8. A row is a tuple of its columns modulo 4: four
fp32 `[R8, C4]`, or, of bf16 (PACKED), two int32 `[R8, C4]` of two columns each: half the registers, and maxima of two
magnitudes in one instruction.

Shape letters: R, C the tile's rows and columns; R8 = R / 8, C4 = C / 4; B elements per block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_common import (
    encode,
    factor_of,
    inverse_power,
    magnitude,
    nan_code_of,
    scale_byte,
    shift_codes,
)


@triton.constexpr_function
def nan_word_of(FORMAT):
    """Four NaN codes as an int32."""
    return nan_code_of(FORMAT) * 0x01010101


@triton.jit
def quads(x, R8: tl.constexpr, C: tl.constexpr):
    """`[R8, C]` as the tuple of its columns 0, 1, 2, 3 modulo 4."""
    even, odd = tl.split(tl.reshape(x, [R8, C // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def unquads(x0, x1, x2, x3, R8: tl.constexpr, C: tl.constexpr):
    """The inverse of `quads`."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [R8, C])


@triton.jit
def maximum_of_halves(a, b, HARDWARE: tl.constexpr):
    """Larger of the low and of the high 16 bits, none negative, of two int32."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = tl.maximum(a & 0xFFFF, b & 0xFFFF)
        return low | (tl.maximum(a >> 16, b >> 16) << 16)


@triton.jit
def larger_halves(a, b):
    """`maximum_of_halves` in hardware, as a reduction."""
    return maximum_of_halves(a, b, True)


@triton.jit
def pick_bytes(a, b, SELECTOR: tl.constexpr, HARDWARE: tl.constexpr):
    """Four of the eight bytes of (a, b), named by the digits of SELECTOR from the lowest."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {SELECTOR};", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        out = a & 0
        for i in tl.static_range(4):
            digit: tl.constexpr = (SELECTOR >> (4 * i)) & 7
            source = a if digit < 4 else b
            out = out | (((source >> (8 * (digit % 4))) & 0xFF) << (8 * i))
        return out


@triton.jit
def reduce_halves(m, AXIS: tl.constexpr, HARDWARE: tl.constexpr):
    """Largest of the low and of the high 16 bits, none negative, along a dim of int32."""
    if HARDWARE:
        return tl.reduce(m, AXIS, larger_halves)
    else:
        return tl.max(m & 0xFFFF, axis=AXIS) | (tl.max(m >> 16, axis=AXIS) << 16)


@triton.jit
def scaled_pairs(x, factors):
    """Two bf16 times two bf16 powers of two (or NaN), in int32: exact but for results under 2^-126, whose code is 0."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
        "=r,r,r",
        [x, factors],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def low_half(x):
    """fp32 of the lower of two bf16."""
    return (x << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(x):
    """fp32 of the upper of two bf16."""
    return (x & -65536).to(tl.float32, bitcast=True)


@triton.jit
def half_of(x, HALF: tl.constexpr):
    """fp32 of the lower (0) or upper (1) of two bf16."""
    if HALF == 0:
        return low_half(x)
    else:
        return high_half(x)


@triton.jit
def half_factor(byte):
    """bf16 bits of 2^-(byte - 127), NaN for byte 255, which the conversion turns into the code of a NaN."""
    return tl.where(byte == 255, 0x7FC0, (254 - byte) << 7)


@triton.jit
def round_to_bf16(low, high, HARDWARE: tl.constexpr):
    """Two fp32 rounded to nearest even bf16, in an int32."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        a, b = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
        a_nan, b_nan = (a & 0x7FFFFFFF) > 0x7F800000, (b & 0x7FFFFFFF) > 0x7F800000
        a = tl.where(a_nan, 0x7FC0, ((a + 0x7FFF + ((a >> 16) & 1)) >> 16) & 0xFFFF)
        b = tl.where(b_nan, 0x7FC0, ((b + 0x7FFF + ((b >> 16) & 1)) >> 16) & 0xFFFF)
        return a | (b << 16)


@triton.jit
def sum_of_pairs(a, b, HARDWARE: tl.constexpr):
    """Two sums of bf16 rounded to bf16, in int32: one rounding of the exact sum, as in fp32 and back."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, $1, one, $2; }",
            "=r,r,r",
            [a, b],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return round_to_bf16(low_half(a) + low_half(b), high_half(a) + high_half(b), False)


@triton.jit
def value(row, j: tl.constexpr, PACKED: tl.constexpr, AGAIN: tl.constexpr, HARDWARE: tl.constexpr):
    """Column j modulo 4 of a row, fp32 `[R8, C4]`.

    AGAIN widens by another instruction, so that the compiler does not keep the first result in registers.
    """
    if not PACKED:
        return row[j]
    elif AGAIN and HARDWARE:
        if j % 2 == 0:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0, 0x1044;", "=f,r", [row[j // 2]], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0, 0x3244;", "=f,r", [row[j // 2]], dtype=tl.float32, is_pure=True, pack=1
            )
    elif j % 2 == 0:
        return (row[j // 2] << 16).to(tl.float32, bitcast=True)
    else:
        return (row[j // 2] & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pack4(v0, v1, v2, v3, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """Four codes in an int32, v0 in the lowest byte; saturating. Two conversions of the hardware where it has them."""
    if HARDWARE and FORMAT == 0:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi;"
            " cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;"
            " mov.b32 $0, {lo, hi}; }",
            "=r,f,f,f,f",
            [v0, v1, v2, v3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    elif HARDWARE and FORMAT == 1:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi;"
            " cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1;"
            " cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3;"
            " mov.b32 $0, {lo, hi}; }",
            "=r,f,f,f,f",
            [v0, v1, v2, v3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        c0 = encode(v0, v0, FORMAT, False, False)
        c1 = encode(v1, v1, FORMAT, False, False)
        c2 = encode(v2, v2, FORMAT, False, False)
        c3 = encode(v3, v3, FORMAT, False, False)
        return c0 | (c1 << 8) | (c2 << 16) | (c3 << 24)


@triton.jit
def pack4_merged(x0, x1, x2, x3, byte, wide, lost, FORMAT: tl.constexpr):
    """Codes of x under the scale `byte` of their own block of 32, moved to the scale `wide` of 128 and rounded again,
    packed; and `lost` plus the codes that the second rounding changed. The definition; `merged_words` is quicker."""
    f = inverse_power(byte)
    shift = tl.minimum(byte - wide, 0)
    c0, n0 = shift_codes(encode(x0 * f, x0, FORMAT, False, False), shift, FORMAT, False)
    c1, n1 = shift_codes(encode(x1 * f, x1, FORMAT, False, False), shift, FORMAT, False)
    c2, n2 = shift_codes(encode(x2 * f, x2, FORMAT, False, False), shift, FORMAT, False)
    c3, n3 = shift_codes(encode(x3 * f, x3, FORMAT, False, False), shift, FORMAT, False)
    lost += n0.to(tl.int32) + n1.to(tl.int32) + n2.to(tl.int32) + n3.to(tl.int32)
    return c0 | (c1 << 8) | (c2 << 16) | (c3 << 24), lost


@triton.jit
def total_lost(lost, HALVES: tl.constexpr):
    """Sum of int32 counts, or of two fp16 counts in each."""
    if HALVES:
        low = lost.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (lost >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.sum(low + high).to(tl.int32)
    else:
        return tl.sum(lost)


@triton.jit
def spread_last(v, R8: tl.constexpr, G: tl.constexpr, W: tl.constexpr):
    """`[R8, G]` as `[R8, G * W]`, every value W times."""
    return tl.reshape(tl.broadcast_to(v[:, :, None], [R8, G, W]), [R8, G * W])


@triton.jit
def spread_first(v, G: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
    """`[G, C]` as `[G * W, C]`, every row W times."""
    return tl.reshape(tl.broadcast_to(v[:, None, :], [G, W, C]), [G * W, C])


@triton.jit
def row_words(
    x,
    lost,
    R8: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    PACKED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Words `[R8, C4]`, scale bytes `[R8, C / width]` and the count, of one row of every eight, in blocks along it."""
    G: tl.constexpr = C // B
    B4: tl.constexpr = B // 4
    if PACKED:
        m = maximum_of_halves(x[0] & 0x7FFF7FFF, x[1] & 0x7FFF7FFF, HARDWARE)
        m = tl.maximum(m & 0xFFFF, m >> 16)
        amax = tl.max(tl.reshape(m, [R8, G, B4]), axis=2) << 16
    else:
        m = tl.maximum(tl.maximum(magnitude(x[0]), magnitude(x[1])), tl.maximum(magnitude(x[2]), magnitude(x[3])))
        amax = tl.max(tl.reshape(m, [R8, G, B4]), axis=2)
    byte = scale_byte(amax, FORMAT, MODE, 0 if B == 32 else 1)
    x0 = value(x, 0, PACKED, False, HARDWARE)
    x1 = value(x, 1, PACKED, False, HARDWARE)
    x2 = value(x, 2, PACKED, False, HARDWARE)
    x3 = value(x, 3, PACKED, False, HARDWARE)
    if REGROUP:
        merged = tl.max(tl.reshape(byte, [R8, G // 4, 4]), axis=2)
        merged = tl.where(merged == 255, 255, tl.maximum(merged, 1))
        four = spread_last(merged, R8, G // 4, 4)
        wide = spread_last(four, R8, G, B4)
        own = spread_last(byte, R8, G, B4)
        word, counted = pack4_merged(x0, x1, x2, x3, own, wide, lost, FORMAT)
        poisoned = wide == 255
        return tl.where(poisoned, nan_word_of(FORMAT), word), merged, tl.where(poisoned, lost, counted)
    else:
        f = spread_last(factor_of(byte, HARDWARE), R8, G, B4)
        word = pack4(x0 * f, x1 * f, x2 * f, x3 * f, FORMAT, HARDWARE)
        if not HARDWARE:
            word = tl.where(spread_last(byte, R8, G, B4) == 255, nan_word_of(FORMAT), word)
        return word, byte, lost


@triton.jit
def wide_word(low, high):
    """int64 of two int32, low in the lower half."""
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def largest(xs, j: tl.constexpr):
    """Largest magnitude of the eight rows, column j modulo 4."""
    m = magnitude(xs[0][j])
    for i in tl.static_range(1, 8):
        m = tl.maximum(m, magnitude(xs[i][j]))
    return m


@triton.jit
def largest_halves(xs, j: tl.constexpr, HARDWARE: tl.constexpr):
    """Largest magnitudes of the eight rows, columns 2j and 2j + 1 modulo 4, as halves of an int32."""
    m = xs[0][j] & 0x7FFF7FFF
    for i in tl.static_range(1, 8):
        m = maximum_of_halves(m, xs[i][j] & 0x7FFF7FFF, HARDWARE)
    return m


@triton.jit
def column_amax(xs, R8: tl.constexpr, C: tl.constexpr, G: tl.constexpr, PACKED: tl.constexpr, HARDWARE: tl.constexpr):
    """fp32 bits `[G, C]` of the largest magnitudes of G equal groups of rows."""
    if PACKED:
        m = tl.reshape(tl.join(largest_halves(xs, 0, HARDWARE), largest_halves(xs, 1, HARDWARE)), [R8, C // 2])
        if HARDWARE:
            m = tl.reduce(tl.reshape(m, [G, R8 // G, C // 2]), 1, larger_halves)
            return tl.reshape(tl.join(m << 16, m & -65536), [G, C])
        else:
            m = tl.reshape(tl.join(m << 16, m & -65536), [G, R8 // G, C])
            return tl.max(m, axis=1)
    else:
        m = unquads(largest(xs, 0), largest(xs, 1), largest(xs, 2), largest(xs, 3), R8, C)
        return tl.max(tl.reshape(m, [G, R8 // G, C]), axis=1)


@triton.jit
def column_words(
    xs,
    lost,
    R8: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    PACKED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """int64 words `[R8, C]` of eight rows each, scale bytes `[R / width, C]` and the count, in blocks along the
    rows."""
    G: tl.constexpr = R8 * 8 // B
    B8: tl.constexpr = B // 8
    byte = scale_byte(column_amax(xs, R8, C, G, PACKED, HARDWARE), FORMAT, MODE, 0 if B == 32 else 1)
    if REGROUP:
        # The scale of 128 is that of the largest of its four blocks: scale bytes grow with amax.
        merged = scale_byte(column_amax(xs, R8, C, G // 4, PACKED, HARDWARE), FORMAT, MODE, 1)
        wide = spread_first(merged, G // 4, 16, C)
        own = quads(spread_first(byte, G, B8, C), R8, C)
        bad = quads(wide, R8, C)
        poison = wide == 255
        byte = merged
        f = own  # not read: words are merged below
    else:
        f = quads(spread_first(factor_of(byte, HARDWARE), G, B8, C), R8, C)
        own = f
        bad = f
    words = ()
    for j in tl.static_range(4):
        v = ()
        for i in tl.static_range(8):
            x = value(xs[i], j, PACKED, True, HARDWARE)
            v = v + (x if REGROUP else x * f[j],)  # noqa: RUF005
        if REGROUP:
            low, counted = pack4_merged(v[0], v[1], v[2], v[3], own[j], bad[j], lost, FORMAT)
            high, counted = pack4_merged(v[4], v[5], v[6], v[7], own[j], bad[j], counted, FORMAT)
            lost = tl.where(bad[j] == 255, lost, counted)
        else:
            low = pack4(v[0], v[1], v[2], v[3], FORMAT, HARDWARE)
            high = pack4(v[4], v[5], v[6], v[7], FORMAT, HARDWARE)
        words = words + (wide_word(low, high),)  # noqa: RUF005
    word = unquads(words[0], words[1], words[2], words[3], R8, C)
    if REGROUP:
        word = tl.where(poison, nan_word_of(FORMAT) * 0x100000001, word)
    elif not HARDWARE:
        word = tl.where(spread_first(byte, G, B8, C) == 255, nan_word_of(FORMAT) * 0x100000001, word)
    return word, byte, lost
