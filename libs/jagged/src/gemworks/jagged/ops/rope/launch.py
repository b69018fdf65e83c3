"""Launches of the norm-and-rotate kernels. Imported when a kernel first runs, never before."""

from __future__ import annotations

from typing import Any

import torch
from gemworks.jagged.jagged import next_power_of_two
from gemworks.jagged.ops.rope.kernel_rope import norm_rope_bwd_kernel, norm_rope_fwd_kernel
from torch import Tensor

NUM_WARPS = 4
MAX_HEADS = 4  # of one program: cosines and sines are read once for them


def rows_of_tile(pairs: int) -> int:
    """Eight values of each half per thread: 16-byte loads in bf16.

    >>> rows_of_tile(64), rows_of_tile(16)
    (16, 64)
    """
    return max(8 * 32 * NUM_WARPS // next_power_of_two(pairs), 1)


def _strided(x: Tensor) -> Tensor:
    """x, copied only if its columns are not neighbours."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _options(x: Tensor, eps: float | None, cos: Tensor | None, end: Tensor | None) -> tuple[tuple[int, int], Any]:
    """The grid and what is constant in both kernels."""
    rows, heads, width = x.shape
    pairs, tile, some = width // 2, rows_of_tile(width // 2), min(heads, MAX_HEADS)
    constants = {
        "N": heads, "J": pairs, "BLOCK_J": next_power_of_two(pairs), "ROWS": tile, "HEADS": some,
        "NORM": eps is not None, "TURN": cos is not None, "HAS_END": end is not None, "num_warps": NUM_WARPS,
    }  # fmt: skip
    return (-(-rows // tile), -(-heads // some)), constants


def norm_rope_forward(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, end: Tensor | None, eps: float | None
) -> Tensor:
    """[T, N, H], contiguous, in x's dtype."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        x = _strided(x)
        grid, constants = _options(x, eps, cos, end)
        tables = (x, x) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
        kernel: Any = norm_rope_fwd_kernel
        kernel[grid](
            x, *tables, x if end is None else end, y, x.shape[0], eps or 0.0, x.stride(0), x.stride(1), **constants
        )  # fmt: skip
    return y


def norm_rope_backward(
    dy: Tensor, x: Tensor, cos: Tensor | None, sin: Tensor | None, end: Tensor | None, eps: float | None
) -> Tensor:
    """The gradient of x, contiguous."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        dy, x = _strided(dy), _strided(x)
        grid, constants = _options(x, eps, cos, end)
        tables = (x, x) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
        strides = (dy.stride(0), dy.stride(1), x.stride(0), x.stride(1))
        kernel: Any = norm_rope_bwd_kernel
        kernel[grid](
            dy, x, *tables, x if end is None else end, dx, x.shape[0], eps or 0.0, *strides, **constants
        )  # fmt: skip
    return dx
