"""Stochastic rounding, the random Hadamard transform, jagged planes and regrouping."""

import math

import pytest
import torch
from gemworks.precision import (
    Hadamard,
    Stochastic,
    encode,
    hadamard_inverse,
    hadamard_transform,
    quantize,
    quantize_both,
    quantize_jagged,
    quantize_square,
    regroup,
)
from gemworks.precision.jagged import pad_offsets, pad_rows, padded_rows, unpad_rows
from gemworks.precision.rng import STREAM_ROWS, STREAM_SQUARE, philox, random_words
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.reference


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 0x7FFFFFFF_FFFFFFFF, None),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, expected):
    """Known answers of the Random123 distribution (kat_vectors, philox4x32-10)."""
    words = philox(*(torch.tensor(c, dtype=torch.int64) for c in counter), seed=key)
    assert all(0 <= w.item() < 2**32 for w in words)
    if expected is not None:
        assert tuple(w.item() for w in words) == expected


def test_stochastic_rounding_repeats_from_seed_and_step_and_changes_with_each():
    x = torch.randn(64, 256)

    def codes(seed, step):
        return quantize(x, stochastic=Stochastic(seed, step)).codes

    assert torch.equal(codes(1, 2), codes(1, 2))
    assert not torch.equal(codes(1, 2), codes(1, 3))
    assert not torch.equal(codes(1, 2), codes(2, 2))


def test_a_rows_words_do_not_depend_on_the_shape_around_it():
    few = random_words(3, 10, Stochastic(9), 0, torch.device("cpu"))
    many = random_words(50, 77, Stochastic(9), 0, torch.device("cpu"))
    assert torch.equal(few, many[:3, :10])


@pytest.mark.parametrize("format", ["e4m3", "e5m2", "e2m1"])
def test_stochastic_rounding_is_unbiased_where_nearest_is_not(format):
    """A third of the way between neighbours, normal and subnormal: the mean of 2^18 draws within 5 standard errors."""
    from gemworks.precision import decode, element_spec

    spec = element_spec(format)
    num = 2**18
    for low in (spec.max_code - 1, 1 << spec.mantissa_bits, 0):
        below, above = decode(torch.tensor([low, low + 1], dtype=torch.uint8), format).tolist()
        x = torch.full((1, num), below + (above - below) / 3)
        words = random_words(1, num, Stochastic(11, low), 0, x.device)
        rounded = decode(encode(x, format, words), format).double()
        assert set(rounded.unique().tolist()) == {below, above}
        mean = ((rounded - below) / (above - below)).mean().item()
        assert abs(mean - 1 / 3) < 5 * math.sqrt(2 / 9 / num)
        assert encode(x[:, :1], format).item() == low


def test_stochastic_rounding_far_below_the_last_bit_keeps_its_expectation():
    num = 2**20
    x = torch.full((1, num), 2.0**-9 * 2.0**-12)
    codes = encode(x, "e4m3", random_words(1, num, Stochastic(3), 0, x.device))
    assert abs(codes.sum().item() - num * 2**-12) < 5 * math.sqrt(num * 2**-12)


def test_stochastic_rounding_keeps_exact_values_and_saturation():
    x = torch.tensor([[448.0, -448.0, 1.0, 0.0, -0.0, 1e9, float("nan")]])
    codes = encode(x, "e4m3", random_words(1, 7, Stochastic(5), 0, x.device))
    assert codes.tolist() == [[0x7E, 0xFE, 0x38, 0x00, 0x80, 0x7E, 0x7F]]


def test_squares_draw_from_a_stream_of_their_own():
    """A word's row and column are those of the matrix, its stream neither that of rows nor of columns."""
    x, noise = torch.linspace(-3, 3, 40 * 64).reshape(40, 64), Stochastic(5, 7)
    plane = quantize_square(x, stochastic=noise)
    scaled = x * 2.0 ** -(plane.scales.int() - 127).repeat_interleave(32, 0)[:40].repeat_interleave(32, 1)
    own, rows = (random_words(40, 64, noise, stream, x.device) for stream in (STREAM_SQUARE, STREAM_ROWS))
    assert torch.equal(plane.codes, encode(scaled, "e4m3", own))
    assert not torch.equal(plane.codes, encode(scaled, "e4m3", rows))


def test_stochastic_streams_differ_between_directions():
    x = torch.randn(64, 64)
    rows, columns = quantize_both(x, stochastic=Stochastic(1))
    assert not torch.equal(rows.codes, quantize(x.t(), 0, stochastic=Stochastic(1)).codes.t())
    assert columns.codes.shape == (64, 64)
    assert quantize_square(x, stochastic=Stochastic(1)).codes.shape == (64, 64)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_out_of_range_are_refused(seed):
    with pytest.raises(ValueError, match="seed"):
        Stochastic(seed)
    with pytest.raises(ValueError, match="seed"):
        Hadamard(32, seed)


@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize("dim", [0, 1])
def test_hadamard_is_orthogonal_and_equals_the_matrix(size, dim):
    import scipy.linalg
    from gemworks.precision.hadamard import hadamard_signs

    h = Hadamard(size, seed=4)
    x = torch.randn(2 * size, 2 * size)
    got = hadamard_transform(x, h, dim)
    matrix = (
        torch.from_numpy(scipy.linalg.hadamard(size)).double() / math.sqrt(size) * hadamard_signs(h).double()[None, :]
    )
    expected = (x.double().movedim(dim, -1).unflatten(-1, (2, size)) @ matrix.t()).flatten(-2).movedim(-1, dim)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard_inverse(got, h, dim), x, rtol=1e-5, atol=1e-5)


