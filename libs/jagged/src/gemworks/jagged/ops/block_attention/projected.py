"""BlockAttention with the projections to q, k and v in front: nothing of them is kept for the backward.

Letters: T packed rows, D width of x, N query heads, M key heads, H head width.
"""

from __future__ import annotations

from typing import Any

import torch
from gemworks.jagged._attention_args import autocast, split_heads
from gemworks.jagged._checks import check_float, check_max_length
from gemworks.jagged._custom_op import custom_op
from gemworks.jagged._imports import when_imported
from gemworks.jagged.ops.block_attention import custom_op as unprojected
from gemworks.jagged.ops.block_attention.formulas import BlockArgs
from gemworks.jagged.ops.block_attention.op import block_attention_qkv, block_settings, has_kernel
from gemworks.jagged.ops.block_attention.schedule import BlockSchedule
from gemworks.jagged.ops.rope.reference import RopeTables
from torch import Tensor
from torch.nn import functional


def block_attention_projected(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    num_heads: int,
    head_dim: int,
    max_length: int | None = None,
    scale: float | None = None,
    block: int = 64,
    causal: bool = False,
    rope: RopeTables | None = None,
    qk_norm: bool = False,
    qk_norm_eps: float = 1e-6,
    schedule: BlockSchedule | None = None,
) -> Tensor:
    """`block_attention_qkv` of `x @ weight.T`; the backward computes the projections again instead of keeping them.

    Args:
        x: packed rows [T, D].
        weight: [(N + 2 M) * H, D], as of a linear layer without bias: the rows of q's heads, then k's, then v's.
        num_heads, head_dim: N and H; M follows from the weight.

    The other arguments, the result [T, N, H] and the errors are `block_attention`'s.

    >>> import torch
    >>> x, weight, offsets = torch.randn(70, 5), torch.randn(24, 5), torch.tensor([0, 70])
    >>> out = block_attention_projected(x, weight, offsets, num_heads=1, head_dim=8, max_length=128)
    >>> qkv = (x @ weight.T).unflatten(-1, (3, 8))
    >>> torch.allclose(out, block_attention_qkv(qkv, offsets, num_heads=1, max_length=128))
    True
    """
    check_float("x", x)
    check_float("weight", weight, device=x.device)
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"weight: got shape {tuple(weight.shape)} with x {tuple(x.shape)}, expected [(N + 2 M) * H, D] with "
            f"x [T, D]"
        )
    heads, left = divmod(weight.shape[0], head_dim) if head_dim > 0 else (0, 1)
    if left or not 0 < num_heads < heads or (heads - num_heads) % 2:
        raise ValueError(
            f"weight: got {weight.shape[0]} rows with num_heads {num_heads} and head_dim {head_dim}, expected "
            f"(N + 2 M) * H: the heads of q, k and v one after the other"
        )
    x, weight = autocast(x, weight)
    check_float("weight", weight, dtype=x.dtype)
    key_heads = (heads - num_heads) // 2
    # Shapes alone: no row of it is read.
    qkv = x[:, :1, None].expand(-1, heads, head_dim)
    q, k, v = split_heads(qkv, num_heads)
    if not has_kernel(q, head_dim, block, num_heads // max(key_heads, 1)):
        return block_attention_qkv(
            functional.linear(x, weight).unflatten(-1, (heads, head_dim)), offsets, num_heads=num_heads,
            max_length=max_length, scale=scale, block=block, causal=causal, rope=rope, qk_norm=qk_norm,
            qk_norm_eps=qk_norm_eps, schedule=schedule,
        )  # fmt: skip
    bound = check_max_length("max_length", max_length)
    settings = block_settings(q, k, v, offsets, bound, scale, block, causal, rope, qk_norm, qk_norm_eps, schedule)
    return block_attention_projected_op(x, weight, offsets, num_heads, head_dim, *settings)


def _forward(x: Tensor, weight: Tensor, offsets: Tensor, num_heads: int, head_dim: int, *settings: Any) -> Tensor:
    """[T, N, H], contiguous."""
    return unprojected.forward(*split_heads(_project(x, weight, head_dim), num_heads), BlockArgs(*settings))


def _backward(
    dout: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, num_heads: int, head_dim: int, *settings: Any
) -> tuple[Tensor, Tensor]:
    """(dx, dweight): the projections again, the backward of block attention, and two products."""
    live = (torch.arange(x.shape[0], device=x.device) < offsets[-1])[:, None]
    x = torch.where(live, x, 0)  # 0 times garbage past the end could be NaN in dweight
    dqkv = unprojected.backward_qkv(dout, _project(x, weight, head_dim), num_heads, *settings).flatten(1)
    return dqkv @ weight, dqkv.mT @ x


def _project(x: Tensor, weight: Tensor, head_dim: int) -> Tensor:
    return functional.linear(x, weight).unflatten(-1, (-1, head_dim))


_ARGUMENTS = f"Tensor x, Tensor weight, Tensor offsets, SymInt num_heads, SymInt head_dim, {unprojected.SETTINGS}"
block_attention_projected_op = custom_op("block_attention_projected", _forward, f"({_ARGUMENTS}) -> Tensor")
block_attention_projected_backward_op = custom_op(
    "block_attention_projected_backward", _backward, f"(Tensor dout, {_ARGUMENTS}) -> (Tensor, Tensor)"
)


@block_attention_projected_op.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor, num_heads: int, head_dim: int, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], num_heads, head_dim)


@block_attention_projected_backward_op.register_fake
def _(dout: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, offsets, num_heads, head_dim, table, cos, sin, *ctx.settings = inputs
    ctx.heads = num_heads, head_dim
    ctx.save_for_backward(x, weight, offsets, table, cos, sin)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    x, weight, offsets, table, cos, sin = ctx.saved_tensors
    grads = block_attention_projected_backward_op(dout, x, weight, offsets, *ctx.heads, table, cos, sin, *ctx.settings)
    return *grads, *(None,) * 11


block_attention_projected_op.register_autograd(_differentiate, setup_context=_save)


def _register_flops(flop_counter: Any) -> None:
    def products(x: Any, weight: Any) -> int:
        return 2 * x.shape[0] * weight.shape[0] * weight.shape[1]

    def forward(
        x: Any, weight: Any, offsets: Any, num_heads: int, head_dim: int, table: Any, cos: Any, sin: Any, scale: float,
        block: int, causal: bool, *_: Any, **__: Any,
    ) -> int:  # fmt: skip
        pairs = unprojected.pairs_of(table, x.shape[0], block, causal)
        return products(x, weight) + 4 * pairs * num_heads * head_dim

    def backward(dout: Any, x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
        """Two products for each of the forward's projections, five for its two of attention; nothing for what is
        computed again."""
        attention = forward(x, weight, *args, **kwargs) - products(x, weight)
        return 2 * products(x, weight) + attention * 5 // 2

    ops = torch.ops.gemworks_jagged
    flop_counter.register_flop_formula(ops.block_attention_projected, get_raw=True)(forward)
    flop_counter.register_flop_formula(ops.block_attention_projected_backward, get_raw=True)(backward)


when_imported("torch.utils.flop_counter", _register_flops)
