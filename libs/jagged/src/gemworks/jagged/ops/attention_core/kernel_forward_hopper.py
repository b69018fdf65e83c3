"""Forward of jagged attention for Hopper in Gluon: one producer warp, two consumer warpgroups, persistent.

Letters: M query rows of a tile (2 x 64), n key rows of a tile (BN), H head width.

Loads go through descriptors that end boxes where their sequence ends (launch_hopper.ragged): rows past it arrive as
zeros, never as a neighbour's. An element-wise activation has act(0) = 0, so zeros need no mask at all; softmax masks
the columns of the last tile only. Each consumer owns 64 query rows; while P V of tile j runs on the tensor cores, the
consumer works on the scores of tile j + 1. Under a mask it hands on the tiles of keys that its rows do not meet.
IN_TURN: consumers issue their products one after the other (hopper_common.wait_for_turn).
"""

# ruff: noqa: SIM102 (branches on constexpr stay apart from branches on data: only the former vanish)

from gemworks.jagged._triton.activations import LOG2_E
from gemworks.jagged._triton.activations_hopper import fold
from gemworks.jagged._triton.hopper_common import (
    attention_barriers,
    first_turn,
    following,
    groups_with_rows,
    last_turn,
    load_keys,
    load_query_tile,
    pass_turn,
    pick,
    tile_of,
    wait_for_turn,
)
from gemworks.jagged.ops.attention_core.kernel_chain_hopper import chained_consumer, store_tile, weights
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

G = gl.constexpr


