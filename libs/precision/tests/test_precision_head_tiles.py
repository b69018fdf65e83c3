"""Tiles of q, k, v: one scale for 128 rows of a sample and head, v transposed; what is in them, and where."""

import itertools
import math

import pytest
import torch
from gemworks.precision.head_tiles import (
    KEY_ORDER,
    MIN_BYTE,
    TILE,
    head_tiles,
    num_tiles,
    tiles_of_rows,
)
from gemworks.precision.probe import sqnr_db
from torch import Tensor

pytestmark = pytest.mark.reference
LENGTHS = (0, 1, 127, 128, 129, 300, 0, 5)


def batch(width: int = 64, past: int = 7) -> tuple[Tensor, Tensor]:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(LENGTHS).cumsum(0)])
    generator = torch.Generator().manual_seed(width)
    return torch.randn(int(offsets[-1]) + past, 2, width, generator=generator), offsets


@pytest.mark.parametrize("transposed", [False, True])
def test_a_tile_is_what_its_rows_alone_would_be(transposed):
    """Each tile against the definition written out: scale of the largest magnitude, codes of torch's own cast."""
    x, offsets = batch()
    tiles = head_tiles(x, offsets, transposed=transposed)
    assert tiles.scales.shape == (num_tiles(len(x), len(LENGTHS)), 2)
    bounds = [*offsets.tolist(), len(x)]
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for j, first in enumerate(range(begin, end, TILE)):
            rows = x[first : min(first + TILE, end)]
            tile = begin // TILE + b + j
            byte = 127 + math.ceil(math.log2(rows[:, 1].abs().max().item() / 448))
            assert tiles.scales[tile, 1] == byte
            codes = (rows[:, 1] * 2.0 ** (127 - byte)).to(torch.float8_e4m3fn).view(torch.uint8)
            if transposed:
                stored = tiles.codes[tile, 1]
                for place, key in enumerate(KEY_ORDER):
                    expected = codes[key] if key < len(rows) else torch.zeros(64, dtype=torch.uint8)
                    assert torch.equal(stored[:, place], expected)
            else:
                assert torch.equal(tiles.codes[first : first + len(rows), 1], codes)
    assert sqnr_db(x, tiles.dequantize()) > 30


def test_rows_know_their_tiles():
    _, offsets = batch()
    tile, place = tiles_of_rows(offsets, int(offsets[-1]) + 7)
    assert tile.max() < num_tiles(len(tile), len(LENGTHS))
    pairs = set(zip(tile.tolist(), place.tolist(), strict=True))
    assert len(pairs) == len(tile)
    assert place.max() == TILE - 1


def test_tiny_values_keep_a_scale_that_the_kernel_can_divide_by():
    x, offsets = batch()
    x[1:128] = 0.0
    x[128:256] *= 2.0**-60
    tiles = head_tiles(x, offsets)
    assert tiles.scales.min() == MIN_BYTE == 127 - 40
    assert tiles.dequantize()[128:256].eq(0).all()


def test_what_is_not_finite_stays_in_its_tile():
    x, offsets = batch()
    x[300, 0, 3] = math.inf
    values = head_tiles(x, offsets, transposed=True).dequantize()
    assert values[256:384, 0].isnan().all()
    assert head_tiles(x, offsets).codes[256:384, 0].eq(0x7F).all()
    assert values[:256].isfinite().all()
    assert values[:, 1].isfinite().all()


@pytest.mark.parametrize(
    ("x", "offsets", "message"),
    [
        (torch.ones(4, 64), torch.tensor([0, 4]), r"got shape \(4, 64\)"),
        (torch.ones(4, 2, 48), torch.tensor([0, 4]), "width in"),
        (torch.ones(4, 2, 64), torch.tensor([0.0, 4.0]), "int32 or int64"),
    ],
)
def test_bad_input_says_what_was_expected(x, offsets, message):
    with pytest.raises(ValueError, match=message):
        head_tiles(x, offsets)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnADevice:
    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize("width", [64, 128])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_kernel_has_the_same_bits(self, transposed, width, dtype):
        """Slices of a fused projection, an infinity, tiny values, both types of offsets."""
        x, offsets = batch(width)
        x = torch.cat([x, x], 2)[:, :, :width].to(dtype).cuda()
        x[300, 0, 3] = math.inf
        x[1:128] *= 2.0**-60
        for kind in (torch.int32, torch.int64):
            ours, reference = (
                head_tiles(x, offsets.to("cuda", kind), transposed=transposed, backend=backend)
                for backend in ("triton", "reference")
            )
            assert torch.equal(ours.scales, reference.scales)
            assert torch.equal(ours.codes, reference.codes)
