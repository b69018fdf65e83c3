"""Pooling of packed sequences: sum, mean, last, and the two halves of hierarchical seed pooling (HSP).

Letters: T packed rows, B sequences, R seeds, C compressed tokens (n_tok), k Kronecker terms, D, E widths.
"""

from __future__ import annotations

import math

import torch
from gemworks.jagged._checks import check_offsets
from gemworks.jagged._dense import compute_dtype
from torch import Tensor


def _check(values: Tensor, offsets: Tensor) -> None:
    if values.dim() == 0:
        raise ValueError("values: got a scalar, expected [T, ...]; pass packed rows")
    check_offsets("offsets", offsets, total=values.shape[0], max_length=None, device=values.device)


def sum_pool(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each sequence's rows, [T, ...] to [B, ...] in values' dtype; 0 for an empty one. Order of rows is fixed.

    >>> sum_pool(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3])).tolist()
    [3.0, 0.0, 4.0]
    """
    _check(values, offsets)
    wide = values.to(compute_dtype(values.dtype)).reshape(values.shape[0], math.prod(values.shape[1:]))
    out = torch.segment_reduce(wide, "sum", offsets=offsets.to(torch.int64), axis=0, initial=0, unsafe=True)
    return out.reshape(offsets.shape[0] - 1, *values.shape[1:]).to(values.dtype)


def mean_pool(values: Tensor, offsets: Tensor) -> Tensor:
    """Mean of each sequence's rows, [T, ...] to [B, ...] in values' dtype; 0 for an empty one.

    >>> mean_pool(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3])).tolist()
    [1.5, 0.0, 4.0]
    """
    wide = sum_pool(values.to(compute_dtype(values.dtype)), offsets)
    lengths = offsets.diff().clamp(min=1).to(wide.dtype)
    return (wide / lengths.view(-1, *[1] * (values.dim() - 1))).to(values.dtype)


def last_pool(values: Tensor, offsets: Tensor) -> Tensor:
    """The last row of each sequence, [T, ...] to [B, ...]; 0 for an empty one.

    >>> last_pool(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3])).tolist()
    [2.0, 0.0, 4.0]
    """
    _check(values, offsets)
    ends = offsets[1:].to(torch.int64)
    rows = torch.where(offsets.diff() > 0, ends - 1, values.shape[0])
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])]).index_select(0, rows)


def kronecker_compress(h: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """Mix tokens and columns by a sum of k Kronecker products: `Y_b = sum_i Z_i^T H_b W_i`.

    Z^T goes first, which is the cheaper order when C < R: k (2 R C D + 2 C D^2) FLOPs per sample.

    Args:
        h: [B, R, D].
        z: [k, R, C].
        w: [k, D, E].

    Returns:
        [B, C, E] in h's dtype.

    Raises:
        ValueError: shapes that do not fit.

    >>> h = torch.randn(3, 4, 5)
    >>> z, w = torch.randn(2, 4, 2), torch.randn(2, 5, 5)
    >>> y = kronecker_compress(h, z, w)
    >>> torch.allclose(y, sum(z[i].T @ h @ w[i] for i in range(2)), atol=1e-4)
    True
    """
    if (
        h.dim() != 3
        or z.dim() != 3
        or w.dim() != 3
        or z.shape[:2] != (w.shape[0], h.shape[1])
        or w.shape[1] != h.shape[2]
    ):
        raise ValueError(
            f"h, z, w: got {tuple(h.shape)}, {tuple(z.shape)}, {tuple(w.shape)}, "
            f"expected [B, R, D], [k, R, C], [k, D, E]"
        )
    terms, rows, tokens = z.shape
    # A batched product with a stride-0 weight, tokens outside: neither h nor what comes of it is transposed in memory.
    z_mixed = z.permute(2, 0, 1).reshape(tokens * terms, rows)  # [C k, R]
    mixed = torch.bmm(z_mixed.expand(h.shape[0], -1, -1), h)  # [B, C k, D]
    flat = mixed.view(h.shape[0] * tokens, terms * h.shape[2])  # [B C, k D]
    return torch.matmul(flat, w.reshape(terms * w.shape[1], w.shape[2])).view(h.shape[0], tokens, w.shape[2])
