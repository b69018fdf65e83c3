"""Layouts for cuBLAS, checked without a GPU: shapes, strides, values, the swizzle against its index formula."""

import contextlib

import pytest
import torch
from gemworks.precision import MXTensor, mx_linear, quantize, quantize_square, recipe
from gemworks.precision import scaled_mm as module
from gemworks.precision.scaled_mm import scaled_mm, square_scales, swizzle_32_4_4, wide_scales
from gemworks.precision.scales import scale_values
from torch.nn.functional import ScalingType, SwizzleType

pytestmark = pytest.mark.reference


def test_wide_scales_are_row_contiguous_and_padded_with_one():
    plane = quantize(torch.randn(100, 384), 1, block=128)
    scales = wide_scales(plane, 112, 3)
    assert scales.shape == (112, 3)
    assert scales.stride() == (1, 112)
    assert torch.equal(scales[:100], scale_values(plane.scales))
    assert (scales[100:] == 1).all()


def test_square_scales_have_the_transposed_padded_layout():
    plane = quantize_square(torch.randn(256, 640), block=128)
    scales = square_scales(plane, 5)
    assert scales.shape == (8, 2)
    assert scales.stride() == (1, 8)
    assert torch.equal(scales[:5], scale_values(plane.scales).t())


@pytest.mark.parametrize("square", [False, True])
def test_bytes_of_scales_are_read_from_what_products_take(square):
    """A kernel may leave fp32 scales alone, padded; a NaN among them is the byte 255."""
    x = torch.randn(256, 384) * torch.randint(-40, 40, (256, 1)).float().exp2()
    x[3, 200] = torch.nan
    plane = quantize_square(x, block=128) if square else quantize(x, 1, block=128)
    wide = square_scales(plane, 3) if square else wide_scales(plane, 272, 3)
    read = MXTensor.unchecked(plane.codes, None, wide, *plane.meta)
    assert torch.equal(read.scales, plane.scales)
    assert (read.scales == 255).sum() == 1


