"""GDPA with a norm across heads at its end (PFFN), for Hopper in Gluon.

Letters: M query rows of a tile (2 x 64), n key rows of a tile (BN), H head width, W = HEADS * H.

A program takes a tile of query rows through all heads, so that it has whole rows in the end. One warp loads; two
consumer warpgroups compute act(scale Q K^T) V head by head and store it; a warpgroup of its own then adds the residual
to the rows of a tile, normalises them and adds what comes after, while the consumers are at the next tile: what the
norm reads is in the L2 cache, and its waiting costs the tensor cores nothing.
"""

from gemworks.jagged._triton.activations_hopper import fold, weigh
from gemworks.jagged._triton.hopper_common import (
    attention_barriers,
    load_keys,
    load_query_tile,
    pass_over,
    store_rows,
    sync_threads,
    tile_of,
    zigzag,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

G = gl.constexpr
CHUNK = gl.constexpr(8)  # rows that the norm has in flight


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, tiles, smem, barriers,
    HEADS: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, QSTAGES: gl.constexpr,
):  # fmt: skip
    bounds_q, bounds_k, tile_sample, tile_row, total = tiles
    q_smem, k_smem, v_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    fill = 0
    qi = 0
    for i in range((total + programs - 1) // programs):
        tile = zigzag(i, pid, programs)
        if tile < total:
            row, q_begin, q_end, k_begin, k_len = tile_of(tile, tile_sample, tile_row, bounds_q, bounds_k)
            for head in range(HEADS):
                load_query_tile(
                    q_desc, q_begin, q_begin, q_end, row, head, qi, q_smem, q_full, q_free, H, QSTAGES, 2
                )  # fmt: skip
                qi += 1
                for j in range(0, k_len, BN):
                    load_keys(
                        k_desc, v_desc, k_begin, k_len, j, head, fill, k_smem, v_smem, k_full, k_free, v_full, v_free,
                        H, H, BN, STAGES, False,
                    )  # fmt: skip
                    fill += 1


@gluon.jit
def _consumer(
    GROUP: gl.constexpr, out_ptr, scale, tiles, smem, barriers, signals,
    ACT: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    QSTAGES: gl.constexpr, DTYPE: gl.constexpr, FOLD: gl.constexpr,
):  # fmt: skip
    bounds_q, bounds_k, tile_sample, tile_row, total = tiles
    q_smem, k_smem, v_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    rows_done, rows_free = signals
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    zero = gl.zeros([64, BN], gl.float32, S_LAYOUT)
    folded = fold(scale)
    fill = 0
    qi = 0
    done = 0
    for i in range((total + programs - 1) // programs):
        tile = zigzag(i, pid, programs)
        if tile < total:
            row, q_begin, q_end, _k_begin, k_len = tile_of(tile, tile_sample, tile_row, bounds_q, bounds_k)
            first_row = q_begin + row + GROUP * 64
            trips = (k_len + BN - 1) // BN
            for head in range(HEADS):
                qs = qi % QSTAGES
                mbarrier.wait(q_full.index(qs), (qi // QSTAGES) & 1)
                qi += 1
                o = gl.zeros([64, H], gl.float32, O_LAYOUT)
                if (first_row < q_end) & (trips > 0):
                    q = q_smem.index(2 * qs + GROUP)
                    s0 = fill % STAGES
                    phase0 = (fill // STAGES) & 1
                    mbarrier.wait(k_full.index(s0), phase0)
                    scores = warpgroup_mma(q, k_smem.index(s0).permute((1, 0)), zero, use_acc=False, is_async=True)
                    scores = warpgroup_mma_wait(0, [scores])
                    mbarrier.arrive(k_free.index(s0), count=1)
                    probs = weigh(scores, scale, folded, ACT, FOLD)
                    p = gl.convert_layout(probs.to(DTYPE), P_LAYOUT)
                    mbarrier.wait(v_full.index(s0), phase0)
                    for _j in range(1, trips):
                        s1 = (fill + 1) % STAGES
                        phase1 = ((fill + 1) // STAGES) & 1
                        mbarrier.wait(k_full.index(s1), phase1)
                        upcoming = warpgroup_mma(
                            q, k_smem.index(s1).permute((1, 0)), zero, use_acc=False, is_async=True
                        )
                        acc = warpgroup_mma(p, v_smem.index(fill % STAGES), o, is_async=True)
                        scores = warpgroup_mma_wait(1, [upcoming])
                        mbarrier.arrive(k_free.index(s1), count=1)
                        probs = weigh(scores, scale, folded, ACT, FOLD)
                        p_next = gl.convert_layout(probs.to(DTYPE), P_LAYOUT)
                        # Keeps the assembler from hoisting the wait below over the work that it hides.
                        mbarrier.wait(v_full.index(s1), phase1)
                        o, p, p_next = warpgroup_mma_wait(0, [acc, p, p_next])
                        mbarrier.arrive(v_free.index(fill % STAGES), count=1)
                        p = p_next
                        fill += 1
                    mbarrier.arrive(q_free.index(qs), count=1)
                    acc = warpgroup_mma(p, v_smem.index(fill % STAGES), o, is_async=True)
                    o = warpgroup_mma_wait(0, [acc])
                    mbarrier.arrive(v_free.index(fill % STAGES), count=1)
                    fill += 1
                else:
                    fill = pass_over(trips, fill, k_full, k_free, v_full, v_free, STAGES)
                    mbarrier.arrive(q_free.index(qs), count=1)
                if first_row < q_end:
                    if FOLD:
                        o = o * scale
                    store_rows(out_ptr, o, first_row, q_end, head, HEADS * H, H)
            mbarrier.wait(rows_free, (done & 1) ^ 1)  # the norm is through with the tile before this one
            sync_threads()
            mbarrier.arrive(rows_done, count=1)
            done += 1


@gluon.jit
def _finisher(
    h_ptr, y_ptr, operands, eps, tiles, signals,
    W: gl.constexpr, CENTER: gl.constexpr, HAS_RESIDUAL: gl.constexpr, HAS_ADD: gl.constexpr,
    HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """h = o + residual, y = norm(h) weight + bias + add, over the rows that both consumers have stored."""
    residual_ptr, add_ptr, weight_ptr, bias_ptr, end_ptr, residual_stride_t, add_stride_t = operands
    bounds_q, bounds_k, tile_sample, tile_row, total = tiles
    rows_done, rows_free = signals
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    cols = gl.arange(0, W, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    used = gl.load(end_ptr)  # rows from here on belong to no sequence
    done = 0
    for i in range((total + programs - 1) // programs):
        tile = zigzag(i, pid, programs)
        if tile < total:
            row, q_begin, q_end, _k_begin, _k_len = tile_of(tile, tile_sample, tile_row, bounds_q, bounds_k)
            end = gl.minimum(q_begin + row + 128, q_end)
            mbarrier.wait(rows_done, done & 1)
            for begin in range(q_begin + row, end, CHUNK):
                rows = begin + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
                inside = (rows < end)[:, None]
                rows64 = rows.to(gl.int64)[:, None]
                at = rows64 * W + cols
                h16 = gl.load(h_ptr + at, mask=inside, other=0.0)
                if HAS_RESIDUAL:
                    residual = gl.load(residual_ptr + rows64 * residual_stride_t + cols, mask=inside, other=0.0)
                if HAS_ADD:
                    add = gl.load(add_ptr + rows64 * add_stride_t + cols, mask=inside, other=0.0)
                h = h16.to(gl.float32)
                if HAS_RESIDUAL:
                    h = h + residual.to(gl.float32)
                    if q_begin >= used:
                        h = gl.zeros([CHUNK, W], gl.float32, LAYOUT)
                    gl.store(h_ptr + at, h.to(DTYPE), mask=inside)
                if CENTER:
                    h = h - (gl.sum(h, 1) / W)[:, None]
                rate = gl.rsqrt(gl.sum(h * h, 1) / W + eps)
                y = h * rate[:, None]
                if HAS_WEIGHT:
                    y = y * gl.load(weight_ptr + cols).to(gl.float32)
                if HAS_BIAS:
                    y = y + gl.load(bias_ptr + cols).to(gl.float32)
                if q_begin >= used:
                    y = gl.zeros([CHUNK, W], gl.float32, LAYOUT)
                if HAS_ADD:
                    y = y + add.to(gl.float32)
                gl.store(y_ptr + at, y.to(DTYPE), mask=inside)
            sync_threads()
            mbarrier.arrive(rows_free, count=1)
            done += 1


@gluon.jit
def gdpa_norm_hopper_kernel(
    q_desc, k_desc, v_desc, h_ptr, y_ptr, residual_ptr, add_ptr, weight_ptr, bias_ptr, end_ptr, bounds_q,
    bounds_k, tile_sample, tile_row, num_tiles, scale, eps, residual_stride_t, add_stride_t,
    ACT: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    QSTAGES: gl.constexpr, FOLD: gl.constexpr, CENTER: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, HAS_ADD: gl.constexpr, HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, FINISHER_REGS: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_desc.dtype
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, H], DTYPE)
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, H], DTYPE)
    q_smem = gl.allocate_shared_memory(DTYPE, [2 * QSTAGES, 64, H], Q_LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BN, H], K_LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BN, H], K_LAYOUT)
    barriers = attention_barriers(STAGES, QSTAGES, 2)
    rows_done = gl.allocate_shared_memory(gl.int64, [1], BAR)
    rows_free = gl.allocate_shared_memory(gl.int64, [1], BAR)
    mbarrier.init(rows_done, count=2)
    mbarrier.init(rows_free, count=1)
    fence_async_shared()
    total = gl.load(num_tiles)
    tiles = (bounds_q, bounds_k, tile_sample, tile_row, total)
    smem = (q_smem, k_smem, v_smem)
    signals = (rows_done, rows_free)
    operands = (residual_ptr, add_ptr, weight_ptr, bias_ptr, end_ptr, residual_stride_t, add_stride_t)
    gl.warp_specialize(
        [
            (_consumer, (G(0), h_ptr, scale, tiles, smem, barriers, signals,
                         ACT, HEADS, H, BN, STAGES, QSTAGES, DTYPE, FOLD)),
            (_consumer, (G(1), h_ptr, scale, tiles, smem, barriers, signals,
                         ACT, HEADS, H, BN, STAGES, QSTAGES, DTYPE, FOLD)),
            (_finisher, (h_ptr, y_ptr, operands, eps, tiles, signals,
                         HEADS * H, CENTER, HAS_RESIDUAL, HAS_ADD, HAS_WEIGHT, HAS_BIAS, DTYPE)),
            (_producer, (q_desc, k_desc, v_desc, tiles, smem, barriers, HEADS, H, BN, STAGES, QSTAGES)),
        ],
        [4, 4, 1], [CONSUMER_REGS, FINISHER_REGS, 24],
    )  # fmt: skip
