"""Launch of the norm-and-rotate kernel. Imported when it first runs, never before."""

from __future__ import annotations

import torch
from gemworks.jagged._triton.quick import quick
from gemworks.jagged.jagged import next_power_of_two
from gemworks.jagged.ops.rope.kernel_rope import norm_rope_kernel
from torch import Tensor

_norm_rope_kernel = quick(norm_rope_kernel)
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


def norm_rope(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    end: Tensor | None,
    eps: float | None,
    *,
    dy: Tensor | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """`turn(norm(x))` [T, N, H], or with `dy` the gradient of x; in x's dtype.

    Args:
        out: where to write it, with neighbouring columns; None makes a contiguous tensor.
        scales: float32 [T, N], contiguous: filled with the norm's factors of the heads.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x = _strided(x)
    given = x if dy is None else _strided(dy)
    rows, heads, width = x.shape
    tables = (x, x) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    tile, some = rows_of_tile(width // 2), min(heads, MAX_HEADS)
    strides = [s for t in (x, given, out) for s in (t.stride(0), t.stride(1))]
    _norm_rope_kernel[-(-rows // tile), -(-heads // some)](
        x, given, *tables, x if end is None else end, out, scales, rows, eps or 0.0, *strides,
        N=heads, J=width // 2, BLOCK_J=next_power_of_two(width // 2), ROWS=tile, HEADS=some, NORM=eps is not None,
        TURN=cos is not None, HAS_END=end is not None, BACKWARD=dy is not None, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
