"""Norm and cast together: `norm_cast` for planes, `norm_backward` for the gradient; trainable in `norm_linear`.

    h = x + residual,  y = norm(h) * weight + bias (rounded to x's dtype),  planes = quantise(y)

Whatever the backend, the planes are exactly those of the `y` it computed; `y` itself may differ in its last bit between
backends, as sums are ordered differently.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.precision.backends import choose
from gemworks.precision.casts import CastSpec, cast, cast_squares, check_has_blocks, device_of
from gemworks.precision.mxtensor import MXTensor
from torch import Tensor

NORMS = ("rms", "layer")


@dataclass(frozen=True)
class NormCast:
    """Result of `norm_cast`.

    Attributes:
        rows, columns: planes of y along K and along M (None if not asked for). Of squares, columns is the square plane
            of y's transpose.
        hidden: x + residual in x's dtype (x itself without a residual).
        mean, rstd: fp32 `[M]`, for backward; mean is zero for RMSNorm.
        y: the normalised values, None unless asked for.
        inexact: count of inexact codes.
    """

    rows: MXTensor | None
    columns: MXTensor | None
    hidden: Tensor
    mean: Tensor
    rstd: Tensor
    y: Tensor | None
    inexact: Tensor


def norm_cast(
    x: Tensor,
    weight: Tensor,
    spec: CastSpec,
    *,
    norm: str = "rms",
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    columns: bool = True,
    square: bool = False,
    return_y: bool = False,
    backend: str = "auto",
) -> NormCast:
    """Residual addition, norm and cast: one kernel on a GPU.

    Args:
        x: `[M, K]`.
        weight, bias: `[K]`; bias only with `norm="layer"`.
        spec: the cast.
        norm: `rms` or `layer`.
        residual: `[M, K]`, added before the norm; the sum is returned as `hidden`.
        eps: added to the variance (mean square).
        columns: also the plane along M.
        square: quantise squares once, for both contractions (`cast_squares`); with columns.
        return_y: also y.
        backend: as in `choose`.

    Raises:
        ValueError: shapes, norm name, squares of one plane, or a Hadamard transform (which no fused norm can share
            between directions).
    """
    if norm not in NORMS:
        raise ValueError(f"norm: got {norm!r}, expected one of {NORMS}")
    if x.dim() != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"x and weight: got {tuple(x.shape)} and {tuple(weight.shape)}, expected [M, K] and [K]")
    if bias is not None and bias.shape != weight.shape:
        raise ValueError(f"bias: got {tuple(bias.shape)}, expected {tuple(weight.shape)}, as weight has")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual: got {tuple(residual.shape)} {residual.dtype}, expected x's {tuple(x.shape)} {x.dtype}"
        )
    if bias is not None and norm == "rms":
        raise ValueError("bias: RMSNorm has none; use norm='layer'")
    if spec.hadamard is not None:
        raise ValueError("hadamard: not fused with a norm; cast y separately")
    check_has_blocks(spec)
    if square and not columns:
        raise ValueError("square: squares serve both contractions; leave columns set, or unset square")
    chosen = choose("cast", spec.kind, (0, 0, 0), device_of(x), backend).backend
    if chosen == "triton" and (x.is_cuda or backend == "triton") and x.numel():
        from gemworks.precision.triton_norm import triton_norm_cast

        return triton_norm_cast(x, weight, spec, norm, bias, residual, eps, columns, square, return_y)
    hidden = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    h = hidden.float()
    mean = h.mean(1) if norm == "layer" else torch.zeros(x.shape[0], device=x.device)
    centred = h - mean[:, None]
    rstd = (centred.square().mean(1) + eps).rsqrt()
    y = centred * rstd[:, None] * weight.float()
    if bias is not None:
        y = y + bias.float()
    y = y.to(x.dtype)
    if square:
        made = cast_squares(y, spec, "reference")
        kept = y if return_y else None
        return NormCast(made.rows, made.transposed, hidden, mean, rstd, kept, made.inexact)
    rows, inexact = cast(y, 1, spec, "reference")
    plane_columns = None
    if columns:
        plane_columns, more = cast(y, 0, spec, "reference")
        inexact = inexact + more
    return NormCast(rows, plane_columns, hidden, mean, rstd, y if return_y else None, inexact)


def norm_backward(
    dy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    norm: str,
    has_bias: bool,
    d_hidden: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of hidden (plus `d_hidden`, what came to it from elsewhere), weight and bias, in fp32 arithmetic.

    One kernel and two small sums on a GPU, up to 16,384 features; the same bits each time.
    """
    if (dy.is_cuda or backend == "triton") and dy.numel() and dy.shape[1] <= 16384:
        from gemworks.precision.triton_norm import triton_norm_backward

        return triton_norm_backward(dy, hidden, weight, mean, rstd, norm, has_bias, d_hidden)
    d, xhat = dy.float(), (hidden.float() - mean[:, None]) * rstd[:, None]
    scaled = d * weight.float()
    dx = scaled - xhat * (scaled * xhat).mean(1, keepdim=True)
    if norm == "layer":
        dx = dx - scaled.mean(1, keepdim=True)
    dx = dx * rstd[:, None]
    if d_hidden is not None:
        dx = dx + d_hidden.float()
    return dx.to(hidden.dtype), (d * xhat).sum(0), d.sum(0) if has_bias else None
