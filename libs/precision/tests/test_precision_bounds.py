"""The bound of Hopper's FP8 products, against a model of its accumulator as the publications describe it."""

import pytest
import torch
from gemworks.precision import decode, quantize, quantize_tensor
from gemworks.precision.bounds import fp32_bound, hopper_fp8_bound, tensor_fp8_bound

pytestmark = pytest.mark.reference


def cut(value, largest):
    """Towards zero, to 13 fraction bits of the power of two at or under `largest`."""
    unit = torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-100))) - 13)
    return torch.trunc(value / unit) * unit


def hopper(left, right, every=128):
    """Product [M, N]: 32 products and the accumulator aligned and cut per instruction, an fp32 sum every 128."""
    out = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float64)
    for block in range(0, left.shape[1], every):
        accumulator = torch.zeros_like(out)
        for start in range(block, block + every, 32):
            products = left[:, None, start : start + 32] * right[None, :, start : start + 32]
            largest = torch.maximum(products.abs().amax(-1), accumulator.abs())
            accumulator = cut(products, largest[..., None]).sum(-1) + cut(accumulator, largest)
            accumulator = cut(accumulator, accumulator.abs())
        out = (out + accumulator).float().double()
    return out


@pytest.mark.parametrize("k", [128, 512])
def test_the_bound_holds_and_its_variance_is_near(k):
    torch.manual_seed(k)
    left = quantize(torch.randn(64, k), 1, block=128).dequantize().double()
    right = quantize(torch.randn(96, k), 1, block=128).dequantize().double()
    error = hopper(left, right) - left @ right.t()
    worst, variance = hopper_fp8_bound(left, right, 2.0**-24)
    assert (error.abs() <= worst).all()
    # The variance is neither exceeded nor so large that it would let anything pass.
    assert 0.1 < (error.square().mean() / variance.mean()).item() < 1.0
    # fp32 accumulation is far better than this: the difference is the instruction's.
    assert (error.abs() > fp32_bound(left, right, 2.0**-24)).any()


def test_a_multiple_of_an_ulp_is_no_bound():
    """2^-13 |A||B|^T, the bound held before, fails on plain normal data with K = 128."""
    torch.manual_seed(0)
    left = quantize(torch.randn(128, 128), 1, block=128).dequantize().double()
    right = quantize(torch.randn(256, 128), 1, block=128).dequantize().double()
    error = (hopper(left, right) - left @ right.t()).abs()
    assert (error > 2.0**-13 * left.abs() @ right.abs().t()).any()


def test_what_fits_the_accumulator_is_exact():
    generator = torch.Generator().manual_seed(1)
    left = torch.randint(-2, 3, (32, 256), generator=generator).double()
    right = torch.randint(-1, 2, (48, 256), generator=generator).double()
    assert torch.equal(hopper(left, right), left @ right.t())
    left[0, 0], left[0, 1], right[0, :2] = 448.0, 2.0**-6, 1.0  # 2^8 and 2^-6: the smaller one is cut off
    left[0, 2:], right[0, 2:] = 0.0, 0.0
    assert hopper(left, right)[0, 0] == 448.0


def test_the_accumulator_before_an_instruction_counts():
    """It is aligned with the products: 32 x 8 = 256 in it, and 32 small products that take it back to 1."""
    left = torch.cat([torch.full((32,), 8.0), torch.full((31,), -8.0), torch.tensor([-7.0]), torch.zeros(64)])[None]
    worst, _ = hopper_fp8_bound(left.double(), torch.ones(1, 128).double(), 0.0)
    assert round(worst.item() * 2**13 / 35) == 256 + 256 + 1 + 1


def test_the_bound_of_one_scale_knows_how_far_sums_went_either_way():
    """Sums 32, 64, 32, 64, 96, or the same below zero: ranges 32, 64, 64, 64, and 96, whose power of two is 64."""
    left = torch.cat([torch.full((64,), 1.0), torch.full((32,), -1.0), torch.full((64,), 1.0)])[None].double()
    ones = torch.ones_like(left)
    worst, variance = tensor_fp8_bound(left, ones, 1.0, 0.0)
    assert round(worst.item() * 2**13 / 35) == 32 + 64 + 64 + 64 + 64
    for found, expected in zip(tensor_fp8_bound(-left, ones, 1.0, 0.0), (worst, variance), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("every", [32, 128, 512])
def test_the_bound_of_one_scale_holds_however_often_sums_are_promoted(every):
    """512, the whole contraction: fast accumulation, which loses most, and comes nearest to the variance."""
    torch.manual_seed(every)
    a, b = quantize_tensor(torch.randn(64, 512)), quantize_tensor(torch.randn(96, 512))
    left, right = (decode(plane.codes, plane.format).double() for plane in (a, b))
    scale = a.scale.double().item() * b.scale.double().item()
    error = hopper(left, right, every) * scale - left @ right.t() * scale
    worst, variance = tensor_fp8_bound(left, right, scale, 2.0**-24)
    assert (error.abs() <= worst).all()
    ratio = (error.square().mean() / variance.mean()).item()
    assert ratio < 1
    assert every < 512 or ratio > 0.02
