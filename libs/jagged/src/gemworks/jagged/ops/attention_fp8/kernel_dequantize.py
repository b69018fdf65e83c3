"""What FP8 codes and scales stand for, in one pass: values for bf16 attention, exactly.

Letters: T packed rows, N heads, H head width, C tiles; R rows and W columns that share a scale.
"""

import triton
import triton.language as tl


@triton.jit
def power_of(byte):
    """float32 2^(byte - 127), NaN of 255."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 0x400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def rows_kernel(
    codes, scales, out, total, code_st, code_sn, scale_st, scale_sn,
    HEADS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, R: tl.constexpr, W: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """codes [T, N, H], scales [ceil(T / R), N, H / W], out [T, N, H] contiguous; a program a head and BM rows."""
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    row = (tl.program_id(0) // HEADS).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.arange(0, BH)
    inside = (row < total)[:, None] & (column < H)[None, :]
    code = tl.load(codes + head * code_sn + row[:, None] * code_st + column[None, :], mask=inside, other=0)
    at = scales + head * scale_sn + (row // R)[:, None] * scale_st + (column // W)[None, :]
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * power_of(tl.load(at, mask=inside, other=127))
    tl.store(out + (row[:, None] * HEADS + head) * H + column[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])
def tiles_kernel(
    codes, scales, offsets, out, num_rows, num_sequences,
    HEADS: tl.constexpr, H: tl.constexpr, SEARCH: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """codes [T, N, H] or, transposed, [C, N, H, 128], scales [C, N]; a program a tile and head. tiles.py says which
    rows a tile has; SEARCH: offsets looked at together."""
    tile = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    lane = tl.arange(0, SEARCH)
    sequence = tile * 0 - 1
    for first in range(0, num_sequences + 1, SEARCH):  # count those that begin at or before the tile
        known = first + lane <= num_sequences
        at = tl.load(offsets + first + lane, mask=known, other=0).to(tl.int32) // 128 + first + lane
        sequence += tl.sum((known & (at <= tile)).to(tl.int32), 0)
    begin = tl.load(offsets + sequence).to(tl.int32)
    end = tl.load(offsets + tl.minimum(sequence + 1, num_sequences)).to(tl.int32)
    end = tl.where(sequence < num_sequences, end, num_rows)
    place = tl.arange(0, 128)
    column = tl.arange(0, H)
    key = place
    if TRANSPOSED:
        key = place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2
    row = begin + (tile - begin // 128 - sequence) * 128 + key
    inside = (row < end)[:, None] & (column < H)[None, :]
    target = (row.to(tl.int64) * HEADS + head)[:, None] * H + column[None, :]
    if TRANSPOSED:
        source = codes + tl.program_id(0).to(tl.int64) * (H * 128)
        code = tl.trans(tl.load(source + column[:, None] * 128 + place[None, :]))
    else:
        code = tl.load(codes + target, mask=inside, other=0)
    factor = power_of(tl.load(scales + tl.program_id(0)))
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor
    tl.store(out + target, value.to(out.dtype.element_ty), mask=inside)
