"""Replicated parameters: are they equal at the start, and how their gradients are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_PIECE = 2**24


def fingerprint(x: Tensor) -> Tensor:
    """int64 [2] that differs, for practical purposes, if one bit of `x` does; computed where `x` lives."""
    bits = x.detach().contiguous().view(torch.uint8).reshape(-1)
    total = torch.zeros(2, dtype=torch.int64, device=bits.device)
    # In pieces: the int64 copies are eight times as large as the bytes.
    for k, piece in enumerate(bits.split(_PIECE)):
        values = piece.to(torch.int64)
        place = torch.arange(values.numel(), device=bits.device) + k * _PIECE
        # Integer arithmetic wraps, so the sums do not depend on the order of addition.
        total[0] += (values * (place % 65_521 + 1)).sum()
        total[1] += (values * (place % 1_000_003 * 7_919 % 999_983 + 7)).sum()
    return total


def check_equal_replicas(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None) -> None:
    """Raise on every rank of the group if a tensor differs between its ranks.

    Args:
        named: the same names in the same order on every rank.
        group: the ranks that must agree; the world if None.

    Raises:
        ValueError: names the tensors that differ.
    """
    items = list(named)
    if not items:
        return
    mine = torch.cat([fingerprint(x) for _, x in items])
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    differs = (low != high).reshape(-1, 2).any(dim=1).tolist()
    bad = [name for (name, _), d in zip(items, differs, strict=True) if d]
    if bad:
        raise ValueError(
            f"replicas start different: {bad[:8]}{' ...' if len(bad) > 8 else ''} of {len(items)}; expected equal "
            "values on every rank: seed all ranks alike before building the model, or broadcast from one"
        )


class GradientAverager:
    """Averages the gradients of replicated parameters over a group, in one all-reduce per dtype, when backward ends.

    The all-reduce runs in every backward through the module's output, with zeros for parameters that got no gradient
    here, so that ranks agree on the collectives whatever their batch touches.

    Args:
        module: whose output starts the backward pass.
        parameters: replicated over the group, the same order on every rank.
        group: averaged over.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = list(parameters)
        self.group = group
        self._size = dist.get_world_size(group)
        self._queued = False
        module.register_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: Tensor) -> None:
        if not self._queued:
            self._queued = True
            # torch's own data parallel uses this entry too; there is no public one.
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)  # type: ignore[attr-defined]

    def _reduce(self) -> None:
        self._queued = False
        for dtype in sorted({p.dtype for p in self.parameters}, key=str):
            ps = [p for p in self.parameters if p.dtype == dtype]
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in ps])
            dist.all_reduce(flat, group=self.group)
            flat /= self._size
            for p, g in zip(ps, flat.split([p.numel() for p in ps]), strict=True):
                if p.grad is None:
                    p.grad = g.view_as(p).clone()
                else:
                    p.grad.copy_(g.view_as(p))
