"""GDPA with a norm across heads at its end in plain Triton: the twin of kernel_epilogue_hopper.py, for the rest.

Letters: M query rows of a tile, n key rows of a tile, C rows that are normalised at a time, H and V head widths, W all
heads of a row (BH, BV, BW: the next powers of two).
"""

import triton
import triton.language as tl
from gemworks.jagged._triton.activations import activate
from gemworks.jagged.ops.attention_core.kernel_forward import find_tile, load_rows, store_rows


@triton.jit
def gdpa_norm_kernel(
    q, k, v, h, y, residual, add, weight, bias, end, bounds_q, bounds_k, tile_sample, tile_row, num_tiles, scale, eps,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, residual_st, add_st,
    ACT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BH: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, BW: tl.constexpr,
    C: tl.constexpr, CENTER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ADD: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One tile through all heads; then h = o + residual, y = norm(h) weight + bias + add of its rows."""
    W: tl.constexpr = HEADS * V
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    row, q0, lq, k0, lk = find_tile(tile_sample, tile_row, bounds_q, bounds_k, tile)
    r = row + tl.arange(0, BM)
    own = r < lq
    for head in range(HEADS):
        head_k = head // GROUP
        q_MH = load_rows(q + head * q_sn, q0 + r, own, q_st, H, BH)
        o_MV = tl.zeros([BM, BV], tl.float32)
        for n in range(0, lk, BN):
            c = n + tl.arange(0, BN)
            k_nH = load_rows(k + head_k * k_sn, k0 + c, c < lk, k_st, H, BH)
            v_nV = load_rows(v + head_k * v_sn, k0 + c, c < lk, v_st, V, BV)
            p = activate(tl.dot(q_MH, tl.trans(k_nH), input_precision=PRECISION) * scale, ACT)
            o_MV = tl.dot(p.to(v_nV.dtype), v_nV, o_MV, input_precision=PRECISION)
        store_rows(h + head * V, q0 + r, own, W, o_MV, V, BV)
    tl.debug_barrier()  # other threads read these rows now
    w = tl.arange(0, BW)
    inside_W = (w < W)[None, :]
    live = q0 < tl.load(end)  # else rows of no sequence
    for begin in range(row, tl.minimum(row + BM, lq), C):
        c = begin + tl.arange(0, C)
        inside = (c < tl.minimum(row + BM, lq))[:, None] & inside_W
        rows = (q0 + c).to(tl.int64)[:, None]
        h_CW = tl.load(h + rows * W + w[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            h_CW += tl.load(residual + rows * residual_st + w[None, :], mask=inside & live, other=0.0).to(tl.float32)
            tl.store(h + rows * W + w[None, :], h_CW.to(h.dtype.element_ty), mask=inside)
        if CENTER:
            h_CW = tl.where(inside_W, h_CW - (tl.sum(h_CW, 1) / W)[:, None], 0.0)
        y_CW = h_CW * tl.rsqrt(tl.sum(h_CW * h_CW, 1) / W + eps)[:, None]
        if HAS_WEIGHT:
            y_CW *= tl.load(weight + w, mask=w < W, other=0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            y_CW += tl.load(bias + w, mask=w < W, other=0.0).to(tl.float32)[None, :]
        y_CW = tl.where(live, y_CW, 0.0)
        if HAS_ADD:
            y_CW += tl.load(add + rows * add_st + w[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(y + rows * W + w[None, :], y_CW.to(y.dtype.element_ty), mask=inside)
