"""Flash attention of one packed projection: its gradient comes back packed too, without being joined.

QK-norm and rotation take the heads of q and k in one pass, and the kernels of both backwards write straight into the
gradient of the projection. With `backward_epilogue` those of k are undone at the end of attention's own backward, which
leaves the heads of q to the pass.

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
from gemworks.jagged.ops.attention_core.op import (
    attention_forward,
    backward_flops,
    backward_into,
    forward_flops,
    goes_back_through_norm_rope,
)
from gemworks.jagged.ops.attention_core.reference import SOFTMAX
from gemworks.jagged.ops.rope.custom_op import norm_rope_backward_into, norm_rope_op, norm_rope_with_scales
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
    backward_epilogue: bool = False,
) -> Tensor:
    """`flash_attention` of one packed projection; its gradient comes back packed too, without being joined.

    Args:
        qkv: [T, N + 2 M, H]: the heads of q, then those of k, then those of v.
        num_heads: N.
        backward_epilogue: the backward of k's norm and rotation at the end of attention's own, in the fused kernel of
            sm_90 and in plain Triton with heads of 2^n; elsewhere, and for q, it is a pass of its own, as without.
            Keeps 4 bytes a row and head of q and k more.

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
    out, *_ = attention_qkv(
        qkv, cos, sin, offsets, *tiles_of(schedule), num_heads, args.side_q.max_length, scale,
        qk_norm_eps if qk_norm else None, min(mask.left, UNBOUNDED), min(mask.right, UNBOUNDED), backward_epilogue,
    )  # fmt: skip
    return out


def _settings(
    offsets: Tensor, tiles: list[Tensor], heights: str, _num_heads: int, max_length: int, scale: float,
    _eps: float | None, left: int, right: int, _backward_epilogue: bool,
) -> Settings:  # fmt: skip
    """Of the attention inside, from the last arguments of the operators here."""
    return Settings(
        offsets, None, tiles, heights, num_sequences=offsets.shape[0] - 1, rows_k=-1, max_length_q=max_length,
        max_length_k=max_length, scale=scale, activation=SOFTMAX, left=left, right=right, align="bottom_right",
        shared_query=False,
    )  # fmt: skip


