"""BlockAttention for Hopper in Gluon: the twin of kernel_block.py for one query head per key head in half precision.

The same program per (block, head) and the same formulas. What differs is where tiles live: asynchronous copies bring
them to shared memory without a detour through registers, zeros where no row is, and wgmma reads them there. So a
thread keeps accumulators alone, and three programs fit on a multiprocessor, one computing while two load or store.
There is no warp of its own for loading, hence no barrier but the one of the program.

In the backward P and dS take the place of V once dP = dO V^T is done.

Letters: L rows of a block as queries, K the same rows as keys, J half the head width, V value width.
"""

from gemworks.jagged._triton.hopper_common import sync_threads
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _copy_in(smem, ptr, row_L, stride, inside_L, first: gl.constexpr, LAYOUT: gl.constexpr):
    """Starts copying columns first .. first + width of some rows; zeros where no row is."""
    col_W = gl.arange(0, smem.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = ptr + row_L.to(gl.int64)[:, None] * stride + (first + col_W)[None, :]
    async_copy.async_copy_global_to_shared(smem, at, mask=inside_L[:, None])


@gluon.jit
def _halves_in(a_smem, b_smem, ptr, row_L, stride, inside_L, LAYOUT: gl.constexpr):
    _copy_in(a_smem, ptr, row_L, stride, inside_L, 0, LAYOUT)
    _copy_in(b_smem, ptr, row_L, stride, inside_L, b_smem.shape[1], LAYOUT)


@gluon.jit
def _table(ptr, row_L, stride, inside_L, J: gl.constexpr, LAYOUT: gl.constexpr):
    col_J = gl.arange(0, J, layout=gl.SliceLayout(0, LAYOUT))
    at = ptr + row_L.to(gl.int64)[:, None] * stride + col_J[None, :]
    return gl.load(at, mask=inside_L[:, None], other=0.0).to(gl.float32)


@gluon.jit
def _norm_and_turn(
    a_smem, b_smem, cos_LJ, sin_LJ, inside_L, eps,
    H: gl.constexpr, NORM: gl.constexpr, ROPE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """QK-norm and rope of the two halves of a head where they lie; the norm's scale [L] (0 for rows not there)."""
    a_LJ = a_smem.load(LAYOUT).to(gl.float32)
    b_LJ = b_smem.load(LAYOUT).to(gl.float32)
    scale_L = inside_L.to(gl.float32)
    if NORM:
        square_L = gl.sum(a_LJ * a_LJ + b_LJ * b_LJ, 1) / H
        scale_L = gl.where(inside_L, gl.rsqrt(square_L + eps), 0.0)
        a_LJ = a_LJ * scale_L[:, None]
        b_LJ = b_LJ * scale_L[:, None]
    if ROPE:
        turned_LJ = a_LJ * cos_LJ - b_LJ * sin_LJ
        b_LJ = b_LJ * cos_LJ + a_LJ * sin_LJ
        a_LJ = turned_LJ
    a_smem.store(a_LJ.to(a_smem.dtype))
    b_smem.store(b_LJ.to(b_smem.dtype))
    return scale_L


@gluon.jit
def _first_product(
    qa, qb, ka, kb, cos_ptr, sin_ptr, row_L, inside_L, table_st, eps,
    H: gl.constexpr, NORM: gl.constexpr, ROPE: gl.constexpr, LAYOUT: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """(q k of all pairs, the norm's scales of q and of k [L]) once q and k are there; one group of copies stays."""
    BLOCK: gl.constexpr = qa.shape[0]
    J: gl.constexpr = H // 2
    q_scale_L = 0.0
    k_scale_L = 0.0
    if NORM or ROPE:
        cos_LJ = 0.0
        sin_LJ = 0.0
        if ROPE:
            cos_LJ = _table(cos_ptr, row_L, table_st, inside_L, J, LAYOUT)
            sin_LJ = _table(sin_ptr, row_L, table_st, inside_L, J, LAYOUT)
        async_copy.wait_group(1)
        sync_threads()
        q_scale_L = _norm_and_turn(qa, qb, cos_LJ, sin_LJ, inside_L, eps, H, NORM, ROPE, LAYOUT)
        k_scale_L = _norm_and_turn(ka, kb, cos_LJ, sin_LJ, inside_L, eps, H, NORM, ROPE, LAYOUT)
    else:
        async_copy.wait_group(1)
    fence_async_shared()
    sync_threads()
    zero = gl.zeros([BLOCK, BLOCK], gl.float32, S_LAYOUT)
    s_LK = warpgroup_mma(qa, ka.permute((1, 0)), zero, use_acc=False, is_async=True)
    s_LK = warpgroup_mma(qb, kb.permute((1, 0)), s_LK, is_async=True)
    s_LK = warpgroup_mma_wait(0, [s_LK])
    return s_LK, q_scale_L, k_scale_L


@gluon.jit
def _weights(product_LK, length, scale_log2, BLOCK: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr):
    """exp2(logits - row maximum) and its row sums; a block without rows sees a key of zeros."""
    key_K = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    admitted = key_K < gl.maximum(length, 1)
    if CAUSAL:
        admitted = admitted & (key_K <= gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))[:, None])
    logits_LK = gl.where(admitted, product_LK * scale_log2, float("-inf"))
    p_LK = gl.exp2(logits_LK - gl.max(logits_LK, 1)[:, None])
    return p_LK, gl.sum(p_LK, 1)


@gluon.jit
def _copy_out(ptr, x_LW, row_L, stride, stored_L, first: gl.constexpr, LAYOUT: gl.constexpr):
    x_LW = gl.convert_layout(x_LW.to(ptr.dtype.element_ty), LAYOUT)
    col_W = gl.arange(0, x_LW.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = ptr + row_L.to(gl.int64)[:, None] * stride + (first + col_W)[None, :]
    gl.store(at, x_LW, mask=stored_L[:, None])


@gluon.jit
def _gradient_out(
    ptr, da_LJ, db_LJ, a_smem, b_smem, projection_L, scale_L, cos_ptr, sin_ptr, row_L, stored_L, stride, table_stride,
    J: gl.constexpr, NORM: gl.constexpr, ROPE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The adjoints of norm and turn on float32 rows, in the layout of the store, then the store.

    a_smem and b_smem hold the turned rows; the tables come in again, from a cache.
    """
    if NORM or ROPE:
        da_LJ = gl.convert_layout(da_LJ, LAYOUT)
        db_LJ = gl.convert_layout(db_LJ, LAYOUT)
    if NORM:
        da_LJ = (da_LJ - projection_L[:, None] * a_smem.load(LAYOUT).to(gl.float32)) * scale_L[:, None]
        db_LJ = (db_LJ - projection_L[:, None] * b_smem.load(LAYOUT).to(gl.float32)) * scale_L[:, None]
    if ROPE:
        cos_LJ = _table(cos_ptr, row_L, table_stride, stored_L, J, LAYOUT)
        sin_LJ = _table(sin_ptr, row_L, table_stride, stored_L, J, LAYOUT)
        turned_LJ = da_LJ * cos_LJ + db_LJ * sin_LJ
        db_LJ = db_LJ * cos_LJ - da_LJ * sin_LJ
        da_LJ = turned_LJ
    _copy_out(ptr, da_LJ, row_L, stride, stored_L, 0, LAYOUT)
    _copy_out(ptr, db_LJ, row_L, stride, stored_L, J, LAYOUT)


@gluon.jit
def block_fwd_hopper_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, cos_ptr, sin_ptr, scale_log2, eps,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, out_st, out_sn, table_st,
    HEADS: gl.constexpr, H: gl.constexpr, BLOCK: gl.constexpr, NORM: gl.constexpr, ROPE: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """One (block, head); heads of a block are neighbours in the grid."""
    J: gl.constexpr = H // 2
    WARPS: gl.constexpr = BLOCK // 16
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    MOVE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // J, J // 8], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [WARPS, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, H, 16])
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, J], DTYPE)
    FULL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, H], DTYPE)
    slot = gl.program_id(0) // HEADS
    head = gl.program_id(0) % HEADS
    start = gl.load(table_ptr + 3 * slot)
    length = gl.load(table_ptr + 3 * slot + 1)
    stored = gl.load(table_ptr + 3 * slot + 2)
    if stored > 0:
        at_L = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, MOVE))
        at_wide_L = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, WIDE))
        row_L = start + at_L
        inside_L = at_L < length
        qa = gl.allocate_shared_memory(DTYPE, [BLOCK, J], HALF)
        qb = gl.allocate_shared_memory(DTYPE, [BLOCK, J], HALF)
        ka = gl.allocate_shared_memory(DTYPE, [BLOCK, J], HALF)
        kb = gl.allocate_shared_memory(DTYPE, [BLOCK, J], HALF)
        v = gl.allocate_shared_memory(DTYPE, [BLOCK, H], FULL)
        _halves_in(qa, qb, q_ptr + head * q_sn, row_L, q_st, inside_L, MOVE)
        _halves_in(ka, kb, k_ptr + head * k_sn, row_L, k_st, inside_L, MOVE)
        async_copy.commit_group()
        _copy_in(v, v_ptr + head * v_sn, start + at_wide_L, v_st, at_wide_L < length, 0, WIDE)
        async_copy.commit_group()
        s_LK, _q_scale_L, _k_scale_L = _first_product(
            qa, qb, ka, kb, cos_ptr, sin_ptr, row_L, inside_L, table_st, eps, H, NORM, ROPE, MOVE, S_LAYOUT
        )
        p_LK, sum_L = _weights(s_LK, length, scale_log2, BLOCK, CAUSAL, S_LAYOUT)
        p = gl.convert_layout(p_LK.to(DTYPE), gl.DotOperandLayout(0, O_LAYOUT, 2))
        async_copy.wait_group(0)
        fence_async_shared()
        sync_threads()
        out_LV = warpgroup_mma(p, v, gl.zeros([BLOCK, H], gl.float32, O_LAYOUT), use_acc=False, is_async=True)
        out_LV, p = warpgroup_mma_wait(0, [out_LV, p])
        out_LV = out_LV / gl.convert_layout(sum_L, gl.SliceLayout(1, O_LAYOUT))[:, None]
        own_L = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, O_LAYOUT)) < length
        out_LV = gl.where(own_L[:, None], out_LV, 0.0)  # rows of no sequence are 0
        _copy_out(out_ptr + head * out_sn, out_LV, start + at_wide_L, out_st, at_wide_L < stored, 0, WIDE)


@gluon.jit
def block_bwd_hopper_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, dk_ptr, dv_ptr, table_ptr, cos_ptr, sin_ptr, scale_log2, scale, eps,
    q_st, q_sn, k_st, k_sn, v_st, v_sn, dout_st, dout_sn, dq_st, dq_sn, dk_st, dk_sn, dv_st, dv_sn, table_st,
    KEY_HEADS: gl.constexpr, H: gl.constexpr, BLOCK: gl.constexpr, NORM: gl.constexpr, ROPE: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """One (block, head)."""
    J: gl.constexpr = H // 2
    WARPS: gl.constexpr = BLOCK // 16
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    MOVE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // J, J // 8], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [WARPS, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, H, 16])
    J_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, J, 16])
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, J], DTYPE)
    FULL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, H], DTYPE)
    PAIR: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], DTYPE)
    slot = gl.program_id(0) // KEY_HEADS
    head = gl.program_id(0) % KEY_HEADS
    start = gl.load(table_ptr + 3 * slot)
    length = gl.load(table_ptr + 3 * slot + 1)
    stored = gl.load(table_ptr + 3 * slot + 2)
    if stored > 0:
        at_L = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, MOVE))
        at_wide_L = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, WIDE))
        row_L = start + at_L
        inside_L = at_L < length
        stored_L = at_L < stored
        qa = gl.allocate_shared_memory(DTYPE, [BLOCK, J], HALF)
        qb = gl.allocate_shared_memory(DTYPE, [BLOCK, J], HALF)
        ka = gl.allocate_shared_memory(DTYPE, [BLOCK, J], HALF)
        kb = gl.allocate_shared_memory(DTYPE, [BLOCK, J], HALF)
        dout = gl.allocate_shared_memory(DTYPE, [BLOCK, H], FULL)
        pairs = gl.allocate_shared_memory(DTYPE, [2, BLOCK, BLOCK], PAIR)  # P and dS; V before that
        if BLOCK < H:
            v = pairs._reinterpret(DTYPE, [BLOCK, H], FULL)
        else:
            v = pairs.index(1)._reinterpret(DTYPE, [BLOCK, H], FULL)
        _halves_in(qa, qb, q_ptr + head * q_sn, row_L, q_st, inside_L, MOVE)
        _halves_in(ka, kb, k_ptr + head * k_sn, row_L, k_st, inside_L, MOVE)
        async_copy.commit_group()
        _copy_in(v, v_ptr + head * v_sn, start + at_wide_L, v_st, at_wide_L < length, 0, WIDE)
        _copy_in(dout, dout_ptr + head * dout_sn, start + at_wide_L, dout_st, at_wide_L < length, 0, WIDE)
        async_copy.commit_group()
        s_LK, q_scale_L, k_scale_L = _first_product(
            qa, qb, ka, kb, cos_ptr, sin_ptr, row_L, inside_L, table_st, eps, H, NORM, ROPE, MOVE, S_LAYOUT
        )
        async_copy.wait_group(0)
        fence_async_shared()
        sync_threads()
        dp_LK = warpgroup_mma(
            dout, v.permute((1, 0)), gl.zeros([BLOCK, BLOCK], gl.float32, S_LAYOUT), use_acc=False, is_async=True
        )
        p_LK, sum_L = _weights(s_LK, length, scale_log2, BLOCK, CAUSAL, S_LAYOUT)
        p_LK = p_LK / sum_L[:, None]
        dp_LK = warpgroup_mma_wait(0, [dp_LK])
        delta_L = gl.sum(p_LK * dp_LK, 1)
        ds_LK = p_LK * (dp_LK - delta_L[:, None]) * scale
        q_projection_L = 0.0
        k_projection_K = 0.0
        if NORM:  # mean(dn n) of a row of q is a row sum over pairs, of a row of k a column sum: dn n = ds (q k)
            along_LK = ds_LK * s_LK
            q_projection_L = gl.convert_layout(gl.sum(along_LK, 1) / H, gl.SliceLayout(1, MOVE))
            k_projection_K = gl.convert_layout(gl.sum(along_LK, 0) / H, gl.SliceLayout(1, MOVE))
        sync_threads()  # every warp is through with V
        pairs.index(0).store(p_LK.to(DTYPE))
        pairs.index(1).store(ds_LK.to(DTYPE))
        fence_async_shared()
        sync_threads()
        p_KL = pairs.index(0).permute((1, 0))
        ds_KL = pairs.index(1).permute((1, 0))
        none = gl.zeros([BLOCK, J], gl.float32, J_LAYOUT)
        dv_KV = warpgroup_mma(p_KL, dout, gl.zeros([BLOCK, H], gl.float32, O_LAYOUT), use_acc=False, is_async=True)
        # One product after the other: what is in flight beside it lives in other programs, which need the registers.
        dv_KV = warpgroup_mma_wait(0, [dv_KV])
        _copy_out(dv_ptr + head * dv_sn, dv_KV, start + at_wide_L, dv_st, at_wide_L < stored, 0, WIDE)
        dqa_LJ = warpgroup_mma(pairs.index(1), ka, none, use_acc=False, is_async=True)
        dqb_LJ = warpgroup_mma(pairs.index(1), kb, none, use_acc=False, is_async=True)
        dqa_LJ, dqb_LJ = warpgroup_mma_wait(0, [dqa_LJ, dqb_LJ])
        _gradient_out(
            dq_ptr + head * dq_sn, dqa_LJ, dqb_LJ, qa, qb, q_projection_L, q_scale_L, cos_ptr, sin_ptr, row_L,
            stored_L, dq_st, table_st, J, NORM, ROPE, MOVE,
        )  # fmt: skip
        dka_KJ = warpgroup_mma(ds_KL, qa, none, use_acc=False, is_async=True)
        dkb_KJ = warpgroup_mma(ds_KL, qb, none, use_acc=False, is_async=True)
        dka_KJ, dkb_KJ = warpgroup_mma_wait(0, [dka_KJ, dkb_KJ])
        _gradient_out(
            dk_ptr + head * dk_sn, dka_KJ, dkb_KJ, ka, kb, k_projection_K, k_scale_L, cos_ptr, sin_ptr, row_L,
            stored_L, dk_st, table_st, J, NORM, ROPE, MOVE,
        )  # fmt: skip
