"""`TileSchedule`: which tile of which sequence is computed when, built once per batch on the device.

Letters: B sequences, S = B + 2 bounds (rounded up to 4), C tiles at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gemworks.jagged._checks import check_offsets
from torch import Tensor
from torch.utils import _pytree as pytree

# What the kernels for sm_90 use; a kernel whose height is missing builds its own tiles.
DEFAULT_HEIGHTS = "q128 q192 k128"


@dataclass(frozen=True, eq=False)
class TileSchedule:
    """Tiles of one batch's attention, heaviest first; every layer and the backward share it.

    Kernels walk the tiles of a height in this order, forwards and backwards in turn (zigzag), so that each
    multiprocessor gets a like share; a sequence without rows has no tile. Rows past the last offset belong to one more
    sequence without keys, so they are written as zeros without another kernel.

    Attributes:
        tensors: bounds int32 [4, S] (q's and k's offsets, each with the end of the tensor and with the end of the
            last sequence appended), then one int32 [3, C] per height: sequence, first row in it, number of tiles.
        heights: names of the latter: "q128" are tiles of 128 query rows, "k64" of 64 key rows.
    """

    tensors: tuple[Tensor, ...]
    heights: str

    @classmethod
    def build(
        cls,
        offsets_q: Tensor | None,
        offsets_k: Tensor | None = None,
        *,
        total_q: int,
        total_k: int | None = None,
        rows_k: int | None = None,
        num_sequences: int | None = None,
        heights: str = DEFAULT_HEIGHTS,
    ) -> TileSchedule:
        """Build on the device of the offsets; nothing is read back.

        Args:
            offsets_q: int32 or int64 [B + 1]; None for a shared query (then `total_q` is R, its rows).
            offsets_k: the same for packed keys; None takes `offsets_q`, or `rows_k`.
            total_q, total_k: rows of q and of k; None takes `total_q`, or `rows_k` per sequence.
            rows_k: rows per sequence of a 4-D k.
            num_sequences: B; needed only when neither side has offsets.
            heights: which tile heights, as in the attribute.

        Raises:
            ValueError: offsets that are no row partition; a height that can't be read; nothing to take B from.

        >>> schedule = TileSchedule.build(torch.tensor([0, 200, 200, 210]), total_q=210, heights="q128")
        >>> sample, row, count = schedule.tiles("q128")
        >>> list(zip(sample.tolist(), row.tolist()))[: int(count[0])]
        [(0, 0), (0, 128), (2, 0)]
        """
        with_offsets = offsets_q if offsets_q is not None else offsets_k
        if with_offsets is None:
            raise ValueError("offsets_q, offsets_k: got neither, expected at least one; B comes from them")
        check_offsets(
            "offsets", with_offsets, total=total_q if offsets_q is not None else total_k or 0, max_length=None
        )
        b = with_offsets.shape[0] - 1 if num_sequences is None else num_sequences
        device = with_offsets.device
        steps = torch.arange(b + 1, device=device, dtype=torch.int32)
        if offsets_q is None:
            q, total_q = steps * total_q, b * total_q
        else:
            q = offsets_q.to(torch.int32)
        if rows_k is not None:
            k, total_k = steps * rows_k, b * rows_k
        elif offsets_k is None:
            k, total_k = q, total_q
        else:
            k, total_k = offsets_k.to(torch.int32), total_q if total_k is None else total_k
        bounds = torch.stack([_extend(q, total_q), _extend(q, None), _extend(k, total_k), _extend(k, None)])
        rows, streamed = bounds[::2, : b + 2].diff(), bounds[1::2, : b + 2].diff()  # [2, B + 1] of q and of k
        same = rows_k is None and offsets_k is None
        orders: dict[int, Tensor] = {}
        tensors = [bounds]
        for name in heights.split():
            side, height = _parse(name)
            mine, total = (0, total_q) if side == "q" else (1, total_k)
            key = 0 if same else mine
            if key not in orders:
                orders[key] = _order(streamed[1 - mine])
            tensors.append(_tiles(rows[mine], orders[key], total, height))
        return cls(tuple(tensors), heights)

    @property
    def bounds(self) -> Tensor:
        return self.tensors[0]

    def tiles(self, height: str) -> Tensor | None:
        """int32 [3, C] of one height such as "q128", or None."""
        names = self.heights.split()
        return self.tensors[1 + names.index(height)] if height in names else None

    def with_height(self, height: str, total: int) -> TileSchedule:
        """This schedule with one more height; `total` is the number of rows of that side."""
        side, rows = _parse(height)
        b = self.bounds.shape[1]
        mine, other = (0, 3) if side == "q" else (2, 1)
        tiles = _tiles(self.bounds[mine, :b].diff(), _order(self.bounds[other, :b].diff()), total, rows)
        return TileSchedule((*self.tensors, tiles), f"{self.heights} {height}".strip())


def _parse(name: str) -> tuple[str, int]:
    side, rows = name[:1], name[1:]
    if side not in ("q", "k") or not rows.isdigit() or int(rows) < 16:
        raise ValueError(f"heights: got {name!r}, expected names such as 'q128' or 'k64', separated by spaces")
    return side, int(rows)


def _extend(offsets: Tensor, total: int | None) -> Tensor:
    """[S]: offsets, then the end of the last sequence again, or of the tensor; padded with the last value."""
    size = (offsets.shape[0] + 1 + 3) // 4 * 4  # rows of 16 bytes, so that every batch looks alike to the compiler
    tail = offsets[-1:].expand(size - offsets.shape[0])
    return torch.cat([offsets, tail if total is None else torch.full_like(tail, total)])


def _order(other: Tensor) -> Tensor:
    """Sequences in falling order of what one of their tiles costs: the other side's length."""
    return torch.argsort(other, descending=True, stable=True)


def _tiles(rows: Tensor, order: Tensor, total: int, height: int) -> Tensor:
    """The sequences in that order, each cut into tiles."""
    num_sequences = rows.shape[0]
    capacity = (total // height + num_sequences + 3) // 4 * 4
    count = (rows[order] + (height - 1)) // height
    end = count.cumsum(0)
    tile = torch.arange(capacity, device=rows.device)
    at = torch.searchsorted(end, tile, right=True).clamp_(max=num_sequences - 1)
    row = (tile - (end - count)[at]) * height
    return torch.stack([order[at], row, end[-1:].expand(capacity)]).to(torch.int32)


def _flatten(s: TileSchedule) -> tuple[list[Any], str]:
    return list(s.tensors), s.heights


def _unflatten(tensors: Any, heights: str) -> TileSchedule:
    out = object.__new__(TileSchedule)
    object.__setattr__(out, "tensors", tuple(tensors))
    object.__setattr__(out, "heights", heights)
    return out


pytree.register_pytree_node(TileSchedule, _flatten, _unflatten, serialized_type_name="gemworks.jagged.TileSchedule")
