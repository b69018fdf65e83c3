"""The linear layer as one opaque op with a gradient, for compilers and dispatch modes: `products` with flat arguments
and results. Planes are made inside.
"""

from __future__ import annotations

import torch
from gemworks.precision.casts import Plane
from gemworks.precision.mxtensor import MXTensor, padded_rows
from gemworks.precision.op import define_op, differentiate
from gemworks.precision.products import linear_backward, linear_forward, recipe_of
from gemworks.precision.recipe import GemmKind, Recipe, Save
from gemworks.precision.tensor_scaling import TensorPlane
from torch import Tensor
from torch.nn.functional import pad


def forward_op(
    x_MK: Tensor, weight: Tensor | MXTensor, bias: Tensor | None, chosen: Recipe, save: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`linear_forward` with an op's flat results: the kept plane as codes and scales, empty if none. What is kept for
    the weight gradient alone has its rows padded (`padded_rows`) with zero codes."""
    y, kept, counts = linear_forward(x_MK, weight, bias, chosen, save, out_dtype)
    counts = counts.clone()
    if kept is None:
        empty = torch.empty(0, dtype=torch.uint8, device=x_MK.device)
        return y, empty, empty.clone(), counts
    # In one layout, whatever the backend: the compiler is told sizes and strides. Scales lie block by block in memory,
    # and the contraction of the weight gradient is padded as the fast casts pad it.
    if isinstance(kept, TensorPlane):
        if kept.dim == 1:
            return y, kept.codes.contiguous(), kept.scale, counts
        codes, num_rows = kept.all_codes.t(), padded_rows(x_MK.shape[0])
        return y, pad(codes, (0, num_rows - codes.shape[1])).t(), kept.scale, counts
    if kept.dim == 1:
        return y, kept.codes, kept.scales.t().contiguous().t(), counts
    codes = kept.tensors[0] if kept.dim is None else kept.tensors[0].t()
    num_rows = padded_rows(x_MK.shape[0])
    if codes.shape[1] != num_rows:
        codes = pad(codes, (0, num_rows - codes.shape[1]))
    return y, codes if kept.dim is None else codes.t(), kept.scales.contiguous(), counts


def kept_plane(codes: Tensor, scales: Tensor, shape: tuple[int, int], chosen: Recipe) -> Plane:
    """The plane that a forward kept, from its codes and scales."""
    if chosen.forward.kind is GemmKind.FP8_TENSOR:
        return TensorPlane.unchecked(codes, scales, shape, 0 if chosen.save is Save.BOTH else 1, chosen.forward.left)
    block = 32 if chosen.forward.kind is GemmKind.MXFP8 else 128
    dim = 0 if chosen.save is Save.BOTH else 1
    if chosen.save is Save.BOTH and chosen.square_inputs:
        dim, shape = None, (shape[1], shape[0])
    return MXTensor.unchecked(codes, scales, None, shape, dim, block, chosen.forward.left, chosen.scale_mode)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe_text: str, step: int, save: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return forward_op(x, weight, bias, recipe_of(recipe_text), save, out_dtype)


def _fake_linear(x, weight, bias, recipe_text, step, save, out_dtype):
    chosen = recipe_of(recipe_text)
    y = x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)
    counts = x.new_empty(2, dtype=torch.int64)
    if not save or chosen.save is Save.HIGH_PRECISION or chosen.forward.kind is GemmKind.BF16:
        return y, x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.uint8), counts
    block = 32 if chosen.forward.kind is GemmKind.MXFP8 else 128
    m, k = x.shape
    if chosen.forward.kind is GemmKind.FP8_TENSOR:
        shape = (k, padded_rows(m)) if chosen.save is Save.BOTH else (m, k)
        codes = x.new_empty(shape, dtype=torch.uint8)
        return y, codes.t() if chosen.save is Save.BOTH else codes, x.new_empty(1, dtype=torch.float32), counts
    if chosen.save is Save.BOTH and chosen.square_inputs:
        squares = (-(-k // block), -(-m // block))
        codes = x.new_empty((k, padded_rows(m)), dtype=torch.uint8)
        return y, codes, x.new_empty(squares, dtype=torch.uint8), counts
    if chosen.save is Save.BOTH:
        codes = x.new_empty((k, padded_rows(m)), dtype=torch.uint8).t()
        return y, codes, x.new_empty((-(-m // block), k), dtype=torch.uint8), counts
    return y, x.new_empty((m, k), dtype=torch.uint8), x.new_empty((-(-k // block), m), dtype=torch.uint8).t(), counts


def _linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    codes: Tensor,
    scales: Tensor,
    recipe_text: str,
    step: int,
    need_dx: bool,
    need_dw: bool,
    x_dtype: torch.dtype,
    num_features: int,
) -> tuple[Tensor, Tensor]:
    return backward_op(
        dy, x, weight, weight.dtype, codes, scales, recipe_text, step, need_dx, need_dw, x_dtype, num_features
    )


def backward_op(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | MXTensor,
    dw_dtype: torch.dtype,
    codes: Tensor,
    scales: Tensor,
    recipe_text: str,
    step: int,
    need_dx: bool,
    need_dw: bool,
    x_dtype: torch.dtype,
    num_features: int,
) -> tuple[Tensor, Tensor]:
    """`linear_backward` with an op's flat arguments and results; a kept plane is told from none by its dims."""
    chosen = recipe_of(recipe_text)
    source = x if codes.dim() != 2 else kept_plane(codes, scales, (dy.shape[0], num_features), chosen)
    dx, dw = linear_backward(dy, source, weight, chosen, step, need_dx, need_dw, x_dtype, dw_dtype)
    if dx is None:
        dx = torch.empty(0, device=dy.device, dtype=x_dtype)
    return dx, torch.empty(0, device=dy.device, dtype=dw_dtype) if dw is None else dw


def _fake_linear_backward(dy, x, weight, codes, scales, recipe_text, step, need_dx, need_dw, x_dtype, num_features):
    dx = dy.new_empty((dy.shape[0], num_features) if need_dx else 0, dtype=x_dtype)
    dw = weight.new_empty((dy.shape[1], num_features) if need_dw else 0)
    return dx, dw


def _setup_context(ctx, inputs, output) -> None:
    x, weight, bias, recipe_text, step, save, _ = inputs
    _, codes, scales, counts = output
    # The input itself is kept only for a gradient of the weight, and where no plane replaces it.
    keep_input = save and codes.dim() != 2
    ctx.save_for_backward(x if keep_input else codes.new_empty(0), weight, codes, scales)
    ctx.recipe_text, ctx.step, ctx.x_dtype, ctx.num_features, ctx.save = recipe_text, step, x.dtype, x.shape[1], save
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(codes, scales, counts)
    # Otherwise a zero gradient as large as the kept plane is written in each backward.
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, *_unused):
    if dy is None:
        return None, None, None, None, None, None, None
    x, weight, codes, scales = ctx.saved_tensors
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    if need_dw and not ctx.save:
        raise ValueError("save: was False, but the weight wants a gradient; pass True, or detach the weight")
    dx, dw = torch.ops.gemworks_precision.linear_backward(
        dy, x, weight, codes, scales, ctx.recipe_text, ctx.step, need_dx, need_dw, ctx.x_dtype, ctx.num_features
    )
    db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if need_db and ctx.bias_dtype is not None else None
    return dx if need_dx else None, dw if need_dw else None, db, None, None, None, None


define_op("linear", _linear, _fake_linear)
define_op("linear_backward", _linear_backward, _fake_linear_backward)
differentiate("linear", _backward, _setup_context)
