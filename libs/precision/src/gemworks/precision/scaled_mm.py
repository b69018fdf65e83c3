"""cuBLAS products of planes: 128-wide scales on Hopper, native 32-wide E8M0 scales on Blackwell.

Layouts that `torch.nn.functional.scaled_mm` asks for (torch 2.11, aten/src/ATen/native/cuda/ScaledBlas.cpp), with
`A [M, K]` row-major and `B [K, N]` column-major, that is, `B^T [N, K]` row-major:

| recipe | scale of A | scale of B |
|---|---|---|
| 1x128 x 1x128 | fp32 `[M, K/128]`, strides `(1, M)` | fp32 `[N, K/128]`, strides `(1, N)` |
| 1x128 x 128x128 | as above | fp32 `[P, N/128]`, strides `(1, P)`, `P = K/128` rounded up to 4 |
| 1x32 x 1x32 | E8M0, `M` rounded up to 128, `K/32` to 4, in 32x4x4 tiles | likewise with N |

The second operand of a product may be square on Hopper, the first may not, so `dgrad` and `forward` have the weight
second. Rows are padded to a multiple of 16, contractions to one of 128, with zero codes; planes of the tile kernels
come padded (`MXTensor.whole`). `torch._scaled_mm_v2` is what `torch.nn.functional.scaled_mm` calls: its lists are made
once here, and it takes an output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from gemworks.precision.formats import element_spec
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.scales import scale_values
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

ROWS32, ROWS128 = [ScalingType.BlockWise1x32.value], [ScalingType.BlockWise1x128.value]
SQUARES128 = [ScalingType.BlockWise128x128.value]
PLAIN, SWIZZLED = [SwizzleType.NO_SWIZZLE.value], [SwizzleType.SWIZZLE_32_4_4.value]


def wide_scales(plane: MXTensor, num_rows: int, num_blocks: int) -> Tensor:
    """fp32 scales of a 1x128 plane, `[num_rows, num_blocks]` with the rows contiguous; padding is 1."""
    if plane.wide is not None and plane.wide.shape == (num_rows, num_blocks):
        return plane.wide
    if plane.scales.is_cuda:
        from gemworks.precision.triton_casts import triton_wide_scales

        return triton_wide_scales(plane.scales, num_rows, num_blocks)
    scales = _pad(plane.scales, num_rows, num_blocks, 127)
    return scale_values(scales.t().contiguous()).t()


def square_scales(plane: MXTensor, num_blocks: int) -> Tensor:
    """fp32 scales of a 128x128 plane `[N, K]`, as `[P, N/128]` with strides `(1, P)`, P = num_blocks rounded up to
    4."""
    padded = -(-num_blocks // 4) * 4
    if plane.wide is not None and plane.wide.shape == (padded, -(-plane.shape[0] // 128)):
        return plane.wide
    if plane.scales.is_cuda:
        from gemworks.precision.triton_casts import triton_wide_scales

        return triton_wide_scales(plane.scales.t(), padded, plane.scales.shape[0])
    return scale_values(_pad(plane.scales, plane.scales.shape[0], padded, 127).contiguous()).t()


def swizzle_32_4_4(scales: Tensor) -> Tensor:
    """E8M0 bytes `[R, C]` in the tile order of Blackwell's block-scaled product, flattened.

    Tiles of 128 x 4: the byte of (row, column) goes to `(row % 32) * 16 + (row // 32 % 4) * 4 + column % 4` of its
    tile;
    tiles follow one another along the columns, then the rows. Padding has byte 0.

    Source: cuBLAS documentation, "1D block scaling factors layout".
    """
    rows, columns = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
    tiles = _pad(scales, rows, columns, 0).reshape(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().flatten()


@dataclass(frozen=True)
class Operands:
    """A product as cuBLAS takes it: codes `[M, K]` and `[K, N]` (columns contiguous), scales, and what these are."""

    left: Tensor
    right: Tensor
    scale_a: Tensor
    scale_b: Tensor
    recipe_a: list[int]
    recipe_b: list[int]

    def multiply(self, out: Tensor) -> None:
        """`left @ right` into `out`."""
        swizzle = SWIZZLED if self.recipe_a is ROWS32 else PLAIN
        torch._scaled_mm_v2(  # pyright: ignore[reportPrivateImportUsage]
            self.left,
            self.right,
            [self.scale_a],
            self.recipe_a,
            swizzle,
            [self.scale_b],
            self.recipe_b,
            swizzle,
            None,
            out.dtype,
            out=out,
        )

    def piece(self, first: int, last: int) -> Operands:
        """Columns `first` to `last` of the contraction, multiples of 512, of a product by squares."""
        scale_a = self.scale_a[:, first // 128 : last // 128]
        # cuBLAS takes the distance of lines of squares from the length of the contraction.
        scale_b = self.scale_b[first // 128 : last // 128].t().clone(memory_format=torch.contiguous_format).t()
        left, right = self.left[:, first:last], self.right[first:last]
        return Operands(left, right, scale_a, scale_b, self.recipe_a, self.recipe_b)


def operands(a: MXTensor, b: MXTensor) -> Operands:
    """Two planes along their contraction, padded where they are not yet."""
    left, right = _codes(a), _codes(b)
    rows, columns = -(-left.shape[0] // 16) * 16, -(-right.shape[0] // 16) * 16
    contraction, block = -(-a.padded_shape[1] // 128) * 128, a.block
    left, right = _pad(left, rows, contraction), _pad(right, columns, contraction).t()
    num_blocks = contraction // block
    if block == 32:
        scale_a = swizzle_32_4_4(_pad(_per_row(a, rows), rows, num_blocks, 127)).view(torch.float8_e8m0fnu)
        scale_b = swizzle_32_4_4(_pad(_per_row(b, columns), columns, num_blocks, 127)).view(torch.float8_e8m0fnu)
        return Operands(left, right, scale_a, scale_b, ROWS32, ROWS32)
    if a.dim is None:
        raise ValueError("a: a square plane cannot be the first operand on Hopper; quantise it along dim 1")
    scale_a = wide_scales(a, rows, num_blocks)
    if b.dim is None:
        return Operands(left, right, scale_a, square_scales(b, num_blocks), ROWS128, SQUARES128)
    return Operands(left, right, scale_a, wide_scales(b, columns, num_blocks), ROWS128, ROWS128)


def scaled_mm(a: MXTensor, b: MXTensor, out_dtype: torch.dtype) -> Tensor:
    """`A @ B^T` of two planes through cuBLAS; see the module for the layouts."""
    m, n = a.padded_shape[0], b.padded_shape[0]
    k = a.padded_shape[1]
    if m == 0 or n == 0 or k == 0:
        return torch.zeros(m, n, dtype=out_dtype, device=a.codes.device)
    both = operands(a, b)
    rows, columns, contraction = both.left.shape[0], both.right.shape[1], both.left.shape[1]
    pieces = 1
    if both.recipe_b is SQUARES128:
        pieces = num_pieces(rows, columns, contraction, num_processors(both.left.device))
    if pieces > 1:
        out = multiply_pieces(both, pieces, out_dtype)
    else:
        out = torch.empty(rows, columns, dtype=out_dtype, device=both.left.device)
        both.multiply(out)
    if columns != n:
        return out[:m, :n]
    return out if rows == m else out.resize_(m, n)  # no view: autograd and FSDP2 mind views


def num_pieces(rows: int, columns: int, contraction: int, processors: int) -> int:
    """Into how many parts of the contraction, 1 to 8, a product by squares is split.

    cuBLAS gives it tiles of 128 x 128 and one processor to each, so a weight gradient with few outputs leaves
    processors idle for all of its long contraction: the parts run side by side. It takes processors in clusters of
    eight, which reach about 120 of 132; the time is that of the turns that all tiles of all parts need.

    >>> num_pieces(1024, 1024, 262144, 132), num_pieces(1024, 4096, 262144, 132), num_pieces(1024, 1024, 4096, 132)
    (8, 1, 1)
    """
    tiles = -(-rows // 128) * -(-columns // 128)
    together = processors * 10 // 11
    if tiles > together:
        return 1
    allowed = [n for n in (1, 2, 4, 8) if (contraction % (n * 512) == 0 and contraction // n >= 16384) or n == 1]
    return min(allowed, key=lambda n: (-(-n * tiles // together) / n, n))


@lru_cache(maxsize=64)
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache(maxsize=64)
def side_streams(device: torch.device, count: int) -> tuple[torch.cuda.Stream, ...]:
    """Streams beside the caller's own, made once."""
    return tuple(torch.cuda.Stream(device) for _ in range(count))


