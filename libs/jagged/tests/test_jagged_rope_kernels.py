"""Norm and rotation in one pass: the custom op on the CPU, and its kernels compiled for GPUs that are not here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gemworks.jagged import (
    Rope,
    apply_rope,
    explain,
    flash_attention,
    flash_attention_qkv,
    offsets_from_lengths,
    rms_norm,
)
from gemworks.jagged.ops.rope.custom_op import norm_rope_op

HERE = Path(__file__).parent
EPS = 1e-6


@pytest.mark.reference
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("turn", [True, False])
def test_the_op_is_the_formula_it_stands_for(norm: bool, turn: bool):
    """Values and gradient, of rows inside a wider projection; rows past the end give 0 and get gradient 0."""
    wide = torch.randn(11, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tables = Rope().tables(torch.tensor([0, 4, 11]), 8, total=11, dtype=torch.float64)
    x = wide[:, 1:4].requires_grad_()
    parts = (tables.cos_TJ, tables.sin_TJ) if turn else (None, None)
    y = norm_rope_op(x, *parts, torch.tensor([9]), EPS if norm else None)
    expected = rms_norm(x, eps=EPS) if norm else x
    expected = apply_rope(expected, tables) if turn else expected
    inside = (torch.arange(11) < 9)[:, None, None]
    expected = torch.where(inside, expected, 0)
    torch.testing.assert_close(y, expected)
    dy = torch.randn(11, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy))


@pytest.mark.reference
def test_the_op_is_registered_as_torch_wants_it():
    x = torch.randn(7, 2, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tables = Rope().tables(torch.tensor([0, 7]), 6, total=7)
    torch.library.opcheck(norm_rope_op.overload, (x, tables.cos_TJ, tables.sin_TJ, torch.tensor([7]), EPS))
    torch.library.opcheck(norm_rope_op.overload, (x, None, None, None, EPS))


@pytest.mark.reference
def test_rotation_is_one_graph_for_a_compiler():
    """No graph break, the same values and gradient as eager."""
    tables = Rope().tables(torch.tensor([0, 5]), 6, total=5)
    x = torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    compiled = torch.compile(lambda t: apply_rope(t, tables).square().sum(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x), x), torch.autograd.grad(apply_rope(x, tables).square().sum(), x)
    )


@pytest.mark.reference
def test_explain_names_the_kernel_where_it_runs():
    assert explain("apply_rope", architecture="sm_90").backend == "triton"
    assert explain("apply_rope", architecture="sm_90", dtype=torch.float64).backend == "reference"
    assert explain("apply_rope").backend == "reference"


@pytest.mark.compile
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_kernels_compile_without_spills_and_with_wide_accesses(architecture: str):
    pytest.importorskip("triton")
    command = [sys.executable, str(HERE / "compile_rope_kernels.py"), architecture]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 12
    for kernel in kernels:
        assert kernel["stack_bytes"] == 0, kernel
        # one number a row and head is a narrow store
        assert (kernel["wide_stores"] == kernel["stores"]) == ("with scales" not in kernel["kernel"]), kernel
        assert kernel["wide_loads"] > 0, kernel


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tables_dtype", [torch.float32, torch.float16])
def test_kernels_on_a_gpu(dtype: torch.dtype, tables_dtype: torch.dtype):
    """Values and gradient against the formulas in float64 on the same rounded inputs, bit-equal between two runs."""
    from gemworks.jagged.ops.rope.launch import norm_rope

    rows, end = 1000, 990
    wide = torch.randn(rows, 12, 128, device="cuda").to(dtype)
    wide[end:] = float("nan")
    x = wide[:, :8]
    tables = Rope(time_fraction=0.0).tables(torch.tensor([0, 700, rows], device="cuda"), 128, total=rows)
    cos, sin = tables.cos_TJ.to(tables_dtype), tables.sin_TJ.to(tables_dtype)
    dy = torch.randn(rows, 8, 128, device="cuda").to(dtype)
    where = torch.tensor([end], device="cuda")
    y = norm_rope(x, cos, sin, where, EPS)
    dx = norm_rope(x, cos, sin, where, EPS, dy=dy)
    leaf = x.double().nan_to_num().requires_grad_()
    expected = norm_rope_op(leaf, cos.double(), sin.double(), where, EPS)
    (gradient,) = torch.autograd.grad(expected, leaf, dy.double())
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=step, atol=step)
    torch.testing.assert_close(dx.double(), gradient, rtol=step, atol=step)
    assert torch.equal(y, norm_rope(x, cos, sin, where, EPS))
    assert torch.equal(dx, norm_rope(x, cos, sin, where, EPS, dy=dy))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 50])
def test_attention_behind_the_kernels_on_a_gpu(packed: bool, window: int | None):
    """QK-norm and rotation by kernel in front of the attention kernels: values and gradient against float64."""
    offsets = offsets_from_lengths(torch.tensor([0, 1, 129, 64, 700, 63])).cuda()
    total, heads = int(offsets[-1]) + 3, 4
    qkv = torch.randn(total, 3 * heads, 128, device="cuda", dtype=torch.bfloat16)
    d_out = torch.randn(total, heads, 128, device="cuda", dtype=torch.bfloat16)
    exact = qkv.double().cpu().requires_grad_()
    qkv[int(offsets[-1]) :] = float("nan")
    leaf = qkv.requires_grad_()
    rope = Rope().tables(offsets, 128, total=total)
    q, k, v = leaf.chunk(3, dim=1)
    if packed:
        out = flash_attention_qkv(
            leaf, offsets, num_heads=heads, max_length=1024, qk_norm=True, rope=rope, window=window
        )
    else:
        out = flash_attention(q, k, v, offsets, max_length_q=1024, qk_norm=True, rope=rope, window=window)
    (grad,) = torch.autograd.grad(out, leaf, d_out)
    q, k, v = exact.chunk(3, dim=1)
    on_host = offsets.cpu()
    wide = Rope().tables(on_host, 128, total=total, dtype=torch.float64)
    expected = flash_attention(q, k, v, on_host, max_length_q=1024, qk_norm=True, rope=wide, window=window)
    (gradient,) = torch.autograd.grad(expected, exact, d_out.double().cpu())
    for ours, truth in ((out, expected), (grad, gradient)):
        assert ours.isfinite().all()
        assert (ours.double().cpu() - truth).norm() / truth.norm() < 1.2e-2
