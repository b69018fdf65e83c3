"""A small model whose saved tensors are awkward, and an engine for it: shared by the tests of the offload engine."""

from __future__ import annotations

import torch
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.offload import OffloadEngine
from torch import nn


def make_engine(mover=None, capacity_bytes=4 << 20, window_bytes=3000, min_bytes=1) -> OffloadEngine:
    return OffloadEngine(
        PinnedArena(capacity_bytes, pin=False),
        device="cpu",
        window_bytes=window_bytes,
        min_bytes=min_bytes,
        mover=mover,
    )


class Block(nn.Module):
    """Saves views, transposes, non-contiguous tensors and aliases of one storage."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        a = torch.softmax(q @ k.mT, dim=-1)
        y = self.out((a @ v).transpose(0, 1).transpose(0, 1))
        return x + torch.nn.functional.gelu(y) * y.sigmoid()


def make_model(seed: int = 0, depth: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[Block() for _ in range(depth)])


def gradients(model: nn.Module, x: torch.Tensor, engine: OffloadEngine | None = None, **kwargs) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    if engine is None:
        loss = model(x).square().mean()
    else:
        with engine.saving(model, **kwargs):
            loss = model(x).square().mean()
    loss.backward()
    assert x.grad is not None
    return [x.grad.clone(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


def assert_bit_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
