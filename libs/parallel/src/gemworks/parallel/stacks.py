"""The dense blocks that benchmarks and validation run: the matrix products of a GEM-like layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from gemworks.parallel.experts import EnsembleExperts
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def on_device(make: Callable[[], M], device: torch.device, dtype: torch.dtype = torch.float32) -> M:
    """Build a module where it will live: drawing a billion weights on the CPU takes longer than a benchmark."""
    with device:
        return make().to(dtype)


class Block(nn.Module):
    """x + down(gelu(up(x))), four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ExpertStack(nn.Module):
    """Ensembles of one expert per rank, one after the other; `group` None: one expert, alone."""

    def __init__(self, depth: int, width: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        size = 1 if group is None else dist.get_world_size(group)

        def make(i: int) -> nn.Module:
            torch.manual_seed(i)
            return Block(width)

        self.blocks = nn.ModuleList(EnsembleExperts(make, size, group) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, EnsembleExperts)
            x = block(x, [x.shape[0]] * block.size)
        return x
