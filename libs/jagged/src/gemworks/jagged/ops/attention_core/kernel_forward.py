"""Forward of jagged attention in plain Triton: softmax or an element-wise activation. Row masks, no descriptors.

The twin of kernel_forward_hopper.py, and the kernel of everything that one does not cover.

Letters: M query rows of a tile, n key rows of a tile, H and V head widths (BH and BV: the next powers of two).
"""

import triton
import triton.language as tl
from gemworks.jagged._triton.activations import LOG2_E, activate
from gemworks.jagged.ops.attention_core.kernel_bias import bias_tile, load_times


@triton.jit
def load_rows(ptr, rows, valid, stride_t, W: tl.constexpr, BW: tl.constexpr):
    """[rows, BW], zeros where a row is not valid and past the head width."""
    w = tl.arange(0, BW)
    at = ptr + rows.to(tl.int64)[:, None] * stride_t + w[None, :]
    if W == BW:
        return tl.load(at, mask=valid[:, None], other=0.0)
    else:
        return tl.load(at, mask=valid[:, None] & (w < W)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, rows, valid, stride_t, x, W: tl.constexpr, BW: tl.constexpr):
    w = tl.arange(0, BW)
    at = ptr + rows.to(tl.int64)[:, None] * stride_t + w[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=valid[:, None] & (w < W)[None, :])


@triton.jit
def find_tile(tile_sample, tile_row, bounds_r, bounds_s, tile):
    """(first row of the tile in its sequence, begin and length of its side, begin and length of the other side)."""
    b = tl.load(tile_sample + tile)
    row = tl.load(tile_row + tile)
    r0 = tl.load(bounds_r + b)
    lr = tl.load(bounds_r + b + 1) - r0
    s0 = tl.load(bounds_s + b)
    ls = tl.load(bounds_s + b + 1) - s0
    return row, r0, lr, s0, ls


@triton.jit
def key_range(
    row, lq, lk, left, right, MASKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """(shift of positions, first and end of the key rows that a query tile meets)."""
    shift = 0
    if BOTTOM_RIGHT:
        shift = lk - lq
    begin = 0
    end = lk
    if MASKED:
        begin = tl.maximum(row + shift - left, 0) // BN * BN
        end = tl.minimum(lk, tl.minimum(row + BM, lq) + shift + right)
    return shift, begin, end


@triton.jit(do_not_specialize=["left", "right", "lse_sn"])  # else batches differ to the compiler
def forward_kernel(
    q, k, v, out, lse, bounds_q, bounds_k, tile_sample, tile_row, num_tiles, scale, left, right,
    position, time, times_q, times_k, radius, unit,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, o_st, o_sn, lse_sn,
    ACT: tl.constexpr, MASKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr, BY_POSITION: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
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
    t_M = load_times(times_q, q_rows, own, BUCKETS)
    o_MV = tl.zeros([BM, BV], tl.float32)
    max_M = tl.full([BM], float("-inf"), tl.float32)
    sum_M = tl.zeros([BM], tl.float32)
    shift, begin, end = key_range(row, lq, lk, left, right, MASKED, BOTTOM_RIGHT, BM, BN)
    for n in range(begin, end, BN):
        c = n + tl.arange(0, BN)
        inside = c < lk
        k_nH = load_rows(k + head_k * k_sn, k0 + c, inside, k_st, H, BH)
        v_nV = load_rows(v + head_k * v_sn, k0 + c, inside, v_st, V, BV)
        s_Mn = tl.dot(q_MH, tl.trans(k_nH), input_precision=PRECISION)
        admitted = inside[None, :]
        away = c[None, :] - r[:, None] - shift  # p_k - p_q
        if MASKED:
            admitted = admitted & (away <= right) & (away >= -left)
        if ACT == "softmax":
            s_Mn = s_Mn * (scale * LOG2_E)
            if BY_POSITION or BUCKETS > 0:
                t_n = load_times(times_k, k0 + c, inside, BUCKETS)
                s_Mn += bias_tile(
                    away, t_n[None, :] - t_M[:, None], position, time, radius, unit, head, BY_POSITION, BUCKETS
                )
            s_Mn = tl.where(admitted, s_Mn, float("-inf"))
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
        o_MV = tl.dot(p.to(v_nV.dtype), v_nV, o_MV, input_precision=PRECISION)
    if ACT == "softmax":
        safe_M = tl.where(sum_M > 0.0, sum_M, 1.0)
        o_MV = o_MV / safe_M[:, None]
        lse_M = tl.where(sum_M > 0.0, max_M + tl.log2(safe_M), float("inf"))
        tl.store(lse + head * lse_sn + q0 + r, lse_M, mask=own)
    store_rows(out + head * o_sn, q0 + r, own, o_st, o_MV, V, BV)
