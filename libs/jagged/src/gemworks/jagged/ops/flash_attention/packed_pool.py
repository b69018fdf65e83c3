"""Pooled attention of one packed projection of keys and values: its gradient comes back packed too.

Norm and rotation take the keys in one pass, and the kernels of both backwards write straight into the gradient of the
projection; nothing is joined. With `backward_epilogue` attention's own backward goes back through norm and rotation.

Letters: B sequences, T rows, R rows of the shared query, N query heads, M key heads, H head width, J = H / 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gemworks.jagged._attention_args import autocast, check_attention
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


def flash_attention_pool(
    q: Tensor,
    kv: Tensor,
    offsets: Tensor,
    *,
    max_length: int | None = None,
    scale: float | None = None,
    k_norm: bool = False,
    k_norm_eps: float = 1e-6,
    rope: RopeTables | None = None,
    schedule: TileSchedule | None = None,
    backward_epilogue: bool = False,
) -> Tensor:
    """`flash_attention` of a query that all sequences share on one packed projection of keys and values.

    Args:
        q: [R, N, H], one for the whole batch; neither normed nor rotated here.
        kv: [T, 2 M, H]: the heads of k, then those of v. M divides N.
        offsets: int32 or int64 [B + 1], of kv's rows.
        max_length: bound of the lengths, known on the host.
        scale: factor of the logits; None means 1 / sqrt(H).
        k_norm: divide each head of k by its root mean square, no affine, before rope.
        rope: rotation of k's rows.
        schedule: `TileSchedule.build(None, offsets, total_q=R, total_k=T)`; None builds one.
        backward_epilogue: the backward of k's norm and rotation at the end of attention's own, in the fused kernel of
            sm_90 and in plain Triton with heads of 2^n; elsewhere it is a pass of its own, as without. Keeps 4 bytes a
            row and head of k more.

    Returns:
        [B, R, N, H] in q's dtype; zeros for a sequence without rows. The gradient of kv is one tensor, like kv.

    Raises:
        ValueError: arguments that do not fit.

    >>> import torch
    >>> from gemworks.jagged import flash_attention
    >>> q, kv, offsets = torch.randn(3, 1, 8), torch.randn(70, 2, 8), torch.tensor([0, 30, 70])
    >>> out = flash_attention_pool(q, kv, offsets, max_length=64)
    >>> k, v = kv.chunk(2, dim=1)
    >>> same = flash_attention(q, k, v, None, offsets, max_length_k=64, shared_query=True)
    >>> torch.allclose(out, same)
    True
    """
    if kv.dim() != 3 or not kv.shape[1] or kv.shape[1] % 2:
        raise ValueError(
            f"kv: got shape {tuple(kv.shape)}, expected [T, 2 M, H]: the heads of k, then those of v; split the "
            f"projection's columns with .unflatten(-1, (2 * M, H))"
        )
    q, kv = autocast(q, kv)
    k, v = kv.chunk(2, dim=1)
    args = check_attention(
        q, k, v, None, offsets, max_length_q=None, max_length_k=max_length, shared_query=True
    )  # fmt: skip
    if rope is not None:
        RopeTables.check(rope, "rope", total=kv.shape[0], head_dim=kv.shape[-1], device=kv.device)
    cos, sin = (None, None) if rope is None else (rope.cos_TJ, rope.sin_TJ)
    scale = 1.0 / math.sqrt(kv.shape[-1]) if scale is None else scale
    out, *_ = attention_pool(
        q, kv, cos, sin, offsets, *tiles_of(schedule), args.side_k.max_length, scale, k_norm_eps if k_norm else None,
        backward_epilogue,
    )  # fmt: skip
    return out.view(args.num_sequences, *q.shape)


def _settings(
    offsets: Tensor, tiles: list[Tensor], heights: str, max_length: int, scale: float, _eps: float | None,
    _backward_epilogue: bool,
) -> Settings:  # fmt: skip
    """Of the attention inside, from the last arguments of the operators here."""
    return Settings(
        None, offsets, tiles, heights, num_sequences=offsets.shape[0] - 1, rows_k=-1, max_length_q=0,
        max_length_k=max_length, scale=scale, activation=SOFTMAX, left=UNBOUNDED, right=UNBOUNDED,
        align="bottom_right", shared_query=True,
    )  # fmt: skip


def _forward(
    q: Tensor, kv: Tensor, cos: Tensor | None, sin: Tensor | None, offsets: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output [B * R, N, H], log-sum-exp, and what backward wants to know of the norm and the rotation.

    The latter are k as attention saw it, [T, M, H] ([0] if it is that of kv), and with `backward_epilogue` the norm's
    factors, [T, M] ([0] without a norm).
    """
    eps, backward_epilogue = rest[-2:]
    k, v = kv.chunk(2, dim=1)
    turned, scales = kv.new_empty(0), kv.new_empty(0, dtype=compute_dtype(kv.dtype))
    if eps is not None or cos is not None:
        if backward_epilogue:
            turned, scales = norm_rope_with_scales(k, cos, sin, offsets[-1:], eps)
        else:
            turned = norm_rope_op(k, cos, sin, offsets[-1:], eps)
        k = turned
    out, lse = attention_forward(q, k, v, *_settings(offsets, *rest))
    return out, lse, turned, scales


