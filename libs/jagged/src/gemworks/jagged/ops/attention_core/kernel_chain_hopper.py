"""A consumer of the Hopper forward whose tiles are chained; how every consumer weighs its scores and stores its tile.

Letters as in kernel_forward_hopper.py. A consumer that ends a tile before it starts the next has nothing on the tensor
cores while it weighs the first scores of a tile, and no weights to compute under its last product. Here the last step
of a tile computes the first scores of the next one, as every step does those of the next step.
"""

# ruff: noqa: SIM102 (branches on constexpr stay apart from branches on data: only the former vanish)

from gemworks.jagged._triton.activations import LOG2_E
from gemworks.jagged._triton.activations_hopper import fold, weigh
from gemworks.jagged._triton.hopper_common import pass_over, pick, store_rows, tile_of
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def weights(
    scores, peak, total_p, scale, scale2, folded,
    ACT: gl.constexpr, FOLD: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """(weights, factor for what was summed before, peak, sum of the weights); the last three for softmax alone.

    With MASKED a row may have no key so far: its peak is -inf, and 0 is subtracted in place of it.
    """
    if ACT == "softmax":
        new_peak = gl.maximum(peak, gl.max(scores, 1) * scale2)
        base = new_peak
        if MASKED:
            base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        probs = gl.exp2(scores * scale2 - base[:, None])
        fix = gl.exp2(peak - base)
        return probs, fix, new_peak, total_p * fix + gl.sum(probs, 1)
    else:
        return weigh(scores, scale, folded, ACT, FOLD), peak, peak, total_p


@gluon.jit
def store_tile(
    o, peak, total_p, results, first_row, q_end, head, scale,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr,
):  # fmt: skip
    """The 64 rows of one consumer, and their log-sum-exp (softmax)."""
    out_ptr, lse_ptr, out_stride_t, out_stride_n, lse_stride_n = results
    if ACT == "softmax":
        safe = gl.where(total_p > 0.0, total_p, 1.0)
        lse = gl.where(total_p > 0.0, peak + gl.log2(safe), float("inf"))
        lrow = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
        gl.store(lse_ptr + head.to(gl.int64) * lse_stride_n + lrow, lse, mask=lrow < q_end)
        o = o * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, O_LAYOUT))[:, None]
    if FOLD:
        o = o * scale
    store_rows(out_ptr, o, first_row, q_end, head, out_stride_t, out_stride_n)


