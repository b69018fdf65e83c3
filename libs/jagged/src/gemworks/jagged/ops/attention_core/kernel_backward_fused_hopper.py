"""Backward of jagged attention for Hopper in one Gluon kernel of five products, without atomics and bit-reproducible.

Letters: n key rows of a tile (2 x 64), m query rows of a tile (64), H head width, G consumer warpgroup (0 or 1).

A program takes key tiles one at a time, keeps K and V in shared memory and dK and dV in registers, and walks over the
queries of the sequence. Scores are transposed (rows are keys): consumer G owns keys 64 G to 64 G + 63 of the tile. Both
consumers put their half of dS into shared memory; each then computes half of the columns of that tile's dQ from all of
it.

dQ sums over the key tiles of a sequence, which different programs work on at the same time. One counter per query tile
puts them in order (kernel_turns_hopper.py). The first stores its share into a float32 scratch, those between add to it,
the last reads it and writes dQ; a sequence of one key tile never touches the scratch. Programs draw key tiles from one
counter in the order of their turns, so whatever a program waits for is being worked on, however few programs a device
runs at a time. The scratch holds each 16 x 8 piece of a tile in the order of the threads that own it, so an access of a
warp is one run of 512 bytes.

A mask leaves out query tiles at both ends of a key tile's walk, and so key tiles at both ends of a query tile's order.

A shared query has few rows: the key tiles of a sequence would mostly wait for each other. So one program takes them
all, and the order is that of its own loop.

With NORM or ROPE keys came normed or turned, and dK leaves as the gradient of what they were before: a consumer has
whole rows of it, and its keys are still in shared memory. A consumer has half of the columns of dQ only, one of each
pair that turns, so dQ leaves as it is.
"""

# ruff: noqa: SIM102 (branches on constexpr stay apart from branches on data: only the former vanish)

