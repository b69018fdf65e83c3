# Planes are Optional to the checker; a missing one fails the test anyway.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportAttributeAccessIssue=false
"""The kernels of one scale for a tensor under the interpreter, bit by bit against the reference, and the short way of a
layer against the general one."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs under TRITON_INTERPRET=1, see test_precision_tiers.py", allow_module_level=True)

from gemworks.precision import linear, scaled_mm, triton_tensor
from gemworks.precision.casts import CastSpec, cast, cast_both
from gemworks.precision.formats import Format
from gemworks.precision.linear import linear_with_counts
from gemworks.precision.recipe import GemmKind, recipe
from gemworks.precision.tensor_linear import tensor_plan_of

pytestmark = [
    pytest.mark.interpret,
    # numpy's remarks on NaN times a number and on 448 / 1e-38
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]
E4M3, E5M2 = Format.E4M3, Format.E5M2


def same(ours, expected):
    assert torch.equal(ours.codes, expected.codes)
    assert torch.equal(ours.scale.nan_to_num(-1.0), expected.scale.nan_to_num(-1.0))
    assert (ours.dim, ours.shape, ours.format) == (expected.dim, expected.shape, expected.format)


def check(x, spec, dims=()):
    for ours, expected in zip(cast_both(x, spec, "triton")[:2], cast_both(x, spec, "reference")[:2], strict=True):
        same(ours, expected)
        if ours.whole is not None and ours.scale.isfinite():
            behind = ours.whole[x.shape[0] :] if ours.dim == 1 else ours.whole.t()[:, x.shape[0] :]
            assert not behind.any()
    for dim in dims:
        same(cast(x, dim, spec, "triton")[0], cast(x, dim, spec, "reference")[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "format", "power"),
    [((131, 144), E4M3, False), ((16, 32), E5M2, False), ((1, 16), E4M3, True), ((16, 48), E4M3, True)],
)
def test_codes_and_scales(shape, format, power, dtype):
    generator = torch.Generator().manual_seed(shape[0])
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    dims = (0, 1) if shape[0] < 100 else ()
    check(x.to(dtype), CastSpec(GemmKind.FP8_TENSOR, format, power_of_two=power), dims)


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-44, 3.4e38, float("nan"), float("-inf")])
def test_largest_values_of_all_kinds(value):
    x = torch.zeros(16, 32)
    x[5, 6], x[7, 8] = value, value / 3
    check(x, CastSpec(GemmKind.FP8_TENSOR))
    check(x.bfloat16(), CastSpec(GemmKind.FP8_TENSOR, E5M2))


def test_several_tiles_for_each_program(monkeypatch):
    """The largest value is found wherever it lies, in the last tile of a program too; rows of a larger matrix."""
    monkeypatch.setattr(triton_tensor, "AMAX_PROGRAMS", 2)
    x = torch.randn(300, 160, generator=torch.Generator().manual_seed(3)).bfloat16()[:, :144]
    x[299, 143] = 50.0
    check(x, CastSpec(GemmKind.FP8_TENSOR))
    check(x[:16, :32].t(), CastSpec(GemmKind.FP8_TENSOR), (0, 1))


def by_definition(left, right, scales_a, recipe_a, _sa, scales_b, recipe_b, _sb, _bias, dtype, _dims, _fast):
    """What cuBLAS asks of operands with one scale each, and their product."""
    assert recipe_a == recipe_b == scaled_mm.TENSOR
    assert left.stride(1) == right.stride(0) == 1
    assert not left.shape[1] % 16
    assert not right.shape[1] % 16
    assert not left.stride(0) % 16
    assert not right.stride(1) % 16
    return (left.float() @ right.float() * (scales_a[0] * scales_b[0])).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "settings", [{}, {"save": "both"}, {"save": "row", "power_of_two_scales": True}], ids=["input", "codes", "row"]
)
@pytest.mark.parametrize("m", [19, 40])
def test_the_short_way_gives_what_the_general_way_gives(m, settings, dtype, monkeypatch):
    """P4: outputs and gradients; the weight's transpose kept (40 rows), or quantised again."""
    monkeypatch.setattr(torch, "_scaled_mm_v2", by_definition)
    k, n = 48, 32
    chosen = recipe("fp8_tensor", **settings)
    plan = tensor_plan_of(chosen, torch.bfloat16, dtype, k, n)
    assert plan is not None
    assert tensor_plan_of(recipe(chosen, backend="scaled_mm"), torch.bfloat16, dtype, k, n) is None
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(m, c, generator=generator).bfloat16() for c in (k, n))
    w, b = torch.randn(n, k, generator=generator).to(dtype), torch.randn(n, generator=generator).bfloat16()
    results = []
    for way in (plan, None):
        monkeypatch.setattr(linear, "_plan_of", lambda *_, way=way: way)
        leaves = leaf_x, leaf_w, leaf_b = [t.clone().requires_grad_() for t in (x, w, b)]
        y, _ = linear_with_counts(leaf_x, leaf_w, leaf_b, chosen, 0)
        y.backward(dy)
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for short, general in zip(*results, strict=True):
        assert short.dtype is general.dtype
        torch.testing.assert_close(short, general, rtol=0, atol=0)


def test_operands_of_odd_sizes_reach_cublas_in_its_layout(monkeypatch):
    """Planes of the reference, without zeros behind them, and columns that are no multiple of 16."""
    monkeypatch.setattr(torch, "_scaled_mm_v2", by_definition)
    spec = CastSpec(GemmKind.FP8_TENSOR)
    x, w = torch.randn(7, 21), torch.randn(10, 21)
    a, b = cast(x, 1, spec, "reference")[0], cast(w, 0, spec, "reference")[0]
    product = scaled_mm.tensor_mm(a, b, torch.float32, False)
    values = a.codes.view(torch.float8_e4m3fn).float() @ b.codes.view(torch.float8_e4m3fn).float().t()
    torch.testing.assert_close(product, values * a.scale * b.scale)
    assert scaled_mm.tensor_mm(cast(x[:0], 1, spec)[0], b, torch.float32, False).shape == (0, 10)
