"""Additive bias of softmax attention in plain Triton: lookup by relative position and time, the tables' gradients.

A pair adds `position[clamp(p_k - p_q, -R, R) + R] + time[min(bit_length(|t_k - t_q| // unit), M - 1)]`, both of its
query head; tables come as float32 [N, 2 R + 1] and [N, M].

The gradient of an entry is the sum of dS over the pairs that read it. Programs walk over query tiles in a fixed order,
each with sums of its own; a reduction of fixed order adds them. Pairs of one distance are a diagonal of a tile: rows
shifted against each other make it a column. Buckets of time are summed one by one, those that a tile has.

Letters: M query rows of a tile, n key rows of a tile, H and V head widths, W diagonals of a tile.
"""

import triton
import triton.language as tl
from gemworks.jagged._triton.activations import LOG2_E


@triton.jit
def load_times(times, rows, valid, BUCKETS: tl.constexpr):
    """int64 timestamps of rows; zeros without a table of times."""
    if BUCKETS > 0:
        return tl.load(times + rows.to(tl.int64), mask=valid, other=0)
    else:
        return tl.zeros(rows.shape, tl.int64)


@triton.jit
def time_bucket(elapsed, unit, BUCKETS: tl.constexpr):
    """min(bit_length(|elapsed| // unit), BUCKETS - 1), exact: a guess in floating point is corrected by one.

    `d >> (m - 1) >= unit` says that d holds 2^(m - 1) units, without overflow.
    """
    d = tl.abs(elapsed)
    guess = tl.log2(tl.maximum(d.to(tl.float32), 0.25) / unit)
    m = tl.floor(tl.minimum(tl.maximum(guess, -1.0), BUCKETS - 2.0)).to(tl.int64) + 1
    below = tl.maximum(m - 1, 0)
    up = (m < BUCKETS - 1) & ((d >> m) >= unit)
    down = (m > 0) & ((d >> below) < unit)
    return (tl.where(up, m + 1, tl.where(down, below, m))).to(tl.int32)


@triton.jit
def bias_tile(
    away, elapsed, position, time, radius, unit, head, BY_POSITION: tl.constexpr, BUCKETS: tl.constexpr
):  # fmt: skip
    """Bias of each pair at distance p_k - p_q = `away`, in units of log 2."""
    bias = tl.zeros(away.shape, tl.float32)
    if BY_POSITION:
        bucket = tl.minimum(tl.maximum(away, -radius), radius) + radius
        bias += tl.load(position + head * (2 * radius + 1) + bucket)
    if BUCKETS > 0:
        bias += tl.load(time + head * BUCKETS + time_bucket(elapsed, unit, BUCKETS))
    return bias * LOG2_E


@triton.jit
def add_diagonals(ds_Mn, first, low, high, sums, radius, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr):
    """Adds the diagonals of a tile to `sums`, those at the ends of the table to `low` and `high`: (low, high).

    Args:
        first: distance of the first diagonal, which is the last row's first key.
        sums: float32 [2 radius + 1] of this program.
    """
    last = first + BM + BN - 2
    if last <= -radius:
        low += tl.sum(tl.sum(ds_Mn, 1), 0)
    elif (first >= radius) & (first > -radius):
        high += tl.sum(tl.sum(ds_Mn, 1), 0)
    else:
        w = tl.arange(0, W)
        at_MW = w[None, :] - (BM - 1) + tl.arange(0, BM)[:, None]
        shifted_MW = tl.gather(ds_Mn, tl.minimum(tl.maximum(at_MW, 0), BN - 1), 1)
        sum_W = tl.sum(tl.where((at_MW >= 0) & (at_MW < BN), shifted_MW, 0.0), 0)
        away_W = first + w
        is_low = away_W <= -radius
        is_high = (away_W >= radius) & (away_W > -radius)
        low += tl.sum(tl.where(is_low, sum_W, 0.0), 0)
        high += tl.sum(tl.where(is_high, sum_W, 0.0), 0)
        between = (away_W > -radius) & (away_W < radius)
        slot = sums + away_W + radius
        tl.debug_barrier()  # another thread may have written what this one reads
        tl.store(slot, tl.load(slot, mask=between, other=0.0) + sum_W, mask=between)
    return low, high


@triton.jit
def add_buckets(ds_Mn, bucket_Mn, valid_Mn, sum_B, BUCKETS: tl.constexpr, BB: tl.constexpr):
    """sum_B with the pairs of a tile added to their buckets of time."""
    b = tl.arange(0, BB)
    begin = tl.min(tl.min(tl.where(valid_Mn, bucket_Mn, BUCKETS - 1), 1), 0)
    end = tl.max(tl.max(tl.where(valid_Mn, bucket_Mn, 0), 1), 0) + 1
    for m in range(begin, end):
        total = tl.sum(tl.sum(tl.where(bucket_Mn == m, ds_Mn, 0.0), 1), 0)
        sum_B += tl.where(b == m, total, 0.0)
    return sum_B
