"""Random Hadamard transform along a contraction: it spreads outliers over a group before quantisation.

With `S` a diagonal of random signs and `H` the Hadamard matrix of size n, both operands of a product are replaced by
`(a S H / sqrt(n))` and `(b S H / sqrt(n))` in groups of n along the contraction; since `S H H^T S / n = I` the product
is unchanged in exact arithmetic. It must act on both operands with the same signs, so it is never used for a plane that
serves two GEMMs.

The sum is a butterfly over adjacent pairs whose sums go to the first half and whose differences go to the second
(constant-geometry), one fp32 addition per entry and stage and one fp32 multiplication at the end: the order is part of
the contract, so that every backend gets the same bits.

Source: QuIP# (arXiv 2402.04396) for the transform in quantisation; the butterfly is the textbook fast Walsh-Hadamard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from gemworks.precision.checks import as_integer, check_dim, check_floating, check_integer, set_integer
from gemworks.precision.rng import STREAM_SIGNS, philox
from torch import Tensor

HADAMARD_SIZES = (32, 64, 128, 256)


@dataclass(frozen=True)
class Hadamard:
    """A random Hadamard transform of groups of `size` (32, 64, 128 or 256); both operands use the same `seed`."""

    size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        size = as_integer(self.size)
        if size not in HADAMARD_SIZES:
            raise ValueError(f"Hadamard size: got {self.size!r}, expected one of {HADAMARD_SIZES}")
        set_integer(self, "size", size)
        set_integer(self, "seed", check_integer("Hadamard seed", self.seed, 2**63))


def hadamard_signs(hadamard: Hadamard, device: torch.device | str = "cpu") -> Tensor:
    """fp32 `[size]` of +1 and -1: the top bit of word 0 of Philox at counter (i, 0, 0, 3)."""
    index = torch.arange(hadamard.size, device=device, dtype=torch.int64)
    zero = torch.zeros((), device=device, dtype=torch.int64)
    word = philox(index, zero, zero, torch.full((), STREAM_SIGNS, device=device), hadamard.seed)[0]
    return torch.where(word >= 2**31, -1.0, 1.0)


def _butterfly(x: Tensor, size: int) -> Tensor:
    for _ in range(int(math.log2(size))):
        even, odd = x[..., 0::2], x[..., 1::2]
        x = torch.cat((even + odd, even - odd), dim=-1)
    return x * (1.0 / math.sqrt(size))


def hadamard_transform(x: Tensor, hadamard: Hadamard, dim: int = -1) -> Tensor:
    """Apply the transform along `dim`, which is padded with zeros to a multiple of the size.

    Returns:
        fp32, `dim` rounded up to a multiple of `hadamard.size`.

    Raises:
        ValueError: x of no floating point or without that dim, or no `Hadamard`.

    >>> h = Hadamard(32, seed=1)
    >>> x = torch.eye(32)
    >>> torch.allclose(hadamard_inverse(hadamard_transform(x, h), h), x, atol=1e-6)
    True
    """
    dim = _check(x, hadamard, dim)
    rows = x.to(torch.float32).movedim(dim, -1)
    length = rows.shape[-1]
    pad = -length % hadamard.size
    if pad:
        rows = torch.nn.functional.pad(rows, (0, pad))
    groups = rows.unflatten(-1, (-1, hadamard.size)) * hadamard_signs(hadamard, x.device)
    return _butterfly(groups, hadamard.size).flatten(-2).movedim(-1, dim)


def hadamard_inverse(x: Tensor, hadamard: Hadamard, dim: int = -1) -> Tensor:
    """Inverse of `hadamard_transform` (without removing the padding), up to fp32 rounding.

    Raises:
        ValueError: as `hadamard_transform`, or a dim that is no multiple of the size.
    """
    dim = _check(x, hadamard, dim)
    if x.shape[dim] % hadamard.size:
        raise ValueError(
            f"x: dim {dim} has {x.shape[dim]} entries, expected a multiple of {hadamard.size}: what "
            "hadamard_transform returned, padding and all"
        )
    groups = x.to(torch.float32).movedim(dim, -1).unflatten(-1, (-1, hadamard.size))
    return (_butterfly(groups, hadamard.size) * hadamard_signs(hadamard, x.device)).flatten(-2).movedim(-1, dim)


def _check(x: Tensor, hadamard: Hadamard, dim: int) -> int:
    check_floating("x", x)
    if not isinstance(hadamard, Hadamard):
        raise ValueError(f"hadamard: got {hadamard!r}, expected a Hadamard, e.g. Hadamard(32, seed=0)")
    return check_dim(x, dim)
