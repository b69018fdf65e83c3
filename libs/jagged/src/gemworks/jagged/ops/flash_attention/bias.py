"""An additive attention bias, read from learned tables by relative position and by time between events.

Letters: N query heads, T rows, P position buckets, M time buckets, b sequences of a group, L queries, K keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gemworks.jagged._dense import Align, relative_positions
from gemworks.jagged._packing import Group
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, eq=False)
class AttentionBias:
    """Bias `position_table[bucket(p_k - p_q), n] + time_table[bucket(|t_k - t_q|), n]`; either table may be absent.

    Added to the scaled logits. Both tables receive gradients.

    - Position bucket, table [P, N] with P = 2 R + 1: `clamp(p_k - p_q, -R, R) + R`. Positions are those of
      the causal mask, so `align` decides them when lengths of q and k differ.
    - Time bucket, table [M, N]: `min(bit_length(|t_k - t_q| // time_unit), M - 1)`: 0 below one unit, 1 for
      [1, 2) units, 2 for [2, 4), 3 for [4, 8) ... Integer arithmetic, so every backend agrees to the bit.

    Args:
        position_table: floating [P, N], P odd.
        time_table: floating [M, N].
        timestamps_q: int64 [Tq], one per row of q, in any unit; needed by `time_table`.
        timestamps_k: int64 [Tk]; None takes `timestamps_q` (self-attention).
        time_unit: width of the first time bucket, in the unit of the timestamps; positive integer.
    """

    position_table: Tensor | None = None
    time_table: Tensor | None = None
    timestamps_q: Tensor | None = None
    timestamps_k: Tensor | None = None
    time_unit: int = 1

    def check(self, *, num_heads: int, total_q: int, total_k: int, device: torch.device) -> None:
        """Raise ValueError unless the tables fit an attention call with N heads, Tq and Tk rows."""
        if self.position_table is None and self.time_table is None:
            raise ValueError("bias: got no table; pass position_table or time_table, or bias=None")
        for name, table in (("position_table", self.position_table), ("time_table", self.time_table)):
            if table is None:
                continue
            if table.dim() != 2 or table.shape[1] != num_heads or table.shape[0] == 0 or not table.is_floating_point():
                raise ValueError(
                    f"bias.{name}: got {table.dtype} {tuple(table.shape)}, expected floating [buckets, {num_heads}]; "
                    f"one column per query head"
                )
            if table.device != device:
                raise ValueError(f"bias.{name}: got device {table.device}, expected {device}; move it there")
        if self.position_table is not None and self.position_table.shape[0] % 2 == 0:
            raise ValueError(
                f"bias.position_table: got {self.position_table.shape[0]} rows, expected an odd number 2 R + 1; "
                f"buckets run from -R to R"
            )
        if self.time_table is None:
            return
        if self.time_unit < 1:
            raise ValueError(f"bias.time_unit: got {self.time_unit}, expected an integer >= 1; use the unit 1")
        if self.timestamps_q is None:
            raise ValueError("bias.timestamps_q: missing, but time_table needs one timestamp per row of q")
        for name, times, total in (
            ("timestamps_q", self.timestamps_q, total_q),
            ("timestamps_k", self.timestamps_q if self.timestamps_k is None else self.timestamps_k, total_k),
        ):
            if times.shape != (total,) or times.dtype != torch.int64 or times.device != device:
                raise ValueError(
                    f"bias.{name}: got {times.dtype} {tuple(times.shape)} on {times.device}, expected int64 [{total}] "
                    f"on {device}; one timestamp per row"
                )


def time_bucket(dt: Tensor, time_unit: int, num_buckets: int) -> Tensor:
    """`min(bit_length(|dt| // time_unit), num_buckets - 1)`, int64 like `dt`.

    >>> time_bucket(torch.tensor([0, 59, 60, 119, 120, 240, -240, 10**9]), 60, 5).tolist()
    [0, 0, 1, 1, 2, 3, 3, 4]
    """
    units = dt.abs() // time_unit
    # A shift by the bucket's number: bucket m holds units in [2^(m-1), 2^m).
    edges = torch.ones(num_buckets - 1, dtype=torch.int64, device=dt.device) << torch.arange(
        num_buckets - 1, device=dt.device
    ).clamp(max=62)
    return torch.bucketize(units, edges, right=True)


def group_bias(
    bias: AttentionBias, group: Group, align: Align, rows_q_bL: Tensor | None, rows_k_bK: Tensor | None
) -> Tensor:
    """The bias of one group, [b or 1, N, L, K].

    Args:
        rows_q_bL, rows_k_bK: packed row of each padded row (any row where there is none); for times only.
    """
    total: Tensor | None = None
    if bias.position_table is not None:
        reach = bias.position_table.shape[0] // 2
        bucket = relative_positions(group, align).clamp(-reach, reach) + reach
        total = _lookup(bias.position_table, bucket)
    if bias.time_table is not None:
        assert bias.timestamps_q is not None
        assert rows_q_bL is not None
        assert rows_k_bK is not None
        times_q = _pad_times(bias.timestamps_q, rows_q_bL)
        times_k = _pad_times(bias.timestamps_q if bias.timestamps_k is None else bias.timestamps_k, rows_k_bK)
        dt = times_k[:, None, :] - times_q[:, :, None]
        by_time = _lookup(bias.time_table, time_bucket(dt, bias.time_unit, bias.time_table.shape[0]))
        total = by_time if total is None else total + by_time
    assert total is not None
    return total.transpose(0, 1)


class _Lookup(torch.autograd.Function):
    """`table[bucket, n]` as [N, ...]. The gradient is one histogram per head: far quicker on a CPU than embedding's."""

    @staticmethod
    def forward(ctx: Any, table_PN: Tensor, bucket: Tensor) -> Tensor:
        ctx.save_for_backward(bucket)
        ctx.num_buckets = table_PN.shape[0]
        return table_PN.t().index_select(1, bucket.reshape(-1)).view(table_PN.shape[1], *bucket.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (bucket,) = ctx.saved_tensors
        flat, grad_N = bucket.reshape(-1), grads[0].reshape(grads[0].shape[0], -1)
        if grad_N.device.type == "cpu":
            sums = [torch.bincount(flat, weights=g, minlength=ctx.num_buckets) for g in grad_N]
            return torch.stack(sums, dim=1).to(grad_N.dtype), None
        out = grad_N.new_zeros(grad_N.shape[0], ctx.num_buckets)  # bincount would read the device
        return out.index_add_(1, flat, grad_N).t(), None


def _lookup(table_PN: Tensor, bucket: Tensor) -> Tensor:
    """Values of each head's column at the buckets [...], as [N, ...]."""
    return _Lookup.apply(table_PN, bucket)  # pyright: ignore[reportReturnType]


def _pad_times(times_T: Tensor, rows_bL: Tensor) -> Tensor:
    return torch.cat([times_T, times_T.new_zeros(1)])[rows_bL]
