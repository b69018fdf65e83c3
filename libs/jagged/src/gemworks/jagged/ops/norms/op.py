"""LayerNorm and RMSNorm with residual, over the last dim. Letters: D normalised width."""

from __future__ import annotations

from typing import overload

from gemworks.jagged._checks import check_float
from gemworks.jagged.dispatch import KERNEL_DTYPES
from gemworks.jagged.ops.norms.custom_op import norm_op
from gemworks.jagged.ops.norms.reference import norm_reference
from torch import Tensor

MAX_WIDTH = 8192


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: None = None,
    add: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor,
    add: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    add: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm over the last dim: `y = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias + add`, `h = x + residual`.

    Args:
        x: [..., D], bf16, fp16, fp32 or fp64; computed in fp32 (fp64 for fp64).
        weight, bias: [D], optional affine.
        residual: like x; added before the norm (pre-norm stream).
        add: like x; added after the norm (post-norm residual, `RMSNorm(o) + s`).
        eps: added to the variance.

    Returns:
        y, in x's dtype; the pair (y, h) when `residual` is given.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: Ba et al., arXiv 1607.06450.

    >>> import torch
    >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
    tensor([[-1.,  1.]])
    """
    return _norm("layer_norm", x, weight, bias, residual, add, eps, center=True)


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    residual: None = None,
    add: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    residual: Tensor,
    add: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    add: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm over the last dim: `y = h / sqrt(mean(h^2) + eps) * weight + add`, `h = x + residual`.

    Arguments, result and errors as for `layer_norm`, without a bias. Source: Zhang and Sennrich, arXiv 1910.07467.

    >>> import torch
    >>> rms_norm(torch.tensor([[3.0, 3.0]]), eps=0.0)
    tensor([[1., 1.]])
    """
    return _norm("rms_norm", x, weight, None, residual, add, eps, center=False)


def _norm(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    add: Tensor | None,
    eps: float,
    *,
    center: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    check_float("x", x)
    if x.dim() == 0 or not 1 <= x.shape[-1] <= MAX_WIDTH:
        raise ValueError(
            f"{op}: x has shape {tuple(x.shape)}, expected [..., D] with D in 1..{MAX_WIDTH}; split wider rows"
        )
    if isinstance(eps, (Tensor, str)) or not eps >= 0:
        raise ValueError(f"{op}: eps is {eps!r}, expected a number >= 0, known on the host")
    for name, p in (("weight", weight), ("bias", bias), ("residual", residual), ("add", add)):
        if p is not None and p.device != x.device:
            raise ValueError(f"{op}: {name} is on {p.device}, expected {x.device} like x; move it")
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and p.shape != x.shape[-1:]:
            raise ValueError(
                f"{op}: {name} has shape {tuple(p.shape)}, expected {tuple(x.shape[-1:])}, one value per column"
            )
    for name, r in (("residual", residual), ("add", add)):
        if r is not None and r.shape != x.shape:
            raise ValueError(f"{op}: {name} has shape {tuple(r.shape)}, expected x's {tuple(x.shape)}; reshape it")
    if x.device.type == "cuda" and x.dtype in KERNEL_DTYPES:
        y, h = norm_op(x, weight, bias, residual, add, eps, center)
    else:  # plain PyTorch, which torch.compile can fuse and autograd can differentiate twice
        y, h = norm_reference(x, weight, bias, residual, add, eps=eps, center=center)
    return y if residual is None else (y, h)