def multiply_pieces(both: Operands, pieces: int, out_dtype: torch.dtype) -> Tensor:
    """The product as the sum, in fp32 and in order, of products over equal parts of the contraction, on four streams.

    All memory is the caller's stream's, which waits for the others: nothing is freed under them.
    """
    contraction = both.left.shape[1]
    parts = torch.empty(pieces, both.left.shape[0], both.right.shape[1], dtype=torch.float32, device=both.left.device)
    step = contraction // pieces
    split = [both.piece(i * step, (i + 1) * step) for i in range(pieces)]
    current = torch.cuda.current_stream(both.left.device)
    streams = side_streams(both.left.device, min(pieces, 4) - 1)
    for stream in streams:
        stream.wait_stream(current)
    for i in range(pieces):
        with torch.cuda.stream((current, *streams)[i % 4]):
            split[i].multiply(parts[i])
    for stream in streams:
        current.wait_stream(stream)
    return parts.sum(0).to(out_dtype)


def _codes(plane: MXTensor) -> Tensor:
    """All codes of a plane, as torch's float8 dtype."""
    dtype = element_spec(plane.format).torch_dtype
    assert dtype is not None, "recipes refuse formats of 4 bits"
    return plane.tensors[0].view(dtype)


def _per_row(plane: MXTensor, num_rows: int) -> Tensor:
    """Scales with one row per row of codes: squares are repeated, for products that know only 1x32."""
    if plane.dim is not None:
        return plane.scales
    return plane.scales.repeat_interleave(plane.block, dim=0)[: plane.padded_shape[0]]


def _pad(x: Tensor, rows: int, columns: int, value: int = 0) -> Tensor:
    """`x` with contiguous rows, padded at the end to `[rows, columns]`."""
    if x.shape == (rows, columns):
        return x.contiguous()
    out = torch.full((rows, columns), value, dtype=torch.uint8, device=x.device)
    out[: x.shape[0], : x.shape[1]] = x.view(torch.uint8) if x.dtype != torch.uint8 else x
    return out.view(x.dtype)
