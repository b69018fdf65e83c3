"""One fp32 scale for a whole tensor, from its own largest magnitude: "current scaling", and its reference quantiser.

    factor = round(largest value / amax)      1 where amax is 0; the largest fp32 where the quotient is beyond fp32;
                                              rounded down to a power of two if asked for
    code   = round(round(x * factor))         to fp32, then to the element, to nearest even both times, saturating
    scale  = round(1 / factor)                what the product multiplies its sum of codes by

A NaN or an infinity anywhere makes the scale and every code NaN. The rest is the arithmetic of Transformer Engine's
`Float8CurrentScaling` (2.11, common/recipe/recipe_common.cuh), bit by bit.

One scale serves both contractions, so codes along one dim are those along the other, transposed. What it costs:
elements under 2^-14.8 of the largest are subnormal in E4M3 and lose bits, elements under 2^-18.8 of it become zero; in
E5M2 these are 2^-29.8 and 2^-32.8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gemworks.precision.checks import SUPPORTED_DTYPES, check_dim, check_tensor
from gemworks.precision.formats import FP32_INF_BITS, ElementSpec, Format, decode, element_spec, encode
from gemworks.precision.scales import magnitude_bits
from torch import Tensor

_MAX_FP32 = torch.finfo(torch.float32).max
_EXPONENT_BITS = 0x7F800000


@dataclass(frozen=True, eq=False)
class TensorPlane:
    """A quantised matrix under one scale: element = decode(code) * scale.

    Attributes:
        codes: uint8 `[M, K]`, contiguous along `dim` in memory.
        scale: fp32 `[1]`.
        shape: `(M, K)`.
        dim: along which codes are contiguous: the contraction of the product that is to read them.
        format: `e4m3` or `e5m2`.
        whole: where the kernel left zero codes behind the matrix, all of them; `codes` is its first corner.
    """

    codes: Tensor
    scale: Tensor
    shape: tuple[int, int]
    dim: int
    format: Format
    whole: Tensor | None = None

    @classmethod
    def unchecked(cls, codes: Tensor, scale: Tensor, shape: tuple[int, int], dim: int, format: Format) -> TensorPlane:
        """From what `tensors` and `meta` gave; codes may be larger than the matrix."""
        if codes.shape == shape:
            return cls(codes, scale, shape, dim, format)
        return cls(codes[: shape[0], : shape[1]], scale, shape, dim, format, codes)

    @property
    def all_codes(self) -> Tensor:
        """`whole`, or `codes` where nothing is behind them."""
        return self.codes if self.whole is None else self.whole

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Codes (all of them) and the scale: the first arguments of `unchecked`."""
        return self.all_codes, self.scale

    @property
    def meta(self) -> tuple[Any, ...]:
        """Everything but the tensors, in the order of `unchecked`."""
        return self.shape, self.dim, self.format

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scale."""
        return self.codes.numel() + 4

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`decode(code) * scale`, rounded to fp32, then to `dtype`: no exact bf16, as a scale is no power of two."""
        return (decode(self.codes, self.format) * self.scale).to(dtype)

    def t(self) -> TensorPlane:
        """The transpose, without copying."""
        whole = None if self.whole is None else self.whole.t()
        return TensorPlane(self.codes.t(), self.scale, (self.shape[1], self.shape[0]), 1 - self.dim, self.format, whole)


def tensor_factor(amax_bits: Tensor, spec: ElementSpec, power_of_two: bool) -> Tensor:
    """fp32 factor of tensors whose largest magnitudes have these int32 bits; NaN for those that are not finite."""
    amax = amax_bits.view(torch.float32)
    # A number divided by a tensor is a reciprocal times it in torch: two roundings.
    quotient = torch.full_like(amax, spec.max_value) / amax
    factor = torch.where(amax_bits == 0, 1.0, quotient).clamp(max=_MAX_FP32)
    if power_of_two:
        factor = (factor.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return torch.where(amax_bits >= FP32_INF_BITS, float("nan"), factor)


def quantize_tensor(
    x: Tensor, dim: int = -1, format: str | Format = Format.E4M3, *, power_of_two: bool = False
) -> TensorPlane:
    """Quantise a matrix under one scale (see the module for the formula and what it loses).

    Args:
        x: `[M, K]`, fp32, bf16 or fp16, any strides, empty allowed.
        dim: along which the codes are to be contiguous, the contraction of the product that reads them; the codes are
            the same either way.
        format: `e4m3` or `e5m2`.
        power_of_two: round the factor down to a power of two.

    Raises:
        ValueError: unsupported dtype, dim or format, or other than 2 dims.

    >>> plane = quantize_tensor(torch.tensor([[1.0, -3.5]]))
    >>> plane.scale.item(), plane.codes.tolist(), plane.dequantize().tolist()
    (0.0078125, [[112, 254]], [[1.0, -3.5]])
    """
    spec = element_spec(format)
    check_tensor("x", x)
    if x.dtype not in SUPPORTED_DTYPES or x.dim() != 2:
        raise ValueError(
            f"x: got {tuple(x.shape)} {x.dtype}, expected 2 dims of one of {', '.join(map(str, SUPPORTED_DTYPES))}; "
            "flatten the leading dims, or cast it first, e.g. x.float()"
        )
    if spec.torch_dtype is None:
        raise ValueError(
            f"format: got {spec.format.value!r}, a storage format; one scale a tensor goes with 'e4m3' or 'e5m2'"
        )
    front = check_dim(x, dim)
    bits = magnitude_bits(x)
    amax = bits.amax().reshape(1) if x.numel() else bits.new_zeros(1)
    factor = tensor_factor(amax, spec, power_of_two)
    codes = torch.where(factor.isnan(), spec.nan_code, encode(x.to(torch.float32) * factor, spec.format))
    codes = codes if front == 1 else codes.t().contiguous().t()
    return TensorPlane(
        codes.contiguous() if front == 1 else codes, 1.0 / factor, (x.shape[0], x.shape[1]), front, spec.format
    )
