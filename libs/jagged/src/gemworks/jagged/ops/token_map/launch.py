"""Launches of the token map's kernels. Imported when a kernel first runs, never before.

Letters: B samples, N tokens in, K tokens out, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.jagged._triton.quick import quick
from gemworks.jagged.dispatch import num_multiprocessors
from gemworks.jagged.jagged import next_power_of_two
from gemworks.jagged.ops.token_map.kernel_token_map import token_map_bwd_kernel, token_map_fwd_kernel
from torch import Tensor


@dataclass(frozen=True)
class TokenMapConfig:
    """Warps per program, and samples in flight."""

    num_warps: int
    stages: int


_fwd_kernel = quick(token_map_fwd_kernel)
_bwd_kernel = quick(token_map_bwd_kernel)
BLOCK_D = 64
FORWARD_BLOCK_K = 128
FORWARD, BACKWARD = TokenMapConfig(num_warps=4, stages=3), TokenMapConfig(num_warps=8, stages=3)
FORWARD_PROGRAMS = 2  # on a multiprocessor: what its registers have room for
CPU_PROGRAMS = 3  # under the interpreter: several samples per program even for small tests


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _walkers(num_samples: int, num_tiles: int, per_sm: int, device: torch.device) -> int:
    """Programs of a tile, which share the samples out."""
    room = CPU_PROGRAMS if device.type != "cuda" else per_sm * num_multiprocessors(device) // num_tiles
    return max(min(room, num_samples), 1)


def token_map_forward(x: Tensor, weight: Tensor, base: Tensor) -> Tensor:
    """y [B, K, D]; the inputs are contiguous."""
    (num_samples, num_in, width), num_out = x.shape, weight.shape[0]
    y = x.new_empty(num_samples, num_out, width)
    if y.numel() == 0:
        return y
    block_k = min(max(next_power_of_two(num_out), 16), FORWARD_BLOCK_K)
    tiles = (_cdiv(width, BLOCK_D), _cdiv(num_out, block_k))
    _fwd_kernel[(*tiles, _walkers(num_samples, tiles[0] * tiles[1], FORWARD_PROGRAMS, x.device))](
        x, weight, base, y, num_samples, K=num_out, N=num_in, D=width, BLOCK_K=block_k,
        BLOCK_N=max(next_power_of_two(num_in), 16), BLOCK_D=BLOCK_D, STAGES=FORWARD.stages,
        num_warps=FORWARD.num_warps,
    )  # fmt: skip
    return y


def token_map_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx in x's dtype, dweight [K, N] and dbase [K, D] in float32; the inputs are contiguous.

    Bit-equal from run to run on one GPU: every program leaves its sums, and they are added in order.
    """
    (num_samples, num_in, width), num_out = x.shape, weight.shape[0]
    dx = torch.empty_like(x)
    tiles = _cdiv(width, BLOCK_D)
    walkers = _walkers(num_samples, tiles, 1, x.device)
    if dx.numel() == 0 or num_out == 0:
        return dx.zero_(), dy.new_zeros(num_out, num_in, dtype=torch.float32), dy.sum(0, dtype=torch.float32)
    dweight = torch.empty(walkers * tiles, num_out, num_in, dtype=torch.float32, device=x.device)
    dbase = torch.empty(walkers, num_out, width, dtype=torch.float32, device=x.device)
    _bwd_kernel[(tiles, walkers)](
        dy, x, weight, dx, dweight, dbase, num_samples, K=num_out, N=num_in, D=width,
        BLOCK_K=max(next_power_of_two(num_out), 16), BLOCK_N=max(next_power_of_two(num_in), 16), BLOCK_D=BLOCK_D,
        STAGES=BACKWARD.stages, num_warps=BACKWARD.num_warps,
    )  # fmt: skip
    return dx, dweight.sum(0), dbase.sum(0)
