"""The layer's short way on Hopper under the interpreter, with cuBLAS played by the definition of its layouts."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs under TRITON_INTERPRET=1, see test_precision_tiers.py", allow_module_level=True)

from gemworks.precision import backends, hopper, linear, short_casts
from gemworks.precision.backends import DeviceSpec
from gemworks.precision.exact import exact_plan_of
from gemworks.precision.hopper import HopperLinear, plan_of
from gemworks.precision.linear import mx_linear
from gemworks.precision.recipe import recipe
from gemworks.precision.scaled_mm import SQUARES128

pytestmark = pytest.mark.interpret


def by_definition(left, right, scales_a, _ra, _sa, scales_b, recipe_b, _sb, _bias, dtype):
    """The product of 128-wide operands as their layouts say, which are checked."""
    (m, k), n = left.shape, right.shape[1]
    (scale_a,), (scale_b,) = scales_a, scales_b
    assert left.stride(1) == right.stride(0) == 1
    assert scale_a.shape == (m, k // 128)
    assert scale_a.stride() == (1, m)
    if recipe_b is SQUARES128:
        padded = -(-k // 512) * 4
        assert scale_b.shape == (padded, n // 128)
        assert scale_b.stride() == (1, padded)
        assert scale_b.isfinite().all()
        scale_b = scale_b[: k // 128].t().repeat_interleave(128, 0)
    else:
        assert scale_b.shape == (n, k // 128)
        assert scale_b.stride() == (1, n)
    out = (left.float() * scale_a.repeat_interleave(128, 1)) @ (
        right.t().float() * scale_b.repeat_interleave(128, 1)
    ).t()
    return out.to(dtype)


CASES = [
    ("fp8_block128", {}, False),
    ("fp8_block128", {"save": "both"}, True),
    ("fp8_block128", {"square_inputs": True}, True),
    ("fp8_square128", {}, False),
    ("fp8_wgrad_bf16", {}, True),
]


@pytest.mark.parametrize(("name", "settings", "kept"), CASES)
def test_gives_what_the_general_way_gives(name, settings, kept, monkeypatch):
    """P4: outputs and gradients; any number of rows; the weight's transpose kept, or quantised again."""
    monkeypatch.setattr(torch, "_scaled_mm_v2", by_definition)
    monkeypatch.setattr(hopper, "KEPT_WEIGHT_BYTES", 2**22 if kept else 0)
    chosen = recipe(name, **settings)
    m, k, n = 131, 256, 128
    dtype = torch.bfloat16 if kept else torch.float32
    plan = plan_of(chosen, torch.bfloat16, dtype, k, n)
    generator = torch.Generator().manual_seed(1)
    results = []
    for general in (False, True):
        generator.manual_seed(1)
        x = torch.randn(m, k, generator=generator).bfloat16().requires_grad_()
        w = (torch.randn(n, k, generator=generator) / 16).to(dtype).requires_grad_()
        b = torch.randn(n, generator=generator).bfloat16().requires_grad_()
        dy = torch.randn(m, n, generator=generator).bfloat16()
        if general:
            y = mx_linear(x, w, b, recipe(chosen, backend="reference"))
        else:
            y = HopperLinear.apply(x, w, b, plan, True, None)
        assert y.shape == (m, n)
        y.backward(dy)
        results.append((y.detach(), x.grad, w.grad, b.grad))
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype is expected.dtype
        torch.testing.assert_close(ours, expected, rtol=2**-7, atol=2e-3)


def test_inputs_that_need_no_gradient(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm_v2", by_definition)
    plan = plan_of(recipe("fp8_square128"), torch.bfloat16, torch.bfloat16, 128, 128)
    x, w = torch.randn(16, 128).bfloat16(), torch.randn(128, 128).bfloat16().requires_grad_()
    HopperLinear.apply(x, w, None, plan, True, None).sum().backward()
    assert w.grad is not None
    w.requires_grad_(False)
    x.requires_grad_()
    HopperLinear.apply(x, w, None, plan, False, None).backward(torch.ones(16, 128).bfloat16().t().t())
    assert x.grad is not None


@pytest.mark.parametrize(
    "settings",
    [
        {"stochastic_gradients": True},
        {"hadamard_size": 64},
        {"row_weights": True},
        {"save": "row"},
        {"backend": "reference"},
    ],
    ids=str,
)
def test_what_takes_the_general_way(settings):
    half = torch.bfloat16
    assert plan_of(recipe("fp8_block128"), half, half, 256, 128) is not None
    assert plan_of(recipe("fp8_block128", **settings), half, half, 256, 128) is None
    assert plan_of(recipe("mxfp8"), half, half, 256, 128) is None
    assert plan_of(recipe("fp8_block128"), torch.float32, half, 256, 128) is None
    assert plan_of(recipe("fp8_block128"), half, half, 192, 128) is None
    assert short_casts.fits(torch.empty(3, 128, dtype=half))
    assert not short_casts.fits(torch.empty(128, 3, dtype=half).t())
    assert not short_casts.fits(torch.empty(3, 136, dtype=half)[:, 4:132])
