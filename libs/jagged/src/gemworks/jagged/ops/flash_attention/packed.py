"""Flash attention of one packed projection: its gradient comes back packed too, without being joined.

QK-norm and rotation take the heads of q and k in one pass, and the kernels of both backwards write straight into the
gradient of the projection.

Letters: T rows, N query heads, M key heads, H head width, J = H / 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gemworks.jagged._attention_args import autocast, check_attention, check_qkv, make_mask, split_heads
from gemworks.jagged._custom_op import custom_op
from gemworks.jagged._dense import compute_dtype
from gemworks.jagged._imports import when_imported
from gemworks.jagged.ops.attention_core.call import UNBOUNDED, Settings, tiles_of
from gemworks.jagged.ops.attention_core.op import attention_forward, backward_flops, backward_into, forward_flops
from gemworks.jagged.ops.attention_core.reference import SOFTMAX
from gemworks.jagged.ops.rope.custom_op import norm_rope_backward_into, norm_rope_op
from gemworks.jagged.ops.rope.reference import RopeTables
from gemworks.jagged.schedule import TileSchedule
from torch import Tensor


def flash_attention_qkv(
    qkv: Tensor,
    offsets: Tensor,
    *,
    num_heads: int,
    max_length: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    qk_norm: bool = False,
    qk_norm_eps: float = 1e-6,
    rope: RopeTables | None = None,
    schedule: TileSchedule | None = None,
) -> Tensor:
    """`flash_attention` of one packed projection; its gradient comes back packed too, without being joined.

    Args:
        qkv: [T, N + 2 M, H]: the heads of q, then those of k, then those of v.
        num_heads: N.

    The other arguments, the result [T, N, H] and the errors are `flash_attention`'s.

    >>> import torch
    >>> from gemworks.jagged import flash_attention
    >>> qkv, offsets = torch.randn(70, 3, 8), torch.tensor([0, 30, 70])
    >>> out = flash_attention_qkv(qkv, offsets, num_heads=1, max_length=64)
    >>> torch.allclose(out, flash_attention(*qkv.split(1, dim=1), offsets, max_length_q=64))
    True
    """
    check_qkv(qkv, num_heads)
    (qkv,) = autocast(qkv)
    mask = make_mask(causal, window, "bottom_right")
    args = check_attention(
        *split_heads(qkv, num_heads), offsets, None, max_length_q=max_length, max_length_k=None, shared_query=False
    )
    if rope is not None:
        RopeTables.check(rope, "rope", total=qkv.shape[0], head_dim=qkv.shape[-1], device=qkv.device)
    cos, sin = (None, None) if rope is None else (rope.cos_TJ, rope.sin_TJ)
    scale = 1.0 / math.sqrt(qkv.shape[-1]) if scale is None else scale
    out, _, _ = attention_qkv(
        qkv, cos, sin, offsets, *tiles_of(schedule), num_heads, args.side_q.max_length, scale,
        qk_norm_eps if qk_norm else None, min(mask.left, UNBOUNDED), min(mask.right, UNBOUNDED),
    )  # fmt: skip
    return out


def _settings(
    offsets: Tensor, tiles: list[Tensor], heights: str, _num_heads: int, max_length: int, scale: float,
    _eps: float | None, left: int, right: int,
) -> Settings:  # fmt: skip
    """Of the attention inside, from the last arguments of the operators here."""
    return Settings(
        offsets, None, tiles, heights, num_sequences=offsets.shape[0] - 1, rows_k=-1, max_length_q=max_length,
        max_length_k=max_length, scale=scale, activation=SOFTMAX, left=left, right=right, align="bottom_right",
        shared_query=False,
    )  # fmt: skip


def _forward(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, offsets: Tensor, tiles: list[Tensor], heights: str, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, log-sum-exp, q and k as attention saw them: [T, N + M, H], or [0] if they are those of qkv)."""
    num_heads, eps = rest[0], rest[3]
    q, k, v = split_heads(qkv, num_heads)
    turned = qkv.new_empty(0)
    if eps is not None or cos is not None:
        turned = norm_rope_op(qkv[:, : -v.shape[1]], cos, sin, offsets[-1:], eps)
        q, k = turned[:, :num_heads], turned[:, num_heads:]
    out, lse = attention_forward(q, k, v, *_settings(offsets, tiles, heights, *rest))
    return out, lse, turned


