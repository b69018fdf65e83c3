"""How key tiles take turns at dQ in the fused backward for Hopper: who walks over what, and in which order they add.

One counter per query tile puts its key tiles in order: each adds its share after the one whose turn is before. The
first stores its share into a float32 scratch, those between add to it, the last reads it and writes dQ.

The turns are those in which tiles that start together get there. Without a mask all walk over the same queries, from
the first key tile to the last. With one, the walk of a key tile begins further back the further back its keys are, so
of the tiles that meet a query tile the last one is there first: turns go from the last key tile to the first.
"""

from gemworks.jagged._triton.hopper_common import sync_threads
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ADD_PTX = gl.constexpr(
    "{ red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};\n"
    "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }"
)
STORE_PTX = gl.constexpr(
    "{ st.relaxed.gpu.global.v4.f32 [$4], {$8, $9, $10, $11};\n"
    "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }"
)
PASS_ON = gl.constexpr("=r,=r,=r,=r,l,l,l,l,f,f,f,f")
LOAD_PTX = gl.constexpr("ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];")
SEEN_PTX = gl.constexpr("ld.acquire.gpu.global.b32 $0, [$1];")
# By one lane: if the lanes left the wait before it one after the other, a late store would turn the counter back.
TELL_PTX = gl.constexpr("""{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; mov.b32 $0, 0;
@p st.release.gpu.global.b32 [$1], $2; }""")


@gluon.jit
def item(t, tile_sample, bounds_k, bounds_q, tiles_per_unit, num_sequences, HEADS: gl.constexpr, SHARED: gl.constexpr):
    """(head, sequence, begin and length of its keys, of its queries) of the t-th unit of work."""
    unit = t // HEADS
    if SHARED:  # a sequence, found through the first of its query tiles; the rows past the last one come at the end
        known = gl.minimum(unit, num_sequences - 1)
        sample = gl.where(unit < num_sequences, gl.load(tile_sample + known * tiles_per_unit), num_sequences)
    else:  # a key tile
        sample = gl.load(tile_sample + unit)
    k_begin = gl.load(bounds_k + sample)
    k_len = gl.load(bounds_k + sample + 1) - k_begin
    q_begin = gl.load(bounds_q + sample)
    q_len = gl.load(bounds_q + sample + 1) - q_begin
    return t % HEADS, sample, k_begin, k_len, q_begin, q_len


@gluon.jit
def walk(row, k_len, q_len, left, right, MASKED: gl.constexpr, BOTTOM_RIGHT: gl.constexpr):
    """(shift of positions, first and end of the query rows that the key tile at `row` meets), whole query tiles."""
    if MASKED:
        shift = k_len - q_len if BOTTOM_RIGHT else row - row
        begin = gl.maximum(row - shift - right, 0) // 64 * 64
        end = gl.minimum(q_len, gl.minimum(row + 128, k_len) - shift + left)
        return shift, begin, gl.maximum(begin, end)
    else:
        return row - row, row - row, q_len


@gluon.jit
def ends(row, k_len, m, shift, left, right, MASKED: gl.constexpr):
    """Whether the key tile at `row` has the first and the last turn at the query tile at `m`."""
    lowest = row == 0
    highest = row + 128 >= k_len
    if MASKED:
        lowest = lowest | (m >= row - shift + left)
        highest = highest | (m + 63 < row + 128 - shift - right)
        return highest, lowest
    else:
        return lowest, highest


@gluon.jit
def in_turn(row, k_len, MASKED: gl.constexpr):
    """Key tiles counted in the order of their turns: 128 times the turn of the tile at `row`; its own inverse."""
    if MASKED:
        return (k_len - 1) // 128 * 128 - row
    else:
        return row


@gluon.jit
def read_ticket(ticket_smem, ks):
    """(unit, first row of the key tile), as the producer left them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(ticket_smem.index(2 * ks).load(LAYOUT), 0), gl.max(ticket_smem.index(2 * ks + 1).load(LAYOUT), 0)


@gluon.jit
def gatekeeper(
    turn_ptr, units, left, right, ticket_smem, barriers,
    HEADS: gl.constexpr, KSTAGES: gl.constexpr, SHARED: gl.constexpr, MASKED: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
):  # fmt: skip
    """Lets the consumers at a query tile's scratch when it is their key tile's turn, and says when they are through."""
    if SHARED:  # one program adds all shares, in order
        return
    bounds_k, bounds_q, tile_sample, total, tiles_per_unit, num_sequences = units
    _q_full, _q_free, k_full, k_free, _ds_full, gate, done = barriers
    step = 0
    ki = 0
    mbarrier.wait(k_full.index(0), 0)
    t, row = read_ticket(ticket_smem, 0)
    while t < total:
        head, sample, _k_begin, k_len, q_begin, q_len = item(
            t, tile_sample, bounds_k, bounds_q, tiles_per_unit, num_sequences, HEADS, SHARED
        )
        j = in_turn(row, k_len, MASKED) // 128
        shift, begin, end = walk(row, k_len, q_len, left, right, MASKED, BOTTOM_RIGHT)
        at = (turn_ptr + (q_begin // 64 + sample + begin // 64) * HEADS + head).to(gl.int64, bitcast=True)
        for m in range(begin, end, 64):
            first, last = ends(row, k_len, m, shift, left, right, MASKED)
            if not first:
                turn = gl.inline_asm_elementwise(SEEN_PTX, "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)
                while turn < j:
                    turn = gl.inline_asm_elementwise(SEEN_PTX, "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)
            mbarrier.arrive(gate, count=1)
            mbarrier.wait(done, step & 1)
            if not last:
                gl.inline_asm_elementwise(TELL_PTX, "=r,l,r", [at, j + 1], dtype=gl.int32, is_pure=False, pack=1)
            at += HEADS * 4
            step += 1
        mbarrier.arrive(k_free.index(ki % KSTAGES), count=1)
        ki += 1
        ks = ki % KSTAGES
        mbarrier.wait(k_full.index(ks), (ki // KSTAGES) & 1)
        t, row = read_ticket(ticket_smem, ks)


@gluon.jit
def hand_over(
    dq, piece, first, last, target, q_begin, q_len, m, scale, gate, done, step,
    SHARED: gl.constexpr,
):  # fmt: skip
    """Adds this key tile's share of dQ (half the columns of one query tile) when its turn comes.

    target: dQ's first row and column of those of this head, stride of its rows, rows and columns of the tile.
    """
    dq_ptr, dq_stride_t, rows, cols = target
    if not SHARED:
        mbarrier.wait(gate, step & 1)
    if last:
        if not first:
            dq += gl.inline_asm_elementwise(
                LOAD_PTX, "=f,=f,=f,=f,l,l,l,l", [piece], dtype=gl.float32, is_pure=False, pack=4
            )
        r = m + rows
        at = dq_ptr + ((q_begin + r).to(gl.int64) * dq_stride_t)[:, None] + cols[None, :]
        gl.store(at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(r < q_len)[:, None])
    elif first:
        gl.inline_asm_elementwise(STORE_PTX, PASS_ON, [piece, dq], dtype=gl.int32, is_pure=False, pack=4)
    else:
        gl.inline_asm_elementwise(ADD_PTX, PASS_ON, [piece, dq], dtype=gl.int32, is_pure=False, pack=4)
    if not SHARED:
        sync_threads()
        mbarrier.arrive(done, count=1)
