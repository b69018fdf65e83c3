"""The layer's short way on Hopper under the interpreter, with cuBLAS played by the definition of its layouts."""

import os
import warnings

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs under TRITON_INTERPRET=1, see test_precision_tiers.py", allow_module_level=True)

from gemworks.precision import backends, hopper, linear, short_casts
from gemworks.precision.backends import DeviceSpec, explain
from gemworks.precision.casts import CastSpec, cast, cast_both
from gemworks.precision.exact import ExactLinear, ExactPlan, exact_plan_of
from gemworks.precision.fsdp import GatheredWeight, PlaneMeta
from gemworks.precision.hopper import HopperLinear, Plan, plan_of
from gemworks.precision.linear import linear_with_counts, mx_linear
from gemworks.precision.products import specs_of
from gemworks.precision.recipe import GemmKind, GemmRecipe, recipe
from gemworks.precision.scaled_mm import SQUARES128
from gemworks.precision.triton_reading import readable_length

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
    ("mxfp8_regroup128", {}, True),
    ("mxfp8_regroup128", {"save": "both"}, False),
    ("mxfp8", {}, False),
    ("mxfp8", {"save": "both"}, True),
    ("mxfp8", {"wgrad": GemmRecipe(GemmKind.BF16)}, True),
]


@pytest.mark.parametrize(("name", "settings", "kept"), CASES)
def test_gives_what_the_general_way_gives(name, settings, kept, monkeypatch):
    """P4: outputs and gradients; any number of rows; the weight's transpose kept, or quantised again."""
    monkeypatch.setattr(torch, "_scaled_mm_v2", by_definition)
    monkeypatch.setattr(hopper, "KEPT_WEIGHT_BYTES", 2**22 if kept else 0)
    chosen = recipe(name, **settings)
    m, k, n = 19, 128, 128
    dtype = torch.bfloat16 if kept else torch.float32
    exact = chosen.forward.kind is GemmKind.MXFP8
    plan = (exact_plan_of if exact else plan_of)(chosen, torch.bfloat16, dtype, k, n)
    monkeypatch.setattr(linear, "_plan_of", lambda *_: plan)
    generator = torch.Generator().manual_seed(1)
    results = []
    for general in (False, True):
        generator.manual_seed(1)
        x = torch.randn(m, k, generator=generator).bfloat16().requires_grad_()
        w = (torch.randn(n, k, generator=generator) / 16).to(dtype).requires_grad_()
        b = torch.randn(n, generator=generator).bfloat16().requires_grad_()
        dy = torch.randn(m, n, generator=generator).bfloat16()
        if general:
            monkeypatch.setattr(linear, "_plan_of", lambda *_: None)
        y, counts = linear_with_counts(x, w, b, chosen, 0)
        assert y.shape == (m, n)
        y.backward(dy)
        results.append((y.detach(), x.grad, w.grad, b.grad, counts))
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype is expected.dtype
        torch.testing.assert_close(ours, expected, rtol=2**-7, atol=2e-3)


