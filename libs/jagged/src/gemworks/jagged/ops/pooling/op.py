"""Seed pooling: learned seeds attend over each sequence, the first half of hierarchical seed pooling (HSP)."""

from __future__ import annotations

import math

from gemworks.jagged.ops.flash_attention.op import flash_attention
from gemworks.jagged.ops.gdpa.activations import Activation
from gemworks.jagged.ops.gdpa.op import gdpa
from torch import Tensor


def seed_pool(
    seeds: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_k: Tensor,
    *,
    max_length_k: int,
    scale: float | None = None,
    activation: Activation | None = None,
    qk_norm: bool = False,
) -> Tensor:
    """R learned seeds attend over each sequence: `softmax(scale * Q K^T) V`, or `act(scale * Q K^T) V`.

    Args:
        seeds: [R, N, H], one set for the whole batch.
        k, v: packed [T, M, H] and [T, M, V].
        offsets_k: int32 or int64 [B + 1].
        max_length_k: a bound of the lengths, known on the host.
        scale: None means 1 / sqrt(H).
        activation: None for softmax, else the activation of `gdpa`.
        qk_norm: as in `flash_attention`; softmax only.

    Returns:
        [B, R, N, V] in the dtype of the seeds; 0 for an empty sequence.

    Raises:
        ValueError: as for `flash_attention` and `gdpa`; qk_norm with an activation.

    >>> import torch
    >>> k = torch.randn(5, 2, 4)
    >>> seed_pool(torch.randn(3, 2, 4), k, k, torch.tensor([0, 5, 5]), max_length_k=8).shape
    torch.Size([2, 3, 2, 4])
    """
    if activation is None:
        return flash_attention(
            seeds, k, v, None, offsets_k, max_length_k=max_length_k, scale=scale, shared_query=True, qk_norm=qk_norm
        )
    if qk_norm:
        raise ValueError("qk_norm: not part of gdpa; normalise with rms_norm before, or use activation=None")
    factor = 1.0 / math.sqrt(seeds.shape[-1]) if scale is None else scale
    return gdpa(
        seeds, k, v, None, offsets_k, max_length_k=max_length_k, scale=factor, activation=activation, shared_query=True
    )
