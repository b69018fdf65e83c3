"""Logistic regression on categorical fields and float columns, small enough to read: what the baselines are made of.

Shapes: N samples, F categorical fields, C float columns, V rows of all fields together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.gem.metrics import log_loss
from torch import Tensor


@dataclass(frozen=True)
class Features:
    """Inputs of a logistic regression.

    Attributes:
        ids_NF: int64 [N, F], column f in [0, sizes[f]).
        floats_NC: floating [N, C], finite.
        sizes: rows of every field.
    """

    ids_NF: Tensor
    floats_NC: Tensor
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.ids_NF.ndim != 2 or self.ids_NF.shape[1] != len(self.sizes):
            raise ValueError(
                f"ids_NF: got shape {tuple(self.ids_NF.shape)}, expected [N, {len(self.sizes)}]; "
                "one column per entry of sizes"
            )
        if self.floats_NC.ndim != 2 or self.floats_NC.shape[0] != self.ids_NF.shape[0]:
            raise ValueError(
                f"floats_NC: got shape {tuple(self.floats_NC.shape)}, expected [{self.ids_NF.shape[0]}, C]; "
                "one row per row of ids_NF"
            )
        if not bool(torch.isfinite(self.floats_NC).all()):
            column = int((~torch.isfinite(self.floats_NC)).any(0).nonzero()[0])
            raise ValueError(f"floats_NC: got a non-finite value in column {column}, expected finite; clean the column")
        if self.ids_NF.numel():
            low, high = self.ids_NF.amin(0), self.ids_NF.amax(0)
            for f, size in enumerate(self.sizes):
                if low[f] < 0 or high[f] >= size:
                    raise ValueError(
                        f"ids_NF column {f}: got ids in [{int(low[f])}, {int(high[f])}], expected [0, {size}); "
                        "raise the field's size or map unknown ids to a row"
                    )

    @property
    def rows_NF(self) -> Tensor:
        """Ids shifted into one table of V = sum(sizes) rows."""
        starts = [0]
        for size in self.sizes[:-1]:
            starts.append(starts[-1] + size)
        return self.ids_NF + torch.tensor(starts, dtype=torch.int64)


@dataclass(frozen=True)
class LogisticRegression:
    """A fitted model; `fit` makes it.

    Attributes:
        bias: float64 scalar.
        id_weights_V: float64 [V].
        float_weights_C: float64 [C], for standardised columns.
        mean_C, std_C: the training set's.
        l2: the penalty of the id weights it was fitted with.
    """

    bias: Tensor
    id_weights_V: Tensor
    float_weights_C: Tensor
    mean_C: Tensor
    std_C: Tensor
    l2: float

    def logits(self, x: Features) -> Tensor:
        """float64 [N]. An id that training never saw has weight 0: the penalty put it there."""
        standard_NC = (x.floats_NC.double() - self.mean_C) / self.std_C
        return self.bias + self.id_weights_V[x.rows_NF].sum(1) + standard_NC @ self.float_weights_C


def fit(x: Features, labels_N: Tensor, *, l2: float, start: LogisticRegression | None = None) -> LogisticRegression:
    """Minimises summed log-loss + l2 / 2 * squared id weights + 1/2 * squared float weights, by L-BFGS in float64.

    Convex, so the start only saves time. The few float weights get a nominal penalty: it is the ids that overfit.

    Args:
        x: training inputs; float columns are standardised by their own mean and deviation.
        labels_N: [N] in {0, 1}.
        l2: penalty of the id weights, > 0.
        start: a solution to begin from, of the same inputs.

    Raises:
        ValueError: `l2` not positive, no samples, or only one class (the bias would run away).

    >>> x = Features(torch.tensor([[0], [0], [1], [1]]), torch.zeros(4, 0), (3,))
    >>> model = fit(x, torch.tensor([0.0, 0.0, 1.0, 1.0]), l2=1.0)
    >>> new = Features(torch.tensor([[0], [1], [2]]), torch.zeros(3, 0), (3,))
    >>> [round(p, 2) for p in torch.sigmoid(model.logits(new)).tolist()]
    [0.34, 0.66, 0.5]
    """
    if not l2 > 0:
        raise ValueError(f"l2: got {l2}, expected > 0; ids that occur once have no finite weight without a penalty")
    labels_N = labels_N.double()
    num_samples = labels_N.numel()
    if num_samples == 0 or float(labels_N.min()) == float(labels_N.max()):
        raise ValueError(f"labels_N: got {num_samples} labels of one class, expected both; train on a longer part")
    floats_NC = x.floats_NC.double()
    mean_C = floats_NC.mean(0)
    std_C = (floats_NC - mean_C).square().mean(0).sqrt()
    std_C = torch.where(std_C > 0, std_C, torch.ones_like(std_C))
    standard_NC = (floats_NC - mean_C) / std_C
    rows_NF = x.rows_NF
    num_rows, num_floats = sum(x.sizes), standard_NC.shape[1]
    if start is None:
        rate = labels_N.mean()
        weights = torch.cat([torch.logit(rate).reshape(1), torch.zeros(num_rows + num_floats, dtype=torch.float64)])
    else:
        weights = torch.cat([start.bias.reshape(1), start.id_weights_V, start.float_weights_C])
    weights.requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=200,
        tolerance_grad=1e-7,
        tolerance_change=1e-10,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        ids_V, floats_C = weights[1 : 1 + num_rows], weights[1 + num_rows :]
        logits = weights[0] + ids_V[rows_NF].sum(1) + standard_NC @ floats_C
        penalty = 0.5 * (l2 * ids_V.square().sum() + floats_C.square().sum())
        loss = (log_loss(logits, labels_N).sum() + penalty) / num_samples
        loss.backward()
        return loss

    optimizer.step(objective)
    solution = weights.detach()
    return LogisticRegression(
        bias=solution[0],
        id_weights_V=solution[1 : 1 + num_rows],
        float_weights_C=solution[1 + num_rows :],
        mean_C=mean_C,
        std_C=std_C,
        l2=l2,
    )
