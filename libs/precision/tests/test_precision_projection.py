# A missing plane fails the test anyway.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
"""Projection with the cast in its epilogue, by the definition; its kernel: test_precision_project_interpreted.py."""

import pytest
import torch
from gemworks.precision.attention import head_plane
from gemworks.precision.projection import project_heads

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("bias", [False, True])
def test_is_the_projection_and_the_plane_of_its_heads(bias):
    x, w = torch.randn(37, 96), torch.randn(6 * 64, 96)
    b = torch.randn(6 * 64) if bias else None
    out = project_heads(x, w, 64, 4, bias=b)
    y = torch.nn.functional.linear(x, w, b).view(37, 6, 64)
    plane = head_plane(y[:, :4].contiguous(), square=False)
    assert torch.equal(out.coded.codes, plane.codes)
    assert torch.equal(out.coded.scales, plane.scales)
    assert torch.equal(out.values, y[:, 4:])


def test_all_heads_none_and_no_rows():
    x, w = torch.randn(5, 32), torch.randn(64, 32)
    assert project_heads(x, w, 32, 0).coded is None
    assert project_heads(x, w, 32, 2).values.shape == (5, 0, 32)
    assert project_heads(x[:0], w, 32, 1).coded.codes.shape == (0, 1, 32)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"width": 48}, "width: got 48"),
        ({"num_coded": 3}, "num_coded: got 3, expected 0 to 2"),
        ({"format": "e2m1"}, "8-bit codes"),
        ({"x": torch.randn(5, 31)}, "expected \\[M, K\\]"),
        ({"x": torch.randn(5, 32).half()}, "one dtype"),
    ],
)
def test_what_does_not_fit_is_refused(changes, match):
    arguments = {"x": torch.randn(5, 32), "weight": torch.randn(64, 32), "width": 32, "num_coded": 1} | changes
    with pytest.raises(ValueError, match=match):
        project_heads(**arguments)
