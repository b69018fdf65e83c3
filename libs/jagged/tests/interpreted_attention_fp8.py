"""The plain FP8 attention kernel under Triton's interpreter, in fp32, against the definition."""

import pytest
import torch
from gemworks.jagged import TileSchedule
from gemworks.jagged._dense import Mask
from gemworks.jagged._packing import Side, make_plan
from gemworks.jagged.ops.attention_core.launch import Problem
from gemworks.jagged.ops.attention_core.reference import Rule, forward_reference
from gemworks.jagged.ops.attention_fp8 import launch
from gemworks.jagged.ops.attention_fp8.reference import dequantize_rows
from gemworks.jagged.ops.attention_fp8.tiles import dequantize_tiles, num_tiles

OFFSETS = torch.tensor([0, 37, 37, 38, 70])
FULL = Mask()


def plane(rows, heads, square, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(rows, heads, 64, generator=generator) * 64).to(torch.float8_e4m3fn).view(torch.uint8)
    shape = (-(-rows // 32), heads, 2) if square else (rows, heads)
    return codes, torch.randint(118, 123, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("activation", "square", "v_codes", "mask", "heads_k"),
    [
        ("softmax", False, False, FULL, 2),
        ("softmax", True, True, FULL, 2),
        ("relu", True, False, FULL, 2),
        ("softmax", False, True, Mask(9, 0, "bottom_right"), 2),
        ("relu", False, True, FULL, 1),
    ],
)
def test_equals_the_definition(activation, square, v_codes, mask, heads_k):
    (q, sq), (k, sk), (v, sv) = (plane(70, h, square, s) for s, h in enumerate((2, heads_k, heads_k)))
    q_values, k_values, v_values = (dequantize_rows(c, s, torch.float32) for c, s in ((q, sq), (k, sk), (v, sv)))
    rule = Rule(0.1, activation, mask, False)
    side = Side(70, offsets=OFFSETS, max_length=64)
    expected, lse_expected = forward_reference(
        q_values, k_values, v_values, make_plan(side, side, 4, 2, heads_k, q.device), rule
    )
    schedule = TileSchedule.build(OFFSETS, total_q=70, heights="")
    problem = Problem(q, k, v if v_codes else v_values, rule, schedule, 64, "sm_90", 70, None)
    out, lse = launch.forward(problem, sq, sk, sv if v_codes else None, torch.float32)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, lse_expected, rtol=1e-4, atol=1e-5)


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
