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


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("codec", [Fp8Codec(), Fp8Codec(128), MXFP8Codec()], ids=lambda c: c.name)
@pytest.mark.parametrize("shape", [(4, 96), (3, 8), (64, 256)])
def test_sum_of_messages(codec, shape, mean):
    """What three ranks sent, decoded and added in one kernel, is what decoding and adding one by one gives."""
    mx = isinstance(codec, MXFP8Codec)
    xs = [uneven(shape, torch.float32) * (r + 1) for r in range(3)]
    coded = [codec.encode(x) for x in xs]
    messages = torch.cat([c.contiguous().view(-1).view(torch.uint8) for pair in coded for c in pair])
    block = 32 if mx else codec._block(shape)
    got = kernel_codec.decode_sum(messages, 3, xs[0].numel(), block, mx, torch.float32, mean).view(shape)
    total = torch.zeros(shape)
    for pair in coded:
        total += codec.decode(pair, shape, torch.float32)
    assert torch.equal(got, total / 3 if mean else total)


@pytest.mark.parametrize("n", [1, 4096, 9000])
@pytest.mark.parametrize("rank", [0, 2])
def test_sum_of_parts(n, rank):
    generator = torch.Generator().manual_seed(n)
    whole = torch.randn(3, n + 7, generator=generator)
    parts, own = whole[:, :n], torch.randn(n, generator=generator)
    expected = torch.zeros(n)
    for r in range(3):
        expected += own if r == rank else parts[r]
    out = torch.full((n,), float("nan"))
    kernel_codec.sum_parts(own, parts, rank, out, False)
    assert torch.equal(out, expected)
    kernel_codec.sum_parts(own, parts, rank, out, True)
    assert torch.equal(out, expected / 3)
