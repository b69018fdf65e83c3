"""The logistic regressions that models are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from gemworks.gem.baselines import BaselineSource, as_dict, baselines
from gemworks.gem.logistic import Features, fit
from gemworks.gem.metrics import log_loss, normalized_entropy
from numpy.typing import NDArray

pytestmark = pytest.mark.reference


def problem(n: int = 300, seed: int = 0) -> tuple[Features, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(size, (n,), generator=generator) for size in (7, 5)], 1)
    floats = torch.randn(n, 2, generator=generator, dtype=torch.float64) * 3 + 1
    effect = torch.randn(7, generator=generator)[ids[:, 0]] + 0.5 * floats[:, 0]
    labels = (torch.rand(n, generator=generator) < torch.sigmoid(effect)).double()
    return Features(ids, floats, (7, 5)), labels


def test_fit_equals_newton_on_dense_columns() -> None:
    """The optimum found by a different method on one-hot columns written out."""
    x, y = problem()
    model = fit(x, y, l2=2.0)
    onehot = torch.nn.functional.one_hot(x.rows_NF, 12).sum(1).double()
    standard = (x.floats_NC - x.floats_NC.mean(0)) / x.floats_NC.std(0, correction=0)
    columns = torch.cat([torch.ones(len(y), 1, dtype=torch.float64), onehot, standard], 1)
    penalty = torch.tensor([0.0] + [2.0] * 12 + [1.0] * 2, dtype=torch.float64)
    w = torch.zeros(15, dtype=torch.float64)
    for _ in range(30):
        p = torch.sigmoid(columns @ w)
        gradient = columns.T @ (p - y) + penalty * w
        hessian = (columns * (p * (1 - p))[:, None]).T @ columns + torch.diag(penalty)
        w = w - torch.linalg.solve(hessian, gradient)
    assert torch.allclose(model.logits(x), columns @ w, atol=1e-4)


def test_start_does_not_change_the_optimum() -> None:
    x, y = problem()
    cold = fit(x, y, l2=3.0)
    warm = fit(x, y, l2=3.0, start=fit(x, y, l2=100.0))
    assert torch.allclose(cold.logits(x), warm.logits(x), atol=1e-4)


def test_stronger_penalty_shrinks_and_unseen_ids_are_neutral() -> None:
    x, y = problem()
    weak, strong = fit(x, y, l2=0.1), fit(x, y, l2=100.0)
    assert strong.id_weights_V.norm() < 0.2 * weak.id_weights_V.norm()
    assert float(log_loss(weak.logits(x), y).mean()) < float(log_loss(strong.logits(x), y).mean())
    wider = fit(Features(x.ids_NF, x.floats_NC, (7, 50)), y, l2=0.1)
    assert torch.equal(wider.id_weights_V[12:], torch.zeros(45, dtype=torch.float64))


def test_constant_column_is_harmless() -> None:
    x, y = problem()
    flat = Features(x.ids_NF, torch.ones(len(y), 1), (7, 5))
    assert torch.isfinite(fit(flat, y, l2=1.0).logits(flat)).all()


@pytest.mark.parametrize(
    ("ids", "floats", "message"),
    [
        ([[0, 5]], [[0.0]], r"ids_NF column 1: got ids in \[5, 5\], expected \[0, 5\)"),
        ([[-1, 0]], [[0.0]], r"ids_NF column 0: got ids in \[-1, -1\]"),
        ([[0, 0]], [[float("nan")]], "floats_NC: got a non-finite value in column 0"),
        ([[0]], [[0.0]], "one column per entry of sizes"),
        ([[0, 0]], [[0.0], [1.0]], "one row per row of ids_NF"),
    ],
)
def test_wrong_features_are_named(ids: list[list[int]], floats: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Features(torch.tensor(ids), torch.tensor(floats), (7, 5))


def test_fit_refuses_one_class_and_no_penalty() -> None:
    x, y = problem()
    with pytest.raises(ValueError, match="one class"):
        fit(x, torch.ones_like(y), l2=1.0)
    with pytest.raises(ValueError, match="l2: got 0"):
        fit(x, y, l2=0.0)


@dataclass
class Columns:
    """Stands for a source: users have a generosity, items a popularity, both visible in the causal rates."""

    labels_NK: NDArray[np.float32]
    user_N: NDArray[np.int64]
    item_N: NDArray[np.int64]
    num_users: int
    num_items: int
    user_count_N: NDArray[np.float64]
    user_rate_N: NDArray[np.float64]
    item_count_N: NDArray[np.float64]
    item_rate_N: NDArray[np.float64]


@dataclass
class FakeSource:
    columns: Columns
    ends: dict[str, tuple[int, int]] = field(
        default_factory=lambda: {"train": (0, 2400), "valid": (2400, 2700), "test": (2700, 3000)}
    )

    @property
    def table(self) -> Columns:
        return self.columns

    def identity(self) -> Columns:
        return self.columns

    def causal_counts(self) -> Columns:
        return self.columns

    def bounds(self, split: str) -> tuple[int, int]:
        return self.ends[split]


def fake_source() -> FakeSource:
    rng = np.random.default_rng(0)
    n, users, items = 3000, 400, 30
    user, item = np.sort(rng.integers(users, size=n)), rng.integers(items, size=n)  # sorted: test users are new
    generosity, popularity = rng.normal(size=users), rng.normal(size=items)
    probability = 1 / (1 + np.exp(-generosity[user] - popularity[item]))
    labels = (rng.random(n) < probability).astype(np.float32)
    return FakeSource(
        Columns(
            labels_NK=labels[:, None],
            user_N=user,
            item_N=item,
            num_users=users,
            num_items=items,
            user_count_N=rng.integers(50, size=n).astype(np.float64),
            user_rate_N=1 / (1 + np.exp(-generosity[user])),
            item_count_N=rng.integers(50, size=n).astype(np.float64),
            item_rate_N=1 / (1 + np.exp(-popularity[item])),
        )
    )


def test_baselines_learn_what_they_are_given_and_history_helps_new_users() -> None:
    source = fake_source()
    assert isinstance(source, BaselineSource)
    identity, history = baselines(source)
    assert history.strongest.test.ne < identity.strongest.test.ne < 1.0
    assert history.chosen.test.auc > identity.chosen.test.auc > 0.6


def test_strongest_is_never_weaker_than_chosen_and_figures_belong_to_the_logits() -> None:
    source = fake_source()
    labels = torch.from_numpy(source.table.labels_NK[2700:, 0]).double()
    for result in baselines(source):
        assert result.strongest.test.ne <= result.chosen.test.ne
        assert result.chosen.valid.ne <= result.strongest.valid.ne
        assert result.strongest.test.ne == normalized_entropy(result.strongest.test_logits_N, labels)
        assert as_dict(result)["ne"] == result.strongest.test.ne


def test_baselines_do_not_see_later_labels() -> None:
    """Other labels in the test part change the score, never the predictions."""
    source, other = fake_source(), fake_source()
    other.table.labels_NK[2700:] = 1 - other.table.labels_NK[2700:]
    for a, b in zip(baselines(source), baselines(other), strict=True):
        assert torch.equal(a.chosen.test_logits_N, b.chosen.test_logits_N)
        assert a.chosen.test.ne != b.chosen.test.ne
