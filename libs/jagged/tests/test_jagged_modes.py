"""Every op of the library under torch.export with a dynamic total, autocast, checkpointing and strided inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemworks.jagged import (
    Rope,
    apply_rope,
    block_attention,
    block_attention_qkv,
    flash_attention,
    gdpa,
    layer_norm,
    rms_norm,
    seed_pool,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.reference,
    # torch.export makes one while it traces an autograd.Function (the norm in front of attention).
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

OFFSETS = torch.tensor([0, 12, 12, 20])
SEEDS = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(3))
WEIGHTS = torch.randn(3, 7, 2, 8, generator=torch.Generator().manual_seed(4))
Layer = Callable[[Tensor, Tensor], Tensor]


def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of one fused projection [T, 3 N, H]."""
    q, k, v = x.split(2, dim=1)
    return q, k, v


LAYERS: dict[str, Layer] = {
    "flash": lambda x, o: flash_attention(*parts(x), o, max_length_q=32, causal=True),
    "flash qk_norm": lambda x, o: flash_attention(*parts(x), o, max_length_q=32, qk_norm=True),
    "gdpa": lambda x, o: gdpa(*parts(x), o, max_length_q=32, scale=0.3, activation="fast_gelu"),
    "pffn": lambda x, o: gdpa(x[:, :2], WEIGHTS.to(x.dtype), WEIGHTS.to(x.dtype), o, max_length_q=32, scale=0.3),
    "seed pool": lambda x, o: seed_pool(SEEDS.to(x.dtype), *parts(x)[1:], o, max_length_k=32),
    "block": lambda x, o: block_attention(*parts(x), o, max_length_q=32, block=32, qk_norm=True),
    "block qkv": lambda x, o: block_attention_qkv(x, o, num_heads=2, max_length=32, block=32),
    "rope": lambda x, o: apply_rope(x, Rope().tables(o, 8, total=x.shape[0])),
    "layer_norm": lambda x, o: layer_norm(x, residual=x)[0],
    "rms_norm": lambda x, o: rms_norm(x, add=x),
}


def leaf(rows: int = 20, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 6, 8, generator=torch.Generator().manual_seed(rows)).to(dtype).requires_grad_()


def gradient(out: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(out.float().square().sum(), x)[0]


@pytest.mark.parametrize("name", LAYERS)
def test_export_with_a_dynamic_total(name: str) -> None:
    """One exported program serves batches of any number of rows."""

    class Module(torch.nn.Module):
        def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
            return LAYERS[name](x, offsets)

    total = torch.export.Dim("total", min=4, max=4096)
    with torch.no_grad():
        program = torch.export.export(Module(), (leaf().detach(), OFFSETS), dynamic_shapes=({0: total}, None))
        for rows, offsets in ((20, OFFSETS), (41, torch.tensor([0, 9, 9, 41]))):
            x = leaf(rows).detach()
            torch.testing.assert_close(program.module()(x, offsets), LAYERS[name](x, offsets))


@pytest.mark.parametrize("name", LAYERS)
def test_checkpointing_changes_nothing(name: str) -> None:
    x = leaf()
    kept: Any = checkpoint(LAYERS[name], x, OFFSETS, use_reentrant=False)
    plain = LAYERS[name](x, OFFSETS)
    assert torch.equal(kept, plain)
    assert torch.equal(gradient(kept, x), gradient(plain, x))


@pytest.mark.parametrize("name", ["flash", "flash qk_norm", "gdpa", "seed pool", "block", "block qkv"])
def test_autocast_computes_low_and_gives_gradients_in_the_leaf_dtype(name: str) -> None:
    x = leaf()
    with torch.autocast("cpu", torch.bfloat16):
        out = LAYERS[name](x, OFFSETS)
    assert out.dtype == torch.bfloat16
    grad = gradient(out, x)
    assert grad.dtype == torch.float32
    low = leaf(dtype=torch.bfloat16)
    expected = LAYERS[name](low, OFFSETS)
    assert torch.equal(out, expected)
    torch.testing.assert_close(grad, gradient(expected, low).float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", LAYERS)
def test_strided_rows_equal_packed_rows(name: str) -> None:
    """Rows of a wider tensor, as another projection beside q, k and v leaves them."""
    x = leaf()
    wide = torch.cat([x, torch.full_like(x, float("nan"))], dim=1).detach().requires_grad_()
    out = LAYERS[name](wide[:, :6], OFFSETS)
    expected = LAYERS[name](x, OFFSETS)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradient(out, wide)[:, :6], gradient(expected, x))


@pytest.mark.parametrize("name", LAYERS)
def test_one_graph_for_every_total(name: str) -> None:
    """torch.compile takes every op whole, and a batch of another total needs no other graph."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(LAYERS[name], backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for offsets in (OFFSETS, torch.tensor([0, 9, 9, 41]), torch.tensor([0, 0, 30, 31])):
        x = leaf(int(offsets[-1]))
        out, expected = compiled(x, offsets), LAYERS[name](x, offsets)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(gradient(out, x), gradient(expected, x))
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 3
