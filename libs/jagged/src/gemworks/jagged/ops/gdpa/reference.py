"""Generalised dot-product attention: the definition, in PyTorch. Letters as in flash_attention/reference.py."""

from __future__ import annotations

import torch
from gemworks.jagged._dense import Mask, admitted_pairs, compute_dtype, run_groups, without_autocast
from gemworks.jagged._packing import Group, Plan
from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS, Activation
from torch import Tensor


@without_autocast
def gdpa_reference(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float, activation: Activation, mask: Mask, shared_query: bool
) -> Tensor:
    """`act(scale * Q K^T) V` over the admitted pairs of each sequence.

    Every activation maps 0 to 0 and padding is rows of zeros, so padded keys add nothing and need no mask.
    """
    dtype = q.dtype
    wide = compute_dtype(dtype)
    act = ACTIVATIONS[activation]
    heads_per_key = q.shape[1] // k.shape[1]

    def compute(q_bMLH: Tensor, k_bMKH: Tensor, v_bMKV: Tensor, group: Group) -> Tensor:
        weights = act(torch.matmul(q_bMLH * scale, k_bMKH.mT))  # [b, M, G * L, K]
        if not mask.is_full:
            admitted = admitted_pairs(group, mask)
            assert admitted is not None
            shape = weights.shape
            weights = weights.view(shape[0], shape[1] * heads_per_key, -1, shape[3])
            weights = (weights * admitted[:, None].to(wide)).view(shape)
        return torch.matmul(weights, v_bMKV)

    return run_groups(q.to(wide), k.to(wide), v.to(wide), plan, compute, shared_query=shared_query).to(dtype)