def _forward(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, offsets: Tensor, tiles: list[Tensor], heights: str, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and what backward wants to know of the norm and the rotation.

    The latter are q and k as attention saw them, [T, N + M, H] ([0] if they are those of qkv), and with
    `backward_epilogue` the norm's factors, [T, N + M] ([0] without a norm).
    """
    num_heads, eps, backward_epilogue = rest[0], rest[3], rest[6]
    q, k, v = split_heads(qkv, num_heads)
    turned, scales = qkv.new_empty(0), qkv.new_empty(0, dtype=compute_dtype(qkv.dtype))
    if eps is not None or cos is not None:
        before = qkv[:, : -v.shape[1]]
        if backward_epilogue:
            turned, scales = norm_rope_with_scales(before, cos, sin, offsets[-1:], eps)
        else:
            turned = norm_rope_op(before, cos, sin, offsets[-1:], eps)
        q, k = turned[:, :num_heads], turned[:, num_heads:]
    out, lse = attention_forward(q, k, v, *_settings(offsets, tiles, heights, *rest))
    return out, lse, turned, scales


def _backward(
    d_out: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    turned: Tensor,
    scales: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    offsets: Tensor,
    tiles: list[Tensor],
    heights: str,
    *rest: Any,
) -> Tensor:
    num_heads, eps, backward_epilogue = rest[0], rest[3], rest[6]
    settings = _settings(offsets, tiles, heights, *rest)
    q, k, v = split_heads(qkv, num_heads)
    d_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    dq, dk, dv = split_heads(d_qkv, num_heads)
    if turned.dim() != 3:
        backward_into([dq, dk, dv], d_out, q, k, v, out, lse, *settings)
        return d_qkv
    q, k = turned[:, :num_heads], turned[:, num_heads:]
    keys, apart = None, turned.shape[1]  # heads whose norm and rotation are undone in a pass of their own
    if backward_epilogue and goes_back_through_norm_rope(q, k, v, settings):
        keys, apart = (cos, sin, None if eps is None else scales[:, num_heads:]), num_heads
    d_turned = torch.empty(qkv.shape[0], apart, qkv.shape[2], dtype=qkv.dtype, device=qkv.device)
    dq = d_turned[:, :num_heads]
    if keys is None:
        dk = d_turned[:, num_heads:]
    backward_into([dq, dk, dv], d_out, q, k, v, out, lse, *settings, keys=keys)
    norm_rope_backward_into(d_qkv[:, :apart], d_turned, qkv[:, :apart], cos, sin, offsets[-1:], eps)
    return d_qkv


_COMMON = (
    "Tensor? cos, Tensor? sin, Tensor offsets, Tensor[] tiles, str heights, int num_heads, int max_length, "
    "float scale, float? eps, int left, int right, bool backward_epilogue"
)
attention_qkv = custom_op("attention_qkv", _forward, f"(Tensor qkv, {_COMMON}) -> (Tensor, Tensor, Tensor, Tensor)")
attention_qkv_backward = custom_op(
    "attention_qkv_backward",
    _backward,
    f"(Tensor d_out, Tensor qkv, Tensor out, Tensor lse, Tensor turned, Tensor scales, {_COMMON}) -> Tensor",
)


@attention_qkv.register_fake
def _(qkv: Tensor, cos: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    num_heads, eps, backward_epilogue = rest[4], rest[7], rest[10]
    total, _, width = qkv.shape
    lse = qkv.new_empty(num_heads, total, dtype=compute_dtype(qkv.dtype))
    changed = eps is not None or cos is not None
    heads = (qkv.shape[1] + num_heads) // 2
    turned = qkv.new_empty(total, heads, width) if changed else qkv.new_empty(0)
    kept = (total, heads) if backward_epilogue and eps is not None else (0,)
    scales = qkv.new_empty(kept, dtype=compute_dtype(qkv.dtype))
    return qkv.new_empty(total, num_heads, width), lse, turned, scales


@attention_qkv_backward.register_fake
def _(d_out: Tensor, qkv: Tensor, *rest: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, cos, sin, offsets, tiles, ctx.heights, *ctx.rest = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(qkv, *output, cos, sin, offsets, *tiles)


def _differentiate(ctx: Any, d_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
    qkv, out, lse, turned, scales, cos, sin, offsets, *tiles = ctx.saved_tensors
    d_qkv = None
    if d_out is not None:
        d_qkv = attention_qkv_backward(
            d_out, qkv, out, lse, turned, scales, cos, sin, offsets, tiles, ctx.heights, *ctx.rest
        )
    return d_qkv, None, None, None, [None] * len(tiles), None, *[None] * len(ctx.rest)


attention_qkv.register_autograd(_differentiate, setup_context=_save)


def _register_flops(flop_counter: Any) -> None:
    """Of the attention inside; `rest` begins with offsets, tiles, heights and the number of heads."""

    def forward(qkv: Tensor, cos: Any, sin: Any, *rest: Any, out_val: Any = None, **_: Any) -> int:
        return forward_flops(*split_heads(qkv, rest[3]), _settings(*rest))

    def backward(
        d_out: Any, qkv: Tensor, out: Any, lse: Any, turned: Any, scales: Any, cos: Any, sin: Any, *rest: Any,
        out_val: Any = None, **_: Any,
    ) -> int:  # fmt: skip
        return backward_flops(*split_heads(qkv, rest[3]), _settings(*rest))

    ops = torch.ops.gemworks_jagged
    flop_counter.register_flop_formula(ops.attention_qkv, get_raw=True)(forward)
    flop_counter.register_flop_formula(ops.attention_qkv_backward, get_raw=True)(backward)


when_imported("torch.utils.flop_counter", _register_flops)
