"""BlockAttention in Triton: one program holds a whole block of one head, so softmax is one pass over one tile.

No running maximum, no logsumexp, no delta kernel: backward computes the weights P again (the logits are one product
away) and takes delta = rowsum(P * dP) from the tile. QK-norm and rope act on the tiles between load and product, their
adjoints on float32 accumulators between product and store, so neither costs a byte of traffic but the tables.

The two halves of a head are loaded apart, because rope turns column j against column j + J: [q_a | q_b] [k_a | k_b]^T
= q_a k_a^T + q_b k_b^T needs no shuffle.

Letters: L rows of a block as queries, K the same rows as keys, J half the head width, V value width.
"""

# pyright: reportArgumentType=false, reportOptionalOperand=false, reportOperatorIssue=false
# (Triton's functions are annotated for its tracer, not for type checkers.)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(ptr, row_L, stride, inside_L, first: tl.constexpr, width: tl.constexpr, BLOCK_W: tl.constexpr):
    """Columns first .. first + width of some rows; zeros elsewhere, whatever lies there in memory."""
    col_W = tl.arange(0, BLOCK_W)
    inside = inside_L[:, None]
    if width != BLOCK_W:
        inside = inside & (col_W < width)[None, :]
    return tl.load(ptr + row_L[:, None] * stride + (first + col_W)[None, :], mask=inside, other=0.0)


