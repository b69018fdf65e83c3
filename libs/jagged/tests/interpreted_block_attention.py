"""The BlockAttention kernels under Triton's interpreter against float64. Run by test_jagged_interpret.

fp32 and fp16 only: the interpreter computes bf16 wrong.
"""

from __future__ import annotations

import pytest
import torch
from gemworks.jagged import BlockSchedule, Rope, block_attention, offsets_from_lengths
from gemworks.jagged._attention_args import split_heads
from gemworks.jagged.ops.block_attention.formulas import BlockArgs
from gemworks.jagged.ops.block_attention.launch import (
    block_attention_backward,
    block_attention_forward,
)
from torch import Tensor

TOLERANCE = {torch.float32: (1e-4, 2e-5), torch.float16: (1e-2, 1e-2)}
NAN = float("nan")


def lengths_of(block: int) -> Tensor:
    return torch.tensor([0, 1, block - 1, 0, block, block + 1, 2 * block + 5, 0])


def poisoned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the three gradients."""
    return torch.full_like(q, NAN), torch.full_like(k, NAN), torch.full_like(v, NAN)


def run(
    lengths: Tensor,
    *,
    block: int,
    head_dim: int,
    value_dim: int,
    heads: int,
    key_heads: int,
    qk_norm: bool,
    rope: bool,
    causal: bool,
    dtype: torch.dtype,
    max_length: int = 1000,
    factor: float = 1.0,
    tail: int = 3,
) -> tuple[list[Tensor], list[Tensor]]:
    """(out, dq, dk, dv) of the kernels, outputs poisoned and rows past the end NaN, and the truth."""
    generator = torch.Generator().manual_seed(0)
    offsets = offsets_from_lengths(lengths)
    used = int(offsets[-1])
    total = used + tail

    def random(heads: int, width: int) -> Tensor:
        return torch.randn(total, heads, width, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v, dout = (
        random(heads, head_dim) * factor,
        random(key_heads, head_dim),
        random(key_heads, value_dim),
        random(heads, value_dim),
    )
    tables = None
    if rope:
        ages = torch.rand(total, generator=generator) * 1e5
        tables = Rope(time_fraction=0.5).tables(offsets, head_dim, total=total, dt=ages)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    settings = {"block": block, "causal": causal, "rope": tables, "qk_norm": qk_norm, "scale": 0.3}
    expected = block_attention(exact[0], exact[1], exact[2], offsets, max_length_q=max_length, **settings)  # pyright: ignore[reportArgumentType]
    truth = [expected, *torch.autograd.grad(expected, exact, dout.double())]
    for x in (q, k, v, dout):
        x[used:] = NAN
    table = BlockSchedule.make(offsets, total=total, block=block, max_length=max_length).table_S3
    cos, sin = (None, None) if tables is None else (tables.cos_TJ, tables.sin_TJ)
    args = BlockArgs(table, cos, sin, 0.3, block, causal, qk_norm, 1e-6)
    out = torch.full((total, heads, value_dim), NAN, dtype=dtype)
    grads = poisoned(q, k, v)
    block_attention_forward(q, k, v, args, out=out)
    block_attention_backward(dout, q, k, v, *grads, args)
    repeat = poisoned(q, k, v)
    block_attention_backward(dout, q, k, v, *repeat, args)
    assert all(torch.equal(g, r) for g, r in zip(grads, repeat, strict=True))  # D1
    return [out, *grads], truth


def assert_right(got: list[Tensor], truth: list[Tensor], dtype: torch.dtype, slack: float = 1.0) -> None:
    rtol, atol = TOLERANCE[dtype]
    atol *= slack
    for name, g, t in zip(("out", "dq", "dk", "dv"), got, truth, strict=True):
        torch.testing.assert_close(g.double(), t, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


SHAPES = [(32, 32, 32, 1, 1), (64, 48, 16, 2, 1), (128, 16, 32, 1, 1)]
FRONTS = [(False, False, False), (True, False, True), (False, True, True), (True, True, False)]
CASES = [(*shape, *front, torch.float32) for shape in SHAPES for front in FRONTS]
CASES += [(*shape, True, True, False, torch.float16) for shape in SHAPES] + [
    (64, 64, 64, 2, 2, True, True, True, torch.float32)
]


@pytest.mark.parametrize(
    ("block", "head_dim", "value_dim", "heads", "key_heads", "qk_norm", "rope", "causal", "dtype"), CASES
)
def test_block_kernels_j1_j4_j5(
    block: int, head_dim: int, value_dim: int, heads: int, key_heads: int,
    qk_norm: bool, rope: bool, causal: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    """J1, J4, J5: empty sequences, rows past the end (NaN there), widths and lengths around the tile; grouped heads."""
    got, truth = run(
        lengths_of(block), block=block, head_dim=head_dim, value_dim=value_dim, heads=heads, key_heads=key_heads,
        qk_norm=qk_norm, rope=rope, causal=causal, dtype=dtype,
    )  # fmt: skip
    assert_right(got, truth, dtype)


@pytest.mark.parametrize("lengths", [[0, 1, 0, 1, 1], [0, 0], [], [1]], ids=str)
def test_lengths_of_zero_and_one_j3(lengths: list[int]) -> None:
    """J3: lengths in {0, 1}; a batch without sequences; only rows past the end."""
    got, truth = run(
        torch.tensor(lengths, dtype=torch.int64), block=32, head_dim=16, value_dim=16, heads=2, key_heads=1,
        qk_norm=True, rope=True, causal=False, dtype=torch.float32, tail=40,
    )  # fmt: skip
    assert_right(got, truth, torch.float32)


@pytest.mark.parametrize("factor", [10.0, 30.0, 100.0])
def test_large_logits(factor: float) -> None:
    """Logits with a standard deviation of this: one row maximum for the whole row, so nothing overflows."""
    got, truth = run(
        torch.tensor([70]), block=64, head_dim=16, value_dim=16, heads=1, key_heads=1,
        qk_norm=False, rope=False, causal=False, dtype=torch.float32, factor=factor,
    )  # fmt: skip
    assert_right(got, truth, torch.float32, slack=factor)  # dk grows with q, and so does what fp32 loses of a logit


def test_a_bound_below_the_block_hides_rows() -> None:
    """Offsets on a device aren't read: rows past `max_length` are absent as keys, 0 as results, and harm nobody."""
    lengths = torch.tensor([3, 20, 40])
    offsets = offsets_from_lengths(lengths)
    q, k, v = (torch.randn(63, 1, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    table = BlockSchedule.make(offsets, total=63, block=32).table_S3.clone()
    table[:, 1].clamp_(max=8)  # what make() does with max_length=8 where it can't see the lengths
    out = block_attention_forward(q, k, v, BlockArgs(table, None, None, 0.3, 32, False, False, 0.0))
    kept = torch.cat([torch.arange(a, b) for a, b in ((0, 3), (3, 11), (23, 31), (55, 63))])
    short = torch.tensor([0, 3, 11, 19, 27])
    expected = block_attention(q[kept], k[kept], v[kept], short, max_length_q=8, scale=0.3, block=32)
    torch.testing.assert_close(out[kept], expected, rtol=1e-4, atol=1e-5)
    out[kept] = 0
    assert not out.any()


def test_views_of_one_projection_and_of_its_gradient() -> None:
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(50, 4, 32, generator=generator)
    dout = torch.randn(50, 2, 32, generator=generator)
    table = BlockSchedule.make(torch.tensor([0, 37, 50]), total=50, block=32).table_S3
    args = BlockArgs(table, None, None, 0.2, 32, False, True, 1e-6)
    views = split_heads(qkv, 2)
    apart = views[0].clone(), views[1].clone(), views[2].clone()
    assert torch.equal(block_attention_forward(*views, args), block_attention_forward(*apart, args))
    packed = torch.full_like(qkv, NAN)
    block_attention_backward(dout, *views, *split_heads(packed, 2), args)
    grads = poisoned(*apart)
    block_attention_backward(dout, *apart, *grads, args)
    assert torch.equal(packed, torch.cat(grads, dim=1))


# numpy says so of 1 / sqrt(0) and 0 * inf in rows that are masked; a GPU does not.
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_qk_norm_without_eps_ignores_absent_rows() -> None:
    """eps = 0: the zeros that stand for absent rows have an infinite scale, which must reach nothing."""
    generator = torch.Generator().manual_seed(4)
    q, k, v, dout = (torch.randn(33, 1, 16, generator=generator) for _ in range(4))
    table = BlockSchedule.make(torch.tensor([0, 33]), total=33, block=32).table_S3
    args = BlockArgs(table, None, None, 0.2, 32, False, True, 0.0)
    grads = poisoned(q, k, v)
    block_attention_backward(dout, q, k, v, *grads, args)
    for x in (block_attention_forward(q, k, v, args), *grads):
        assert bool(x.isfinite().all())