@gluon.jit
def chained_consumer(
    GROUP: gl.constexpr, scale, results, tiles, smem, barriers,
    ACT: gl.constexpr, HEADS: gl.constexpr, HV: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, QSTAGES: gl.constexpr, GROUPS: gl.constexpr, DTYPE: gl.constexpr, FOLD: gl.constexpr,
    ONE_RELEASE: gl.constexpr,
):  # fmt: skip
    bounds_q, bounds_k, tile_sample, tile_row, total = tiles
    q_smem, k_smem, v_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HV, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    column = gl.arange(0, BN, layout=gl.SliceLayout(0, S_LAYOUT))
    zero = gl.zeros([64, BN], gl.float32, S_LAYOUT)
    zero_o = gl.zeros([64, HV], gl.float32, O_LAYOUT)
    empty = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    scale2 = scale * LOG2_E
    folded = fold(scale)
    fill = 0
    rounds = (total + programs - 1) // programs
    t, tile, head = pick(0, pid, programs, HEADS)
    row, q_begin, q_end, _k_begin, k_len = tile_of(
        gl.where(t < total, tile, 0), tile_sample, tile_row, bounds_q, bounds_k
    )
    active = (t < total) & (q_begin + row + GROUP * 64 < q_end) & (k_len > 0)
    ready = t < 0  # whether p holds the first weights of this tile
    o = zero_o
    nothing = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    peak = empty
    total_p = nothing
    p = gl.convert_layout(zero.to(DTYPE), P_LAYOUT)
    for i in range(rounds):
        # What the next tile is: asked for here, needed at the end.
        t1, tile1, head1 = pick(i + 1, pid, programs, HEADS)
        there1 = (i + 1 < rounds) & (t1 < total)
        row1, q_begin1, q_end1, _k_begin1, k_len1 = tile_of(
            gl.where(there1, tile1, 0), tile_sample, tile_row, bounds_q, bounds_k
        )
        active1 = there1 & (q_begin1 + row1 + GROUP * 64 < q_end1) & (k_len1 > 0)
        first_row = q_begin + row + GROUP * 64
        qs = i % QSTAGES
        qs1 = (i + 1) % QSTAGES
        trips = (k_len + BN - 1) // BN
        after = fill + trips
        if active:
            if not ready:
                mbarrier.wait(q_full.index(qs), (i // QSTAGES) & 1)
                s0 = fill % STAGES
                mbarrier.wait(k_full.index(s0), (fill // STAGES) & 1)
                scores = warpgroup_mma(
                    q_smem.index(GROUPS * qs + GROUP), k_smem.index(s0).permute((1, 0)), zero,
                    use_acc=False, is_async=True,
                )  # fmt: skip
                scores = warpgroup_mma_wait(0, [scores])
                mbarrier.arrive(k_free.index(s0), count=1)
                if ACT == "softmax":
                    if k_len < BN:
                        scores = gl.where((column < k_len)[None, :], scores, float("-inf"))
                probs, _fix, peak, total_p = weights(
                    scores, empty, nothing, scale, scale2, folded, ACT, FOLD, False,
                )  # fmt: skip
                p = gl.convert_layout(probs.to(DTYPE), P_LAYOUT)
                mbarrier.wait(v_full.index(s0), (fill // STAGES) & 1)
            for j in range(trips):
                final = j == trips - 1
                more = active1 | (j < trips - 1)
                if final:
                    mbarrier.arrive(q_free.index(qs), count=1)
                    mbarrier.wait(q_full.index(qs1), ((i + 1) // QSTAGES) & 1, pred=active1)
                upcoming_fill = gl.where(final, after, fill + 1)
                s1 = upcoming_fill % STAGES
                phase1 = (upcoming_fill // STAGES) & 1
                mbarrier.wait(k_full.index(s1), phase1, pred=more)
                q = q_smem.index(GROUPS * gl.where(final, qs1, qs) + GROUP)
                upcoming = warpgroup_mma(q, k_smem.index(s1).permute((1, 0)), zero, use_acc=False, is_async=True)
                acc = warpgroup_mma(p, v_smem.index(fill % STAGES), o, is_async=True)
                scores = warpgroup_mma_wait(1, [upcoming])
                if not ONE_RELEASE:
                    mbarrier.arrive(k_free.index(s1), count=1, pred=more)
                if ACT == "softmax":
                    left = gl.where(final, k_len1, k_len - (j + 1) * BN)
                    if left < BN:
                        scores = gl.where((column < left)[None, :], scores, float("-inf"))
                probs, fix, new_peak, new_total = weights(
                    scores, gl.where(final, empty, peak), gl.where(final, nothing, total_p),
                    scale, scale2, folded, ACT, FOLD, False,
                )  # fmt: skip
                p_next = gl.convert_layout(probs.to(DTYPE), P_LAYOUT)
                # The barrier also keeps the assembler from hoisting the wait below over the work that it hides.
                mbarrier.wait(v_full.index(s1), phase1, pred=more)
                o, p, p_next = warpgroup_mma_wait(0, [acc, p, p_next])
                if ONE_RELEASE:  # every signal makes the four warps meet
                    if more:
                        mbarrier.arrive(k_free.index(s1), count=1)
                else:
                    mbarrier.arrive(v_free.index(fill % STAGES), count=1)
                if final:
                    store_tile(o, peak, total_p, results, first_row, q_end, head, scale, S_LAYOUT, O_LAYOUT, ACT, FOLD)
                    o = zero_o
                elif ACT == "softmax":
                    o = o * gl.convert_layout(fix, gl.SliceLayout(1, O_LAYOUT))[:, None]
                peak = new_peak
                total_p = new_total
                p = p_next
                fill += 1
        elif t < total:
            mbarrier.wait(q_full.index(qs), (i // QSTAGES) & 1)
            pass_over(trips, fill, k_full, k_free, v_full, v_free, STAGES, ONE_RELEASE)
            mbarrier.arrive(q_free.index(qs), count=1)
            if first_row < q_end:  # no key
                store_tile(
                    zero_o, empty, nothing, results, first_row, q_end, head, scale, S_LAYOUT, O_LAYOUT, ACT, FOLD
                )
        ready = active & active1
        fill = after
        t = t1
        head = head1
        row = row1
        q_begin = q_begin1
        q_end = q_end1
        k_len = k_len1
        active = active1
