"""Norms, rotary embedding, pooling, buckets and the fast activations against their definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemworks.jagged import (
    Rope,
    apply_rope,
    kronecker_compress,
    last_pool,
    layer_norm,
    mean_pool,
    rms_norm,
    sum_pool,
    token_map,
)
from gemworks.jagged.ops.flash_attention.bias import time_bucket
from gemworks.jagged.ops.gdpa import activations
from gemworks.jagged.ops.token_map.reference import token_map_backward_reference

pytestmark = pytest.mark.reference


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("affine", [False, True])
def test_norms_equal_torch(affine: bool) -> None:
    x, r, a = leaf(5, 7), leaf(5, 7), leaf(5, 7)
    w, b = (leaf(7), leaf(7)) if affine else (None, None)
    y, h = layer_norm(x, w, b, residual=r, add=a)
    torch.testing.assert_close(h, x + r)
    torch.testing.assert_close(y, F.layer_norm(x + r, (7,), w, b) + a)
    torch.testing.assert_close(rms_norm(x, w, add=a), F.rms_norm(x, (7,), w, eps=1e-6) + a)
    leaves = [x, r, a, *(p for p in (w, b) if p is not None)]
    for ours, truth in (
        (y + h, F.layer_norm(x + r, (7,), w, b) + a + x + r),
        (rms_norm(x, w, add=a), F.rms_norm(x, (7,), w, eps=1e-6) + a),
    ):
        got = torch.autograd.grad(ours.square().sum(), leaves, allow_unused=True)
        expected = torch.autograd.grad(truth.square().sum(), leaves, allow_unused=True)
        for g, e in zip(got, expected, strict=True):
            assert (g is None) == (e is None)
            if g is not None:
                torch.testing.assert_close(g, e)


def test_norms_of_zero_rows_and_of_no_rows_are_finite() -> None:
    x = torch.zeros(3, 4, requires_grad=True)
    for y in (layer_norm(x), rms_norm(x)):
        assert y.eq(0).all()
        assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()
    assert layer_norm(torch.zeros(0, 4)).shape == (0, 4)
    assert torch.autograd.gradgradcheck(lambda x: rms_norm(x), leaf(3, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_compute_in_float32(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 256) + 100).to(dtype)
    for ours, truth in (
        (layer_norm(x), F.layer_norm(x.double(), (256,))),
        (rms_norm(x), F.rms_norm(x.double(), (256,), eps=1e-6)),
    ):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), truth, rtol=8e-3, atol=4e-3)


def test_rope_turns_pairs_by_position_and_log_age() -> None:
    offsets = torch.tensor([0, 2, 5])
    dt = torch.tensor([0.0, 60.0, 3600.0, 1e6, 5.0], dtype=torch.float64)
    spec = Rope(time_fraction=0.5)
    tables = spec.tables(offsets, 8, total=6, dt=torch.cat([dt, dt[:1]]), dtype=torch.float64)
    x = leaf(6, 3, 8)
    y = apply_rope(x, tables)
    for t, position in enumerate([0, 1, 0, 1, 2]):
        angles = [position * 10_000 ** (-j / 2) for j in range(2)]
        angles += [math.log1p(float(dt[t]) / 60) * 4.0 * 100 ** (-j / 2) for j in range(2)]
        for j, angle in enumerate(angles):
            turned = (x[t, :, j] + 1j * x[t, :, j + 4]) * complex(math.cos(angle), math.sin(angle))
            torch.testing.assert_close(y[t, :, j], turned.real)
            torch.testing.assert_close(y[t, :, j + 4], turned.imag)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, tables), x)
    assert torch.autograd.gradgradcheck(lambda x: apply_rope(x, tables), x)


def test_rope_products_depend_on_differences_alone() -> None:
    q, k = torch.randn(1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 16, dtype=torch.float64)
    tables = Rope().tables(torch.tensor([0, 50]), 16, total=50, dtype=torch.float64)
    turned_q, turned_k = (apply_rope(x.expand(50, 1, 16), tables)[:, 0] for x in (q, k))
    products = turned_q @ turned_k.T
    for shift in (1, 7):
        diagonal = products.diagonal(shift)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_rope_clamps_future_events_to_now() -> None:
    tables = Rope(time_fraction=1.0).tables(torch.tensor([0, 2]), 4, total=2, dt=torch.tensor([-5.0, 0.0]))
    assert torch.equal(tables.cos_TJ[0], tables.cos_TJ[1])
    assert tables.sin_TJ.eq(0).all()


@pytest.mark.parametrize("pool", [sum_pool, mean_pool, last_pool])
def test_pools_equal_loops(pool: Any) -> None:
    offsets = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    x = leaf(7, 2, 3)
    pieces = [x[0:2], x[2:2], x[2:6]]
    reduce = {
        sum_pool: lambda s: s.sum(0),
        mean_pool: lambda s: s.sum(0) / max(len(s), 1),
        last_pool: lambda s: s[-1] if len(s) else torch.zeros(2, 3),
    }[pool]
    torch.testing.assert_close(pool(x, offsets), torch.stack([reduce(s).double() for s in pieces]))
    assert torch.autograd.gradcheck(lambda x: pool(x, offsets), x)
    assert pool(x.bfloat16(), offsets).dtype == torch.bfloat16


def test_kronecker_compression_and_its_gradients() -> None:
    h, z, w = leaf(2, 4, 3), leaf(5, 4, 2), leaf(5, 3, 6)
    torch.testing.assert_close(kronecker_compress(h, z, w), torch.einsum("krc,brd,kde->bce", z, h, w))
    assert torch.autograd.gradcheck(kronecker_compress, (h, z, w))


def test_a_token_map_and_its_gradients() -> None:
    x, w, base = leaf(2, 4, 3), leaf(5, 4), leaf(5, 3)
    torch.testing.assert_close(token_map(x, w, base), torch.einsum("kn,bnd->bkd", w, x) + base)
    assert torch.autograd.gradcheck(token_map, (x, w, base))
    dy = torch.randn(2, 5, 3, dtype=torch.float64)
    wanted = torch.autograd.grad(token_map(x, w, base), (x, w, base), dy)
    for grad, other in zip(token_map_backward_reference(dy, x, w), wanted, strict=True):
        torch.testing.assert_close(grad, other, check_dtype=False, rtol=1e-6, atol=1e-6)
    half = token_map(x.bfloat16(), w.float(), base.float())
    assert half.dtype == torch.bfloat16
    assert token_map(x[:0], w, base).shape == (0, 5, 3)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("batches", "graphs"), [((5, 9), 1), ((4, 9), 2)])
def test_a_compiled_token_map_has_one_graph_for_every_batch(batches: tuple[int, int], graphs: int) -> None:
    """A first batch of as many samples as tokens, 4, has a graph of its own: torch takes equal sizes for one."""
    seen = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nonlocal seen
        seen += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(token_map, backend=counting, fullgraph=True, dynamic=True)
    for num_samples in batches:
        x, w, base = leaf(num_samples, 4, 6), leaf(7, 4), leaf(7, 6)
        dy = torch.randn(num_samples, 7, 6, dtype=torch.float64)
        y, wanted = compiled(x, w, base), token_map(x, w, base)
        assert torch.equal(y, wanted)
        for a, b in zip(*(torch.autograd.grad(z, (x, w, base), dy) for z in (y, wanted)), strict=True):
            assert torch.equal(a, b)
    assert seen == graphs


def test_time_buckets_are_bit_lengths() -> None:
    dt = torch.cat([torch.arange(0, 300), 2 ** torch.arange(8, 62), 2 ** torch.arange(8, 62) - 1, -torch.arange(50)])
    for unit, buckets in ((1, 64), (1, 5), (7, 12), (3600, 1)):
        expected = [min((abs(int(t)) // unit).bit_length(), buckets - 1) for t in dt]
        assert time_bucket(dt, unit, buckets).tolist() == expected


FAST = {
    "fast_gelu": (activations.fast_gelu, F.gelu, activations.FAST_GELU_MAX_ERROR, activations.FAST_GELU_CUT),
    "fast_silu": (activations.fast_silu, F.silu, activations.FAST_SILU_MAX_ERROR, activations.FAST_SILU_CUT),
}


@pytest.mark.parametrize("name", FAST)
def test_fast_activations_stay_within_their_stated_error(name: str) -> None:
    fast, exact, bound, cut = FAST[name]
    x = torch.cat([torch.linspace(-3 * cut, 3 * cut, 400_001), torch.tensor([-cut, cut])])
    error = (fast(x).double() - exact(x.double())).abs().max().item()
    assert bound / 2 < error <= bound  # the statement is true, and not a lazy one


@pytest.mark.parametrize("name", FAST)
def test_fast_activations_are_right_for_every_finite_input(name: str) -> None:
    """Exactly x above the cut and exactly 0 below it, over the exponents of float32, with the matching slopes."""
    fast, _, _, cut = FAST[name]
    large = torch.cat([cut * 2.0 ** torch.arange(0, 124), torch.tensor([torch.finfo(torch.float32).max])])
    x = torch.cat([large, -large]).requires_grad_()
    y = fast(x)
    n = len(large)
    assert torch.equal(y[:n], large)
    assert y[n:].eq(0).all()
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert slope[1:n].eq(1).all()
    assert slope[n + 1 :].eq(0).all()
    tiny = torch.tensor([0.0, 1e-45, -1e-38, 1e-20])
    torch.testing.assert_close(fast(tiny), tiny / 2)
    assert fast(torch.zeros(1)).eq(0).all()


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_derivatives_are_those_of_autograd(name: str) -> None:
    """At every finite input away from kinks, also where the exponentials overflow."""
    kinks = torch.tensor([0.0, 3.0, -3.0, 8.0, -8.0, activations.FAST_GELU_CUT, -activations.FAST_GELU_CUT]).double()
    x = torch.linspace(-12.0, 12.0, 20_001, dtype=torch.float64)
    x = x[(x[:, None] - kinks).abs().amin(dim=1) > 1e-3].requires_grad_()
    (truth,) = torch.autograd.grad(activations.ACTIVATIONS[name](x).sum(), x)
    torch.testing.assert_close(activations.DERIVATIVES[name](x.detach()), truth, rtol=1e-9, atol=1e-10)
    huge = torch.tensor([1e4, 1e18, 1e38, -1e4, -1e18, -1e38])
    assert activations.DERIVATIVES[name](huge).isfinite().all()


def test_every_activation_maps_zero_to_zero() -> None:
    """Padding relies on it."""
    for act in activations.ACTIVATIONS.values():
        assert act(torch.zeros(1)).eq(0).all()
