"""Triton casts under the interpreter, bit by bit against the reference.

They run where TRITON_INTERPRET=1 was set before Triton was imported; `test_precision_tiers.py` does that in a process
of its own. Inputs are fp32 and fp16: the interpreter is wrong in bf16 arithmetic.
"""

import math
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs under TRITON_INTERPRET=1, see test_precision_tiers.py", allow_module_level=True)

from gemworks.precision import Hadamard, Stochastic, quantize
from gemworks.precision.casts import CastSpec, cast, cast_both
from gemworks.precision.contract import CASES, check_backend
from gemworks.precision.formats import Format
from gemworks.precision.gemms import gemm
from gemworks.precision.head_tiles import head_tiles
from gemworks.precision.recipe import BLOCK_KINDS, GemmKind, recipe
from gemworks.precision.scales import ScaleMode
from gemworks.precision.triton_casts import triton_cast
from gemworks.precision.triton_reading import readable_length, triton_dequantize

pytestmark = [
    pytest.mark.interpret,
    # numpy's remark on inf * 0 in a block that holds an infinity; the kernel overrides every code of such a block
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

KINDS = BLOCK_KINDS


def same(a, b):
    assert a.shape == b.shape
    assert (a.dim, a.block, a.format, a.hadamard) == (b.dim, b.block, b.format, b.hadamard)
    assert torch.equal(a.scales, b.scales)
    assert torch.equal(a.codes, b.codes)
    assert a.codes.stride() == b.codes.stride()


def uneven(m, n, seed=0, dtype=torch.float32):
    """Blocks whose magnitudes differ by up to 2^24, zeros among them: regrouping loses codes here."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, n, generator=generator)
    scale = torch.randint(-12, 12, (-(-m // 16), -(-n // 16)), generator=generator).float().exp2()
    x = x * scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[:m, :n]
    x[:, n // 2] = 0
    return x.to(dtype)


def kernel(x, dim, format, scale_mode, *, block):
    return triton_cast(x, dim, CastSpec(GemmKind.MXFP8, Format(format), ScaleMode(scale_mode)), block=block)[0]


def test_the_kernel_keeps_the_contract():
    """P1, P2, P3, P8: the same hand-worked cases as the reference, E2M1 storage included."""
    assert check_backend(kernel) == []
    assert len(CASES) >= 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("noise", [None, Stochastic(2**40 + 7, 3)])
def test_one_direction(kind, dim, noise):
    x = uneven(150, 161)
    spec = CastSpec(kind, stochastic=noise)
    ours, lost = cast(x, dim, spec, "triton")
    reference, lost_reference = cast(x, dim, spec, "reference")
    same(ours, reference)
    assert lost == lost_reference
    if kind is GemmKind.MXFP8_REGROUP128:
        assert lost > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", [None, Stochastic(1, 2)])
@pytest.mark.parametrize("shape", [(150, 161), (1, 1)])
def test_both_directions_in_one_read(kind, noise, shape):
    x = uneven(*shape, seed=1)
    spec = CastSpec(kind, stochastic=noise)
    *ours, lost = cast_both(x, spec, "triton")
    *reference, lost_reference = cast_both(x, spec, "reference")
    for a, b in zip(ours, reference, strict=True):
        same(a, b)
    assert lost == lost_reference


@pytest.mark.parametrize("mode", list(ScaleMode))
@pytest.mark.parametrize("format", [Format.E4M3, Format.E5M2])
def test_modes_and_formats(mode, format):
    x = uneven(40, 97, seed=2)  # not for the tile kernel, which has its own file
    spec = CastSpec(GemmKind.MXFP8, format, mode)
    for a, b in zip(cast_both(x, spec, "triton")[:2], cast_both(x, spec, "reference")[:2], strict=True):
        same(a, b)
    same(cast(x, None, spec, "triton")[0], cast(x, None, spec, "reference")[0])


@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize("dim", [0, 1])
def test_hadamard_in_the_kernel(size, dim):
    x = uneven(70, 90, seed=3)
    for kind in (GemmKind.MXFP8, GemmKind.MXFP8_REGROUP128):
        spec = CastSpec(kind, hadamard=Hadamard(size, 5), stochastic=Stochastic(1) if size == 64 else None)
        same(cast(x, dim, spec, "triton")[0], cast(x, dim, spec, "reference")[0])


def test_not_finite_blocks():
    x = torch.randn(130, 130)
    x[3, 5], x[70, 100], x[129, 129] = math.nan, math.inf, -math.inf
    for kind in (GemmKind.MXFP8, GemmKind.MXFP8_REGROUP128):
        spec = CastSpec(kind)
        *ours, lost = cast_both(x, spec, "triton")
        *reference, lost_reference = cast_both(x, spec, "reference")
        for a, b in zip(ours, reference, strict=True):
            same(a, b)
        assert lost == lost_reference
        for dim in (0, 1, None):
            (plane, lost), (expected, lost_expected) = (cast(x, dim, spec, way) for way in ("triton", "reference"))
            same(plane, expected)
            assert lost == lost_expected


def test_strides_halves_and_empty():
    spec = CastSpec(GemmKind.MXFP8)
    x = uneven(96, 130)[::2, 1::2]
    for dim in (0, 1, None):
        same(cast(x, dim, spec, "triton")[0], cast(x, dim, spec, "reference")[0])
    half = uneven(40, 64).clamp(-6e4, 6e4).half()
    same(cast(half, 1, spec, "triton")[0], cast(half, 1, spec, "reference")[0])
    for shape in ((0, 64), (64, 0)):
        empty = torch.empty(shape)
        for dim in (0, 1, None):
            same(cast(empty, dim, spec, "triton")[0], cast(empty, dim, spec, "reference")[0])
        cast_both(empty, spec, "triton")


@pytest.mark.parametrize("block", [64, 128, 256])
def test_blocks_that_span_a_head(block):
    x = uneven(5, 512)
    same(triton_cast(x, 1, CastSpec(GemmKind.MXFP8), block=block)[0], quantize(x, 1, block=block))


def test_e2m1_storage_packs_in_the_kernel():
    x = uneven(20, 67)
    spec = CastSpec(GemmKind.MXFP8, Format.E2M1)
    for dim in (0, 1):
        same(cast(x, dim, spec, "triton")[0], cast(x, dim, spec, "reference")[0])


def test_dequantise():
    x = uneven(70, 100)
    x[:32, :32] = 2.0**-119  # scale byte 0, a subnormal number
    for dim in (0, 1, None):
        for kind in (GemmKind.MXFP8, GemmKind.FP8_BLOCK128):
            plane = cast(x, dim, CastSpec(kind), "reference")[0]
            assert torch.equal(triton_dequantize(plane, torch.float32), plane.dequantize())
    wide = cast(x, 1, CastSpec(GemmKind.MXFP8, Format.E5M2), "reference")[0]
    assert torch.equal(triton_dequantize(wide.t(), torch.float32), wide.t().dequantize())


def test_the_named_backend_runs_in_the_linear_layer():
    from gemworks.precision import mx_linear

    x = torch.randn(40, 128, requires_grad=True)
    w = torch.randn(128, 128, requires_grad=True)
    dy = torch.randn(40, 128)
    grads = []
    for backend in ("triton", "reference"):
        x.grad = w.grad = None
        mx_linear(x, w, None, recipe("mxfp8", backend=backend)).backward(dy)
        grads.append((x.grad, w.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])
    plane = cast(x.detach(), 1, CastSpec(GemmKind.MXFP8), "triton")[0]
    assert gemm(plane, plane, GemmKind.MXFP8, torch.float32).shape == (40, 40)


def test_long_lines_use_the_first_grid_axis(monkeypatch):
    from gemworks.precision import triton_casts

    assert triton_casts.two_axes(1, 70000) == ((70000, 1), True)
    assert triton_casts.two_axes(4, 5) == ((4, 5), False)
    monkeypatch.setattr(triton_casts, "two_axes", lambda rows, columns: ((columns, rows), True))
    x = uneven(40, 600)
    spec = CastSpec(GemmKind.MXFP8)
    plane = cast(x, 1, spec, "triton")[0]
    same(plane, cast(x, 1, spec, "reference")[0])
    assert torch.equal(triton_dequantize(plane, torch.float32), plane.dequantize())


def test_wide_scales_in_the_layout_of_the_product():
    from gemworks.precision.scaled_mm import square_scales, wide_scales
    from gemworks.precision.triton_reading import triton_wide_scales

    x = uneven(300, 700)
    x[5, 650] = math.nan
    rows, square = quantize(x, 1, block=128), cast(x, None, CastSpec(GemmKind.FP8_BLOCK128), "reference")[0]
    ours, expected = triton_wide_scales(rows.scales, 304, 6), wide_scales(rows, 304, 6)
    assert torch.equal(ours.nan_to_num(-1), expected.nan_to_num(-1))
    assert ours.isnan().sum() == 1
    assert ours.stride() == expected.stride() == (1, 304)
    by_kernel = cast(x, None, CastSpec(GemmKind.FP8_BLOCK128), "triton")[0]
    assert by_kernel.wide is not None
    assert torch.equal(by_kernel.wide.nan_to_num(-1), square_scales(square, 6).nan_to_num(-1))
    assert square_scales(by_kernel, 6) is by_kernel.wide
    assert by_kernel.t().wide is None
    ours, expected = triton_wide_scales(square.scales.t(), 8, 3), square_scales(square, 6)
    assert torch.equal(ours.nan_to_num(-1), expected.nan_to_num(-1))
    assert ours.stride() == expected.stride() == (1, 8)


@pytest.mark.parametrize("transposed", [False, True])
def test_head_tiles(transposed):
    """Tiles of samples: which one a tile belongs to is found by the kernel."""
    torch.manual_seed(5)
    offsets = torch.tensor([0, 0, 1, 128, 256, 385, 385, 390], dtype=torch.int32)
    x = torch.randn(400, 2, 32)
    x[300, 0, 3] = math.inf
    x[1:128] *= 2.0**-60
    ours, reference = (head_tiles(x, offsets, transposed=transposed, backend=b) for b in ("triton", "reference"))
    assert torch.equal(ours.scales, reference.scales)
    assert torch.equal(ours.codes, reference.codes)


def test_dequantised_lines_end_in_zeros_where_they_are_made_longer():
    """P5: a weight gradient whose rows are no multiple of 8 contracts over zeros behind them."""
    x = torch.randn(37, 64, generator=torch.Generator().manual_seed(5))
    columns = cast(x, 0, CastSpec(GemmKind.MXFP8), "triton")[0].t()
    length = readable_length(37)
    read = triton_dequantize(columns, length=length)
    assert read.shape == (64, length)
    assert length == 128
    assert torch.equal(read[:, :37].float(), columns.dequantize())
    assert not read[:, 37:].any()
    assert readable_length(40) == 40
