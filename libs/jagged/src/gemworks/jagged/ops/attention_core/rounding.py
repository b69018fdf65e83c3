"""MXFP8 along a contraction, as attention rounds P and dS where it is asked to: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32


def round_mx(x: Tensor, dim: int) -> Tensor:
    """`x` rounded to E4M3, each 32 along `dim` (counted from its begin) with a power of two of their own.

    The power is the smallest at which the largest of the 32 does not pass 448 (E8M0, precision's scale mode rceil):
    four significant bits, to nearest even; below 2^-14 of the largest, steps of 2^-17 of it or finer. Zeros may be
    added past the end without a change. What is not finite stays so, and says nothing of its neighbours.

    >>> round_mx(torch.tensor([1.0, 1.0625, 1.1875, -5e-6]), 0).tolist()
    [1.0, 1.0, 1.25, -7.62939453125e-06]
    """
    moved = x.movedim(dim, -1)
    length = moved.shape[-1]
    padded = torch.nn.functional.pad(moved, (0, -length % BLOCK)).unflatten(-1, (-1, BLOCK))
    top = padded.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(top.to(torch.float32))  # in [0.5, 1)
    shift = (exponent - 9 + (mantissa > 0.875).to(exponent.dtype)).clamp(min=-126)
    codes = torch.ldexp(padded.to(torch.float32), -shift).to(torch.float8_e4m3fn)
    rounded = torch.ldexp(codes.to(torch.float32), shift).flatten(-2)[..., :length]
    return torch.where(moved.isfinite(), rounded.to(x.dtype), moved).movedim(-1, dim)
