# Planes are Optional to the checker; a missing one fails the test anyway.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
"""The tile kernel under the interpreter, bit by bit against the reference; see test_precision_triton_interpreted.py.

bf16 is read as int32 pairs, so that the interpreter's faulty bf16 arithmetic is not in the way.
"""

import math
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs under TRITON_INTERPRET=1, see test_precision_tiers.py", allow_module_level=True)

from gemworks.precision import triton_casts, triton_squares, triton_tiles
from gemworks.precision.casts import CastSpec, cast, cast_both, cast_squares
from gemworks.precision.formats import Format
from gemworks.precision.recipe import BLOCK_KINDS, GemmKind
from gemworks.precision.rng import Stochastic
from gemworks.precision.scaled_mm import square_scales, wide_scales
from gemworks.precision.scales import ScaleMode
from gemworks.precision.tiles import TileConfig

pytestmark = [
    pytest.mark.interpret,
    # numpy's remark on inf * 0 in a block that holds an infinity; the kernel overrides every code of such a block
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

KINDS = BLOCK_KINDS


def uneven(m, n, seed=0):
    """Blocks whose magnitudes differ by up to 2^24, zeros among them: regrouping loses codes here."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, n, generator=generator)
    scale = torch.randint(-12, 12, (-(-m // 16), -(-n // 16)), generator=generator).float().exp2()
    x = x * scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[:m, :n]
    x[:, n // 2] = 0
    return x


def check_wide(plane, expected):
    """The fp32 scales are those that the product would make of the reference's bytes, and are what it takes. Codes
    behind the matrix are zero."""
    assert (plane.wide is None) == (plane.block != 128)
    whole = plane.codes if plane.whole is None else plane.whole
    rows, columns = plane.shape
    assert whole.shape == (-(-rows // 128) * 128, columns)
    poisoned = (expected.scales == 255).any(0) if plane.dim == 0 else torch.tensor(False)
    assert ((whole[rows:] & 0x7F == 0) | (poisoned & (whole[rows:] == 0x7F))).all()
    assert torch.equal(whole[:rows], plane.codes)
    if plane.wide is not None:
        left = plane if plane.dim == 1 else plane.t()
        lines, length = (whole if plane.dim == 1 else whole.t()).shape
        assert left.wide.isfinite().all() or (expected.scales == 255).any()
        made = wide_scales(expected if plane.dim == 1 else expected.t(), lines, -(-length // 128))
        real = left.shape[0]
        assert torch.equal(left.wide[:real].nan_to_num(-1.0), made[:real].nan_to_num(-1.0))
        assert left.wide.stride(0) == made.stride(0) == 1
        assert wide_scales(left, lines, -(-length // 128)) is left.wide


def check_squares(ours, expected):
    """The plane along K and the square one of the transpose, with their scales for products."""
    for a, b in zip(ours, (expected.rows, expected.transposed), strict=True):
        assert torch.equal(a.scales, b.scales)
        assert torch.equal(a.codes, b.codes)
    check_wide(ours[0], expected.rows)
    made = square_scales(expected.transposed, ours[1].scales.shape[1])
    assert ours[1].wide.stride() == made.stride()
    assert torch.equal(ours[1].wide, made)


def check(x, spec, single=False):
    """Both directions, and each alone: planes and counts."""
    *ours, lost = cast_both(x, spec, "triton")
    *expected, lost_expected = cast_both(x, spec, "reference")
    for dim, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert torch.equal(a.scales, b.scales)
        assert torch.equal(a.codes, b.codes)
        assert a.codes.stride(a.dim) == 1
        check_wide(a, b)
        if single:
            part = x[:, -48:] if dim else x[-48:]  # fewer tiles, the last ones
            alone, count = cast(part, 1 - dim, spec, "triton")
            c, count_expected = cast(part, 1 - dim, spec, "reference")
            assert torch.equal(alone.scales, c.scales)
            assert torch.equal(alone.codes, c.codes)
            check_wide(alone, c)
            assert count == count_expected
    assert lost == lost_expected
    return lost


@pytest.fixture(autouse=True)
def tiles_only(monkeypatch):
    """The general kernel must not answer for the tile kernel."""
    for name in ("cast_rows_kernel", "cast_both_kernel"):
        monkeypatch.setattr(triton_casts, name, None)


@pytest.mark.parametrize("kind", KINDS)
def test_planes_of_tiles_equal_the_reference(kind):
    """P1, P2, P3: ragged tiles in both dims, strided rows, blocks that are not finite, inexact codes counted."""
    width = 144 if kind is GemmKind.FP8_BLOCK128 else 80
    x = uneven(144, 288).bfloat16()[:, 16 : 16 + width]
    x[3, 5], x[70, 60], x[143, -1] = math.nan, math.inf, -math.inf
    x[17, :] = -0.0
    lost = check(x, CastSpec(kind), single=True)
    assert (lost > 0) == (kind is GemmKind.MXFP8_REGROUP128)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(kind, dtype):
    check(uneven(33, 48).clamp(-6e4, 6e4).to(dtype), CastSpec(kind))


@pytest.mark.parametrize(("kind", "num_rows"), [*((kind, 131) for kind in KINDS), (KINDS[0], 1)])
def test_any_number_of_rows(kind, num_rows):
    """P3, P8: planes end in zero rows, up to a multiple of 128; x's neighbours in memory are not read."""
    x = torch.full((136, 80), math.nan).bfloat16()
    x[:num_rows] = uneven(num_rows, 80, seed=num_rows).bfloat16()
    check(x[:num_rows], CastSpec(kind))


@pytest.mark.parametrize("mode", list(ScaleMode))
@pytest.mark.parametrize("format", [Format.E4M3, Format.E5M2])
def test_modes_and_formats(mode, format):
    check(uneven(32, 48, seed=2).bfloat16(), CastSpec(GemmKind.MXFP8, format, mode))


def test_regrouping_e5m2():
    """Which tiles of bf16 do word by word, not in pairs."""
    x = uneven(33, 48, seed=6).bfloat16()
    x[:, :32] *= 2.0**-28
    x[2, 3] = math.nan
    assert check(x, CastSpec(GemmKind.MXFP8_REGROUP128, Format.E5M2)) > 0


def test_a_transposed_matrix_swaps_the_directions():
    x = uneven(48, 64, seed=4).bfloat16()
    for dim in (0, 1):
        ours = cast(x.t(), dim, CastSpec(GemmKind.MXFP8), "triton")[0]
        expected = cast(x.t(), dim, CastSpec(GemmKind.MXFP8), "reference")[0]
        assert torch.equal(ours.codes, expected.codes)
        assert torch.equal(ours.scales, expected.scales)


def test_any_tile_gives_the_same_planes(monkeypatch):
    x = uneven(64, 80, seed=5).bfloat16()
    for config in (TileConfig(32, 128, 4), TileConfig(256, 64, 8)):
        monkeypatch.setattr(triton_casts, "tile_config", lambda *_, c=config: c)
        check(x, CastSpec(GemmKind.MXFP8))


@pytest.mark.parametrize(
    ("kind", "mode", "num_rows"),
    [
        *((kind, ScaleMode.RCEIL, rows) for kind in KINDS for rows in (144, 131)),
        (KINDS[0], ScaleMode.EVEN, 40),
        (GemmKind.MXFP8_REGROUP128, ScaleMode.FLOOR, 144),
    ],
)
def test_squares_stored_once(kind, mode, num_rows, monkeypatch):
    """P1, P2, P3, P8: squares that end inside a matrix, a poisoned one, inexact codes counted, strided rows."""
    monkeypatch.setattr(triton_casts, "cast_square_kernel", None)
    x = torch.full((144, 304), math.nan).bfloat16()
    x[:num_rows] = uneven(num_rows, 304, seed=num_rows).bfloat16()
    x[3, 149], x[num_rows - 1, 20] = math.inf, math.nan
    x = x[:num_rows, 16:160]
    spec = CastSpec(kind, scale_mode=mode)
    ours, lost = cast(x, None, spec, "triton")
    expected, lost_expected = cast(x, None, spec, "reference")
    assert torch.equal(ours.scales, expected.scales)
    assert torch.equal(ours.codes, expected.codes)
    assert lost == lost_expected
    assert (lost > 0) == (kind is GemmKind.MXFP8_REGROUP128)
    if ours.wide is not None:
        made = square_scales(expected, 2)
        assert torch.equal(ours.wide.nan_to_num(-1.0), made.nan_to_num(-1.0))
        assert ours.wide.stride() == made.stride()


@pytest.mark.parametrize("kind", KINDS)
def test_squares_of_zeros_keep_the_smallest_scale(kind, monkeypatch):
    monkeypatch.setattr(triton_casts, "cast_square_kernel", None)
    x = torch.zeros(128, 160).bfloat16()
    x[:, 128:] = 1.0
    ours, expected = (cast(x, None, CastSpec(kind), backend)[0] for backend in ("triton", "reference"))
    assert torch.equal(ours.scales, expected.scales)
    assert ours.scales[0, 0] == (0 if kind is GemmKind.MXFP8 else 1)


def test_what_does_not_fit_a_tile():
    spec = CastSpec(GemmKind.MXFP8)
    x = torch.empty(32, 64, dtype=torch.bfloat16)
    assert triton_tiles.fits_tiles(x, spec, 32)
    assert triton_tiles.fits_tiles(x[:25], spec, 32)
    assert not triton_tiles.fits_tiles(x[:, :40], spec, 32)
    assert not triton_tiles.fits_tiles(x.t(), spec, 32)
    assert not triton_tiles.fits_tiles(x, spec, 64)
    assert not triton_tiles.fits_tiles(x, CastSpec(GemmKind.MXFP8, stochastic=Stochastic(1)), 32)
    assert not triton_tiles.fits_tiles(torch.empty(2**26, 1).expand(-1, 16), spec, 32)
    assert triton_tiles.packs(x)
    assert not triton_tiles.packs(torch.empty(32, 65, dtype=torch.bfloat16)[:, :64])


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
def test_activation_in_the_kernel(activation):
    """Planes are those of the kernel's own y, which is the reference's up to its last bit."""
    from gemworks.precision.activation import activation_cast

    x = torch.randn(48, 80, generator=torch.Generator().manual_seed(6)).bfloat16()
    spec = CastSpec(GemmKind.MXFP8)
    ours = activation_cast(x, spec, activation, return_y=True, backend="triton")
    expected = activation_cast(x, spec, activation, return_y=True, backend="reference")
    torch.testing.assert_close(ours.y, expected.y, rtol=2**-7, atol=1e-6)
    for plane, dim in ((ours.rows, 1), (ours.columns, 0)):
        reference = cast(ours.y, dim, spec, "reference")[0]
        assert torch.equal(plane.codes, reference.codes)
        assert torch.equal(plane.scales, reference.scales)


@pytest.mark.parametrize("in_epilogues", [False, True])
def test_squares_of_an_activation_and_of_a_norm(monkeypatch, in_epilogues):
    """P8: tiles that end inside a matrix, rows that are no multiple of 16; squares of y, and those of the epilogues."""
    from gemworks.precision.activation import ACTIVATIONS, activation_cast
    from gemworks.precision.norm import norm_cast

    def silu(t):
        assert t.dtype == torch.bfloat16, "a copy in fp32 costs more bytes than all the rest"
        return torch.nn.functional.silu(t)

    monkeypatch.setattr(triton_squares, "IN_EPILOGUES", in_epilogues)
    monkeypatch.setitem(ACTIVATIONS, "silu", silu)
    x, spec = torch.randn(139, 144, generator=torch.Generator().manual_seed(8)).bfloat16(), CastSpec(KINDS[-1])
    made = activation_cast(x, spec, "silu", square=True, return_y=True, backend="triton")
    check_squares((made.rows, made.columns), cast_squares(made.y, spec, "reference"))
    for name, bias in (("rms", None), ("layer", torch.ones(144))):
        w, residual = torch.randn(144), x.flip(0)
        made = norm_cast(
            x, w, spec, norm=name, bias=bias, residual=residual, square=True, return_y=True, backend="triton"
        )
        check_squares((made.rows, made.columns), cast_squares(made.y, spec, "reference"))


# where the power is infinite, the sigmoid is 0
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
def test_gradient_of_an_activation_in_the_kernel(activation):
    """The same of the gradient, whose definition is autograd's."""
    from gemworks.precision.activation import activation_gradient_cast

    generator = torch.Generator().manual_seed(7)
    x, dy = (torch.randn(41, 80, generator=generator).mul_(3).bfloat16() for _ in range(2))
    x[::5] = 0.0  # where the slope of ReLU is 0 by PyTorch's choice
    spec = CastSpec(GemmKind.MXFP8)
    ours = activation_gradient_cast(dy, x, spec, activation, return_y=True, backend="triton")
    expected = activation_gradient_cast(dy, x, spec, activation, return_y=True, backend="reference")
    torch.testing.assert_close(ours.y, expected.y, rtol=2**-7, atol=1e-5)
    for plane, dim in ((ours.rows, 1), (ours.columns, 0)):
        reference = cast(ours.y, dim, spec, "reference")[0]
        assert torch.equal(plane.codes, reference.codes)
        assert torch.equal(plane.scales, reference.scales)


@pytest.mark.parametrize("mode", list(ScaleMode))
def test_squares_stored_both_ways(mode):
    """P1, P8, P10: tiles that end inside a matrix; an infinity poisons its square alone, in both layouts."""
    width = 272 if mode is ScaleMode.RCEIL else 144
    num_rows = 144 if mode is ScaleMode.RCEIL else 139
    x = torch.full((144, width), math.nan).bfloat16()
    x[:num_rows] = uneven(num_rows, width).bfloat16()
    x = x[:num_rows]
    x[3, 130] = math.inf
    spec = CastSpec(GemmKind.FP8_BLOCK128, scale_mode=mode)
    ours, expected = cast_squares(x, spec, "triton"), cast_squares(x, spec, "reference")
    for a, b in ((ours.rows, expected.rows), (ours.columns, expected.columns), (ours.transposed, expected.transposed)):
        assert torch.equal(a.scales, b.scales)
        assert torch.equal(a.codes, b.codes)
        if a.dim is not None:
            assert a.codes.stride(a.dim) == 1
            check_wide(a, b)
    made = square_scales(expected.transposed, 2)
    assert ours.transposed.wide.stride() == made.stride()
    assert torch.equal(ours.transposed.wide.nan_to_num(-1.0), made.nan_to_num(-1.0))
    assert square_scales(ours.transposed, 2) is ours.transposed.wide
    assert torch.equal(ours.rows.codes, ours.columns.codes)
    assert (ours.rows.codes[:128, 128:256] == 0x7F).all()
    assert (ours.rows.codes == 0x7F).sum() == 128 * min(128, width - 128)
