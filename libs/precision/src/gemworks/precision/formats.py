"""Element formats of OCP Microscaling (MX) v1.0 and their exact encoding, in integer arithmetic.

Every function here works on bit patterns, so the answer depends neither on the version of torch (its own cast to E4M3
turns 465 into NaN up to 2.12 and saturates from 2.13 on) nor on the device.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3 (elements) and 5.4 (E8M0 scale).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.precision.checks import NamedEnum, check_floating, check_tensor
from gemworks.precision.constants import made_once
from torch import Tensor

FP32_EXPONENT_BIAS = 127
FP32_MANTISSA_BITS = 23
FP32_ABS_MASK = 0x7FFFFFFF
FP32_INF_BITS = 0x7F800000

E8M0_BIAS = 127
E8M0_NAN = 0xFF
"""The only E8M0 byte that is not a power of two; a block that carries it decodes to NaN everywhere."""
E8M0_MAX = 254


class Format(NamedEnum):
    """Name of an element format: `e4m3`, `e5m2` (8 bits) or `e2m1` (4 bits, two codes a byte)."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    E2M1 = "e2m1"


@dataclass(frozen=True)
class ElementSpec:
    """Constants of one element format.

    `emax` is the exponent of the largest finite value `max_value = (1 + max_mantissa / 2^mantissa_bits) * 2^emax`;
    `nan_code` is what an element of a non-finite block gets (E2M1 has no NaN, its scale byte alone carries it).
    """

    format: Format
    exponent_bits: int
    mantissa_bits: int
    bias: int
    emax: int
    max_value: float
    max_code: int
    nan_code: int
    torch_dtype: torch.dtype | None

    @property
    def bits(self) -> int:
        """Bits of one code, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_code(self) -> int:
        """The code's sign bit."""
        return 1 << (self.bits - 1)

    @property
    def max_mantissa_fp32(self) -> int:
        """The 23-bit fp32 mantissa of `max_value`, the threshold of the rceil scale rule."""
        return (self.max_code & ((1 << self.mantissa_bits) - 1)) << (FP32_MANTISSA_BITS - self.mantissa_bits)

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value, `2^(1 - bias - mantissa_bits)`."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)


SPECS: dict[Format, ElementSpec] = {
    Format.E4M3: ElementSpec(Format.E4M3, 4, 3, 7, 8, 448.0, 0x7E, 0x7F, torch.float8_e4m3fn),
    Format.E5M2: ElementSpec(Format.E5M2, 5, 2, 15, 15, 57344.0, 0x7B, 0x7F, torch.float8_e5m2),
    Format.E2M1: ElementSpec(Format.E2M1, 2, 1, 1, 2, 6.0, 0x7, 0x0, None),
}


def element_spec(format: str | Format) -> ElementSpec:
    """Look up an element format by name.

    Raises:
        ValueError: the name is not one of `e4m3`, `e5m2`, `e2m1`.

    >>> element_spec("e4m3").max_value
    448.0
    """
    try:
        return SPECS[Format(format)]
    except ValueError:
        raise ValueError(
            f"format: got {format!r}, expected one of {', '.join(repr(f.value) for f in Format)}; "
            "E4M3 is the training default for every tensor"
        ) from None


def float_bits(x: Tensor) -> Tensor:
    """The fp32 bit pattern of `x` as int32; float64 is rounded to fp32 first, bf16 and fp16 widen exactly."""
    return x.to(torch.float32).contiguous().view(torch.int32)


