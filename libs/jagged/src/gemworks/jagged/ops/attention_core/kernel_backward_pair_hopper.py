"""Backward of jagged attention for Hopper in Gluon: a dQ kernel and a dK/dV kernel of one shape, no atomics.

Letters: R resident rows of a tile (GROUPS x 64), C streamed rows of a tile (BC), H head width.

Both kernels keep two resident tiles (dQ: Q and dO; dK/dV: K and V), stream the other pair through a ring, and compute
scores and dP of streamed tile j + 1 while the accumulating products of tile j run. Each row of a result is owned by one
warpgroup and summed in a fixed order, so repeats are bit-equal.
"""

# ruff: noqa: SIM102 (branches on constexpr stay apart from branches on data: only the former vanish)

from gemworks.jagged._triton.activations import LOG2_E
from gemworks.jagged._triton.activations_hopper import activate_with_grad, slope_only
from gemworks.jagged._triton.hopper_common import load_rows, pick, store_rows, tile_of
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
def _producer(
    a_desc, b_desc, c_desc, d_desc, tiles, smem, barriers,
    HEADS: gl.constexpr, H: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr, KV: gl.constexpr,
    SHARED: gl.constexpr, RSTAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    bounds_r, bounds_c, tile_sample, tile_row, total = tiles
    a_smem, b_smem, c_smem, d_smem = smem
    r_full, r_free, c_full, c_free = barriers
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    fill = 0
    ri = 0
    rounds = (total + programs - 1) // programs
    for i in range(rounds):
        t, tile, head = pick(i, pid, programs, HEADS)
        if t < total:
            row, r_begin, r_end, c_begin, c_len = tile_of(tile, tile_sample, tile_row, bounds_r, bounds_c)
            # A shared query is the same rows for every sequence: resident for dQ (a), streamed for dK and dV (c).
            a_begin = 0 if SHARED and not KV else r_begin
            q_begin = 0 if SHARED and KV else c_begin
            rs = ri % RSTAGES
            full = r_full.index(rs)
            mbarrier.wait(r_free.index(rs), ((ri // RSTAGES) & 1) ^ 1)
            mbarrier.expect(full, 2 * GROUPS * 64 * H * 2)
            for g in gl.static_range(GROUPS):
                at = row + g * 64
                load_rows(a_desc, a_begin, r_end - r_begin, at, head, full, a_smem.index(GROUPS * rs + g))
                load_rows(b_desc, r_begin, r_end - r_begin, at, head, full, b_smem.index(GROUPS * rs + g))
            ri += 1
            for j in range(0, c_len, BC):
                s = fill % STAGES
                mbarrier.wait(c_free.index(s), ((fill // STAGES) & 1) ^ 1)
                mbarrier.expect(c_full.index(s), 2 * BC * H * 2)
                load_rows(c_desc, q_begin, c_len, j, head, c_full.index(s), c_smem.index(s))
                load_rows(d_desc, c_begin, c_len, j, head, c_full.index(s), d_smem.index(s))
                fill += 1


@gluon.jit
def _p_and_slope(s, lse, scale, ACT: gl.constexpr):
    """(P, what dP is multiplied by to give dS); lse broadcasts against s."""
    if ACT == "softmax":
        p = gl.exp2(s * (scale * LOG2_E) - lse)
        return p, p
    else:
        return activate_with_grad(s * scale, ACT)


@gluon.jit
def _slope(s, lse, scale, ACT: gl.constexpr):
    """What dP is multiplied by to give dS."""
    if ACT == "softmax":
        return gl.exp2(s * (scale * LOG2_E) - lse)
    else:
        return slope_only(s * scale, ACT)


@gluon.jit
def _ds(slope, dp, delta, ACT: gl.constexpr):
    if ACT == "softmax":
        return slope * (dp - delta)
    return slope * dp


@gluon.jit
def _key_tile(
    a, b, x, y, trips, fill, statistics, head, c_begin, c_len, scale, column, zero, c_smem, d_smem,
    c_full, c_free,
    ACT: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr,
    P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """dV and dK (x, y) of keys `a`, values `b` over `trips` tiles of queries; scores are transposed: rows are keys."""
    lse_ptr, delta_ptr, lse_stride_n = statistics
    for j in range(trips):
        sv = fill % STAGES
        mbarrier.wait(c_full.index(sv), (fill // STAGES) & 1)
        s_acc = warpgroup_mma(a, c_smem.index(sv).permute((1, 0)), zero, use_acc=False, is_async=True)
        dp_acc = warpgroup_mma(b, d_smem.index(sv).permute((1, 0)), zero, use_acc=False, is_async=True)
        lse = zero
        delta = zero
        if ACT == "softmax":
            at = head.to(gl.int64) * lse_stride_n + c_begin + j * BC + column
            inside = column < c_len - j * BC
            lse = gl.load(lse_ptr + at, mask=inside, other=float("inf"))[None, :]
            delta = gl.load(delta_ptr + at, mask=inside, other=0.0)[None, :]
        s, dp = warpgroup_mma_wait(0, [s_acc, dp_acc])
        p32, slope = _p_and_slope(s, lse, scale, ACT)
        p = gl.convert_layout(p32.to(DTYPE), P_LAYOUT)
        ds = gl.convert_layout(_ds(slope, dp, delta, ACT).to(DTYPE), P_LAYOUT)
        x_acc = warpgroup_mma(p, d_smem.index(sv), x, is_async=True)
        y_acc = warpgroup_mma(ds, c_smem.index(sv), y, is_async=True)
        x, y, p, ds = warpgroup_mma_wait(0, [x_acc, y_acc, p, ds])
        mbarrier.arrive(c_free.index(sv), count=1)
        fill += 1
    return x, y, fill


@gluon.jit
def _query_tile(
    a, b, y, trips, fill, lse, delta, c_len, scale, column, zero, c_smem, d_smem, c_full, c_free, r_free,
    ACT: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """dQ (y) of queries `a` and their dO `b` over `trips` tiles of keys, at least one; signals r_free before the last
    product, which reads neither.
    """
    s0 = fill % STAGES
    mbarrier.wait(c_full.index(s0), (fill // STAGES) & 1)
    s_acc = warpgroup_mma(a, c_smem.index(s0).permute((1, 0)), zero, use_acc=False, is_async=True)
    dp_acc = warpgroup_mma(b, d_smem.index(s0).permute((1, 0)), zero, use_acc=False, is_async=True)
    s, dp = warpgroup_mma_wait(0, [s_acc, dp_acc])
    # A surplus key has logit 0, far above a row of very negative ones: its weight could overflow.
    if ACT == "softmax":
        if c_len < BC:
            s = gl.where((column < c_len)[None, :], s, float("-inf"))
    slope = _slope(s, lse, scale, ACT)
    ds = gl.convert_layout(_ds(slope, dp, delta, ACT).to(DTYPE), P_LAYOUT)
    for j in range(1, trips):
        sv = fill % STAGES
        s1 = (fill + 1) % STAGES
        phase1 = ((fill + 1) // STAGES) & 1
        mbarrier.wait(c_full.index(s1), phase1)
        s_acc = warpgroup_mma(a, c_smem.index(s1).permute((1, 0)), zero, use_acc=False, is_async=True)
        dp_acc = warpgroup_mma(b, d_smem.index(s1).permute((1, 0)), zero, use_acc=False, is_async=True)
        y_acc = warpgroup_mma(ds, c_smem.index(sv), y, is_async=True)
        s = warpgroup_mma_wait(2, [s_acc])
        if ACT == "softmax":
            if j == trips - 1:
                s = gl.where((column < c_len - j * BC)[None, :], s, float("-inf"))
        slope = _slope(s, lse, scale, ACT)
        dp = warpgroup_mma_wait(1, [dp_acc])
        ds_next = gl.convert_layout(_ds(slope, dp, delta, ACT).to(DTYPE), P_LAYOUT)
        # already complete: keeps the assembler from hoisting the wait below over the work that it hides
        mbarrier.wait(c_full.index(s1), phase1)
        y, ds, ds_next = warpgroup_mma_wait(0, [y_acc, ds, ds_next])
        mbarrier.arrive(c_free.index(sv), count=1)
        ds = ds_next
        fill += 1
    mbarrier.arrive(r_free, count=1)
    y = warpgroup_mma(ds, c_smem.index(fill % STAGES), y, is_async=True)
    y = warpgroup_mma_wait(0, [y])
    mbarrier.arrive(c_free.index(fill % STAGES), count=1)
    return y, fill + 1


@gluon.jit
def _row_values(ptr, head, stride_n, own, end, OTHER: gl.constexpr):
    """[64, 1] of a head's rows `own`, OTHER past the end."""
    return gl.load(ptr + head.to(gl.int64) * stride_n + own, mask=own < end, other=OTHER)[:, None]


@gluon.jit
def _consumer(
    GROUP: gl.constexpr, KV: gl.constexpr, statistics, results, scale, tiles, smem, barriers,
    ACT: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr,
    DTYPE: gl.constexpr, RSTAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """KV: x is dV and y is dK. Otherwise y is dQ and x is unused."""
    lse_ptr, delta_ptr, lse_stride_n = statistics
    x_ptr, x_stride_t, x_stride_n, y_ptr, y_stride_t, y_stride_n = results
    bounds_r, bounds_c, tile_sample, tile_row, total = tiles
    a_smem, b_smem, c_smem, d_smem = smem
    r_full, r_free, c_full, c_free = barriers
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BC, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (H // 8), H // 8], [4, 1], [1, 0])
    column = gl.arange(0, BC, layout=gl.SliceLayout(0, S_LAYOUT))
    zero = gl.zeros([64, BC], gl.float32, S_LAYOUT)
    fill = 0
    ri = 0
    rounds = (total + programs - 1) // programs
    for i in range(rounds):
        t, tile, head = pick(i, pid, programs, HEADS)
        if t < total:
            row, r_begin, end, c_begin, c_len = tile_of(tile, tile_sample, tile_row, bounds_r, bounds_c)
            rs = ri % RSTAGES
            mbarrier.wait(r_full.index(rs), (ri // RSTAGES) & 1)
            ri += 1
            trips = (c_len + BC - 1) // BC
            x = gl.zeros([64, H], gl.float32, O_LAYOUT)
            y = gl.zeros([64, H], gl.float32, O_LAYOUT)
            first = r_begin + row + GROUP * 64
            own = first + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
            a = a_smem.index(GROUPS * rs + GROUP)
            b = b_smem.index(GROUPS * rs + GROUP)
            if first < end and trips > 0 and KV:
                x, y, fill = _key_tile(
                    a, b, x, y, trips, fill, statistics, head, c_begin, c_len, scale, column, zero, c_smem, d_smem,
                    c_full, c_free, ACT, BC, STAGES, DTYPE, P_LAYOUT,
                )  # fmt: skip
                mbarrier.arrive(r_free.index(rs), count=1)
            elif first < end and trips > 0:
                lse = zero
                delta = zero
                if ACT == "softmax":
                    lse = _row_values(lse_ptr, head, lse_stride_n, own, end, float("inf"))
                    delta = _row_values(delta_ptr, head, lse_stride_n, own, end, 0.0)
                y, fill = _query_tile(
                    a, b, y, trips, fill, lse, delta, c_len, scale, column, zero, c_smem, d_smem,
                    c_full, c_free, r_free.index(rs), ACT, BC, STAGES, DTYPE, P_LAYOUT,
                )  # fmt: skip
            else:
                for _j in range(trips):  # nothing to do in this half: hand the stages on
                    s0 = fill % STAGES
                    mbarrier.wait(c_full.index(s0), (fill // STAGES) & 1)
                    mbarrier.arrive(c_free.index(s0), count=1)
                    fill += 1
                mbarrier.arrive(r_free.index(rs), count=1)
            if first < end:
                rows = first + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
                cols = gl.arange(0, H, layout=gl.SliceLayout(0, STORE))
                inside = (rows < end)[:, None]
                y = y * scale
                at = y_ptr + (rows.to(gl.int64) * y_stride_t)[:, None] + head.to(gl.int64) * y_stride_n + cols[None, :]
                gl.store(at, gl.convert_layout(y.to(y_ptr.dtype.element_ty), STORE), mask=inside)
                if KV:
                    store_rows(x_ptr, x, first, end, head, x_stride_t, x_stride_n)


@gluon.jit(do_not_specialize=["lse_stride_n"])  # it is the number of rows, other in every batch
def backward_hopper_kernel(
    a_desc, b_desc, c_desc, d_desc, x_ptr, y_ptr, lse_ptr, delta_ptr, bounds_r, bounds_c, tile_sample, tile_row,
    num_tiles, scale, x_stride_t, x_stride_n, y_stride_t, y_stride_n, lse_stride_n,
    KV: gl.constexpr, ACT: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr, BC: gl.constexpr,
    STAGES: gl.constexpr, SHARED: gl.constexpr, RSTAGES: gl.constexpr, GROUPS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = a_desc.dtype
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, H], DTYPE)
    C_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BC, H], DTYPE)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    a_smem = gl.allocate_shared_memory(DTYPE, [GROUPS * RSTAGES, 64, H], A_LAYOUT)
    b_smem = gl.allocate_shared_memory(DTYPE, [GROUPS * RSTAGES, 64, H], A_LAYOUT)
    c_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BC, H], C_LAYOUT)
    d_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BC, H], C_LAYOUT)
    r_full = gl.allocate_shared_memory(gl.int64, [RSTAGES, 1], BAR)
    r_free = gl.allocate_shared_memory(gl.int64, [RSTAGES, 1], BAR)
    c_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    c_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for s in gl.static_range(RSTAGES):
        mbarrier.init(r_full.index(s), count=1)
        mbarrier.init(r_free.index(s), count=GROUPS)
    for s in gl.static_range(STAGES):
        mbarrier.init(c_full.index(s), count=1)
        mbarrier.init(c_free.index(s), count=GROUPS)
    fence_async_shared()
    total = gl.load(num_tiles) * HEADS
    statistics = (lse_ptr, delta_ptr, lse_stride_n)
    results = (x_ptr, x_stride_t, x_stride_n, y_ptr, y_stride_t, y_stride_n)
    tiles = (bounds_r, bounds_c, tile_sample, tile_row, total)
    smem = (a_smem, b_smem, c_smem, d_smem)
    barriers = (r_full, r_free, c_full, c_free)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consumer, (G(0), KV, statistics, results, scale, tiles, smem, barriers,
                             ACT, HEADS, H, BC, STAGES, DTYPE, RSTAGES, GROUPS)),
                (_producer, (a_desc, b_desc, c_desc, d_desc, tiles, smem, barriers,
                             HEADS, H, BC, STAGES, KV, SHARED, RSTAGES, GROUPS)),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (G(0), KV, statistics, results, scale, tiles, smem, barriers,
                             ACT, HEADS, H, BC, STAGES, DTYPE, RSTAGES, GROUPS)),
                (_consumer, (G(1), KV, statistics, results, scale, tiles, smem, barriers,
                             ACT, HEADS, H, BC, STAGES, DTYPE, RSTAGES, GROUPS)),
                (_producer, (a_desc, b_desc, c_desc, d_desc, tiles, smem, barriers,
                             HEADS, H, BC, STAGES, KV, SHARED, RSTAGES, GROUPS)),
            ],
            [4, 1], [CONSUMER_REGS, 24],
        )  # fmt: skip
