"""Forward of FP8 attention for Hopper in Gluon: Q K^T on the FP8 units, P V in bf16.

Letters: M query rows of a tile (2 x 64), n key rows of a tile (BN), H head width.

Each row of q and of k has one scale for the whole head width, so both leave the inner product: a score is
`sq[m] sk[n] (q k)`. q's factor joins the softmax scale, one multiply-add that is there anyway; k's costs one
multiplication a score. Structure as in attention_core/kernel_forward_hopper.py: one producer warp, two consumer
warpgroups of 64 query rows, persistent; while P V of a tile runs, a consumer works on the scores of the next one.
The descriptors of k and v end where a sequence ends, so rows past it arrive as zeros; k's scales are [M, T] and are
copied row by row, zeros past the end.
"""

from gemworks.jagged._triton.hopper_common import activate, tile_of, zigzag
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

G = gl.constexpr


@gluon.jit
def _producer(
    q_desc, sk_ptr, k_ptr, v_ptr, bounds_q, bounds_k, tile_sample, tile_row, total,
    sk_stride_n, k_stride_t, k_stride_n, v_stride_t, v_stride_n,
    q_smem, k_smem, sk_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free,
    HEADS: gl.constexpr, GROUP_HEADS: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    V_BYTES: gl.constexpr,
):  # fmt: skip
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    column = gl.arange(0, BN, layout=gl.BlockedLayout([BN // 32], [32], [1], [0]))
    fill = 0
    qi = 0
    for i in range((total + programs - 1) // programs):
        t = zigzag(i, pid, programs)
        if t < total:
            row, q_begin, _q_end, k_begin, k_len = tile_of(t // HEADS, tile_sample, tile_row, bounds_q, bounds_k)
            head = t % HEADS
            head_k = head // GROUP_HEADS
            k_base = k_ptr + k_begin.to(gl.int64) * k_stride_t + head_k.to(gl.int64) * k_stride_n
            v_base = v_ptr + k_begin.to(gl.int64) * v_stride_t + head_k.to(gl.int64) * v_stride_n
            k_desc = tma.make_tensor_descriptor(
                k_base, [gl.maximum(k_len, 1), H], [k_stride_t, 1], [BN, H], k_smem.layout
            )
            v_desc = tma.make_tensor_descriptor(
                v_base, [gl.maximum(k_len, 1), H], [v_stride_t, 1], [BN, H], v_smem.layout
            )
            mbarrier.wait(q_free, (qi & 1) ^ 1)
            mbarrier.expect(q_full, 2 * 64 * H)
            for g in gl.static_range(2):
                tma.async_copy_global_to_shared(q_desc, [q_begin + row + g * 64, head * H], q_full, q_smem.index(g))
            qi += 1
            for j in range(0, k_len, BN):
                s = fill % STAGES
                phase = ((fill // STAGES) & 1) ^ 1
                mbarrier.wait(k_free.index(s), phase)
                at = head_k.to(gl.int64) * sk_stride_n + k_begin + j + column
                async_copy.async_copy_global_to_shared(sk_smem.index(s), sk_ptr + at, mask=column < k_len - j)
                async_copy.mbarrier_arrive(k_full.index(s))  # counts itself in: before `expect` arrives
                mbarrier.expect(k_full.index(s), BN * H)
                tma.async_copy_global_to_shared(k_desc, [j, 0], k_full.index(s), k_smem.index(s))
                mbarrier.wait(v_free.index(s), phase)
                mbarrier.expect(v_full.index(s), BN * H * V_BYTES)
                tma.async_copy_global_to_shared(v_desc, [j, 0], v_full.index(s), v_smem.index(s))
                fill += 1


@gluon.jit
def _consumer(
    GROUP: gl.constexpr, sq_ptr, out_ptr, lse_ptr, bounds_q, bounds_k, tile_sample, tile_row, total, scale,
    sq_stride_n, out_stride_t, out_stride_n, lse_stride_n,
    q_smem, k_smem, sk_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free,
    ACT: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (H // 8), H // 8], [4, 1], [1, 0])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    column = gl.arange(0, BN, layout=COLUMNS)
    zero = gl.zeros([64, BN], gl.float32, S_LAYOUT)
    fill = 0
    qi = 0
    for i in range((total + programs - 1) // programs):
        t = zigzag(i, pid, programs)
        if t < total:
            row, q_begin, q_end, _k_begin, k_len = tile_of(t // HEADS, tile_sample, tile_row, bounds_q, bounds_k)
            head = t % HEADS
            first_row = q_begin + row + GROUP * 64
            lrow = first_row + gl.arange(0, 64, layout=ROWS)
            sq = gl.load(sq_ptr + head.to(gl.int64) * sq_stride_n + lrow, mask=lrow < q_end, other=0.0) * scale
            if ACT == "softmax":
                sq = sq * 1.4426950408889634
            mbarrier.wait(q_full, qi & 1)
            qi += 1
            trips = (k_len + BN - 1) // BN
            o = gl.zeros([64, H], gl.float32, O_LAYOUT)
            peak = gl.full([64], float("-inf"), gl.float32, ROWS)
            total_p = gl.zeros([64], gl.float32, ROWS)
            if first_row < q_end and trips > 0:
                q = q_smem.index(GROUP)
                s0 = fill % STAGES
                mbarrier.wait(k_full.index(s0), (fill // STAGES) & 1)
                scores = warpgroup_mma(q, k_smem.index(s0).permute((1, 0)), zero, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(0, [scores])
                scores = scores * sk_smem.index(s0).load(COLUMNS)[None, :]
                mbarrier.arrive(k_free.index(s0), count=1)
                if ACT == "softmax":
                    if k_len < BN:
                        scores = gl.where((column < k_len)[None, :], scores, float("-inf"))
                    peak = gl.max(scores, 1) * sq
                    probs = gl.exp2(scores * sq[:, None] - peak[:, None])
                    total_p = gl.sum(probs, 1)
                else:
                    probs = activate(scores * sq[:, None], ACT)
                p = gl.convert_layout(probs.to(DTYPE), P_LAYOUT)
                mbarrier.wait(v_full.index(s0), (fill // STAGES) & 1)
                for j in range(1, trips):
                    s1 = (fill + 1) % STAGES
                    phase1 = ((fill + 1) // STAGES) & 1
                    mbarrier.wait(k_full.index(s1), phase1)
                    upcoming = warpgroup_mma(q, k_smem.index(s1).permute((1, 0)), zero, use_acc=False, is_async=True)
                    acc = warpgroup_mma(p, v_smem.index(fill % STAGES), o, is_async=True)
                    scores = warpgroup_mma_wait(1, [upcoming])
                    scores = scores * sk_smem.index(s1).load(COLUMNS)[None, :]
                    mbarrier.arrive(k_free.index(s1), count=1)
                    if ACT == "softmax":
                        if j == trips - 1:
                            scores = gl.where((column < k_len - j * BN)[None, :], scores, float("-inf"))
                        new_peak = gl.maximum(peak, gl.max(scores, 1) * sq)
                        probs = gl.exp2(scores * sq[:, None] - new_peak[:, None])
                        fix = gl.exp2(peak - new_peak)
                        total_p = total_p * fix + gl.sum(probs, 1)
                        peak = new_peak
                    else:
                        probs = activate(scores * sq[:, None], ACT)
                    p_next = gl.convert_layout(probs.to(DTYPE), P_LAYOUT)
                    # The barrier also keeps the assembler from hoisting the wait below over the work that it hides.
                    mbarrier.wait(v_full.index(s1), phase1)
                    o, p, p_next = warpgroup_mma_wait(0, [acc, p, p_next])
                    mbarrier.arrive(v_free.index(fill % STAGES), count=1)
                    if ACT == "softmax":
                        o = o * gl.convert_layout(fix, gl.SliceLayout(1, O_LAYOUT))[:, None]
                    p = p_next
                    fill += 1
                mbarrier.arrive(q_free, count=1)
                acc = warpgroup_mma(p, v_smem.index(fill % STAGES), o, is_async=True)
                o = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(v_free.index(fill % STAGES), count=1)
                fill += 1
            else:
                for _j in range(trips):  # nothing to do in this half: hand the stages on
                    s0 = fill % STAGES
                    mbarrier.wait(k_full.index(s0), (fill // STAGES) & 1)
                    mbarrier.arrive(k_free.index(s0), count=1)
                    mbarrier.wait(v_full.index(s0), (fill // STAGES) & 1)
                    mbarrier.arrive(v_free.index(s0), count=1)
                    fill += 1
                mbarrier.arrive(q_free, count=1)
            if first_row < q_end:
                if ACT == "softmax":
                    safe = gl.where(total_p > 0.0, total_p, 1.0)
                    lse = gl.where(total_p > 0.0, peak + gl.log2(safe), float("inf"))
                    gl.store(lse_ptr + head.to(gl.int64) * lse_stride_n + lrow, lse, mask=lrow < q_end)
                    o = o / gl.convert_layout(safe, gl.SliceLayout(1, O_LAYOUT))[:, None]
                rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
                cols = gl.arange(0, H, layout=gl.SliceLayout(0, STORE))
                pointers = (
                    out_ptr
                    + (rows.to(gl.int64) * out_stride_t)[:, None]
                    + head.to(gl.int64) * out_stride_n
                    + cols[None, :]
                )
                gl.store(pointers, gl.convert_layout(o.to(DTYPE), STORE), mask=(rows < q_end)[:, None])


@gluon.jit(do_not_specialize=["lse_stride_n", "sq_stride_n", "sk_stride_n"])  # numbers of rows, other in every batch
def fp8_hopper_kernel(
    q_desc, sk_ptr, k_ptr, v_ptr, sq_ptr, out_ptr, lse_ptr,
    bounds_q, bounds_k, tile_sample, tile_row, num_tiles, scale,
    sk_stride_n, k_stride_t, k_stride_n, v_stride_t, v_stride_n, sq_stride_n, out_stride_t, out_stride_n, lse_stride_n,
    ACT: gl.constexpr, HEADS: gl.constexpr, GROUP_HEADS: gl.constexpr, H: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, CONSUMER_REGS: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    CODE: gl.constexpr = q_desc.dtype
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, H], CODE)
    V_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, H], DTYPE)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    V_BYTES: gl.constexpr = DTYPE.primitive_bitwidth // 8
    q_smem = gl.allocate_shared_memory(CODE, [2, 64, H], q_desc.layout)
    k_smem = gl.allocate_shared_memory(CODE, [STAGES, BN, H], K_LAYOUT)
    sk_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BN, H], V_LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_free = gl.allocate_shared_memory(gl.int64, [1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_free.index(s), count=2)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_free.index(s), count=2)
    fence_async_shared()
    total = gl.load(num_tiles) * HEADS
    gl.warp_specialize(
        [
            (_consumer, (G(0), sq_ptr, out_ptr, lse_ptr, bounds_q, bounds_k, tile_sample, tile_row, total,
                         scale, sq_stride_n, out_stride_t, out_stride_n, lse_stride_n,
                         q_smem, k_smem, sk_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free,
                         ACT, HEADS, H, BN, STAGES, DTYPE)),
            (_consumer, (G(1), sq_ptr, out_ptr, lse_ptr, bounds_q, bounds_k, tile_sample, tile_row, total,
                         scale, sq_stride_n, out_stride_t, out_stride_n, lse_stride_n,
                         q_smem, k_smem, sk_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free,
                         ACT, HEADS, H, BN, STAGES, DTYPE)),
            (_producer, (q_desc, sk_ptr, k_ptr, v_ptr, bounds_q, bounds_k, tile_sample, tile_row, total,
                         sk_stride_n, k_stride_t, k_stride_n, v_stride_t, v_stride_n,
                         q_smem, k_smem, sk_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free,
                         HEADS, GROUP_HEADS, H, BN, STAGES, V_BYTES)),
        ],
        [4, 1], [CONSUMER_REGS, 24],
    )  # fmt: skip
