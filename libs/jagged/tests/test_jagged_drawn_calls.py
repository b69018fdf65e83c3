"""Whole calls drawn at random: lengths, heads, widths, strides, layout, mask, activation; values and every gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gemworks.jagged import flash_attention, gdpa, offsets_from_lengths
from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS
from gemworks.jagged.testing import activation_weights, attention_loop, softmax_weights
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.reference

TILES = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65]
STRIDES = ("packed", "fused", "heads outside", "every other row", "expanded")


@dataclass(frozen=True)
class Drawn:
    """One call. `lengths`: (q, k) of each sequence; `activation`: softmax or one of gdpa's."""

    lengths: tuple[tuple[int, int], ...]
    layout: str = "cross"
    key_heads: int = 1
    groups: int = 1
    width: int = 4
    value_width: int = 4
    strides: str = "packed"
    activation: str = "softmax"
    causal: bool = False
    window: Any = None
    align: Any = "bottom_right"
    past_end: int = 0


pairs = st.tuples(st.sampled_from(TILES), st.sampled_from(TILES))
calls = st.builds(
    Drawn,
    lengths=st.one_of(
        st.lists(pairs, min_size=1, max_size=4).map(tuple),
        st.lists(st.tuples(*[st.sampled_from([0, 1])] * 2), min_size=1, max_size=6).map(tuple),
        st.lists(st.just((0, 0)), min_size=1, max_size=3).map(tuple),
        st.lists(pairs, max_size=2).map(lambda few: (*few, (170, 9))),
    ),
    layout=st.sampled_from(["self", "cross", "fixed", "shared"]),
    key_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    width=st.sampled_from([1, 3, 8]),
    value_width=st.sampled_from([1, 4, 8]),
    strides=st.sampled_from(STRIDES),
    activation=st.sampled_from(["softmax", *ACTIVATIONS]),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 70), st.tuples(st.integers(-1, 40), st.integers(-1, 40))),
    align=st.sampled_from(["top_left", "bottom_right"]),
    past_end=st.sampled_from([0, 3]),
)


def strided(shape: tuple[int, ...], how: str, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Random numbers of that shape [rows, heads, width], in memory as `how` says."""
    rows, heads, width = shape

    def random(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64, generator=generator).to(dtype)

    if how == "fused":
        return random(rows, heads + 2, width + 3)[:, 1:-1, :width]
    if how == "heads outside":
        return random(heads, rows, width).transpose(0, 1)
    if how == "every other row":
        return random(2 * rows, heads, width)[::2]
    if how == "expanded":
        return random(rows, 1, width).expand(shape)
    return random(*shape)


def run(call: Drawn, dtype: torch.dtype, *, loops: bool) -> list[Tensor]:
    """[out, dq, dk, dv] in float64: of the public function in `dtype`, or of loops over sequences."""
    generator = torch.Generator().manual_seed(0)
    lengths_q, lengths_k = ([n[i] for n in call.lengths] for i in (0, 1))
    if call.layout == "self":
        lengths_k = lengths_q
    heads, batch = call.key_heads * call.groups, len(call.lengths)
    rows_q, rows_k = sum(lengths_q) + call.past_end, sum(lengths_k) + call.past_end
    rows_q, rows_k = {"fixed": (rows_q, 7 * batch), "shared": (5, rows_k)}.get(call.layout, (rows_q, rows_k))
    shapes = (
        (rows_q, heads, call.width),
        (rows_k, call.key_heads, call.width),
        (rows_k, call.key_heads, call.value_width),
    )
    leaves = [strided(shape, call.strides, generator, dtype).requires_grad_() for shape in shapes]
    q, k, v = leaves
    if call.layout == "fixed":
        k, v = (x.unflatten(0, (batch, 7)) for x in (k, v))
    offsets = [offsets_from_lengths(torch.tensor(n, dtype=torch.int64)) for n in (lengths_q, lengths_k)]
    given_q = None if call.layout == "shared" else offsets[0]
    given_k = None if call.layout in ("self", "fixed") else offsets[1]
    rule: Any = {"causal": call.causal, "window": call.window, "align": call.align}
    rule["shared_query"] = call.layout == "shared"
    softmax = call.activation == "softmax"
    if loops:
        weigh = softmax_weights if softmax else activation_weights(ACTIVATIONS[call.activation])
        out = attention_loop(q, k, v, given_q, given_k, weigh=weigh, scale=0.4, **rule)
    else:
        rule |= {"max_length_q": max(1, *lengths_q), "max_length_k": max(1, *lengths_k), "scale": 0.4}
        out = (
            flash_attention(q, k, v, given_q, given_k, **rule)
            if softmax
            else gdpa(q, k, v, given_q, given_k, activation=call.activation, **rule)  # pyright: ignore[reportArgumentType]
        )
    d_out = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad(out, leaves, d_out, materialize_grads=True)
    return [x.detach().double() for x in (out, *grads)]


@settings(max_examples=80, deadline=None)
@given(calls)
@example(Drawn(((64, 64), (0, 5), (5, 0), (1, 1)), strides="fused", groups=2))
@example(Drawn(((33, 1), (0, 0)), layout="self", strides="heads outside", activation="fast_gelu", past_end=3))
def test_a_drawn_call_equals_loops(call: Drawn) -> None:
    """float32, which takes the op, and float64, which takes the definition, against loops in float64."""
    truth = run(call, torch.float64, loops=True)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-4)):
        for name, ours, exact in zip(("out", "dq", "dk", "dv"), run(call, dtype, loops=False), truth, strict=True):
            torch.testing.assert_close(
                ours.reshape(exact.shape), exact, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
