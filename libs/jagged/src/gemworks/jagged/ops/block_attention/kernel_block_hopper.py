"""BlockAttention for Hopper in Gluon: the arithmetic of `kernel_block`, with loads that never wait for it.

One persistent program per multiprocessor: a warp loads the tiles of (block, head) after (block, head) into a ring by
TMA, two warpgroups compute them in turn, each a whole one, and store through the same buffers by TMA. Norm and rope act
on the tiles in shared memory before the products; their adjoints on float32 accumulators after them.

Letters: L rows of a block as queries, K the same rows as keys, J half the head width, V value width.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

G = gl.constexpr
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name since Triton 3.7


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, d_desc, table_ptr, total, q_smem, k_smem, v_smem, d_smem, full, free,
    HEADS: gl.constexpr, J: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    BACKWARD: gl.constexpr,
):  # fmt: skip
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    BARS: gl.constexpr = 2 * STAGES if STAGES % 2 else STAGES
    BYTES: gl.constexpr = BLOCK * (4 * J + (2 * V if BACKWARD else V)) * 2
    n = 0
    for t in range(pid, total, programs):
        slot = t // HEADS
        head = t % HEADS
        row = gl.load(table_ptr + 3 * slot)
        stored = gl.load(table_ptr + 3 * slot + 2)
        if stored > 0:
            s = n % STAGES
            mbarrier.wait(free.index(s), ((n // STAGES) & 1) ^ 1)
            arrived = full.index(n % BARS)
            mbarrier.expect(arrived, BYTES)
            for half in gl.static_range(2):
                column = head * (2 * J) + half * J
                tma.async_copy_global_to_shared(q_desc, [row, column], arrived, q_smem.index(2 * s + half))
                tma.async_copy_global_to_shared(k_desc, [row, column], arrived, k_smem.index(2 * s + half))
            tma.async_copy_global_to_shared(v_desc, [row, head * V], arrived, v_smem.index(s))
            if BACKWARD:
                tma.async_copy_global_to_shared(d_desc, [row, head * V], arrived, d_smem.index(s))
            n += 1


@gluon.jit
def _table(ptr, row, length, stride, L: gl.constexpr, BLOCK: gl.constexpr, J: gl.constexpr):
    """Rows of a rope table in registers, in any layout; zeros past the end of the block."""
    at_L = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L))
    col_J = gl.arange(0, J, layout=gl.SliceLayout(0, L))
    at = ptr + ((row + at_L).to(gl.int64) * stride)[:, None] + col_J[None, :]
    return gl.load(at, mask=(at_L < length)[:, None], other=0.0).to(gl.float32)


@gluon.jit
def _norm_and_turn(
    a_smem, b_smem, cos, sin, length, eps, L: gl.constexpr, BLOCK: gl.constexpr, H: gl.constexpr,
    NORM: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """In place: the two halves of a head after QK-norm and rope, zeros past the block; returns the norm's scale [L]."""
    inside_L = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L)) < length
    dtype: gl.constexpr = a_smem.dtype
    a = gl.where(inside_L[:, None], a_smem.load(L).to(gl.float32), 0.0)
    b = gl.where(inside_L[:, None], b_smem.load(L).to(gl.float32), 0.0)
    scale_L = gl.where(inside_L, 1.0, 0.0)
    if NORM:
        square_L = gl.sum(a * a + b * b, axis=1) / H
        scale_L = gl.where(inside_L, gl.rsqrt(square_L + eps), 0.0)
        a = a * scale_L[:, None]
        b = b * scale_L[:, None]
    if ROPE:
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    a_smem.store(a.to(dtype))
    b_smem.store(b.to(dtype))
    return scale_L


@gluon.jit
def _clear_past(x_smem, length, L: gl.constexpr, BLOCK: gl.constexpr):
    """Zeros in the rows past the block, where a neighbour's rows lie."""
    inside_L = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L)) < length
    x = x_smem.load(L)
    x_smem.store(gl.where(inside_L[:, None], x, gl.zeros_like(x)))


@gluon.jit
def _store_rows(x_smem, ptr, row, head, stored, st, sn, first: gl.constexpr, L: gl.constexpr, BLOCK: gl.constexpr,
                W: gl.constexpr):  # fmt: skip
    """The rows of a block that is not full, which TMA would write over its neighbour's."""
    at_L = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L))
    col_W = first + gl.arange(0, W, layout=gl.SliceLayout(0, L))
    at = ptr + ((row + at_L).to(gl.int64) * st)[:, None] + head.to(gl.int64) * sn + col_W[None, :]
    gl.store(at, x_smem.load(L), mask=(at_L < stored)[:, None])


