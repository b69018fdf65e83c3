"""E8M0 block scales: four rules, all computed exactly from the bits of the block's largest magnitude.

With `amax = 1.m * 2^e` (m the 23-bit fp32 mantissa) and an element format whose largest value is `1.m_max * 2^emax`, the
scale is `2^s`, stored as the byte `s + 127` after clamping to [0, 254]:

| mode | s | how it fails |
|---|---|---|
| `floor` | `floor(log2 amax) - emax`, the example of the OCP specification | amax in `(1.m_max, 2) * 2^e` saturates: up to 12.5 % of the largest value is lost in E4M3, one block in five on normal data; training has diverged with it |
| `rceil` (default) | `ceil(log2(amax / max_value))`: `e - emax`, plus one when `m > m_max` | none for the range: the largest value never saturates. Blocks just above the threshold use half of the code range |
| `ceil` | `ceil(log2 amax) - emax`: `e - emax`, plus one when `m > 0` | never saturates, but wastes a binade for most blocks: twice the underflow threshold |
| `even` | `floor(log2 round(amax)) - emax`, amax first rounded to the element's mantissa width, halves up | amax above the largest value, up to where rounding it carries, saturates: up to 9.7 % of it is lost in E4M3 (from 1.75 to 1.9375 times 2^e, as the code between is a NaN's), 6.7 % in E5M2, 14.3 % in E2M1 |

A block that holds a NaN or an infinity has the byte 0xFF in every mode. An all-zero block has the smallest byte.

Sources: OCP MX v1.0 section 6.3 (floor); "Recipes for Pre-training LLMs with MXFP8", arXiv 2506.08027 (rceil); `ceil` and
`even` as torchao's mx_formats documents them.
"""  # noqa: E501

from __future__ import annotations

import torch
from gemworks.precision.checks import NamedEnum
from gemworks.precision.formats import (
    E8M0_BIAS,
    E8M0_MAX,
    E8M0_NAN,
    FP32_ABS_MASK,
    FP32_EXPONENT_BIAS,
    FP32_INF_BITS,
    FP32_MANTISSA_BITS,
    ElementSpec,
    float_bits,
)
from torch import Tensor


class ScaleMode(NamedEnum):
    """How a block's power-of-two scale follows from its largest magnitude; the module's table has the formulas."""

    FLOOR = "floor"
    RCEIL = "rceil"
    CEIL = "ceil"
    EVEN = "even"


def scale_mode_of(mode: str | ScaleMode) -> ScaleMode:
    """Look up a scale mode by name.

    Raises:
        ValueError: not one of `floor`, `rceil`, `ceil`, `even`.
    """
    try:
        return ScaleMode(mode)
    except ValueError:
        raise ValueError(
            f"scale_mode: got {mode!r}, expected one of {', '.join(repr(m.value) for m in ScaleMode)}; "
            "use 'rceil' to train"
        ) from None


def magnitude_bits(x: Tensor) -> Tensor:
    """int32 bits of |x| in fp32. As integers they order like the values, and NaN is above everything, so an integer
    maximum over a block both finds amax and propagates NaN and inf."""
    return float_bits(x) & FP32_ABS_MASK


def scale_bytes(amax_bits: Tensor, spec: ElementSpec, mode: str | ScaleMode, min_byte: int = 0) -> Tensor:
    """The E8M0 byte of each block.

    Args:
        amax_bits: int32, the maximum of `magnitude_bits` over each block; any shape.
        spec: element format.
        mode: scale mode.
        min_byte: smallest byte handed out (128-wide FP8 uses 1, so that its fp32 scales stay normal numbers).

    Returns:
        uint8 of the same shape; 0xFF where the block holds a NaN or an infinity.
    """
    mode = scale_mode_of(mode)
    mantissa_mask = (1 << FP32_MANTISSA_BITS) - 1
    bits = amax_bits
    if mode is ScaleMode.EVEN:
        bits = bits + (1 << (FP32_MANTISSA_BITS - spec.mantissa_bits - 1))
    exponent = (bits >> FP32_MANTISSA_BITS) - FP32_EXPONENT_BIAS - spec.emax
    mantissa = bits & mantissa_mask
    # fp32 subnormals (exponent field 0) need no normalisation: they are below every clamp.
    if mode is ScaleMode.RCEIL:
        exponent = exponent + (mantissa > spec.max_mantissa_fp32).to(torch.int32)
    elif mode is ScaleMode.CEIL:
        exponent = exponent + (mantissa > 0).to(torch.int32)
    byte = (exponent + E8M0_BIAS).clamp(min_byte, E8M0_MAX)
    return torch.where(amax_bits >= FP32_INF_BITS, E8M0_NAN, byte).to(torch.uint8)


def inverse_scale(scales: Tensor) -> Tensor:
    """fp32 `2^-(byte - 127)`, exact for bytes 0..253, built from exponent bits; 0 for 0xFF (codes are overridden).

    Byte 254 would need the subnormal 2^-127; no finite fp32 block reaches it, so the quantiser never asks.
    """
    field = (2 * FP32_EXPONENT_BIAS - scales.to(torch.int32)).clamp(min=0)
    return (field << FP32_MANTISSA_BITS).view(torch.float32)


def scale_values(scales: Tensor) -> Tensor:
    """fp32 `2^(byte - 127)` of each E8M0 byte, built from bits: exact, the subnormal 2^-127 included; 0xFF is NaN.

    >>> scale_values(torch.tensor([0, 127, 254, 255], dtype=torch.uint8)).tolist()
    [5.877471754111438e-39, 1.0, 1.7014118346046923e+38, nan]
    """
    byte = scales.to(torch.int32)
    bits = byte << FP32_MANTISSA_BITS
    bits = torch.where(byte == 0, 1 << (FP32_MANTISSA_BITS - 1), bits)
    return torch.where(byte == E8M0_NAN, 0x7FC00000, bits).to(torch.int32).view(torch.float32)
