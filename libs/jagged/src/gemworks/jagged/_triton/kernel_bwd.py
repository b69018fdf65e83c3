"""Backward of jagged attention: split kernels (dK and dV; dQ), and one program per (sample, head) with dQ in place.

Letters: M query rows of a tile, n key rows of a tile, H head width, N heads.
All are free of atomics and deterministic.
"""

import triton
import triton.language as tl

from .activations import activate_with_grad


@triton.jit
def _rows(ptr, begin, row, limit, head, stride_t, stride_n, BLOCK: tl.constexpr, H: tl.constexpr):
    r = row + tl.arange(0, BLOCK)
    offs = (begin + r).to(tl.int64)[:, None] * stride_t + head * stride_n + tl.arange(0, H)[None, :]
    return tl.load(ptr + offs, mask=(r < limit)[:, None], other=0.0)


@triton.jit
def _grads_st(s_nM, dp_nM, lse_M, delta_M, scale, ACT: tl.constexpr):
    """(P^T, dS^T) from the raw scores' transpose; dS carries the scale."""
    if ACT == "softmax":
        p = tl.exp2(s_nM * (scale * 1.4426950408889634) - lse_M[None, :])
        return p, p * (dp_nM - delta_M[None, :]) * scale
    else:
        p, dact = activate_with_grad(s_nM * scale, ACT)
        return p, dact * dp_nM * scale