def encode(x: Tensor, format: str | Format, random_bits: Tensor | None = None) -> Tensor:
    """Round fp32 values to codes, saturating, by integer arithmetic on their bit patterns.

    Round to nearest, ties to even; or, with `random_bits`, stochastically: `floor(|x| / ulp + u)` where `u` is the low
    bits of the word divided by their range, so that the expectation is `x` (to 2^-30 of an ulp). Values beyond
    `max_value`, infinities included, saturate; NaN gives `nan_code` with a positive sign.

    Args:
        x: any shape, floating point; read as fp32.
        format: element format.
        random_bits: int64 of x's shape holding 32-bit words in [0, 2^32); None rounds to nearest even.

    Returns:
        uint8 codes of x's shape (E2M1: one code per byte, in the low four bits; `pack_e2m1` packs them).

    Raises:
        ValueError: an unknown format, x of no floating point, or random words of another dtype or shape than x.

    >>> encode(torch.tensor([1.0, -448.0, 465.0, 1e30, 2.0**-10]), "e4m3").tolist()
    [56, 254, 126, 126, 0]
    """
    spec = element_spec(format)
    check_floating("x", x)
    if random_bits is not None and (random_bits.dtype is not torch.int64 or random_bits.shape != x.shape):
        raise ValueError(
            f"random_bits: got {tuple(random_bits.shape)} {random_bits.dtype}, expected int64 of x's shape "
            f"{tuple(x.shape)}, 32 random bits in each; None rounds to nearest even"
        )
    bits = float_bits(x).to(torch.int64)
    magnitude = bits & FP32_ABS_MASK
    is_nan = magnitude > FP32_INF_BITS
    max_bits = ((spec.emax + FP32_EXPONENT_BIAS) << FP32_MANTISSA_BITS) | spec.max_mantissa_fp32
    magnitude = magnitude.clamp(max=max_bits)
    exponent_field = magnitude >> FP32_MANTISSA_BITS
    # An fp32 subnormal is so far below every format's smallest value that dropping its leading bit changes nothing
    # but the chance, under 2^-100, of rounding up stochastically: it counts as zero there and here.
    significand = torch.where(
        exponent_field > 0, (magnitude & ((1 << FP32_MANTISSA_BITS) - 1)) | (1 << FP32_MANTISSA_BITS), 0
    )
    target_exponent = exponent_field - FP32_EXPONENT_BIAS + spec.bias
    drop = FP32_MANTISSA_BITS - spec.mantissa_bits
    shift = drop + (1 - target_exponent).clamp(min=0)
    if random_bits is None:
        shift = shift.clamp(max=FP32_MANTISSA_BITS + 3)
        tie_to_even = (significand >> shift) & 1
        rounded = (significand + (1 << (shift - 1)) - 1 + tie_to_even) >> shift
    else:
        excess = (shift - 30).clamp(min=0, max=30)
        shift = shift.clamp(max=30)
        rounded = ((significand >> excess) + (random_bits & ((1 << shift) - 1))) >> shift
    code = ((target_exponent.clamp(min=1) - 1) << spec.mantissa_bits) + rounded
    code = code | torch.where(bits < 0, spec.sign_code, 0)
    return torch.where(is_nan, spec.nan_code, code).to(torch.uint8)


def decode(codes: Tensor, format: str | Format) -> Tensor:
    """The fp32 value of each code (E2M1: unpacked codes in the low four bits). Exact.

    Raises:
        ValueError: an unknown format, or codes that are not uint8.

    >>> decode(torch.tensor([0x01, 0x7E, 0x7F], dtype=torch.uint8), "e4m3").tolist()
    [0.001953125, 448.0, nan]
    """
    spec = element_spec(format)
    check_tensor("codes", codes)
    if codes.dtype is not torch.uint8:
        raise ValueError(
            f"codes: got dtype {codes.dtype}, expected torch.uint8; view float8 as codes.view(torch.uint8)"
        )
    return _decode_table(spec.format, codes.device)[codes.to(torch.int64)]


def _decode_table(format: Format, device: torch.device) -> Tensor:
    def make() -> Tensor:
        return torch.tensor([_decode_one(code, SPECS[format]) for code in range(256)], device=device)

    return made_once(format, device, make)


def _decode_one(code: int, spec: ElementSpec) -> float:
    magnitude = code & (spec.sign_code - 1)
    sign = -1.0 if code & spec.sign_code else 1.0
    if spec.format is not Format.E2M1 and magnitude > spec.max_code:
        return sign * float("inf") if spec.format is Format.E5M2 and magnitude == 0x7C else float("nan")
    exponent, mantissa = magnitude >> spec.mantissa_bits, magnitude & ((1 << spec.mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * spec.min_subnormal
    return sign * (1 + mantissa / (1 << spec.mantissa_bits)) * 2.0 ** (exponent - spec.bias)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack pairs of 4-bit codes along the last dim, even index in the low half; an odd length is padded with +0.

    >>> pack_e2m1(torch.tensor([1, 2, 3], dtype=torch.uint8)).tolist()
    [33, 3]
    """
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor, length: int) -> Tensor:
    """Inverse of `pack_e2m1`: uint8 codes with `length` entries along the last dim."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return codes[..., :length]
