# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false
"""Triton building blocks of every cast: scale bytes, encoding, random words, the Hadamard butterfly.

They repeat the reference's integer arithmetic, so codes and scales have the same bits. Elements of 8 bits are rounded
by the hardware's saturating conversion where `HARDWARE` is set (compiled kernels; a test looks for `satfinite` in the
PTX), and by integers otherwise: Triton's interpreter loses carries in its conversion to FP8.

Triton is imported here; nothing in the package imports this module before a kernel is asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOOR, RCEIL, CEIL, EVEN = 0, 1, 2, 3
MODES = {"floor": FLOOR, "rceil": RCEIL, "ceil": CEIL, "even": EVEN}
E4M3, E5M2, E2M1 = 0, 1, 2
FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1}

# Of each format: mantissa bits, bias, emax, mantissa of the largest value (fp32 bits), code of a NaN, sign bit.


@triton.constexpr_function
def mantissa_bits_of(FORMAT):
    return 3 if FORMAT == 0 else (2 if FORMAT == 1 else 1)


@triton.constexpr_function
def bias_of(FORMAT):
    return 7 if FORMAT == 0 else (15 if FORMAT == 1 else 1)


@triton.constexpr_function
def emax_of(FORMAT):
    return 8 if FORMAT == 0 else (15 if FORMAT == 1 else 2)


@triton.constexpr_function
def max_mantissa_of(FORMAT):
    return 0x400000 if FORMAT == 2 else 0x600000


@triton.constexpr_function
def scale_carry_of(FORMAT, MODE):
    if MODE == 1:  # rceil: mantissas above the largest value's
        return 0x7FFFFF - max_mantissa_of(FORMAT)
    if MODE == 2:  # ceil: any mantissa but zero
        return 0x7FFFFF
    # even: what rounding to the element's mantissa carries
    return 1 << (22 - mantissa_bits_of(FORMAT)) if MODE == 3 else 0


@triton.constexpr_function
def nan_code_of(FORMAT):
    return 0 if FORMAT == 2 else 0x7F


@triton.constexpr_function
def sign_code_of(FORMAT):
    return 8 if FORMAT == 2 else 0x80


@triton.jit
def magnitude(x):
    """int32 bits of |x|: their integer maximum is amax and propagates NaN and inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_byte(amax, FORMAT: tl.constexpr, MODE: tl.constexpr, MIN_BYTE: tl.constexpr):
    """E8M0 byte (as int32) of blocks whose largest magnitude has the bits `amax`."""
    # Added to the bits, this carries into the exponent where the mode rounds up. Finite values stay under byte 254.
    carry: tl.constexpr = scale_carry_of(FORMAT, MODE)
    byte = tl.maximum(((amax + carry) >> 23) - emax_of(FORMAT), MIN_BYTE)
    return tl.where(amax >= 0x7F800000, 255, byte)


@triton.jit
def factor_of(byte, HARDWARE: tl.constexpr):
    """fp32 2^-(byte - 127) and, for byte 255, NaN in hardware, whose conversion turns it into the code of a NaN; 0 for
    the interpreter, whose conversion does not."""
    if HARDWARE:
        return tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23).to(tl.float32, bitcast=True)
    else:
        return inverse_power(byte)


@triton.jit
def inverse_power(byte):
    """fp32 2^-(byte - 127); 0 for byte 255."""
    return (tl.maximum(254 - byte, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode(v, words, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes (int32) of scaled fp32 values; saturating, no NaN (blocks that are not finite are overridden later)."""
    MBITS: tl.constexpr = mantissa_bits_of(FORMAT)
    if HARDWARE and FORMAT == 0 and not STOCHASTIC:
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    elif HARDWARE and FORMAT == 1 and not STOCHASTIC:
        return v.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        bits = v.to(tl.int32, bitcast=True)
        limit: tl.constexpr = ((127 + emax_of(FORMAT)) << 23) + max_mantissa_of(FORMAT)
        mag = tl.minimum(bits & 0x7FFFFFFF, limit)
        field = mag >> 23
        significand = tl.where(field > 0, (mag & 0x7FFFFF) | 0x800000, 0)
        target = field - 127 + bias_of(FORMAT)
        shift = 23 - MBITS + tl.maximum(1 - target, 0)
        if STOCHASTIC:
            excess = tl.minimum(tl.maximum(shift - 30, 0), 30)
            shift = tl.minimum(shift, 30)
            noise = words.to(tl.int32, bitcast=True) & ((1 << shift) - 1)
            rounded = ((significand >> excess) + noise) >> shift
        else:
            shift = tl.minimum(shift, 26)
            even = (significand >> shift) & 1
            rounded = (significand + (1 << (shift - 1)) - 1 + even) >> shift
        code = ((tl.maximum(target, 1) - 1) << MBITS) + rounded
        return code | tl.where(bits < 0, sign_code_of(FORMAT), 0)


@triton.jit
def decode(code, FORMAT: tl.constexpr):
    """fp32 value of 8-bit codes (int32)."""
    if FORMAT == 0:
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return code.to(tl.uint8).to(tl.float8e5, bitcast=True).to(tl.float32)


@triton.jit
def random_words(row, first_column, seed, step, STREAM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """uint32 words `[ROWS, COLUMNS]` of the elements (row[i], first_column + j); first_column is a multiple of 4."""
    quad = (first_column // 4 + tl.arange(0, COLUMNS // 4)).to(tl.uint32)
    c0 = tl.broadcast_to(quad[None, :], [ROWS, COLUMNS // 4])
    c1 = tl.broadcast_to(row.to(tl.uint32)[:, None], [ROWS, COLUMNS // 4])
    zero = tl.zeros([ROWS, COLUMNS // 4], tl.uint32)
    r0, r1, r2, r3 = tl.philox(seed, c0, c1, zero + step.to(tl.uint32), zero + STREAM, 10)
    # join's new dims are the lowest bits of the position: (r0, r1), (r2, r3) interleaved to r0 r1 r2 r3.
    return tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [ROWS, COLUMNS])


@triton.jit
def butterfly(x, LEAD: tl.constexpr, SIZE: tl.constexpr):
    """Constant-geometry Walsh-Hadamard transform of `[LEAD, SIZE]` along the last dim, without the normalisation."""
    STAGES: tl.constexpr = 5 if SIZE == 32 else (6 if SIZE == 64 else (7 if SIZE == 128 else 8))
    for _ in tl.static_range(STAGES):
        even, odd = tl.split(tl.reshape(x, [LEAD, SIZE // 2, 2]))
        pair = tl.join(even + odd, even - odd)
        x = tl.reshape(tl.permute(pair, [0, 2, 1]), [LEAD, SIZE])
    return x


@triton.jit
def merge_scales(byte):
    """Largest of groups along the last dim of `[.., 4]`: the scale of the merged block; 255 stays, 0 becomes 1."""
    merged = tl.max(byte, axis=len(byte.shape) - 1)
    return tl.where(merged == 255, 255, tl.maximum(merged, 1))


@triton.jit
def shift_codes(code, shift, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes moved by 2^shift (shift <= 0 except where the scale was raised to its smallest byte), and where that is not
    exact."""
    factor = (tl.maximum(shift + 127, 1) << 23).to(tl.float32, bitcast=True)
    wanted = decode(code, FORMAT) * factor
    moved = encode(wanted, code, FORMAT, False, HARDWARE)
    return moved, decode(moved, FORMAT) != wanted