def _backward(
    d_out: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    turned: Tensor,
    scales: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    offsets: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    k, v = kv.chunk(2, dim=1)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    d_kv = torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
    dk, dv = d_kv.chunk(2, dim=1)
    eps, backward_epilogue = rest[-2:]
    settings = _settings(offsets, *rest)
    if turned.dim() != 3:
        backward_into([dq, dk, dv], d_out, q, k, v, out, lse, *settings)
    elif backward_epilogue and goes_back_through_norm_rope(q, turned, v, settings):
        keys = (cos, sin, None if eps is None else scales)
        backward_into([dq, dk, dv], d_out, q, turned, v, out, lse, *settings, keys=keys)
    else:
        d_turned = torch.empty_like(turned)
        backward_into([dq, d_turned, dv], d_out, q, turned, v, out, lse, *settings)
        norm_rope_backward_into(dk, d_turned, k, cos, sin, offsets[-1:], eps)
    return dq, d_kv


_SETTINGS = (
    "Tensor offsets, Tensor[] tiles, str heights, int max_length, float scale, float? eps, bool backward_epilogue"
)
attention_pool = custom_op(
    "attention_pool",
    _forward,
    f"(Tensor q, Tensor kv, Tensor? cos, Tensor? sin, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
attention_pool_backward = custom_op(
    "attention_pool_backward",
    _backward,
    "(Tensor d_out, Tensor q, Tensor kv, Tensor out, Tensor lse, Tensor turned, Tensor scales, Tensor? cos, "
    f"Tensor? sin, {_SETTINGS}) -> (Tensor, Tensor)",
)


@attention_pool.register_fake
def _(q: Tensor, kv: Tensor, cos: Tensor | None, sin: Any, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    rows, num_heads, width = (offsets.shape[0] - 1) * q.shape[0], q.shape[1], q.shape[2]
    lse = q.new_empty(num_heads, rows, dtype=compute_dtype(q.dtype))
    eps, backward_epilogue = rest[-2:]
    total, heads = kv.shape[0], kv.shape[1] // 2
    turned = kv.new_empty(total, heads, width) if eps is not None or cos is not None else kv.new_empty(0)
    kept = (total, heads) if backward_epilogue and eps is not None else (0,)
    scales = kv.new_empty(kept, dtype=compute_dtype(kv.dtype))
    return q.new_empty(rows, num_heads, width), lse, turned, scales


@attention_pool_backward.register_fake
def _(d_out: Tensor, q: Tensor, kv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, kv, cos, sin, offsets, tiles, *ctx.rest = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, kv, *output, cos, sin, offsets, *tiles)


def _differentiate(ctx: Any, d_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
    q, kv, out, lse, turned, scales, cos, sin, offsets, *tiles = ctx.saved_tensors
    dq = d_kv = None
    if d_out is not None:
        dq, d_kv = attention_pool_backward(d_out, q, kv, out, lse, turned, scales, cos, sin, offsets, tiles, *ctx.rest)
    return dq, d_kv, *(None,) * 9


attention_pool.register_autograd(_differentiate, setup_context=_save)


def _register_flops(flop_counter: Any) -> None:
    """Of the attention inside."""

    def forward(q: Tensor, kv: Tensor, cos: Any, sin: Any, *rest: Any, out_val: Any = None, **_: Any) -> int:
        k, v = kv.chunk(2, dim=1)
        return forward_flops(q, k, v, _settings(*rest))

    def backward(
        d_out: Any, q: Tensor, kv: Tensor, out: Any, lse: Any, turned: Any, scales: Any, cos: Any, sin: Any,
        *rest: Any, out_val: Any = None, **_: Any,
    ) -> int:  # fmt: skip
        k, v = kv.chunk(2, dim=1)
        return backward_flops(q, k, v, _settings(*rest))

    ops = torch.ops.gemworks_jagged
    flop_counter.register_flop_formula(ops.attention_pool, get_raw=True)(forward)
    flop_counter.register_flop_formula(ops.attention_pool_backward, get_raw=True)(backward)


when_imported("torch.utils.flop_counter", _register_flops)