def _backward(
    d_out: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    turned: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    offsets: Tensor,
    tiles: list[Tensor],
    heights: str,
    *rest: Any,
) -> Tensor:
    num_heads, eps = rest[0], rest[3]
    q, k, v = split_heads(qkv, num_heads)
    d_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    dq, dk, dv = split_heads(d_qkv, num_heads)
    changed = turned.dim() == 3
    d_turned = torch.empty_like(turned)
    if changed:
        q, k = turned[:, :num_heads], turned[:, num_heads:]
        dq, dk = d_turned[:, :num_heads], d_turned[:, num_heads:]
    backward_into([dq, dk, dv], d_out, q, k, v, out, lse, *_settings(offsets, tiles, heights, *rest))
    if changed:
        both = slice(0, qkv.shape[1] - v.shape[1])
        norm_rope_backward_into(d_qkv[:, both], d_turned, qkv[:, both], cos, sin, offsets[-1:], eps)
    return d_qkv


_COMMON = (
    "Tensor? cos, Tensor? sin, Tensor offsets, Tensor[] tiles, str heights, int num_heads, int max_length, "
    "float scale, float? eps, int left, int right"
)
attention_qkv = custom_op("attention_qkv", _forward, f"(Tensor qkv, {_COMMON}) -> (Tensor, Tensor, Tensor)")
attention_qkv_backward = custom_op(
    "attention_qkv_backward",
    _backward,
    f"(Tensor d_out, Tensor qkv, Tensor out, Tensor lse, Tensor turned, {_COMMON}) -> Tensor",
)


@attention_qkv.register_fake
def _(qkv: Tensor, cos: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, eps = rest[4], rest[7]
    total, _, width = qkv.shape
    lse = qkv.new_empty(num_heads, total, dtype=compute_dtype(qkv.dtype))
    changed = eps is not None or cos is not None
    turned = qkv.new_empty(total, (qkv.shape[1] + num_heads) // 2, width) if changed else qkv.new_empty(0)
    return qkv.new_empty(total, num_heads, width), lse, turned


@attention_qkv_backward.register_fake
def _(d_out: Tensor, qkv: Tensor, *rest: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    qkv, cos, sin, offsets, tiles, ctx.heights, *ctx.rest = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(qkv, *output, cos, sin, offsets, *tiles)


def _differentiate(ctx: Any, d_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
    qkv, out, lse, turned, cos, sin, offsets, *tiles = ctx.saved_tensors
    d_qkv = None
    if d_out is not None:
        d_qkv = attention_qkv_backward(d_out, qkv, out, lse, turned, cos, sin, offsets, tiles, ctx.heights, *ctx.rest)
    return d_qkv, None, None, None, [None] * len(tiles), None, *[None] * len(ctx.rest)


attention_qkv.register_autograd(_differentiate, setup_context=_save)


def _register_flops(flop_counter: Any) -> None:
    """Of the attention inside; `rest` begins with offsets, tiles, heights and the number of heads."""

    def forward(qkv: Tensor, cos: Any, sin: Any, *rest: Any, out_val: Any = None, **_: Any) -> int:
        return forward_flops(*split_heads(qkv, rest[3]), _settings(*rest))

    def backward(
        d_out: Any, qkv: Tensor, out: Any, lse: Any, turned: Any, cos: Any, sin: Any, *rest: Any,
        out_val: Any = None, **_: Any,
    ) -> int:  # fmt: skip
        return backward_flops(*split_heads(qkv, rest[3]), _settings(*rest))

    ops = torch.ops.gemworks_jagged
    flop_counter.register_flop_formula(ops.attention_qkv, get_raw=True)(forward)
    flop_counter.register_flop_formula(ops.attention_qkv_backward, get_raw=True)(backward)


when_imported("torch.utils.flop_counter", _register_flops)
