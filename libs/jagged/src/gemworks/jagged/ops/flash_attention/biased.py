"""Attention with an additive bias as custom ops: `gemworks_jagged::attention_biased` and its backward, on CUDA alone.

Plain Triton looks the bias up pair by pair and sums the tables' gradients in a fixed order
(attention_core/kernel_bias.py). On a CPU the definition runs, differentiated by autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from gemworks.jagged._custom_op import custom_op
from gemworks.jagged._dense import compute_dtype
from gemworks.jagged._imports import when_imported
from gemworks.jagged.dispatch import architecture_of, warn_once
from gemworks.jagged.ops.attention_core.call import SETTINGS, Call, Settings
from gemworks.jagged.ops.attention_core.op import backward_flops, forward_flops, make_problem
from gemworks.jagged.ops.attention_core.table import MAX_TIME_BUCKETS, TRITON_DTYPES, TRITON_MAX_HEAD_DIM
from gemworks.jagged.ops.flash_attention.bias import AttentionBias
from torch import Tensor

_TABLES = "Tensor? position, Tensor? time, Tensor? times_q, Tensor? times_k, int time_unit"
_NUM_TABLES = 5  # arguments of _TABLES


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: AttentionBias, settings: Settings) -> Tensor:
    """[rows of q's side, N, V], differentiable once, in the tables too."""
    b = bias
    tables = (b.position_table, b.time_table, b.timestamps_q, b.timestamps_k, b.time_unit)
    out, _ = attention_biased(q, k, v, *tables, *settings)
    return out


def has_kernel(q: Tensor, v: Tensor, bias: AttentionBias) -> bool:
    """Whether `biased_attention` takes this call; warns once where a device has to run the definition instead."""
    if q.device.type != "cuda":
        return False
    time = bias.time_table
    if time is not None and time.shape[0] > MAX_TIME_BUCKETS:
        warn_once(f"a time_table of more than {MAX_TIME_BUCKETS} buckets runs on the reference backend")
        return False
    if q.dtype in TRITON_DTYPES and max(q.shape[2], v.shape[2]) <= TRITON_MAX_HEAD_DIM:
        return True
    warn_once("attention with a bias runs on the reference backend: triton does not take its dtype or head width")
    return False


def _biased_problem(q: Tensor, k: Tensor, v: Tensor, tables: tuple[Any, ...], call: Call) -> Any:
    from gemworks.jagged.ops.attention_core import launch

    position, time, times_q, times_k, unit = tables
    by_position, by_time = (None if x is None else x.detach().t().contiguous().float() for x in (position, time))
    bias = launch.Bias(by_position, by_time, times_q, times_q if times_k is None else times_k, unit)
    return make_problem(q, k, v, call, architecture_of(q.device), bias)


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp [N, rows])."""
    from gemworks.jagged.ops.attention_core import launch

    tables, call = rest[:_NUM_TABLES], Call(q, k, Settings(*rest[_NUM_TABLES:]))
    return launch.forward(_biased_problem(q, k, v, tables, call))


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, gradients of the tables), [0] for a table that is not there."""
    from gemworks.jagged.ops.attention_core import launch

    tables, call = rest[:_NUM_TABLES], Call(q, k, Settings(*rest[_NUM_TABLES:]))
    into = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    sums = launch.backward(_biased_problem(q, k, v, tables, call), d_out, out, lse, into)
    assert sums is not None
    d_tables = [
        q.new_empty(0) if x is None else s.t().to(x.dtype, memory_format=torch.contiguous_format)
        for x, s in zip(tables[:2], sums, strict=True)
    ]
    return into[0], into[1], into[2], d_tables[0], d_tables[1]


attention_biased = custom_op(
    "attention_biased",
    _forward,
    f"(Tensor q, Tensor k, Tensor v, {_TABLES}, {SETTINGS}) -> (Tensor, Tensor)",
    device="cuda",
)
attention_biased_backward = custom_op(
    "attention_biased_backward",
    _backward,
    "(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_TABLES}, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    device="cuda",
)


@attention_biased.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    s = Settings(*rest[_NUM_TABLES:])
    rows = s.num_sequences * q.shape[0] if s.shared_query else q.shape[0]
    lse = q.new_empty(q.shape[1], rows, dtype=compute_dtype(q.dtype))
    return q.new_empty(rows, q.shape[1], v.shape[-1]), lse


@attention_biased_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    tables = [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in rest[:2]]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *tables


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, position, time, times_q, times_k, ctx.unit, offsets_q, offsets_k, tiles, ctx.heights, *ctx.rest = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, position, time, times_q, times_k, offsets_q, offsets_k, *tiles)


def _differentiate(ctx: Any, d_out: Tensor | None, _d_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, position, time, times_q, times_k, offsets_q, offsets_k, *tiles = ctx.saved_tensors
    none = (None, None, None, None, None, [None] * len(tiles), None, *[None] * len(ctx.rest))
    if d_out is None:
        return None, None, None, None, None, *none
    *grads, d_position, d_time = attention_biased_backward(
        d_out, q, k, v, out, lse, position, time, times_q, times_k, ctx.unit, offsets_q, offsets_k, tiles,
        ctx.heights, *ctx.rest,
    )  # fmt: skip
    d_tables = (None if position is None else d_position, None if time is None else d_time)
    return *grads, *d_tables, *none


attention_biased.register_autograd(_differentiate, setup_context=_save)


def _register_flops(flop_counter: Any) -> None:
    """As attention without a bias: the lookups are no products, and the tables' gradients recompute."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None, **_: Any) -> int:
        return forward_flops(q, k, v, Settings(*rest[_NUM_TABLES:]))

    def backward(
        d_out: Any, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, *rest: Any, out_val: Any = None, **_: Any
    ) -> int:
        return backward_flops(q, k, v, Settings(*rest[_NUM_TABLES:]))

    ops = torch.ops.gemworks_jagged
    flop_counter.register_flop_formula(ops.attention_biased, get_raw=True)(forward)
    flop_counter.register_flop_formula(ops.attention_biased_backward, get_raw=True)(backward)


when_imported("torch.utils.flop_counter", _register_flops)
