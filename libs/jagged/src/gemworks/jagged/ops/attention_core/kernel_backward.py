"""Backward of jagged attention in plain Triton: row sums of dO * O, a dK/dV kernel and a dQ kernel. No atomics.

Each result row is owned by one program and summed in a fixed order. The pair of kernels computes seven products where a
backward that shares P needs five; in return nothing is accumulated in memory. The gradient of a bias is a third kernel.

Letters: M query rows of a tile, n key rows of a tile, H and V head widths (BH and BV: the next powers of two).
"""

import triton
import triton.language as tl
from gemworks.jagged._triton.activations import LOG2_E, activate_with_grad
from gemworks.jagged.ops.attention_core.kernel_bias import (
    add_buckets,
    add_diagonals,
    bias_tile,
    load_times,
    time_bucket,
)
from gemworks.jagged.ops.attention_core.kernel_forward import find_tile, key_range, load_rows, store_rows
from gemworks.jagged.ops.attention_core.kernel_norm_rope_back import norm_rope_back


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
    position, time, times_q, times_k, radius, unit,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, do_st, do_sn, dk_st, dk_sn, dv_st, dv_sn, lse_sn,
    cos, sin, norms, norm_st,
    ACT: tl.constexpr, MASKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, SHARED: tl.constexpr, HEADS_K: tl.constexpr,
    GROUP: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr, BY_POSITION: tl.constexpr, BUCKETS: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """dK and dV of each key row; with NORM or ROPE, dK before the norm and the turn that made these keys.

    cos, sin [T, H / 2] and the norm's scales, norms [T, N], are those of the key rows; None where they are not read.
    """
    head_k = (tl.program_id(0) % HEADS_K).to(tl.int64)
    tile = tl.program_id(0) // HEADS_K
    if tile >= tl.load(num_tiles):
        return
    row, k0, lk, q0, lq = find_tile(tile_sample, tile_row, bounds_k, bounds_q, tile)
    c = row + tl.arange(0, BN)
    own = c < lk
    k_nH = load_rows(k + head_k * k_sn, k0 + c, own, k_st, H, BH)
    v_nV = load_rows(v + head_k * v_sn, k0 + c, own, v_st, V, BV)
    t_n = load_times(times_k, k0 + c, own, BUCKETS)
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
            away = c[:, None] - r[None, :] - shift
            if ACT == "softmax":
                lse_M = tl.load(lse + head * lse_sn + q0 + r, mask=inside, other=float("inf"))
                delta_M = tl.load(delta + head * lse_sn + q0 + r, mask=inside, other=0.0)
                s_nM = s_nM * (scale * LOG2_E)
                if BY_POSITION or BUCKETS > 0:
                    t_M = load_times(times_q, q_rows, inside, BUCKETS)
                    s_nM += bias_tile(
                        away, t_n[:, None] - t_M[None, :], position, time, radius, unit, head, BY_POSITION, BUCKETS
                    )
                p_nM = tl.exp2(s_nM - lse_M[None, :])
                slope_nM = p_nM
                dp_nM = dp_nM - delta_M[None, :]
            else:
                p_nM, slope_nM = activate_with_grad(s_nM * scale, ACT)
            ds_nM = slope_nM * dp_nM
            if MASKED:
                admitted = (away <= right) & (away >= -left)
                p_nM = tl.where(admitted, p_nM, 0.0)
                ds_nM = tl.where(admitted, ds_nM, 0.0)
            dv_nV = tl.dot(p_nM.to(do_MV.dtype), do_MV, dv_nV, input_precision=PRECISION)
            dk_nH = tl.dot(ds_nM.to(q_MH.dtype), q_MH, dk_nH, input_precision=PRECISION)
    if NORM or ROPE:  # rows of no sequence meet no query
        dk_nH = norm_rope_back(
            dk_nH * scale, k_nH, cos, sin, norms + head_k, k0 + c, own & (lq > 0), norm_st, NORM, ROPE
        )  # fmt: skip
        store_rows(dk + head_k * dk_sn, k0 + c, own, dk_st, dk_nH, H, BH)
    else:
        store_rows(dk + head_k * dk_sn, k0 + c, own, dk_st, dk_nH * scale, H, BH)
    store_rows(dv + head_k * dv_sn, k0 + c, own, dv_st, dv_nV, V, BV)


