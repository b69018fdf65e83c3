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
from gemworks.jagged._checks import is_host
from torch import Tensor

GROUP_PAIRS = 1 << 18  # logits of one group on the host: large enough to amortise calls, small enough to stay in cache


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
class RowMap:
    """Which source row each target row copies.

    Attributes:
        rows: int64 [targets]; any valid row where there is a hole.
        holes: the target rows that are zero instead: their indices (host), a boolean [targets] (device), or None.
    """

    rows: Tensor
    holes: Tensor | None


@dataclass(frozen=True)
class Layout:
    """Where each packed row lies in the padded rows, per head, and back. The two maps are each other's inverse."""

    to_padded: RowMap
    to_packed: RowMap


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
    """Rows by a map; the adjoint is the gather by the inverse map (index_add is slower, unordered on CUDA)."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, rows: RowMap, inverse: RowMap) -> Tensor:
        ctx.maps = rows, inverse
        return _take(x_TH, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, inverse = ctx.maps
        return _gather(grads[0], inverse, rows), None, None


def _gather(x_TH: Tensor, rows: RowMap, inverse: RowMap) -> Tensor:
    return _Gather.apply(x_TH, rows, inverse)  # pyright: ignore[reportReturnType]


def _take(x_TH: Tensor, rows: RowMap) -> Tensor:
    if x_TH.shape[0] == 0:
        return x_TH.new_zeros(rows.rows.shape[0], x_TH.shape[1])
    out = x_TH.index_select(0, rows.rows)
    if rows.holes is None:
        return out
    if rows.holes.dtype == torch.bool:
        return out.masked_fill_(rows.holes[:, None], 0.0)
    return out.index_fill_(0, rows.holes, 0.0)


def pad_rows(x_TNH: Tensor, layout: Layout) -> Tensor:
    """Packed [T, N, H] to padded rows [P * N, H], a group's block being [b, N, L, H]."""
    return _gather(x_TNH.reshape(-1, x_TNH.shape[-1]), layout.to_padded, layout.to_packed)


def unpad_rows(x_PH: Tensor, layout: Layout, num_heads: int) -> Tensor:
    """Padded rows [P * N, H] back to packed [T, N, H]; rows outside every sequence are zero."""
    out = _gather(x_PH, layout.to_packed, layout.to_padded)
    return out.view(-1, num_heads, out.shape[-1])


def clear_holes(x_TNH: Tensor, layout: Layout) -> Tensor:
    """Zero the packed rows that no group reads, so that garbage in them can't turn a zero gradient into NaN."""
    holes = layout.to_packed.holes
    if holes is None:
        return x_TNH
    flat = x_TNH.reshape(-1, x_TNH.shape[-1])
    if holes.dtype == torch.bool:
        return flat.masked_fill(holes[:, None], 0.0).view(x_TNH.shape)
    return flat.index_fill(0, holes, 0.0).view(x_TNH.shape)


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
    # Not of offsets[1:]: the compiler of torch 2.11 searches a slice from the start of what it is a slice of (0330).
    return torch.searchsorted(offsets, rows, right=True) - 1


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


def _host_map(rows: Tensor, absent: int) -> RowMap:
    """From row numbers where `absent` (one past the last row) marks a hole."""
    holes = (rows == absent).nonzero()[:, 0]
    return RowMap(rows.clamp(max=max(absent - 1, 0)), holes if holes.numel() else None)


def _host_layout(
    side: Side, groups: list[Tensor], starts: Tensor, lengths: Tensor, padded: list[int], num_heads: int
) -> Layout:
    """Row maps of one side, at the grain of (row, head)."""
    absent = side.total * num_heads
    parts = [torch.empty(0, dtype=torch.int64)]
    for sequences_b, length in zip(groups, padded, strict=True):
        within_L = torch.arange(length)
        rows_bL = (starts[sequences_b][:, None] + within_L) * num_heads
        rows_bNL = rows_bL[:, None, :] + torch.arange(num_heads)[:, None]
        outside_bL = within_L >= lengths[sequences_b][:, None]
        parts.append(rows_bNL.masked_fill(outside_bL[:, None, :], absent).reshape(-1))
    to_padded = torch.cat(parts)
    num_padded = to_padded.shape[0]
    to_packed = torch.full((absent + 1,), num_padded)
    to_packed[to_padded] = torch.arange(num_padded)
    return Layout(_host_map(to_padded, absent), _host_map(to_packed[:-1], num_padded))


def _host_plan(side_q: Side, side_k: Side, num_sequences: int, n_q: int, n_k: int) -> Plan:
    lengths_q, lengths_k = _side_lengths(side_q, num_sequences), _side_lengths(side_k, num_sequences)
    members: dict[tuple[int, int], list[int]] = {}
    for i, (lq, lk) in enumerate(zip(lengths_q.tolist(), lengths_k.tolist(), strict=True)):
        if lq > 0 and lk > 0:  # otherwise there is no pair to compute: outputs and gradients are zero
            members.setdefault((_bucket(lq), _bucket(lk)), []).append(i)
    sequences = []
    for key in sorted(members):
        most = max(1, GROUP_PAIRS // (n_q * key[0] * key[1]))
        sequences += torch.tensor(members[key]).split(most)
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


def _device_layout(side: Side, num_sequences: int, length: int, num_heads: int, device: torch.device) -> Layout:
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
        start_T = offsets[sequence_T]
        valid_T = sequence_T < num_sequences
    rows_BL = starts_B[:, None] + within_L
    outside_BL = within_L >= lengths_B[:, None]
    heads_N = torch.arange(num_heads, device=device)
    rows_BNL = rows_BL[:, None, :] * num_heads + heads_N[:, None]
    absent = max(side.total * num_heads - 1, 0)
    to_padded = RowMap(rows_BNL.clamp(max=absent).reshape(-1), outside_BL[:, None, :].expand_as(rows_BNL).reshape(-1))
    # A row beyond `length` has no place: it is a hole, so too small a bound never spills into the next sequence.
    position_T = torch.arange(side.total, device=device) - start_T
    outside_T = ~valid_T | (position_T >= length)
    rows_TN = (sequence_T[:, None] * num_heads + heads_N) * length + position_T[:, None]
    last = max(num_sequences * num_heads * length - 1, 0)
    to_packed = RowMap(rows_TN.clamp(0, last).reshape(-1), outside_T[:, None].expand_as(rows_TN).reshape(-1))
    return Layout(to_padded, to_packed)


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


_SideKey = tuple[int, tuple[int, ...] | None, torch.dtype | None, int | None]


def _side_key(side: Side) -> _SideKey:
    if side.offsets is None:
        return side.total, None, None, side.rows
    return side.total, tuple(side.offsets.tolist()), side.offsets.dtype, None


def _side_of(key: _SideKey) -> Side:
    total, values, dtype, rows = key
    if values is None:
        return Side(total, rows=rows)
    assert dtype is not None
    return Side(total, offsets=torch.tensor(values, dtype=dtype))


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
