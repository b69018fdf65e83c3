"""RMS norm per head and rotation as one opaque custom op, forward and backward.

On a CPU the formulas in PyTorch; on CUDA Triton where a rule names it and it takes the shape, else these formulas.

Letters: T rows, N heads, H head width, J = H / 2 rotated pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from gemworks.jagged._custom_op import custom_op
from gemworks.jagged._dense import compute_dtype
from gemworks.jagged._imports import when_imported
from gemworks.jagged.dispatch import architecture_of, backend_of
from torch import Tensor


def _inside(x: Tensor, end: Tensor | None) -> Tensor:
    """Rows of x that belong to a sequence, in float32 (float64 for float64); 0 in place of the others."""
    wide = x.to(compute_dtype(x.dtype))
    if end is None:
        return wide
    return torch.where((torch.arange(x.shape[0], device=x.device) < end)[:, None, None], wide, 0)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _scale(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _forward(x: Tensor, cos: Tensor | None, sin: Tensor | None, end: Tensor | None, eps: float | None) -> Tensor:
    """`turn(x / sqrt(mean(x^2) + eps))`, either step left out where its arguments are None; contiguous."""
    if _uses_triton(x):
        from gemworks.jagged.ops.rope.launch import norm_rope

        return norm_rope(x, cos, sin, end, eps)
    y = _inside(x, end)
    if eps is not None:
        y = y * _scale(y, eps)
    if cos is not None and sin is not None:
        y = _turn(y, cos, sin)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(y)


def norm_rope_with_scales(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, end: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """What `norm_rope_op` makes of x, and the norm's factors of its heads [T, N] ([0] without a norm).

    The factors are float32, or float64 for float64. Not differentiable.
    """
    scales = torch.empty(x.shape[:2] if eps is not None else 0, dtype=compute_dtype(x.dtype), device=x.device)
    if _uses_triton(x):
        from gemworks.jagged.ops.rope.launch import norm_rope

        return norm_rope(x, cos, sin, end, eps, scales=scales if eps is not None else None), scales
    if eps is not None:
        scales.copy_(_scale(_inside(x, end), eps).squeeze(-1))
    return _forward(x, cos, sin, end, eps), scales


def norm_rope_backward_into(
    dx: Tensor,
    dy: Tensor,
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    end: Tensor | None,
    eps: float | None,
) -> Tensor:
    """Fills dx, the gradient of x: dy turned back, then the norm's `scale (g - n mean(g n))`. Not differentiable."""
    if _uses_triton(x):
        from gemworks.jagged.ops.rope.launch import norm_rope

        return norm_rope(x, cos, sin, end, eps, dy=dy, out=dx)
    g = _inside(dy, end)
    if cos is not None and sin is not None:
        g = _turn(g, cos, -sin)
    if eps is not None:
        wide = _inside(x, end)
        scale = _scale(wide, eps)
        n = wide * scale
        g = (g - n * (g * n).mean(-1, keepdim=True)) * scale
    return dx.copy_(g)


def _backward_contiguous(
    dy: Tensor, x: Tensor, cos: Tensor | None, sin: Tensor | None, end: Tensor | None, eps: float | None
) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return norm_rope_backward_into(dx, dy, x, cos, sin, end, eps)


norm_rope_op = custom_op("norm_rope", _forward)
norm_rope_backward_op = custom_op("norm_rope_backward", _backward_contiguous)


@norm_rope_op.register_fake
def _forward_fake(x: Tensor, cos: Tensor | None, sin: Tensor | None, end: Tensor | None, eps: float | None) -> Tensor:
    return x.new_empty(x.shape)


@norm_rope_backward_op.register_fake
def _backward_fake(
    dy: Tensor, x: Tensor, cos: Tensor | None, sin: Tensor | None, end: Tensor | None, eps: float | None
) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, end, ctx.eps = inputs
    ctx.save_for_backward(x, cos, sin, end)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, cos, sin, end = ctx.saved_tensors
    return norm_rope_backward_op(dy, x, cos, sin, end, ctx.eps), None, None, None, None


norm_rope_op.register_autograd(_backward, setup_context=_save)


def runs_in_one_pass(x: Tensor) -> bool:
    """Whether x goes through the op, which has a kernel on CUDA; else the formulas run in PyTorch.

    For a compiler too (decision 0330).
    """
    return x.device.type == "cuda" and x.dtype != torch.float64


def _uses_triton(x: Tensor) -> bool:
    if x.device.type != "cuda" or x.shape[-1] % 2 or x.dtype == torch.float64:
        return False
    return backend_of("apply_rope", x.dtype, architecture_of(x.device)) == "triton"


def _register_flops(flop_counter: Any) -> None:
    """Only matrix products count."""
    for op in (torch.ops.gemworks_jagged.norm_rope, torch.ops.gemworks_jagged.norm_rope_backward):
        flop_counter.register_flop_formula(op)(lambda *args, **kwargs: 0)


when_imported("torch.utils.flop_counter", _register_flops)
