"""An independent implementation of the OCP conversion, where ours and it define the same thing: finite input."""

import pytest
import torch
from gemworks.precision import quantize

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("mode", ["floor", "rceil", "ceil", "even"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_codes_and_scales_equal_torchao(format, mode):
    to_mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor").to_mx
    ScalingMode = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor").ScaleCalculationMode
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)) * torch.logspace(-30, 30, 64)[:, None]
    x[0, :32] = 0
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]
    scales, codes = to_mx(x, dtype, 32, ScalingMode[mode.upper()])
    ours = quantize(x, 1, format, mode)
    assert torch.equal(ours.scales, scales.view(torch.uint8))
    assert torch.equal(ours.codes, codes.view(torch.uint8))
