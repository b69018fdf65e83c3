"""`MXCodec`: MX quantisation as a codec of plain tensors, for whoever compresses, offloads or sends them.

The protocol, which asks for no import of this library: `encode(x) -> (payload, context)`,
`decode(payload, context) -> x`, `nbytes(shape, dtype)`. The payload is one flat uint8 tensor, codes then scales, so
that it can be copied, pinned, chunked or put on a network as it is; the context is small host data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from gemworks.precision.formats import Format, element_spec
from gemworks.precision.mxtensor import ROW_BLOCK_SIZES, MXTensor
from gemworks.precision.quantization import quantize
from gemworks.precision.scales import ScaleMode
from torch import Tensor


@dataclass(frozen=True)
class MXContext:
    """What `decode` needs beside the payload."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class MXCodec:
    """Encodes floating-point tensors of any shape in MX blocks over their flattened elements.

    Attributes:
        format: `e4m3` (8.25 bits an element), `e5m2`, or `e2m1` (4.25 bits).
        block: as in `quantize`. Scales round up (`rceil`).

    >>> codec = MXCodec()
    >>> payload, context = codec.encode(torch.ones(3, 5))
    >>> payload.numel() == codec.nbytes((3, 5)), codec.decode(payload, context).shape
    (True, torch.Size([3, 5]))
    """

    format: Format = Format.E4M3
    block: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", element_spec(self.format).format)
        if self.block not in ROW_BLOCK_SIZES:
            raise ValueError(f"block: got {self.block}, expected one of {ROW_BLOCK_SIZES}")

    def nbytes(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of the payload of a tensor of this shape, whatever its dtype."""
        num_elements = torch.Size(shape).numel()
        bits = element_spec(self.format).bits
        return (num_elements * bits + 7) // 8 + -(-num_elements // self.block)

    def encode(self, x: Tensor) -> tuple[Tensor, MXContext]:
        """Quantise; any shape, empty and odd sizes too. Non-finite blocks come back as NaN.

        Returns:
            uint8 `[nbytes]` on x's device, and the context.

        Raises:
            ValueError: x is not fp32, bf16 or fp16.
        """
        plane = self._quantize(x.reshape(-1))
        return torch.cat((plane.codes, plane.scales)), MXContext(tuple(x.shape), x.dtype)

    def decode(self, payload: Tensor, context: MXContext) -> Tensor:
        """The tensor back, in its own dtype and shape.

        Raises:
            ValueError: the payload's size is not that of the context's shape.
        """
        expected = self.nbytes(context.shape)
        if payload.dtype != torch.uint8 or payload.numel() != expected:
            raise ValueError(
                f"payload: got {payload.numel()} elements of {payload.dtype}, expected {expected} uint8 for shape "
                f"{context.shape}; decode with the codec and context that encoded it"
            )
        num_elements = torch.Size(context.shape).numel()
        num_codes = expected - -(-num_elements // self.block)
        codes, scales = payload.reshape(-1).split((num_codes, expected - num_codes))
        plane = MXTensor(codes, scales, (num_elements,), 0, self.block, self.format, ScaleMode.RCEIL)
        return self._dequantize(plane, context.dtype).reshape(context.shape)

    def _quantize(self, flat: Tensor) -> MXTensor:
        if flat.is_cuda and flat.numel():
            from gemworks.precision.casts import CastSpec
            from gemworks.precision.recipe import GemmKind
            from gemworks.precision.triton_casts import triton_cast

            spec = CastSpec(GemmKind.MXFP8, self.format)
            lines, _ = triton_cast(flat.view(-1, line_length(flat.numel(), self.block)), 1, spec, block=self.block)
            codes, scales = lines.codes.flatten(), lines.scales.flatten()
            return MXTensor(codes, scales, tuple(flat.shape), 0, self.block, self.format, ScaleMode.RCEIL)
        return quantize(flat, 0, self.format, block=self.block)

    def _dequantize(self, plane: MXTensor, dtype: torch.dtype) -> Tensor:
        if plane.codes.is_cuda and plane.codes.numel() and plane.format is not Format.E2M1:
            from gemworks.precision.triton_reading import triton_dequantize

            length = line_length(plane.shape[0], plane.block)
            shape = (plane.shape[0] // length, length)
            codes, scales = plane.codes.view(shape), plane.scales.view(shape[0], -1)
            lines = MXTensor(codes, scales, shape, 1, plane.block, plane.format, plane.scale_mode)
            return triton_dequantize(lines, dtype).flatten()
        return plane.dequantize(dtype)


@lru_cache(maxsize=4096)
def line_length(num_elements: int, block: int) -> int:
    """How a flat array is laid out in lines that hold whole blocks, as kernels of matrices want it: the same blocks.

    The longest line up to 4096 that divides the array, best into a multiple of 16 of them, which the fast casts take;
    one line where no length does.

    >>> line_length(2**20, 32), line_length(96 * 5, 32), line_length(1000, 32)
    (4096, 480, 1000)
    """
    fitting = [k * block for k in range(max(1, 4096 // block), 0, -1) if num_elements % (k * block) == 0]
    tiled = [length for length in fitting if num_elements // length % 16 == 0]
    return (tiled or [length for length in fitting if length >= 64] or fitting or [num_elements])[0]
