"""The custom ops behind `flash_attention` and `gdpa`: `gemworks_jagged::attention_forward` and `attention_backward`.

Opaque to the compiler: one graph for every total and every set of lengths. The CPU kernel is reference.py; the CUDA
kernel is chosen by table.py and started by launch.py. No kernel reads a device value on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from gemworks.jagged._checks import is_host
from gemworks.jagged._custom_op import custom_op
from gemworks.jagged._dense import compute_dtype
from gemworks.jagged._imports import when_imported
from gemworks.jagged.dispatch import architecture_of, warn_once
from gemworks.jagged.ops.attention_core import table
from gemworks.jagged.ops.attention_core.call import SETTINGS, UNBOUNDED, Call, Settings
from gemworks.jagged.ops.attention_core.reference import SOFTMAX, backward_reference, forward_reference
from gemworks.jagged.schedule import TileSchedule
from torch import Tensor

_FORWARD_SCHEMA = f"(Tensor q, Tensor k, Tensor v, {SETTINGS}) -> (Tensor, Tensor)"
_BACKWARD_SCHEMA = (
    f"(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor? out, Tensor? lse, {SETTINGS}) -> (Tensor, Tensor, Tensor)"
)


def _forward_on_host(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    call = Call(q, k, Settings(*rest))
    return forward_reference(q, k, v, call.plan(q, k), call.rule)


def _backward_on_host(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(q, k, Settings(*rest))
    return backward_reference(d_out, q, k, v, out, lse, call.plan(q, k), call.rule)


attention_forward = custom_op("attention_forward", _forward_on_host, _FORWARD_SCHEMA, device="cpu")
attention_backward = custom_op("attention_backward", _backward_on_host, _BACKWARD_SCHEMA, device="cpu")


def make_problem(q: Tensor, k: Tensor, v: Tensor, call: Call, architecture: str, bias: Any = None) -> Any:
    """What launch.py takes; `bias` is its `Bias`."""
    from gemworks.jagged.ops.attention_core import launch

    rows_k = call.side_k.rows if call.side_k is not call.side_q else None
    if call.tiles:
        schedule = TileSchedule(tuple(call.tiles), call.heights)
    else:
        packed_k = call.side_k.offsets if call.side_k is not call.side_q else None
        schedule = TileSchedule.build(
            call.side_q.offsets,
            packed_k,
            total_q=q.shape[0],
            total_k=None if packed_k is None else k.shape[0],
            rows_k=rows_k,
            num_sequences=call.num_sequences,
            heights="",
        )
    q, k, v = (launch.rowwise(x) for x in (q, k, v))
    return launch.Problem(q, k, v, call.rule, schedule, call.bound_k, architecture, call.side_q.total, rows_k, bias)


def _shape(q: Tensor, k: Tensor, v: Tensor, call: Call) -> table.Shape:
    return table.Shape(
        call.rule.activation,
        q.dtype,
        q.shape[2],
        v.shape[2],
        not call.rule.mask.is_full,
        call.rule.shared_query,
        q.shape[1] != k.shape[1],
        call.bound_k,
    )


def goes_back_through_norm_rope(q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> bool:
    """Whether `backward_into` takes `keys`."""
    if q.device.type != "cuda":
        return False
    return table.goes_back_through_norm_rope(_shape(q, k, v, Call(q, k, settings)), architecture_of(q.device))


def kernels_take(q: Tensor, k: Tensor, v: Tensor, call: Call, architecture: str) -> bool:
    """Whether some kernel covers the call; warns once where the reference has to run on a device."""
    shape = _shape(q, k, v, call)
    if table.choose("forward", shape, architecture) is not None:
        return True
    warn_once(
        f"attention runs on the reference backend, padded to max_length: {table.triton_refusal(shape, architecture)}"
    )
    return False


@attention_forward.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    call, architecture = Call(q, k, Settings(*rest)), architecture_of(q.device)
    if not kernels_take(q, k, v, call, architecture):
        return _forward_on_host(q, k, v, *rest)
    from gemworks.jagged.ops.attention_core import launch

    return launch.forward(make_problem(q, k, v, call, architecture))


@attention_backward.register_kernel("cuda")
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    into: list[Tensor] = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    backward_into(into, d_out, q, k, v, out, lse, *rest)
    return into[0], into[1], into[2]


def backward_into(
    into: list[Tensor],
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    *rest: Any,
    keys: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> None:
    """Fills dq, dk and dv: rows may be strided, a row's heads and columns lie side by side. Not differentiable.

    Args:
        keys: cosines, sines and the norm's factors (or None) that made k; dk is then the gradient of what k was before.
            Only where `goes_back_through_norm_rope`.
    """
    if q.device.type == "cuda":
        call, architecture = Call(q, k, Settings(*rest)), architecture_of(q.device)
        if kernels_take(q, k, v, call, architecture):
            from gemworks.jagged.ops.attention_core import launch

            made_of = None if keys is None else launch.NormRope(*keys)
            launch.backward(make_problem(q, k, v, call, architecture), d_out, out, lse, into, made_of)
            return
    assert keys is None, "the caller asks first"
    for x, grad in zip(into, _backward_on_host(d_out, q, k, v, out, lse, *rest), strict=True):
        x.copy_(grad)


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    s = Settings(*rest)
    rows = s.num_sequences * q.shape[0] if s.shared_query else q.shape[0]
    lse = q.new_empty(q.shape[1], rows if s.activation == SOFTMAX else 0, dtype=compute_dtype(q.dtype))
    return q.new_empty(rows, q.shape[1], v.shape[-1]), lse


@attention_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *rest = inputs
    offsets_q, offsets_k, tiles, ctx.heights, *ctx.rest = rest
    saved = output if Settings(*rest).activation == SOFTMAX else (None, None)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, offsets_q, offsets_k, *saved, *tiles)


def _differentiate(ctx: Any, d_out: Tensor | None, _d_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, offsets_q, offsets_k, out, lse, *tiles = ctx.saved_tensors
    none = (None, None, [None] * len(tiles), None, *[None] * len(ctx.rest))
    if d_out is None:
        return None, None, None, *none
    grads = attention_backward(d_out, q, k, v, out, lse, offsets_q, offsets_k, tiles, ctx.heights, *ctx.rest)
    return *grads, *none


attention_forward.register_autograd(_differentiate, setup_context=_save)


def count_pairs(q: Tensor, k: Tensor, settings: Settings) -> int:
    """Admitted pairs: exact for offsets on the host, else the bound that shapes and max lengths give."""
    s = settings
    window = min(s.left + s.right + 1, UNBOUNDED)
    if all(is_host(x) for x in (s.offsets_q, s.offsets_k) if x is not None):
        from gemworks.jagged.counting import num_pairs

        def lengths(offsets: Tensor | None, rows: int) -> Tensor:
            return torch.full((s.num_sequences,), rows) if offsets is None else offsets.diff()

        lengths_q = lengths(s.offsets_q, q.shape[0])
        lengths_k = lengths_q if s.rows_k < 0 and s.offsets_k is None else lengths(s.offsets_k, s.rows_k)
        left, right = (-1 if w >= UNBOUNDED else w for w in (s.left, s.right))
        return int(num_pairs(lengths_q, lengths_k, window=(left, right), align=s.align))
    max_k = s.rows_k if s.rows_k >= 0 else (s.max_length_q if s.offsets_k is None else s.max_length_k)
    max_q = q.shape[0] if s.shared_query else s.max_length_q
    total_q = s.num_sequences * q.shape[0] if s.shared_query else q.shape[0]
    return min(total_q * min(max_k, window), k.shape[0] * min(max_q, window))


def forward_flops(q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> int:
    """Two products."""
    return 2 * count_pairs(q, k, settings) * q.shape[1] * (q.shape[2] + v.shape[2])


def backward_flops(q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> int:
    """Five products: the recomputed logits, dP, dV, dQ and dK, as torch counts its own attention."""
    return 2 * count_pairs(q, k, settings) * q.shape[1] * (3 * q.shape[2] + 2 * v.shape[2])


def _register_flops(flop_counter: Any) -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None, **_: Any) -> int:
        return forward_flops(q, k, v, Settings(*rest))

    def backward(
        d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, *rest: Any, out_val: Any = None, **_: Any
    ) -> int:
        return backward_flops(q, k, v, Settings(*rest))

    ops = torch.ops.gemworks_jagged
    flop_counter.register_flop_formula(ops.attention_forward, get_raw=True)(forward)
    flop_counter.register_flop_formula(ops.attention_backward, get_raw=True)(backward)


when_imported("torch.utils.flop_counter", _register_flops)
