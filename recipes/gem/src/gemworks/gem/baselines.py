"""The bars a model has to clear: two logistic regressions on the same split as the model.

`identity` knows user and item. `history` also knows the causal running rate and count of both: it is strong, since
most of what can be known about a rating is how generous the user and how popular the item has been so far.

Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from gemworks.gem.logistic import Features, LogisticRegression, fit
from gemworks.gem.metrics import Predictions, Quality
from numpy.typing import NDArray
from torch import Tensor

PENALTIES = (300.0, 100.0, 30.0, 10.0, 3.0, 1.0)  # strongest first: each fit starts from the one before


class _Identity(Protocol):
    """User and item of every sample, with the sizes of their vocabularies."""

    @property
    def user_N(self) -> NDArray[np.int64]: ...
    @property
    def item_N(self) -> NDArray[np.int64]: ...
    @property
    def num_users(self) -> int: ...
    @property
    def num_items(self) -> int: ...


class _CausalCounts(Protocol):
    """Counts and smoothed rates of user and item just before every sample."""

    @property
    def user_count_N(self) -> NDArray[np.float64]: ...
    @property
    def user_rate_N(self) -> NDArray[np.float64]: ...
    @property
    def item_count_N(self) -> NDArray[np.float64]: ...
    @property
    def item_rate_N(self) -> NDArray[np.float64]: ...


class _Table(Protocol):
    """The samples; labels float32 [N, K]."""

    @property
    def labels_NK(self) -> NDArray[np.float32]: ...


@runtime_checkable
class BaselineSource(Protocol):
    """What a data source offers when it can be compared with the baselines."""

    @property
    def table(self) -> _Table: ...
    def identity(self) -> _Identity: ...
    def causal_counts(self) -> _CausalCounts: ...
    def bounds(self, split: str) -> tuple[int, int]: ...


@dataclass(frozen=True)
class Baseline:
    """One baseline with one penalty, evaluated.

    Attributes:
        name: "identity" or "history".
        l2: its penalty.
        valid: quality on the validation part.
        test: quality on the test part.
        test_logits_N: float64 [N], in the order of the test part.
    """

    name: str
    l2: float
    valid: Quality
    test: Quality
    test_logits_N: Tensor


@dataclass(frozen=True)
class BaselineResult:
    """A baseline under the two ways of choosing its penalty.

    Attributes:
        chosen: lowest NE on the validation part, as one would deploy it.
        strongest: lowest NE on the test part itself. Nobody could deploy it; being better than this one cannot be luck
            in the choice of the penalty, so this is the one that models are compared with.
    """

    chosen: Baseline
    strongest: Baseline


def baselines(source: BaselineSource) -> Iterator[BaselineResult]:
    """Fits both baselines, identity first; a few seconds each on 100,000 samples.

    Raises:
        ValueError: a part in which all labels are equal.
    """
    identity, counts = source.identity(), source.causal_counts()
    ids_NF = torch.from_numpy(np.stack([identity.user_N, identity.item_N], axis=1).astype(np.int64))
    sizes = (identity.num_users, identity.num_items)
    labels_N = torch.from_numpy(source.table.labels_NK[:, 0]).double()
    floats = np.stack(
        [counts.user_rate_N, np.log1p(counts.user_count_N), counts.item_rate_N, np.log1p(counts.item_count_N)], axis=1
    )
    history_NC = torch.from_numpy(floats).double()
    for name, floats_NC in (("identity", history_NC[:, :0]), ("history", history_NC)):
        parts = {
            split: (Features(ids_NF[slice(*b)], floats_NC[slice(*b)], sizes), labels_N[slice(*b)])
            for split, b in ((s, source.bounds(s)) for s in ("train", "valid", "test"))
        }
        yield _best(name, parts)


def _best(name: str, parts: dict[str, tuple[Features, Tensor]]) -> BaselineResult:
    fitted: list[Baseline] = []
    model: LogisticRegression | None = None
    for l2 in PENALTIES:
        model = fit(*parts["train"], l2=l2, start=model)
        valid, _ = _evaluate(model, *parts["valid"])
        test, logits_N = _evaluate(model, *parts["test"])
        fitted.append(Baseline(name, l2, valid, test, logits_N))
    return BaselineResult(
        chosen=min(fitted, key=lambda b: b.valid.ne),
        strongest=min(fitted, key=lambda b: b.test.ne),
    )


def _evaluate(model: LogisticRegression, x: Features, labels_N: Tensor) -> tuple[Quality, Tensor]:
    logits_N = model.logits(x)
    predictions = Predictions(1)
    predictions.update(logits_N[:, None], labels_N[:, None], torch.arange(len(labels_N)))
    return predictions.compute()[0], logits_N


def as_dict(result: BaselineResult) -> dict[str, Any]:
    """Plain values for a summary."""
    chosen, strongest = result.chosen, result.strongest
    return {
        "ne": strongest.test.ne,
        "auc": strongest.test.auc,
        "l2": strongest.l2,
        "valid_choice_ne": chosen.test.ne,
        "valid_choice_auc": chosen.test.auc,
        "valid_choice_l2": chosen.l2,
        "valid_ne": chosen.valid.ne,
    }
