"""Forward of jagged attention in plain Triton: softmax or an element-wise activation. Row masks, no descriptors."""

import triton
import triton.language as tl

from .activations import activate


@triton.jit
def fwd_kernel(
    q, k, v, out, lse, offsets_q, offsets_k, tile_sample, tile_row, num_tiles, scale,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, o_st, o_sn, lse_sn,
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
    r = row + tl.arange(0, BM)
    h = tl.arange(0, H)
    rmask = (r < lq)[:, None]
    q_MH = tl.load(q + (q0 + r).to(tl.int64)[:, None] * q_st + head * q_sn + h[None, :], mask=rmask, other=0.0)
    o_MH = tl.zeros([BM, H], tl.float32)
    max_M = tl.full([BM], float("-inf"), tl.float32)
    sum_M = tl.zeros([BM], tl.float32)
    for n in range(0, lk, BN):
        c = n + tl.arange(0, BN)
        cmask = c < lk
        rows64 = (k0 + c).to(tl.int64)[:, None]
        k_nH = tl.load(k + rows64 * k_st + head * k_sn + h[None, :], mask=cmask[:, None], other=0.0)
        v_nH = tl.load(v + rows64 * v_st + head * v_sn + h[None, :], mask=cmask[:, None], other=0.0)
        s_Mn = tl.dot(q_MH, tl.trans(k_nH))
        if ACT == "softmax":
            s_Mn = tl.where(cmask[None, :], s_Mn * (scale * 1.4426950408889634), float("-inf"))
            new = tl.maximum(max_M, tl.max(s_Mn, 1))
            p = tl.exp2(s_Mn - new[:, None])
            fix = tl.exp2(max_M - new)
            sum_M = sum_M * fix + tl.sum(p, 1)
            o_MH = o_MH * fix[:, None]
            max_M = new
        else:
            p = activate(s_Mn * scale, ACT)  # act(0) = 0 and V's surplus rows are zero
        o_MH = tl.dot(p.to(v_nH.dtype), v_nH, o_MH)
    if ACT == "softmax":
        safe = tl.where(sum_M > 0.0, sum_M, 1.0)
        o_MH = o_MH / safe[:, None]
        tl.store(lse + head * lse_sn + q0 + r, tl.where(sum_M > 0.0, max_M + tl.log2(safe), float("inf")), mask=r < lq)
    tl.store(out + (q0 + r).to(tl.int64)[:, None] * o_st + head * o_sn + h[None, :], o_MH.to(out.dtype.element_ty), mask=rmask)
