"""Counter-based random words for stochastic rounding: Philox4x32-10, written out in integer operations.

Every element's word is a pure function of (seed, step, stream, row, column): a run repeats from its seed and step, the
result depends neither on the launch grid nor on the device, and the Triton kernels produce the same bits.

    counter = (column // 4, row, step, stream), key = (seed mod 2^32, seed // 2^32), word = column mod 4

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.precision.checks import check_integer, check_step, set_integer
from torch import Tensor

_MASK = 0xFFFFFFFF
_MUL_A, _MUL_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

STREAM_ROWS, STREAM_COLUMNS, STREAM_SQUARE, STREAM_SIGNS = 0, 1, 2, 3


@dataclass(frozen=True)
class Stochastic:
    """Asks for stochastic rounding. `seed` names the run, `step` the training step (and whatever else must differ:
    layers that share a step should use different seeds)."""

    seed: int
    step: int = 0

    def __post_init__(self) -> None:
        set_integer(self, "seed", check_integer("seed", self.seed, 2**63))
        set_integer(self, "step", check_step(self.step))


def _mul_hi_lo(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    # The int64 product wraps modulo 2^64; an arithmetic shift and a mask give its true high half all the same.
    product = a * b
    return (product >> 32) & _MASK, product & _MASK


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of a 128-bit counter under a 64-bit key.

    Args:
        c0, c1, c2, c3: int64 tensors, broadcastable, of words in [0, 2^32).
        seed: the key.

    Returns:
        Four int64 tensors of words in [0, 2^32).
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    for _ in range(_ROUNDS):
        hi_a, lo_a = _mul_hi_lo(c0, _MUL_A)
        hi_b, lo_b = _mul_hi_lo(c2, _MUL_B)
        c0, c1, c2, c3 = hi_b ^ c1 ^ k0, lo_b, hi_a ^ c3 ^ k1, lo_a
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0, c1, c2, c3


def random_words(num_rows: int, num_columns: int, stochastic: Stochastic, stream: int, device: torch.device) -> Tensor:
    """int64 words in [0, 2^32) for an array of `num_rows x num_columns`, as the module's formula has them."""
    row = torch.arange(num_rows, device=device, dtype=torch.int64)[:, None]
    quad = torch.arange((num_columns + 3) // 4, device=device, dtype=torch.int64)[None, :]
    # full, not tensor: a tensor from a host value waits for the device.
    step = torch.full((), stochastic.step, device=device, dtype=torch.int64)
    words = philox(quad, row, step, torch.full((), stream, device=device, dtype=torch.int64), stochastic.seed)
    return torch.stack(words, dim=-1).flatten(1)[:, :num_columns]