def test_hooks_that_keep_the_shape_of_saved_tensors_alone_change_nothing(monkeypatch):
    """`torch.autograd.graph.save_on_cpu(pin_memory=True)` brings them back without their strides."""
    plan = exact_plan_of(recipe("mxfp8", save="both"), torch.bfloat16, torch.bfloat16, 128, 64)
    x, w = torch.randn(40, 128).bfloat16(), torch.randn(64, 128).bfloat16()
    dy = torch.randn(40, 64).bfloat16()
    gradients = []
    for pack in (lambda t: t, lambda t: t.contiguous()):
        w = w.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            ExactLinear.apply(x, w, None, plan, True, None).backward(dy)
        gradients.append(w.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block128"])
def test_gradients_off_16_bytes_are_copied(name, monkeypatch):
    """The kernels are compiled for pointers on 16 bytes; `contiguous()` gives back what is contiguous anyway."""
    monkeypatch.setattr(torch, "_scaled_mm_v2", by_definition)
    exact = name == "mxfp8"
    plan = (exact_plan_of if exact else plan_of)(recipe(name), torch.bfloat16, torch.bfloat16, 128, 128)
    seen = []
    kind = ExactPlan if exact else Plan
    method = "cast" if exact else "tiles"
    original = getattr(kind, method)
    monkeypatch.setattr(kind, method, lambda self, t, *rest: seen.append(t) or original(self, t, *rest))
    w = torch.randn(128, 128).bfloat16()
    x = torch.randn(16, 128).bfloat16().requires_grad_()
    y = (ExactLinear if exact else HopperLinear).apply(x, w, None, plan, True, None)
    seen.clear()
    y.backward(torch.randn(16 * 128 + 3).bfloat16()[3:].view(16, 128))
    assert seen
    assert all(short_casts.fits(t) for t in seen)


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
    assert exact_plan_of(recipe("mxfp8"), half, half, 96, 32) is not None
    assert exact_plan_of(recipe("mxfp8", **settings), half, half, 256, 128) is None or "row_weights" in settings
    assert exact_plan_of(recipe("mxfp8"), torch.float32, half, 256, 128) is None
    assert exact_plan_of(recipe("fp8_block128"), half, half, 256, 128) is None
    assert plan_of(recipe("fp8_block128"), torch.float32, half, 256, 128) is None
    assert plan_of(recipe("fp8_block128"), half, half, 192, 128) is None
    assert short_casts.fits(torch.empty(3, 128, dtype=half))
    assert not short_casts.fits(torch.empty(128, 3, dtype=half).t())
    assert not short_casts.fits(torch.empty(3, 136, dtype=half)[:, 4:132])


@pytest.mark.parametrize(
    ("kind", "m", "dtype"),
    [
        (GemmKind.MXFP8, 35, torch.bfloat16),
        (GemmKind.MXFP8, 48, torch.float32),  # of weights, for which the others have casts of their own
        (GemmKind.MXFP8_REGROUP128, 35, torch.bfloat16),
        (GemmKind.FP8_BLOCK128, 35, torch.bfloat16),
    ],
    ids=str,
)
def test_operands_are_the_planes_of_the_reference(kind, m, dtype):
    """P1: codes, scales and counts of every cast of the short ways, and bf16 values of 32-wide planes, bit by bit."""
    spec, k = CastSpec(kind), 256
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, k)
    x[3, 5] = float("nan")
    x = x.to(dtype)
    count = torch.zeros((), dtype=torch.int64)
    made = short_casts.TileCast(spec, short_casts.BOTH, True, m, k, k, dtype)(x, count)
    rows, columns, lost = cast_both(x, spec, "reference")
    width = rows.block
    assert count == lost
    codes, scales, codes_t, scales_t = (t.view(torch.uint8) if t.dtype is short_casts.F8 else t for t in made)
    if width == 128:
        scales, scales_t = ((t.view(torch.int32) >> 23).to(torch.uint8) for t in (scales, scales_t))
    assert torch.equal(codes[:m], rows.codes)
    assert torch.equal(scales[:m], rows.scales)
    assert torch.equal(codes_t[:, :m], columns.codes.t())
    assert torch.equal(scales_t[:, : -(-m // width)], columns.scales.t())
    assert not codes[m:].any()
    assert not codes_t[6:, m:].any()  # the block with a NaN is NaN to its end
    if width == 32:
        length, padded = readable_length(m), codes.shape[0]
        read = short_casts.Reading(m, k, k, 1, padded, True)(codes, scales)
        assert torch.equal(read.t().float().nan_to_num(9.0), rows.dequantize().nan_to_num(9.0))
        read = short_casts.Reading(k, length, padded, 1, k, False)(codes_t, scales_t)
        assert read.shape == (k, length)
        assert torch.equal(read[:, :m].float().nan_to_num(9.0), columns.dequantize().t().nan_to_num(9.0))
        assert not read[:, m:].any()


def test_what_pads_scales_of_squares_is_one(monkeypatch):
    """Products read it with the zero codes behind a contraction: it must be finite, whatever memory held."""
    empty = torch.empty_strided

    def poisoned(*args, dtype, **kwargs):
        made = empty(*args, dtype=dtype, **kwargs)
        return made.fill_(float("nan")) if dtype is torch.float32 else made

    monkeypatch.setattr(torch, "empty_strided", poisoned)
    spec, (m, k) = CastSpec(GemmKind.FP8_BLOCK128), (130, 256)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(4)).bfloat16()
    *_, square = short_casts.SquareCast(spec, False, m, k, k)(x)
    assert square.shape == (4, 2)
    assert square[:2].isfinite().all()
    assert (square[2:] == 1).all()
    _, square, _, square_t = short_casts.WeightCast(spec, short_casts.BOTH, x.dtype, 128, k)(x[:128])
    for made, blocks in ((square, 2), (square_t, 1)):
        assert made.shape == (4, 3 - blocks)
        assert made[:blocks].isfinite().all()
        assert (made[blocks:] == 1).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_regrouped_weights_are_the_squares_of_the_reference(transposed):
    spec, (n, k) = CastSpec(GemmKind.MXFP8_REGROUP128), (384, 128)
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(3)) * torch.logspace(-9, 0, k)
    counts = torch.zeros(2, dtype=torch.int64)
    codes, square = short_casts.RegroupedWeight(spec, transposed, w.dtype, n, k)(w, counts[1])
    plane, lost = cast(w.t() if transposed else w, None, spec, "reference")
    assert counts.tolist() == [0, lost.item()]
    assert lost > 0
    assert torch.equal(codes.t().view(torch.uint8), plane.codes)
    blocks = plane.scales.shape[1]
    assert torch.equal((square[:blocks].view(torch.int32) >> 23).to(torch.uint8).t(), plane.scales)
    assert (square[blocks:] == 1).all()


def test_which_layers_take_a_short_way(monkeypatch):
    """By device, recipe and dtype; what costs speed is said once."""
    half = torch.bfloat16
    device = torch.device("cuda", 0)
    kinds = {}
    for capability in (80, 90, 100):
        monkeypatch.setattr(linear, "device_spec", lambda _, c=capability: DeviceSpec("cuda", c))
        monkeypatch.setattr(backends, "_warned", set())
        linear._plan_of.cache_clear()
        for name in ("mxfp8", "mxfp8_regroup128", "fp8_block128"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                plan = linear._plan_of(recipe(name).text, device, half, half, 256, 128)
            kinds[capability, name] = type(plan).__name__
            assert bool(caught) == isinstance(plan, ExactPlan)
    linear._plan_of.cache_clear()
    for (capability, name), kind in kinds.items():
        said = str(explain((512, 256, 128), name, f"sm_{capability}"))
        assert ("take the short way" in said) == (kind != "NoneType")
    assert "general way" in str(explain((512, 256, 128), recipe("mxfp8", save="row"), "sm_90"))
    assert {k: v for k, v in kinds.items() if v != "NoneType"} == {
        (90, "mxfp8"): "ExactPlan",
        (90, "mxfp8_regroup128"): "Plan",
        (90, "fp8_block128"): "Plan",
    }


def test_sizes_are_begun_anew_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(short_casts, "MAX_SIZES", 3)
    cache = short_casts.Cache()
    for m in range(4):
        assert cache.keep((m,), m) == m
    assert cache == {(3,): 3}


@pytest.mark.parametrize("name", ["fp8_block128", "mxfp8_regroup128"])
def test_a_weight_gathered_as_codes_gives_the_bits_of_the_weight(name, monkeypatch):
    """P8: the plane that FSDP2 gathers takes the short way too; its kernels are never asked for an address."""
    monkeypatch.setattr(torch, "_scaled_mm_v2", by_definition)
    chosen, half = recipe(name), torch.bfloat16
    generator = torch.Generator().manual_seed(6)
    m, k, n = 17, 128, 256
    x = torch.randn(m, k, generator=generator).bfloat16().requires_grad_()
    w = (torch.randn(n, k, generator=generator) / 8).bfloat16().requires_grad_()
    dy = torch.randn(m, n, generator=generator).bfloat16()
    plane, _ = cast(w.detach(), None, specs_of(chosen.text).forward_weight, "reference")
    meta = PlaneMeta(chosen.text, "square", plane.format, plane.scale_mode, 128)
    gathered = GatheredWeight(plane.codes.contiguous(), plane.scales.contiguous(), meta, half, requires_grad=True)
    plan = plan_of(chosen, half, half, k, n)
    monkeypatch.setattr(linear, "_plan_of", lambda *_: plan)
    monkeypatch.setattr(linear._EagerLinear, "apply", None)
    expected = HopperLinear.apply(x, w, None, plan, True, None if name == "fp8_block128" else torch.zeros(2).long())
    got = mx_linear(x, gathered, None, chosen)
    assert torch.equal(got, expected)
    results = [torch.autograd.grad(y, (x, leaf), dy) for y, leaf in ((got, gathered), (expected, w))]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(("m", "length"), [(19, 128), (24, 24)])
def test_exact_weight_gradients_contract_over_multiples_of_8(m, length):
    plan = exact_plan_of(recipe("mxfp8"), torch.bfloat16, torch.bfloat16, 64, 32)
    assert plan is not None
    _, _, codes, scales = plan.cast(torch.ones(m, 64).bfloat16(), short_casts.ALONG_COLUMNS)
    assert plan.read_columns(codes, scales, m, 64, False).shape == (64, length)
    assert plan.read_columns(codes, scales, m, 64, True).stride() == (1, length)
