"""The tiles of a batch, or its blocks, in one launch: no sort and no scan.

Every program counts for itself where its sequences begin: the first tile of sequence i comes after those of all
sequences that cost more per tile (or as much, and come first), a sum over all sequences. That is short work for one
program and saves a dozen small kernels.

Letters: R sequences of this program, J sequences some at a time, M tiles of a sequence some at a time, S columns of the
bounds, C places for tiles.
"""

# pyright: reportArgumentType=false, reportOptionalOperand=false, reportOperatorIssue=false
# (Triton's functions are annotated for its tracer, not for type checkers.)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _bound(offsets_ptr, i, num_sequences, after, step, PACKED: tl.constexpr):
    """Bound i of one side; `after` where it is past the last sequence, or the last bound again if that is negative."""
    known = tl.minimum(i, num_sequences)
    if PACKED:  # noqa: SIM108 (a branch of the compiler)
        at = tl.load(offsets_ptr + known).to(tl.int32)
    else:  # `step` rows for every sequence
        at = known * step
    return tl.where((i > num_sequences) & (after >= 0), after, at)


@triton.jit
def _length(offsets_ptr, i, num_sequences, after, step, PACKED: tl.constexpr):
    begin = _bound(offsets_ptr, i, num_sequences, after, step, PACKED)
    return _bound(offsets_ptr, i + 1, num_sequences, after, step, PACKED) - begin


