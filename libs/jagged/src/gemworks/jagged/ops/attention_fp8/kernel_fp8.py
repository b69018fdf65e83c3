"""Forward of FP8 attention in plain Triton: codes are multiplied out in registers, exactly, in front of each product.

For rows and squares of scales, masks, every architecture. E4M3 times a power of two is exact in bf16, so this is the
arithmetic of the codes in bf16 products.

Letters: M query rows of a tile, n key rows of a tile, H and V head widths; R rows and W columns that share a scale.
"""

import triton
import triton.language as tl
from gemworks.jagged._triton.activations import activate
from gemworks.jagged.ops.attention_core.kernel_forward import find_tile, store_rows


@triton.jit
def load_values(
    codes,
    scales,
    rows,
    valid,
    code_st,
    scale_st,
    H: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """[rows, H] of codes times scales, zeros where a row is not valid; a scale is the byte e of 2^(e - 127), 255: NaN.

    scales: at the head, `[ceil(T / R), .., H / W]`.
    """
    h = tl.arange(0, H)
    code = tl.load(codes + rows.to(tl.int64)[:, None] * code_st + h[None, :], mask=valid[:, None], other=0)
    at = scales + (rows // R).to(tl.int64)[:, None] * scale_st + (h // W)[None, :]
    byte = tl.load(at, mask=valid[:, None], other=127).to(tl.int32)
    bits = tl.where(byte == 0, 0x400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    x = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit(do_not_specialize=["left", "right", "lse_sn"])  # else batches differ to the compiler
def fp8_kernel(
    q, k, v, sq, sk, sv, out, lse, bounds_q, bounds_k, tile_sample, tile_row, num_tiles, scale, left, right,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, sq_st, sq_sn, sk_st, sk_sn, sv_st, sv_sn, o_st, o_sn, lse_sn,
    ACT: tl.constexpr, MASKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, R: tl.constexpr, W: tl.constexpr, RV: tl.constexpr, WV: tl.constexpr,
    V_CODES: tl.constexpr, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    tile = tl.program_id(0) // HEADS
    if tile >= tl.load(num_tiles):
        return
    row, q0, lq, k0, lk = find_tile(tile_sample, tile_row, bounds_q, bounds_k, tile)
    head_k = head // GROUP
    r = row + tl.arange(0, BM)
    own = r < lq
    q_MH = load_values(q + head * q_sn, sq + head * sq_sn, q0 + r, own, q_st, sq_st, H, R, W, DTYPE)
    o_MV = tl.zeros([BM, V], tl.float32)
    max_M = tl.full([BM], float("-inf"), tl.float32)
    sum_M = tl.zeros([BM], tl.float32)
    shift = 0
    if BOTTOM_RIGHT:
        shift = lk - lq
    begin = 0
    end = lk
    if MASKED:
        begin = tl.maximum(row + shift - left, 0) // BN * BN
        end = tl.minimum(lk, tl.minimum(row + BM, lq) + shift + right)
    for n in range(begin, end, BN):
        c = n + tl.arange(0, BN)
        inside = c < lk
        k_nH = load_values(k + head_k * k_sn, sk + head_k * sk_sn, k0 + c, inside, k_st, sk_st, H, R, W, DTYPE)
        if V_CODES:
            v_nV = load_values(v + head_k * v_sn, sv + head_k * sv_sn, k0 + c, inside, v_st, sv_st, V, RV, WV, DTYPE)
        else:
            at = (k0 + c).to(tl.int64)[:, None] * v_st + tl.arange(0, V)[None, :]
            v_nV = tl.load(v + head_k * v_sn + at, mask=inside[:, None], other=0.0)
        s_Mn = tl.dot(q_MH, tl.trans(k_nH), input_precision=PRECISION)
        admitted = inside[None, :]
        if MASKED:
            away = c[None, :] - r[:, None] - shift  # p_k - p_q
            admitted = admitted & (away <= right) & (away >= -left)
        if ACT == "softmax":
            s_Mn = tl.where(admitted, s_Mn * (scale * 1.4426950408889634), float("-inf"))
            new_M = tl.maximum(max_M, tl.max(s_Mn, 1))
            base_M = new_M
            if MASKED:  # a row without any key so far
                base_M = tl.where(new_M == float("-inf"), 0.0, new_M)
            p = tl.exp2(s_Mn - base_M[:, None])
            fix_M = tl.exp2(max_M - base_M)
            sum_M = sum_M * fix_M + tl.sum(p, 1)
            o_MV = o_MV * fix_M[:, None]
            max_M = new_M
        else:
            p = activate(s_Mn * scale, ACT)  # act(0) = 0 and V's surplus rows are zero
            if MASKED:
                p = tl.where(admitted, p, 0.0)
        o_MV = tl.dot(p.to(DTYPE), v_nV, o_MV, input_precision=PRECISION)
    if ACT == "softmax":
        safe_M = tl.where(sum_M > 0.0, sum_M, 1.0)
        o_MV = o_MV / safe_M[:, None]
        lse_M = tl.where(sum_M > 0.0, max_M + tl.log2(safe_M), float("inf"))
        tl.store(lse + head * lse_sn + q0 + r, lse_M, mask=own)
    store_rows(out + head * o_sn, q0 + r, own, o_st, o_MV, V, V)
