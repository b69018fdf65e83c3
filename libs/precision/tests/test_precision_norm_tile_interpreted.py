# Planes are Optional to the checker; a missing one fails the test anyway.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
"""Norm + cast on tiles of bf16 under the interpreter; see test_precision_triton_interpreted.py."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs under TRITON_INTERPRET=1, see test_precision_tiers.py", allow_module_level=True)

from gemworks.precision import triton_norm
from gemworks.precision.casts import CastSpec, cast
from gemworks.precision.norm import norm_cast
from gemworks.precision.recipe import GemmKind

pytestmark = pytest.mark.interpret


@pytest.fixture(autouse=True)
def tiles_only(monkeypatch):
    """The general kernel must not answer for the tile kernel."""
    monkeypatch.setattr(triton_norm, "general_kernel", None)


def check(shape, kind, name, residual=True, weight_dtype=torch.bfloat16, eps=1e-6):
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator).bfloat16()
    r = torch.randn(shape, generator=generator).bfloat16() if residual else None
    w = torch.randn(shape[1], generator=generator).to(weight_dtype)
    bias = torch.randn(shape[1], generator=generator).to(weight_dtype) if name == "layer" else None
    spec = CastSpec(kind)
    kwargs = {"norm": name, "bias": bias, "residual": r, "return_y": True, "eps": eps}
    ours = norm_cast(x, w, spec, backend="triton", **kwargs)
    reference = norm_cast(x, w, spec, backend="reference", **kwargs)
    assert torch.equal(ours.hidden, reference.hidden)
    torch.testing.assert_close(ours.y, reference.y, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(ours.rstd, reference.rstd, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.mean, reference.mean, rtol=1e-5, atol=1e-6)
    for plane, dim in ((ours.rows, 1), (ours.columns, 0)):
        expected, _ = cast(ours.y, dim, spec, "reference")
        assert torch.equal(plane.scales, expected.scales)
        assert torch.equal(plane.codes, expected.codes)
    return ours.inexact


@pytest.mark.parametrize("name", ["rms", "layer"])
def test_rows_read_at_once_and_in_pieces(name, monkeypatch):
    """Ragged rows and columns; a bias that must not leak into blocks past the last row, which is alone in its block, so
    that larger values would show in the scale; one turn, and several."""
    check((33, 80), GemmKind.MXFP8, name, eps=0.5)
    check((16, 64), GemmKind.MXFP8, name, residual=False, weight_dtype=torch.float32)
    monkeypatch.setattr(triton_norm, "norm_sum_tile", lambda *_: (32, 64))
    monkeypatch.setattr(triton_norm, "norm_turn", lambda *_: 1)
    triton_norm._norm_setup.cache_clear()
    check((144, 64), GemmKind.MXFP8, name)
    triton_norm._norm_setup.cache_clear()


@pytest.mark.parametrize("kind", [GemmKind.FP8_BLOCK128, GemmKind.MXFP8_REGROUP128])
def test_wide_blocks(kind):
    check((144, 144) if kind is GemmKind.FP8_BLOCK128 else (144, 64), kind, "rms")


def test_only_the_plane_that_is_asked_for():
    x, w = torch.randn(32, 64).bfloat16(), torch.ones(64)
    out = norm_cast(x, w, CastSpec(GemmKind.MXFP8), columns=False, backend="triton")
    both = norm_cast(x, w, CastSpec(GemmKind.MXFP8), backend="triton")
    assert out.columns is None
    assert out.y is None
    assert torch.equal(out.rows.codes, both.rows.codes)
