"""What the Hopper (Gluon) kernels share: the walk over tiles, the rings that a producer fills, rows in and out.

A ring has STAGES stages, each with a barrier that says it is full and one that says it is free. The i-th use of a ring
takes stage i % STAGES, and its barriers' phase is (i // STAGES) & 1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# All threads of one partition; Triton 3.7 has another name for it.
sync_threads = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # pyright: ignore[reportAttributeAccessIssue]


@gluon.jit
def zigzag(i, pid, programs):
    """The i-th tile of program `pid`: rounds run forwards and backwards in turn, so sorted costs even out."""
    turn = i % 2
    return i * programs + gl.where(turn == 0, pid, programs - 1 - pid)


@gluon.jit
def pick(i, pid, programs, HEADS: gl.constexpr):
    """(number, tile, head) of the i-th piece of work of a program."""
    t = zigzag(i, pid, programs)
    return t, t // HEADS, t % HEADS


@gluon.jit
def tile_of(tile, tile_sample, tile_row, bounds_r, bounds_s):
    """(first row of the tile in its sequence, begin and end of that, begin and length of the other side)."""
    sample = gl.load(tile_sample + tile)
    row = gl.load(tile_row + tile)
    r_begin = gl.load(bounds_r + sample)
    r_end = gl.load(bounds_r + sample + 1)
    s_begin = gl.load(bounds_s + sample)
    s_len = gl.load(bounds_s + sample + 1) - s_begin
    return row, r_begin, r_end, s_begin, s_len


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The place after `stage` in a ring, and the phase of its barriers: cheaper than a remainder by three."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def load_rows(desc, begin, length, row, head, barrier, smem):
    """Into smem [rows, H]: rows `row` and after of the `length` rows at `begin`, of one head; zeros past their end.

    `desc` is of `launch_hopper.ragged`, which says why these coordinates name the row begin + row.
    """
    FAR: gl.constexpr = 1 << 30
    box = smem._reinterpret(desc.dtype, [1, 1, smem.shape[0], 1, smem.shape[1]], desc.layout)
    tma.async_copy_global_to_shared(desc, [FAR, begin + length, FAR - length + row, head, 0], barrier, box)


@gluon.jit
def attention_barriers(
    STAGES: gl.constexpr, QSTAGES: gl.constexpr, CONSUMERS: gl.constexpr, ONE_RELEASE: gl.constexpr = False
):  # fmt: skip
    """(full, free) of q's ring, of k's and of v's: the producer fills a stage, each consumer signals it free.

    ONE_RELEASE: k's signals speak for v too, and v has none of its own. A barrier that is made and never used must not
    be: the compiler gives its memory to other data, and a device that is shared writes the barrier's state over them
    when it comes back to the program (decision 0470).
    """
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QSTAGES, 1], BAR)
    q_free = gl.allocate_shared_memory(gl.int64, [QSTAGES, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_free = k_free
    if not ONE_RELEASE:
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for s in gl.static_range(QSTAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(q_free.index(s), count=CONSUMERS)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_free.index(s), count=CONSUMERS)
        mbarrier.init(v_full.index(s), count=1)
        if not ONE_RELEASE:
            mbarrier.init(v_free.index(s), count=CONSUMERS)
    return q_full, q_free, k_full, k_free, v_full, v_free


@gluon.jit
def load_query_tile(
    desc, q_from, q_begin, q_end, row, head, qi, smem, full, free,
    H: gl.constexpr, QSTAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """The producer's qi-th query tile: 64 rows for each of GROUPS consumers.

    q_from: where the sequence's rows lie, which is q_begin, or 0 for a query that all sequences share.
    """
    qs = qi % QSTAGES
    mbarrier.wait(free.index(qs), ((qi // QSTAGES) & 1) ^ 1)
    mbarrier.expect(full.index(qs), GROUPS * 64 * H * 2)
    for g in gl.static_range(GROUPS):
        load_rows(desc, q_from, q_end - q_begin, row + g * 64, head, full.index(qs), smem.index(GROUPS * qs + g))


@gluon.jit
def load_keys(
    k_desc, v_desc, k_begin, k_len, j, head, fill, k_smem, v_smem, k_full, k_free, v_full, v_free,
    H: gl.constexpr, HV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, ONE_RELEASE: gl.constexpr,
):  # fmt: skip
    """The producer's fill-th tile of keys and values, rows j to j + BN.

    ONE_RELEASE: the consumers' n-th signal says that K of the n-th tile and V of the one before are done with.
    """
    s = fill % STAGES
    phase = ((fill // STAGES) & 1) ^ 1
    mbarrier.wait(k_free.index(s), phase)
    mbarrier.expect(k_full.index(s), BN * H * 2)
    load_rows(k_desc, k_begin, k_len, j, head, k_full.index(s), k_smem.index(s))
    if ONE_RELEASE:
        mbarrier.wait(k_free.index((fill + 1) % STAGES), (((fill + 1) // STAGES) & 1) ^ 1)
    else:
        mbarrier.wait(v_free.index(s), phase)
    mbarrier.expect(v_full.index(s), BN * HV * 2)
    load_rows(v_desc, k_begin, k_len, j, head, v_full.index(s), v_smem.index(s))


@gluon.jit
def pass_over(
    trips, fill, k_full, k_free, v_full, v_free, STAGES: gl.constexpr, ONE_RELEASE: gl.constexpr = False
):  # fmt: skip
    """A consumer without rows in a tile hands its `trips` stages on, from the fill-th: the next one."""
    for _j in range(trips):
        s = fill % STAGES
        mbarrier.wait(k_full.index(s), (fill // STAGES) & 1)
        if not ONE_RELEASE:
            mbarrier.arrive(k_free.index(s), count=1)
        mbarrier.wait(v_full.index(s), (fill // STAGES) & 1)
        if ONE_RELEASE:  # k's signal speaks for v too
            mbarrier.arrive(k_free.index(s), count=1)
        else:
            mbarrier.arrive(v_free.index(s), count=1)
        fill += 1
    return fill


@gluon.jit
def store_rows(ptr, x, first, end, head, stride_t, stride_n):
    """x [64, W] to rows `first` and after of one head, as far as `end`, in 16-byte pieces."""
    W: gl.constexpr = x.shape[1]
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (W // 8), W // 8], [4, 1], [1, 0])
    rows = first + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
    cols = gl.arange(0, W, layout=gl.SliceLayout(0, STORE))
    at = ptr + (rows.to(gl.int64) * stride_t)[:, None] + head.to(gl.int64) * stride_n + cols[None, :]
    gl.store(at, gl.convert_layout(x.to(ptr.dtype.element_ty), STORE), mask=(rows < end)[:, None])


# Turns on the tensor cores. Consumers that issue their products at the same time end them at the same time, and then
# all of them compute while no product runs; one after the other, one computes under the products of the next. Barrier
# 8 + g is of consumer g: its four warps meet there those of the consumer before it (FlashAttention-3, section 3.1).
_TURN = "{ .reg .pred p; setp.gt.s32 p, $1, 1; @p bar.sync %d, 256; mov.b32 $0, 0; }"
TURN_0, TURN_1, TURN_2 = (gl.constexpr(_TURN % (8 + g)) for g in range(3))
NEXT_TURN = gl.constexpr("{ .reg .pred p; setp.gt.s32 p, $1, 1; @p bar.arrive $2, 256; mov.b32 $0, 0; }")


@gluon.jit
def groups_with_rows(rows, GROUPS: gl.constexpr):
    """How many consumers, of 64 rows each, share a tile of `rows` rows: these take turns."""
    return gl.minimum((rows + 63) // 64, GROUPS)


@gluon.jit
def _asm(TEXT: gl.constexpr, CONSTRAINTS: gl.constexpr, arguments):
    gl.inline_asm_elementwise(TEXT, CONSTRAINTS, arguments, gl.int32, False, 1)


@gluon.jit
def wait_for_turn(GROUP: gl.constexpr, groups):
    """Before products of a tile that `groups` consumers share; one alone does not wait."""
    if GROUP == 0:
        _asm(TURN_0, "=r,r", [groups])
    elif GROUP == 1:
        _asm(TURN_1, "=r,r", [groups])
    else:
        _asm(TURN_2, "=r,r", [groups])


@gluon.jit
def pass_turn(GROUP: gl.constexpr, groups):
    """After these products have been issued."""
    following_group = gl.where(groups == GROUP + 1, 0, GROUP + 1)
    _asm(NEXT_TURN, "=r,r,r", [groups, 8 + following_group])


@gluon.jit
def first_turn(GROUP: gl.constexpr):
    """At the start: it is consumer 0's turn."""
    if GROUP == 1:
        _asm(NEXT_TURN, "=r,r,r", [2, 8])


@gluon.jit
def last_turn(GROUP: gl.constexpr):
    """At the end: leaves the barriers as they were found."""
    if GROUP == 0:
        _asm(TURN_0, "=r,r", [2])
