"""A linear layer whose product adds to the residual stream, for the compiler.

Letters: T packed events, E width of the stream, X width of the layer's input.
"""

from __future__ import annotations

from typing import Any

import torch
from gemworks.gem.model.layers import product_dtype
from torch import Tensor, nn


def add_linear(s_TE: Tensor, x_TX: Tensor, layer: nn.Linear) -> Tensor:
    """`s + layer(x)`, of a layer without bias.

    A product can add to what its output holds already. `addmm`, which a compiler makes of such a sum, first copies s
    there, in a pass of its own; here the kernel that last wrote or read s stores that copy too. Eager layers, quantised
    ones and sums of two dtypes are computed as written.
    """
    dtype = product_dtype(x_TX)
    if not torch.compiler.is_compiling() or type(layer) is not nn.Linear or s_TE.dtype != dtype:
        return s_TE + layer(x_TX)
    assert layer.bias is None
    return _add_product(s_TE, x_TX.to(dtype), layer.weight.to(dtype))


@torch.library.custom_op("gemworks_gem::add_product_", mutates_args=("into",))
def add_product_(into: Tensor, x: Tensor, weight: Tensor) -> None:
    """`into += x weight^T`. Opaque: of what it does the compiler would make an `addmm` again."""
    into.addmm_(x, weight.t())


class _AddProduct(torch.autograd.Function):
    """`s + x weight^T`."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = s * 1  # not `clone`, which the compiler takes out, to put another one in that fuses with nothing
        add_product_(out, x, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        return grad, grad @ weight, grad.t() @ x


@torch.compiler.allow_in_graph  # Dynamo's own way through an autograd function makes an instance of it, and warns
def _add_product(s: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    out = _AddProduct.apply(s, x, weight)
    assert isinstance(out, Tensor)
    return out
