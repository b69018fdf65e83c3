"""Block attention with the projections in front: the public function and its custom op, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import BlockSchedule, Rope, block_attention_projected, block_attention_qkv, offsets_from_lengths
from gemworks.jagged.ops.block_attention import projected
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.reference
LENGTHS, TAIL = [3, 0, 70, 64, 1], 2
HEADS, KEY_HEADS, WIDTH, DIM = 4, 2, 8, 12


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(LENGTHS) + TAIL, DIM, generator=generator, dtype=torch.float64)
    weight = torch.randn((HEADS + 2 * KEY_HEADS) * WIDTH, DIM, generator=generator, dtype=torch.float64) / 3
    leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
    return leaves[0], leaves[1], offsets_from_lengths(torch.tensor(LENGTHS))


def op_arguments(x: Tensor, weight: Tensor, offsets: Tensor, **settings: Any) -> tuple[Any, ...]:
    rope = settings["rope"]
    table = BlockSchedule.make(offsets, total=x.shape[0]).table_S3
    cos, sin = (None, None) if rope is None else (rope.cos_TJ, rope.sin_TJ)
    return x, weight, offsets, HEADS, WIDTH, table, cos, sin, 0.3, 64, settings["causal"], settings["qk_norm"], 1e-6


@pytest.mark.parametrize(("norm", "turned", "causal"), [(False, False, False), (True, True, True)])
def test_projected_is_a_linear_layer_in_front(norm: bool, turned: bool, causal: bool) -> None:
    """Values and both gradients: the function in float64, the op in float32 with garbage past the last offset."""
    x, weight, offsets = inputs(torch.float64)
    rope = Rope(time_fraction=0.0).tables(offsets, WIDTH, total=x.shape[0]) if turned else None
    settings: dict[str, Any] = {"rope": rope, "qk_norm": norm, "causal": causal}
    qkv = (x @ weight.T).unflatten(-1, (-1, WIDTH))
    truth = block_attention_qkv(qkv, offsets, num_heads=HEADS, max_length=70, scale=0.3, **settings)
    dout = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = [truth, *torch.autograd.grad(truth, (x, weight), dout)]
    out = block_attention_projected(
        x, weight, offsets, num_heads=HEADS, head_dim=WIDTH, max_length=70, scale=0.3, **settings
    )
    torch.testing.assert_close([out, *torch.autograd.grad(out, (x, weight), dout)], expected)

    x, weight, _ = inputs(torch.float32)
    with torch.no_grad():
        x[-TAIL:] = float("nan")
    dout = dout.float()
    dout[-TAIL:] = float("nan")
    out = torch.ops.gemworks_jagged.block_attention_projected(*op_arguments(x, weight, offsets, **settings))
    got = [out, *torch.autograd.grad(out, (x, weight), dout)]
    for g, t in zip(got, expected, strict=True):
        torch.testing.assert_close(g.double(), t, rtol=1e-4, atol=1e-4)


def test_op_is_registered_soundly_and_counts_flops() -> None:
    x, weight, offsets = inputs(torch.float32)
    arguments = op_arguments(x, weight, offsets, rope=None, qk_norm=True, causal=False)
    torch.library.opcheck(projected.block_attention_projected_op.overload, arguments)
    products = 2 * x.shape[0] * weight.numel()
    attention = 4 * sum(n // 64 * 64**2 + (n % 64) ** 2 for n in LENGTHS) * HEADS * WIDTH
    counter = FlopCounterMode(display=False)
    with counter:
        out = torch.ops.gemworks_jagged.block_attention_projected(*arguments)
    assert counter.get_total_flops() == products + attention
    counter = FlopCounterMode(display=False)
    with counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * products + attention * 5 // 2


def test_mistakes() -> None:
    x, weight, offsets = inputs(torch.float32)
    call: Any = block_attention_projected
    with pytest.raises(ValueError, match=r"weight: got shape \(64, 12\) with x \(140, 11\)"):
        call(x[:, :11], weight, offsets, num_heads=HEADS, head_dim=WIDTH, max_length=70)
    with pytest.raises(ValueError, match="weight: got 64 rows with num_heads 3 and head_dim 8"):
        call(x, weight, offsets, num_heads=3, head_dim=WIDTH, max_length=70)
    with pytest.raises(ValueError, match=r"weight: got dtype torch\.float64, expected torch\.float32"):
        call(x, weight.double(), offsets, num_heads=HEADS, head_dim=WIDTH, max_length=70)