@gluon.jit
def _consumer(
    GROUP: gl.constexpr, x_desc, y_desc, z_desc, x_ptr, y_ptr, z_ptr, table_ptr, cos_ptr, sin_ptr, total,
    scale_log2, scale, eps, x_st, x_sn, y_st, y_sn, z_st, z_sn, table_st,
    q_smem, k_smem, v_smem, d_smem, p_smem, ds_smem, full, free,
    HEADS: gl.constexpr, J: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    BACKWARD: gl.constexpr, NORM: gl.constexpr, ROPE: gl.constexpr, CAUSAL: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Forward: x is the output. Backward: x, y and z are dQ, dK and dV."""
    H: gl.constexpr = 2 * J
    BARS: gl.constexpr = 2 * STAGES if STAGES % 2 else STAGES
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    J_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, J, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, V_LAYOUT, 2)
    ROWS_J: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (J // 8), J // 8], [4, 1], [1, 0])
    ROWS_V: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (V // 8), V // 8], [4, 1], [1, 0])
    zero_S = gl.zeros([BLOCK, BLOCK], gl.float32, S_LAYOUT)
    zero_J = gl.zeros([BLOCK, J], gl.float32, J_LAYOUT)
    zero_V = gl.zeros([BLOCK, V], gl.float32, V_LAYOUT)
    key_K = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, S_LAYOUT))
    at_L = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, S_LAYOUT))
    n = 0
    for t in range(pid, total, programs):
        slot = t // HEADS
        head = t % HEADS
        row = gl.load(table_ptr + 3 * slot)
        length = gl.load(table_ptr + 3 * slot + 1)
        stored = gl.load(table_ptr + 3 * slot + 2)
        if stored > 0:
            if n % 2 == GROUP:
                s = n % STAGES
                qa, qb = q_smem.index(2 * s), q_smem.index(2 * s + 1)
                ka, kb = k_smem.index(2 * s), k_smem.index(2 * s + 1)
                v = v_smem.index(s)
                d = d_smem.index(s if BACKWARD else 0)
                cos = 0.0
                sin = 0.0
                if ROPE:
                    cos = _table(cos_ptr, row, length, table_st, ROWS_J, BLOCK, J)
                    sin = _table(sin_ptr, row, length, table_st, ROWS_J, BLOCK, J)
                # A barrier belongs to one warpgroup, or it could be a round ahead of the one that waits: with an odd
                # number of stages, each has two.
                arrived = full.index(n % BARS)
                phase = (n // BARS) & 1
                mbarrier.wait(arrived, phase)
                q_scale = at_L.to(gl.float32)
                k_scale = q_scale
                if NORM or ROPE:
                    q_scale = _norm_and_turn(qa, qb, cos, sin, length, eps, ROWS_J, BLOCK, H, NORM, ROPE)
                    k_scale = _norm_and_turn(ka, kb, cos, sin, length, eps, ROWS_J, BLOCK, H, NORM, ROPE)
                if length < BLOCK:
                    if not (NORM or ROPE):
                        _clear_past(qa, length, ROWS_J, BLOCK)
                        _clear_past(qb, length, ROWS_J, BLOCK)
                        _clear_past(ka, length, ROWS_J, BLOCK)
                        _clear_past(kb, length, ROWS_J, BLOCK)
                    _clear_past(v, length, ROWS_V, BLOCK)
                    if BACKWARD:
                        _clear_past(d, length, ROWS_V, BLOCK)
                fence_async_shared()
                _barrier()
                s_acc = warpgroup_mma(qa, ka.permute((1, 0)), zero_S, use_acc=False, is_async=True)
                s_acc = warpgroup_mma(qb, kb.permute((1, 0)), s_acc, is_async=True)
                if BACKWARD:
                    dp_acc = warpgroup_mma(d, v.permute((1, 0)), zero_S, use_acc=False, is_async=True)
                    product, dp = warpgroup_mma_wait(0, [s_acc, dp_acc])
                else:
                    product = warpgroup_mma_wait(0, [s_acc])
                # Every row sees key 0, which is zeros in a block without rows: no row is empty, nothing becomes NaN.
                admitted = (key_K < gl.maximum(length, 1))[None, :]
                if CAUSAL:
                    admitted = admitted & (key_K[None, :] <= at_L[:, None])
                logits = gl.where(admitted, product * scale_log2, float("-inf"))
                p = gl.exp2(logits - gl.max(logits, axis=1)[:, None])
                sum_L = gl.sum(p, axis=1)
                if BACKWARD:
                    p = p / sum_L[:, None]
                    p_smem.index(GROUP).store(p.to(DTYPE))
                    delta_L = gl.sum(p * dp, axis=1)
                    ds = p * (dp - delta_L[:, None]) * scale
                    q_part = q_scale
                    k_part = k_scale
                    if NORM:  # mean(dn n) of a row of q is a row sum over pairs, of k a column sum: dn n = ds (q k)
                        along = ds * product
                        q_part = gl.convert_layout(gl.sum(along, axis=1) / H, gl.SliceLayout(1, J_LAYOUT))
                        k_part = gl.convert_layout(gl.sum(along, axis=0) / H, gl.SliceLayout(1, J_LAYOUT))
                    ds_smem.index(GROUP).store(ds.to(DTYPE))
                    fence_async_shared()
                    _barrier()
                    ds_LK = ds_smem.index(GROUP)
                    ds_KL = ds_LK.permute((1, 0))
                    dv = warpgroup_mma(p_smem.index(GROUP).permute((1, 0)), d, zero_V, use_acc=False, is_async=True)
                    dka = warpgroup_mma(ds_KL, qa, zero_J, use_acc=False, is_async=True)
                    dkb = warpgroup_mma(ds_KL, qb, zero_J, use_acc=False, is_async=True)
                    dqa = warpgroup_mma(ds_LK, ka, zero_J, use_acc=False, is_async=True)
                    dqb = warpgroup_mma(ds_LK, kb, zero_J, use_acc=False, is_async=True)
                    dv = warpgroup_mma_wait(4, [dv])
                    v.store(dv.to(DTYPE))
                    # Complete already: it keeps the assembler from moving what follows to where dV holds registers.
                    mbarrier.wait(arrived, phase)
                    if ROPE and not NORM:  # read again, in the layout of the accumulators, while the products end
                        cos = _table(cos_ptr, row, length, table_st, J_LAYOUT, BLOCK, J)
                        sin = _table(sin_ptr, row, length, table_st, J_LAYOUT, BLOCK, J)
                    dka, dkb, dqa, dqb = warpgroup_mma_wait(0, [dka, dkb, dqa, dqb])
                    if NORM:
                        q_factor = gl.convert_layout(q_scale, gl.SliceLayout(1, J_LAYOUT))[:, None]
                        k_factor = gl.convert_layout(k_scale, gl.SliceLayout(1, J_LAYOUT))[:, None]
                        dqa = (dqa - q_part[:, None] * qa.load(J_LAYOUT).to(gl.float32)) * q_factor
                        dqb = (dqb - q_part[:, None] * qb.load(J_LAYOUT).to(gl.float32)) * q_factor
                        dka = (dka - k_part[:, None] * ka.load(J_LAYOUT).to(gl.float32)) * k_factor
                        dkb = (dkb - k_part[:, None] * kb.load(J_LAYOUT).to(gl.float32)) * k_factor
                    if ROPE and NORM:  # with the norm's factors in registers there is no room for them before
                        mbarrier.wait(arrived, phase)
                        cos = _table(cos_ptr, row, length, table_st, J_LAYOUT, BLOCK, J)
                        sin = _table(sin_ptr, row, length, table_st, J_LAYOUT, BLOCK, J)
                    if ROPE:
                        turned = dqa * cos + dqb * sin
                        dqb = dqb * cos - dqa * sin
                        dqa = turned
                        turned = dka * cos + dkb * sin
                        dkb = dkb * cos - dka * sin
                        dka = turned
                    qa.store(dqa.to(DTYPE))
                    qb.store(dqb.to(DTYPE))
                    ka.store(dka.to(DTYPE))
                    kb.store(dkb.to(DTYPE))
                else:
                    weights = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
                    out = warpgroup_mma(weights, v, zero_V, use_acc=False, is_async=True)
                    out = warpgroup_mma_wait(0, [out])
                    out = out / gl.convert_layout(sum_L, gl.SliceLayout(1, V_LAYOUT))[:, None]
                    inside = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, V_LAYOUT)) < length
                    v.store(gl.where(inside[:, None], out, 0.0).to(DTYPE))  # rows of no sequence are 0
                fence_async_shared()
                _barrier()
                if stored == BLOCK:
                    if BACKWARD:
                        tma.async_copy_shared_to_global(x_desc, [row, head * H], qa)
                        tma.async_copy_shared_to_global(x_desc, [row, head * H + J], qb)
                        tma.async_copy_shared_to_global(y_desc, [row, head * H], ka)
                        tma.async_copy_shared_to_global(y_desc, [row, head * H + J], kb)
                        tma.async_copy_shared_to_global(z_desc, [row, head * V], v)
                    else:
                        tma.async_copy_shared_to_global(x_desc, [row, head * V], v)
                    tma.store_wait(0)
                elif BACKWARD:
                    _store_rows(qa, x_ptr, row, head, stored, x_st, x_sn, 0, ROWS_J, BLOCK, J)
                    _store_rows(qb, x_ptr, row, head, stored, x_st, x_sn, J, ROWS_J, BLOCK, J)
                    _store_rows(ka, y_ptr, row, head, stored, y_st, y_sn, 0, ROWS_J, BLOCK, J)
                    _store_rows(kb, y_ptr, row, head, stored, y_st, y_sn, J, ROWS_J, BLOCK, J)
                    _store_rows(v, z_ptr, row, head, stored, z_st, z_sn, 0, ROWS_V, BLOCK, V)
                else:
                    _store_rows(v, x_ptr, row, head, stored, x_st, x_sn, 0, ROWS_V, BLOCK, V)
                fence_async_shared()  # the next load into this stage is the copy engine's
                _barrier()
                mbarrier.arrive(free.index(s), count=1)
            n += 1


@gluon.jit(do_not_specialize=["total"])
def block_hopper_kernel(
    q_desc, k_desc, v_desc, d_desc, x_desc, y_desc, z_desc, x_ptr, y_ptr, z_ptr, table_ptr, cos_ptr, sin_ptr, total,
    scale_log2, scale, eps, x_st, x_sn, y_st, y_sn, z_st, z_sn, table_st,
    HEADS: gl.constexpr, J: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    BACKWARD: gl.constexpr, NORM: gl.constexpr, ROPE: gl.constexpr, CAUSAL: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_desc.dtype
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], DTYPE)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(DTYPE, [2 * STAGES, BLOCK, J], q_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [2 * STAGES, BLOCK, J], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, V], v_desc.layout)
    if BACKWARD:
        d_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, V], d_desc.layout)
        p_smem = gl.allocate_shared_memory(DTYPE, [2, BLOCK, BLOCK], P_LAYOUT)
        ds_smem = gl.allocate_shared_memory(DTYPE, [2, BLOCK, BLOCK], P_LAYOUT)
    else:
        d_smem = v_smem
        p_smem = v_smem
        ds_smem = v_smem
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BAR)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for s in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(s), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(free.index(s), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (G(0), x_desc, y_desc, z_desc, x_ptr, y_ptr, z_ptr, table_ptr, cos_ptr, sin_ptr, total,
                         scale_log2, scale, eps, x_st, x_sn, y_st, y_sn, z_st, z_sn, table_st,
                         q_smem, k_smem, v_smem, d_smem, p_smem, ds_smem, full, free,
                         HEADS, J, V, BLOCK, STAGES, BACKWARD, NORM, ROPE, CAUSAL, DTYPE)),
            (_consumer, (G(1), x_desc, y_desc, z_desc, x_ptr, y_ptr, z_ptr, table_ptr, cos_ptr, sin_ptr, total,
                         scale_log2, scale, eps, x_st, x_sn, y_st, y_sn, z_st, z_sn, table_st,
                         q_smem, k_smem, v_smem, d_smem, p_smem, ds_smem, full, free,
                         HEADS, J, V, BLOCK, STAGES, BACKWARD, NORM, ROPE, CAUSAL, DTYPE)),
            (_producer, (q_desc, k_desc, v_desc, d_desc, table_ptr, total, q_smem, k_smem, v_smem, d_smem, full, free,
                         HEADS, J, V, BLOCK, STAGES, BACKWARD)),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip
