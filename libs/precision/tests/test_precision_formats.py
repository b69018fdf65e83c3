"""Exhaustive and independent checks of encoding, decoding and scales."""

import math
import struct

import numpy as np
import pytest
import torch
from gemworks.precision import Format, ScaleMode, decode, element_spec, encode, quantize, quantize_both, quantize_square
from gemworks.precision.formats import SPECS, pack_e2m1, unpack_e2m1
from gemworks.precision.scales import inverse_scale, magnitude_bits, scale_bytes, scale_values
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.reference

ALL_CODES = torch.arange(256, dtype=torch.uint8)


def ml_dtype(format):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}[format]


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_decode_equals_torch_and_ml_dtypes_on_all_codes(format):
    ours = decode(ALL_CODES, format)
    dtype = element_spec(format).torch_dtype
    assert dtype is not None
    theirs = ALL_CODES.view(dtype).to(torch.float32)
    numpy = torch.from_numpy(np.arange(256, dtype=np.uint8).view(ml_dtype(format)).astype(np.float32))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ours, numpy, rtol=0, atol=0, equal_nan=True)


def test_decode_e2m1_equals_ml_dtypes():
    numpy = torch.from_numpy(np.arange(16, dtype=np.uint8).view(ml_dtype("e2m1")).astype(np.float32))
    assert torch.equal(decode(ALL_CODES[:16], "e2m1"), numpy)


@pytest.mark.parametrize("format", ["e4m3", "e5m2", "e2m1"])
def test_every_finite_code_round_trips(format):
    spec = element_spec(format)
    codes = ALL_CODES[: 1 << spec.bits]
    values = decode(codes, format)
    finite = values.isfinite()
    assert torch.equal(encode(values[finite], format), codes[finite])


@pytest.mark.parametrize("format", ["e4m3", "e5m2", "e2m1"])
def test_encode_equals_ml_dtypes_at_and_around_every_midpoint(format):
    """Each value, each midpoint between neighbours, and the fp32 numbers next to it on both sides."""
    spec = element_spec(format)
    values = decode(ALL_CODES[: spec.max_code + 1], format)
    middle = (values[1:] + values[:-1]) / 2
    points = torch.cat((values, middle, middle.nextafter(torch.tensor(1e9)), middle.nextafter(torch.tensor(0.0))))
    points = torch.cat((points, -points))
    expected = points.numpy().astype(ml_dtype(format)).view(np.uint8)
    assert torch.equal(encode(points, format), torch.from_numpy(expected.copy()))


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_encode_equals_torch_where_torch_does_not_overflow(format):
    x = torch.randn(20000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 2, 20000)
    x = x.clamp(-448, 448)
    assert torch.equal(encode(x, format), x.to(element_spec(format).torch_dtype).view(torch.uint8))


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_all_codes_under_all_scales(format):
    """256 codes x 256 scale bytes: the dequantised value is the exact product, in fp32 and (bytes 3..246) in bf16."""
    from gemworks.precision import MXTensor

    codes = ALL_CODES.repeat(256, 1)
    scales = ALL_CODES[:, None].repeat(1, 8)
    mx = MXTensor(codes, scales, (256, 256), 1, 32, Format(format), ScaleMode.RCEIL)
    got = mx.dequantize().double()
    element = decode(ALL_CODES, format).double()
    power = torch.tensor([2.0 ** (b - 127) for b in range(255)] + [math.nan], dtype=torch.float64)
    exact = power[:, None] * element[None, :]
    exact = torch.where(exact.abs() >= 2.0**128, exact.sign() * math.inf, exact)
    torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True)
    if format == "e4m3":
        bf16 = mx.dequantize(torch.bfloat16).double()
        torch.testing.assert_close(bf16[3:247], exact[3:247], rtol=0, atol=0, equal_nan=True)
        assert not torch.equal(bf16[2].nan_to_num(), exact[2].nan_to_num())


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_requantising_a_plane_gives_its_codes_back(format):
    """quantise(dequantise(q)) == q for a block that holds its largest code, at every scale byte not clamped."""
    spec = element_spec(format)
    codes = torch.arange(0, 32, dtype=torch.uint8) * 3
    codes[0] = spec.max_code
    for byte in range(0, 247 if format == "e4m3" else 240):
        x = decode(codes, format) * scale_values(torch.tensor([byte], dtype=torch.uint8))
        mx = quantize(x, 0, format)
        assert mx.scales.item() == byte
        assert torch.equal(mx.codes, codes)


def exact_scale_exponent(amax: float, format: str, mode: str) -> int:
    """The rules of the scales module in exact rational arithmetic (frexp and Python integers)."""
    spec = SPECS[Format(format)]
    mantissa, exponent = math.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    floor_log2 = exponent - 1
    if mode == "floor":
        return floor_log2 - spec.emax
    if mode == "ceil":
        return (floor_log2 if mantissa == 0.5 else exponent) - spec.emax
    if mode == "rceil":
        top_mantissa, top_exponent = math.frexp(spec.max_value)
        return exponent - top_exponent + (1 if mantissa > top_mantissa else 0)
    rounded = math.floor(mantissa * 2 ** (spec.mantissa_bits + 1) + 0.5)
    return floor_log2 - spec.emax + (1 if rounded == 2 ** (spec.mantissa_bits + 1) else 0)


@settings(max_examples=300, deadline=None)
@given(
    amax=st.floats(min_value=2.0**-149, max_value=3.4028234663852886e38, width=32),
    format=st.sampled_from(["e4m3", "e5m2", "e2m1"]),
    mode=st.sampled_from([m.value for m in ScaleMode]),
)
def test_scale_rules_hold_exactly(amax, format, mode):
    got = scale_bytes(magnitude_bits(torch.tensor([amax])), element_spec(format), mode).item()
    assert got == min(max(exact_scale_exponent(amax, format, mode) + 127, 0), 254)


@pytest.mark.parametrize("format", ["e4m3", "e5m2", "e2m1"])
def test_rceil_never_saturates_and_floor_does(format):
    x = torch.randn(4000, 32, generator=torch.Generator().manual_seed(2))
    spec = element_spec(format)
    for mode, expect in (("rceil", False), ("ceil", False), ("floor", True), ("even", True)):
        scaled = x * inverse_scale(quantize(x, 1, format, mode).scales)
        assert bool((scaled.abs() > spec.max_value).any()) is expect


@pytest.mark.parametrize(
    ("format", "floor", "even"), [("e4m3", 0.125, 0.0968), ("e5m2", 0.125, 0.0667), ("e2m1", 0.25, 0.1429)]
)
def test_what_a_saturated_largest_value_loses_at_most(format, floor, even):
    """The shares that the scales module and the page on numerics state, of blocks of one value over a binade."""
    x = torch.arange(2**16, 2**17).float()[:, None]
    for mode, most in (("floor", floor), ("even", even)):
        plane = quantize(x, 1, format, mode)
        saturated = (x * inverse_scale(plane.scales)) > element_spec(format).max_value
        assert (1 - plane.dequantize() / x)[saturated].max().item() == pytest.approx(most, abs=1e-4)


