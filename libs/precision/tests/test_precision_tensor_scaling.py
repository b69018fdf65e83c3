# Recipes and kinds take names, and planes are Optional to the checker; a wrong one fails the test anyway.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportCallIssue=false
"""One scale for a tensor: its formula case by case, what it loses, and layers that compute with it."""

import numpy as np
import pytest
import torch
from gemworks.precision import (
    GemmKind,
    GemmRecipe,
    Recipe,
    convert,
    decode,
    explain,
    explain_grouped,
    mx_grouped_linear,
    mx_linear,
    probe,
    quantize,
    quantize_tensor,
    recipe,
)
from gemworks.precision.backends import choose, device_spec
from gemworks.precision.casts import CastSpec, cast_squares
from gemworks.precision.fsdp import gather_rule
from gemworks.precision.gemms import gemm
from gemworks.precision.mlp import mx_mlp
from gemworks.precision.norm import norm_cast
from gemworks.precision.norm_linear import mx_norm_linear
from gemworks.precision.probe import sqnr_db
from gemworks.precision.tensor_scaling import TensorPlane
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.reference
E4M3 = GemmRecipe(GemmKind.FP8_TENSOR)
PLAIN = recipe("fp8_tensor", forward=E4M3, dgrad=E4M3, wgrad=E4M3)
INF, NAN, MAX = float("inf"), float("nan"), torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("values", "format", "power", "scale", "codes"),
    [
        ([448.0, 1.0], "e4m3", False, 1.0, [0x7E, 0x38]),
        ([3.5, -1.0], "e4m3", False, 2.0**-7, [0x7E, 0xF0]),
        ([0.0, -0.0], "e4m3", False, 1.0, [0x00, 0x80]),
        ([57344.0, 1.0], "e5m2", False, 1.0, [0x7B, 0x3C]),
        ([NAN, 1.0], "e4m3", False, NAN, [0x7F, 0x7F]),
        ([-INF, 1.0], "e5m2", False, NAN, [0x7F, 0x7F]),
        # 448 / 1e-38 is beyond fp32: its largest number is the factor, and 3.4 codes as 3.5
        ([1e-38, -1e-38], "e4m3", False, 2.938735877055719e-39, [0x46, 0xC6]),
        # 448 / 3 = 149.33: the largest value is the format's, whatever that rounds to
        ([3.0, 1.5], "e4m3", False, float(np.float32(1) / (np.float32(448) / np.float32(3))), [0x7E, 0x76]),
        # down to 128: 3 * 128 = 384
        ([3.0, 1.5], "e4m3", True, 2.0**-7, [0x7C, 0x74]),
        ([3.5, 1.0], "e4m3", True, 2.0**-7, [0x7E, 0x70]),
        ([MAX, 1.0], "e4m3", True, 2.0**120, [0x78, 0x00]),
    ],
)
def test_contract(values, format, power, scale, codes):
    for dim in (0, 1):
        plane = quantize_tensor(torch.tensor([values]), dim, format, power_of_two=power)
        assert plane.codes.tolist() == [codes]
        assert plane.scale.item() == pytest.approx(scale, rel=0, abs=0, nan_ok=True)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["e4m3", "e5m2"]), st.integers(-60, 60))
def test_codes_and_scale_equal_numpys_division_and_torchs_cast(seed, format, exponent):
    """Another way to the same bits: divisions by numpy, a cast of torch that saturates by a clamp in front."""
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    plane = quantize_tensor(x, 1, format)
    dtype, largest = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}[format]
    factor = np.float32(largest) / x.abs().max().numpy()
    assert plane.scale.numpy()[0] == np.float32(1) / factor
    expected = (x * torch.tensor(factor)).clamp(-largest, largest).to(dtype).view(torch.uint8)
    assert torch.equal(plane.codes, expected)


def test_powers_of_two_are_those_of_a_block_as_large():
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    plane, block = quantize_tensor(x, power_of_two=True), quantize(x, block=256)
    assert torch.equal(plane.codes, block.codes)
    assert plane.scale.item() == 2.0 ** (block.scales.item() - 127)


def test_both_dims_share_codes_and_any_input_is_taken():
    x = torch.randn(6, 10)
    rows, columns = quantize_tensor(x, 1), quantize_tensor(x, 0)
    assert torch.equal(rows.codes, columns.codes)
    assert rows.codes.stride() == (10, 1)
    assert columns.codes.stride() == (1, 6)
    assert torch.equal(quantize_tensor(x.t(), 0).t().codes, rows.codes)
    assert quantize_tensor(torch.empty(0, 16)).codes.shape == (0, 16)
    assert quantize_tensor(x.half()).nbytes == 64


