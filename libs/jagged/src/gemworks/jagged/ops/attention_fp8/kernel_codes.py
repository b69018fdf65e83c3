"""Attention that multiplies FP8 codes out as it loads them, and may round P and dS to MXFP8: plain Triton.

Forward, dK/dV and dQ as in attention_core's kernel_forward.py and kernel_backward.py, without a bias or a shared query.
Each of q, k and v is values (arrangement 0), or codes with a scale a row and head (1) or a square of 32 x 32 (32).

Letters: M query rows of a tile, n key rows of a tile, H and V head widths (BH and BV: the next powers of two).
"""

import triton
import triton.language as tl
from gemworks.jagged._triton.activations import LOG2_E, activate, activate_with_grad
from gemworks.jagged.ops.attention_core.kernel_forward import find_tile, key_range, load_rows, store_rows
from gemworks.jagged.ops.attention_fp8.kernel_dequantize import power_of


@triton.jit
def load_values(ptr, scales, rows, valid, stride_t, scale_st, R: tl.constexpr, W: tl.constexpr, BW: tl.constexpr,
                DTYPE: tl.constexpr):  # fmt: skip
    """[rows, BW] in DTYPE, zeros where a row is not valid and past the head width."""
    if R == 0:
        return load_rows(ptr, rows, valid, stride_t, W, BW)
    code = load_rows(ptr, rows, valid, stride_t, W, BW).to(tl.uint8)
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    rows = rows.to(tl.int64)
    if R == 1:
        value *= power_of(tl.load(scales + rows * scale_st, mask=valid, other=127))[:, None]
    else:
        square = tl.arange(0, BW // R)
        at = scales + (rows // R)[:, None] * scale_st + square[None, :]
        factor = power_of(tl.load(at, mask=valid[:, None] & (square < W // R)[None, :], other=127))
        value = tl.reshape(value, [value.shape[0], BW // R, R]) * factor[:, :, None]
        value = tl.reshape(value, [value.shape[0], BW])
    return value.to(DTYPE)


@triton.jit
def round_mx(x):
    """[A, B] in float32 rounded to E4M3 with a power of two for each 32 of B: attention_core's rounding.py, bit by bit.

    By arithmetic on float32, so that every device and the interpreter agree: to nearest even at four significant bits,
    at steps of 2^-9 below 2^-6.
    """
    y = tl.reshape(x, [x.shape[0], x.shape[1] // 32, 32])
    top = tl.max(tl.abs(y), 2).to(tl.int32, bitcast=True)
    carry = tl.where((top & 0x7FFFFF) > 0x600000, 1, 0)  # above 448 at the smaller power
    shift = tl.maximum((top >> 23) - 135 + carry, -126)
    y = y * ((127 - shift) << 23).to(tl.float32, bitcast=True)[:, :, None]
    bits = y.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    normal = bits.to(tl.float32, bitcast=True)
    small = (y + 24576.0) - 24576.0
    rounded = tl.where(tl.abs(y) < 0.015625, small, tl.where(y == y, normal, y))
    rounded = rounded * ((127 + shift) << 23).to(tl.float32, bitcast=True)[:, :, None]
    return tl.reshape(rounded, [x.shape[0], x.shape[1]])


@triton.jit(do_not_specialize=["left", "right", "lse_sn"])
def forward_codes_kernel(
    q, k, v, sq, sk, sv, out, lse, bounds_q, bounds_k, tile_sample, tile_row, num_tiles, scale, left, right,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, sq_st, sq_sn, sk_st, sk_sn, sv_st, sv_sn, o_st, o_sn, lse_sn,
    ACT: tl.constexpr, MASKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, QR: tl.constexpr, VR: tl.constexpr, ROUND_P: tl.constexpr,
):  # fmt: skip
    """QR, VR: arrangement of q and k, and of v."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    tile = tl.program_id(0) // HEADS
    if tile >= tl.load(num_tiles):
        return
    row, q0, lq, k0, lk = find_tile(tile_sample, tile_row, bounds_q, bounds_k, tile)
    head_k = head // GROUP
    r = row + tl.arange(0, BM)
    own = r < lq
    q_MH = load_values(q + head * q_sn, sq + head * sq_sn, q0 + r, own, q_st, sq_st, QR, H, BH, DTYPE)
    o_MV = tl.zeros([BM, BV], tl.float32)
    max_M = tl.full([BM], float("-inf"), tl.float32)
    sum_M = tl.zeros([BM], tl.float32)
    shift, begin, end = key_range(row, lq, lk, left, right, MASKED, BOTTOM_RIGHT, BM, BN)
    for n in range(begin, end, BN):
        c = n + tl.arange(0, BN)
        inside = c < lk
        k_nH = load_values(k + head_k * k_sn, sk + head_k * sk_sn, k0 + c, inside, k_st, sk_st, QR, H, BH, DTYPE)
        v_nV = load_values(v + head_k * v_sn, sv + head_k * sv_sn, k0 + c, inside, v_st, sv_st, VR, V, BV, DTYPE)
        s_Mn = tl.dot(q_MH, tl.trans(k_nH), input_precision=PRECISION)
        admitted = inside[None, :]
        if MASKED:
            away = c[None, :] - r[:, None] - shift
            admitted = admitted & (away <= right) & (away >= -left)
        if ACT == "softmax":
            s_Mn = tl.where(admitted, s_Mn * (scale * LOG2_E), float("-inf"))
            new_M = tl.maximum(max_M, tl.max(s_Mn, 1))
            if ROUND_P:  # a power of two between one base and the next: rounding does not see the tiles
                new_M = tl.ceil(new_M)
            base_M = new_M
            if MASKED:  # a row without any key so far
                base_M = tl.where(new_M == float("-inf"), 0.0, new_M)
            p_Mn = tl.exp2(s_Mn - base_M[:, None])
            fix_M = tl.exp2(max_M - base_M)
            sum_M = sum_M * fix_M + tl.sum(p_Mn, 1)
            o_MV = o_MV * fix_M[:, None]
            max_M = new_M
        else:
            p_Mn = activate(s_Mn * scale, ACT)  # act(0) = 0, which is what surplus keys have
            if MASKED:
                p_Mn = tl.where(admitted, p_Mn, 0.0)
        if ROUND_P:
            p_Mn = round_mx(p_Mn)
        o_MV = tl.dot(p_Mn.to(DTYPE), v_nV, o_MV, input_precision=PRECISION)
    if ACT == "softmax":
        safe_M = tl.where(sum_M > 0.0, sum_M, 1.0)
        o_MV = o_MV / safe_M[:, None]
        lse_M = tl.where(sum_M > 0.0, max_M + tl.log2(safe_M), float("inf"))
        tl.store(lse + head * lse_sn + q0 + r, lse_M, mask=own)
    store_rows(out + head * o_sn, q0 + r, own, o_st, o_MV, V, BV)


@triton.jit(do_not_specialize=["left", "right", "lse_sn"])
def backward_kv_codes_kernel(
    q, k, v, sq, sk, sv, do, lse, delta, dk, dv, bounds_q, bounds_k, tile_sample, tile_row, num_tiles, scale, left,
    right, q_st, q_sn, k_st, k_sn, v_st, v_sn, sq_st, sq_sn, sk_st, sk_sn, sv_st, sv_sn, do_st, do_sn, dk_st, dk_sn,
    dv_st, dv_sn, lse_sn,
    ACT: tl.constexpr, MASKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HEADS_K: tl.constexpr, GROUP: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, QR: tl.constexpr, VR: tl.constexpr, ROUND_P: tl.constexpr, ROUND_DS: tl.constexpr,
):  # fmt: skip
    """dK and dV of each key row."""
    DTYPE: tl.constexpr = dk.dtype.element_ty
    head_k = (tl.program_id(0) % HEADS_K).to(tl.int64)
    tile = tl.program_id(0) // HEADS_K
    if tile >= tl.load(num_tiles):
        return
    row, k0, lk, q0, lq = find_tile(tile_sample, tile_row, bounds_k, bounds_q, tile)
    c = row + tl.arange(0, BN)
    own = c < lk
    k_nH = load_values(k + head_k * k_sn, sk + head_k * sk_sn, k0 + c, own, k_st, sk_st, QR, H, BH, DTYPE)
    v_nV = load_values(v + head_k * v_sn, sv + head_k * sv_sn, k0 + c, own, v_st, sv_st, VR, V, BV, DTYPE)
    dk_nH = tl.zeros([BN, BH], tl.float32)
    dv_nV = tl.zeros([BN, BV], tl.float32)
    shift = 0
    if BOTTOM_RIGHT:
        shift = lk - lq
    begin = 0
    end = lq
    if MASKED:
        begin = tl.maximum(row - shift - right, 0) // BM * BM
        end = tl.minimum(lq, tl.minimum(row + BN, lk) - shift + left)
    for g in range(0, GROUP):
        head = head_k * GROUP + g
        for m in range(begin, end, BM):
            r = m + tl.arange(0, BM)
            inside = r < lq
            q_MH = load_values(q + head * q_sn, sq + head * sq_sn, q0 + r, inside, q_st, sq_st, QR, H, BH, DTYPE)
            do_MV = load_rows(do + head * do_sn, q0 + r, inside, do_st, V, BV)
            s_nM = tl.dot(k_nH, tl.trans(q_MH), input_precision=PRECISION)
            dp_nM = tl.dot(v_nV, tl.trans(do_MV), input_precision=PRECISION)
            if ACT == "softmax":
                lse_M = tl.load(lse + head * lse_sn + q0 + r, mask=inside, other=float("inf"))
                delta_M = tl.load(delta + head * lse_sn + q0 + r, mask=inside, other=0.0)
                p_nM = tl.exp2(s_nM * (scale * LOG2_E) - lse_M[None, :])
                ds_nM = p_nM * (dp_nM - delta_M[None, :])
            else:
                p_nM, slope_nM = activate_with_grad(s_nM * scale, ACT)
                ds_nM = slope_nM * dp_nM
            if MASKED:
                away = c[:, None] - r[None, :] - shift
                admitted = (away <= right) & (away >= -left)
                p_nM = tl.where(admitted, p_nM, 0.0)
                ds_nM = tl.where(admitted, ds_nM, 0.0)
            if ROUND_P:
                p_nM = round_mx(p_nM)
            if ROUND_DS:
                ds_nM = round_mx(ds_nM)
            dv_nV = tl.dot(p_nM.to(DTYPE), do_MV, dv_nV, input_precision=PRECISION)
            dk_nH = tl.dot(ds_nM.to(DTYPE), q_MH, dk_nH, input_precision=PRECISION)
    store_rows(dk + head_k * dk_sn, k0 + c, own, dk_st, dk_nH * scale, H, BH)
    store_rows(dv + head_k * dv_sn, k0 + c, own, dv_st, dv_nV, V, BV)


@triton.jit(do_not_specialize=["left", "right", "lse_sn"])
def backward_q_codes_kernel(
    q, k, v, sq, sk, sv, do, lse, delta, dq, bounds_q, bounds_k, tile_sample, tile_row, num_tiles, scale, left, right,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, sq_st, sq_sn, sk_st, sk_sn, sv_st, sv_sn, do_st, do_sn, dq_st, dq_sn, lse_sn,
    ACT: tl.constexpr, MASKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, QR: tl.constexpr, VR: tl.constexpr, ROUND_DS: tl.constexpr,
):  # fmt: skip
    """dQ of each query row."""
    DTYPE: tl.constexpr = dq.dtype.element_ty
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    tile = tl.program_id(0) // HEADS
    if tile >= tl.load(num_tiles):
        return
    row, q0, lq, k0, lk = find_tile(tile_sample, tile_row, bounds_q, bounds_k, tile)
    head_k = head // GROUP
    r = row + tl.arange(0, BM)
    own = r < lq
    q_MH = load_values(q + head * q_sn, sq + head * sq_sn, q0 + r, own, q_st, sq_st, QR, H, BH, DTYPE)
    do_MV = load_rows(do + head * do_sn, q0 + r, own, do_st, V, BV)
    lse_M = tl.zeros([BM], tl.float32)
    delta_M = lse_M
    if ACT == "softmax":
        lse_M = tl.load(lse + head * lse_sn + q0 + r, mask=own, other=float("inf"))
        delta_M = tl.load(delta + head * lse_sn + q0 + r, mask=own, other=0.0)
    dq_MH = tl.zeros([BM, BH], tl.float32)
    shift, begin, end = key_range(row, lq, lk, left, right, MASKED, BOTTOM_RIGHT, BM, BN)
    for n in range(begin, end, BN):
        c = n + tl.arange(0, BN)
        inside = c < lk
        k_nH = load_values(k + head_k * k_sn, sk + head_k * sk_sn, k0 + c, inside, k_st, sk_st, QR, H, BH, DTYPE)
        v_nV = load_values(v + head_k * v_sn, sv + head_k * sv_sn, k0 + c, inside, v_st, sv_st, VR, V, BV, DTYPE)
        s_Mn = tl.dot(q_MH, tl.trans(k_nH), input_precision=PRECISION)
        dp_Mn = tl.dot(do_MV, tl.trans(v_nV), input_precision=PRECISION)
        admitted = inside[None, :]
        if MASKED:
            away = c[None, :] - r[:, None] - shift
            admitted = admitted & (away <= right) & (away >= -left)
        if ACT == "softmax":
            # A surplus key has logit 0, far above a row of very negative ones: its weight could overflow.
            s_Mn = tl.where(admitted, s_Mn * (scale * LOG2_E), float("-inf"))
            ds_Mn = tl.exp2(s_Mn - lse_M[:, None]) * (dp_Mn - delta_M[:, None])
        else:
            _, slope_Mn = activate_with_grad(s_Mn * scale, ACT)
            ds_Mn = slope_Mn * dp_Mn
            if MASKED:
                ds_Mn = tl.where(admitted, ds_Mn, 0.0)
        if ROUND_DS:
            ds_Mn = round_mx(ds_Mn)
        dq_MH = tl.dot(ds_Mn.to(DTYPE), k_nH, dq_MH, input_precision=PRECISION)
    store_rows(dq + head * dq_sn, q0 + r, own, dq_st, dq_MH * scale, H, BH)
