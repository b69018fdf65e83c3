"""The norms as opaque custom ops: one forward, one backward.

On a CPU the formulas in PyTorch; on CUDA the dispatch rules choose between Triton and these formulas.

Letters: D normalised width.
"""

from __future__ import annotations

from typing import Any

import torch
from gemworks.jagged._custom_op import custom_op
from gemworks.jagged._dense import compute_dtype
from gemworks.jagged._imports import when_imported
from gemworks.jagged.dispatch import architecture_of, backend_of
from gemworks.jagged.ops.norms.reference import norm_reference
from torch import Tensor


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    add: Tensor | None,
    eps: float,
    center: bool,
) -> tuple[Tensor, Tensor]:
    """(y, h) as `norm_reference`; h is empty without a residual. Both are contiguous."""
    if _uses_triton(x, center):
        from gemworks.jagged.ops.norms.launch import norm_forward

        return norm_forward(x, weight, bias, residual, add, eps=eps, center=center)
    y, h = norm_reference(x, weight, bias, residual, add, eps=eps, center=center)
    h = h.new_empty(0) if residual is None else h.contiguous()
    return y.contiguous(), h


norm_op = custom_op("norm", _norm)


@norm_op.register_fake
def _norm_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape)


def _norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    eps: float,
    center: bool,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), the latter two empty where there is no such parameter.

    With n the normalised rows, s their scale and g = dy * weight:
    dx = s (g - n mean(g n) - mean(g)) + dh (mean(g) for LayerNorm alone), dweight = sum(dy n), dbias = sum(dy).
    With `offsets` rows past the last of them get 0 and add nothing to the sums.
    """
    if _uses_triton(h, center):
        from gemworks.jagged.ops.norms.launch import norm_backward

        return norm_backward(dy, dh, h, weight, bias_dtype, eps=eps, center=center, offsets=offsets)
    dtype = compute_dtype(h.dtype)
    if offsets is not None:
        live = (torch.arange(h.shape[0], device=h.device) < offsets[-1])[:, None]
        dy, h = (torch.where(live, x.reshape(len(live), -1), 0).view(h.shape) for x in (dy, h))
        dh = None if dh is None else torch.where(live, dh.reshape(len(live), -1), 0).view(h.shape)
    n, g = h.to(dtype).reshape(-1, h.shape[-1]), dy.to(dtype).reshape(-1, h.shape[-1])
    if center:
        n = n - n.mean(-1, keepdim=True)
    scale = torch.rsqrt(n.square().mean(-1, keepdim=True) + eps)
    n = n * scale
    dweight, dbias = (h.new_empty(0, dtype=torch.float32) for _ in range(2))  # results must not share memory
    if weight is not None:
        dweight = (g * n).sum(0).to(weight.dtype)
    if bias_dtype is not None:
        dbias = g.sum(0).to(bias_dtype)
    if weight is not None:
        g = g * weight.to(dtype)
    dx = g - n * (g * n).mean(-1, keepdim=True)
    if center:
        dx = dx - g.mean(-1, keepdim=True)
    dx = (dx * scale).reshape(h.shape)
    if dh is not None:
        dx = dx + dh.to(dtype)
    return dx.to(h.dtype).contiguous(), dweight, dbias


norm_backward_op = custom_op("norm_backward", _norm_backward)


@norm_backward_op.register_fake
def _norm_backward_fake(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, bias_dtype: torch.dtype | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    width = h.shape[-1:]
    dweight = h.new_empty(0, dtype=torch.float32) if weight is None else weight.new_empty(width)
    dbias = h.new_empty(0, dtype=torch.float32) if bias_dtype is None else h.new_empty(width, dtype=bias_dtype)
    return h.new_empty(h.shape), dweight, dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, residual, add, ctx.eps, ctx.center = inputs
    ctx.save_for_backward(x if residual is None else output[1], weight)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.add_dtype = None if add is None else add.dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Any, ...]:
    h, weight = ctx.saved_tensors
    if ctx.residual_dtype is None:
        dh = None  # the empty second result has no gradient to give
    if dy is None and dh is None:
        return (None,) * 7
    if dy is None:
        dy = torch.zeros_like(h)
    dx, dweight, dbias = norm_backward_op(dy, dh, h, weight, ctx.bias_dtype, ctx.eps, ctx.center, None)
    return (
        dx,
        None if weight is None else dweight,
        None if ctx.bias_dtype is None else dbias,
        None if ctx.residual_dtype is None else dx.to(ctx.residual_dtype),
        None if ctx.add_dtype is None else dy.to(ctx.add_dtype),
        None,
        None,
    )


norm_op.register_autograd(_backward, setup_context=_save)


def _uses_triton(x: Tensor, center: bool) -> bool:
    op = "layer_norm" if center else "rms_norm"
    return backend_of(op, x.dtype, architecture_of(x.device)) == "triton"


def _register_flops(flop_counter: Any) -> None:
    """Only matrix products count."""
    for op in (torch.ops.gemworks_jagged.norm, torch.ops.gemworks_jagged.norm_backward):
        flop_counter.register_flop_formula(op)(lambda *args, **kwargs: 0)


when_imported("torch.utils.flop_counter", _register_flops)