def test_what_one_large_value_costs():
    """The limits that the module states: bits are lost under 2^-14.8 of the largest, everything under 2^-18.8."""
    largest = 448.0
    x = torch.tensor([[largest, largest * 2**-14.7, largest * 2**-16.9, largest * 2**-18.9]])
    values = quantize_tensor(x).dequantize()[0]
    assert abs(values[1] / x[0, 1] - 1) <= 2**-4
    assert abs(values[2] / x[0, 2] - 1) > 2**-4
    assert values[3] == 0
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    x[3, 4] = 2.0**20
    w = torch.randn(128, 256, generator=torch.Generator().manual_seed(2))
    exact = (x.double() @ w.double().t())[4:]
    assert sqnr_db(exact, mx_linear(x, w, None, PLAIN)[4:]) < 3
    assert sqnr_db(exact, mx_linear(x, w, None, "fp8_block128")[4:]) > 28


def operands(law, m=512, k=512, n=256):
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        x = torch.randn(*shape, generator=generator)
        if law == "student_t":
            return x / (torch.randn(*shape, 3, generator=generator).square().sum(-1) / 3).sqrt()
        return x.exp() * torch.randn(*shape, generator=generator).sign() if law == "log_normal" else x

    return draw(m, k).requires_grad_(), draw(n, k).requires_grad_(), draw(m, n)


@pytest.mark.parametrize("law", ["normal", "student_t", "log_normal"])
@pytest.mark.parametrize(("chosen", "gates"), [(PLAIN, (28, 28, 28)), (recipe("fp8_tensor"), (28, 24, 24))])
def test_sqnr(law, chosen, gates):
    """E4M3 meets the gates of blocks on data without large values; gradients in E5M2 have a bit less."""
    x, w, dy = operands(law)
    y = mx_linear(x, w, None, chosen)
    y.backward(dy)
    exact = x.double() @ w.double().t(), dy.double() @ w.double(), dy.double().t() @ x.double()
    for reference, got, gate in zip(exact, (y, x.grad, w.grad), gates, strict=True):
        assert sqnr_db(reference, got) >= gate


def test_the_product_is_that_of_the_codes_times_both_scales():
    x, w, _ = operands("normal", 33, 48, 32)
    a, b = quantize_tensor(x.detach()), quantize_tensor(w.detach())
    expected = (decode(a.codes, "e4m3") @ decode(b.codes, "e4m3").t()) * (a.scale * b.scale)
    assert torch.equal(mx_linear(x, w, None, "fp8_tensor"), expected)
    assert torch.equal(gemm(a, b, GemmKind.FP8_TENSOR, torch.float32), expected)
    with pytest.raises(ValueError, match="planes with one scale go with each other"):
        gemm(a, quantize(w.detach()), GemmKind.FP8_TENSOR, torch.float32)
    with pytest.raises(ValueError, match="planes with one scale go with each other"):
        gemm(a, b, GemmKind.MXFP8, torch.float32)
    with pytest.raises(ValueError, match="contractions 48 and 32 differ"):
        gemm(a, quantize_tensor(torch.randn(16, 32)), GemmKind.FP8_TENSOR, torch.float32)


@pytest.mark.parametrize("as_op", [False, True])
def test_what_is_saved_changes_no_bit(as_op, monkeypatch):
    """The codes along M are those along K, so whatever is kept, the weight gradient is rounded once."""
    if as_op:
        monkeypatch.setattr("gemworks.precision.linear._runs_eagerly", lambda *_: False)
    found = []
    for save in ("high_precision", "row", "both"):
        x, w, dy = operands("normal", 131, 48, 32)
        y = mx_linear(x, w, None, recipe("fp8_tensor", save=save))
        y.backward(dy)
        found.append((y.detach(), x.grad, w.grad))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_products_of_other_kinds_read_what_a_forward_kept():
    x, w, dy = operands("normal", 64, 128, 128)
    chosen = recipe("fp8_tensor", save="row", dgrad=GemmRecipe("bf16"), wgrad=GemmRecipe("fp8_block128"))
    mx_linear(x, w, None, chosen).backward(dy)
    assert sqnr_db(dy.double().t() @ x.double(), w.grad) > 24
    assert torch.equal(x.grad, dy @ w)


