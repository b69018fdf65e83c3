# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""Casts of bf16 in pairs: maxima, scales, factors and products of two elements in one instruction.

A tile is held as in `kernel_words`, a row as two int32 `[R8, C4]` of two columns each. Largest magnitudes are kept in
pairs, too: of two rows (row blocks) or of two columns (column blocks), as the upper 16 bits of their fp32. From there
a scale is a bf16 whose exponent field is the E8M0 byte, and is NaN where its block is not finite.

Shape letters: R8 = R / 8, C4 = C / 4 of the tile's rows and columns; G blocks along the blocked dim; B elements
a block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_common import emax_of, encode, inverse_power, scale_carry_of, shift_codes
from gemworks.precision.kernel_words import (
    half_of,
    largest_halves,
    maximum_of_halves,
    pack4,
    pick_bytes,
    reduce_halves,
    scaled_pairs,
    spread_first,
    spread_last,
    unquads,
    wide_word,
)


@triton.jit
def scale_pairs(m, FORMAT: tl.constexpr, MODE: tl.constexpr, LEAST: tl.constexpr, HARDWARE: tl.constexpr):
    """Two E8M0 bytes, shifted left by 7, of two largest magnitudes; of no use where one is not finite."""
    # As in `scale_byte`: the sum carries into the exponent where the mode rounds up.
    carry: tl.constexpr = (scale_carry_of(FORMAT, MODE) >> 16) * 0x10001
    least: tl.constexpr = ((emax_of(FORMAT) + LEAST) << 7) * 0x10001
    bias: tl.constexpr = (emax_of(FORMAT) << 7) * 0x10001
    return maximum_of_halves((m + carry) & 0x7F807F80, least, HARDWARE) - bias


