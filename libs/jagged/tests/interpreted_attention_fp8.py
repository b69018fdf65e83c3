# Kernels and None gradients are not what a type checker takes them for.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
"""The kernels that multiply FP8 codes out, under Triton's interpreter, in fp32, against the definition."""

import pytest
import torch
import triton
import triton.language as tl
from gemworks.jagged._attention_args import make_mask
from gemworks.jagged.ops.attention_core import table
from gemworks.jagged.ops.attention_core.launch import Problem
from gemworks.jagged.ops.attention_core.reference import Rule
from gemworks.jagged.ops.attention_core.rounding import round_mx
from gemworks.jagged.ops.attention_fp8 import launch, launch_codes
from gemworks.jagged.ops.attention_fp8.kernel_codes import round_mx as round_mx_in_triton
from gemworks.jagged.ops.attention_fp8.reference import dequantize_rows
from gemworks.jagged.ops.attention_fp8.tiles import dequantize_tiles, num_tiles
from gemworks.jagged.schedule import TileSchedule
from gemworks.jagged.testing_rounded import attend, decibels

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


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


@triton.jit
def rounding_kernel(x, out, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, round_mx_in_triton(tl.load(x + at)))


def test_rounding_is_that_of_the_definition():
    """Bit by bit: halves between neighbours, subnormals, blocks of zeros, all sizes of fp32, what is not finite."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 64, generator=generator)
    x[0] = torch.arange(64) * 2.0**-10
    x[1] = 448.0 - torch.arange(64) / 2
    x[2], x[3, :32] = 0.0, -0.0
    x[4] = torch.exp2(torch.arange(64) * -1.0)
    x[5] = torch.exp2(torch.arange(64) - 140.0)
    x[6] = torch.exp2(torch.arange(64) + 64.0) * 1.99
    x[7] = (torch.arange(64) + 0.5) * 0.125
    x[8:12] *= torch.exp2(torch.randint(-140, 120, (4, 64), generator=generator).float())
    x[12, 3] = float("nan")
    x[13, 40] = float("inf")
    ours = torch.empty_like(x)
    rounding_kernel[(1,)](x, ours, M=16, N=64)
    expected = round_mx(x, 1)
    finite = torch.ones_like(x, dtype=torch.bool)
    finite[12, :32] = finite[13, 32:] = False
    assert torch.equal(ours[finite], expected[finite])
    assert ours[12, 3].isnan()
    assert expected[12, 3].isnan()
    assert not ours[13, 40].isfinite()
    assert not expected[13, 40].isfinite()


CASES = {
    "squares": ("softmax", 32, 32, False, 2, True, True),
    "rows causal": ("softmax", 1, 1, True, 2, True, True),
    "squares, v by rows, P": ("softmax", 32, 1, False, 1, True, False),
    "rows, v values, dS causal": ("softmax", 1, 0, True, 1, False, True),
    "activation": ("gelu", 32, 32, False, 1, True, True),
    "activation causal": ("fast_silu", 1, 32, True, 2, True, True),
    "exact": ("softmax", 32, 32, True, 2, False, False),
    "exact activation": ("gelu", 1, 1, False, 1, False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_attention_of_codes(case, monkeypatch):
    """Values and every gradient against loops in float64 with the same rounding: all is off by rounding errors of fp32,
    but for a weight in a million that falls on the other side of a half."""
    activation, arrangement, of_v, causal, key_heads, quantize_p, quantize_ds = CASES[case]
    monkeypatch.setattr(table, "codes_config", lambda *_: table.TritonConfig(32, 64, 4, 1))
    empty = torch.empty
    offsets_q = torch.tensor([0, 0, 1, 32, 65, 135, 140])
    offsets_k = torch.tensor([0, 33, 38, 38, 102, 177, 178])
    total_q, total_k = 142, 181  # rows past the last offset

    def operand(rows, heads, block, seed):
        codes, scales = plane(rows, heads, block == 32, seed)
        values = dequantize_rows(codes, scales, torch.float32)
        return (values, None, values) if block == 0 else (codes, scales, values)

    q, sq, q_values = operand(total_q, 2, arrangement, 1)
    k, sk, k_values = operand(total_k, key_heads, arrangement, 2)
    v, sv, v_values = operand(total_k, key_heads, of_v, 3)
    scale = 0.2 if activation == "softmax" else 0.05
    rule = Rule(scale, activation, make_mask(causal, None, "bottom_right"), False, quantize_p, quantize_ds)
    schedule = TileSchedule.build(offsets_q, offsets_k, total_q=total_q, total_k=total_k, num_sequences=6, heights="")
    problem = Problem(q, k, v, rule, schedule, 75, "sm_90", total_q, None)
    d_out = torch.randn(total_q, 2, 64, generator=torch.Generator().manual_seed(4))

    def poisoned(*size, **options):
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    codes = launch_codes.Codes(problem, (sq, sk, sv), torch.float32)
    out, lse = launch_codes.forward(codes)
    grads = launch_codes.backward(codes, d_out, out, lse)
    options = {"scale": scale, "activation": activation, "causal": causal}
    values = (q_values, k_values, v_values)
    ends = (total_q, total_q, total_k, total_k)
    found = {}
    for rounded in (True, False):
        flags = {"quantize_p": quantize_p and rounded, "quantize_ds": quantize_ds and rounded}
        expected = attend(values, d_out, offsets_q, offsets_k, **options, **flags)
        found[rounded] = [decibels(e, x) for e, x in zip(expected, (out, *grads), strict=True)]
        assert all(x.shape[0] == end for x, end in zip((out, *grads), ends, strict=True))
    assert min(found[True]) > 60, found
    touched = [quantize_p, quantize_p or quantize_ds, quantize_p or quantize_ds, quantize_p]
    for decibel, by_rounding in zip(found[False], touched, strict=True):
        assert (decibel < 45) == by_rounding, found


@pytest.mark.parametrize("activation", ["softmax", "gelu"])
def test_the_reference_rounds_alike(activation):
    """Op and kernels, masks aside: one arithmetic."""
    offsets = torch.tensor([0, 33, 38, 38, 102, 177])
    made = [plane(180, 2, True, seed) for seed in range(3)]
    (q, sq), (k, sk), (v, sv) = made
    from gemworks.jagged import flash_attention_fp8, gdpa_fp8

    call = flash_attention_fp8 if activation == "softmax" else gdpa_fp8
    scale = 0.2 if activation == "softmax" else 0.05
    origins = [dequantize_rows(c, s, torch.float32).requires_grad_() for c, s in made]
    options = {"max_length_q": 75, "scale": scale, "dtype": torch.float32, "quantize_p": True, "quantize_ds": True}
    ours = call(q, k, v, sq, sk, sv, offsets, origins=tuple(origins), **options)
    d_out = torch.randn(180, 2, 64, generator=torch.Generator().manual_seed(4))
    ours.backward(d_out)
    rule = Rule(scale, activation, make_mask(False, None, "bottom_right"), False, True, True)
    schedule = TileSchedule.build(offsets, total_q=180, heights="")
    codes = launch_codes.Codes(Problem(q, k, v, rule, schedule, 75, "sm_90", 180, None), (sq, sk, sv), torch.float32)
    out, lse = launch_codes.forward(codes)
    grads = launch_codes.backward(codes, d_out, out, lse)
    for a, b in zip((ours.detach(), *(x.grad for x in origins)), (out, *grads), strict=True):
        assert decibels(a.double(), b) > 60
