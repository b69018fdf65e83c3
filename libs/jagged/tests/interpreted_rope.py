"""The norm-and-rotate kernels under Triton's interpreter against the formulas in float64. Run by test_jagged_interpret.

fp32 and fp16 only: the interpreter computes bf16 wrong.
"""

from __future__ import annotations

import pytest
import torch
from gemworks.jagged.ops.norms.reference import rms_normalize
from gemworks.jagged.ops.rope.launch import norm_rope
from gemworks.jagged.ops.rope.reference import Rope, RopeTables, apply_rope
from torch import Tensor

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (3e-3, 4e-3)}
SHAPES = [(1, 1, 2), (37, 3, 8), (70, 4, 128), (0, 2, 16), (19, 6, 48), (5, 1, 64)]
EPS = 1e-6


def truth(x: Tensor, tables: RopeTables | None, end: int | None, eps: float | None) -> Tensor:
    """In float64, row by row of what belongs to a sequence."""
    y = x if end is None else torch.cat([x[:end], torch.zeros_like(x[end:])])
    y = y if eps is None else rms_normalize(y, eps)
    if tables is not None:
        y = apply_rope(y, RopeTables(tables.cos_TJ.double(), tables.sin_TJ.double()))
    return y


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("turn", [True, False], ids=["turn", "no_turn"])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_and_rotation_in_one_pass(shape: tuple[int, ...], norm: bool, turn: bool, dtype: torch.dtype) -> None:
    """A strided view of a wider projection, rows past the end, values and gradient."""
    rows, heads, width = shape
    generator = torch.Generator().manual_seed(rows + heads)
    wide = torch.randn(rows, heads + 2, width, generator=generator, dtype=torch.float64).to(dtype)
    wide[rows - rows // 3 :] = float("nan")  # belong to nobody
    x, dy = wide[:, 1:-1], torch.randn(rows, heads, width, generator=generator, dtype=torch.float64).to(dtype)
    end = rows - rows // 3
    tables = Rope(time_fraction=0.0).tables(torch.tensor([0, rows]), width, total=rows) if turn else None
    eps = EPS if norm else None
    parts = (None, None) if tables is None else (tables.cos_TJ, tables.sin_TJ)
    y = norm_rope(x, *parts, torch.tensor([end]), eps)
    dx = norm_rope(x, *parts, torch.tensor([end]), eps, dy=dy)
    leaf = torch.cat([x[:end], torch.zeros_like(x[end:])]).double().requires_grad_()
    expected = truth(leaf, tables, end, eps)
    expected = torch.cat([expected[:end], torch.zeros_like(expected[end:])])
    (grad,) = torch.autograd.grad(expected, leaf, dy.double()) if leaf.numel() else (leaf.detach(),)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(y.double(), expected.detach(), rtol=rtol, atol=atol)
    size = float(grad.abs().max()) if grad.numel() else 0.0
    torch.testing.assert_close(dx.double(), grad, rtol=rtol, atol=atol * max(size, 1.0))
    assert y.is_contiguous()
    assert dx.is_contiguous()


def test_without_an_end_every_row_counts() -> None:
    x = torch.randn(9, 2, 8, generator=torch.Generator().manual_seed(0))
    y = norm_rope(x, None, None, None, EPS)
    torch.testing.assert_close(y, rms_normalize(x, EPS))
