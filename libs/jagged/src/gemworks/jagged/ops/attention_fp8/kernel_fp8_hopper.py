"""Forward of softmax attention for Hopper in Gluon with both products on the FP8 units.

Letters: M query rows of a tile (2 x 64), n key rows of a tile (BN), H head width.

Tiles of 128 rows of a sequence share one scale (a power of two) per head, of q, of k and of v. So a tile of scores has
one factor, which joins the softmax scale, and v's scale 2^e joins the exponent: with a(m, n) = s(m, n) + e(tile of n),
    out = sum_n 2^a(m, n) v_codes(n) / sum_n 2^a(m, n) 2^-e
and the running maximum is that of a. Nothing is left to do per score but one multiply-add, the exponential and the
conversion of P, which lies in [0, 2^8] and is rounded to E4M3.

The products want both operands contiguous along their contraction. K is; V comes transposed, tile by tile, its keys in
the order in which a thread of the first product holds its columns, so P goes from one product to the next without
leaving its registers (tiles.py, `KEY_ORDER`).

Structure as in attention_core/kernel_forward_hopper.py: one producer warp, two consumer warpgroups of 64 query rows,
persistent. All loads go through descriptors that the host makes. Rows of k past a sequence's end are the next one's:
softmax masks them, and v's tiles end in zeros.
"""

from gemworks.jagged._triton.activations import LOG2_E
from gemworks.jagged._triton.hopper_common import attention_barriers, pass_over, store_rows, zigzag
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
HEADROOM = gl.constexpr(8.0)  # P is at most 2^8; E4M3 ends at 448


@gluon.jit
def _tile(tile, tile_sample, tile_row, bounds_q, bounds_k):
    """(first row of a query tile in its sequence, begin and end of its queries, begin and length of its keys, number
    of its scale, number of the first scale of its keys)."""
    sample = gl.load(tile_sample + tile)
    row = gl.load(tile_row + tile)
    q_begin = gl.load(bounds_q + sample)
    q_end = gl.load(bounds_q + sample + 1)
    k_begin = gl.load(bounds_k + sample)
    k_len = gl.load(bounds_k + sample + 1) - k_begin
    return row, q_begin, q_end, k_begin, k_len, (q_begin + row) // 128 + sample, k_begin // 128 + sample


