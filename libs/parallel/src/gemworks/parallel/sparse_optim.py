"""Row-wise optimizers of embedding tables, applied to the rows that got a gradient.

Letters: U touched rows, D width.

With R replicas of a table each updates its own copy with the mean gradient of its own table group, then copies and
states are averaged. For SGD the average of the copies is the update by the mean gradient: nothing changes against an
unsharded table. Row-wise
Adagrad is different: it normalises before averaging. A group's gradient averages R times fewer samples than the
world's, so its noise has R times the variance; the state would grow R times as fast and the steps shrink.
`moment_scale` multiplies what is added to the state; the default 1 / R restores the scale of the unsharded state for
noise-dominated gradients. (Momentum-scaled row-wise AdaGrad is from arXiv 2508.03854; we had only its abstract, so the
value is our derivation from the variance.) A row that only one replica sees still moves by 1/R of the unsharded step,
and its state is averaged with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gemworks.parallel._check import number
from torch import Tensor


class RowOptimizer(Protocol):
    """Updates rows in place. `num_states` is 1 if it keeps one number per row."""

    lr: float
    num_states: int

    def update(self, weight_ND: Tensor, state_N: Tensor | None, rows_U: Tensor, grad_UD: Tensor, replicas: int) -> None:
        """`rows_U` are distinct; `replicas` is R."""
        ...


@dataclass(kw_only=True)
class RowSGD:
    """`w -= lr * g`."""

    lr: float
    num_states: int = 0

    def __post_init__(self) -> None:
        number("lr", self.lr, least=0)

    def update(self, weight_ND: Tensor, state_N: Tensor | None, rows_U: Tensor, grad_UD: Tensor, replicas: int) -> None:
        weight_ND.index_add_(0, rows_U, grad_UD.to(weight_ND.dtype), alpha=-self.lr)


@dataclass(kw_only=True)
class RowWiseAdagrad:
    """`s += moment_scale * mean(g^2); w -= lr * g / (sqrt(s) + eps)`, one s per row (as FBGEMM's exact row-wise
    Adagrad).

    Attributes:
        lr, eps: as usual.
        moment_scale: None for 1 / R.
    """

    lr: float
    eps: float = 1e-8
    moment_scale: float | None = None
    num_states: int = 1

    def __post_init__(self) -> None:
        number("lr", self.lr, least=0)
        number("eps", self.eps, least=0)
        if self.moment_scale is not None:
            number("moment_scale", self.moment_scale, least=0)

    def update(self, weight_ND: Tensor, state_N: Tensor | None, rows_U: Tensor, grad_UD: Tensor, replicas: int) -> None:
        assert state_N is not None
        scale = 1 / replicas if self.moment_scale is None else self.moment_scale
        s_U = state_N[rows_U] + scale * grad_UD.float().pow(2).mean(dim=1)
        state_N[rows_U] = s_U
        step_UD = grad_UD.float() / (s_U.sqrt() + self.eps)[:, None]
        weight_ND.index_add_(0, rows_U, step_UD.to(weight_ND.dtype), alpha=-self.lr)
