"""`mx_norm_linear`: residual + norm + linear layer, trainable, with the cast of the linear's input in the norm's
epilogue."""

from __future__ import annotations

import torch
from gemworks.precision.casts import CastSpec, cast_backend, check_has_blocks
from gemworks.precision.gemms import gemm
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.norm import norm_backward, norm_cast
from gemworks.precision.products import linear_backward, weight_plane
from gemworks.precision.recipe import GemmKind, Recipe, Save, recipe
from torch import Tensor


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, norm_weight, norm_bias, weight, norm, eps, chosen: Recipe, step):  # pyright: ignore[reportIncompatibleMethodOverride]
        spec = CastSpec(chosen.forward.kind, chosen.forward.left, chosen.scale_mode)
        keep = chosen.save is Save.BOTH and weight.requires_grad
        result = norm_cast(
            x,
            norm_weight,
            spec,
            norm=norm,
            bias=norm_bias,
            residual=residual,
            eps=eps,
            columns=keep,
            square=keep and chosen.square_inputs,
            return_y=not keep,
            backend=cast_backend(chosen),
        )
        assert result.rows is not None
        plane_w, _ = weight_plane(weight, chosen.forward, chosen, transposed=False)
        out = gemm(result.rows, plane_w, chosen.forward.kind, x.dtype, chosen.backend)
        # y is read by the weight gradient alone.
        kept, ctx.plane = (result.y if weight.requires_grad else None,), None
        if result.columns is not None:
            kept, ctx.plane = result.columns.tensors, result.columns.meta
        ctx.save_for_backward(result.hidden, norm_weight, weight, result.mean, result.rstd, *kept)
        ctx.chosen, ctx.norm, ctx.step, ctx.has_bias = chosen, norm, step, norm_bias is not None
        ctx.has_residual = residual is not None
        # Otherwise a gradient of zeros is written where the sum is not used.
        ctx.set_materialize_grads(False)
        return out, None if residual is None else result.hidden

    @staticmethod
    def backward(ctx, d_out, d_hidden):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, norm_weight, weight, mean, rstd, *kept = ctx.saved_tensors
        if d_out is None:
            return d_hidden, d_hidden if ctx.has_residual else None, None, None, None, None, None, None, None
        source = kept[0] if ctx.plane is None else MXTensor.unchecked(*kept, *ctx.plane)
        d_y, d_weight = linear_backward(
            d_out, source, weight, ctx.chosen, ctx.step, True, ctx.needs_input_grad[4], hidden.dtype, weight.dtype
        )
        assert d_y is not None
        dh, d_norm, d_bias = norm_backward(d_y, hidden, norm_weight, mean, rstd, ctx.norm, ctx.has_bias, d_hidden)
        d_norm = d_norm.to(norm_weight.dtype)
        d_bias = d_bias.to(norm_weight.dtype) if d_bias is not None else None
        return (
            dh,
            dh if ctx.has_residual else None,
            d_norm,
            d_bias,
            d_weight,
            None,
            None,
            None,
            None,
        )


def mx_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    recipe_or_name: str | Recipe = "mxfp8",
    *,
    norm: str = "rms",
    norm_bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    step: int = 0,
) -> tuple[Tensor, Tensor]:
    """`linear(norm(x + residual))` with the cast in the norm's epilogue; trainable.

    Args:
        x, residual: `[..., K]`.
        norm_weight, norm_bias: `[K]`.
        weight: `[N, K]`.
        recipe_or_name: a quantised recipe; `save="both"` keeps one FP8 plane instead of y.
        norm, eps: as in `norm_cast`.
        step: for stochastic rounding.

    Returns:
        `[..., N]`, and `x + residual` for the next block's residual.

    Raises:
        ValueError: a recipe whose forward is bf16 (nothing to fuse), or what `norm_cast` refuses.
    """
    chosen = recipe(recipe_or_name)
    if chosen.forward.kind is GemmKind.BF16:
        raise ValueError(f"recipe {chosen.name!r}: forward is bf16, there is no cast to fuse; use a norm and mx_linear")
    check_has_blocks(CastSpec(chosen.forward.kind))
    n, k = weight.shape
    multiple = chosen.feature_multiple
    if k % multiple or n % multiple or x.shape[-1] != k:
        raise ValueError(f"weight: shape {(n, k)}, expected [N, {x.shape[-1]}] with multiples of {multiple}")
    flat = x.reshape(-1, k)
    flat_residual = residual.reshape(-1, k) if residual is not None else None
    out, hidden = _NormLinear.apply(  # pyright: ignore[reportGeneralTypeIssues]
        flat, flat_residual, norm_weight, norm_bias, weight, norm, eps, chosen, step
    )
    return out.reshape(*x.shape[:-1], n), x if hidden is None else hidden.reshape(x.shape)