@triton.jit
def _tiles_of_one_height(
    q_ptr, k_ptr, out_ptr, num_sequences, total_q, total_k, rows_q, rows_k, places,
    HEIGHT: tl.constexpr, OF_KEYS: tl.constexpr, Q_PACKED: tl.constexpr, K_PACKED: tl.constexpr,
    R: tl.constexpr, J: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """[3, C] into out_ptr: sequence, first row in it, number of tiles; places that hold no tile are 0."""
    if OF_KEYS:  # the side that owns rows has one more sequence, of those past the end; the other side none for it
        after_q, after_k = -1, total_k
    else:
        after_q, after_k = total_q, -1
    i_R = tl.program_id(0) * R + tl.arange(0, R)
    q_R = _length(q_ptr, i_R, num_sequences, after_q, rows_q, Q_PACKED)
    k_R = _length(k_ptr, i_R, num_sequences, after_k, rows_k, K_PACKED)
    mine_R, cost_R = (k_R, q_R) if OF_KEYS else (q_R, k_R)
    first_R = tl.zeros([R], tl.int32)
    all_J = tl.zeros([J], tl.int32)
    for begin in range(0, num_sequences + 1, J):
        j_J = begin + tl.arange(0, J)
        q_J = _length(q_ptr, j_J, num_sequences, after_q, rows_q, Q_PACKED)
        k_J = _length(k_ptr, j_J, num_sequences, after_k, rows_k, K_PACKED)
        mine_J, cost_J = (k_J, q_J) if OF_KEYS else (q_J, k_J)
        tiles_J = tl.where(j_J <= num_sequences, (mine_J + HEIGHT - 1) // HEIGHT, 0)
        same = (cost_J[None, :] == cost_R[:, None]) & (j_J[None, :] < i_R[:, None])
        before = (cost_J[None, :] > cost_R[:, None]) | same
        first_R += tl.sum(tl.where(before, tiles_J[None, :], 0), axis=1)
        all_J += tiles_J
    num_tiles = tl.sum(all_J, axis=0)
    tiles_R = tl.where(i_R <= num_sequences, (mine_R + HEIGHT - 1) // HEIGHT, 0)
    for begin in range(0, tl.max(tiles_R, axis=0), M):
        m_M = begin + tl.arange(0, M)[None, :]
        at = out_ptr + first_R[:, None] + m_M
        inside = m_M < tiles_R[:, None]
        tl.store(at, tl.broadcast_to(i_R[:, None], [R, M]), mask=inside)
        tl.store(at + places, tl.broadcast_to(m_M * HEIGHT, [R, M]), mask=inside)
    each = tl.cdiv(places, tl.num_programs(0))
    for begin in range(0, each, J):
        c_J = begin + tl.arange(0, J)
        place_J = tl.program_id(0) * each + c_J
        inside = (c_J < each) & (place_J < places)
        tl.store(out_ptr + 2 * places + place_J, tl.zeros([J], tl.int32) + num_tiles, mask=inside)
        unused = inside & (place_J >= num_tiles)
        tl.store(out_ptr + place_J, tl.zeros([J], tl.int32), mask=unused)
        tl.store(out_ptr + places + place_J, tl.zeros([J], tl.int32), mask=unused)


@triton.jit(do_not_specialize=["num_sequences", "total_q", "total_k", "rows_q", "rows_k", "bounds_width"])
def schedule_kernel(
    q_ptr, k_ptr, out_ptr, num_sequences, total_q, total_k, rows_q, rows_k, bounds_width,
    HEIGHTS: tl.constexpr, OF_KEYS: tl.constexpr, Q_PACKED: tl.constexpr, K_PACKED: tl.constexpr,
    R: tl.constexpr, J: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Grid [programs, 1 + number of heights]: the bounds [4, S], then the tiles of each height."""
    if tl.program_id(1) == 0:
        step = tl.num_programs(0) * J
        for begin in range(tl.program_id(0) * J, bounds_width, step):
            i_J = begin + tl.arange(0, J)
            inside = i_J < bounds_width
            q_J = _bound(q_ptr, i_J, num_sequences, total_q, rows_q, Q_PACKED)
            k_J = _bound(k_ptr, i_J, num_sequences, total_k, rows_k, K_PACKED)
            tl.store(out_ptr + i_J, q_J, mask=inside)
            tl.store(out_ptr + 2 * bounds_width + i_J, k_J, mask=inside)
            q_J = _bound(q_ptr, i_J, num_sequences, -1, rows_q, Q_PACKED)
            k_J = _bound(k_ptr, i_J, num_sequences, -1, rows_k, K_PACKED)
            tl.store(out_ptr + bounds_width + i_J, q_J, mask=inside)
            tl.store(out_ptr + 3 * bounds_width + i_J, k_J, mask=inside)
    begin = 4 * bounds_width
    for h in tl.static_range(len(HEIGHTS)):
        # As schedule.num_places.
        places = ((total_k if OF_KEYS[h] else total_q) // HEIGHTS[h] + num_sequences + 4) // 4 * 4
        if tl.program_id(1) == h + 1:
            _tiles_of_one_height(
                q_ptr, k_ptr, out_ptr + begin, num_sequences, total_q, total_k, rows_q, rows_k, places,
                HEIGHTS[h], OF_KEYS[h], Q_PACKED, K_PACKED, R, J, M,
            )  # fmt: skip
        begin += 3 * places


@triton.jit(do_not_specialize=["num_sequences", "total", "limit", "places"])
def block_schedule_kernel(
    offsets_ptr, out_ptr, num_sequences, total, limit, places,
    BLOCK: tl.constexpr, R: tl.constexpr, J: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """[places, 3] into out_ptr: first row, rows that attend, rows to write of each block, in the order of the rows."""
    i_R = tl.program_id(0) * R + tl.arange(0, R)
    rows_R = _length(offsets_ptr, i_R, num_sequences, total, 0, True)
    first_R = tl.zeros([R], tl.int32)
    all_J = tl.zeros([J], tl.int32)
    for begin in range(0, num_sequences + 1, J):
        j_J = begin + tl.arange(0, J)
        blocks_J = (_length(offsets_ptr, j_J, num_sequences, total, 0, True) + BLOCK - 1) // BLOCK
        blocks_J = tl.where(j_J <= num_sequences, blocks_J, 0)
        first_R += tl.sum(tl.where(j_J[None, :] < i_R[:, None], blocks_J[None, :], 0), axis=1)
        all_J += blocks_J
    num_blocks = tl.sum(all_J, axis=0)
    rows_R = tl.where(i_R <= num_sequences, rows_R, 0)
    row_R = _bound(offsets_ptr, i_R, num_sequences, total, 0, True)
    attends_R = tl.where(i_R < num_sequences, limit, 0)  # the rows past the end attend to nothing
    for begin in range(0, tl.cdiv(tl.max(rows_R, axis=0), BLOCK), M):
        row_M = (begin + tl.arange(0, M))[None, :] * BLOCK
        at = out_ptr + (first_R[:, None] + begin + tl.arange(0, M)[None, :]) * 3
        stored = tl.minimum(rows_R[:, None] - row_M, BLOCK)
        tl.store(at, row_R[:, None] + row_M, mask=stored > 0)
        tl.store(at + 1, tl.minimum(stored, attends_R[:, None]), mask=stored > 0)
        tl.store(at + 2, stored, mask=stored > 0)
    each = tl.cdiv(3 * places, tl.num_programs(0))
    for begin in range(0, each, J):
        c_J = begin + tl.arange(0, J)
        place_J = tl.program_id(0) * each + c_J
        unused = (c_J < each) & (place_J < 3 * places) & (place_J >= 3 * num_blocks)
        tl.store(out_ptr + place_J, tl.zeros([J], tl.int32), mask=unused)
