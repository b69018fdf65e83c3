"""How the reference backend lays packed rows out in dense blocks: the plan behind every attention op.

A *plan* sorts the sequences of a batch into groups of similar length; within a group, rows are padded to the longest
member. On the host the groups follow the real lengths (reading them is free); on a device there is one group padded to
`max_length`, so nothing is ever read back.

Letters: B sequences, b sequences of one group, L padded length, N heads, H head width, T packed rows, P padded rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gemworks.jagged._checks import is_host


@dataclass(frozen=True)
class Side:
    """The rows of q or of k.

    Exactly one of `offsets` (packed rows) and `rows` (the same number for every sequence) is set.
    """

    total: int  # T, or B * rows
    offsets: Tensor | None = None
    max_length: int = 0
    rows: int | None = None


@dataclass(frozen=True)
class Layout:
    """Where each packed row lies in the padded rows, per head.

    `dense_rows_P` maps padded rows to packed rows (`total` = a row of zeros); `packed_rows_T` is its inverse for rows
    that belong to a group (`num_padded` = a row of zeros).
    """

    dense_rows_P: Tensor
    packed_rows_T: Tensor
    complete: bool  # every packed row lies in some group


@dataclass(frozen=True)
class Group:
    """b sequences that are computed together."""

    sequences_b: Tensor
    lengths_q_b: Tensor
    lengths_k_b: Tensor
    length_q: int  # padded
    length_k: int
    uniform_k: bool  # known on the host: no key of this group is padding
    same_lengths: bool  # known on the host: lengths_q equal lengths_k


@dataclass(frozen=True)
class Plan:
    groups: tuple[Group, ...]
    layout_q: Layout
    layout_k: Layout


class _Gather(torch.autograd.Function):
    """Rows by index, where the index one past the end reads zeros. Its adjoint is the gather by the inverse index."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, rows_P: Tensor, inverse_T: Tensor, source_complete: bool) -> Tensor:
        ctx.save_for_backward(rows_P, inverse_T)
        ctx.source_complete = source_complete
        return _take(x_TH, rows_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rows_P, inverse_T = ctx.saved_tensors
        return _Gather.apply(grads[0].contiguous(), inverse_T, rows_P, False), None, None, None  # pyright: ignore


def _take(x_TH: Tensor, rows_P: Tensor) -> Tensor:
    return torch.cat([x_TH, x_TH.new_zeros(1, x_TH.shape[1])]).index_select(0, rows_P)


def pad_rows(x_TNH: Tensor, layout: Layout) -> Tensor:
    """Packed [T, N, H] to padded rows [P * N, H], a group's block being [b, N, L, H]."""
    x = x_TNH.reshape(-1, x_TNH.shape[-1])
    return _Gather.apply(x, layout.dense_rows_P, layout.packed_rows_T, layout.complete)  # pyright: ignore


def unpad_rows(x_PH: Tensor, layout: Layout, num_heads: int) -> Tensor:
    """Padded rows [P * N, H] back to packed [T, N, H]; rows outside every sequence are zero."""
    x = _Gather.apply(x_PH, layout.packed_rows_T, layout.dense_rows_P, False)
    return x.view(-1, num_heads, x.shape[-1])  # pyright: ignore


def split_groups(x_PH: Tensor, groups: tuple[Group, ...], num_heads: int, side: str) -> list[Tensor]:
    """Padded rows [P * N, H] to one [b, N, L, H] view per group."""
    sizes = [g.sequences_b.shape[0] * num_heads * (g.length_q if side == "q" else g.length_k) for g in groups]
    parts = x_PH.split(sizes)
    return [
        part.view(g.sequences_b.shape[0], num_heads, g.length_q if side == "q" else g.length_k, x_PH.shape[-1])
        for part, g in zip(parts, groups, strict=True)
    ]


def segment_ids(offsets: Tensor, total: int) -> Tensor:
    """The sequence of each of `total` rows, int64 [total]; rows past `offsets[-1]` get B. No host synchronisation."""
    rows = torch.arange(total, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), rows, right=True)


def _bucket(length: int) -> int:
    """Round up to 8, 12, 16, 24, 32, 48, ...: at most a third of a padded block is padding."""
    size = 8
    while size < length:
        if size + size // 2 >= length:
            return size + size // 2
        size *= 2
    return size


def _side_lengths(side: Side, num_sequences: int) -> Tensor:
    if side.rows is not None:
        return torch.full((num_sequences,), side.rows, dtype=torch.int64)
    assert side.offsets is not None
    return side.offsets.detach().to(torch.int64).diff()


def _host_layout(
    side: Side, groups: list[Tensor], starts: Tensor, lengths: Tensor, padded: list[int], n: int
) -> Layout:
    """Row maps of one side, at the grain of (row, head)."""
    dense: list[Tensor] = []
    for sequences_b, length in zip(groups, padded, strict=True):
        within_L = torch.arange(length)
        rows_bL = starts[sequences_b][:, None] + within_L
        rows_bL = rows_bL.masked_fill(within_L >= lengths[sequences_b][:, None], -1)
        rows_bnL = rows_bL[:, None, :] * n + torch.arange(n)[:, None]
        dense.append(rows_bnL.masked_fill(rows_bL[:, None, :] < 0, side.total * n).reshape(-1))
    dense_rows = torch.cat(dense) if dense else torch.empty(0, dtype=torch.int64)
    num_padded = dense_rows.shape[0]
    packed = torch.full((side.total * n + 1,), num_padded)
    packed[dense_rows] = torch.arange(num_padded)
    packed = packed[:-1].contiguous()
    return Layout(dense_rows, packed, bool((packed < num_padded).all()))