@triton.jit
def _store(ptr, x_LW, row_L, stride, inside_L, first: tl.constexpr, width: tl.constexpr, BLOCK_W: tl.constexpr):
    col_W = tl.arange(0, BLOCK_W)
    inside = inside_L[:, None]
    if width != BLOCK_W:
        inside = inside & (col_W < width)[None, :]
    tl.store(ptr + row_L[:, None] * stride + (first + col_W)[None, :], x_LW.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rows_of(table_ptr, slot):
    """First row of a block, how many of its rows attend, how many are written; see `BlockSchedule`."""
    return tl.load(table_ptr + 3 * slot), tl.load(table_ptr + 3 * slot + 1), tl.load(table_ptr + 3 * slot + 2)


@triton.jit
def _load_halves(ptr, row_L, stride, inside_L, J: tl.constexpr, BLOCK_J: tl.constexpr):
    a_LJ = _load(ptr, row_L, stride, inside_L, 0, J, BLOCK_J)
    b_LJ = _load(ptr, row_L, stride, inside_L, J, J, BLOCK_J)
    return a_LJ, b_LJ


@triton.jit
def _load_tables(cos_ptr, sin_ptr, row_L, stride, inside_L, J: tl.constexpr, BLOCK_J: tl.constexpr, ROPE: tl.constexpr):
    """float32 cosines and sines of the rows; not read without ROPE."""
    if ROPE:
        cos_LJ = _load(cos_ptr, row_L, stride, inside_L, 0, J, BLOCK_J).to(tl.float32)
        sin_LJ = _load(sin_ptr, row_L, stride, inside_L, 0, J, BLOCK_J).to(tl.float32)
        return cos_LJ, sin_LJ
    else:
        return 0.0, 0.0


@triton.jit
def _norm_and_turn(a_LJ, b_LJ, cos_LJ, sin_LJ, inside_L, eps, H: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr):
    """The two halves of a head after QK-norm and rope, in the type they came in, and the norm's scale [L]."""
    dtype = a_LJ.dtype
    scale_L = inside_L.to(tl.float32)
    if NORM or ROPE:
        a_LJ = a_LJ.to(tl.float32)
        b_LJ = b_LJ.to(tl.float32)
        square_L = tl.sum(a_LJ * a_LJ + b_LJ * b_LJ, axis=1) / H
        if NORM:  # noqa: SIM108 (a branch of the compiler)
            scale_L = tl.where(inside_L, tl.rsqrt(square_L + eps), 0.0)  # 0, not inf, for rows that are not there
        else:
            # Always 1. A row sum keeps the compiler from doing the turn in the registers of the product's left factor,
            # where it would send both tiles and the tables through shared memory first (240 registers against 172).
            scale_L = tl.where(square_L < 0.0, 0.0, 1.0)
        a_LJ *= scale_L[:, None]
        b_LJ *= scale_L[:, None]
    if ROPE:
        turned_LJ = a_LJ * cos_LJ - b_LJ * sin_LJ
        b_LJ = b_LJ * cos_LJ + a_LJ * sin_LJ
        a_LJ = turned_LJ
    return a_LJ.to(dtype), b_LJ.to(dtype), scale_L


@triton.jit
def _minus_projection(d_LJ, projection_L, x_LJ, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """d - projection x, row by row, as a product with a diagonal.

    x is in shared memory as a factor already, while keeping it in registers for an epilogue would halve the number of
    programs that fit.
    """
    at_L = tl.arange(0, BLOCK)
    diagonal_LL = tl.where(at_L[:, None] == at_L[None, :], -projection_L[:, None], 0.0).to(x_LJ.dtype)
    return tl.dot(diagonal_LL, x_LJ, d_LJ, input_precision=PRECISION)


@triton.jit
def _store_gradient(
    ptr, da_LJ, db_LJ, scale_L, cos_ptr, sin_ptr, row_L, inside_L, stride, table_stride,
    J: tl.constexpr, BLOCK_J: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """The norm's scale and the turn back of rope, then the store."""
    if NORM:
        da_LJ *= scale_L[:, None]
        db_LJ *= scale_L[:, None]
    if ROPE:  # read again: they are in a cache, and registers are what limits the number of programs
        cos_LJ, sin_LJ = _load_tables(cos_ptr, sin_ptr, row_L, table_stride, inside_L, J, BLOCK_J, ROPE)
        turned_LJ = da_LJ * cos_LJ + db_LJ * sin_LJ
        db_LJ = db_LJ * cos_LJ - da_LJ * sin_LJ
        da_LJ = turned_LJ
    _store(ptr, da_LJ, row_L, stride, inside_L, 0, J, BLOCK_J)
    _store(ptr, db_LJ, row_L, stride, inside_L, J, J, BLOCK_J)


@triton.jit
def _products(qa_LJ, qb_LJ, ka_KJ, kb_KJ, PRECISION: tl.constexpr):
    """q k of all pairs, from halves of heads."""
    product_LK = tl.dot(qa_LJ, tl.trans(ka_KJ), input_precision=PRECISION)
    return tl.dot(qb_LJ, tl.trans(kb_KJ), product_LK, input_precision=PRECISION)


@triton.jit
def _weights(product_LK, length, scale_log2, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """exp2(logits - row maximum) of the products q k, and its row sums.

    Every row sees key 0, which is zeros in a block without rows: so no row is empty and nothing becomes NaN.
    """
    key_K = tl.arange(0, BLOCK)[None, :]
    admitted = key_K < tl.maximum(length, 1)
    if CAUSAL:
        admitted = admitted & (key_K <= tl.arange(0, BLOCK)[:, None])
    logits_LK = tl.where(admitted, product_LK * scale_log2, float("-inf"))
    p_LK = tl.exp2(logits_LK - tl.max(logits_LK, axis=1)[:, None])
    return p_LK, tl.sum(p_LK, axis=1)


@triton.jit
def block_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, cos_ptr, sin_ptr, scale_log2, eps,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, out_st, out_sn, table_st,
    HEADS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_V: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One (block, query head). Heads of a block are neighbours in the grid: a packed row is read while it is near."""
    J: tl.constexpr = H // 2
    slot = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    start, length, stored = _rows_of(table_ptr, slot)
    if stored == 0:
        return
    at_L = tl.arange(0, BLOCK)
    row_L = start.to(tl.int64) + at_L
    inside_L = at_L < length
    key_head = head // GROUP
    qa_LJ, qb_LJ = _load_halves(q_ptr + head * q_sn, row_L, q_st, inside_L, J, BLOCK_J)
    ka_KJ, kb_KJ = _load_halves(k_ptr + key_head * k_sn, row_L, k_st, inside_L, J, BLOCK_J)
    v_KV = _load(v_ptr + key_head * v_sn, row_L, v_st, inside_L, 0, V, BLOCK_V)
    out_ptr += head * out_sn
    cos_LJ, sin_LJ = _load_tables(cos_ptr, sin_ptr, row_L, table_st, inside_L, J, BLOCK_J, ROPE)
    qa_LJ, qb_LJ, _ = _norm_and_turn(qa_LJ, qb_LJ, cos_LJ, sin_LJ, inside_L, eps, H, NORM, ROPE)
    ka_KJ, kb_KJ, _ = _norm_and_turn(ka_KJ, kb_KJ, cos_LJ, sin_LJ, inside_L, eps, H, NORM, ROPE)
    product_LK = _products(qa_LJ, qb_LJ, ka_KJ, kb_KJ, PRECISION)
    p_LK, sum_L = _weights(product_LK, length, scale_log2, BLOCK, CAUSAL)
    out_LV = tl.dot(p_LK.to(v_KV.dtype), v_KV, input_precision=PRECISION) / sum_L[:, None]
    out_LV = tl.where(inside_L[:, None], out_LV, 0.0)  # rows of no sequence are 0
    _store(out_ptr, out_LV, row_L, out_st, at_L < stored, 0, V, BLOCK_V)


@triton.jit
def block_bwd_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, dk_ptr, dv_ptr, table_ptr, cos_ptr, sin_ptr, scale_log2, scale, eps,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, dout_st, dout_sn, dq_st, dq_sn, dk_st, dk_sn, dv_st, dv_sn, table_st,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_V: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One (block, key head) with its query heads one after another, so dk and dv are summed in a fixed order."""
    J: tl.constexpr = H // 2
    slot = tl.program_id(0) // KEY_HEADS
    key_head = tl.program_id(0) % KEY_HEADS
    start, length, stored = _rows_of(table_ptr, slot)
    if stored == 0:
        return
    at_L = tl.arange(0, BLOCK)
    row_L = start.to(tl.int64) + at_L
    inside_L = at_L < length
    stored_L = at_L < stored
    ka_KJ, kb_KJ = _load_halves(k_ptr + key_head * k_sn, row_L, k_st, inside_L, J, BLOCK_J)
    v_KV = _load(v_ptr + key_head * v_sn, row_L, v_st, inside_L, 0, V, BLOCK_V)
    cos_LJ, sin_LJ = _load_tables(cos_ptr, sin_ptr, row_L, table_st, inside_L, J, BLOCK_J, ROPE)
    ka_KJ, kb_KJ, k_scale_L = _norm_and_turn(ka_KJ, kb_KJ, cos_LJ, sin_LJ, inside_L, eps, H, NORM, ROPE)
    dka_KJ = tl.zeros([BLOCK, BLOCK_J], tl.float32)
    dkb_KJ = tl.zeros([BLOCK, BLOCK_J], tl.float32)
    dv_KV = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    k_projection_K = tl.zeros([BLOCK], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        qa_LJ, qb_LJ = _load_halves(q_ptr + head * q_sn, row_L, q_st, inside_L, J, BLOCK_J)
        dout_LV = _load(dout_ptr + head * dout_sn, row_L, dout_st, inside_L, 0, V, BLOCK_V)
        qa_LJ, qb_LJ, q_scale_L = _norm_and_turn(qa_LJ, qb_LJ, cos_LJ, sin_LJ, inside_L, eps, H, NORM, ROPE)
        product_LK = _products(qa_LJ, qb_LJ, ka_KJ, kb_KJ, PRECISION)
        p_LK, sum_L = _weights(product_LK, length, scale_log2, BLOCK, CAUSAL)
        p_LK /= sum_L[:, None]
        dp_LK = tl.dot(dout_LV, tl.trans(v_KV), input_precision=PRECISION)
        dv_KV = tl.dot(tl.trans(p_LK.to(dout_LV.dtype)), dout_LV, dv_KV, input_precision=PRECISION)
        if GROUP == 1:  # before the other products: its registers are free sooner
            _store(dv_ptr + key_head * dv_sn, dv_KV, row_L, dv_st, stored_L, 0, V, BLOCK_V)
        delta_L = tl.sum(p_LK * dp_LK, axis=1)
        ds_LK = p_LK * (dp_LK - delta_L[:, None]) * scale
        if NORM:  # mean(dn n) of a row of q is a row sum over pairs, of a row of k a column sum: dn n = ds (q k)
            along_LK = ds_LK * product_LK
            q_projection_L = tl.sum(along_LK, axis=1) / H
            k_projection_K += tl.sum(along_LK, axis=0) / H
        ds_LK = ds_LK.to(qa_LJ.dtype)
        dqa_LJ = tl.dot(ds_LK, ka_KJ, input_precision=PRECISION)
        dqb_LJ = tl.dot(ds_LK, kb_KJ, input_precision=PRECISION)
        if NORM:
            dqa_LJ = _minus_projection(dqa_LJ, q_projection_L, qa_LJ, BLOCK, PRECISION)
            dqb_LJ = _minus_projection(dqb_LJ, q_projection_L, qb_LJ, BLOCK, PRECISION)
        _store_gradient(
            dq_ptr + head * dq_sn, dqa_LJ, dqb_LJ, q_scale_L, cos_ptr, sin_ptr, row_L, stored_L, dq_st, table_st,
            J, BLOCK_J, NORM, ROPE,
        )  # fmt: skip
        ds_KL = tl.trans(ds_LK)
        dka_KJ = tl.dot(ds_KL, qa_LJ, dka_KJ, input_precision=PRECISION)
        dkb_KJ = tl.dot(ds_KL, qb_LJ, dkb_KJ, input_precision=PRECISION)
    if NORM:
        dka_KJ = _minus_projection(dka_KJ, k_projection_K, ka_KJ, BLOCK, PRECISION)
        dkb_KJ = _minus_projection(dkb_KJ, k_projection_K, kb_KJ, BLOCK, PRECISION)
    if GROUP > 1:
        _store(dv_ptr + key_head * dv_sn, dv_KV, row_L, dv_st, stored_L, 0, V, BLOCK_V)
    _store_gradient(
        dk_ptr + key_head * dk_sn, dka_KJ, dkb_KJ, k_scale_L, cos_ptr, sin_ptr, row_L, stored_L, dk_st, table_st,
        J, BLOCK_J, NORM, ROPE,
    )  # fmt: skip
