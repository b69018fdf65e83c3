# Gradients are Optional and submodules are Tensor | Module to the checker; a wrong one fails the test anyway.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportOptionalSubscript=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
"""The fused norm + cast kernel under the interpreter (fp32 and fp16; see test_precision_triton_interpreted.py)."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs under TRITON_INTERPRET=1, see test_precision_tiers.py", allow_module_level=True)

from gemworks.precision import Stochastic
from gemworks.precision.casts import CastSpec, cast
from gemworks.precision.norm import norm_backward, norm_cast
from gemworks.precision.recipe import BLOCK_KINDS

pytestmark = pytest.mark.interpret


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fused_planes_are_those_of_its_own_y(norm, kind, dtype):
    """Bit for bit what casting the kernel's y gives; y and the sum agree with the reference."""
    x, residual = torch.randn(70, 300).to(dtype), torch.randn(70, 300).to(dtype)
    w = torch.randn(300)
    bias = torch.randn(300) if norm == "layer" else None
    spec = CastSpec(kind, stochastic=Stochastic(4, 2) if dtype is torch.float32 else None)
    kwargs = {"norm": norm, "bias": bias, "residual": residual, "return_y": True, "eps": 0.5}
    ours = norm_cast(x, w, spec, backend="triton", **kwargs)
    reference = norm_cast(x, w, spec, backend="reference", **kwargs)
    torch.testing.assert_close(ours.y, reference.y)
    torch.testing.assert_close(ours.rstd, reference.rstd, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.mean, reference.mean, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours.hidden, reference.hidden)
    for plane, dim in ((ours.rows, 1), (ours.columns, 0)):
        expected, _ = cast(ours.y, dim, spec, "reference")
        assert torch.equal(plane.scales, expected.scales)
        assert torch.equal(plane.codes, expected.codes)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("shape", [(37, 70), (3, 16), (300, 33)])
def test_backward_in_one_kernel(norm, shape, monkeypatch):
    """Gradients of input, weight and bias against the definition; ranges of rows that end inside a program."""
    monkeypatch.setattr("gemworks.precision.triton_norm.NORM_PROGRAMS", 2)
    generator = torch.Generator().manual_seed(sum(shape))
    h, dy, more = (torch.randn(shape, generator=generator) for _ in range(3))
    w = torch.randn(shape[1], generator=generator)
    mean = h.mean(1) if norm == "layer" else torch.zeros(shape[0])
    rstd = ((h - mean[:, None]).square().mean(1) + 1e-6).rsqrt()
    for extra in (None, more):
        arguments = (dy, h, w, mean, rstd, norm, norm == "layer", extra)
        ours, expected = norm_backward(*arguments, backend="triton"), norm_backward(*arguments)
        for a, b in zip(ours, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
