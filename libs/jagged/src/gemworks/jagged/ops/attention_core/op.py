"""The custom ops behind `flash_attention` and `gdpa`: `gemworks_jagged::attention_forward` and `attention_backward`.

Opaque to the compiler: one graph for every total and every set of lengths. The CPU kernel is reference.py; the CUDA
kernel is chosen by table.py and started by launch.py. No kernel reads a device value on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from gemworks.jagged._checks import is_host
from gemworks.jagged._custom_op import custom_op
from gemworks.jagged._dense import Align, Mask
from gemworks.jagged._imports import when_imported
from gemworks.jagged._packing import Plan, Side, make_plan
from gemworks.jagged.dispatch import architecture_of, warn_once
from gemworks.jagged.ops.attention_core import table
from gemworks.jagged.ops.attention_core.reference import SOFTMAX, Rule, backward_reference, forward_reference
from gemworks.jagged.schedule import TileSchedule
from torch import Tensor

# int64 positions would overflow if an unbounded window were added to them; no sequence is this long.
UNBOUNDED = 1 << 30
_COMMON = (
    "Tensor q, Tensor k, Tensor v, {saved}Tensor? offsets_q, Tensor? offsets_k, Tensor[] tiles, str heights, "
    "SymInt num_sequences, SymInt rows_k, int max_length_q, int max_length_k, float scale, str activation, int left, "
    "int right, str align, bool shared_query"
)
_FORWARD_SCHEMA = "(" + _COMMON.format(saved="") + ") -> (Tensor, Tensor)"
_BACKWARD_SCHEMA = (
    "(Tensor d_out, " + _COMMON.format(saved="Tensor? out, Tensor? lse, ") + ") -> (Tensor, Tensor, Tensor)"
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side_q: Side,
    side_k: Side,
    num_sequences: int,
    rule: Rule,
    schedule: TileSchedule | None,
) -> Tensor:
    """[rows of q's side, N, V]; arguments as for `forward_reference`. Differentiable once in q, k and v.

    Args:
        side_q, side_k: the same object for self-attention.
        schedule: of this batch; None lets the kernel build its own.
    """
    out, _ = attention_forward(
        q,
        k,
        v,
        side_q.offsets,
        None if side_k is side_q else side_k.offsets,
        [] if schedule is None else list(schedule.tensors),
        "" if schedule is None else schedule.heights,
        num_sequences,
        -1 if side_k.rows is None else side_k.rows,
        side_q.max_length,
        side_k.max_length,
        rule.scale,
        rule.activation,
        min(rule.mask.left, UNBOUNDED),
        min(rule.mask.right, UNBOUNDED),
        rule.mask.align,
        rule.shared_query,
    )
    return out


class Call:
    """The arguments after the tensors, put back into the terms of the reference and of the kernels."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        offsets_q: Tensor | None,
        offsets_k: Tensor | None,
        tiles: list[Tensor],
        heights: str,
        num_sequences: int,
        rows_k: int,
        max_length_q: int,
        max_length_k: int,
        scale: float,
        activation: str,
        left: int,
        right: int,
        align: Align,
        shared_query: bool,
    ) -> None:
        full = Mask()
        left, right = full.left if left >= UNBOUNDED else left, full.right if right >= UNBOUNDED else right
        self.rule = Rule(scale, activation, Mask(left, right, align), shared_query)
        self.num_sequences = num_sequences
        self.tiles, self.heights = tiles, heights
        if shared_query:
            self.side_q = Side(num_sequences * q.shape[0], rows=q.shape[0])
        else:
            self.side_q = Side(q.shape[0], offsets=offsets_q, max_length=max_length_q)
        if rows_k >= 0:
            self.side_k = Side(k.shape[0], rows=rows_k)
        elif offsets_k is None:
            self.side_k = self.side_q
        else:
            self.side_k = Side(k.shape[0], offsets=offsets_k, max_length=max_length_k)

    def plan(self, q: Tensor, k: Tensor) -> Plan:
        return make_plan(self.side_q, self.side_k, self.num_sequences, q.shape[1], k.shape[1], q.device)


