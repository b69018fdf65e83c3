"""`TileSchedule`: which tile of which sequence is computed when, built once per batch on the device.

Letters: B sequences, S = B + 2 bounds (rounded up to 4), C tiles at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gemworks.jagged._checks import check_offsets
from gemworks.jagged.schedule_op import bounds_width, num_places, parse_height, tile_schedule
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

        >>> import torch
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
        rows_q = -1
        if offsets_q is None:
            rows_q, total_q = total_q, b * total_q
        if rows_k is not None:
            offsets_k, total_k = None, b * rows_k
        elif offsets_k is None:
            offsets_k, total_k = offsets_q, total_q
        return cls(
            _build(offsets_q, offsets_k, b, total_q, total_q if total_k is None else total_k, rows_q, rows_k, heights),
            heights,
        )

    def check(self, name: str, *, num_sequences: int, total_q: int, total_k: int, device: torch.device | None) -> None:
        """Raise ValueError if the shapes show that this schedule is of another batch; its values are not read.

        Args:
            name: of the argument.
            num_sequences: B.
            total_q, total_k: rows of each side, of all sequences.
            device: of the offsets; None does not compare it.
        """
        totals = {"q": total_q, "k": total_k}
        expected = [bounds_width(num_sequences)]
        expected += [num_places(totals[h[0]], num_sequences, int(h[1:])) for h in self.heights.split()]
        if [x.shape[1] for x in self.tensors] != expected:
            raise ValueError(
                f"{name}: got tiles of another batch, expected {num_sequences} sequences with {total_q} rows of "
                f"q and {total_k} of k; build it with TileSchedule.build from the same offsets and totals"
            )
        if device is not None and self.bounds.device != device:
            raise ValueError(
                f"{name}: got tiles on {self.bounds.device}, expected {device}; build it from offsets there"
            )

    @property
    def bounds(self) -> Tensor:
        return self.tensors[0]

    def tiles(self, height: str) -> Tensor | None:
        """int32 [3, C] of one height such as "q128", or None."""
        names = self.heights.split()
        return self.tensors[1 + names.index(height)] if height in names else None

    def with_height(self, height: str, total: int) -> TileSchedule:
        """This schedule with one more height; `total` is the number of rows of that side."""
        side, _ = parse_height(height)
        # Rows past the end are the last sequence already, so the number of sequences is one less than there are.
        q, k = (self.bounds[0], self.bounds[3]) if side == "q" else (self.bounds[1], self.bounds[2])
        tiles = _build(q, k, q.shape[0] - 1, total, total, -1, None, height)[1]
        return TileSchedule((*self.tensors, tiles), f"{self.heights} {height}".strip())


def _build(
    offsets_q: Tensor | None,
    offsets_k: Tensor | None,
    num_sequences: int,
    total_q: int,
    total_k: int,
    rows_q: int,
    rows_k: int | None,
    heights: str,
) -> tuple[Tensor, ...]:
    """The bounds and the tiles of each height, as views of what one op writes."""
    flat = tile_schedule(
        offsets_q, offsets_k, num_sequences, total_q, total_k, rows_q, -1 if rows_k is None else rows_k, heights
    )
    width = bounds_width(num_sequences)
    tensors, begin = [flat[: 4 * width].view(4, width)], 4 * width
    for side, height in map(parse_height, heights.split()):
        places = num_places(total_q if side == "q" else total_k, num_sequences, height)
        tensors.append(flat[begin : begin + 3 * places].view(3, places))
        begin += 3 * places
    return tuple(tensors)


def _flatten(s: TileSchedule) -> tuple[list[Any], str]:
    return list(s.tensors), s.heights


def _unflatten(tensors: Any, heights: str) -> TileSchedule:
    out = object.__new__(TileSchedule)
    object.__setattr__(out, "tensors", tuple(tensors))
    object.__setattr__(out, "heights", heights)
    return out


pytree.register_pytree_node(TileSchedule, _flatten, _unflatten, serialized_type_name="gemworks.jagged.TileSchedule")