@gluon.jit
def _power(byte):
    """float32 2^(byte - 127); NaN of 255."""
    bits = gl.where(byte == 255, 0x7FC00000, gl.where(byte == 0, 0x400000, byte << 23))
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, tiles, smem, barriers,
    HEADS: gl.constexpr, GROUP_HEADS: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    QSTAGES: gl.constexpr,
):  # fmt: skip
    bounds_q, bounds_k, tile_sample, tile_row, total = tiles
    q_smem, k_smem, v_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    HEADS_K: gl.constexpr = HEADS // GROUP_HEADS
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    fill = 0
    qi = 0
    for i in range((total + programs - 1) // programs):
        t = zigzag(i, pid, programs)
        if t < total:
            row, q_begin, _q_end, k_begin, k_len, _qt, kt = _tile(t // HEADS, tile_sample, tile_row, bounds_q, bounds_k)
            head = t % HEADS
            head_k = head // GROUP_HEADS
            qs = qi % QSTAGES
            mbarrier.wait(q_free.index(qs), ((qi // QSTAGES) & 1) ^ 1)
            mbarrier.expect(q_full.index(qs), 2 * 64 * H)
            for g in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    q_desc, [q_begin + row + g * 64, head * H], q_full.index(qs), q_smem.index(2 * qs + g)
                )
            qi += 1
            for j in range(0, k_len, BN):
                s = fill % STAGES
                phase = ((fill // STAGES) & 1) ^ 1
                mbarrier.wait(k_free.index(s), phase)
                mbarrier.expect(k_full.index(s), BN * H)
                tma.async_copy_global_to_shared(k_desc, [k_begin + j, head_k * H], k_full.index(s), k_smem.index(s))
                mbarrier.wait(v_free.index(s), phase)
                mbarrier.expect(v_full.index(s), BN * H)
                tma.async_copy_global_to_shared(
                    v_desc, [((kt + j // 128) * HEADS_K + head_k) * H, j % 128], v_full.index(s), v_smem.index(s)
                )
                fill += 1


PACK_PTX = gl.constexpr(
    "{ .reg .b16 low, high;\n"
    "cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;\n"
    "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;\n"
    "mov.b32 $0, {low, high}; }"
)


@gluon.jit
def _pack(p, BN: gl.constexpr):
    """P as E4M3, the four neighbours in `KEY_ORDER` in one int32 [64, BN / 4]: columns 16 j + 8 h + 2 c + i become
    16 j + 4 c + 2 h + i, which a thread has already."""
    p = gl.permute(gl.reshape(p, [64, BN // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    even, odd = gl.split(gl.reshape(p, [64, BN // 4, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return gl.inline_asm_elementwise(PACK_PTX, "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack(p, BN: gl.constexpr, P_LAYOUT: gl.constexpr):
    """As the second product takes it."""
    a = p.to(gl.int8)
    b = (p >> 8).to(gl.int8)
    c = (p >> 16).to(gl.int8)
    d = (p >> 24).to(gl.int8)
    p = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [64, BN]).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(p, P_LAYOUT, assert_trivial=True)


@gluon.jit
def _factor_and_shift(sq, k_byte, v_byte):
    """(what a tile's products are multiplied by, e of its v's scale 2^e); NaN of a scale that is NaN."""
    return sq * _power(k_byte), gl.where(v_byte == 255, float("nan"), (v_byte - 127).to(gl.float32))


@gluon.jit
def _consumer(
    GROUP: gl.constexpr, scale, scales, results, tiles, smem, barriers,
    HEADS: gl.constexpr, GROUP_HEADS: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    QSTAGES: gl.constexpr,
):  # fmt: skip
    sq_ptr, sk_ptr, sv_ptr = scales
    out_ptr, lse_ptr, out_stride_t, out_stride_n, lse_stride_n = results
    bounds_q, bounds_k, tile_sample, tile_row, total = tiles
    q_smem, k_smem, v_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    HEADS_K: gl.constexpr = HEADS // GROUP_HEADS
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    column = gl.arange(0, BN, layout=gl.SliceLayout(0, S_LAYOUT))
    zero = gl.zeros([64, BN], gl.float32, S_LAYOUT)
    fill = 0
    qi = 0
    for i in range((total + programs - 1) // programs):
        t = zigzag(i, pid, programs)
        if t < total:
            row, q_begin, q_end, _k_begin, k_len, qt, kt = _tile(t // HEADS, tile_sample, tile_row, bounds_q, bounds_k)
            head = t % HEADS
            head_k = head // GROUP_HEADS
            sk_at = sk_ptr + kt * HEADS_K + head_k
            sv_at = sv_ptr + kt * HEADS_K + head_k
            first_row = q_begin + row + GROUP * 64
            trips = (k_len + BN - 1) // BN
            qs = qi % QSTAGES
            sq = _power(gl.load(sq_ptr + qt * HEADS + head).to(gl.int32)) * (scale * LOG2_E)
            mbarrier.wait(q_full.index(qs), (qi // QSTAGES) & 1)
            qi += 1
            o = gl.zeros([64, H], gl.float32, O_LAYOUT)
            peak = gl.full([64], float("-inf"), gl.float32, ROWS)
            total_p = gl.zeros([64], gl.float32, ROWS)
            if first_row < q_end and trips > 0:
                q = q_smem.index(2 * qs + GROUP)
                k_byte = gl.load(sk_at).to(gl.int32)
                v_byte = gl.load(sv_at).to(gl.int32)
                s0 = fill % STAGES
                mbarrier.wait(k_full.index(s0), (fill // STAGES) & 1)
                scores = warpgroup_mma(q, k_smem.index(s0).permute((1, 0)), zero, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(0, [scores])
                mbarrier.arrive(k_free.index(s0), count=1)
                if k_len < BN:
                    scores = gl.where((column < k_len)[None, :], scores, float("-inf"))
                factor, shift = _factor_and_shift(sq, k_byte, v_byte)
                peak = gl.max(scores, 1) * factor + shift
                base = peak - HEADROOM
                probs = gl.exp2(scores * factor + (shift - base)[:, None])
                total_p = gl.sum(probs, 1) * gl.exp2(-shift)
                p = _pack(probs, BN)
                mbarrier.wait(v_full.index(s0), (fill // STAGES) & 1)
                for j in range(1, trips):
                    s1 = (fill + 1) % STAGES
                    phase1 = ((fill + 1) // STAGES) & 1
                    at = j * BN // 128 * HEADS_K
                    k_byte = gl.load(sk_at + at).to(gl.int32)
                    v_byte = gl.load(sv_at + at).to(gl.int32)
                    mbarrier.wait(k_full.index(s1), phase1)
                    upcoming = warpgroup_mma(q, k_smem.index(s1).permute((1, 0)), zero, use_acc=False, is_async=True)
                    v_now = v_smem.index(fill % STAGES).permute((1, 0))
                    acc = warpgroup_mma(_unpack(p, BN, P_LAYOUT), v_now, o, is_async=True)
                    scores = warpgroup_mma_wait(1, [upcoming])
                    factor, shift = _factor_and_shift(sq, k_byte, v_byte)
                    mbarrier.arrive(k_free.index(s1), count=1)
                    if j == trips - 1:
                        scores = gl.where((column < k_len - j * BN)[None, :], scores, float("-inf"))
                    new_peak = gl.maximum(peak, gl.max(scores, 1) * factor + shift)
                    probs = gl.exp2(scores * factor + (shift - new_peak + HEADROOM)[:, None])
                    fix = gl.exp2(peak - new_peak)
                    total_p = total_p * fix + gl.sum(probs, 1) * gl.exp2(-shift)
                    peak = new_peak
                    p_next = _pack(probs, BN)
                    # The barrier also keeps the assembler from hoisting the wait below over the work that it hides.
                    mbarrier.wait(v_full.index(s1), phase1)
                    acc, p, p_next = warpgroup_mma_wait(0, [acc, p, p_next])
                    mbarrier.arrive(v_free.index(fill % STAGES), count=1)
                    o = acc * gl.convert_layout(fix, O_ROWS)[:, None]
                    p = p_next
                    fill += 1
                mbarrier.arrive(q_free.index(qs), count=1)
                v_now = v_smem.index(fill % STAGES).permute((1, 0))
                acc = warpgroup_mma(_unpack(p, BN, P_LAYOUT), v_now, o, is_async=True)
                o = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(v_free.index(fill % STAGES), count=1)
                fill += 1
            else:
                fill = pass_over(trips, fill, k_full, k_free, v_full, v_free, STAGES)
                mbarrier.arrive(q_free.index(qs), count=1)
            if first_row < q_end:
                lrow = first_row + gl.arange(0, 64, layout=ROWS)
                safe = gl.where(total_p > 0.0, total_p, 1.0)
                lse = gl.where(total_p > 0.0, peak - HEADROOM + gl.log2(safe), float("inf"))
                gl.store(lse_ptr + head.to(gl.int64) * lse_stride_n + lrow, lse, mask=lrow < q_end)
                o = o * gl.convert_layout(1.0 / safe, O_ROWS)[:, None]
                store_rows(out_ptr, o, first_row, q_end, head, out_stride_t, out_stride_n)


@gluon.jit(do_not_specialize=["lse_stride_n"])  # the number of rows, other in every batch
def fp8_hopper_kernel(
    q_desc, k_desc, v_desc, sq_ptr, sk_ptr, sv_ptr, out_ptr, lse_ptr,
    bounds_q, bounds_k, tile_sample, tile_row, num_tiles, scale, out_stride_t, out_stride_n, lse_stride_n,
    HEADS: gl.constexpr, GROUP_HEADS: gl.constexpr, H: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    QSTAGES: gl.constexpr, CONSUMER_REGS: gl.constexpr,
):  # fmt: skip
    CODE: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(CODE, [2 * QSTAGES, 64, H], q_desc.layout)
    k_smem = gl.allocate_shared_memory(CODE, [STAGES, BN, H], k_desc.layout)
    v_smem = gl.allocate_shared_memory(CODE, [STAGES, H, BN], v_desc.layout)
    barriers = attention_barriers(STAGES, QSTAGES, 2)
    fence_async_shared()
    total = gl.load(num_tiles) * HEADS
    scales = (sq_ptr, sk_ptr, sv_ptr)
    results = (out_ptr, lse_ptr, out_stride_t, out_stride_n, lse_stride_n)
    tiles = (bounds_q, bounds_k, tile_sample, tile_row, total)
    smem = (q_smem, k_smem, v_smem)
    gl.warp_specialize(
        [
            (_consumer, (G(0), scale, scales, results, tiles, smem, barriers,
                         HEADS, GROUP_HEADS, H, BN, STAGES, QSTAGES)),
            (_consumer, (G(1), scale, scales, results, tiles, smem, barriers,
                         HEADS, GROUP_HEADS, H, BN, STAGES, QSTAGES)),
            (_producer, (q_desc, k_desc, v_desc, tiles, smem, barriers, HEADS, GROUP_HEADS, H, BN, STAGES, QSTAGES)),
        ],
        [4, 1], [CONSUMER_REGS, 24],
    )  # fmt: skip