def _forward_on_host(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    call = Call(q, k, *rest)
    return forward_reference(q, k, v, call.plan(q, k), call.rule)


def _backward_on_host(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(q, k, *rest)
    return backward_reference(d_out, q, k, v, out, lse, call.plan(q, k), call.rule)


attention_forward = custom_op("attention_forward", _forward_on_host, _FORWARD_SCHEMA, device="cpu")
attention_backward = custom_op("attention_backward", _backward_on_host, _BACKWARD_SCHEMA, device="cpu")


def _problem(q: Tensor, k: Tensor, v: Tensor, call: Call, architecture: str, bias: Any = None) -> Any:
    """What launch.py takes; `bias` is its `Bias`."""
    from gemworks.jagged.ops.attention_core import launch

    if call.tiles:
        schedule = TileSchedule(tuple(call.tiles), call.heights)
    else:
        packed_k = call.side_k.offsets if call.side_k is not call.side_q else None
        schedule = TileSchedule.build(
            call.side_q.offsets,
            packed_k,
            total_q=q.shape[0],
            total_k=None if packed_k is None else k.shape[0],
            rows_k=call.side_k.rows if call.side_k is not call.side_q else None,
            num_sequences=call.num_sequences,
            heights="",
        )
    bound = call.side_k.max_length if call.side_k.rows is None else call.side_k.rows
    q, k, v = (launch.rowwise(x) for x in (q, k, v))
    rows_k = call.side_k.rows if call.side_k is not call.side_q else None
    return launch.Problem(q, k, v, call.rule, schedule, bound, architecture, call.side_q.total, rows_k, bias)


def _kernels_take(q: Tensor, k: Tensor, v: Tensor, call: Call, architecture: str, *, biased: bool = False) -> bool:
    """Whether some kernel covers the call; warns once where the reference has to run on a device."""
    bound = call.side_k.max_length if call.side_k.rows is None else call.side_k.rows
    shape = table.Shape(
        call.rule.activation,
        q.dtype,
        q.shape[2],
        v.shape[2],
        not call.rule.mask.is_full,
        call.rule.shared_query,
        q.shape[1] != k.shape[1],
        bound,
        biased=biased,
    )
    if table.choose("forward", shape, architecture) is not None:
        return True
    warn_once(
        f"attention runs on the reference backend, padded to max_length: {table.triton_refusal(shape, architecture)}"
    )
    return False


@attention_forward.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    call, architecture = Call(q, k, *rest), architecture_of(q.device)
    if not _kernels_take(q, k, v, call, architecture):
        return _forward_on_host(q, k, v, *rest)
    from gemworks.jagged.ops.attention_core import launch

    with torch.cuda.device(q.device):
        return launch.forward(_problem(q, k, v, call, architecture))


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
) -> None:
    """Fills dq, dk and dv: rows may be strided, a row's heads and columns lie side by side. Not differentiable."""
    if q.device.type == "cuda":
        call, architecture = Call(q, k, *rest), architecture_of(q.device)
        if _kernels_take(q, k, v, call, architecture):
            from gemworks.jagged.ops.attention_core import launch

            with torch.cuda.device(q.device):
                launch.backward(_problem(q, k, v, call, architecture), d_out, out, lse, into)
            return
    for x, grad in zip(into, _backward_on_host(d_out, q, k, v, out, lse, *rest), strict=True):
        x.copy_(grad)


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    num_sequences, activation, shared_query = rest[4], rest[9], rest[13]
    rows = num_sequences * q.shape[0] if shared_query else q.shape[0]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty(q.shape[1], rows if activation == SOFTMAX else 0, dtype=wide)
    return q.new_empty(rows, q.shape[1], v.shape[-1]), lse


@attention_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets_q, offsets_k, tiles, heights, *rest = inputs
    out, lse = output
    softmax = rest[5] == SOFTMAX  # the activation
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, offsets_q, offsets_k, *((out, lse) if softmax else (None, None)), *tiles)
    ctx.heights, ctx.rest = heights, rest


def _differentiate(ctx: Any, d_out: Tensor | None, _d_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, offsets_q, offsets_k, out, lse, *tiles = ctx.saved_tensors
    none = (None, None, [None] * len(tiles), None, *[None] * len(ctx.rest))
    if d_out is None:
        return None, None, None, *none
    grads = attention_backward(d_out, q, k, v, out, lse, offsets_q, offsets_k, tiles, ctx.heights, *ctx.rest)
    return *grads, *none


attention_forward.register_autograd(_differentiate, setup_context=_save)


def count_pairs(q: Tensor, k: Tensor, *rest: Any) -> int:
    """Admitted pairs: exact for offsets on the host, else the bound that shapes and max lengths give."""
    offsets_q, offsets_k, _, _, num_sequences, rows_k, max_q, max_k, _, _, left, right, align, shared_query = rest
    window = min(left + right + 1, UNBOUNDED)
    tensors = [x for x in (offsets_q, offsets_k) if x is not None]
    if all(is_host(x) for x in tensors):
        from gemworks.jagged.counting import num_pairs

        def lengths(offsets: Tensor | None, rows: int) -> Tensor:
            return torch.full((num_sequences,), rows) if offsets is None else offsets.diff()

        lengths_q = lengths(offsets_q, q.shape[0])
        lengths_k = lengths_q if rows_k < 0 and offsets_k is None else lengths(offsets_k, rows_k)
        bounds = [-1 if w >= UNBOUNDED else w for w in (left, right)]
        return int(num_pairs(lengths_q, lengths_k, window=(bounds[0], bounds[1]), align=align))
    max_k = rows_k if rows_k >= 0 else (max_q if offsets_k is None else max_k)
    max_q = q.shape[0] if shared_query else max_q
    total_q = num_sequences * q.shape[0] if shared_query else q.shape[0]
    return min(total_q * min(max_k, window), k.shape[0] * min(max_q, window))


def _forward_flops(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None, **_: Any) -> int:
    return 2 * count_pairs(q, k, *rest) * q.shape[1] * (q.shape[2] + v.shape[2])


def _backward_flops(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, *rest: Any, out_val: Any = None, **_: Any
) -> int:
    """Five products: the recomputed logits, dP, dV, dQ and dK, as torch counts its own attention."""
    return 2 * count_pairs(q, k, *rest) * q.shape[1] * (3 * q.shape[2] + 2 * v.shape[2])


def _register_flops(flop_counter: Any) -> None:
    forward, backward = torch.ops.gemworks_jagged.attention_forward, torch.ops.gemworks_jagged.attention_backward
    flop_counter.register_flop_formula(forward, get_raw=True)(_forward_flops)
    flop_counter.register_flop_formula(backward, get_raw=True)(_backward_flops)


when_imported("torch.utils.flop_counter", _register_flops)
