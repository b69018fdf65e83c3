"""Backward of jagged attention in plain Triton: row sums of dO * O, a dK/dV kernel and a dQ kernel. No atomics.

Each result row is owned by one program and summed in a fixed order. The pair of kernels computes seven products where a
backward that shares P needs five; in return nothing is accumulated in memory.

Letters: M query rows of a tile, n key rows of a tile, H and V head widths (BH and BV: the next powers of two).
"""

import triton
import triton.language as tl
from gemworks.jagged._triton.activations import activate_with_grad
from gemworks.jagged.ops.attention_core.kernel_forward import find_tile, load_rows, store_rows


@triton.jit(do_not_specialize=["total", "delta_sn"])
def delta_kernel(out, d_out, delta, total, o_st, o_sn, do_st, do_sn, delta_sn,
                 V: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """delta [N, T] = rowsum(dO * O), in float32."""
    head = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BT + tl.arange(0, BT)
    valid = r < total
    o = load_rows(out + head * o_sn, r, valid, o_st, V, BV).to(tl.float32)
    do = load_rows(d_out + head * do_sn, r, valid, do_st, V, BV).to(tl.float32)
    tl.store(delta + head * delta_sn + r, tl.sum(o * do, 1), mask=valid)


@triton.jit(do_not_specialize=["left", "right", "lse_sn"])
def backward_kv_kernel(
    q, k, v, do, lse, delta, dk, dv, bounds_q, bounds_k, tile_sample, tile_row, num_tiles, scale, left, right,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, do_st, do_sn, dk_st, dk_sn, dv_st, dv_sn, lse_sn,
    ACT: tl.constexpr, MASKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, SHARED: tl.constexpr, HEADS_K: tl.constexpr,
    GROUP: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head_k = (tl.program_id(0) % HEADS_K).to(tl.int64)
    tile = tl.program_id(0) // HEADS_K
    if tile >= tl.load(num_tiles):
        return
    row, k0, lk, q0, lq = find_tile(tile_sample, tile_row, bounds_k, bounds_q, tile)
    c = row + tl.arange(0, BN)
    own = c < lk
    k_nH = load_rows(k + head_k * k_sn, k0 + c, own, k_st, H, BH)
    v_nV = load_rows(v + head_k * v_sn, k0 + c, own, v_st, V, BV)
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
            q_rows = r if SHARED else q0 + r
            q_MH = load_rows(q + head * q_sn, q_rows, inside, q_st, H, BH)
            do_MV = load_rows(do + head * do_sn, q0 + r, inside, do_st, V, BV)
            s_nM = tl.dot(k_nH, tl.trans(q_MH), input_precision=PRECISION)
            dp_nM = tl.dot(v_nV, tl.trans(do_MV), input_precision=PRECISION)
            if ACT == "softmax":
                lse_M = tl.load(lse + head * lse_sn + q0 + r, mask=inside, other=float("inf"))
                delta_M = tl.load(delta + head * lse_sn + q0 + r, mask=inside, other=0.0)
                p_nM = tl.exp2(s_nM * (scale * 1.4426950408889634) - lse_M[None, :])
                slope_nM = p_nM
                dp_nM = dp_nM - delta_M[None, :]
            else:
                p_nM, slope_nM = activate_with_grad(s_nM * scale, ACT)
            ds_nM = slope_nM * dp_nM
            if MASKED:
                away = c[:, None] - r[None, :] - shift
                admitted = (away <= right) & (away >= -left)
                p_nM = tl.where(admitted, p_nM, 0.0)
                ds_nM = tl.where(admitted, ds_nM, 0.0)
            dv_nV = tl.dot(p_nM.to(do_MV.dtype), do_MV, dv_nV, input_precision=PRECISION)
            dk_nH = tl.dot(ds_nM.to(q_MH.dtype), q_MH, dk_nH, input_precision=PRECISION)
    store_rows(dk + head_k * dk_sn, k0 + c, own, dk_st, dk_nH * scale, H, BH)
    store_rows(dv + head_k * dv_sn, k0 + c, own, dv_st, dv_nV, V, BV)


@triton.jit(do_not_specialize=["left", "right", "lse_sn"])
def backward_q_kernel(
    q, k, v, do, lse, delta, dq, bounds_q, bounds_k, tile_sample, tile_row, num_tiles, scale, left, right,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, do_st, do_sn, dq_st, dq_sn, lse_sn,
    ACT: tl.constexpr, MASKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of each query row; with SHARED, each sequence's own share of it, one after the other."""
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    tile = tl.program_id(0) // HEADS
    if tile >= tl.load(num_tiles):
        return
    row, q0, lq, k0, lk = find_tile(tile_sample, tile_row, bounds_q, bounds_k, tile)
    head_k = head // GROUP
    r = row + tl.arange(0, BM)
    own = r < lq
    q_rows = r if SHARED else q0 + r
    q_MH = load_rows(q + head * q_sn, q_rows, own, q_st, H, BH)
    do_MV = load_rows(do + head * do_sn, q0 + r, own, do_st, V, BV)
    lse_M = tl.zeros([BM], tl.float32)
    delta_M = lse_M
    if ACT == "softmax":
        lse_M = tl.load(lse + head * lse_sn + q0 + r, mask=own, other=float("inf"))
        delta_M = tl.load(delta + head * lse_sn + q0 + r, mask=own, other=0.0)
    dq_MH = tl.zeros([BM, BH], tl.float32)
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
        k_nH = load_rows(k + head_k * k_sn, k0 + c, inside, k_st, H, BH)
        v_nV = load_rows(v + head_k * v_sn, k0 + c, inside, v_st, V, BV)
        s_Mn = tl.dot(q_MH, tl.trans(k_nH), input_precision=PRECISION)
        dp_Mn = tl.dot(do_MV, tl.trans(v_nV), input_precision=PRECISION)
        admitted = inside[None, :]
        if MASKED:
            away = c[None, :] - r[:, None] - shift
            admitted = admitted & (away <= right) & (away >= -left)
        if ACT == "softmax":
            # A surplus key has logit 0, far above a row of very negative ones: its weight could overflow.
            s_Mn = tl.where(admitted, s_Mn * (scale * 1.4426950408889634), float("-inf"))
            ds_Mn = tl.exp2(s_Mn - lse_M[:, None]) * (dp_Mn - delta_M[:, None])
        else:
            _, slope = activate_with_grad(s_Mn * scale, ACT)
            ds_Mn = slope * dp_Mn
            if MASKED:
                ds_Mn = tl.where(admitted, ds_Mn, 0.0)
        dq_MH = tl.dot(ds_Mn.to(k_nH.dtype), k_nH, dq_MH, input_precision=PRECISION)
    store_rows(dq + head * dq_sn, q0 + r, own, dq_st, dq_MH * scale, H, BH)


@triton.jit
def zero_queries_without_keys_kernel(
    dq, bounds_q, bounds_k, tile_sample, tile_row, num_tiles, dq_st,
    WIDTH: tl.constexpr, BW: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Zeros dQ of sequences that have no key tile to walk over them, rows past the last offset among them."""
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    row, q0, lq, _k0, lk = find_tile(tile_sample, tile_row, bounds_q, bounds_k, tile)
    if lk > 0:
        return
    zero = tl.zeros([BR, BW], dq.dtype.element_ty)
    for r0 in range(row, min(row + ROWS, lq), BR):
        r = r0 + tl.arange(0, BR)
        store_rows(dq, q0 + r, r < lq, dq_st, zero, WIDTH, BW)
