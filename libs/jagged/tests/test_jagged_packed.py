"""`flash_attention_qkv`: the op of a packed projection equals `flash_attention` of its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import Rope, flash_attention, flash_attention_qkv, offsets_from_lengths
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.reference
LENGTHS = [5, 0, 1, 9, 33]


def packed(heads: int, key_heads: int, dtype: torch.dtype, past_end: int = 3) -> tuple[Tensor, Tensor]:
    offsets = offsets_from_lengths(torch.tensor(LENGTHS))
    generator = torch.Generator().manual_seed(heads)
    qkv = torch.randn(int(offsets[-1]) + past_end, heads + 2 * key_heads, 8, dtype=torch.float64, generator=generator)
    return qkv.to(dtype), offsets


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("turn", [True, False])
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_flash_attention_of_the_parts(heads: int, key_heads: int, turn: bool, norm: bool, dtype: torch.dtype):
    """Values and the packed gradient; garbage past the end reaches neither."""
    qkv, offsets = packed(heads, key_heads, dtype)
    qkv[int(offsets[-1]) :] = float("nan")
    total = qkv.shape[0]
    rope = Rope().tables(offsets, 8, total=total, dtype=torch.float64) if turn else None
    options: dict[str, Any] = {"qk_norm": norm, "rope": rope, "window": 7}
    leaf = qkv.clone().requires_grad_()
    ours = flash_attention_qkv(leaf, offsets, num_heads=heads, max_length=64, **options)
    wide = qkv.double().nan_to_num().requires_grad_()
    q, k, v = wide.split([heads, key_heads, key_heads], dim=1)
    expected = flash_attention(q, k, v, offsets, max_length_q=64, **options)
    d_out = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (d_qkv,) = torch.autograd.grad(ours, leaf, d_out)
    (exact,) = torch.autograd.grad(expected, wide, d_out.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        d_qkv.double(), exact, rtol=tolerance, atol=tolerance * max(1.0, exact.abs().max().item())
    )


@pytest.mark.parametrize("norm", [True, False])
def test_the_op_is_registered_as_torch_wants_it(norm: bool):
    qkv, offsets = packed(2, 2, torch.float32)
    rope = Rope().tables(offsets, 8, total=qkv.shape[0])
    tables = (rope.cos_TJ, rope.sin_TJ) if norm else (None, None)
    op = torch.ops.gemworks_jagged.attention_qkv.default
    for backward_epilogue in (False, True):
        rest = (offsets, [], "", 2, 64, 0.3, 1e-6 if norm else None, 3, 3, backward_epilogue)
        torch.library.opcheck(op, (qkv.requires_grad_(), *tables, *rest))


@pytest.mark.parametrize("norm", [True, False])
def test_an_epilogue_that_no_kernel_has_changes_nothing(norm: bool):
    """On a CPU the backward of norm and rotation stays a pass of its own: bit-equal values and gradient."""
    qkv, offsets = packed(4, 2, torch.float32)
    rope = Rope().tables(offsets, 8, total=qkv.shape[0])
    results = []
    for backward_epilogue in (False, True):
        leaf = qkv.clone().requires_grad_()
        out = flash_attention_qkv(
            leaf, offsets, num_heads=4, max_length=64, qk_norm=norm, rope=rope, backward_epilogue=backward_epilogue
        )
        results.append((out, *torch.autograd.grad(out.square().sum(), leaf)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_one_graph_for_all_totals_j7():
    """J7."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    def step(x: Tensor, o: Tensor) -> Tensor:
        return flash_attention_qkv(x, o, num_heads=2, max_length=64, qk_norm=True).square().sum()

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for total in (9, 17, 40):
        offsets = torch.tensor([0, 4, total])
        x = torch.randn(total, 6, 8, generator=torch.Generator().manual_seed(total)).requires_grad_()
        (ours,) = torch.autograd.grad(compiled(x, offsets), x)
        torch.testing.assert_close(ours, torch.autograd.grad(step(x, offsets), x)[0])
    assert counter.frame_count == 1


def test_flops_are_those_of_the_parts():
    qkv, offsets = packed(4, 2, torch.float32)
    counts = []

    def apart(x: Tensor) -> Tensor:
        q, k, v = x.split([4, 2, 2], dim=1)
        return flash_attention(q, k, v, offsets, max_length_q=64, qk_norm=True)

    def together(x: Tensor) -> Tensor:
        return flash_attention_qkv(x, offsets, num_heads=4, max_length=64, qk_norm=True)

    for call in (together, apart):
        with FlopCounterMode(display=False) as counter:
            call(qkv.clone().requires_grad_()).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(("shape", "heads"), [((5, 4, 8), 1), ((5, 3, 8), 3), ((5, 24), 1)])
def test_heads_have_to_fit(shape: tuple[int, ...], heads: int):
    with pytest.raises(ValueError, match="qkv: got shape"):
        flash_attention_qkv(torch.zeros(shape), torch.tensor([0, 5]), num_heads=heads, max_length=8)