@pytest.mark.parametrize("save", ["high_precision", "row", "both"])
def test_opcheck(save):
    x, w = torch.randn(35, 48, requires_grad=True), torch.randn(32, 48, requires_grad=True)
    text = recipe("fp8_tensor", save=save).text
    torch.library.opcheck(torch.ops.gemworks_precision.linear, (x, w, None, text, 0, True, torch.float32))


@pytest.mark.parametrize("save", ["row", "both"])
def test_compiled_gradients_equal_eager(save):
    chosen, grads = recipe("fp8_tensor", save=save), []
    for run in (mx_linear, torch.compile(mx_linear, fullgraph=True, backend="aot_eager")):
        x, w, dy = operands("normal", 20, 32, 16)
        run(x, w, None, chosen).backward(dy)
        grads.append((x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_nan_is_seen_everywhere():
    x, w, dy = operands("normal", 33, 48, 32)
    x.data[3, 4] = NAN
    y = mx_linear(x, w, None, "fp8_tensor")
    y.backward(dy)
    assert y.isnan().all()
    assert w.grad.isnan().all()


def test_recipes_travel_and_say_what_they_do_not_take():
    chosen = recipe("fp8_tensor", power_of_two_scales=True, save="both")
    assert Recipe.from_toml(chosen.to_toml()) == chosen
    assert chosen.forward.fast_accumulation
    for change in (
        {"square_weights": True},
        {"row_weights": True},
        {"stochastic_gradients": True},
        {"hadamard_size": 32},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(change))}: set with a product of kind 'fp8_tensor'"):
            recipe("fp8_tensor", **change)
    with pytest.raises(ValueError, match="only 'fp8_tensor' has it"):
        GemmRecipe("fp8_block128", fast_accumulation=True)
    with pytest.raises(ValueError, match="fast_accumulation: got 1"):
        GemmRecipe("fp8_tensor", fast_accumulation=1)
    with pytest.raises(ValueError, match="a storage format"):
        quantize_tensor(torch.randn(2, 2), format="e2m1")
    with pytest.raises(ValueError, match="expected 2 dims"):
        quantize_tensor(torch.randn(2))


def test_where_it_has_no_place_it_is_refused():
    """A scale that is known when all of the tensor is: nothing fused, no groups, no squares."""
    x, w, spec = torch.randn(32, 64), torch.randn(64, 64), CastSpec(GemmKind.FP8_TENSOR)
    for run in (
        lambda: norm_cast(x, torch.ones(64), spec),
        lambda: mx_norm_linear(x, torch.ones(64), w, "fp8_tensor"),
        lambda: cast_squares(x, spec),
    ):
        with pytest.raises(ValueError, match="known only when all of it is computed"):
            run()
    with pytest.raises(ValueError, match="one quantised kind with blocks"):
        mx_mlp(x, w, w, PLAIN)
    with pytest.raises(ValueError, match="which all groups would share"):
        mx_grouped_linear(x, w[None], torch.tensor([0, 32]), "fp8_tensor")
    with pytest.raises(ValueError, match="which all groups would share"):
        explain_grouped("fp8_tensor")


def test_layers_are_converted_by_rule():
    model = torch.nn.Sequential(torch.nn.Linear(144, 128), torch.nn.Linear(128, 136))
    report = convert(model, "fp8_tensor")
    assert report.converted == ("0",)
    assert "out_features 136 is not a multiple of 16" in str(report)
    assert isinstance(quantize_tensor(model[0].weight.detach()), TensorPlane)
    assert gather_rule(1024, 512, 8, recipe("fp8_tensor"))[0] == "bf16"
    text = str(explain((4096, 1024, 1024), "fp8_tensor", "sm_90", 8))
    assert "scaled_mm: cuBLAS FP8, one scale a tensor" in text
    assert "gathers the weight as bf16: one scale for the tensor" in text
    assert "short way" in text
    assert "emulated in bf16" in str(explain((4096, 1024, 1024), "fp8_tensor", "sm_80"))
    assert choose("gemm", GemmKind.FP8_TENSOR, (64, 64, 64), device_spec("sm_100")).kernel.endswith("our machines)")


def test_probe_measures_it_when_asked():
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.Linear(128, 128))
    report = probe(model, [torch.randn(64, 128)], candidates=("fp8_tensor",))
    assert set(report.recipe.layers.values()) == {"fp8_tensor"}
    assert all(row["saturation_pct"] == 0 and row["sqnr_db"] > 22 for row in report.rows())
    convert(model, report.recipe)
    model(torch.randn(8, 128)).sum().backward()