@gluon.jit
def _span(
    row, q_len, k_len, left, right,
    MASKED: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """(shift of positions, first and end of the key rows that a tile of ROWS query rows meets)."""
    if MASKED:
        shift = k_len - q_len if BOTTOM_RIGHT else row - row
        begin = gl.maximum(row + shift - left, 0) // BN * BN
        end = gl.minimum(k_len, gl.minimum(row + ROWS, q_len) + shift + right)
        return shift, begin, gl.maximum(begin, end)
    else:
        return 0, 0, k_len


@gluon.jit
def _own_tiles(
    GROUP: gl.constexpr, row, q_len, k_len, left, right, begin, all_trips,
    MASKED: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """(tiles of keys before the first that the rows of one consumer meet, how many these are)."""
    if MASKED:
        _shift, own_begin, own_end = _span(row + GROUP * 64, q_len, k_len, left, right, MASKED, BOTTOM_RIGHT, 64, BN)
        before = gl.minimum((own_begin - begin) // BN, all_trips)
        return before, gl.minimum((own_end - own_begin + BN - 1) // BN, all_trips - before)
    else:
        return 0, all_trips


@gluon.jit
def _admit(
    scores, n, k_len, first, own, column, shift, left, right, last,
    OTHERS: gl.constexpr, SOFTMAX: gl.constexpr, MASKED: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Scores of rows `first + own`, key rows n and after, with OTHERS in place of pairs that do not count.

    Only tiles on an edge do the work: of the mask, or (`last`) of the sequence.
    """
    if MASKED:  # row `own` admits the columns from own + low to own + high
        high = first + shift + right - n
        low = first + shift - left - n
        if (high < BN - 1) | (k_len - n < BN):
            bound = gl.minimum(own + high, k_len - n - 1)
            scores = gl.where(column[None, :] <= bound[:, None], scores, OTHERS)
        if low > -63:
            scores = gl.where(column[None, :] >= (own + low)[:, None], scores, OTHERS)
    elif SOFTMAX:  # an activation of a row of zeros is zero
        if last:
            scores = gl.where((column < k_len - n)[None, :], scores, OTHERS)
    return scores


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, left, right, tiles, smem, barriers,
    HEADS: gl.constexpr, GROUP_HEADS: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, QSTAGES: gl.constexpr, GROUPS: gl.constexpr, SHARED: gl.constexpr,
    ONE_RELEASE: gl.constexpr, MASKED: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
):  # fmt: skip
    bounds_q, bounds_k, tile_sample, tile_row, total = tiles
    q_smem, k_smem, v_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    fill = 0
    qi = 0
    rounds = (total + programs - 1) // programs
    for i in range(rounds):
        t, tile, head = pick(i, pid, programs, HEADS)
        if t < total:
            row, q_begin, q_end, k_begin, k_len = tile_of(tile, tile_sample, tile_row, bounds_q, bounds_k)
            _shift, begin, end = _span(row, q_end - q_begin, k_len, left, right, MASKED, BOTTOM_RIGHT, GROUPS * 64, BN)
            q_from = 0 if SHARED else q_begin
            load_query_tile(
                q_desc, q_from, q_begin, q_end, row, head, qi, q_smem, q_full, q_free, H, QSTAGES, GROUPS
            )  # fmt: skip
            qi += 1
            for j in range(begin, end, BN):
                load_keys(
                    k_desc, v_desc, k_begin, k_len, j, head // GROUP_HEADS, fill, k_smem, v_smem,
                    k_full, k_free, v_full, v_free, H, HV, BN, STAGES, ONE_RELEASE,
                )  # fmt: skip
                fill += 1


@gluon.jit
def _attend(
    column, own, zero, scale, scale2, folded, stage, phase, k_len, qs, shift, left, right, begin, trips,
    first, o, peak, total_p, q, q_free, k_smem, v_smem, k_full, k_free, v_full, v_free, groups,
    ACT: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, FOLD: gl.constexpr,
    ONE_RELEASE: gl.constexpr, MASKED: gl.constexpr, O_LAYOUT: gl.constexpr, GROUP: gl.constexpr,
    IN_TURN: gl.constexpr,
):  # fmt: skip
    """64 query rows over `trips` tiles of keys, at least one: (o, peak, sum of the weights, stage and phase to go on).

    Signals that q is free before the last product, which does not read q.
    """
    OTHERS: gl.constexpr = float("-inf") if ACT == "softmax" else 0.0
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    mbarrier.wait(k_full.index(stage), phase)
    if IN_TURN:
        wait_for_turn(GROUP, groups)
    scores = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    if IN_TURN:
        pass_turn(GROUP, groups)
    scores = warpgroup_mma_wait(0, [scores])
    mbarrier.arrive(k_free.index(stage), count=1)
    scores = _admit(
        scores, begin, k_len, first, own, column, shift, left, right, k_len < BN,
        OTHERS, ACT == "softmax", MASKED, BN,
    )  # fmt: skip
    probs, _fix, peak, total_p = weights(
        scores, peak, total_p, scale, scale2, folded, ACT, FOLD, MASKED,
    )  # fmt: skip
    p = gl.convert_layout(probs.to(DTYPE), P_LAYOUT)
    mbarrier.wait(v_full.index(stage), phase)
    s1, phase1 = following(stage, phase, STAGES)
    for j in range(1, trips):
        mbarrier.wait(k_full.index(s1), phase1)
        if IN_TURN:
            wait_for_turn(GROUP, groups)
        upcoming = warpgroup_mma(q, k_smem.index(s1).permute((1, 0)), zero, use_acc=False, is_async=True)
        acc = warpgroup_mma(p, v_smem.index(stage), o, is_async=True)
        if IN_TURN:
            pass_turn(GROUP, groups)
        scores = warpgroup_mma_wait(1, [upcoming])
        if not ONE_RELEASE:
            mbarrier.arrive(k_free.index(s1), count=1)
        scores = _admit(
            scores, begin + j * BN, k_len, first, own, column, shift, left, right, j == trips - 1,
            OTHERS, ACT == "softmax", MASKED, BN,
        )  # fmt: skip
        probs, fix, peak, total_p = weights(
            scores, peak, total_p, scale, scale2, folded, ACT, FOLD, MASKED,
        )  # fmt: skip
        p_next = gl.convert_layout(probs.to(DTYPE), P_LAYOUT)
        s2, phase2 = following(s1, phase1, STAGES)
        # The barrier also keeps the assembler from hoisting the wait below over the work that it hides.
        mbarrier.wait(v_full.index(s1), phase1)
        o, p, p_next = warpgroup_mma_wait(0, [acc, p, p_next])
        if ONE_RELEASE:  # every signal makes the four warps meet
            mbarrier.arrive(k_free.index(s1), count=1)
        else:
            mbarrier.arrive(v_free.index(stage), count=1)
        if ACT == "softmax":
            o = o * gl.convert_layout(fix, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p = p_next
        stage = s1
        s1 = s2
        phase1 = phase2
    mbarrier.arrive(q_free.index(qs), count=1)
    if IN_TURN:
        wait_for_turn(GROUP, groups)
    acc = warpgroup_mma(p, v_smem.index(stage), o, is_async=True)
    if IN_TURN:
        pass_turn(GROUP, groups)
    o = warpgroup_mma_wait(0, [acc])
    if not ONE_RELEASE:
        mbarrier.arrive(v_free.index(stage), count=1)
    return o, peak, total_p, s1, phase1


@gluon.jit
def _hand_on(trips, stage, phase, k_full, k_free, v_full, v_free, STAGES: gl.constexpr, ONE_RELEASE: gl.constexpr):
    """A consumer frees `trips` tiles of keys that it has no use for: (stage, phase) after them."""
    for _j in range(trips):
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(k_free.index(stage), count=1)
        if not ONE_RELEASE:
            mbarrier.arrive(v_free.index(stage), count=1)
        stage, phase = following(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _consumer(
    GROUP: gl.constexpr, scale, left, right, results, tiles, smem, barriers,
    ACT: gl.constexpr, HEADS: gl.constexpr, HV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    QSTAGES: gl.constexpr, GROUPS: gl.constexpr, DTYPE: gl.constexpr, FOLD: gl.constexpr,
    ONE_RELEASE: gl.constexpr, MASKED: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, CHAINED: gl.constexpr,
    IN_TURN: gl.constexpr,
):  # fmt: skip
    if CHAINED:
        chained_consumer(
            GROUP, scale, results, tiles, smem, barriers,
            ACT, HEADS, HV, BN, STAGES, QSTAGES, GROUPS, DTYPE, FOLD, ONE_RELEASE,
        )  # fmt: skip
        return
    if IN_TURN:  # a mask gives the consumers of a tile different numbers of products
        gl.static_assert(GROUPS > 1 and not MASKED)
        first_turn(GROUP)
    bounds_q, bounds_k, tile_sample, tile_row, total = tiles
    q_smem, k_smem, v_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HV, 16])
    column = gl.arange(0, BN, layout=gl.SliceLayout(0, S_LAYOUT))
    own = gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    zero = gl.zeros([64, BN], gl.float32, S_LAYOUT)
    scale2 = scale * LOG2_E
    folded = fold(scale)
    stage = 0
    phase = 0
    qi = 0
    rounds = (total + programs - 1) // programs
    t, tile, head = pick(0, pid, programs, HEADS)
    row, q_begin, q_end, _k_begin, k_len = tile_of(
        gl.where(t < total, tile, 0), tile_sample, tile_row, bounds_q, bounds_k
    )
    for i in range(rounds):
        # What the next tile is: asked for here, needed at the end.
        t1, tile1, head1 = pick(i + 1, pid, programs, HEADS)
        there1 = (i + 1 < rounds) & (t1 < total)
        row1, q_begin1, q_end1, _k_begin1, k_len1 = tile_of(
            gl.where(there1, tile1, 0), tile_sample, tile_row, bounds_q, bounds_k
        )
        if t < total:
            q_row = q_begin + row
            qs = qi % QSTAGES
            mbarrier.wait(q_full.index(qs), (qi // QSTAGES) & 1)
            qi += 1
            shift, begin, end = _span(row, q_end - q_begin, k_len, left, right, MASKED, BOTTOM_RIGHT, GROUPS * 64, BN)
            all_trips = (end - begin + BN - 1) // BN
            first = row + GROUP * 64
            groups = groups_with_rows(q_end - q_begin - row, GROUPS)
            before, trips = _own_tiles(
                GROUP, row, q_end - q_begin, k_len, left, right, begin, all_trips, MASKED, BOTTOM_RIGHT, BN
            )
            begin += before * BN
            o = gl.zeros([64, HV], gl.float32, O_LAYOUT)
            peak = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
            total_p = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
            first_row = q_row + GROUP * 64
            if first_row < q_end and trips > 0:
                if MASKED:
                    stage, phase = _hand_on(before, stage, phase, k_full, k_free, v_full, v_free, STAGES, ONE_RELEASE)
                q = q_smem.index(GROUPS * qs + GROUP)
                o, peak, total_p, stage, phase = _attend(
                    column, own, zero, scale, scale2, folded, stage, phase, k_len, qs, shift, left, right,
                    begin, trips, first, o, peak, total_p, q, q_free, k_smem, v_smem, k_full, k_free, v_full,
                    v_free, groups,
                    ACT, BN, STAGES, DTYPE, FOLD, ONE_RELEASE, MASKED, O_LAYOUT, GROUP, IN_TURN,
                )  # fmt: skip
                if MASKED:
                    after = all_trips - before - trips
                    stage, phase = _hand_on(after, stage, phase, k_full, k_free, v_full, v_free, STAGES, ONE_RELEASE)
            else:
                stage, phase = _hand_on(all_trips, stage, phase, k_full, k_free, v_full, v_free, STAGES, ONE_RELEASE)
                mbarrier.arrive(q_free.index(qs), count=1)
            if first_row < q_end:
                store_tile(o, peak, total_p, results, first_row, q_end, head, scale, S_LAYOUT, O_LAYOUT, ACT, FOLD)
        t = t1
        head = head1
        row = row1
        q_begin = q_begin1
        q_end = q_end1
        k_len = k_len1
    if IN_TURN:
        last_turn(GROUP)


@gluon.jit(do_not_specialize=["lse_stride_n", "left", "right"])  # other in every batch, or of every window
def forward_hopper_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, bounds_q, bounds_k, tile_sample, tile_row, num_tiles, scale,
    left, right, out_stride_t, out_stride_n, lse_stride_n,
    ACT: gl.constexpr, HEADS: gl.constexpr, GROUP_HEADS: gl.constexpr, H: gl.constexpr, HV: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, QSTAGES: gl.constexpr, GROUPS: gl.constexpr, SHARED: gl.constexpr,
    FOLD: gl.constexpr, ONE_RELEASE: gl.constexpr,
    MASKED: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, CHAINED: gl.constexpr, IN_TURN: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_desc.dtype
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, H], DTYPE)
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, H], DTYPE)
    V_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, HV], DTYPE)
    q_smem = gl.allocate_shared_memory(DTYPE, [GROUPS * QSTAGES, 64, H], Q_LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BN, H], K_LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BN, HV], V_LAYOUT)
    barriers = attention_barriers(STAGES, QSTAGES, GROUPS, ONE_RELEASE)
    fence_async_shared()
    total = gl.load(num_tiles) * HEADS
    results = (out_ptr, lse_ptr, out_stride_t, out_stride_n, lse_stride_n)
    tiles = (bounds_q, bounds_k, tile_sample, tile_row, total)
    smem = (q_smem, k_smem, v_smem)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consumer, (G(0), scale, left, right, results, tiles, smem, barriers,
                             ACT, HEADS, HV, BN, STAGES, QSTAGES, GROUPS, DTYPE, FOLD, ONE_RELEASE,
                             MASKED, BOTTOM_RIGHT, CHAINED, IN_TURN)),
                (_producer, (q_desc, k_desc, v_desc, left, right, tiles, smem, barriers,
                             HEADS, GROUP_HEADS, H, HV, BN, STAGES, QSTAGES, GROUPS, SHARED, ONE_RELEASE,
                             MASKED, BOTTOM_RIGHT)),
            ],
            [1], [24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_consumer, (G(0), scale, left, right, results, tiles, smem, barriers,
                             ACT, HEADS, HV, BN, STAGES, QSTAGES, GROUPS, DTYPE, FOLD, ONE_RELEASE,
                             MASKED, BOTTOM_RIGHT, CHAINED, IN_TURN)),
                (_consumer, (G(1), scale, left, right, results, tiles, smem, barriers,
                             ACT, HEADS, HV, BN, STAGES, QSTAGES, GROUPS, DTYPE, FOLD, ONE_RELEASE,
                             MASKED, BOTTOM_RIGHT, CHAINED, IN_TURN)),
                (_producer, (q_desc, k_desc, v_desc, left, right, tiles, smem, barriers,
                             HEADS, GROUP_HEADS, H, HV, BN, STAGES, QSTAGES, GROUPS, SHARED, ONE_RELEASE,
                             MASKED, BOTTOM_RIGHT)),
            ],
            [4, 1], [CONSUMER_REGS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (G(0), scale, left, right, results, tiles, smem, barriers,
                             ACT, HEADS, HV, BN, STAGES, QSTAGES, GROUPS, DTYPE, FOLD, ONE_RELEASE,
                             MASKED, BOTTOM_RIGHT, CHAINED, IN_TURN)),
                (_consumer, (G(1), scale, left, right, results, tiles, smem, barriers,
                             ACT, HEADS, HV, BN, STAGES, QSTAGES, GROUPS, DTYPE, FOLD, ONE_RELEASE,
                             MASKED, BOTTOM_RIGHT, CHAINED, IN_TURN)),
                (_consumer, (G(2), scale, left, right, results, tiles, smem, barriers,
                             ACT, HEADS, HV, BN, STAGES, QSTAGES, GROUPS, DTYPE, FOLD, ONE_RELEASE,
                             MASKED, BOTTOM_RIGHT, CHAINED, IN_TURN)),
                (_producer, (q_desc, k_desc, v_desc, left, right, tiles, smem, barriers,
                             HEADS, GROUP_HEADS, H, HV, BN, STAGES, QSTAGES, GROUPS, SHARED, ONE_RELEASE,
                             MASKED, BOTTOM_RIGHT)),
            ],
            [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, 24],
        )  # fmt: skip
