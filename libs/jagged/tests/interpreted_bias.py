"""Additive bias in the plain Triton kernels, under Triton's interpreter, against the definition in float64.

Run by test_jagged_interpret.py. Values, the gradients of q, k and v, and those of the tables.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from gemworks.jagged import AttentionBias, offsets_from_lengths
from gemworks.jagged._attention_args import make_mask
from gemworks.jagged.ops.attention_core import op, table
from gemworks.jagged.ops.attention_core.kernel_bias import time_bucket as bucket_in_kernel
from gemworks.jagged.ops.flash_attention import biased
from gemworks.jagged.ops.flash_attention.bias import time_bucket
from gemworks.jagged.ops.flash_attention.reference import flash_attention_reference
from torch import Tensor

pytestmark = [
    pytest.mark.interpret,
    # NumPy computes rows that are never stored too, and says so where they overflow.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]
TILE = 32
LENGTHS, LENGTHS_K = [0, 1, TILE + 1, 70, 5], [TILE + 1, 5, TILE, 66, 0]
UNIT = 7


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        out = empty(*size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)


def check(
    monkeypatch: pytest.MonkeyPatch,
    *,
    radius: int | None = 9,
    buckets: int | None = 6,
    kind: str = "cross",
    heads: int = 2,
    key_heads: int = 2,
    unit: int = UNIT,
    dtype: torch.dtype = torch.float32,
    span: int = 3000,
    **mask: Any,
) -> None:
    from gemworks.jagged.ops.attention_core import launch

    monkeypatch.setattr(table, "choose", lambda *_: table.TritonConfig(TILE, TILE, 4, 1))
    monkeypatch.setattr(table, "bias_config", lambda _: table.TritonConfig(TILE, TILE // 2, 4, 1))
    monkeypatch.setattr(biased, "architecture_of", lambda _: "sm_90")
    monkeypatch.setattr(launch, "BIAS_WORKERS", 3)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    generator = torch.Generator().manual_seed(0)
    offsets_q, offsets_k = (offsets_from_lengths(torch.tensor(n)) for n in (LENGTHS, LENGTHS_K))
    rows_q, rows_k = int(offsets_q[-1]) + 2, int(offsets_k[-1]) + 3
    rows_q = 21 if kind == "shared" else rows_q
    rows_k = rows_q if kind == "self" else rows_k

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = random(rows_q, heads, 16), random(rows_k, key_heads, 16), random(rows_k, key_heads, 16)
    times_q, times_k = (torch.randint(0, span, (n,), generator=generator) for n in (rows_q, rows_k))
    position = None if radius is None else random(2 * radius + 1, heads)
    time = None if buckets is None else random(buckets, heads)
    bounds = make_mask(mask.get("causal", False), mask.get("window"), mask.get("align", "bottom_right"))
    tables = (position, time, times_q, None if kind == "self" else times_k, unit)
    rest = (
        None if kind == "shared" else offsets_q, None if kind == "self" else offsets_k, [], "", len(LENGTHS), -1, 128,
        128, 0.3, "softmax", min(bounds.left, op.UNBOUNDED), min(bounds.right, op.UNBOUNDED), bounds.align,
        kind == "shared",
    )  # fmt: skip
    given = (q, k, v, *tables)
    out, lse = biased._forward(*given, *rest)
    d_out = (1 + torch.arange(16) / 16 + torch.arange(out.shape[0])[:, None, None] / 40).expand(out.shape).to(dtype)
    ours = [out, *biased._backward(d_out, q, k, v, out, lse, *given[3:], *rest)]
    leaves = [None if x is None else x.double().requires_grad_() for x in (q, k, v, position, time)]
    call = op.Call(q, k, op.Settings(*rest))
    exact_q, exact_k, exact_v = (x for x in leaves[:3] if x is not None)
    truth = flash_attention_reference(
        exact_q, exact_k, exact_v, call.plan(q, k), scale=call.rule.scale, mask=call.rule.mask,
        bias=AttentionBias(leaves[3], leaves[4], *tables[2:]), shared_query=call.rule.shared_query,
    )  # fmt: skip
    found = iter(torch.autograd.grad(truth, [x for x in leaves if x is not None], d_out.double()))
    exact = [truth.detach(), *(truth.new_empty(0) if x is None else next(found) for x in leaves)]
    names = ("out", "q", "k", "v", "position", "time")
    tolerance = 5e-5 if dtype == torch.float32 else 1e-2
    for name, got, expected in zip(names, ours, exact, strict=True):
        assert got.shape == expected.shape, name
        assert got.dtype == dtype, name
        size = float(expected.abs().max()) if expected.numel() else 0.0
        if name == "position" and radius:  # the check sees the ends of the table, and between
            assert size > 0.0
        torch.testing.assert_close(
            got.double(), expected, rtol=0, atol=tolerance * max(1.0, size), msg=lambda m, name=name: f"{name}: {m}"
        )


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal top left": {"causal": True, "align": "top_left"},
    "window": {"window": 7},
}


@pytest.mark.parametrize(("kind", "mask"), [("self", "full"), *(("cross", mask) for mask in MASKS)])
def test_both_tables(monkeypatch: pytest.MonkeyPatch, kind: str, mask: str) -> None:
    check(monkeypatch, kind=kind, **MASKS[mask])


@pytest.mark.parametrize("radius", [0, 31, 200])
def test_reach_of_positions(monkeypatch: pytest.MonkeyPatch, radius: int) -> None:
    """Tiles wholly beyond the table, partly, and never."""
    check(monkeypatch, radius=radius, buckets=None)


@pytest.mark.parametrize(("buckets", "unit", "span"), [(1, 1, 50), (64, 1, 2**62), (40, 3, 2**40)])
def test_buckets_of_time(monkeypatch: pytest.MonkeyPatch, buckets: int, unit: int, span: int) -> None:
    check(monkeypatch, radius=None, buckets=buckets, unit=unit, span=span)


def test_shared_query(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, kind="shared", buckets=None)


def test_grouped_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, heads=4, key_heads=2, causal=True)


def test_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, dtype=torch.float16)


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bucket off in the lookup of the tables' gradients alone."""
    from gemworks.jagged.ops.attention_core import launch

    sums = launch.triton_backward_bias
    monkeypatch.setattr(launch, "triton_backward_bias", lambda *args: tuple(x.roll(1, 1) for x in sums(*args)))
    with pytest.raises(AssertionError, match="position"):
        check(monkeypatch)


@triton.jit
def bucket_kernel(d, out, unit, N: tl.constexpr, BUCKETS: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, bucket_in_kernel(tl.load(d + i), unit, BUCKETS))


@pytest.mark.parametrize("unit", [1, 3, 60, 2**20])
def test_buckets_are_exact_at_every_edge(unit: int) -> None:
    """The kernel's bucket (a guess corrected by one) beside the definition, at and around every power of two."""
    edges = torch.tensor([unit * 2**m + e for m in range(62 - unit.bit_length()) for e in (-1, 0, 1)])
    d = torch.cat([torch.tensor([0, 1, -1, 2**62]), edges, -edges])
    d = torch.cat([d, d.new_zeros(512 - len(d))])
    out = torch.zeros(512, dtype=torch.int32)
    launch: Any = bucket_kernel
    launch[(1,)](d, out, unit, N=512, BUCKETS=50)
    assert out.long().equal(time_bucket(d, unit, 50))
