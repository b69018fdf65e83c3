# Gradients are Optional and submodules are Tensor | Module to the checker; a wrong one fails the test anyway.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportOptionalSubscript=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
"""Norm + cast: planes of the y that was computed, and a trainable norm + linear layer."""

import pytest
import torch
from gemworks.precision import mx_linear, recipe
from gemworks.precision.casts import CastSpec, cast, cast_squares
from gemworks.precision.norm import norm_cast
from gemworks.precision.norm_linear import mx_norm_linear
from gemworks.precision.recipe import GemmKind
from torch import nn

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_planes_are_those_of_y(norm):
    x, residual, w = torch.randn(70, 96), torch.randn(70, 96), torch.randn(96)
    bias = torch.randn(96) if norm == "layer" else None
    spec = CastSpec(GemmKind.MXFP8)
    eps = 0.5  # large enough to be seen
    out = norm_cast(x, w, spec, norm=norm, bias=bias, residual=residual, eps=eps, return_y=True)
    h = x + residual
    expected = (
        nn.functional.rms_norm(h, (96,), w, eps) if norm == "rms" else nn.functional.layer_norm(h, (96,), w, bias, eps)
    )
    assert out.y is not None
    assert out.rows is not None
    assert out.columns is not None
    torch.testing.assert_close(out.y, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(out.hidden, h)
    assert torch.equal(out.rows.codes, cast(out.y, 1, spec)[0].codes)
    assert torch.equal(out.columns.codes, cast(out.y, 0, spec)[0].codes)


@pytest.mark.parametrize("save", ["high_precision", "row", "both"])
def test_of_the_normed_rows_of_a_frozen_weight_nothing_is_kept(save):
    x, g = torch.randn(70, 96, requires_grad=True), torch.randn(96, requires_grad=True)
    w, dy, kept = torch.randn(64, 96), torch.randn(70, 64), []
    chosen = recipe("mxfp8", save=save)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        out, _ = mx_norm_linear(x, g, w, chosen)
    assert [tuple(t.shape) for t in kept if t.dim() == 2] == [(70, 96), (64, 96)], "x and the weight"
    frozen = torch.autograd.grad(out, (x, g), dy)
    trained, _ = mx_norm_linear(x, g, w.requires_grad_(), chosen)
    for got, expected in zip(frozen, torch.autograd.grad(trained, (x, g), dy), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("save", ["high_precision", "both"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm_linear_equals_the_parts(norm, save, with_residual):
    torch.manual_seed(0)
    leaves = [torch.randn(50, 128), torch.randn(50, 128), torch.randn(128), torch.randn(128, 128)]
    bias0 = torch.randn(128)
    d_out, d_hidden = torch.randn(50, 128), torch.randn(50, 128)
    results = []
    for fused in (True, False):
        x, residual, g, w = (t.clone().requires_grad_() for t in leaves)
        b = bias0.clone().requires_grad_() if norm == "layer" else None
        chosen = recipe("mxfp8", save=save)
        if fused:
            extra = residual if with_residual else None
            out, hidden = mx_norm_linear(x, g, w, chosen, norm=norm, norm_bias=b, residual=extra, eps=0.5)
        else:
            hidden = x + residual if with_residual else x
            n = nn.functional
            y = n.rms_norm(hidden, (128,), g, 0.5) if norm == "rms" else n.layer_norm(hidden, (128,), g, b, 0.5)
            out = mx_linear(y, w, None, chosen)
        (out * d_out).sum().add((hidden * d_hidden).sum()).backward()
        grads = (
            [x.grad, g.grad, w.grad] + ([b.grad] if b is not None else []) + ([residual.grad] if with_residual else [])
        )
        results.append([out, hidden, *grads])
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-3, atol=2e-2)


def test_squares_of_the_norm_are_those_of_y():
    x, w = torch.randn(150, 256).bfloat16(), torch.randn(256)
    spec = CastSpec(GemmKind.FP8_BLOCK128)
    out = norm_cast(x, w, spec, square=True, return_y=True)
    expected = cast_squares(out.y, spec)
    for ours, plane in ((out.rows, expected.rows), (out.columns, expected.transposed)):
        assert torch.equal(ours.codes, plane.codes)
        assert torch.equal(ours.scales, plane.scales)
        assert ours.dim == plane.dim


@pytest.mark.parametrize("save", ["high_precision", "both"])
def test_norm_linear_with_squares_of_its_input(save):
    torch.manual_seed(1)
    # Rows of very different sizes after the norm: with a scale of their own, small ones would keep more bits.
    x0 = torch.randn(150, 128) * torch.logspace(-12, 0, 150, base=2)[:, None]
    leaves, dy = [x0, torch.randn(128), torch.randn(256, 128)], torch.randn(150, 256)
    results = {}
    for fused, square in ((True, True), (False, True), (False, False)):
        chosen = recipe("fp8_block128", save=save, square_inputs=square)
        x, g, w = (t.clone().requires_grad_() for t in leaves)
        if fused:
            out = mx_norm_linear(x, g, w, chosen, eps=1.0)[0]
        else:
            y = norm_cast(x.detach(), g.detach(), CastSpec(GemmKind.FP8_BLOCK128), eps=1.0, return_y=True).y
            assert y is not None
            out = mx_linear(y, w, None, chosen)
        out.backward(dy)
        results[fused, square] = out.detach(), w.grad
    for ours, parts, other in zip(results[True, True], results[False, True], results[False, False], strict=True):
        assert torch.equal(ours, parts)
        # Where only dW reads squares, the forward is that of rows.
        assert torch.equal(ours, other) == (save == "high_precision" and ours.shape == (150, 256))


def test_norm_cast_checks_its_arguments():
    x, w, spec = torch.randn(4, 64), torch.randn(64), CastSpec(GemmKind.MXFP8)
    for kwargs, word in (
        ({"norm": "batch"}, "batch"),
        ({"bias": w}, "RMSNorm has none"),
        ({"residual": x.half()}, "residual"),
        ({"square": True, "columns": False}, "both contractions"),
    ):
        with pytest.raises(ValueError, match=word):
            norm_cast(x, w, spec, **kwargs)
    with pytest.raises(ValueError, match="weight"):
        norm_cast(x, torch.ones(3), spec)
    with pytest.raises(ValueError, match="no cast to fuse"):
        mx_norm_linear(x, w, torch.randn(64, 64), "bf16")
