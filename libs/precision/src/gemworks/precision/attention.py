"""Planes of q, k and v for attention kernels that take codes and scales as plain tensors.

Shape letters: T tokens of all samples, H heads, D head width.

Two arrangements. **Squares** of 32 x 32 over (tokens, width): one plane serves a product and its transpose, so forward
and backward read the same codes; tokens are not padded, and a square may span the end of a sample. **Head-wide**: one
scale for each (token, head), constant along the contraction of `q k^T`, so that it leaves the inner loop; products of
the backward that contract over tokens need another plane.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.precision import quantization
from gemworks.precision.backends import choose
from gemworks.precision.casts import CastSpec, cast, device_of
from gemworks.precision.formats import Format
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.recipe import GemmKind
from gemworks.precision.scales import ScaleMode, scale_values
from torch import Tensor

HEAD_WIDTHS = (32, 64, 128, 256)


@dataclass(frozen=True)
class HeadPlane:
    """Codes and scale bytes of one of q, k, v.

    Attributes:
        codes: uint8 `[T, H, D]`; `codes.view(torch.float8_e4m3fn)` for kernels that want the type.
        scales: E8M0 bytes, `[ceil(T / 32), H, D / 32]` of squares, `[T, H]` head-wide.
        plane: the same as an `MXTensor` (`[T, H D]` of squares, `[T H, D]` head-wide).
    """

    codes: Tensor
    scales: Tensor
    plane: MXTensor

    @property
    def scale_values(self) -> Tensor:
        """fp32 `2^(byte - 127)`, NaN for 255, in the shape of `scales`."""
        return scale_values(self.scales)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values `[T, H, D]`."""
        return self.plane.dequantize(dtype).reshape(self.codes.shape)


def head_plane(
    x: Tensor,
    *,
    square: bool,
    format: str | Format = "e4m3",
    scale_mode: str | ScaleMode = "rceil",
    backend: str = "auto",
) -> HeadPlane:
    """Quantise q, k or v.

    Args:
        x: `[T, H, D]`, contiguous or a slice of a fused projection (made contiguous if heads are not adjacent).
        square: 32 x 32 squares over (T, D) of each head; otherwise one scale for each (T, H).
        format: `e4m3` or `e5m2`.
        scale_mode: see docs/numerics.md.
        backend: as in `choose`.

    Raises:
        ValueError: dims, head width, or a 4-bit format.

    >>> plane = head_plane(torch.ones(5, 2, 64), square=False)
    >>> tuple(plane.codes.shape), tuple(plane.scales.shape)
    ((5, 2, 64), (5, 2))
    """
    if x.dim() != 3 or x.shape[2] not in HEAD_WIDTHS:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected [tokens, heads, width] with width in {HEAD_WIDTHS}")
    spec = CastSpec(GemmKind.MXFP8, Format(format), ScaleMode(scale_mode))
    if spec.format is Format.E2M1:
        raise ValueError("format: got 'e2m1', expected 'e4m3' or 'e5m2': attention reads 8-bit codes")
    tokens, heads, width = x.shape
    if square:
        plane, _ = cast(x.reshape(tokens, heads * width), None, spec, backend)
        scales = plane.scales.view(-1, heads, width // 32)
        return HeadPlane(plane.codes.view(tokens, heads, width), scales, plane)
    flat = x.reshape(tokens * heads, width)
    chosen = choose("cast", spec.kind, (0, 0, 0), device_of(x), backend).backend
    if chosen == "triton" and (x.is_cuda or backend == "triton"):
        from gemworks.precision.triton_casts import triton_cast

        plane, _ = triton_cast(flat, 1, spec, block=width)
    else:
        plane = quantization.quantize(flat, 1, spec.format, spec.scale_mode, block=width)
    return HeadPlane(plane.codes.view(tokens, heads, width), plane.scales.view(tokens, heads), plane)
