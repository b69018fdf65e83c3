"""`flash_attention_pool`: the op of a packed projection of keys and values equals `flash_attention` of its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import Rope, apply_rope, flash_attention, flash_attention_pool, offsets_from_lengths, rms_norm
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.reference
LENGTHS = [5, 0, 1, 9, 33]


def inputs(heads: int, key_heads: int, dtype: torch.dtype, past_end: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    offsets = offsets_from_lengths(torch.tensor(LENGTHS))
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(4, heads, 8, dtype=torch.float64, generator=generator)
    kv = torch.randn(int(offsets[-1]) + past_end, 2 * key_heads, 8, dtype=torch.float64, generator=generator)
    return q.to(dtype), kv.to(dtype), offsets


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("turn", [True, False])
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_flash_attention_of_the_parts(heads: int, key_heads: int, turn: bool, norm: bool, dtype: torch.dtype):
    """Values and both gradients; garbage past the end reaches none of them."""
    q, kv, offsets = inputs(heads, key_heads, dtype)
    kv[int(offsets[-1]) :] = float("nan")
    rope = Rope().tables(offsets, 8, total=kv.shape[0], dtype=torch.float64) if turn else None
    leaves = [x.clone().requires_grad_() for x in (q, kv)]
    ours = flash_attention_pool(leaves[0], leaves[1], offsets, max_length=64, scale=0.3, k_norm=norm, rope=rope)
    exact = [q.double().requires_grad_(), kv.double().nan_to_num().requires_grad_()]
    k, v = exact[1].chunk(2, dim=1)
    k = rms_norm(k, eps=1e-6) if norm else k
    k = apply_rope(k, rope) if rope is not None else k
    expected = flash_attention(exact[0], k, v, None, offsets, max_length_k=64, scale=0.3, shared_query=True)
    d_out = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = [ours, *torch.autograd.grad(ours, leaves, d_out)]
    wanted = [expected, *torch.autograd.grad(expected, exact, d_out.double())]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for a, b in zip(found, wanted, strict=True):
        largest = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("norm", [True, False])
def test_the_op_is_registered_as_torch_wants_it(norm: bool):
    q, kv, offsets = inputs(2, 2, torch.float32)
    rope = Rope().tables(offsets, 8, total=kv.shape[0])
    tables = (rope.cos_TJ, rope.sin_TJ) if norm else (None, None)
    op = torch.ops.gemworks_jagged.attention_pool.default
    for backward_epilogue in (False, True):
        rest = (offsets, [], "", 64, 0.3, 1e-6 if norm else None, backward_epilogue)
        torch.library.opcheck(op, (q.requires_grad_(), kv.requires_grad_(), *tables, *rest))


@pytest.mark.parametrize("norm", [True, False])
def test_an_epilogue_that_no_kernel_has_changes_nothing(norm: bool):
    """On a CPU the backward of norm and rotation stays a pass of its own: bit-equal values and gradients."""
    q, kv, offsets = inputs(2, 2, torch.float32)
    rope = Rope().tables(offsets, 8, total=kv.shape[0])
    results = []
    for backward_epilogue in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, kv)]
        out = flash_attention_pool(
            leaves[0], leaves[1], offsets, max_length=64, k_norm=norm, rope=rope, backward_epilogue=backward_epilogue
        )
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_one_graph_for_all_totals_j7():
    """J7."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    def step(q: Tensor, kv: Tensor, o: Tensor) -> Tensor:
        return flash_attention_pool(q, kv, o, max_length=64, k_norm=True).square().sum()

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    q = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for total in (9, 17, 40):
        offsets = torch.tensor([0, 4, total])
        kv = torch.randn(total, 4, 8, generator=torch.Generator().manual_seed(total)).requires_grad_()
        ours = torch.autograd.grad(compiled(q, kv, offsets), (q, kv))
        torch.testing.assert_close(ours, torch.autograd.grad(step(q, kv, offsets), (q, kv)))
    assert counter.frame_count == 1


def test_flops_are_those_of_the_parts():
    q, kv, offsets = inputs(4, 2, torch.float32)
    calls: list[Any] = [
        lambda q, kv: flash_attention_pool(q, kv, offsets, max_length=64, k_norm=True),
        lambda q, kv: flash_attention(q, kv[:, :2], kv[:, 2:], None, offsets, max_length_k=64, shared_query=True),
    ]
    counts = []
    for call in calls:
        with FlopCounterMode(display=False) as counter:
            call(q.clone().requires_grad_(), kv.clone().requires_grad_()).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("shape", [(5, 3, 8), (5, 0, 8), (5, 16)])
def test_heads_have_to_be_pairs(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match="kv: got shape"):
        flash_attention_pool(torch.zeros(2, 1, 8), torch.zeros(shape), torch.tensor([0, 5]), max_length=8)
