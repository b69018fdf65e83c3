"""cuBLAS products of planes: 128-wide scales on Hopper, native 32-wide E8M0 scales on Blackwell.

Layouts that `torch.nn.functional.scaled_mm` asks for (torch 2.11, aten/src/ATen/native/cuda/ScaledBlas.cpp), with
`A [M, K]` row-major and `B [K, N]` column-major, that is, `B^T [N, K]` row-major:

| recipe | scale of A | scale of B |
|---|---|---|
| 1x128 x 1x128 | fp32 `[M, K/128]`, strides `(1, M)` | fp32 `[N, K/128]`, strides `(1, N)` |
| 1x128 x 128x128 | as above | fp32 `[P, N/128]`, strides `(1, P)`, `P = K/128` rounded up to 4 |
| one a tensor | fp32 `[1]` | fp32 `[1]` |
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
from gemworks.precision.tensor_scaling import TensorPlane
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

ROWS32, ROWS128 = [ScalingType.BlockWise1x32.value], [ScalingType.BlockWise1x128.value]
SQUARES128 = [ScalingType.BlockWise128x128.value]
TENSOR = [ScalingType.TensorWise.value]
# At most so many parts of a contraction, and what a turn costs beside its steps of 512 (`num_pieces`).
MAX_PIECES, PIECE_OVERHEAD, MAX_STREAMS = 16, 3, 4
PLAIN, SWIZZLED = [SwizzleType.NO_SWIZZLE.value], [SwizzleType.SWIZZLE_32_4_4.value]


def wide_scales(plane: MXTensor, num_rows: int, num_blocks: int) -> Tensor:
    """fp32 scales of a 1x128 plane, `[num_rows, num_blocks]` with the rows contiguous; padding is 1."""
    if plane.wide is not None and plane.wide.shape == (num_rows, num_blocks):
        return plane.wide
    if plane.scales.is_cuda:
        from gemworks.precision.triton_reading import triton_wide_scales

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
        from gemworks.precision.triton_reading import triton_wide_scales

        return triton_wide_scales(plane.scales.t(), padded, plane.scales.shape[0])
    return scale_values(_pad(plane.scales, plane.scales.shape[0], padded, 127).contiguous()).t()


def swizzle_32_4_4(scales: Tensor) -> Tensor:
    """E8M0 bytes `[R, C]` in the tile order of Blackwell's block-scaled product, flattened.

    Tiles of 128 x 4: the byte of (row, column) goes to `(row % 32) * 16 + (row // 32 % 4) * 4 + column % 4` of its
    tile; tiles follow one another along the columns, then the rows. Padding has byte 0.

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

    def pieces(self, number: int) -> list[Operands]:
        """A product by squares as that many over parts of the contraction, of two lengths (`cuts`); the last ends where
        the contraction does, at any multiple of 128."""
        parts: list[Operands] = []
        lines, contraction = self.scale_b.t(), self.left.shape[1]
        for first, last, length in cuts(contraction, number):
            # cuBLAS takes the distance of lines of squares from the length of the contraction.
            blocks = lines[:, first // 128 : last // 128].unflatten(1, (-1, length // 128))
            squares = blocks.transpose(0, 1).clone(memory_format=torch.contiguous_format).unbind()
            for start, square in zip(range(first, last, length), squares, strict=True):
                stop = min(start + length, contraction)
                scale_a = self.scale_a[:, start // 128 : stop // 128]
                left, right = self.left[:, start:stop], self.right[start:stop]
                parts.append(Operands(left, right, scale_a, square.t(), self.recipe_a, self.recipe_b))
        return parts


def cuts(contraction: int, number: int) -> list[tuple[int, int, int]]:
    """A contraction as `number` parts that differ by 512 at most: (first, last, length of a part). The last is counted
    up to a multiple of 512, as far as scales of squares are padded.

    >>> cuts(4096, 3), cuts(4096, 2)
    ([(0, 3072, 1536), (3072, 4096, 1024)], [(0, 4096, 2048)])
    >>> cuts(3712, 3)
    [(0, 3072, 1536), (3072, 4096, 1024)]
    """
    steps = -(-contraction // 512)
    short, longer = divmod(steps, number)
    middle = longer * (short + 1) * 512
    spans = [(0, middle, 512 * (short + 1)), (middle, steps * 512, 512 * short)]
    return [span for span in spans if span[0] < span[1]]


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


def scaled_mm(a: MXTensor, b: MXTensor, out_dtype: torch.dtype, in_parts: bool = False) -> Tensor:
    """`A @ B^T` of two planes through cuBLAS; see the module for the layouts. `in_parts`: as in `gemm`."""
    m, n = a.padded_shape[0], b.padded_shape[0]
    k = a.padded_shape[1]
    if m == 0 or n == 0 or k == 0:
        return torch.zeros(m, n, dtype=out_dtype, device=a.codes.device)
    both = operands(a, b)
    rows, columns, contraction = both.left.shape[0], both.right.shape[1], both.left.shape[1]
    pieces = 1
    if in_parts and both.recipe_b is SQUARES128:
        pieces = num_pieces(rows, columns, contraction, num_processors(both.left.device))
    if pieces > 1:
        out = multiply_pieces(both, pieces, out_dtype)
    else:
        out = torch.empty(rows, columns, dtype=out_dtype, device=both.left.device)
        both.multiply(out)
    if columns != n:
        return out[:m, :n]
    return out if rows == m else out.resize_(m, n)  # no view: autograd and FSDP2 mind views


def tensor_mm(a: TensorPlane, b: TensorPlane, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """`A @ B^T` of planes with one scale each; `fast` as in `gemm`. All sizes are padded to 16 with zero codes."""
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return torch.zeros(m, n, dtype=out_dtype, device=a.codes.device)
    left, right, contraction = _codes(a), _codes(b), -(-k // 16) * 16
    rows, columns = -(-left.shape[0] // 16) * 16, -(-n // 16) * 16
    left, right = _fitted(left, rows, contraction), _fitted(right, columns, contraction)
    out = multiply_tensors(left, right.t(), a.scale, b.scale, out_dtype, fast)
    if right.shape[0] != n:
        return out[:m, :n]
    return out if out.shape[0] == m else out.resize_(m, n)  # no view: autograd and FSDP2 mind views


def _fitted(codes: Tensor, rows: int, contraction: int) -> Tensor:
    """Codes `[rows, contraction]`: cut where there are more, filled up where there are fewer, the contraction
    contiguous."""
    codes = codes[:rows, :contraction]
    if codes.shape != (rows, contraction):
        return _pad(codes, rows, contraction)
    return codes if codes.stride(1) == 1 else codes.contiguous()


def multiply_tensors(
    left: Tensor, right: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    """`left @ right` by cuBLAS, under one scale each."""
    return torch._scaled_mm_v2(  # pyright: ignore[reportPrivateImportUsage]
        left, right, [scale_a], TENSOR, PLAIN, [scale_b], TENSOR, PLAIN, None, out_dtype, [], fast
    )


def num_pieces(rows: int, columns: int, contraction: int, processors: int) -> int:
    """Into how many parts of the contraction a product by squares is split.

    cuBLAS gives it tiles of 128 x 128 and one processor to each, so a weight gradient with few outputs leaves
    processors idle for all of its long contraction: the parts run side by side. It takes processors in clusters of
    eight, which reach about 120 of 132; the time is that of the turns that all tiles of all parts need, each of which
    begins and ends at the price of PIECE_OVERHEAD steps of 512.

    >>> num_pieces(1024, 1024, 262144, 132), num_pieces(1536, 512, 262144, 132), num_pieces(1024, 1024, 4096, 132)
    (9, 5, 1)
    """
    tiles = -(-rows // 128) * -(-columns // 128)
    together = processors * 10 // 11
    steps = contraction // 512
    # Parts are summed in fp32: many of a large gradient would be traffic.
    most = min(MAX_PIECES, steps // 32, 2**25 // (rows * columns))
    # A last part that is no multiple of 512 is laid out (`Operands.pieces`) but no GPU has run it yet.
    if contraction % 512 or most < 2 or tiles > together:
        return 1

    def cost(number: int) -> int:
        return -(-number * tiles // together) * (-(-steps // number) + PIECE_OVERHEAD)

    return min(range(1, most + 1), key=lambda number: (cost(number), number))


@lru_cache(maxsize=64)
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache(maxsize=64)
def side_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Streams beside the caller's own, made once: cuBLAS keeps a workspace for each."""
    return tuple(torch.cuda.Stream(device) for _ in range(MAX_STREAMS - 1))


def multiply_pieces(both: Operands, pieces: int, out_dtype: torch.dtype) -> Tensor:
    """The product as the sum, in fp32 and in order, of products over parts of the contraction, on MAX_STREAMS
    streams.

    All memory is the caller's stream's, which waits for the others: nothing is freed under them.
    """
    parts = torch.empty(pieces, both.left.shape[0], both.right.shape[1], dtype=torch.float32, device=both.left.device)
    split = both.pieces(pieces)
    current = torch.cuda.current_stream(both.left.device)
    streams = side_streams(both.left.device)[: pieces - 1]
    for stream in streams:
        stream.wait_stream(current)
    for i in range(pieces):
        with torch.cuda.stream((current, *streams)[i % MAX_STREAMS]):
            split[i].multiply(parts[i])
    for stream in streams:
        current.wait_stream(stream)
    return parts.sum(0).to(out_dtype)


def _codes(plane: MXTensor | TensorPlane) -> Tensor:
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
