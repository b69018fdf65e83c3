"""q, k and v in tiles of 128 rows of a sequence, one scale a tile and head: what FP8 attention on Hopper reads.

Shape letters: T tokens of all samples, B samples, H heads, D head width, C tiles.

One scale for a tile of q and one for a tile of k make one factor of a tile of scores, v's tile scale is a power of two
and joins the exponent, so nothing is multiplied score by score. Tile j of sample b has the number
`offsets[b] // 128 + b + j`; `C = T // 128 + B + 1` places suffice for any lengths. q and k keep their rows; v is stored
transposed tile by tile, zeros past a sample's end, with keys in the order in which the matrix unit's threads hold P.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.precision.attention import HEAD_WIDTHS
from gemworks.precision.backends import choose, interpreting
from gemworks.precision.casts import device_of
from gemworks.precision.checks import check_floating, check_same_device, check_tensor
from gemworks.precision.formats import E8M0_NAN, Format, element_spec, encode
from gemworks.precision.recipe import GemmKind
from gemworks.precision.scales import ScaleMode, inverse_scale, magnitude_bits, scale_bytes, scale_values
from torch import Tensor

TILE = 128
# Position 16 j + 4 c + 2 h + i of a transposed tile has key 16 j + 8 h + 2 c + i: the first matrix product leaves a
# thread the columns 8 h + 2 c + i of each 16, the second one takes four neighbours from it (PTX ISA, fragments of
# wgmma m64nNk32).
KEY_ORDER = tuple(16 * (a // 16) + 8 * (a // 2 % 2) + 2 * (a // 4 % 4) + a % 2 for a in range(TILE))
# The attention kernel divides the softmax's sum by v's scale: keys whose values are all tiny must still count in it.
MIN_BYTE = 87
SEARCH = 1024  # offsets that a kernel looks at together


@dataclass(frozen=True)
class HeadTiles:
    """Codes and scale bytes of one of q, k, v.

    Attributes:
        codes: uint8 `[T, H, D]`, or `[C, H, D, 128]` if transposed.
        scales: E8M0 bytes `[C, H]`, at least 87 (2^-40).
        offsets: int `[B + 1]`, as given.
        rows: T.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor
    rows: int

    @property
    def transposed(self) -> bool:
        """Are these v's tiles?"""
        return self.codes.dim() == 4

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values `[T, H, D]`."""
        tile, place = tiles_of_rows(self.offsets, self.rows)
        codes = self.codes
        if self.transposed:
            count, heads, width, _ = codes.shape
            codes = codes.permute(0, 3, 1, 2).reshape(count * TILE, heads, width)[tile * TILE + position_of_key(place)]
        values = codes.view(torch.float8_e4m3fn).to(torch.float32)
        return (values * scale_values(self.scales)[tile][:, :, None]).to(dtype)


def position_of_key(key: Tensor) -> Tensor:
    """Where a transposed tile has its keys, the inverse of `KEY_ORDER`: by arithmetic, as a table would have to be
    copied to the device, which waits for it.

    >>> position_of_key(torch.tensor(KEY_ORDER)).tolist() == list(range(TILE))
    True
    """
    return key // 16 * 16 + key // 2 % 4 * 4 + key // 8 % 2 * 2 + key % 2


def num_tiles(rows: int, num_samples: int) -> int:
    """Places for the tiles of any `num_samples` samples of `rows` rows together: known without reading offsets."""
    return rows // TILE + num_samples + 1


def tiles_of_rows(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """int64 `[T]` twice: the number of each row's tile, and the row's place in it. Rows past the last offset count as
    one more sample.

    >>> tiles_of_rows(torch.tensor([0, 130, 131]), 131)[0][[0, 129, 130]].tolist()
    [0, 1, 2]
    """
    row = torch.arange(rows, device=offsets.device)
    bounds = offsets.to(torch.int64)
    sample = torch.searchsorted(bounds, row, right=True) - 1
    begin = bounds[sample]
    inside = row - begin
    return begin // TILE + sample + inside // TILE, inside % TILE


def head_tiles(
    x: Tensor,
    offsets: Tensor,
    *,
    transposed: bool = False,
    backend: str = "auto",
) -> HeadTiles:
    """Quantise q, k (`transposed=False`) or v (`True`) to E4M3 in one read.

    Args:
        x: `[T, H, D]`, fp32, bf16 or fp16, D contiguous (a slice of a fused projection is fine).
        offsets: int32 or int64 `[B + 1]` of the samples, on x's device; never read on the host.
        backend: `auto`, `reference` or `triton`.

    Raises:
        ValueError: dims, head width, offsets.

    >>> tiles = head_tiles(torch.ones(200, 2, 64), torch.tensor([0, 130, 200]), transposed=True)
    >>> tuple(tiles.codes.shape), tuple(tiles.scales.shape), tiles.dequantize().eq(1).all().item()
    ((4, 2, 64, 128), (4, 2), True)
    """
    check_floating("x", x)
    check_tensor("offsets", offsets)
    if x.dim() != 3 or x.shape[2] not in HEAD_WIDTHS:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected [tokens, heads, width] with width in {HEAD_WIDTHS}")
    _check_offsets(x, offsets)
    chosen = choose("cast", GemmKind.MXFP8, (0, 0, 0), device_of(x), backend).backend
    if chosen == "triton" and (x.is_cuda or backend == "triton"):
        return _on_device(x, offsets, transposed)
    return _reference(x, offsets, transposed)


def _reference(x: Tensor, offsets: Tensor, transposed: bool) -> HeadTiles:
    rows, heads, width = x.shape
    spec = element_spec(Format.E4M3)
    tile, place = tiles_of_rows(offsets, rows)
    count = num_tiles(rows, offsets.shape[0] - 1)
    amax = torch.zeros(count, heads, dtype=torch.int32, device=x.device)
    amax.scatter_reduce_(0, tile[:, None].expand(rows, heads), magnitude_bits(x).amax(2), "amax")
    scales = scale_bytes(amax, spec, ScaleMode.RCEIL, MIN_BYTE)
    codes = encode(x.to(torch.float32) * inverse_scale(scales)[tile][:, :, None], spec.format)
    codes = torch.where((scales == E8M0_NAN)[tile][:, :, None], spec.nan_code, codes)
    if transposed:
        by_place = torch.zeros(count, TILE, heads, width, dtype=torch.uint8, device=x.device)
        by_place[tile, position_of_key(place)] = codes
        codes = by_place.permute(0, 2, 3, 1)
    return HeadTiles(codes.contiguous(), scales, offsets, rows)


def _check_offsets(x: Tensor, offsets: Tensor) -> None:
    if offsets.dim() != 1 or offsets.shape[0] < 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"offsets: got {offsets.dtype} {tuple(offsets.shape)}, expected int32 or int64 [samples + 1]")
    check_same_device("offsets", offsets, "x", x)


def _empty(x: Tensor, offsets: Tensor, transposed: bool) -> HeadTiles:
    rows, heads, width = x.shape
    count = num_tiles(rows, offsets.shape[0] - 1)
    shape = (count, heads, width, TILE) if transposed else (rows, heads, width)
    codes = torch.empty(shape, dtype=torch.uint8, device=x.device)
    return HeadTiles(codes, torch.empty(count, heads, dtype=torch.uint8, device=x.device), offsets, rows)


def _constants() -> dict[str, int | bool]:
    from gemworks.precision.kernel_common import FORMATS, MODES

    return {
        "SEARCH": SEARCH,
        "MIN_BYTE": MIN_BYTE,
        "FORMAT": FORMATS["e4m3"],
        "MODE": MODES[ScaleMode.RCEIL.value],
        "HARDWARE": not interpreting(),
    }


def _on_device(x: Tensor, offsets: Tensor, transposed: bool) -> HeadTiles:
    from gemworks.precision.kernel_head_tile import head_tile_kernel
    from gemworks.precision.launch import launch

    rows, heads, width = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    out = _empty(x, offsets, transposed)
    launch(
        head_tile_kernel,
        (out.scales.numel(), 1, 1),
        (x, offsets.contiguous(), out.codes, out.scales, rows, offsets.shape[0] - 1, x.stride(0), x.stride(1)),
        {"HEADS": heads, "H": width, "TRANSPOSED": transposed, **_constants()},
        {"num_warps": 8, "maxnreg": 80},  # three programs on a multiprocessor
    )
    return out
