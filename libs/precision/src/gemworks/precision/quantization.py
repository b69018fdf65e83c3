"""The reference quantiser: plain torch on any device, and by definition right."""

from __future__ import annotations

import torch
from gemworks.precision.checks import SUPPORTED_DTYPES, check_dim, check_instance, check_tensor
from gemworks.precision.formats import FP32_INF_BITS, ElementSpec, Format, element_spec, encode, pack_e2m1
from gemworks.precision.hadamard import Hadamard, hadamard_transform
from gemworks.precision.mxtensor import (
    ROW_BLOCK_SIZES,
    SQUARE_BLOCK_SIZES,
    MXTensor,
    expand_blocks,
    scale_shape,
)
from gemworks.precision.rng import STREAM_COLUMNS, STREAM_ROWS, STREAM_SQUARE, Stochastic, random_words
from gemworks.precision.scales import ScaleMode, inverse_scale, magnitude_bits, scale_bytes, scale_mode_of
from torch import Tensor


def min_scale_byte(block: int) -> int:
    """0 for OCP blocks of 32; 1 for wider blocks, whose scales travel as fp32 and must be normal numbers."""
    return 0 if block == 32 else 1


def check_input(x: Tensor, dim: int | None, block: int, allowed: tuple[int, ...]) -> int | None:
    """Validate a quantiser's arguments; returns `dim` counted from the front."""
    check_tensor("x", x)
    if x.dtype not in SUPPORTED_DTYPES:
        raise ValueError(
            f"x: got dtype {x.dtype}, expected one of {', '.join(map(str, SUPPORTED_DTYPES))}; "
            "cast it first, e.g. x.float()"
        )
    if x.layout is not torch.strided:
        raise ValueError(f"x: got layout {x.layout}, expected torch.strided; use x.to_dense(), or a jagged x.values()")
    if block not in allowed:
        raise ValueError(f"block: got {block!r}, expected one of {allowed} (32 is OCP MX, 128 the Hopper form)")
    if dim is None:
        if x.dim() < 2:
            raise ValueError(f"x: got shape {tuple(x.shape)}, square blocks need at least 2 dims; use quantize(x)")
        return None
    return check_dim(x, dim)