@triton.jit
def or_nan(m, pair, HARDWARE: tl.constexpr):
    """Two bf16, NaN where the magnitude in m is not finite: `0 * m + pair`."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $2; }",
            "=r,r,r",
            [m, pair],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = tl.where((m & 0xFFFF) >= 0x7F80, 0x7FC0, pair & 0xFFFF)
        return low | (tl.where((m >> 16) >= 0x7F80, 0x7FC0, pair >> 16) << 16)


@triton.jit
def scales_and_factors(m, FORMAT: tl.constexpr, MODE: tl.constexpr, LEAST: tl.constexpr, HARDWARE: tl.constexpr):
    """Two scales 2^(byte - 127) and their inverses, as bf16; the exponent of a scale of byte 0 is lost, its field is
    not."""
    scale = scale_pairs(m, FORMAT, MODE, LEAST, HARDWARE)
    return or_nan(m, scale, HARDWARE), or_nan(m, 0x7F007F00 - scale, HARDWARE)


@triton.jit
def row_maxima(xs, j: tl.constexpr, R8: tl.constexpr, C: tl.constexpr, B: tl.constexpr, HARDWARE: tl.constexpr):
    """Largest magnitudes `[R8, C / B]` of rows 2j and 2j + 1, in blocks along the rows."""
    a = maximum_of_halves(xs[2 * j][0] & 0x7FFF7FFF, xs[2 * j][1] & 0x7FFF7FFF, HARDWARE)
    b = maximum_of_halves(xs[2 * j + 1][0] & 0x7FFF7FFF, xs[2 * j + 1][1] & 0x7FFF7FFF, HARDWARE)
    m = maximum_of_halves(pick_bytes(a, b, 0x5410, HARDWARE), pick_bytes(a, b, 0x7632, HARDWARE), HARDWARE)
    return reduce_halves(tl.reshape(m, [R8, C // B, B // 4]), 2, HARDWARE)


@triton.jit
def column_maxima(xs, R8: tl.constexpr, C: tl.constexpr, G: tl.constexpr, HARDWARE: tl.constexpr):
    """Largest magnitudes `[G, C / 2]` of columns in pairs, in G equal groups of rows."""
    a, b = largest_halves(xs, 0, HARDWARE), largest_halves(xs, 1, HARDWARE)
    m = tl.reshape(tl.join(a, b), [G, R8 // G, C // 2])
    return reduce_halves(m, 1, HARDWARE)


@triton.jit
def word_of(y0, y1, y2, y3, f0, f1, f2, f3, H: tl.constexpr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """Four codes in an int32: of the halves H (a digit each, from the highest) of four pairs.

    In hardware the pairs are scaled already, and the factors unused.
    """
    v0 = half_of(y0, (H >> 12) & 1)
    v1 = half_of(y1, (H >> 8) & 1)
    v2 = half_of(y2, (H >> 4) & 1)
    v3 = half_of(y3, H & 1)
    if HARDWARE:
        return pack4(v0, v1, v2, v3, FORMAT, True)
    else:
        g0 = half_of(f0, (H >> 12) & 1)
        g1 = half_of(f1, (H >> 8) & 1)
        g2 = half_of(f2, (H >> 4) & 1)
        g3 = half_of(f3, H & 1)
        # A NaN factor poisons its own element alone, whose code is that of a NaN.
        word = pack4(v0 * g0, v1 * g1, v2 * g2, v3 * g3, FORMAT, False)
        word = tl.where(g0 == g0, word, (word & ~0xFF) | 0x7F)
        word = tl.where(g1 == g1, word, (word & ~0xFF00) | 0x7F00)
        word = tl.where(g2 == g2, word, (word & ~0xFF0000) | 0x7F0000)
        return tl.where(g3 == g3, word, (word & 0xFFFFFF) | 0x7F000000)


@triton.jit
def scaled(x, factors, HARDWARE: tl.constexpr):
    """Two bf16 times two factors where hardware has that; otherwise x, for `word_of` to multiply."""
    if HARDWARE:
        return scaled_pairs(x, factors)
    else:
        return x


Word = tuple[int, tuple[int, int, int, int], int, bool]


def merging_asm(words: list[Word], lost: int, own: int, wide: int, saturates: bool) -> tl.constexpr:
    """PTX that follows the definition of `merged_words` for those words of a thread that may need it, behind one branch
    for all of them.

    words: (operand of a word, operands of its four elements, their halves H, upper half of own and wide?); the others
    are operands, too.
    """
    # Bit 7 of m + 0x77 is set where the magnitude m >= 9; the sum never carries. A mode that saturates (floor,
    # even) adds nothing, so that the quick way is never taken.
    slack = 0 if saturates else 0x77777777
    text = (
        "{ .reg .pred p; .reg .b16 lo, hi; .reg .b32 d, e, f, g, s, o, w, wp, wq, sp, sq; .reg .f32 h, i, j, k, l;"
        f" and.b32 d, ${words[0][0]}, 0x7f7f7f7f; add.s32 d, d, {slack};"
    )
    for word, *_ in words[1:]:
        text += f" and.b32 e, ${word}, 0x7f7f7f7f; add.s32 e, e, {slack}; and.b32 d, d, e;"
    text += " and.b32 d, d, 0x80808080; setp.eq.u32 p, d, 0x80808080; @p bra DONE;"
    for number, (word, xs, halves, upper) in enumerate(words):
        digits = [(halves >> place) & 1 for place in (12, 8, 4, 0)]
        take = [
            f" and.b32 {name}, ${x}, 0xffff0000;" if digit else f" shl.b32 {name}, ${x}, 16;"
            for name, x, digit in zip("defg", xs, digits, strict=True)
        ]
        shift = 23 if upper else 7
        text += (
            f" and.b32 d, ${word}, 0x7f7f7f7f; add.s32 d, d, {slack}; and.b32 d, d, 0x80808080;"
            f" setp.eq.u32 p, d, 0x80808080; @p bra NEXT{number};"
            f" bfe.u32 o, ${own}, {shift}, 8; bfe.u32 w, ${wide}, {shift}, 8;"
            f" setp.ge.s32 p, o, w; @p bra NEXT{number};"
            f" setp.eq.s32 p, w, 255; @p bra NEXT{number};"
            " sub.s32 s, 254, o; shl.b32 s, s, 23; mov.b32 h, s;"
            + "".join(take)
            + " mov.b32 i, d; mov.b32 j, e; mov.b32 k, f; mov.b32 l, g;"
            " mul.rn.f32 i, i, h; mul.rn.f32 j, j, h; mul.rn.f32 k, k, h; mul.rn.f32 l, l, h;"
            " cvt.rn.satfinite.e4m3x2.f32 lo, j, i; cvt.rn.satfinite.e4m3x2.f32 hi, l, k;"
            " sub.s32 s, o, w; max.s32 e, s, -14; sub.s32 d, s, e; max.s32 d, d, -10;"
            " shl.b32 f, e, 10; add.s32 f, f, 15360; prmt.b32 f, f, f, 0x1010;"
            " shl.b32 d, d, 10; sub.s32 g, 15360, d; prmt.b32 g, g, g, 0x1010;"
            " add.s32 d, d, 15360; prmt.b32 d, d, d, 0x1010;"
            " cvt.rn.f16x2.e4m3x2 wp, lo; cvt.rn.f16x2.e4m3x2 wq, hi;"
            " mul.rn.f16x2 wp, wp, f; mul.rn.f16x2 wq, wq, f; mul.rn.f16x2 sp, wp, d; mul.rn.f16x2 sq, wq, d;"
            " cvt.rn.satfinite.e4m3x2.f16x2 lo, sp; cvt.rn.satfinite.e4m3x2.f16x2 hi, sq;"
            f" mov.b32 ${word}, {{lo, hi}};"
            " cvt.rn.f16x2.e4m3x2 sp, lo; cvt.rn.f16x2.e4m3x2 sq, hi; mul.rn.f16x2 sp, sp, g; mul.rn.f16x2 sq, sq, g;"
            " set.ne.f16x2.f16x2 sp, sp, wp; set.ne.f16x2.f16x2 sq, sq, wq; add.rn.f16x2 sp, sp, sq;"
            f" add.rn.f16x2 ${lost}, sp, ${lost}; NEXT{number}:"
        )
    return tl.constexpr(text + " DONE: }")


def _rows(upper: bool, saturates: bool) -> tl.constexpr:
    """Operands: two words and the count, two rows of two pairs, scales."""
    return merging_asm([(0, (3, 3, 4, 4), 0x0101, False), (1, (5, 5, 6, 6), 0x0101, upper)], 2, 7, 8, saturates)


def _columns(saturates: bool) -> tl.constexpr:
    """Operands: four words and the count, eight rows of a pair, scales."""
    first, second = (5, 6, 7, 8), (9, 10, 11, 12)
    words: list[Word] = [
        (0, first, 0, False),
        (1, second, 0, False),
        (2, first, 0x1111, True),
        (3, second, 0x1111, True),
    ]
    return merging_asm(words, 4, 13, 14, saturates)


# Kernels read globals that are constants.
ROWS_ASM, ROWS_ASM_SATURATING = _rows(True, False), _rows(True, True)
SQUARES_ASM, SQUARES_ASM_SATURATING = _rows(False, False), _rows(False, True)
COLUMNS_ASM, COLUMNS_ASM_SATURATING = _columns(False), _columns(True)


@triton.jit
def merged_words(
    word,
    x0,
    x1,
    x2,
    x3,
    own,
    wide,
    lost,
    H: tl.constexpr,
    UPPER: tl.constexpr,
):
    """Four E4M3 codes under the scale `wide` of 128, as two roundings give them: under the scale `own` of their block
    of 32, then moved; and `lost` plus the codes that the second rounding changed. The definition, in integers.

    Args:
        word: the codes that one rounding under `wide` gives, of which only the NaN codes are looked at.
        x0 ... x3, H: the elements, as in `word_of`.
        own, wide: scales in pairs, of which UPPER names the half.
        lost: an int32 count.

    In hardware (`merging_asm`), where word is what one rounding gives and lost two fp16 counts (exact up to 2048):
    one rounding gives the codes of two, none lost, if all four are normal numbers above the smallest (that one may have
    been reached by two roundings) and no mode saturates the first rounding; and where both scales are equal. Otherwise
    the definition is followed: the second rounding works on pairs in fp16, in which a code times 2^s, s >= -14, is
    exact. What is left of the shift down to -24 is a second factor: results that it rounds in fp16 are far under half
    of the smallest code, and under -24 every code is zero anyway.
    """
    own_byte = (own >> (23 if UPPER else 7)) & 0xFF
    wide_byte = (wide >> (23 if UPPER else 7)) & 0xFF
    f = inverse_power(own_byte)
    shift = tl.minimum(own_byte - wide_byte, 0)
    c0, n0 = shift_codes(encode(half_of(x0, (H >> 12) & 1) * f, x0, 0, False, False), shift, 0, False)
    c1, n1 = shift_codes(encode(half_of(x1, (H >> 8) & 1) * f, x1, 0, False, False), shift, 0, False)
    c2, n2 = shift_codes(encode(half_of(x2, (H >> 4) & 1) * f, x2, 0, False, False), shift, 0, False)
    c3, n3 = shift_codes(encode(half_of(x3, H & 1) * f, x3, 0, False, False), shift, 0, False)
    found = n0.to(tl.int32) + n1.to(tl.int32) + n2.to(tl.int32) + n3.to(tl.int32)
    codes = c0 | (c1 << 8) | (c2 << 16) | (c3 << 24)
    return tl.where(wide_byte == 255, word, codes), tl.where(wide_byte == 255, lost, lost + found)


@triton.jit
def merged_rows(a, b, xa, xb, own, wide, lost, UPPER: tl.constexpr, MODE: tl.constexpr, HARDWARE: tl.constexpr):
    """`merged_words` of two rows (xa, xb: two pairs each), whose scales are the lower and the upper halves (UPPER) or
    both the lower ones."""
    if HARDWARE:
        quick: tl.constexpr = MODE == 1 or MODE == 2
        rows: tl.constexpr = ROWS_ASM if quick else ROWS_ASM_SATURATING
        squares: tl.constexpr = SQUARES_ASM if quick else SQUARES_ASM_SATURATING
        return tl.inline_asm_elementwise(
            rows if UPPER else squares,
            "=&r,=&r,=&r,r,r,r,r,r,r,0,1,2",
            [xa[0], xa[1], xb[0], xb[1], own, wide, a, b, lost],
            dtype=(tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        a, lost = merged_words(a, xa[0], xa[0], xa[1], xa[1], own, wide, lost, 0x0101, False)
        b, lost = merged_words(b, xb[0], xb[0], xb[1], xb[1], own, wide, lost, 0x0101, UPPER)
        return a, b, lost


@triton.jit
def merged_columns(a, b, c, d, xs, j: tl.constexpr, own, wide, lost, MODE: tl.constexpr, HARDWARE: tl.constexpr):
    """`merged_words` of two columns of eight rows, pair j: the lower halves' words a (rows 0 to 3) and b (4 to 7), the
    upper halves' c and d."""
    x0, x1, x2, x3 = xs[0][j], xs[1][j], xs[2][j], xs[3][j]
    x4, x5, x6, x7 = xs[4][j], xs[5][j], xs[6][j], xs[7][j]
    if HARDWARE:
        return tl.inline_asm_elementwise(
            COLUMNS_ASM if MODE == 1 or MODE == 2 else COLUMNS_ASM_SATURATING,
            "=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,0,1,2,3,4",
            [x0, x1, x2, x3, x4, x5, x6, x7, own, wide, a, b, c, d, lost],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        a, lost = merged_words(a, x0, x1, x2, x3, own, wide, lost, 0, False)
        b, lost = merged_words(b, x4, x5, x6, x7, own, wide, lost, 0, False)
        c, lost = merged_words(c, x0, x1, x2, x3, own, wide, lost, 0x1111, True)
        d, lost = merged_words(d, x4, x5, x6, x7, own, wide, lost, 0x1111, True)
        return a, b, c, d, lost


@triton.jit
def spread_row(v, R8: tl.constexpr, G: tl.constexpr, B: tl.constexpr, REGROUP: tl.constexpr):
    """A value of each block, `[R8, G]` or `[R8, G / 4]`, for every word of it. In the reductions' steps, backwards:
    in one step the compiler would exchange values between threads."""
    if REGROUP:
        v = spread_last(v, R8, G // 4, 4)
    return spread_last(v, R8, G, B // 4)


@triton.jit
def spread_column(v, G: tl.constexpr, B: tl.constexpr, C: tl.constexpr, REGROUP: tl.constexpr):
    """The same of `[G, C / 2]` or `[G / 4, C / 2]`, for every eighth row."""
    if REGROUP:
        v = spread_first(v, G // 4, 4, C // 2)
    return spread_first(v, G, B // 8, C // 2)


@triton.jit
def row_pair_words(
    xs,
    lost,
    j: tl.constexpr,
    R8: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Words `[R8, C4]` of rows 2j and 2j + 1, their scales in pairs `[R8, C / width]`, and the count."""
    G: tl.constexpr = C // B
    m = row_maxima(xs, j, R8, C, B, HARDWARE)
    own = m
    if REGROUP:
        own = spread_last(or_nan(m, scale_pairs(m, FORMAT, MODE, 0, HARDWARE), HARDWARE), R8, G, B // 4)
        m = reduce_halves(tl.reshape(m, [R8, G // 4, 4]), 2, HARDWARE)
    WIDTH: tl.constexpr = 128 if REGROUP else B
    scale, factor = scales_and_factors(m, FORMAT, MODE, 0 if WIDTH == 32 else 1, HARDWARE)
    words = ()
    for h in tl.static_range(2):
        f = pick_bytes(factor, factor, 0x3232 if h else 0x1010, HARDWARE)
        f = spread_row(f, R8, G, B, REGROUP)
        x0, x1 = xs[2 * j + h][0], xs[2 * j + h][1]
        y0, y1 = scaled(x0, f, HARDWARE), scaled(x1, f, HARDWARE)
        words = words + (word_of(y0, y0, y1, y1, f, f, f, f, 0x0101, FORMAT, HARDWARE),)  # noqa: RUF005
    if REGROUP:
        wide = spread_row(scale, R8, G, B, REGROUP)
        a, b, lost = merged_rows(words[0], words[1], xs[2 * j], xs[2 * j + 1], own, wide, lost, True, MODE, HARDWARE)
        words = (a, b)
    return words[0], words[1], scale, lost


@triton.jit
def column_pair_words(
    xs,
    lost,
    R8: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """int64 words `[R8, C]` of eight rows each, scales in pairs `[R / width, C / 2]`, and the count."""
    G: tl.constexpr = R8 * 8 // B
    C4: tl.constexpr = C // 4
    m = column_maxima(xs, R8, C, G, HARDWARE)
    own = (lost, lost)
    if REGROUP:
        each = or_nan(m, scale_pairs(m, FORMAT, MODE, 0, HARDWARE), HARDWARE)
        own = tl.split(tl.reshape(spread_first(each, G, B // 8, C // 2), [R8, C4, 2]))
        m = reduce_halves(tl.reshape(m, [G // 4, 4, C // 2]), 1, HARDWARE)
    WIDTH: tl.constexpr = 128 if REGROUP else B
    scale, factor = scales_and_factors(m, FORMAT, MODE, 0 if WIDTH == 32 else 1, HARDWARE)
    fs = tl.split(tl.reshape(spread_column(factor, G, B, C, REGROUP), [R8, C4, 2]))
    wides = fs
    if REGROUP:
        wides = tl.split(tl.reshape(spread_column(scale, G, B, C, REGROUP), [R8, C4, 2]))
    words = ()
    for j in tl.static_range(2):
        f = fs[j]
        y = ()
        for i in tl.static_range(8):
            y = y + (scaled(xs[i][j], f, HARDWARE),)  # noqa: RUF005
        low0 = word_of(y[0], y[1], y[2], y[3], f, f, f, f, 0, FORMAT, HARDWARE)
        high0 = word_of(y[4], y[5], y[6], y[7], f, f, f, f, 0, FORMAT, HARDWARE)
        low1 = word_of(y[0], y[1], y[2], y[3], f, f, f, f, 0x1111, FORMAT, HARDWARE)
        high1 = word_of(y[4], y[5], y[6], y[7], f, f, f, f, 0x1111, FORMAT, HARDWARE)
        if REGROUP:
            low0, high0, low1, high1, lost = merged_columns(
                low0, high0, low1, high1, xs, j, own[j], wides[j], lost, MODE, HARDWARE
            )
        words = words + (wide_word(low0, high0), wide_word(low1, high1))  # noqa: RUF005
    return unquads(words[0], words[1], words[2], words[3], R8, C), scale, lost


@triton.jit
def store_row_pairs(s0, s1, s2, s3, ptr, inside, WIDTH: tl.constexpr, HARDWARE: tl.constexpr):
    """Scales of eight rows each, in pairs `[R8, groups]`: bytes, or fp32 where blocks are 128 wide.

    ptr: `[R8, groups]`, where the eight lie, one after another. In hardware a thread stores all eight in one or two
    instructions from where they are; Triton's own store would first exchange them between threads.
    """
    if HARDWARE and WIDTH == 128:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 a, b, c, d, e, f, g, h; setp.ne.s32 p, $6, 0;"
            " shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; shl.b32 c, $3, 16; and.b32 d, $3, 0xffff0000;"
            " shl.b32 e, $4, 16; and.b32 f, $4, 0xffff0000; shl.b32 g, $5, 16; and.b32 h, $5, 0xffff0000;"
            " @p st.global.v4.b32 [$1], {a, b, c, d}; @p st.global.v4.b32 [$1 + 16], {e, f, g, h}; mov.b32 $0, 0; }",
            "=r,l,r,r,r,r,r",
            [ptr.to(tl.int64), s0, s1, s2, s3, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    elif HARDWARE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 a, b, c, d; setp.ne.s32 p, $6, 0;"
            " shr.u32 a, $2, 7; shr.u32 b, $3, 7; shr.u32 c, $4, 7; shr.u32 d, $5, 7;"
            " prmt.b32 a, a, b, 0x6420; prmt.b32 c, c, d, 0x6420;"
            " @p st.global.v2.b32 [$1], {a, c}; mov.b32 $0, 0; }",
            "=r,l,r,r,r,r,r",
            [ptr.to(tl.int64), s0, s1, s2, s3, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        pairs = (s0, s1, s2, s3)
        for i in tl.static_range(8):
            bits = pairs[i // 2]
            if WIDTH == 128:
                tl.store(ptr + i, half_of(bits, i % 2), mask=inside)
            else:
                tl.store(ptr + i, ((bits >> (7 + 16 * (i % 2))) & 0xFF).to(tl.uint8), mask=inside)
