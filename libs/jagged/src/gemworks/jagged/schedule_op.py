"""The custom op behind `TileSchedule`: bounds and tiles of a batch as one tensor.

PyTorch on a host, one kernel on a GPU. Opaque, so that a compiled step holds one node.

Letters: B sequences, S columns of the bounds, C places for tiles.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from gemworks.jagged._custom_op import custom_op
from torch import Tensor

# Sequences of a program, sequences compared at a time, tiles written at a time, warps; the first small enough that
# thousands of sequences spread over the multiprocessors.
KERNEL_CONFIG = {"R": 8, "J": 1024, "M": 16, "num_warps": 4}


def parse_height(name: str) -> tuple[str, int]:
    """("q", 128) of "q128"."""
    side, rows = name[:1], name[1:]
    if side not in ("q", "k") or not rows.isdigit() or int(rows) < 16:
        raise ValueError(f"heights: got {name!r}, expected names such as 'q128' or 'k64', separated by spaces")
    return side, int(rows)


def bounds_width(num_sequences: int) -> int:
    """S: one bound more than B + 1 sequences have, in rows of 16 bytes, so that batches look alike to the compiler."""
    return (num_sequences + 5) // 4 * 4


def num_places(total: int, num_sequences: int, height: int) -> int:
    """C: as many tiles as B + 1 sequences of `total` rows can have."""
    return (total // height + num_sequences + 4) // 4 * 4


def tile_schedule_definition(
    offsets_q: Tensor | None,
    offsets_k: Tensor | None,
    num_sequences: int,
    total_q: int,
    total_k: int,
    rows_q: int,
    rows_k: int,
    heights: str,
) -> Tensor:
    """int32: bounds [4, S], then [3, C] per height, one after the other.

    Args:
        offsets_q, offsets_k: [B + 1], at least one; None where every sequence has `rows_q` or `rows_k` rows.
        total_q, total_k: rows of the two tensors, those past the last sequence included.
    """
    steps = torch.arange(num_sequences + 1, device=_given(offsets_q, offsets_k).device, dtype=torch.int32)
    q = steps * rows_q if offsets_q is None else offsets_q.to(torch.int32)
    k = steps * rows_k if offsets_k is None else offsets_k.to(torch.int32)
    bounds = torch.stack([_extend(q, total_q), _extend(q, None), _extend(k, total_k), _extend(k, None)])
    lengths = bounds[:, : num_sequences + 2].diff()  # of B + 1 sequences, the last one that of the rows past the end
    parts = [bounds.flatten()]
    for side, height in map(parse_height, heights.split()):
        mine, other, total = (0, 3, total_q) if side == "q" else (2, 1, total_k)
        order = torch.argsort(lengths[other], descending=True, stable=True)
        parts.append(_tiles(lengths[mine], order, num_places(total, num_sequences, height), height).flatten())
    return torch.cat(parts)


tile_schedule = custom_op("tile_schedule", tile_schedule_definition, device="cpu")


@tile_schedule.register_fake
def _empty(
    offsets_q: Tensor | None, offsets_k: Tensor | None, num_sequences: int, total_q: int, total_k: int, *rest: Any
) -> Tensor:
    size = 4 * bounds_width(num_sequences)
    for side, height in map(parse_height, rest[-1].split()):
        size += 3 * num_places(total_q if side == "q" else total_k, num_sequences, height)
    return _given(offsets_q, offsets_k).new_empty(size, dtype=torch.int32)


@tile_schedule.register_kernel("cuda")
def tile_schedule_kernel(offsets_q: Tensor | None, offsets_k: Tensor | None, *rest: Any) -> Tensor:
    """The same by one kernel; under Triton's interpreter also on a host."""
    num_sequences, *totals_and_rows, heights = rest
    given, out = _given(offsets_q, offsets_k), _empty(offsets_q, offsets_k, *rest)
    parsed = [parse_height(name) for name in heights.split()]
    width, kernel = bounds_width(num_sequences), schedule_kernels()[0]
    kernel[(-(-width // KERNEL_CONFIG["R"]), 1 + len(parsed))](
        given if offsets_q is None else offsets_q.contiguous(),
        given if offsets_k is None else offsets_k.contiguous(),
        out, num_sequences, *totals_and_rows, width,
        HEIGHTS=tuple(height for _, height in parsed), OF_KEYS=tuple(side == "k" for side, _ in parsed),
        Q_PACKED=offsets_q is not None, K_PACKED=offsets_k is not None, **KERNEL_CONFIG,
    )  # fmt: skip
    return out


def _given(offsets_q: Tensor | None, offsets_k: Tensor | None) -> Tensor:
    given = offsets_q if offsets_q is not None else offsets_k
    assert given is not None, "the caller has offsets of one side at least"
    return given


@cache
def schedule_kernels() -> tuple[Any, Any]:
    """Triton, imported where it runs only: the kernels of tiles and of blocks."""
    from gemworks.jagged._triton import kernel_schedule
    from gemworks.jagged._triton.quick import quick

    return quick(kernel_schedule.schedule_kernel), quick(kernel_schedule.block_schedule_kernel)


def _extend(offsets: Tensor, total: int | None) -> Tensor:
    """[S]: offsets, then the end of the last sequence again, or of the tensor; padded with the last value."""
    tail = offsets[-1:].expand(bounds_width(offsets.shape[0] - 1) - offsets.shape[0])
    return torch.cat([offsets, tail if total is None else torch.full_like(tail, total)])


def _tiles(rows: Tensor, order: Tensor, places: int, height: int) -> Tensor:
    """int32 [3, C]: the sequences in that order, each cut into tiles; 0 where no tile is."""
    count = (rows[order] + (height - 1)) // height
    end = count.cumsum(0)
    tile = torch.arange(places, device=rows.device)
    at = torch.searchsorted(end, tile, right=True).clamp_(max=rows.shape[0] - 1)
    used = tile < end[-1]
    row = (tile - (end - count)[at]) * height
    return torch.stack([order[at] * used, row * used, end[-1:].expand(places)]).to(torch.int32)
