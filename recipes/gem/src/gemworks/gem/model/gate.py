"""The border between dense part and embedding tables: a gradient that is not finite does not cross it.

The tables are updated inside backward, where nothing can be taken back. So every gradient that goes to them passes
here first, all of them at once: if one is not finite, all become 0, and a gradient of 0 leaves a row of row-wise
Adagrad and its accumulator as they are. This holds for the tables of one process and for fbgemm's fused ones alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class GradientGate:
    """Passes tensors on unchanged; in backward passes their gradients on, or zeros for all of them.

    Attributes:
        finite: bool scalar on the tensors' device, False once a gradient was refused; None before the first backward.
            It is read by whoever wants to pay for the synchronisation.
        closed: lets no gradient through at all.
        total: makes of this batch's sum of squares, a scalar, that of the whole step, where the batch is only a part of
            it; whoever trains on parts sets it, so that all of them decide alike.

    >>> gate, x = GradientGate(), torch.ones(2, requires_grad=True)
    >>> (y,) = gate(x)
    >>> (y * torch.tensor([1.0, float("inf")])).sum().backward()
    >>> x.grad, gate.finite
    (tensor([0., 0.]), tensor(False))
    """

    def __init__(self) -> None:
        self.finite: Tensor | None = None
        self.closed = False
        self.total: Callable[[Tensor], Tensor] = _itself

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors, behind the gate; of any shapes, on one device."""
        if not tensors or not torch.is_grad_enabled():
            return tensors
        return _Gate.apply(self, *tensors)

    def reset(self) -> None:
        """Forgets what was seen, at the start of a step."""
        self.finite = None

    def _judge(self, gradients: tuple[Tensor, ...]) -> Tensor:
        # The sum of squares, not the gradients: Adagrad squares them, and an accumulator of infinity freezes its row.
        finite = torch.isfinite(self.total(torch.stack([g.float().square().sum() for g in gradients]).sum()))
        self.finite = finite if self.finite is None else self.finite & finite
        return torch.zeros_like(finite) if self.closed else finite


def _itself(x: Tensor) -> Tensor:
    return x


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: GradientGate, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gate = gate
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        passes = ctx.gate._judge(gradients)
        return None, *(torch.where(passes, g, torch.zeros((), dtype=g.dtype, device=g.device)) for g in gradients)
