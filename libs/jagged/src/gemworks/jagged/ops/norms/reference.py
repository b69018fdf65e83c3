"""LayerNorm and RMSNorm over the last dim: the definition, in PyTorch."""

from __future__ import annotations

import torch
from gemworks.jagged._dense import compute_dtype
from torch import Tensor


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps)` over the last dim, in x's own dtype."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def norm_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    add: Tensor | None,
    *,
    eps: float,
    center: bool,
) -> tuple[Tensor, Tensor]:
    """`h = x + residual; y = norm(h) * weight + bias + add`. Returns (y, h), both in x's dtype."""
    dtype = x.dtype
    h = x.to(compute_dtype(dtype))
    if residual is not None:
        h = h + residual.to(h.dtype)
    if center:
        y = torch.nn.functional.layer_norm(h, h.shape[-1:], eps=eps)
    else:
        y = torch.nn.functional.rms_norm(h, h.shape[-1:], eps=eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    if add is not None:
        y = y + add.to(y.dtype)
    return y.to(dtype), h.to(dtype)
