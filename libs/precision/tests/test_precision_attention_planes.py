"""Planes of q, k, v: shapes, scales that leave the contraction, one plane for both transposes."""

import math

import pytest
import torch
from gemworks.precision import quantize
from gemworks.precision.attention import head_plane
from gemworks.precision.probe import sqnr_db

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_head_wide_scales_leave_the_contraction(width):
    """q k^T of codes, multiplied by one scale for each query and key, is the product of the dequantised values."""
    torch.manual_seed(width)
    q, k = torch.randn(7, 2, width), torch.randn(9, 2, width)
    a, b = head_plane(q, square=False), head_plane(k, square=False)
    assert a.scales.shape == (7, 2)
    codes = [p.codes.view(torch.float8_e4m3fn).double() for p in (a, b)]
    product = torch.einsum("qhd,khd->hqk", *codes)
    product = product * a.scale_values.double().t()[:, :, None] * b.scale_values.double().t()[:, None, :]
    expected = torch.einsum("qhd,khd->hqk", a.dequantize().double(), b.dequantize().double())
    assert torch.equal(product, expected)
    assert sqnr_db(q, a.dequantize()) > 27
    assert torch.equal(a.plane.codes, quantize(q.reshape(14, width), 1, block=width).codes)


def test_squares_serve_both_transposes_and_stay_inside_a_head():
    torch.manual_seed(1)
    x = torch.randn(70, 3, 64)
    x[:, 1] *= 1000.0
    plane = head_plane(x, square=True)
    assert plane.scales.shape == (3, 3, 2)
    # A head of its own has the same codes and scales: no square spans two heads.
    for head in range(3):
        alone = head_plane(x[:, head : head + 1], square=True)
        assert torch.equal(alone.codes[:, 0], plane.codes[:, head])
        assert torch.equal(alone.scales[:, 0], plane.scales[:, head])
    transposed = plane.plane.t()
    assert torch.equal(transposed.dequantize(), plane.plane.dequantize().t())


def test_no_tokens_and_a_bad_token():
    assert head_plane(torch.empty(0, 2, 64), square=False).scales.shape == (0, 2)
    x = torch.ones(3, 2, 64)
    x[1, 0, 5] = math.nan
    values = head_plane(x, square=False).dequantize()
    assert values[1, 0].isnan().all()
    assert (values[1, 1] == 1).all()


@pytest.mark.parametrize(
    ("x", "kwargs", "message"),
    [
        (torch.ones(4, 64), {}, r"got shape \(4, 64\)"),
        (torch.ones(4, 2, 48), {}, "width in"),
        (torch.ones(4, 2, 64), {"format": "e2m1"}, "8-bit codes"),
    ],
)
def test_bad_input_says_what_was_expected(x, kwargs, message):
    with pytest.raises(ValueError, match=message):
        head_plane(x, square=False, **kwargs)
