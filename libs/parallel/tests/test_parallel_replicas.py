"""Replicated parameters: fingerprints of their start, and the mean of their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gemworks.parallel import replicas
from gemworks.parallel.replicas import GradientAverager, fingerprint
from parallel_spawn import spawn
from torch import nn


def test_a_fingerprint_knows_where_a_byte_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the same place of another piece has it, and where only a sign differs."""
    monkeypatch.setattr(replicas, "_PIECE", 64)
    x = torch.zeros(4, 16)
    x[0, 3] = 1.0
    moved = x.roll(1, 0)  # by one piece
    negative = -x.abs()
    assert not torch.equal(fingerprint(x), fingerprint(moved))
    assert not torch.equal(fingerprint(torch.zeros(4)), fingerprint(-torch.zeros(4)))
    assert not torch.equal(fingerprint(x), fingerprint(negative))
    assert torch.equal(fingerprint(x), fingerprint(x.clone()))


class TwoWays(nn.Module):
    """A weight that every rank uses, one that only some use, one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Parameter(torch.ones(2)) for _ in range(3))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return x * self.always.sum() + (x * self.sometimes.sum() if both else 0.0)


def _mean(rank: int, world: int) -> dict[str, Any]:
    module = TwoWays()
    group = dist.group.WORLD
    assert group is not None
    averager = GradientAverager(module, list(module.parameters()), group)
    assert averager.group is group
    module(torch.tensor(float(rank + 1)), both=rank == 0).backward()
    return {name: None if p.grad is None else p.grad.tolist() for name, p in module.named_parameters()}


@pytest.mark.dist
def test_gradients_are_means_over_all_ranks_whoever_has_one() -> None:
    for found in spawn(_mean, 2):
        assert found == {"always": [1.5, 1.5], "sometimes": [0.5, 0.5], "never": [0.0, 0.0]}