from gemworks.jagged._triton.activations import LOG2_E
from gemworks.jagged._triton.activations_hopper import activate_with_grad
from gemworks.jagged._triton.hopper_common import load_rows, sync_threads
from gemworks.jagged.ops.attention_core.kernel_norm_rope_back_hopper import load_turn, norm_rope_back
from gemworks.jagged.ops.attention_core.kernel_turns_hopper import (
    ends,
    gatekeeper,
    hand_over,
    in_turn,
    item,
    read_ticket,
    walk,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

G = gl.constexpr
# A zero that the compiler does not see through: keeps it from computing every address before the loop, for lack of
# registers.
ZERO_PTX = gl.constexpr("mov.b32 $0, 0;")
# One program-wide number, taken by the first lane of the only warp that asks.
TICKET_PTX = gl.constexpr("""{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; mov.b32 $0, 0;
@p atom.add.relaxed.gpu.global.s32 $0, [$1], 1;
shfl.sync.idx.b32 $0, $0, 0, 0x1f, 0xffffffff; }""")


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, do_desc, statistics, units, tile_row, counter_ptr, left, right, smem, barriers,
    ACT: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr, STAGES: gl.constexpr, KSTAGES: gl.constexpr,
    SHARED: gl.constexpr, MASKED: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
):  # fmt: skip
    """Draws work and loads it. With SHARED a unit is a sequence and head, all key tiles of which come one by one."""
    lse_ptr, delta_ptr, lse_stride_n = statistics
    bounds_k, bounds_q, tile_sample, total, tiles_per_unit, num_sequences = units
    q_smem, do_smem, k_smem, v_smem, row_smem, _ds_smem, ticket_smem = smem
    q_full, q_free, k_full, k_free, _ds_full, _gate, _done = barriers
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    column = gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [1], [0]))
    fill = 0
    ki = 0
    counter = counter_ptr.to(gl.int64, bitcast=True)
    t = total - total
    while t < total:
        ks = ki % KSTAGES
        mbarrier.wait(k_free.index(ks), ((ki // KSTAGES) & 1) ^ 1)
        t = gl.inline_asm_elementwise(TICKET_PTX, "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1)
        if t < total:
            head, _sample, k_begin, k_len, q_begin, q_len = item(
                t, tile_sample, bounds_k, bounds_q, tiles_per_unit, num_sequences, HEADS, SHARED
            )
            first = 0
            end = k_len
            if not SHARED:
                first = in_turn(gl.load(tile_row + t // HEADS), k_len, MASKED)
                end = first + 1
            head64 = head.to(gl.int64)
            q_from = 0 if SHARED else q_begin  # a shared query is the same rows for every sequence
            for row in range(first, end, 128):
                ks = ki % KSTAGES
                mbarrier.wait(k_free.index(ks), ((ki // KSTAGES) & 1) ^ 1)
                ticket_smem.index(2 * ks).store(gl.full([1], t, gl.int32, ONE))
                ticket_smem.index(2 * ks + 1).store(gl.full([1], row, gl.int32, ONE))
                full = k_full.index(ks)
                mbarrier.expect(full, 4 * 64 * H * 2)
                for g in gl.static_range(2):
                    load_rows(k_desc, k_begin, k_len, row + g * 64, head, full, k_smem.index(2 * ks + g))
                    load_rows(v_desc, k_begin, k_len, row + g * 64, head, full, v_smem.index(2 * ks + g))
                _shift, begin, end = walk(row, k_len, q_len, left, right, MASKED, BOTTOM_RIGHT)
                for m in range(begin, end, 64):
                    s = fill % STAGES
                    mbarrier.wait(q_free.index(s), ((fill // STAGES) & 1) ^ 1)
                    if ACT == "softmax":
                        # Zeros past the end: P = 1 there, times rows of zeros.
                        at = head64 * lse_stride_n + q_begin + m + column
                        inside = column < q_len - m
                        async_copy.async_copy_global_to_shared(row_smem.index(2 * s), lse_ptr + at, mask=inside)
                        async_copy.async_copy_global_to_shared(row_smem.index(2 * s + 1), delta_ptr + at, mask=inside)
                        async_copy.mbarrier_arrive(q_full.index(s))  # counts itself in: before `expect` arrives
                    mbarrier.expect(q_full.index(s), 2 * 64 * H * 2)
                    load_rows(q_desc, q_from, q_len, m, head, q_full.index(s), q_smem.index(s))
                    load_rows(do_desc, q_begin, q_len, m, head, q_full.index(s), do_smem.index(s))
                    fill += 1
                ki += 1
    ks = ki % KSTAGES
    mbarrier.wait(k_free.index(ks), ((ki // KSTAGES) & 1) ^ 1)
    ticket_smem.index(2 * ks).store(gl.full([1], t, gl.int32, ONE))
    mbarrier.arrive(k_full.index(ks), count=1)


@gluon.jit
def _tile(
    GROUP: gl.constexpr, s, dk, dv, m, step, ks, row, k_len, q_begin, q_len, shift, left, right, piece, own, scale,
    target, smem, k_halves, barriers, zero, zero_q,
    ACT: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
    EARLY: gl.constexpr, AHEAD: gl.constexpr, SHARED: gl.constexpr, MASKED: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """The query tile at row m: (scores of the next one with MORE, dK, dV); with AHEAD, `s` holds those of this one."""
    q_smem, do_smem, k_smem, v_smem, row_smem, ds_smem, _ticket_smem = smem
    q_full, q_free, _k_full, _k_free, ds_full, gate, done = barriers
    sq = step % STAGES
    phase = (step // STAGES) & 1
    ds_slot = (step & 1) * 2
    kn = ks + gl.inline_asm_elementwise(ZERO_PTX, "=r,r", [m], dtype=gl.int32, is_pure=False, pack=1)
    k = k_smem.index(2 * kn + GROUP)
    v = v_smem.index(2 * kn + GROUP)
    if not AHEAD:
        mbarrier.wait(q_full.index(sq), phase)
        s_acc = warpgroup_mma(k, q_smem.index(sq).permute((1, 0)), zero, use_acc=False, is_async=True)
    dp_acc = warpgroup_mma(v, do_smem.index(sq).permute((1, 0)), zero, use_acc=False, is_async=True)
    if not AHEAD:
        if EARLY:
            s = warpgroup_mma_wait(1, [s_acc])
        else:
            s, dp = warpgroup_mma_wait(0, [s_acc, dp_acc])
    if ACT == "softmax":
        lse = row_smem.index(2 * sq).load(gl.SliceLayout(0, S_LAYOUT))
        p32 = gl.exp2(s * (scale * LOG2_E) - lse[None, :])
        if row + 128 > k_len:  # a surplus key has logit 0, far above a row of very negative ones
            p32 = gl.where((row + own < k_len)[:, None], p32, 0.0)
        slope = p32
    else:
        p32, slope = activate_with_grad(s * scale, ACT)
    if MASKED:
        here = row + GROUP * 64
        if (here + 63 - m - shift > right) | (here - m - 63 - shift < -left):
            query = gl.arange(0, 64, layout=gl.SliceLayout(0, S_LAYOUT))
            away = (row + own)[:, None] - (m + shift + query)[None, :]
            counts = (away <= right) & (away >= -left)
            p32 = gl.where(counts, p32, 0.0)
            slope = gl.where(counts, slope, 0.0)
    p = gl.convert_layout(p32.to(DTYPE), P_LAYOUT)
    if EARLY:
        dv_acc = warpgroup_mma(p, do_smem.index(sq), dv, is_async=True)
    if AHEAD or EARLY:
        # already complete: keeps the assembler from hoisting the wait below over the work that it hides
        mbarrier.wait(q_full.index(sq), phase)
        dp = warpgroup_mma_wait(1 if EARLY else 0, [dp_acc])
    if ACT == "softmax":
        delta = row_smem.index(2 * sq + 1).load(gl.SliceLayout(0, S_LAYOUT))
        ds32 = slope * (dp - delta[None, :])
    else:
        ds32 = slope * dp
    ds16 = ds32.to(DTYPE)
    ds_smem.index(ds_slot + GROUP).store(ds16)
    fence_async_shared()
    sync_threads()
    mbarrier.arrive(ds_full, count=1)
    ds = gl.convert_layout(ds16, P_LAYOUT)
    if not EARLY:
        dv_acc = warpgroup_mma(p, do_smem.index(sq), dv, is_async=True)
    dk_acc = warpgroup_mma(ds, q_smem.index(sq), dk, is_async=True)
    mbarrier.wait(ds_full, step & 1)
    share = zero_q
    for w in gl.static_range(2):
        share = warpgroup_mma(
            ds_smem.index(ds_slot + w).permute((1, 0)), k_halves.index(4 * kn + 2 * w + GROUP), share,
            use_acc=w > 0, is_async=True,
        )  # fmt: skip
    dv, dk, p, ds = warpgroup_mma_wait(2, [dv_acc, dk_acc, p, ds])
    mbarrier.arrive(q_free.index(sq), count=1)
    if MORE:  # only now: before, there are not enough registers
        s1 = (step + 1) % STAGES
        mbarrier.wait(q_full.index(s1), ((step + 1) // STAGES) & 1)
        s_acc = warpgroup_mma(k, q_smem.index(s1).permute((1, 0)), zero, use_acc=False, is_async=True)
        share = warpgroup_mma_wait(1, [share])
    else:
        share = warpgroup_mma_wait(0, [share])
    is_first, is_last = ends(row, k_len, m, shift, left, right, MASKED)
    hand_over(
        share, piece.to(gl.int64, bitcast=True), is_first, is_last, target, q_begin, q_len, m, scale, gate, done, step,
        SHARED,
    )  # fmt: skip
    if MORE:
        s = warpgroup_mma_wait(0, [s_acc])
    return s, dk, dv


@gluon.jit
def _tile_without_keys(
    GROUP: gl.constexpr, begin, i, step, ks, row, k_len, q_begin, q_len, shift, left, right, piece, place, scale,
    target, ds_smem, k_halves, barriers, zero, zero_q,
    HEADS: gl.constexpr, H: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, SHARED: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """A consumer that has no key of its own in a tile: zeros for its half of dS, and its half of dQ."""
    q_full, q_free, _k_full, _k_free, ds_full, gate, done = barriers
    sq = step % STAGES
    ds_slot = (step & 1) * 2
    mbarrier.wait(q_full.index(sq), (step // STAGES) & 1)
    mbarrier.arrive(q_free.index(sq), count=1)
    ds_smem.index(ds_slot + GROUP).store(zero.to(DTYPE))
    fence_async_shared()
    sync_threads()
    mbarrier.arrive(ds_full, count=1)
    mbarrier.wait(ds_full, step & 1)
    share = warpgroup_mma(
        ds_smem.index(ds_slot).permute((1, 0)), k_halves.index(4 * ks + GROUP), zero_q, use_acc=False, is_async=True
    )
    share = warpgroup_mma_wait(0, [share])
    at_piece = (piece + i * (HEADS * 64 * H) + place).to(gl.int64, bitcast=True)
    m = begin + i * 64
    is_first, is_last = ends(row, k_len, m, shift, left, right, MASKED)
    hand_over(
        share, at_piece, is_first, is_last, target, q_begin, q_len, m, scale, gate, done, step, SHARED
    )  # fmt: skip


@gluon.jit
def _consumer(
    GROUP: gl.constexpr, scratch_ptr, results, tables, units, scale, left, right, smem, barriers,
    ACT: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr, STAGES: gl.constexpr, KSTAGES: gl.constexpr,
    DTYPE: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr, SHARED: gl.constexpr,
    MASKED: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, NORM: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    dq_ptr, dk_ptr, dv_ptr, dq_stride_t, dq_stride_n, dk_stride_t, dk_stride_n, dv_stride_t, dv_stride_n = results
    bounds_k, bounds_q, tile_sample, total, tiles_per_unit, num_sequences = units
    q_smem, _do_smem, k_smem, v_smem, _row_smem, ds_smem, ticket_smem = smem
    q_full, _q_free, k_full, k_free, _ds_full, _gate, _done = barriers
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H // 2, 16])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (H // 8), H // 8], [4, 1], [1, 0])
    own = gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT)) + GROUP * 64
    zero = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    zero_q = gl.zeros([64, H // 2], gl.float32, Q_LAYOUT)
    k_halves = k_smem._reinterpret(DTYPE, [KSTAGES * 4, 64, H // 2], k_smem.layout)
    q_rows = gl.arange(0, 64, layout=gl.SliceLayout(1, Q_LAYOUT))
    q_cols = gl.arange(0, H // 2, layout=gl.SliceLayout(0, Q_LAYOUT))
    # Where the owner of (row, column) finds it in a piece: pieces of 16 x 8 lie one after the other.
    r = q_rows[:, None]
    c = q_cols[None, :]
    place = ((r // 16) * (H // 16) + c // 8) * 128 + ((r % 8) * 4 + (c % 8) // 2) * 4 + ((r // 8) % 2) * 2 + c % 2
    step = 0
    ki = 0
    ks = ki % KSTAGES
    mbarrier.wait(k_full.index(ks), 0)
    t, row = read_ticket(ticket_smem, ks)
    while t < total:
        head, sample, k_begin, k_len, q_begin, q_len = item(
            t, tile_sample, bounds_k, bounds_q, tiles_per_unit, num_sequences, HEADS, SHARED
        )
        head64 = head.to(gl.int64)
        target = (dq_ptr + head64 * dq_stride_n + GROUP * (H // 2), dq_stride_t, q_rows, q_cols)
        piece = scratch_ptr + ((q_begin // 64 + sample).to(gl.int64) * HEADS + head) * (64 * H) + GROUP * (32 * H)
        shift, begin, end = walk(row, k_len, q_len, left, right, MASKED, BOTTOM_RIGHT)
        trips = (end - begin + 63) // 64
        piece += begin // 64 * (HEADS * 64 * H)
        dk = gl.zeros([64, H], gl.float32, O_LAYOUT)
        dv = gl.zeros([64, H], gl.float32, O_LAYOUT)
        if row + GROUP * 64 < k_len:
            s = zero
            more = trips
            if AHEAD:
                more = trips - 1
                if trips > 0:
                    mbarrier.wait(q_full.index(step % STAGES), (step // STAGES) & 1)
                    k = k_smem.index(2 * ks + GROUP)
                    s = warpgroup_mma(
                        k, q_smem.index(step % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True
                    )
                    s = warpgroup_mma_wait(0, [s])
            for i in range(more):
                s, dk, dv = _tile(
                    GROUP, s, dk, dv, begin + i * 64, step, ks, row, k_len, q_begin, q_len, shift, left, right,
                    piece + i * (HEADS * 64 * H) + place, own, scale, target, smem, k_halves, barriers, zero, zero_q,
                    ACT, STAGES, DTYPE, S_LAYOUT, P_LAYOUT, EARLY, AHEAD, SHARED, MASKED, AHEAD,
                )  # fmt: skip
                step += 1
            if AHEAD:
                if trips > 0:
                    s, dk, dv = _tile(
                        GROUP, s, dk, dv, begin + more * 64, step, ks, row, k_len, q_begin, q_len, shift, left, right,
                        piece + more * (HEADS * 64 * H) + place, own, scale, target, smem, k_halves, barriers, zero,
                        zero_q, ACT, STAGES, DTYPE, S_LAYOUT, P_LAYOUT, EARLY, AHEAD, SHARED, MASKED, False,
                    )  # fmt: skip
                    step += 1
        else:  # no key in this half of the tile: only its half of dQ
            for i in range(trips):
                _tile_without_keys(
                    GROUP, begin, i, step, ks, row, k_len, q_begin, q_len, shift, left, right, piece, place, scale,
                    target, ds_smem, k_halves, barriers, zero, zero_q, HEADS, H, STAGES, DTYPE, SHARED, MASKED,
                )  # fmt: skip
                step += 1
        # The rows of V that this consumer alone has read are free now: results go through them into rows of 16 bytes.
        rows = k_begin + row + GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
        cols = gl.arange(0, H, layout=gl.SliceLayout(0, STORE))
        mask = (rows < k_begin + k_len)[:, None]
        v = v_smem.index(2 * ks + GROUP)
        if NORM or ROPE:  # on their way while dV is stored; rows of no sequence meet no query
            turn = load_turn(
                tables, k_begin + row + own, (row + own < k_len) & (q_len > 0), head, H // 2, NORM, ROPE, S_LAYOUT
            )
        v.store(dv.to(DTYPE))
        dv_at = dv_ptr + (rows.to(gl.int64) * dv_stride_t)[:, None] + head64 * dv_stride_n + cols[None, :]
        gl.store(dv_at, v.load(STORE), mask=mask)
        if NORM or ROPE:
            half = 4 * ks + 2 * GROUP
            v_halves = v_smem._reinterpret(DTYPE, [KSTAGES * 4, 64, H // 2], v_smem.layout)
            a, b = norm_rope_back(
                dk * scale, k_halves.index(half), k_halves.index(half + 1), turn, NORM, ROPE, S_LAYOUT
            )
            v_halves.index(half).store(a.to(DTYPE))
            v_halves.index(half + 1).store(b.to(DTYPE))
        else:
            v.store((dk * scale).to(DTYPE))
        dk_at = dk_ptr + (rows.to(gl.int64) * dk_stride_t)[:, None] + head64 * dk_stride_n + cols[None, :]
        gl.store(dk_at, v.load(STORE), mask=mask)
        fence_async_shared()
        mbarrier.arrive(k_free.index(ks), count=1)
        ki += 1
        ks = ki % KSTAGES
        mbarrier.wait(k_full.index(ks), (ki // KSTAGES) & 1)
        t, row = read_ticket(ticket_smem, ks)


# other in every batch, and the stride of one head's factors is 1, which a tuple does not take as a constant
@gluon.jit(do_not_specialize=["lse_stride_n", "num_sequences", "left", "right", "norm_stride_t"])
def backward_fused_hopper_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_ptr, dk_ptr, dv_ptr,
    scratch_ptr, turn_ptr, counter_ptr, lse_ptr, delta_ptr,
    bounds_k, bounds_q, tile_sample, tile_row, num_tiles, tiles_per_unit, num_sequences,
    scale, left, right,
    dq_stride_t, dq_stride_n, dk_stride_t, dk_stride_n, dv_stride_t, dv_stride_n, lse_stride_n,
    cos_ptr, sin_ptr, norm_ptr, norm_stride_t,
    ACT: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr, STAGES: gl.constexpr, KSTAGES: gl.constexpr,
    SHARED: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr, MASKED: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, NORM: gl.constexpr, ROPE: gl.constexpr, CONSUMER_REGS: gl.constexpr,
):  # fmt: skip
    """cos_ptr, sin_ptr [T, H / 2] and the norm's scales [T, any]: of the rows of k; None without NORM and ROPE."""
    DTYPE: gl.constexpr = q_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, H], DTYPE)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], DTYPE)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 64, H], LAYOUT)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 64, H], LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [2 * KSTAGES, 64, H], LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [2 * KSTAGES, 64, H], LAYOUT)
    ds_smem = gl.allocate_shared_memory(DTYPE, [4, 64, 64], DS_LAYOUT)
    # log-sum-exp and delta of the query rows
    row_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [KSTAGES, 1], BAR)
    k_free = gl.allocate_shared_memory(gl.int64, [KSTAGES, 1], BAR)
    ticket_smem = gl.allocate_shared_memory(gl.int32, [2 * KSTAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ds_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    gate = ds_full  # a shared query has no turns; a barrier that is made must be used (see attention_barriers)
    done = ds_full
    if not SHARED:
        gate = gl.allocate_shared_memory(gl.int64, [1], BAR)
        done = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for s in gl.static_range(STAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(q_free.index(s), count=2)
    for s in gl.static_range(KSTAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_free.index(s), count=2 if SHARED else 3)
    mbarrier.init(ds_full, count=2)
    if not SHARED:
        mbarrier.init(gate, count=1)
        mbarrier.init(done, count=2)
    fence_async_shared()
    total = (num_sequences + 1) * HEADS if SHARED else gl.load(num_tiles) * HEADS
    statistics = (lse_ptr, delta_ptr, lse_stride_n)
    results = (dq_ptr, dk_ptr, dv_ptr, dq_stride_t, dq_stride_n, dk_stride_t, dk_stride_n, dv_stride_t, dv_stride_n)
    tables = results  # not read
    if NORM or ROPE:
        tables = (cos_ptr, sin_ptr, norm_ptr, norm_stride_t)
    units = (bounds_k, bounds_q, tile_sample, total, tiles_per_unit, num_sequences)
    smem = (q_smem, do_smem, k_smem, v_smem, row_smem, ds_smem, ticket_smem)
    barriers = (q_full, q_free, k_full, k_free, ds_full, gate, done)
    gl.warp_specialize(
        [
            (_consumer, (G(0), scratch_ptr, results, tables, units, scale, left, right, smem, barriers,
                         ACT, HEADS, H, STAGES, KSTAGES, DTYPE, EARLY, AHEAD, SHARED, MASKED, BOTTOM_RIGHT,
                         NORM, ROPE)),
            (_consumer, (G(1), scratch_ptr, results, tables, units, scale, left, right, smem, barriers,
                         ACT, HEADS, H, STAGES, KSTAGES, DTYPE, EARLY, AHEAD, SHARED, MASKED, BOTTOM_RIGHT,
                         NORM, ROPE)),
            (_producer, (q_desc, k_desc, v_desc, do_desc, statistics, units, tile_row, counter_ptr, left, right, smem,
                         barriers, ACT, HEADS, H, STAGES, KSTAGES, SHARED, MASKED, BOTTOM_RIGHT)),
            (gatekeeper, (turn_ptr, units, left, right, ticket_smem, barriers,
                          HEADS, KSTAGES, SHARED, MASKED, BOTTOM_RIGHT)),
        ],
        [4, 1, 1], [CONSUMER_REGS, 24, 24],
    )  # fmt: skip
