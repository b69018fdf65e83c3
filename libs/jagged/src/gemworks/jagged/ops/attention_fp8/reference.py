"""What FP8 planes of q, k and v mean: codes times scales, and which arrangements of scales the ops take.

Letters: T packed rows, N heads, H head width; R rows and W columns that share a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

SQUARE = 32


def scale_block(name: str, codes: Tensor, scales: Tensor) -> tuple[int, int]:
    """(R, W) of an arrangement: (1, H) for one scale a row and head, (32, 32) for squares over rows and width.

    Args:
        codes: uint8 or float8_e4m3fn [T, N, H].
        scales: uint8 [T, N] or [ceil(T / 32), N, H / 32]: the byte e of 2^(e - 127), 255 for NaN (E8M0).

    Raises:
        ValueError: other shapes or dtypes.
    """
    if codes.dtype not in (torch.uint8, torch.float8_e4m3fn) or codes.dim() != 3:
        raise ValueError(f"{name}: got {codes.dtype} {tuple(codes.shape)}, expected E4M3 codes [T, N, H]")
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu) or scales.device != codes.device:
        raise ValueError(f"{name}_scales: got {scales.dtype} on {scales.device}, expected E8M0 bytes beside codes")
    rows, heads, width = codes.shape
    if tuple(scales.shape) == (rows, heads):
        return 1, width
    if tuple(scales.shape) == (-(-rows // SQUARE), heads, width // SQUARE) and width % SQUARE == 0:
        return SQUARE, SQUARE
    raise ValueError(
        f"{name}_scales: got shape {tuple(scales.shape)}, expected {(rows, heads)} (one a row and head) or "
        f"{(-(-rows // SQUARE), heads, width // SQUARE)} (squares of 32 x 32) for codes {tuple(codes.shape)}"
    )


def scale_values(scales: Tensor) -> Tensor:
    """float32 2^(e - 127) of E8M0 bytes, NaN for 255.

    >>> scale_values(torch.tensor([127, 130], dtype=torch.uint8)).tolist()
    [1.0, 8.0]
    """
    byte = scales.view(torch.uint8).to(torch.int32)
    bits = torch.where(byte == 0, 0x400000, torch.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(torch.int32).view(torch.float32)


def dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [T, N, H]; exact in bf16 for scale bytes 3 to 246."""
    rows, _ = scale_block("codes", codes, scales)
    factor = scale_values(scales)
    if rows == 1:
        wide = factor[:, :, None]
    else:
        wide = factor.repeat_interleave(SQUARE, 0)[: codes.shape[0]].repeat_interleave(SQUARE, 2)
    return (codes.view(torch.float8_e4m3fn).to(torch.float32) * wide).to(dtype)