@triton.jit
def bwd_kv_kernel(
    q, k, v, do, lse, delta, dk, dv, offsets_q, offsets_k, tile_sample, tile_row, num_tiles, scale,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, do_st, do_sn, dk_st, dk_sn, dv_st, dv_sn, lse_sn,
    ACT: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    pid = tl.program_id(0)
    head = pid % HEADS
    tile = pid // HEADS
    if tile >= tl.load(num_tiles):
        return
    b = tl.load(tile_sample + tile)
    row = tl.load(tile_row + tile)
    q0 = tl.load(offsets_q + b)
    lq = tl.load(offsets_q + b + 1) - q0
    k0 = tl.load(offsets_k + b)
    lk = tl.load(offsets_k + b + 1) - k0
    k_nH = _rows(k, k0, row, lk, head, k_st, k_sn, BN, H)
    v_nH = _rows(v, k0, row, lk, head, v_st, v_sn, BN, H)
    dk_nH = tl.zeros([BN, H], tl.float32)
    dv_nH = tl.zeros([BN, H], tl.float32)
    for m in range(0, lq, BM):
        q_MH = _rows(q, q0, m, lq, head, q_st, q_sn, BM, H)
        do_MH = _rows(do, q0, m, lq, head, do_st, do_sn, BM, H)
        s_nM = tl.dot(k_nH, tl.trans(q_MH))
        dp_nM = tl.dot(v_nH, tl.trans(do_MH))
        r = m + tl.arange(0, BM)
        lse_M = r
        delta_M = r
        if ACT == "softmax":
            lse_M = tl.load(lse + head * lse_sn + q0 + r, mask=r < lq, other=float("inf"))
            delta_M = tl.load(delta + head * lse_sn + q0 + r, mask=r < lq, other=0.0)
        p_nM, ds_nM = _grads_st(s_nM, dp_nM, lse_M, delta_M, scale, ACT)
        dv_nH = tl.dot(p_nM.to(do_MH.dtype), do_MH, dv_nH)
        dk_nH = tl.dot(ds_nM.to(q_MH.dtype), q_MH, dk_nH)
    r = row + tl.arange(0, BN)
    mask = (r < lk)[:, None]
    rows64 = (k0 + r).to(tl.int64)[:, None]
    h = tl.arange(0, H)[None, :]
    tl.store(dk + rows64 * dk_st + head * dk_sn + h, dk_nH.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + rows64 * dv_st + head * dv_sn + h, dv_nH.to(dv.dtype.element_ty), mask=mask)


@triton.jit
def bwd_q_kernel(
    q, k, v, do, lse, delta, dq, offsets_q, offsets_k, tile_sample, tile_row, num_tiles, scale,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, do_st, do_sn, dq_st, dq_sn, lse_sn,
    ACT: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    pid = tl.program_id(0)
    head = pid % HEADS
    tile = pid // HEADS
    if tile >= tl.load(num_tiles):
        return
    b = tl.load(tile_sample + tile)
    row = tl.load(tile_row + tile)
    q0 = tl.load(offsets_q + b)
    lq = tl.load(offsets_q + b + 1) - q0
    k0 = tl.load(offsets_k + b)
    lk = tl.load(offsets_k + b + 1) - k0
    q_MH = _rows(q, q0, row, lq, head, q_st, q_sn, BM, H)
    do_MH = _rows(do, q0, row, lq, head, do_st, do_sn, BM, H)
    r = row + tl.arange(0, BM)
    lse_M = r
    delta_M = r
    if ACT == "softmax":
        lse_M = tl.load(lse + head * lse_sn + q0 + r, mask=r < lq, other=float("inf"))
        delta_M = tl.load(delta + head * lse_sn + q0 + r, mask=r < lq, other=0.0)
    dq_MH = tl.zeros([BM, H], tl.float32)
    for n in range(0, lk, BN):
        k_nH = _rows(k, k0, n, lk, head, k_st, k_sn, BN, H)
        v_nH = _rows(v, k0, n, lk, head, v_st, v_sn, BN, H)
        s_Mn = tl.dot(q_MH, tl.trans(k_nH))
        dp_Mn = tl.dot(do_MH, tl.trans(v_nH))
        if ACT == "softmax":
            # rows of K past the end are zeros, so surplus columns add nothing to dQ
            p = tl.exp2(s_Mn * (scale * 1.4426950408889634) - lse_M[:, None])
            ds_Mn = p * (dp_Mn - delta_M[:, None]) * scale
        else:
            p, dact = activate_with_grad(s_Mn * scale, ACT)
            ds_Mn = dact * dp_Mn * scale
        dq_MH = tl.dot(ds_Mn.to(k_nH.dtype), k_nH, dq_MH)
    mask = (r < lq)[:, None]
    offs = (q0 + r).to(tl.int64)[:, None] * dq_st + head * dq_sn + tl.arange(0, H)[None, :]
    tl.store(dq + offs, dq_MH.to(dq.dtype.element_ty), mask=mask)


@triton.jit
def bwd_fused_kernel(
    q, k, v, do, lse, delta, dq32, dk, dv, offsets_q, offsets_k, order, scale,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, do_st, do_sn, dq_st, dq_sn, dk_st, dk_sn, dv_st, dv_sn, lse_sn,
    ACT: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DQ_OUT: tl.constexpr,
):
    """One program owns one (sample, head): five matrix products per tile, dQ accumulated in its own float32 rows."""
    pid = tl.program_id(0)
    head = pid % HEADS
    b = tl.load(order + pid // HEADS)
    q0 = tl.load(offsets_q + b)
    lq = tl.load(offsets_q + b + 1) - q0
    k0 = tl.load(offsets_k + b)
    lk = tl.load(offsets_k + b + 1) - k0
    h = tl.arange(0, H)[None, :]
    for n in range(0, lk, BN):
        k_nH = _rows(k, k0, n, lk, head, k_st, k_sn, BN, H)
        v_nH = _rows(v, k0, n, lk, head, v_st, v_sn, BN, H)
        dk_nH = tl.zeros([BN, H], tl.float32)
        dv_nH = tl.zeros([BN, H], tl.float32)
        for m in range(0, lq, BM):
            q_MH = _rows(q, q0, m, lq, head, q_st, q_sn, BM, H)
            do_MH = _rows(do, q0, m, lq, head, do_st, do_sn, BM, H)
            s_nM = tl.dot(k_nH, tl.trans(q_MH))
            dp_nM = tl.dot(v_nH, tl.trans(do_MH))
            r = m + tl.arange(0, BM)
            lse_M = r
            delta_M = r
            if ACT == "softmax":
                lse_M = tl.load(lse + head * lse_sn + q0 + r, mask=r < lq, other=float("inf"))
                delta_M = tl.load(delta + head * lse_sn + q0 + r, mask=r < lq, other=0.0)
            p_nM, ds_nM = _grads_st(s_nM, dp_nM, lse_M, delta_M, scale, ACT)
            ds = ds_nM.to(q_MH.dtype)
            dv_nH = tl.dot(p_nM.to(do_MH.dtype), do_MH, dv_nH)
            dk_nH = tl.dot(ds, q_MH, dk_nH)
            part = tl.dot(tl.trans(ds), k_nH)
            pointers = dq32 + (q0 + r).to(tl.int64)[:, None] * dq_st + head * dq_sn + h
            mask = (r < lq)[:, None]
            if n > 0:
                part += tl.load(pointers, mask=mask, other=0.0)
            tl.store(pointers, part, mask=mask)
        rk = n + tl.arange(0, BN)
        maskk = (rk < lk)[:, None]
        rows64 = (k0 + rk).to(tl.int64)[:, None]
        tl.store(dk + rows64 * dk_st + head * dk_sn + h, dk_nH.to(dk.dtype.element_ty), mask=maskk)
        tl.store(dv + rows64 * dv_st + head * dv_sn + h, dv_nH.to(dv.dtype.element_ty), mask=maskk)