def test_no_finite_input_reaches_byte_254():
    bits = magnitude_bits(torch.tensor([3.4028234663852886e38]))
    for format in Format:
        for mode in ScaleMode:
            assert scale_bytes(bits, element_spec(format), mode).item() <= 253


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(0, 5),
    length=st.sampled_from([0, 1, 31, 32, 33, 70, 128, 129]),
    dim=st.sampled_from([0, 1, -1, -2]),
    format=st.sampled_from(["e4m3", "e5m2", "e2m1"]),
    mode=st.sampled_from([m.value for m in ScaleMode]),
    exponent=st.integers(-140, 120),
    seed=st.integers(0, 1000),
)
def test_quantised_values_are_the_nearest_representable(rows, length, dim, format, mode, exponent, seed):
    """Against a brute-force nearest-code search in float64, whatever the shape: K below a block, empty, ragged."""
    x = torch.randn(rows, length, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    if dim in (0, -2):
        x = x.t()
    mx = quantize(x, dim, format, mode)
    assert mx.dequantize().shape == x.shape
    spec = element_spec(format)
    scale = mx.expanded_scales().double()
    scaled = (x.double() / scale).clamp(-spec.max_value, spec.max_value)
    grid = decode(torch.arange(spec.max_code + 1, dtype=torch.uint8), format).double()
    distance = (scaled.abs()[..., None] - grid).abs().amin(-1) if x.numel() else scaled
    error = (mx.dequantize().double() / scale - scaled).abs()
    assert torch.equal(error, distance)


def test_non_contiguous_input_equals_its_copy():
    x = torch.randn(96, 130)[::2, 1::2]
    for dim in (0, 1):
        assert torch.equal(quantize(x, dim).codes, quantize(x.clone(), dim).codes)
    assert torch.equal(quantize_square(x).codes, quantize_square(x.clone()).codes)


def test_higher_rank_and_negative_dims():
    x = torch.randn(2, 5, 40)
    mx = quantize(x, 1)
    assert mx.dim == 1
    assert mx.scales.shape == (2, 1, 40)
    for b in range(2):
        assert torch.equal(mx.codes[b], quantize(x[b], 0).codes)
    assert quantize(x).scales.shape == (2, 5, 2)


def test_the_quantised_dim_is_contiguous():
    rows, columns = quantize_both(torch.randn(64, 96))
    assert rows.codes.stride() == (96, 1)
    assert columns.codes.stride() == (1, 64)
    assert columns.scales.stride() == (1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_directions_equal_the_single_ones(dtype):
    x = torch.randn(70, 45).to(dtype)
    rows, columns = quantize_both(x)
    assert torch.equal(rows.codes, quantize(x, 1).codes)
    assert torch.equal(columns.codes, quantize(x, 0).codes)
    assert torch.equal(columns.scales, quantize(x.t(), 1).scales.t())


def test_square_plane_serves_both_transposes():
    x = torch.randn(70, 45)
    assert torch.equal(quantize_square(x).t().dequantize(), quantize_square(x.t()).dequantize())
    assert torch.equal(quantize_square(x, block=128).t().codes, quantize_square(x.t(), block=128).codes)


def test_square_scale_is_the_maximum_of_its_rows():
    x = torch.randn(64, 64)
    per_row = quantize(x).scales.reshape(2, 32, 2).amax(1)
    assert torch.equal(quantize_square(x).scales, per_row)


def test_e2m1_packs_two_codes_a_byte():
    x = torch.randn(3, 33)
    mx = quantize(x, 1, "e2m1")
    assert mx.codes.shape == (3, 17)
    assert mx.nbytes == 3 * 17 + 3 * 2
    assert torch.equal(unpack_e2m1(pack_e2m1(mx.element_codes()), 33), mx.element_codes())
    along_rows = quantize(x.t(), 0, "e2m1")
    assert along_rows.codes.shape == (17, 3)
    assert torch.equal(along_rows.dequantize().t(), mx.dequantize())


def test_codes_do_not_depend_on_torchs_casts(monkeypatch):
    """P8: torch 2.11 turns 465 into NaN, torch 2.13 saturates; codes must not go through either cast."""
    x = torch.cat((torch.randn(1000) * 300, torch.tensor([465.0, 1e30, -480.0])))
    expected = encode(x, "e4m3")
    before = quantize(x, 0, "e4m3", "floor")
    original = torch.Tensor.to

    def no_float8(self, *args, **kwargs):
        wanted = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
        if any("float8" in str(dtype) for dtype in wanted):
            raise AssertionError("a cast to float8 depends on the version of torch")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", no_float8)
    assert torch.equal(encode(x, "e4m3"), expected)
    assert torch.equal(quantize(x, 0, "e4m3", "floor").codes, before.codes)
    assert expected[-3:].tolist() == [0x7E, 0x7E, 0xFE]


def test_sqnr_gates():
    """Tensor SQNR of E4M3 with rceil: at least 31 dB on normal, Student-t(3) and log-normal data; floor is worse."""
    generator = np.random.default_rng(3)
    for data in (
        generator.normal(size=(256, 4096)),
        generator.standard_t(3, (256, 4096)),
        generator.lognormal(size=(256, 4096)),
    ):
        x = torch.from_numpy(data).float()

        def sqnr(mode, x=x):
            return (
                10 * torch.log10(x.square().sum() / (quantize(x, 1, "e4m3", mode).dequantize() - x).square().sum())
            ).item()

        assert sqnr("rceil") >= 31.0
        assert sqnr("rceil") > sqnr("floor")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize(torch.ones(4, 4, dtype=torch.int32)), ["dtype", "int32", "float32"]),
        (lambda: quantize(torch.ones(4, 4, dtype=torch.float64)), ["dtype", "float64", ".float()"]),
        (lambda: quantize(torch.ones(4, 4), 2), ["dim", "2", "(4, 4)"]),
        (lambda: quantize(torch.ones(4), 0, "e3m4"), ["format", "e3m4", "e4m3"]),
        (lambda: quantize(torch.ones(4), 0, "e4m3", "up"), ["scale_mode", "up", "rceil"]),
        (lambda: quantize(torch.ones(4), 0, block=16), ["block", "16", "32"]),
        (lambda: quantize_square(torch.ones(4)), ["square", "2 dims"]),
        (lambda: quantize_both(torch.ones(2, 4, 4)), ["2 dims", "flatten"]),
        (lambda: quantize(torch.tensor(1.0)), ["dim"]),
    ],
)
def test_bad_input_says_what_to_do(call, words):
    with pytest.raises(ValueError, match=r".") as error:
        call()
    for word in words:
        assert word in str(error.value)


def test_mismatched_scales_are_refused():
    from dataclasses import replace

    mx = quantize(torch.randn(4, 64))
    with pytest.raises(ValueError, match="pass the scales that came with these codes"):
        replace(mx, scales=mx.scales[:, :1])
    with pytest.raises(ValueError, match="uint8"):
        replace(mx, codes=mx.codes.to(torch.int32))


def test_fp32_bits_of_a_case_are_what_struct_says():
    assert magnitude_bits(torch.tensor([-1.5])).item() == struct.unpack("I", struct.pack("f", 1.5))[0]
