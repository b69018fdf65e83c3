"""The kernels that multiply FP8 codes out, under Triton's interpreter, in fp32, against the definition."""

import pytest
import torch
from gemworks.jagged.ops.attention_fp8 import launch
from gemworks.jagged.ops.attention_fp8.reference import dequantize_rows
from gemworks.jagged.ops.attention_fp8.tiles import dequantize_tiles, num_tiles


def plane(rows, heads, square, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(rows, heads, 64, generator=generator) * 64).to(torch.float8_e4m3fn).view(torch.uint8)
    shape = (-(-rows // 32), heads, 2) if square else (rows, heads)
    return codes, torch.randint(118, 123, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("square", [False, True])
def test_values_of_rows_and_squares(square):
    codes, scales = plane(70, 3, square, 1)
    scales[1, 0] = 255
    ours, expected = launch.rows_values(codes, scales, torch.float32), dequantize_rows(codes, scales, torch.float32)
    assert torch.equal(ours.nan_to_num(-1.0), expected.nan_to_num(-1.0))


@pytest.mark.parametrize("transposed", [False, True])
def test_values_of_tiles(transposed):
    """Empty sequences, rows past the last offset, 32- and 64-bit offsets."""
    offsets = torch.tensor([0, 0, 130, 131, 131, 290])
    count = num_tiles(300, 5)
    generator = torch.Generator().manual_seed(2)
    shape = (count, 2, 64, 128) if transposed else (300, 2, 64)
    codes = (torch.randn(shape, generator=generator) * 64).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.randint(118, 123, (count, 2), generator=generator, dtype=torch.uint8)
    expected = dequantize_tiles(codes, scales, offsets, 300, torch.float32, transposed=transposed)
    for kind in (torch.int32, torch.int64):
        assert torch.equal(launch.tiles_values(codes, scales, offsets.to(kind), 300, torch.float32), expected)
