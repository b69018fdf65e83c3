# A missing plane fails the test anyway.
# pyright: reportOptionalMemberAccess=false
"""The projection kernel under the interpreter, in fp32 and fp16; see test_precision_triton_interpreted.py."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs under TRITON_INTERPRET=1, see test_precision_tiers.py", allow_module_level=True)

from gemworks.precision.attention import head_plane
from gemworks.precision.projection import project_heads

pytestmark = pytest.mark.interpret


@pytest.mark.parametrize(("dtype", "rows", "width", "coded"), [(torch.float32, 70, 64, 2), (torch.float16, 140, 32, 3)])
def test_planes_are_those_of_the_projection(dtype, rows, width, coded):
    """All heads as values are the y that was computed; ragged rows and features, a bias, strided rows."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 90, generator=generator).to(dtype)[:, :80]
    w = torch.randn(3 * width, 80, generator=generator).to(dtype) / 9
    b = torch.randn(3 * width, generator=generator).to(dtype)
    y = project_heads(x, w, width, 0, bias=b, backend="triton").values
    torch.testing.assert_close(y.flatten(1), torch.nn.functional.linear(x, w, b), rtol=2**-9, atol=2e-3)
    out = project_heads(x, w, width, coded, bias=b, backend="triton")
    expected = head_plane(y[:, :coded].contiguous(), square=False, backend="reference")
    assert torch.equal(out.coded.codes, expected.codes)
    assert torch.equal(out.coded.scales, expected.scales)
    assert torch.equal(out.values, y[:, coded:])
    assert torch.equal(out.coded.dequantize(), expected.dequantize())
