"""`mx_mlp`: two linear layers around an activation, with the casts between them in kernels that run anyway.

    h = x W1^T + b1,  a = act(h),  y = a W2^T + b2
    da = dy W2,  dh = da * act'(h),  dx = dh W1,  dW1 = dh^T x,  dW2 = dy^T a

a and dh are never stored: their planes, both ways, come out of the kernels that compute them (`activation_cast`,
`activation_gradient_cast`), so of the four casts of two layers only those of x and dy are passes of their own. Kept for
backward: h, and a plane each of x and a, together 4 bytes an element where x, h and a are equally wide.

Shape letters: M rows, K input, F inner and N output features.
"""

from __future__ import annotations

import torch
from gemworks.precision.activation import ACTIVATIONS, activation_cast, activation_gradient_cast
from gemworks.precision.casts import cast, cast_backend, cast_both, cast_squares
from gemworks.precision.gemms import gemm
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.products import linear_backward, specs_of, weight_plane
from gemworks.precision.recipe import GemmKind, Recipe, recipe
from torch import Tensor


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, activation: str, chosen: Recipe, save: bool):  # pyright: ignore[reportIncompatibleMethodOverride]
        spec, kind = specs_of(chosen.text).forward, chosen.forward.kind
        keep_x, keep_a = save and w1.requires_grad, save and w2.requires_grad
        columns_x = None
        if not keep_x and not chosen.square_inputs:
            rows = cast(x, 1, spec, chosen.backend)[0]
        elif chosen.square_inputs:
            made = cast_squares(x, spec, chosen.backend)
            rows, columns_x = made.rows, made.transposed
        else:
            rows, columns_x, _ = cast_both(x, spec, chosen.backend)
        h = gemm(rows, weight_plane(w1, chosen.forward, chosen, transposed=False)[0], kind, x.dtype, chosen.backend)
        h = h if b1 is None else h.add_(b1)
        a = activation_cast(h, spec, activation, square=chosen.square_inputs, backend=cast_backend(chosen))
        y = gemm(a.rows, weight_plane(w2, chosen.forward, chosen, transposed=False)[0], kind, x.dtype, chosen.backend)
        # Planes of inputs are kept for gradients of weights alone.
        kept = columns_x if keep_x else None, a.columns if keep_a else None
        ctx.metas = [None if plane is None else plane.meta for plane in kept]
        tensors = [() if plane is None else plane.tensors for plane in kept]
        ctx.count = len(tensors[0])
        ctx.save_for_backward(h if save else None, w1, w2, *tensors[0], *tensors[1])
        ctx.activation, ctx.chosen = activation, chosen
        ctx.bias_dtypes = tuple(None if b is None else b.dtype for b in (b1, b2))
        return y if b2 is None else y.add_(b2)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        h, w1, w2, *kept = ctx.saved_tensors
        chosen: Recipe = ctx.chosen
        x_plane, a_plane = (
            None if meta is None else MXTensor.unchecked(*tensors, *meta)
            for meta, tensors in zip(ctx.metas, (kept[: ctx.count], kept[ctx.count :]), strict=True)
        )
        need_x, need_w1, need_b1, need_w2, need_b2 = ctx.needs_input_grad[:5]
        type1, type2 = ctx.bias_dtypes
        inner = need_x or need_w1 or need_b1
        source = h if a_plane is None else a_plane  # read for dW2 alone
        da, dw2 = linear_backward(dy, source, w2, chosen, 0, inner, need_w2, h.dtype, w2.dtype)
        db2 = dy.sum(0, dtype=torch.float32).to(type2) if need_b2 and type2 is not None else None
        dx = dw1 = db1 = None
        if inner:
            assert da is not None
            spec, backend = specs_of(chosen.text).dgrad, cast_backend(chosen)
            need_db = need_b1 and type1 is not None
            dh = activation_gradient_cast(
                da, h, spec, ctx.activation, columns=need_w1, return_y=need_db, backend=backend
            )
            if need_db:
                assert dh.y is not None
                db1 = dh.y.sum(0, dtype=torch.float32).to(type1)
            if need_x:
                plane = weight_plane(w1, chosen.dgrad, chosen, transposed=True)[0]
                dx = gemm(dh.rows, plane, spec.kind, h.dtype, chosen.backend)
            if need_w1:
                assert dh.columns is not None
                assert x_plane is not None
                plane_x_t = x_plane if x_plane.dim is None else x_plane.t()
                dw1 = gemm(dh.columns.t(), plane_x_t, chosen.wgrad.kind, w1.dtype, chosen.backend, in_parts=True)
        return dx, dw1, db1, dw2, db2, None, None, None


def mx_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    recipe_or_name: str | Recipe = "mxfp8",
    *,
    activation: str = "gelu_tanh",
    b1: Tensor | None = None,
    b2: Tensor | None = None,
) -> Tensor:
    """`act(x W1^T + b1) W2^T + b2` with quantised products; trainable.

    Args:
        x: `[..., K]`.
        w1, b1: `[F, K]` and `[F]`.
        w2, b2: `[N, F]` and `[N]`.
        recipe_or_name: a recipe of one quantised kind for all three products, without squares of gradients, transforms
            or noise. Planes are kept for backward, whatever its `save` says.
        activation: `relu`, `silu`, `gelu` (by erf) or `gelu_tanh`.

    Returns:
        `[..., N]` in x's dtype.

    Raises:
        ValueError: another recipe, activation or shape.

    >>> x, w1, w2 = torch.randn(3, 64), torch.randn(128, 64), torch.randn(32, 128)
    >>> mx_mlp(x, w1, w2, activation="silu").shape
    torch.Size([3, 32])
    """
    chosen = recipe(recipe_or_name)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, expected one of {sorted(ACTIVATIONS)}")
    products = {(gemm_recipe.kind, gemm_recipe.left) for gemm_recipe in (chosen.forward, chosen.dgrad, chosen.wgrad)}
    products |= {(gemm_recipe.kind, gemm_recipe.right) for gemm_recipe in (chosen.forward, chosen.dgrad, chosen.wgrad)}
    plain = not (chosen.square_gradients or chosen.hadamard_size or chosen.stochastic_gradients)
    if len(products) > 1 or chosen.forward.kind in (GemmKind.BF16, GemmKind.FP8_TENSOR) or not plain:
        raise ValueError(
            f"recipe {chosen.name!r}: mx_mlp takes one quantised kind with blocks and one format for all "
            "products, without square_gradients, hadamard_size and stochastic_gradients; use two mx_linear around the "
            "activation"
        )
    (f, k), n = w1.shape, w2.shape[0]
    multiple = chosen.feature_multiple
    if x.shape[-1] != k or w2.shape[1] != f or any(size % multiple for size in (k, f, n)):
        raise ValueError(
            f"w1 and w2: got {tuple(w1.shape)} and {tuple(w2.shape)}, expected [F, {x.shape[-1]}] and [N, F] in "
            f"multiples of {multiple}"
        )
    y = _MLP.apply(x.reshape(-1, k), w1, b1, w2, b2, activation, chosen, torch.is_grad_enabled())
    return y.reshape(*x.shape[:-1], n)  # pyright: ignore[reportAttributeAccessIssue]
