"""cuBLAS products of planes: 128-wide scales on Hopper, native 32-wide E8M0 scales on Blackwell.

Layouts that `torch.nn.functional.scaled_mm` asks for (torch 2.11, aten/src/ATen/native/cuda/ScaledBlas.cpp), with
`A [M, K]` row-major and `B [K, N]` column-major, that is, `B^T [N, K]` row-major:

| recipe | scale of A | scale of B |
|---|---|---|
| 1x128 x 1x128 | fp32 `[M, K/128]`, strides `(1, M)` | fp32 `[N, K/128]`, strides `(1, N)` |
| 1x128 x 128x128 | as above | fp32 `[P, N/128]`, strides `(1, P)`, `P = K/128` rounded up to 4 |
| 1x32 x 1x32 | E8M0, `M` rounded up to 128, `K/32` to 4, in 32x4x4 tiles | likewise with N |

The second operand of a product may be square on Hopper, the first may not, so `dgrad` and `forward` have the weight
second. Rows are padded to a multiple of 16, contractions to one of 128, with zero codes.
"""

from __future__ import annotations

import torch
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.scales import scale_values
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType


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
    if plane.wide is not None and plane.wide.shape == (padded, plane.scales.shape[0]):
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


def scaled_mm(a: MXTensor, b: MXTensor, out_dtype: torch.dtype) -> Tensor:
    """`A @ B^T` of two planes through cuBLAS; see the module for the layouts."""
    m, n = a.padded_shape[0], b.padded_shape[0]
    k = a.padded_shape[1]
    if m == 0 or n == 0 or k == 0:
        return torch.zeros(m, n, dtype=out_dtype, device=a.codes.device)
    rows, columns, block = -(-m // 16) * 16, -(-n // 16) * 16, a.block
    contraction = -(-k // 128) * 128
    left = _pad(a.float8_codes, rows, contraction)
    right = _pad(b.float8_codes, columns, contraction)
    num_blocks = contraction // block
    if block == 32:
        scale_a = swizzle_32_4_4(_pad(_per_row(a, rows), rows, num_blocks, 127)).view(torch.float8_e8m0fnu)
        scale_b = swizzle_32_4_4(_pad(_per_row(b, columns), columns, num_blocks, 127)).view(torch.float8_e8m0fnu)
        recipe_a = recipe_b = ScalingType.BlockWise1x32
        swizzle = SwizzleType.SWIZZLE_32_4_4
    else:
        if a.dim is None:
            raise ValueError("a: a square plane cannot be the first operand on Hopper; quantise it along dim 1")
        scale_a, recipe_a = wide_scales(a, rows, num_blocks), ScalingType.BlockWise1x128
        if b.dim is None:
            scale_b, recipe_b = square_scales(b, num_blocks), ScalingType.BlockWise128x128
        else:
            scale_b, recipe_b = wide_scales(b, columns, num_blocks), ScalingType.BlockWise1x128
        swizzle = SwizzleType.NO_SWIZZLE
    out = functional.scaled_mm(
        left,
        right.t(),
        scale_a,
        recipe_a,
        scale_b,
        recipe_b,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=out_dtype,
    )
    return out if (rows, columns) == (m, n) else out[:m, :n]


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
