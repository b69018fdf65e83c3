"""LayerNorm and RMSNorm over the last dim: the definition, in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from gemworks.jagged._dense import compute_dtype, without_autocast
from torch import Tensor


class _RmsNormalize(torch.autograd.Function):
    """`y = x r`, `r = rsqrt(mean(x^2) + eps)`; `dx = r (dy - y mean(dy y))`: fewer passes than autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.eps = eps
        return x * _inverse_rms(x, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        (dy,) = grads
        r = _inverse_rms(x, ctx.eps)  # recomputed, so that this backward can be differentiated again
        projection = (dy * x).mean(-1, keepdim=True) * r.square()
        return torch.addcmul(dy, x, projection, value=-1) * r, None


@without_autocast
def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) / x.shape[-1] + eps)


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps)` over the last dim, in x's own dtype."""
    return _RmsNormalize.apply(x, eps)  # pyright: ignore[reportReturnType]


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
    y = torch.nn.functional.layer_norm(h, h.shape[-1:], eps=eps) if center else rms_normalize(h, eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    if add is not None:
        y = y + add.to(y.dtype)
    return y.to(dtype), h.to(dtype)