def test_hadamard_leaves_a_product_unchanged_and_pads_the_contraction():
    h = Hadamard(64, seed=8)
    a, b = torch.randn(70, 5), torch.randn(70, 6)
    ta, tb = hadamard_transform(a, h, 0), hadamard_transform(b, h, 0)
    assert ta.shape == (128, 5)
    torch.testing.assert_close(ta.t() @ tb, a.t() @ b, rtol=1e-4, atol=1e-4)


def test_hadamard_lowers_the_error_of_outliers():
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))
    x[:, ::50] *= 200
    plain, spread = quantize(x, 1, "e2m1"), quantize(x, 1, "e2m1", hadamard=Hadamard(128))

    def error(mx):
        small = torch.ones(512, dtype=torch.bool)
        small[::50] = False
        return (mx.dequantize() - x)[:, small].square().mean()

    assert spread.codes.shape == (256, 256)
    assert spread.dequantize().shape == x.shape
    assert error(plain).item() > 0.3
    assert spread.dequantize(keep_transform=True).shape == (256, 512)


@pytest.mark.parametrize("size", [16, 48, 512])
def test_hadamard_sizes_are_checked(size):
    with pytest.raises(ValueError, match=str(size)):
        Hadamard(size)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 31, 32, 33, 100]), min_size=1, max_size=6),
    surplus=st.sampled_from([0, 1, 40]),
    hadamard=st.sampled_from([None, Hadamard(64)]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_jagged_equals_group_by_group_and_never_reads_padding(lengths, surplus, hadamard, dtype):
    """P6 any jagged size; P10 rows past the end hold NaN and must not reach a result."""
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype)
    total = int(offsets[-1])
    x = torch.randn(total + surplus, 40)
    x[total:] = math.nan
    mx = quantize_jagged(x, offsets, hadamard=hadamard)
    align = 64 if hadamard else 32
    assert mx.plane.codes.shape[0] == padded_rows(total + surplus, len(lengths), align)
    for g, length in enumerate(lengths):
        expected = quantize(x[offsets[g] : offsets[g + 1]], 0, hadamard=hadamard)
        start = int(mx.padded_offsets[g])
        rows = expected.codes.shape[0]
        assert torch.equal(mx.plane.codes[start : start + rows], expected.codes)
        assert not mx.plane.codes[start + rows : start + -(-length // align) * align].any()
    end = int(mx.padded_offsets[-1])
    assert not mx.plane.codes[end:].any()
    back = mx.dequantize(total + surplus)
    assert back.isfinite().all()
    assert not back[total:].any()


def test_padding_rows_round_trips():
    x = torch.arange(12.0).reshape(6, 2)
    offsets = torch.tensor([0, 1, 1, 4])
    padded, starts = pad_rows(x, offsets, 4)
    assert starts.tolist() == [0, 4, 4, 8]
    assert torch.equal(unpad_rows(padded, offsets, starts, 6)[:4], x[:4])
    assert pad_offsets(offsets, 1).tolist() == offsets.tolist()


def test_jagged_offsets_are_checked():
    with pytest.raises(ValueError, match="offsets"):
        quantize_jagged(torch.ones(4, 4), torch.tensor([0.0, 4.0]))


@pytest.mark.parametrize("square", [False, True])
def test_regrouping_is_exact_on_ordinary_data_and_counts_what_is_not(square):
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(3))
    mx = quantize(x, 1)
    wide, inexact = regroup(mx, square=square)
    assert wide.scales.shape == ((2, 4) if square else (256, 4))
    changed = (wide.dequantize() != mx.dequantize()).sum()
    assert inexact == changed
    assert inexact.item() < 0.01 * x.numel()
    if not square:
        assert inexact.item() < 0.001 * x.numel()


def test_regrouping_counts_every_code_it_rounds_away():
    x = torch.ones(1, 128)
    x[0, :32] = 2.0**20
    wide, inexact = regroup(quantize(x))
    assert inexact.item() == 96
    assert torch.equal(wide.dequantize()[0, :32], x[0, :32])
    x[0, 32:] = 0
    assert regroup(quantize(x))[1].item() == 0


def test_regrouping_square_blocks_and_nan():
    x = torch.randn(130, 70)
    wide, inexact = regroup(quantize_square(x), square=True)
    assert wide.scales.shape == (2, 1)
    assert wide.t().scales.shape == (1, 2)
    assert inexact.item() == (wide.dequantize() != quantize_square(x).dequantize()).sum().item()
    x[0, 0] = math.nan
    wide, inexact = regroup(quantize(x))
    assert wide.scales[0, 0].item() == 255
    assert wide.dequantize()[0].isnan().all()
    assert wide.dequantize()[1:].isfinite().all()


def test_codes_of_a_poisoned_block_are_not_counted_as_inexact():
    """A NaN says more of its block than a count would; a block beside it is counted as ever."""
    x = torch.ones(2, 128)
    x[:, 64:] = 2.0**-30
    x[0, 0] = math.nan
    wide, inexact = regroup(quantize(x))
    assert wide.scales.tolist() == [[255], [119]]
    assert inexact.item() == 64


def test_regrouped_zeros_keep_a_normal_scale():
    """128-wide blocks start at byte 1, as the contract's do: their fp32 scales are normal numbers."""
    for plane, square in ((quantize(torch.zeros(2, 256)), False), (quantize_square(torch.zeros(128, 128)), True)):
        wide, inexact = regroup(plane, square=square)
        assert (wide.scales == 1).all()
        assert inexact == 0


def test_regroup_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="square=True"):
        regroup(quantize_square(torch.ones(32, 32)))
    with pytest.raises(ValueError, match="block 128"):
        regroup(quantize(torch.ones(2, 128), block=128))
