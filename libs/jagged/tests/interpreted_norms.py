"""The norm kernels under Triton's interpreter against float64: values and every gradient. Run by test_jagged_interpret.

fp32 and fp16 only: the interpreter computes bf16 wrong.
"""

from __future__ import annotations

import math

import pytest
import torch
from gemworks.jagged.ops.norms.configs import NormConfig, norm_config
from gemworks.jagged.ops.norms.launch import norm_backward, norm_forward, stride_unit
from gemworks.jagged.ops.norms.reference import norm_reference
from torch import Tensor

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 4e-3)}
SHAPES = [(1, 1), (37, 7), (7,), (70, 96), (33, 128), (0, 4), (5, 1024), (3, 2049)]


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def truth(
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    r: Tensor | None,
    a: Tensor | None,
    dy: Tensor,
    dh: Tensor,
    center: bool,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    leaves = {n: t.double().requires_grad_() for n, t in zip("xwbra", (x, w, b, r, a), strict=True) if t is not None}
    w64, b64, r64, a64 = (leaves.get(n) for n in "wbra")
    y, h = norm_reference(leaves["x"], w64, b64, r64, a64, eps=1e-5, center=center)
    outs, cotangents = ([y], [dy.double()]) if r is None else ([y, h], [dy.double(), dh.double()])
    grads = torch.autograd.grad(outs, list(leaves.values()), cotangents)
    return [y.detach(), h.detach()], dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("full", [True, False], ids=["affine_residual_add", "plain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_kernels(shape: tuple[int, ...], full: bool, center: bool, dtype: torch.dtype) -> None:
    x, r, a, dy, dh = (random(*shape, dtype=dtype, seed=i) for i in range(5))
    w = random(shape[-1], dtype=torch.float32, seed=5) if full else None
    b = random(shape[-1], dtype=torch.float32, seed=6) if full and center else None
    residual, add = (r, a) if full else (None, None)
    y, h = norm_forward(x, w, b, residual, add, eps=1e-5, center=center)
    (y64, h64), grads = truth(x, w, b, residual, add, dy, dh, center)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(y.double(), y64, rtol=rtol, atol=atol)
    if full:
        torch.testing.assert_close(h.double(), h64, rtol=rtol, atol=atol)
    saved, dh_in = (h, dh) if full else (x, None)
    bias_dtype = None if b is None else b.dtype
    got = norm_backward(dy, dh_in, saved, w, bias_dtype, eps=1e-5, center=center)
    rows = math.prod(shape[:-1])
    for name, g in zip("xwb", got, strict=True):
        if name not in grads:
            assert g.numel() == 0
            continue
        # Columns sum over rows; fp16 also carries the rounding of the saved h.
        slack = 1 if name == "x" else max(rows, 1) ** 0.5
        torch.testing.assert_close(g.double(), grads[name], rtol=10 * rtol, atol=10 * atol * slack)
    again = norm_backward(dy, dh_in, saved, w, bias_dtype, eps=1e-5, center=center)
    assert all(torch.equal(p, q) for p, q in zip(got, again, strict=True))


@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
def test_heads_inside_a_projection_need_no_copy(center: bool) -> None:
    projection = random(9, 3, 4, 16, dtype=torch.float32, seed=1)
    x, r = projection[:, 1], projection[:, 2]
    y, h = norm_forward(x, None, None, r, x, eps=1e-5, center=center)
    expected, h64 = norm_reference(x.double(), None, None, r.double(), x.double(), eps=1e-5, center=center)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h.double(), h64, rtol=1e-5, atol=1e-5)
    dx, _, _ = norm_backward(x, r, r, None, None, eps=1e-5, center=center)
    same, _, _ = norm_backward(x.clone(), r.clone(), r.clone(), None, None, eps=1e-5, center=center)
    assert torch.equal(dx, same)


def test_rows_of_a_broken_stride_and_columns_apart_are_copied() -> None:
    x = random(6, 4, 5, 8, dtype=torch.float32, seed=2)
    for view in (x.transpose(0, 1), x.permute(2, 1, 0, 3), x.transpose(-1, -2), x[:, :, :1].expand(6, 4, 3, 8)):
        y, _ = norm_forward(view, None, None, None, None, eps=1e-6, center=False)
        expected, _ = norm_reference(view.double(), None, None, None, None, eps=1e-6, center=False)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


# numpy says so of 1 / sqrt(0) and 0 * inf in rows that are masked; a GPU does not.
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_past_the_end_harm_no_sum_without_eps() -> None:
    """Rows of a tile past the last one must not turn the column sums into NaN."""
    x, dy = random(5, 8, dtype=torch.float32, seed=3), random(5, 8, dtype=torch.float32, seed=4)
    weight = torch.ones(8)
    got = norm_backward(dy, None, x, weight, None, eps=0.0, center=False)
    assert all(bool(g.isfinite().all()) for g in got)


@pytest.mark.parametrize("config", [NormConfig(1, 1), NormConfig(4, 2, 2), NormConfig(64, 4, 3)], ids=str)
def test_every_tile_shape_gives_the_same(config: NormConfig) -> None:
    x, dy = random(21, 24, dtype=torch.float32, seed=3), random(21, 24, dtype=torch.float32, seed=4)
    weight = random(24, dtype=torch.float32, seed=5)
    y, _ = norm_forward(x, weight, None, None, None, eps=1e-5, center=True, config=config)
    expected, _ = norm_forward(x, weight, None, None, None, eps=1e-5, center=True)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    got = norm_backward(dy, None, x, weight, torch.float32, eps=1e-5, center=True, config=config)
    same = norm_backward(dy, None, x, weight, torch.float32, eps=1e-5, center=True)
    for p, q in zip(got, same, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


# Three, two and one pieces of 40 columns, the last one never full; a width of 32 fills them.
IN_PIECES = [NormConfig(1, 4, 3, columns=16), NormConfig(1, 2, 1, programs=6, columns=32), NormConfig(1, 1, columns=64)]


@pytest.mark.parametrize(("width", "dtype"), [(40, torch.float32), (40, torch.float16), (32, torch.float32)], ids=str)
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("config", IN_PIECES, ids=str)
def test_a_row_in_pieces(config: NormConfig, width: int, center: bool, dtype: torch.dtype) -> None:
    """Every gradient against float64, with and without dh and bias; repeats are bit-equal."""
    # Far from mean 0 and variance 1, so that neither can be left out.
    x, dy, dh = (random(7, width, dtype=dtype, seed=i) * (i + 1) + 0.5 for i in range(3))
    w, b = (random(width, dtype=torch.float32, seed=i) for i in (5, 6))
    for bias, own_dh in ((b, dh), (None, None)):
        bias = bias if center else None
        _, grads = truth(x, w, bias, None, None, dy, dh, center)
        if own_dh is not None:
            grads["x"] = grads["x"] + dh.double()
        bias_dtype = None if bias is None else torch.float32
        got = norm_backward(dy, own_dh, x, w, bias_dtype, eps=1e-5, center=center, config=config)
        rtol, atol = TOLERANCE[dtype]
        for name, g in zip("xwb", got, strict=True):
            if name not in grads:
                assert g.numel() == 0
                continue
            torch.testing.assert_close(g.double(), grads[name], rtol=10 * rtol, atol=10 * atol)
        again = norm_backward(dy, own_dh, x, w, bias_dtype, eps=1e-5, center=center, config=config)
        assert all(torch.equal(p, q) for p, q in zip(got, again, strict=True))


@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("config", [None, IN_PIECES[0]], ids=str)
def test_eps_counts(config: NormConfig | None, center: bool) -> None:
    """An eps as large as the variance, forward and backward: 1e-5 would pass for none."""
    x, dy = random(5, 40, dtype=torch.float32, seed=1), random(5, 40, dtype=torch.float32, seed=2)
    w = random(40, dtype=torch.float32, seed=3)
    leaves = [x.double().requires_grad_(), w.double().requires_grad_()]
    exact, _ = norm_reference(leaves[0], leaves[1], None, None, None, eps=0.7, center=center)
    y, _ = norm_forward(x, w, None, None, None, eps=0.7, center=center)
    torch.testing.assert_close(y.double(), exact.detach(), rtol=1e-5, atol=1e-5)
    got = norm_backward(dy, None, x, w, None, eps=0.7, center=center, config=config)
    for g, e in zip(got, torch.autograd.grad(exact, leaves, dy.double()), strict=False):
        torch.testing.assert_close(g.double(), e, rtol=1e-4, atol=1e-4)


# numpy says so of 1 / sqrt(0) and 0 * inf in rows that are masked; a GPU does not.
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("config", [NormConfig(1, 1), NormConfig(4, 2), *IN_PIECES], ids=str)
def test_rows_past_the_last_offset_get_0_and_add_nothing(config: NormConfig, center: bool) -> None:
    """Whatever they hold, and without an eps that would keep their scale finite; heads inside a projection too."""
    x, dy, dh, projection = (random(11, *s, dtype=torch.float32, seed=i) for i, s in enumerate([(40,)] * 3 + [(3, 40)]))
    used, weight = 7, random(40, dtype=torch.float32, seed=5)
    bias_dtype = torch.float32 if center else None
    kept = norm_backward(
        dy[:used], dh[:used], x[:used], weight, bias_dtype, eps=0.0, center=center, config=NormConfig(1, 1)
    )
    for t in (x, dy, dh):
        t[used:] = float("nan")
    offsets = torch.tensor([0, 3, used])
    for rows in (x, projection[:, 1].copy_(x)):
        dx, dweight, dbias = norm_backward(
            dy, dh, rows, weight, bias_dtype, eps=0.0, center=center, offsets=offsets, config=config
        )
        assert not dx[used:].any()
        for g, e in zip((dx[:used], dweight, dbias), kept, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [7, 10, 20, 24])
def test_strides_that_16_does_not_divide(width: int) -> None:
    """In every unit that strides are counted in: rows, and heads, inside a wider projection."""
    projection = random(5, 3, 2, width, dtype=torch.float32, seed=1)
    weight = random(width, dtype=torch.float32, seed=2)
    for x, r, dy in (projection.unbind(1), projection[:, :, 1].unbind(1)):
        for config in (None, NormConfig(1, 1, columns=16)):
            y, h = norm_forward(x, weight, None, r, dy, eps=1e-5, center=True)
            expected = norm_forward(x.clone(), weight, None, r.clone(), dy.clone(), eps=1e-5, center=True)
            assert all(torch.equal(p, q) for p, q in zip((y, h), expected, strict=True))
            got = norm_backward(dy, r, x, weight, torch.float32, eps=1e-5, center=True, config=config)
            same = norm_backward(
                dy.clone(), r.clone(), x.clone(), weight, torch.float32, eps=1e-5, center=True, config=config
            )
            assert all(torch.equal(p, q) for p, q in zip(got, same, strict=True))


def test_the_unit_divides_every_stride_and_hides_no_16() -> None:
    assert [stride_unit(s) for s in (1, 2, 4, 8, 16, 48, 1000, 1001, 1004)] == [1, 2, 4, 8, 1, 1, 8, 1, 4]
    assert stride_unit(4096, 0, 1000) == 8
    assert stride_unit(4096, 0, 512) == 1


def test_programs_that_sum_columns_are_capped_to_fit_together() -> None:
    """At widths that 4 divides, but powers of two, which fit by themselves and are compiled as they were measured."""
    for width in range(257, 8193):
        config = norm_config(width, sums_columns=True)
        if width & (width - 1) == 0 or width % 4:
            assert config.max_registers() is None
            continue
        registers = config.max_registers()
        assert registers is not None
        assert registers * 32 * config.num_warps * config.programs_per_sm() <= 65_536
        assert registers >= 128
        assert config.columns is None


def test_config_is_a_pure_function_of_the_width() -> None:
    """T1: nothing but the width, and whether columns are summed, decides."""
    for width in (1, 64, 100, 512, 1000, 8192):
        for sums in (False, True):
            config = norm_config(width, sums_columns=sums)
            assert config == norm_config(width, sums_columns=sums)
            assert config.rows & (config.rows - 1) == 0
            assert 1 <= config.num_warps <= 16
