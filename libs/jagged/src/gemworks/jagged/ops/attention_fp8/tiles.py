"""The arrangement that Hopper's FP8 attention reads: tiles of 128 rows of a sequence, one scale for each tile and head.

Letters: T packed rows, B sequences, N heads, H head width, C tiles.

Tile j of sequence b has the number `offsets[b] // 128 + b + j`, so a place is known without a sum over lengths, and
`T // 128 + B + 1` places suffice; rows past the last offset count as one more sequence. q and k keep their rows,
codes [T, N, H]; v's codes are transposed tile by tile, [C, N, H, 128], zeros past a sequence's end, with the keys of a
tile in the order `KEY_ORDER`. Scale bytes below 87 (2^-40) do not occur: keys whose values are all tiny still count in
the softmax's sum.
"""

from __future__ import annotations

import torch
from gemworks.jagged.ops.attention_fp8.reference import scale_values
from torch import Tensor

TILE = 128
# Four neighbours in memory are the keys that one thread of a Hopper matrix product holds side by side: position
# 16 j + 4 c + 2 h + i has key 16 j + 8 h + 2 c + i (PTX ISA, register fragments of wgmma m64nNk32).
KEY_ORDER = tuple(16 * (a // 16) + 8 * (a // 2 % 2) + 2 * (a // 4 % 4) + a % 2 for a in range(TILE))


def num_tiles(rows: int, num_sequences: int) -> int:
    """Places for the tiles of any `num_sequences` sequences of `rows` rows together.

    >>> num_tiles(300, 2)
    5
    """
    return rows // TILE + num_sequences + 1


def tiles_of_rows(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """int64 [T] twice: the number of each row's tile, and the row's place in it.

    >>> tiles_of_rows(torch.tensor([0, 130, 131]), 131)[0][[0, 129, 130]].tolist()
    [0, 1, 2]
    """
    row = torch.arange(rows, device=offsets.device)
    bounds = offsets.to(torch.int64)
    sample = torch.searchsorted(bounds, row, right=True) - 1
    begin = bounds[sample]
    inside = row - begin
    return begin // TILE + sample + inside // TILE, inside % TILE


def check_tiles(name: str, codes: Tensor, scales: Tensor, rows: int, num_sequences: int, *, transposed: bool) -> None:
    """Raise ValueError unless codes and scales are this arrangement of `rows` rows."""
    count = num_tiles(rows, num_sequences)
    heads = codes.shape[1] if codes.dim() >= 2 else -1
    expected = (count, heads, codes.shape[-2], TILE) if transposed else (rows, heads, codes.shape[-1])
    if codes.dtype not in (torch.uint8, torch.float8_e4m3fn) or tuple(codes.shape) != expected:
        form = f"[{count}, M, V, {TILE}] (transposed tiles)" if transposed else f"[{rows}, N, H]"
        raise ValueError(f"{name}: got {codes.dtype} {tuple(codes.shape)}, expected E4M3 codes {form}")
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu) or tuple(scales.shape) != (count, heads):
        raise ValueError(
            f"{name}_scales: got {scales.dtype} {tuple(scales.shape)}, expected E8M0 bytes {(count, heads)}: one for "
            f"each tile of {TILE} rows and head, {rows} // {TILE} + {num_sequences} + 1 tiles"
        )
    if scales.device != codes.device:
        raise ValueError(f"{name}_scales: on {scales.device}, expected beside the codes on {codes.device}")


def dequantize_tiles(
    codes: Tensor, scales: Tensor, offsets: Tensor, rows: int, dtype: torch.dtype, *, transposed: bool
) -> Tensor:
    """Values [T, N, H]; exact in bf16."""
    tile, place = tiles_of_rows(offsets, rows)
    codes = codes.view(torch.float8_e4m3fn)
    if transposed:
        count, heads, width, _ = codes.shape
        position = torch.empty(TILE, dtype=torch.int64)
        position[torch.tensor(KEY_ORDER)] = torch.arange(TILE)
        by_rows = codes.view(torch.uint8).permute(0, 3, 1, 2).reshape(count * TILE, heads, width)
        codes = by_rows[tile * TILE + position.to(place.device)[place]].view(torch.float8_e4m3fn)
    return (codes.to(torch.float32) * scale_values(scales)[tile][:, :, None]).to(dtype)