@pytest.mark.parametrize("shape", [(128, 4), (130, 5), (1, 1), (256, 12)])
def test_swizzle_follows_the_documented_index(shape):
    scales = torch.randint(0, 255, shape, dtype=torch.uint8)
    flat = swizzle_32_4_4(scales)
    tiles_across = -(-shape[1] // 4)
    assert flat.numel() == -(-shape[0] // 128) * 128 * tiles_across * 4
    for row in range(0, shape[0], 7):
        for column in range(shape[1]):
            tile = (row // 128) * tiles_across + column // 4
            inner = (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4
            assert flat[tile * 512 + inner] == scales[row, column]


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("square", [False, True])
def test_operands_reach_cublas_in_its_layouts(monkeypatch, block, square):
    """A stand-in for torch's function checks what ScaledBlas.cpp checks, and multiplies by the layouts' definition."""
    a = quantize(torch.randn(100, 256), 1, block=block)
    w = torch.randn(72, 256)
    b = quantize_square(w, block=block) if square else quantize(w, 1, block=block)

    def stand_in(x, y, scales_a, recipes_a, swizzles_a, scales_b, recipes_b, swizzles_b, bias, output_dtype, *, out):
        (scale_a,), (recipe_a,), (swizzle_a,) = scales_a, recipes_a, swizzles_a
        (scale_b,), (recipe_b,), (swizzle_b,) = scales_b, recipes_b, swizzles_b
        m, k = x.shape
        n = y.shape[1]
        assert x.stride() == (k, 1)
        assert y.stride() == (1, k)
        assert m % 16 == n % 16 == k % 128 == 0
        assert out.shape == (m, n)
        assert out.dtype is output_dtype
        assert bias is None
        if block == 32:
            assert recipe_a == recipe_b == ScalingType.BlockWise1x32.value
            assert swizzle_a == swizzle_b == SwizzleType.SWIZZLE_32_4_4.value
            assert scale_a.numel() == -(-m // 128) * 128 * -(-k // 32 // 4) * 4
            assert scale_a.dtype is torch.float8_e8m0fnu
            out.zero_()
        else:
            assert recipe_a == ScalingType.BlockWise1x128.value
            expected = ScalingType.BlockWise128x128 if square else ScalingType.BlockWise1x128
            assert recipe_b == expected.value
            out.copy_(by_definition(x, y.t(), scale_a, scale_b, square))

    monkeypatch.setattr(torch, "_scaled_mm_v2", stand_in)
    out = scaled_mm(a, b, torch.float32)
    assert out.shape == (100, 72)
    if block == 128:
        torch.testing.assert_close(out, a.dequantize() @ b.dequantize().t(), rtol=1e-5, atol=1e-5)


def by_definition(left, right, scale_a, scale_b, square):
    """The product of 128-wide operands as their layouts say, which are checked."""
    (m, k), n = left.shape, right.shape[0]
    assert scale_a.shape == (m, k // 128)
    assert scale_a.stride() == (1, m)
    if square:
        padded = -(-k // 512) * 4
        assert scale_b.shape == (padded, -(-n // 128))
        assert scale_b.stride() == (1, padded)
        scale_b = scale_b[: k // 128].t().repeat_interleave(128, 0)[:n]
    else:
        assert scale_b.shape == (n, k // 128)
        assert scale_b.stride() == (1, n)
    return (left.float() * scale_a.repeat_interleave(128, 1)) @ (right.float() * scale_b.repeat_interleave(128, 1)).t()


@pytest.mark.parametrize("contraction", [2048, 1664])
@pytest.mark.parametrize("pieces", [2, 3, 4])
def test_pieces_of_a_contraction_add_up(monkeypatch, pieces, contraction):
    """Each piece reaches cuBLAS with scales of its own layout; their sum is the product. Of 1664 the last is 384
    shorter."""
    multiplied = []

    def stand_in(x, y, scales_a, _ra, _sa, scales_b, _rb, _sb, _bias, _dtype, *, out):
        multiplied.append(x.shape)
        assert x.stride(0) == y.stride(1) == contraction
        out.copy_(by_definition(x, y.t(), scales_a[0], scales_b[0], square=True))

    class Stream:
        def wait_stream(self, other):
            multiplied.append(other)

    caller, streams = Stream(), tuple(Stream() for _ in range(module.MAX_STREAMS - 1))
    others = streams[: pieces - 1]
    monkeypatch.setattr(torch, "_scaled_mm_v2", stand_in)
    monkeypatch.setattr(module, "num_pieces", lambda *_: pieces)
    monkeypatch.setattr(module, "side_streams", lambda *_: streams)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: caller)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    a = quantize(torch.randn(48, contraction), 1, block=128)
    b = quantize_square(torch.randn(128, contraction), block=128)
    out = scaled_mm(a, b, torch.float32, in_parts=True)
    torch.testing.assert_close(out, a.dequantize() @ b.dequantize().t(), rtol=1e-5, atol=1e-4)
    lengths = {2: [1024, 1024], 3: [1024, 512, 512], 4: [512] * 4}[pieces]
    lengths[-1] -= 2048 - contraction
    assert multiplied == [*[caller for _ in others], *[(48, length) for length in lengths], *others]


def test_whoever_does_not_ask_for_parts_gets_none(monkeypatch):
    """A forward of a long contraction is one product, whatever a weight gradient of its sizes would be."""
    lengths = []

    def stand_in(x, y, *_, out):
        lengths.append(x.shape[1])
        out.zero_()

    monkeypatch.setattr(torch, "_scaled_mm_v2", stand_in)
    monkeypatch.setattr(module, "num_pieces", None)
    a = quantize(torch.ones(16, 32768), 1, block=128)
    scaled_mm(a, quantize_square(torch.ones(128, 32768), block=128), torch.float32)
    assert lengths == [32768]


@pytest.mark.parametrize("save", ["high_precision", "both"])
@pytest.mark.parametrize("square_inputs", [False, True])
def test_of_a_layer_the_weight_gradient_alone_may_be_cut(monkeypatch, save, square_inputs):
    asked = []

    def stand_in(a, b, out_dtype, in_parts):
        asked.append(((a.shape[0], b.shape[0]), in_parts))
        return (a.dequantize() @ b.dequantize().t()).to(out_dtype)

    monkeypatch.setattr("gemworks.precision.gemms._backend_of", lambda *_: "scaled_mm")
    monkeypatch.setattr(module, "scaled_mm", stand_in)
    m, k, n = 384, 256, 128
    x, w = torch.randn(m, k, requires_grad=True), torch.randn(n, k, requires_grad=True)
    chosen = recipe("fp8_block128", save=save, square_inputs=square_inputs)
    mx_linear(x, w, None, chosen).sum().backward()
    assert asked == [((m, n), False), ((m, k), False), ((n, k), True)]


def test_a_product_is_split_only_where_processors_idle_for_long():
    assert module.num_pieces(1024, 1024, 262144, 132) == 9  # five turns of a ninth
    assert module.num_pieces(512, 1536, 262144, 132) == 5  # two turns of a fifth
    assert module.num_pieces(4096, 1024, 262144, 132) == 1  # more tiles than processors
    assert module.num_pieces(512, 512, 32768, 132) == 2
    assert module.num_pieces(512, 512, 65536 + 128, 132) == 1
    assert module.num_pieces(512, 512, 8192, 132) == 1
    assert module.num_pieces(8192, 8192, 262144, 132) == 1


def test_empty_products_and_square_first_operands():
    a = quantize(torch.randn(0, 128), 1, block=128)
    assert module.scaled_mm(a, quantize(torch.randn(16, 128), 1, block=128), torch.float32).shape == (0, 16)
    square = quantize_square(torch.randn(128, 128), block=128)
    with pytest.raises(ValueError, match="first operand"):
        module.scaled_mm(square, square, torch.float32)