def quantize_rows(
    rows: Tensor, spec: ElementSpec, mode: ScaleMode, block: int, random_bits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes (unpacked) and scale bytes of blocks along the last dim of `rows` `[..., n]`."""
    length = rows.shape[-1]
    num_blocks = -(-length // block)
    bits = torch.nn.functional.pad(magnitude_bits(rows), (0, num_blocks * block - length))
    amax = bits.unflatten(-1, (num_blocks, block)).amax(dim=-1)
    scales = scale_bytes(amax, spec, mode, min_scale_byte(block))
    codes = _encode_scaled(rows, amax, scales, len(rows.shape) - 1, block, spec, random_bits)
    return codes, scales


def _encode_scaled(
    x: Tensor, amax: Tensor, scales: Tensor, dim: int | None, block: int, spec: ElementSpec, random_bits: Tensor | None
) -> Tensor:
    shape = tuple(x.shape)
    factor = expand_blocks(inverse_scale(scales), shape, dim, block)
    # A power of two times an fp32 number: exact, unless it falls below 2^-126, far under every format's last bit.
    codes = encode(x.to(torch.float32) * factor, spec.format, random_bits)
    not_finite = expand_blocks(amax >= FP32_INF_BITS, shape, dim, block)
    return torch.where(not_finite, spec.nan_code, codes)


def quantize(
    x: Tensor,
    dim: int = -1,
    format: str | Format = Format.E4M3,
    scale_mode: str | ScaleMode = ScaleMode.RCEIL,
    *,
    block: int = 32,
    stochastic: Stochastic | None = None,
    hadamard: Hadamard | None = None,
) -> MXTensor:
    """Quantise in blocks along one dim: `code = round(x / 2^s)`, one E8M0 scale `2^s` per block.

    Args:
        x: `[...]`, fp32, bf16 or fp16, any strides, empty allowed. A last block shorter than `block` is right.
        dim: the dim that blocks run along (the contraction of the GEMM that will read it).
        format: `e4m3`, `e5m2`, or `e2m1` for storage at 4.25 bits an element.
        scale_mode: `rceil`, `floor`, `ceil`, `even`; see `gemworks.precision.scales`.
        block: 32 (OCP MX); 128 is Hopper's 1x128; 64 and 256 serve attention heads.
        stochastic: round stochastically from this seed and step; None rounds to nearest even.
        hadamard: transform groups along `dim` first; pads `dim` to a multiple of its size.

    Returns:
        The plane. Zeros stay zeros (an all-zero block has the smallest scale), values beyond the range saturate, a
        block that holds a NaN or an infinity becomes NaN throughout (scale byte 0xFF).

    Raises:
        ValueError: unsupported dtype, dim, format, scale mode or block.

    >>> x = torch.tensor([[0.0] * 31 + [3.0]])
    >>> mx = quantize(x)
    >>> mx.scales.tolist(), mx.codes[0, -1].item(), mx.dequantize()[0, -1].item()
    ([[120]], 124, 3.0)
    """
    spec, mode = element_spec(format), scale_mode_of(scale_mode)
    if dim is None:
        raise ValueError("dim: got None, expected the dim of the contraction; for squares use quantize_square(x)")
    front_dim = check_input(x, dim, block, ROW_BLOCK_SIZES)
    assert front_dim is not None
    check_instance("stochastic", stochastic, Stochastic, "Stochastic(seed=1, step=step)")
    check_instance("hadamard", hadamard, Hadamard, "Hadamard(32, seed=0)")
    shape = tuple(x.shape)
    if hadamard is not None:
        x = hadamard_transform(x, hadamard, front_dim)
    rows = x.movedim(front_dim, -1)
    random_bits = None
    if stochastic is not None:
        # A word's column is the position along `dim`, its row the flattened position over all other dims.
        stream = STREAM_ROWS if front_dim == len(shape) - 1 else STREAM_COLUMNS
        num_rows = rows.numel() // rows.shape[-1] if rows.shape[-1] else 0
        words = random_words(num_rows, rows.shape[-1], stochastic, stream, x.device)
        random_bits = words.reshape(rows.shape)
    codes, scales = quantize_rows(rows, spec, mode, block, random_bits)
    if spec.format is Format.E2M1:
        codes = pack_e2m1(codes)
    codes, scales = codes.contiguous().movedim(-1, front_dim), scales.contiguous().movedim(-1, front_dim)
    return MXTensor(codes, scales, shape, front_dim, block, spec.format, mode, hadamard)


def quantize_both(
    x: Tensor,
    format: str | Format = Format.E4M3,
    scale_mode: str | ScaleMode = ScaleMode.RCEIL,
    *,
    block: int = 32,
    stochastic: Stochastic | None = None,
) -> tuple[MXTensor, MXTensor]:
    """Quantise a matrix along its last dim and along its first: what forward and weight gradient need.

    One can't be derived from the other: both are rounded from `x`. Backends with a fused kernel read `x` once.

    Args:
        x: `[M, K]`.

    Returns:
        The plane along dim 1 and the plane along dim 0 (whose codes are contiguous along dim 0).

    Raises:
        ValueError: as `quantize`, or other than 2 dims.
    """
    check_tensor("x", x)
    if x.dim() != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected 2 dims; flatten the leading dims first")
    rows = quantize(x, 1, format, scale_mode, block=block, stochastic=stochastic)
    return rows, quantize(x, 0, format, scale_mode, block=block, stochastic=stochastic)


def quantize_square(
    x: Tensor,
    format: str | Format = Format.E4M3,
    scale_mode: str | ScaleMode = ScaleMode.RCEIL,
    *,
    block: int = 32,
    stochastic: Stochastic | None = None,
) -> MXTensor:
    """Quantise in squares of `block x block` over the last two dims: one plane serves a product and its transpose.

    Args:
        x: `[..., M, K]`.
        block: 32, or 128 for Hopper's 128x128 weights.

    Returns:
        The plane; scales `[..., ceil(M / block), ceil(K / block)]`.

    Raises:
        ValueError: as `quantize`, or fewer than 2 dims.
    """
    spec, mode = element_spec(format), scale_mode_of(scale_mode)
    check_input(x, None, block, SQUARE_BLOCK_SIZES)
    check_instance("stochastic", stochastic, Stochastic, "Stochastic(seed=1, step=step)")
    shape = tuple(x.shape)
    blocks = scale_shape(shape, None, block)
    pads = (0, blocks[-1] * block - shape[-1], 0, blocks[-2] * block - shape[-2])
    bits = torch.nn.functional.pad(magnitude_bits(x), pads)
    amax = bits.unflatten(-1, (blocks[-1], block)).unflatten(-3, (blocks[-2], block)).amax(dim=(-3, -1))
    scales = scale_bytes(amax, spec, mode, min_scale_byte(block))
    random_bits = None
    if stochastic is not None:
        num_rows = x.numel() // shape[-1] if shape[-1] else 0
        random_bits = random_words(num_rows, shape[-1], stochastic, STREAM_SQUARE, x.device).reshape(shape)
    codes = _encode_scaled(x, amax, scales, None, block, spec, random_bits)
    if spec.format is Format.E2M1:
        codes = pack_e2m1(codes)
    return MXTensor(codes.contiguous(), scales, shape, None, block, spec.format, mode)