@triton.jit
def load_queries(
    q, do, lse, delta, times_q, q0, r, own, q_st, do_st, ACT: tl.constexpr, SHARED: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """What a query tile of one head keeps over its key tiles: q, dO, log-sum-exp, delta, timestamps."""
    q_rows = r if SHARED else q0 + r
    q_MH = load_rows(q, q_rows, own, q_st, H, BH)
    do_MV = load_rows(do, q0 + r, own, do_st, V, BV)
    lse_M = tl.zeros(r.shape, tl.float32)
    delta_M = lse_M
    if ACT == "softmax":
        lse_M = tl.load(lse + q0 + r, mask=own, other=float("inf"))
        delta_M = tl.load(delta + q0 + r, mask=own, other=0.0)
    return q_MH, do_MV, lse_M, delta_M, load_times(times_q, q_rows, own, BUCKETS)


@triton.jit
def score_gradient(
    q_MH, do_MV, lse_M, delta_M, t_M, k_nH, v_nV, t_n, inside, away, scale, left, right,
    position, time, radius, unit, head,
    ACT: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, BY_POSITION: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """dS of a tile: the gradient of the scaled, biased logits."""
    s_Mn = tl.dot(q_MH, tl.trans(k_nH), input_precision=PRECISION)
    dp_Mn = tl.dot(do_MV, tl.trans(v_nV), input_precision=PRECISION)
    admitted = inside[None, :]
    if MASKED:
        admitted = admitted & (away <= right) & (away >= -left)
    if ACT == "softmax":
        s_Mn = s_Mn * (scale * LOG2_E)
        if BY_POSITION or BUCKETS > 0:
            s_Mn += bias_tile(
                away, t_n[None, :] - t_M[:, None], position, time, radius, unit, head, BY_POSITION, BUCKETS
            )
        # A surplus key has logit 0, far above a row of very negative ones: its weight could overflow.
        s_Mn = tl.where(admitted, s_Mn, float("-inf"))
        ds_Mn = tl.exp2(s_Mn - lse_M[:, None]) * (dp_Mn - delta_M[:, None])
    else:
        _, slope = activate_with_grad(s_Mn * scale, ACT)
        ds_Mn = slope * dp_Mn
        if MASKED:
            ds_Mn = tl.where(admitted, ds_Mn, 0.0)
    return ds_Mn


@triton.jit(do_not_specialize=["left", "right", "lse_sn"])
def backward_q_kernel(
    q, k, v, do, lse, delta, dq, bounds_q, bounds_k, tile_sample, tile_row, num_tiles, scale, left, right,
    position, time, times_q, times_k, radius, unit,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, do_st, do_sn, dq_st, dq_sn, lse_sn,
    ACT: tl.constexpr, MASKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr, BY_POSITION: tl.constexpr, BUCKETS: tl.constexpr,
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
    q_MH, do_MV, lse_M, delta_M, t_M = load_queries(
        q + head * q_sn, do + head * do_sn, lse + head * lse_sn, delta + head * lse_sn, times_q, q0, r, own,
        q_st, do_st, ACT, SHARED, H, V, BH, BV, BUCKETS,
    )  # fmt: skip
    dq_MH = tl.zeros([BM, BH], tl.float32)
    shift, begin, end = key_range(row, lq, lk, left, right, MASKED, BOTTOM_RIGHT, BM, BN)
    for n in range(begin, end, BN):
        c = n + tl.arange(0, BN)
        inside = c < lk
        k_nH = load_rows(k + head_k * k_sn, k0 + c, inside, k_st, H, BH)
        v_nV = load_rows(v + head_k * v_sn, k0 + c, inside, v_st, V, BV)
        t_n = load_times(times_k, k0 + c, inside, BUCKETS)
        ds_Mn = score_gradient(
            q_MH, do_MV, lse_M, delta_M, t_M, k_nH, v_nV, t_n, inside, c[None, :] - r[:, None] - shift, scale,
            left, right, position, time, radius, unit, head, ACT, MASKED, PRECISION, BY_POSITION, BUCKETS,
        )  # fmt: skip
        dq_MH = tl.dot(ds_Mn.to(k_nH.dtype), k_nH, dq_MH, input_precision=PRECISION)
    store_rows(dq + head * dq_sn, q0 + r, own, dq_st, dq_MH * scale, H, BH)


@triton.jit(do_not_specialize=["left", "right", "lse_sn"])
def backward_bias_kernel(
    q, k, v, do, lse, delta, d_position, d_time, bounds_q, bounds_k, tile_sample, tile_row, num_tiles, scale, left,
    right, position, time, times_q, times_k, radius, unit,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, do_st, do_sn, lse_sn,
    MASKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr, BY_POSITION: tl.constexpr, BUCKETS: tl.constexpr,
    BB: tl.constexpr, W: tl.constexpr, WORKERS: tl.constexpr,
):  # fmt: skip
    """This program's share of the tables' gradients, d_position [WORKERS, N, 2 R + 1] (zeros on entry), d_time."""
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    worker = tl.program_id(0) // HEADS
    head_k = head // GROUP
    share = worker.to(tl.int64) * HEADS + head
    sums = d_position + share * (2 * radius + 1)
    low = 0.0
    high = 0.0
    sum_B = tl.zeros([BB], tl.float32)
    for tile in range(worker, tl.load(num_tiles), WORKERS):
        row, q0, lq, k0, lk = find_tile(tile_sample, tile_row, bounds_q, bounds_k, tile)
        r = row + tl.arange(0, BM)
        own = r < lq
        q_MH, do_MV, lse_M, delta_M, t_M = load_queries(
            q + head * q_sn, do + head * do_sn, lse + head * lse_sn, delta + head * lse_sn, times_q, q0, r, own,
            q_st, do_st, "softmax", SHARED, H, V, BH, BV, BUCKETS,
        )  # fmt: skip
        shift, begin, end = key_range(row, lq, lk, left, right, MASKED, BOTTOM_RIGHT, BM, BN)
        for n in range(begin, end, BN):
            c = n + tl.arange(0, BN)
            inside = c < lk
            k_nH = load_rows(k + head_k * k_sn, k0 + c, inside, k_st, H, BH)
            v_nV = load_rows(v + head_k * v_sn, k0 + c, inside, v_st, V, BV)
            t_n = load_times(times_k, k0 + c, inside, BUCKETS)
            ds_Mn = score_gradient(
                q_MH, do_MV, lse_M, delta_M, t_M, k_nH, v_nV, t_n, inside, c[None, :] - r[:, None] - shift, scale,
                left, right, position, time, radius, unit, head, "softmax", MASKED, PRECISION, BY_POSITION, BUCKETS,
            )  # fmt: skip
            if BY_POSITION:
                low, high = add_diagonals(ds_Mn, n - row - shift - (BM - 1), low, high, sums, radius, BM, BN, W)
            if BUCKETS > 0:
                bucket_Mn = time_bucket(t_n[None, :] - t_M[:, None], unit, BUCKETS)
                sum_B = add_buckets(ds_Mn, bucket_Mn, own[:, None] & inside[None, :], sum_B, BUCKETS, BB)
    if BY_POSITION:
        if radius == 0:
            tl.store(sums, low + high)
        else:
            tl.store(sums, low)
            tl.store(sums + 2 * radius, high)
    if BUCKETS > 0:
        b = tl.arange(0, BB)
        tl.store(d_time + share * BUCKETS + b, sum_B, mask=b < BUCKETS)


@triton.jit(do_not_specialize=["left", "right"])
def zero_queries_without_keys_kernel(
    dq, bounds_q, bounds_k, tile_sample, tile_row, num_tiles, left, right, dq_st,
    WIDTH: tl.constexpr, BW: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, MASKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
):  # fmt: skip
    """Zeros dQ of query tiles (64 rows) over which no key tile (128 rows) walks: no key, or none that the mask admits.

    Rows past the last offset are a sequence without keys.
    """
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    row, q0, lq, _k0, lk = find_tile(tile_sample, tile_row, bounds_q, bounds_k, tile)
    if not MASKED and lk > 0:
        return
    shift = 0
    if BOTTOM_RIGHT:
        shift = lk - lq
    zero = tl.zeros([BR, BW], dq.dtype.element_ty)
    for r0 in range(row, min(row + ROWS, lq), BR):
        walked = lk > 0
        if MASKED:
            m = r0 // 64 * 64
            reach = m + 63 + shift + right  # the furthest key of the tile's last row
            key = tl.minimum(reach, lk - 1) // 128 * 128  # the last key tile in reach: does it look back this far?
            walked = walked & (reach >= 0) & (m < tl.minimum(key + 128, lk) - shift + left)
        r = r0 + tl.arange(0, BR)
        store_rows(dq, q0 + r, (r < lq) & (walked == 0), dq_st, zero, WIDTH, BW)
