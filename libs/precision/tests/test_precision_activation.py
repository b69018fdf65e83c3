"""Activation + cast on the reference: planes of its own y, and what is refused."""

import pytest
import torch
from gemworks.precision import Hadamard
from gemworks.precision.activation import ACTIVATIONS, activation_cast, activation_gradient_cast
from gemworks.precision.casts import CastSpec, cast, cast_squares
from gemworks.precision.recipe import GemmKind

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_planes_are_those_of_y(activation):
    x = torch.randn(40, 70).bfloat16()
    spec = CastSpec(GemmKind.MXFP8)
    out = activation_cast(x, spec, activation, return_y=True)
    assert out.y is not None
    assert out.columns is not None
    torch.testing.assert_close(out.y, ACTIVATIONS[activation](x), rtol=2**-7, atol=1e-6)
    assert torch.equal(out.rows.codes, cast(out.y, 1, spec)[0].codes)
    assert torch.equal(out.columns.codes, cast(out.y, 0, spec)[0].codes)
    alone = activation_cast(x, spec, activation, columns=False)
    assert alone.columns is None
    assert alone.y is None
    assert torch.equal(alone.rows.codes, out.rows.codes)


def test_squares_are_those_of_y():
    x, spec = torch.randn(150, 256).bfloat16(), CastSpec(GemmKind.FP8_BLOCK128)
    out = activation_cast(x, spec, "silu", square=True, return_y=True)
    assert out.y is not None
    assert out.columns is not None
    expected = cast_squares(out.y, spec)
    for ours, plane in ((out.rows, expected.rows), (out.columns, expected.transposed)):
        assert torch.equal(ours.codes, plane.codes)
        assert torch.equal(ours.scales, plane.scales)
    with pytest.raises(ValueError, match="both contractions"):
        activation_cast(x, spec, "silu", square=True, columns=False)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_planes_of_the_gradient_are_those_of_what_autograd_gives(activation):
    x, dy = torch.randn(40, 70).bfloat16(), torch.randn(40, 70).bfloat16()
    spec = CastSpec(GemmKind.MXFP8)
    out = activation_gradient_cast(dy, x, spec, activation, return_y=True)
    assert out.y is not None
    assert out.columns is not None
    leaf = x.double().requires_grad_()
    ACTIVATIONS[activation](leaf).backward(dy.double())
    assert leaf.grad is not None
    torch.testing.assert_close(out.y.double(), leaf.grad, rtol=2**-7, atol=1e-6)
    assert torch.equal(out.rows.codes, cast(out.y, 1, spec)[0].codes)
    assert torch.equal(out.columns.codes, cast(out.y, 0, spec)[0].codes)
    alone = activation_gradient_cast(dy, x, spec, activation, columns=False)
    assert alone.columns is None
    assert alone.y is None
    assert torch.equal(alone.rows.codes, out.rows.codes)


def test_a_gradient_unlike_the_input_is_refused():
    x = torch.zeros(4, 32)
    with pytest.raises(ValueError, match=r"dy: got \(4, 64\) torch.float32, expected x's \(4, 32\)"):
        activation_gradient_cast(torch.zeros(4, 64), x, CastSpec(GemmKind.MXFP8), "relu")


@pytest.mark.parametrize(
    ("shape", "activation", "hadamard", "message"),
    [
        ((4, 32), "swish", None, "expected one of"),
        ((4, 2, 32), "relu", None, "flatten the leading dims"),
        ((4, 32), "relu", Hadamard(32, 1), "not fused with an activation"),
    ],
)
def test_bad_input_says_what_was_expected(shape, activation, hadamard, message):
    with pytest.raises(ValueError, match=message):
        activation_cast(torch.zeros(shape), CastSpec(GemmKind.MXFP8, hadamard=hadamard), activation)
