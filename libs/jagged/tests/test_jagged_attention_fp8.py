# Calls are made with argument lists and with what must be refused.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false
"""FP8 attention: the op on codes and scales against attention of the values they stand for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gemworks.jagged import flash_attention, flash_attention_fp8, gdpa, gdpa_fp8
from gemworks.jagged.ops.attention_fp8.reference import dequantize_rows

pytestmark = pytest.mark.reference
OFFSETS = torch.tensor([0, 37, 37, 38, 90])
HEADS, WIDTH = 2, 64


def plane(rows, square, heads=HEADS, seed=0):
    """Random finite codes and scales near one."""
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(rows, heads, WIDTH, generator=generator) * 64).to(torch.float8_e4m3fn)
    shape = (-(-rows // 32), heads, WIDTH // 32) if square else (rows, heads)
    return codes, torch.randint(118, 123, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("v_codes", [False, True])
@pytest.mark.parametrize("act", ["softmax", "gelu"])
def test_equals_attention_of_the_values(square, v_codes, act):
    (q, sq), (k, sk), (v, sv) = (plane(90, square, seed=s) for s in range(3))
    values = [dequantize_rows(c, s, torch.bfloat16) for c, s in ((q, sq), (k, sk), (v, sv))]
    origins = tuple(x.clone().requires_grad_() for x in values)
    args = (q, k, v if v_codes else origins[2], sq, sk, sv if v_codes else None, OFFSETS)
    expected_in = [x.clone().requires_grad_() for x in values]
    if act == "softmax":
        ours = flash_attention_fp8(*args, max_length_q=64, origins=origins if v_codes else None)
        expected = flash_attention(*expected_in, OFFSETS, max_length_q=64)
    else:
        ours = gdpa_fp8(*args, max_length_q=64, scale=0.1, origins=origins if v_codes else None)
        expected = gdpa(*expected_in, OFFSETS, max_length_q=64, scale=0.1)
    assert torch.equal(ours, expected)
    d_out = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    ours.backward(d_out)
    expected.backward(d_out)
    assert torch.equal(origins[2].grad, expected_in[2].grad)
    if v_codes:
        assert torch.equal(origins[0].grad, expected_in[0].grad)
        assert torch.equal(origins[1].grad, expected_in[1].grad)
    else:
        assert origins[0].grad is None


def test_causal_window_and_cross_lengths():
    (q, sq), (k, sk), (v, sv) = plane(38, False), plane(90, False, seed=1), plane(90, True, seed=2)
    offsets_q = torch.tensor([0, 5, 5, 6, 38])
    values = [dequantize_rows(c, s, torch.bfloat16) for c, s in ((q, sq), (k, sk), (v, sv))]
    options = {"max_length_q": 32, "max_length_k": 64, "causal": True, "window": 9}
    ours = flash_attention_fp8(q, k, v, sq, sk, sv, offsets_q, OFFSETS, **options)
    assert torch.equal(ours, flash_attention(*values, offsets_q, OFFSETS, **options))


def test_a_nan_scale_poisons_its_row_alone():
    (q, sq), (k, sk), (v, sv) = (plane(90, False, seed=s) for s in range(3))
    sq[50, 0] = 255
    out = flash_attention_fp8(q, k, v, sq, sk, sv, OFFSETS, max_length_q=64)
    assert out[50, 0].isnan().all()
    assert out.isnan().sum() == WIDTH


def test_one_graph_for_two_totals():
    def run(q, k, v, sq, sk, sv, offsets):
        return flash_attention_fp8(q, k, v, sq, sk, sv, offsets, max_length_q=64)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="eager")
    for rows in (90, 75):
        (q, sq), (k, sk), (v, sv) = (plane(rows, False, seed=s) for s in range(3))
        offsets = torch.tensor([0, 37, 37, 38, rows])
        assert torch.equal(compiled(q, k, v, sq, sk, sv, offsets), run(q, k, v, sq, sk, sv, offsets))


def test_opcheck():
    (q, sq), (k, sk), (v, sv) = (plane(20, False, seed=s) for s in range(3))
    origins = [torch.zeros(20, HEADS, WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    codes = [x.view(torch.uint8) for x in (q, k, v)]
    offsets = torch.tensor([0, 8, 20])
    args = (*codes, sq, sk, sv, *origins, torch.bfloat16, offsets, None, [], "", 2, -1, 16, 16, 0.1, "softmax")
    torch.library.opcheck(
        torch.ops.gemworks_jagged.attention_fp8.default,
        (*args, 1 << 30, 1 << 30, "bottom_right", False),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_what_does_not_fit_is_refused():
    (q, sq), (k, sk), (v, sv) = (plane(90, False, seed=s) for s in range(3))
    square = plane(90, True)[1]
    with pytest.raises(ValueError, match="alike"):
        flash_attention_fp8(q, k, v, sq, square, sv, OFFSETS, max_length_q=64)
    with pytest.raises(ValueError, match=r"expected \(90, 2\).*or \(3, 2, 2\)"):
        flash_attention_fp8(q, k, v, sq[:80], sk, sv, OFFSETS, max_length_q=64)
    with pytest.raises(ValueError, match="without v_scales"):
        flash_attention_fp8(q, k, v, sq, sk, None, OFFSETS, max_length_q=64)
    with pytest.raises(ValueError, match="E4M3 codes"):
        flash_attention_fp8(q.float(), k, v, sq, sk, sv, OFFSETS, max_length_q=64)
    with pytest.raises(ValueError, match="activation"):
        gdpa_fp8(q, k, v, sq, sk, sv, OFFSETS, max_length_q=64, scale=1.0, activation="swish")


@pytest.mark.compile
@pytest.mark.parametrize(
    ("which", "architecture", "activation"),
    [("gluon", "sm_90", "softmax"), ("gluon", "sm_90", "fast_gelu"), ("plain", "sm_90", "softmax"),
     pytest.param("plain", "sm_100", "softmax", marks=pytest.mark.slow)],
)  # fmt: skip
def test_kernels_compile_without_spilling(which, architecture, activation, tmp_path):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    script = str(Path(__file__).parent / "compiled_attention_fp8.py")
    command = [sys.executable, script, which, architecture, activation]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["spill_bytes"] == 0
    assert found["shared"] <= 227 * 1024
    assert found["fp8_products"] == (which == "gluon")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("activation", ["softmax", "fast_gelu"])
@pytest.mark.parametrize("square", [False, True])
def test_on_the_device(activation, square):
    """Head-wide scales and squares against float64 of the values, by the default way or, where GEMWORKS_FP8_KERNELS
    names them, the kernels (gluon takes head-wide scales, plain everything).

    A score of the FP8 units is off by under 2^-8 of the largest product (13 bits of 32 aligned products, four times).
    """
    from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS

    lengths = torch.tensor([0, 1, 63, 64, 65, 127, 128, 129, 300, 2])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).cuda()
    total = int(lengths.sum())
    generator = torch.Generator().manual_seed(3)
    codes = [(torch.randn(total, 4, 128, generator=generator) * 100).to(torch.float8_e4m3fn).cuda() for _ in range(2)]
    shape = (-(-total // 32), 4, 4) if square else (total, 4)
    scales = [torch.randint(118, 123, shape, generator=generator, dtype=torch.uint8).cuda() for _ in range(2)]
    v = torch.randn(total, 4, 128, generator=generator).bfloat16().cuda().requires_grad_()
    origins = tuple(torch.zeros(total, 4, 128, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    call = flash_attention_fp8 if activation == "softmax" else gdpa_fp8
    options = {} if activation == "softmax" else {"activation": activation}
    ours = call(
        *codes, v, *scales, None, offsets, max_length_q=512, scale=0.05, origins=(*origins[:2], v.detach()), **options
    )
    again = call(*codes, v.detach(), *scales, None, offsets, max_length_q=512, scale=0.05, **options)
    assert torch.equal(ours, again)
    q, k = (dequantize_rows(c, s, torch.float64) for c, s in zip(codes, scales, strict=True))
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        logits = torch.einsum("qnh,knh->nqk", q[begin:end], k[begin:end]) * 0.05
        weights = logits.softmax(-1) if activation == "softmax" else ACTIVATIONS[activation](logits)
        expected = torch.einsum("nqk,knh->qnh", weights, v[begin:end].double())
        size = expected.abs().max().item() if end > begin else 1.0
        torch.testing.assert_close(ours[begin:end].double(), expected, rtol=2e-2, atol=2e-2 * size)
    ours.float().square().mean().backward()
    assert v.grad is not None
    assert all(g is not None and g.isfinite().all() for g in (v.grad, origins[0].grad, origins[1].grad))
