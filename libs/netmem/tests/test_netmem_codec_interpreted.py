"""The codec kernels under Triton's interpreter, bit by bit against the torch definitions.

Runs where TRITON_INTERPRET=1 was set before Triton was imported; `test_netmem_tiers.py` does that in a process of its
own. float32 and float16 only: the interpreter is wrong in bf16.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs under TRITON_INTERPRET=1, see test_netmem_tiers.py", allow_module_level=True)

from gemworks.netmem import kernel_codec
from gemworks.netmem.codec import Fp8Codec, MXFP8Codec

pytestmark = [
    pytest.mark.interpret,
    # numpy's remarks on blocks that hold an infinity or a NaN, and on factors at the ends of the exponent's range
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]
SHAPES = [(1,), (31,), (33, 32), (5, 500), (3, 128), (2, 8192), (7, 3, 129)]


def uneven(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    return (x * torch.randint(-9, 9, shape, generator=generator).float().exp2()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", [Fp8Codec(), Fp8Codec(128), Fp8Codec(100), MXFP8Codec()], ids=lambda c: c.name)
def test_same_codes_scales_and_values(codec, shape, dtype):
    x = uneven(shape, dtype)
    mx = isinstance(codec, MXFP8Codec)
    block = 32 if mx else codec._block(shape)
    codes, scales = kernel_codec.encode(x, block, mx, hardware=False)
    expected_codes, expected_scales = codec.encode(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected_codes)
    back = kernel_codec.decode(codes, scales, block, mx, dtype).view(shape)
    assert torch.equal(back, codec.decode((codes, scales), shape, dtype))


@pytest.mark.parametrize("mx", [False, True])
def test_extremes(mx):
    """Zeros, the least and the largest numbers, edges of powers of two; infinity and NaN break their block only."""
    codec = MXFP8Codec() if mx else Fp8Codec(32)
    x = torch.zeros(8, 32)
    x[1, 3], x[2, 4], x[3, 5] = 1e-45, 3.0e38, 448.0
    x[4, 0], x[4, 1], x[5, 0] = 449.0, -0.3, 2.0**-126
    x[6, 7], x[7, 8] = float("inf"), float("nan")
    codes, scales = kernel_codec.encode(x, 32, mx, hardware=False)
    expected_codes, expected_scales = codec.encode(x)
    assert torch.equal(codes[: 6 * 32], expected_codes[: 6 * 32])
    assert torch.equal(scales[:6], expected_scales[:6])
    back = kernel_codec.decode(codes, scales, 32, mx, torch.float32).view(8, 32)
    torch.testing.assert_close(back, codec.decode((expected_codes, expected_scales), x.shape, x.dtype), equal_nan=True)
    assert back[6:].isnan().all()
    assert back[:6].isfinite().all()