def _host_plan(side_q: Side, side_k: Side, num_sequences: int, n_q: int, n_k: int) -> Plan:
    lengths_q, lengths_k = _side_lengths(side_q, num_sequences), _side_lengths(side_k, num_sequences)
    members: dict[tuple[int, int], list[int]] = {}
    for i, (lq, lk) in enumerate(zip(lengths_q.tolist(), lengths_k.tolist(), strict=True)):
        if lq > 0 and lk > 0:  # otherwise there is no pair to compute: outputs and gradients are zero
            members.setdefault((_bucket(lq), _bucket(lk)), []).append(i)
    sequences = [torch.tensor(members[key]) for key in sorted(members)]
    groups = []
    for s in sequences:
        lq_b, lk_b = lengths_q[s], lengths_k[s]
        lk = int(lk_b.max())
        groups.append(Group(s, lq_b, lk_b, int(lq_b.max()), lk, bool((lk_b == lk).all()), bool((lq_b == lk_b).all())))
    return Plan(
        tuple(groups),
        _host_layout(side_q, sequences, _starts(lengths_q), lengths_q, [g.length_q for g in groups], n_q),
        _host_layout(side_k, sequences, _starts(lengths_k), lengths_k, [g.length_k for g in groups], n_k),
    )


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


def _device_layout(side: Side, num_sequences: int, length: int, n: int, device: torch.device) -> Layout:
    within_L = torch.arange(length, device=device)
    if side.rows is not None:
        starts_B = torch.arange(num_sequences, device=device) * side.rows
        lengths_B = torch.full_like(starts_B, side.rows)
        sequence_T = torch.arange(side.total, device=device) // max(side.rows, 1)
        start_T = sequence_T * side.rows
        valid_T = torch.ones_like(sequence_T, dtype=torch.bool)
    else:
        assert side.offsets is not None
        offsets = side.offsets.to(torch.int64)
        starts_B, lengths_B = offsets[:-1], offsets.diff()
        sequence_T = segment_ids(offsets, side.total)
        start_T = offsets[sequence_T.clamp(max=max(num_sequences, 0))]
        valid_T = sequence_T < num_sequences
    rows_BL = starts_B[:, None] + within_L
    outside_BL = within_L >= lengths_B[:, None]
    rows_BnL = rows_BL[:, None, :] * n + torch.arange(n, device=device)[:, None]
    dense_rows = rows_BnL.masked_fill(outside_BL[:, None, :], side.total * n).reshape(-1)
    position_T = torch.arange(side.total, device=device) - start_T
    valid_T = valid_T & (position_T < length)
    padded_Tn = (sequence_T[:, None] * n + torch.arange(n, device=device)) * length + position_T[:, None]
    packed_rows = padded_Tn.masked_fill(~valid_T[:, None], num_sequences * n * length).reshape(-1)
    return Layout(dense_rows, packed_rows, False)


def _device_plan(side_q: Side, side_k: Side, num_sequences: int, n_q: int, n_k: int, device: torch.device) -> Plan:
    length_q = side_q.max_length if side_q.rows is None else side_q.rows
    length_k = side_k.max_length if side_k.rows is None else side_k.rows

    def lengths(side: Side) -> Tensor:
        if side.rows is not None:
            return torch.full((num_sequences,), side.rows, device=device)
        assert side.offsets is not None
        return side.offsets.to(torch.int64).diff()

    group = Group(
        torch.arange(num_sequences, device=device),
        lengths(side_q),
        lengths(side_k),
        length_q,
        length_k,
        side_k.rows is not None,
        side_q is side_k,
    )
    return Plan(
        (group,),
        _device_layout(side_q, num_sequences, length_q, n_q, device),
        _device_layout(side_k, num_sequences, length_k, n_k, device),
    )


_SideKey = tuple[int, bytes | None, torch.dtype | None, int | None]


def _side_key(side: Side) -> _SideKey:
    if side.offsets is None:
        return side.total, None, None, side.rows
    return side.total, side.offsets.detach().contiguous().numpy().tobytes(), side.offsets.dtype, None


def _side_of(key: _SideKey) -> Side:
    total, raw, dtype, rows = key
    if raw is None:
        return Side(total, rows=rows)
    assert dtype is not None
    return Side(total, offsets=torch.frombuffer(bytearray(raw), dtype=dtype))


@lru_cache(maxsize=32)
def _cached_host_plan(key_q: _SideKey, key_k: _SideKey, num_sequences: int, n_q: int, n_k: int) -> Plan:
    # Keyed by the offsets' values, so layers of one step share a plan and a changed tensor can't find a stale one.
    with torch.inference_mode(False), torch.no_grad():
        return _host_plan(_side_of(key_q), _side_of(key_k), num_sequences, n_q, n_k)


def make_plan(
    side_q: Side, side_k: Side, num_sequences: int, num_heads_q: int, num_heads_k: int, device: torch.device
) -> Plan:
    """The plan of one attention call. Host offsets: groups by real length, cached. Device offsets: one group."""
    tensors = [s.offsets for s in (side_q, side_k) if s.offsets is not None]
    if device.type == "cpu" and all(is_host(t) for t in tensors):
        return _cached_host_plan(_side_key(side_q), _side_key(side_k), num_sequences, num_heads_q, num_heads_k)
    return _device_plan(side_q, side_k, num_sequences, num_heads_q, num_heads_k, device)
