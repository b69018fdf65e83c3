# The stand-in sets attributes on modules, and recipes take formats by name.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
"""Transformer Engine as a backend: what the registry says of it, and what is asked of it (by a stand-in)."""

import contextlib
import importlib.util
import sys
import types

import pytest
import torch
from gemworks.precision import explain, mx_linear, recipe, te_backend
from gemworks.precision.backends import DeviceSpec, choose
from gemworks.precision.recipe import GemmKind, GemmRecipe

pytestmark = pytest.mark.reference
INSTALLED = importlib.util.find_spec("transformer_engine") is not None


@pytest.mark.parametrize(
    ("kind", "device", "reason"),
    [
        (GemmKind.FP8_BLOCK128, DeviceSpec("cpu"), "needs a CUDA device"),
        (GemmKind.FP8_BLOCK128, DeviceSpec("cuda", 100), "Hopper's"),
        (GemmKind.MXFP8, DeviceSpec("cuda", 90), "needs sm_100"),
        (GemmKind.MXFP8_REGROUP128, DeviceSpec("cuda", 90), "has no mxfp8_regroup128"),
        (GemmKind.FP8_TENSOR, DeviceSpec("cuda", 80), "needs sm_89 or later"),
    ],
)
def test_where_it_is_refused(kind, device, reason):
    with pytest.raises(ValueError, match=reason):
        choose("gemm", kind, (128, 128, 128), device, te_backend.NAME)


@pytest.mark.skipif(INSTALLED, reason="it is installed")
def test_not_installed_names_the_extra():
    with pytest.raises(ValueError, match="gemworks-precision\\[transformer-engine\\]"):
        explain((128, 128, 128), recipe("fp8_block128", backend="transformer_engine"), "sm_90")


def test_it_is_never_chosen_by_itself():
    assert te_backend.NAME not in str(explain((4096, 1024, 1024), "fp8_block128", "sm_90"))


@pytest.fixture
def stand_in(monkeypatch):
    """A module that records what is asked of it and multiplies in plain precision."""
    asked = []

    class Linear(torch.nn.Linear):
        def __init__(self, in_features, out_features, *, bias, params_dtype, device):
            super().__init__(in_features, out_features, bias=bias, dtype=params_dtype, device=device)

    @contextlib.contextmanager
    def fp8_autocast(*, enabled, fp8_recipe):
        asked.append(fp8_recipe)
        yield

    modules = {name: types.ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    modules["transformer_engine.common"] = types.ModuleType("transformer_engine.common")
    modules["transformer_engine"].pytorch = modules["transformer_engine.pytorch"]
    modules["transformer_engine.pytorch"].Linear = Linear
    modules["transformer_engine.pytorch"].fp8_autocast = fp8_autocast
    recipes = types.SimpleNamespace(
        Float8BlockScaling=lambda: "block",
        MXFP8BlockScaling=lambda: "mx",
        Float8CurrentScaling=lambda **options: types.SimpleNamespace(**options),
        QParams=lambda power_2_scale: power_2_scale,
        MMParams=lambda use_split_accumulator: use_split_accumulator,
        Format=types.SimpleNamespace(E4M3="E4M3", HYBRID="HYBRID"),
    )
    modules["transformer_engine.common"].recipe = recipes
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(te_backend, "refusal", lambda *_: None)
    te_backend._layer.cache_clear()
    choose.cache_clear()
    yield asked
    te_backend._layer.cache_clear()
    choose.cache_clear()


def test_a_layer_trains_its_own_parameters(stand_in):
    x = torch.randn(5, 128, requires_grad=True)
    for w, b in ((torch.randn(256, 128), torch.randn(256)), (torch.randn(256, 128), torch.randn(256))):
        weight, bias = torch.nn.Parameter(w), torch.nn.Parameter(b)
        y = mx_linear(x, weight, bias, recipe("fp8_block128", backend="transformer_engine"))
        torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, bias))
        y.sum().backward()
        assert weight.grad is not None
        assert bias.grad is not None
    mx_linear(x, torch.nn.Parameter(torch.randn(256, 128)), None, recipe("mxfp8", backend="transformer_engine"))
    assert stand_in == ["block", "block", "mx"]


def test_what_it_can_not_follow_is_refused(stand_in):
    x, w = torch.randn(5, 128), torch.nn.Parameter(torch.randn(128, 128))
    base = recipe("fp8_block128", backend="transformer_engine")
    for changed, match in (
        (recipe(base, scale_mode="floor"), "floor"),
        (recipe(base, stochastic_gradients=True), "stochastic_gradients"),
        (recipe(base, wgrad=GemmRecipe(GemmKind.BF16)), "one arithmetic"),
        (recipe(base, dgrad=GemmRecipe(GemmKind.FP8_BLOCK128, "e5m2")), "e5m2"),
    ):
        with pytest.raises(ValueError, match=match):
            mx_linear(x, w, None, changed)
    with pytest.raises(ValueError, match="expected an nn"):
        mx_linear(x, w.detach(), None, base)


def test_one_scale_a_tensor_is_its_current_scaling(stand_in):
    """The preset is its default: gradients in E5M2, fast accumulation forward alone."""
    x, w = torch.randn(5, 128), torch.nn.Parameter(torch.randn(128, 128))
    e4m3 = GemmRecipe("fp8_tensor")
    for changes in ({}, {"forward": e4m3, "dgrad": e4m3, "wgrad": e4m3, "power_of_two_scales": True}):
        mx_linear(x, w, None, recipe("fp8_tensor", backend="transformer_engine", **changes))
    assert te_backend._layer.cache_info().currsize == 2, "a layer keeps the formats that it first computed with"
    accumulation = {"fp8_gemm_dgrad": True, "fp8_gemm_wgrad": True}
    first, second = (
        {f"fp8_quant_{name}": power for name in ("fwd_inp", "fwd_weight", "bwd_grad")} for power in (False, True)
    )
    assert [vars(made) for made in stand_in] == [
        {"use_power_2_scales": False, "fp8_format": "HYBRID", "fp8_gemm_fprop": False, **accumulation, **first},
        {"use_power_2_scales": True, "fp8_format": "E4M3", "fp8_gemm_fprop": True, **accumulation, **second},
    ]
    with pytest.raises(ValueError, match="one format for gradients"):
        mx_linear(x, w, None, recipe("fp8_tensor", backend="transformer_engine", wgrad=e4m3))
