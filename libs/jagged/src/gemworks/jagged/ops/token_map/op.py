"""`token_map`: one map over tokens, plus what all samples share.

Letters: B samples, N tokens in, K tokens out, D columns.
"""

from __future__ import annotations

from typing import Any

import torch
from gemworks.jagged._checks import check_float
from gemworks.jagged._custom_op import custom_op
from gemworks.jagged._imports import when_imported
from gemworks.jagged.dispatch import HALF_DTYPES, architecture_of, backend_of
from gemworks.jagged.ops.token_map.reference import token_map_backward_reference, token_map_reference
from torch import Tensor

MAX_IN, MAX_OUT = 32, 256  # of the kernels, which hold all tokens of a tile of columns; others take the reference


def token_map(x: Tensor, weight: Tensor, base: Tensor) -> Tensor:
    """`Y_b = W X_b + base` for every sample of a batch.

    The per-sample weights of a PFFN are such a map: of a few tokens of a sample, and of weights that all samples share.
    On a GPU X, Y and their gradients are read or written once; W, base and their gradients stay in registers.

    Args:
        x: [B, N, D].
        weight: [K, N], in x's dtype or fp32.
        base: [K, D], as weight.

    Returns:
        [B, K, D] in x's dtype, summed in fp32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.

    >>> y = token_map(torch.ones(2, 3, 4), torch.ones(5, 3), torch.ones(5, 4))
    >>> tuple(y.shape), y.unique().item()
    ((2, 5, 4), 4.0)
    """
    check_float("x", x)
    fits = x.dim() == 3 and weight.dim() == 2 and weight.shape[1] == x.shape[1]
    if not fits or base.shape != (weight.shape[0], x.shape[2]):
        raise ValueError(
            f"x, weight, base: got {tuple(x.shape)}, {tuple(weight.shape)}, {tuple(base.shape)}, "
            f"expected [B, N, D], [K, N], [K, D]"
        )
    for name, p in (("weight", weight), ("base", base)):
        if p.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"{name}: got dtype {p.dtype}, expected {x.dtype} like x, or float32; cast it")
        if p.device != x.device:
            raise ValueError(f"{name}: got device {p.device}, expected {x.device} like x; move it")
    is_small = weight.shape[0] <= MAX_OUT and weight.shape[1] <= MAX_IN
    if x.device.type == "cuda" and x.dtype in HALF_DTYPES and is_small:
        return token_map_op(x, weight, base)
    return token_map_reference(x, weight, base)


def _uses_triton(x: Tensor) -> bool:
    return backend_of("token_map", x.dtype, architecture_of(x.device)) == "triton"


def _forward(x: Tensor, weight: Tensor, base: Tensor) -> Tensor:
    if not _uses_triton(x):
        return token_map_reference(x, weight, base)
    from gemworks.jagged.ops.token_map.launch import token_map_forward

    return token_map_forward(x.contiguous(), weight.contiguous(), base.contiguous())


token_map_op = custom_op("token_map", _forward)


@token_map_op.register_fake
def _fake(x: Tensor, weight: Tensor, base: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], x.shape[2])


def _backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and in float32 dweight and dbase."""
    if not _uses_triton(x):
        return token_map_backward_reference(dy, x, weight)
    from gemworks.jagged.ops.token_map.launch import token_map_backward

    return token_map_backward(dy.contiguous(), x.contiguous(), weight.contiguous())


token_map_backward_op = custom_op("token_map_backward", _backward)


@token_map_backward_op.register_fake
def _backward_fake(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dweight, dbase = (x.new_empty(shape, dtype=torch.float32) for shape in (weight.shape, dy.shape[1:]))
    return x.new_empty(x.shape), dweight, dbase


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, base = inputs
    ctx.save_for_backward(x, weight)
    ctx.base_dtype = base.dtype


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    dx, dweight, dbase = token_map_backward_op(dy, x, weight)
    return dx, dweight.to(weight.dtype), dbase.to(ctx.base_dtype)


token_map_op.register_autograd(_differentiate, setup_context=_save)


def _register_flops(flop_counter: Any) -> None:
    def forward(x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
        return 2 * x[0] * x[1] * x[2] * weight[0]

    def backward(dy: Any, x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
        return 4 * x[0] * x[1] * x[2] * weight[0]

    flop_counter.register_flop_formula(torch.ops.gemworks_jagged.token_map)(forward)
    flop_counter.register_flop_formula(torch.ops.gemworks_jagged.token_map_backward)(backward)


when_imported("torch.utils.flop_counter", _register_flops)
