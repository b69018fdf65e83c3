"""Base-batch shuffling, the global balancer, the cost model and order statistics."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from gemworks.parallel.balance_report import balance_rows, to_csv
from gemworks.parallel.global_balance import global_assignment
from gemworks.parallel.lengths import (
    CostModel,
    LengthLaw,
    expected_imbalance,
    expected_max_of_normals,
    fit_cost_model,
    summary,
)
from gemworks.parallel.shuffler import BaseBatchShuffler, deal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode


def test_probabilities_asked_for_under_a_fake_mode_do_not_stay_fake() -> None:
    law = LengthLaw(name="uniform", max_len=4321)
    with FakeTensorMode():
        assert law.probabilities().shape == (4321,)
    assert law.probabilities().sum().item() == pytest.approx(1.0)


class Source:
    """Numbers 0..n-1 with made-up costs."""

    def __init__(self, n: int) -> None:
        self.n, self.i = n, 0

    def __iter__(self):
        while self.i < self.n:
            self.i += 1
            yield self.i - 1

    def state_dict(self) -> dict[str, Any]:
        return {"i": self.i}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.i = state["i"]


def cost_of(i: int) -> float:
    return float((i * 7919) % 101 + 1)


def make(n: int, **kwargs: Any) -> BaseBatchShuffler[int]:
    return BaseBatchShuffler(Source(n), cost_of, sub_batches_per_batch=4, batches_per_window=4, **kwargs)


@given(st.integers(0, 70), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_sub_batch_comes_out_once(n: int, align: bool, drop_last: bool) -> None:
    batches = list(make(n, align=align, drop_last=drop_last))
    seen = Counter(i for b in batches for i in b)
    assert max(seen.values(), default=1) == 1
    if drop_last:
        assert all(len(b) == 4 for b in batches)
        assert len(batches) == n // 16 * 4 + n % 16 // 4
    else:
        assert set(seen) == set(range(n))
        assert max((len(b) for b in batches), default=0) <= 4


@given(st.integers(0, 20), st.booleans())
@settings(max_examples=40, deadline=None)
def test_resumed_equals_unbroken(stop: int, align: bool) -> None:
    whole = list(make(75, align=align, seed=3))
    first = make(75, align=align, seed=3)
    head = list(itertools.islice(first, stop))
    state = first.state_dict()
    second = make(75, align=align, seed=3)
    second.load_state_dict(state)
    assert whole[: len(head)] == head
    assert list(second) == whole[len(head) :]


def test_two_runs_and_two_epochs_are_equal() -> None:
    assert list(make(64)) == list(make(64))
    bbs = make(64)
    first = list(bbs)
    bbs._source.load_state_dict({"i": 0})  # type: ignore[union-attr]
    assert list(bbs) == first


def test_the_order_is_drawn_anew_for_each_window_and_alike_for_each_epoch() -> None:
    equal_windows = [cost for _ in range(6) for cost in range(1, 17)]
    bbs = BaseBatchShuffler(equal_windows, float, sub_batches_per_batch=2, batches_per_window=8, align=False, seed=1)
    first = list(bbs)
    windows = [first[i : i + 8] for i in range(0, len(first), 8)]
    assert all(sorted(window) == sorted(windows[0]) for window in windows)
    assert any(window != windows[0] for window in windows)
    assert list(bbs) == first


def test_a_window_leaves_heaviest_batch_first() -> None:
    for window in range(3):
        batches = list(make(48))[4 * window : 4 * window + 4]
        loads = [sum(map(cost_of, b)) for b in batches]
        assert loads == sorted(loads, reverse=True)
        assert loads[0] > loads[-1]


def test_a_source_that_cannot_resume_says_so() -> None:
    with pytest.raises(ValueError, match="state_dict"):
        BaseBatchShuffler([1, 2], float).state_dict()
    with pytest.raises(ValueError, match="batches_per_window"):
        BaseBatchShuffler([1], float, batches_per_window=0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_deal_evens_counts_and_bounds_the_spread(costs, n) -> None:
    x = torch.tensor(costs, dtype=torch.float64)
    where = deal(x, n)
    counts = torch.bincount(where, minlength=n)
    assert int(counts.max()) - int(counts.min()) <= 1
    load = torch.zeros(n, dtype=torch.float64).index_add_(0, where, x)
    # Rounds keep the spread within the costliest item.
    assert float(load.max() - load.min()) <= max(costs) + 1e-6 * sum(costs)


def test_deal_pairs_heaviest_with_lightest() -> None:
    assert deal(torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]), 3).tolist() == [1, 0, 2, 1, 2, 0]


@pytest.mark.parametrize("name", ["uniform", "uniform0.4", "zipf1.2"])
def test_laws_have_the_moments_they_claim(name: str) -> None:
    law = LengthLaw.named(name, 500)
    x = law.sample((200_000,), torch.Generator().manual_seed(0)).double()
    assert int(x.min()) >= 1
    assert int(x.max()) <= 500
    assert float(x.mean()) == pytest.approx(law.mean, rel=0.02)
    assert float((x**2).mean()) == pytest.approx(law.moment(2), rel=0.05)
    assert law.probabilities().sum() == pytest.approx(1)
    with pytest.raises(ValueError, match="name"):
        LengthLaw.named("normal", 5)


def test_mean_of_the_benchmark_laws() -> None:
    assert LengthLaw.named("uniform", 1000).mean / 1000 == pytest.approx(0.5, abs=0.001)
    assert LengthLaw.named("uniform0.4", 1000).mean / 1000 == pytest.approx(0.7, abs=0.001)


@given(st.floats(0, 5), st.floats(0, 0.1), st.floats(0, 3), st.floats(0, 100))
@settings(max_examples=40, deadline=None)
def test_fit_recovers_what_made_the_times(linear, quadratic, per_sample, per_batch) -> None:
    g = torch.Generator().manual_seed(1)
    batches = [torch.randint(1, 100 + 40 * i, (5 + 3 * i,), generator=g) for i in range(10)]
    truth = CostModel(linear=linear, quadratic=quadratic, per_sample=per_sample, per_batch=per_batch + 1)
    found = fit_cost_model(batches, [truth.of_lengths(b).item() for b in batches])
    for b in batches:
        assert found.of_lengths(b).item() == pytest.approx(truth.of_lengths(b).item(), rel=1e-5)
    assert min(found.linear, found.quadratic, found.per_sample, found.per_batch) >= 0


def test_the_term_that_is_dropped_is_the_negative_one() -> None:
    """Times a little below a line: no quadratic term, and all of the linear one."""
    batches = [torch.full((b,), n) for b, n in ((1, 100), (2, 200), (4, 50), (3, 400), (7, 30), (5, 300))]
    times = [2.0 * float(b.sum()) - 1e-3 * float((b.double() ** 2).sum()) for b in batches]
    found = fit_cost_model(batches, times)
    assert found.quadratic == 0
    assert 1.5 < found.linear <= 2.0
    assert max(abs(found.of_lengths(b).item() / t - 1) for b, t in zip(batches, times, strict=True)) < 0.15


def test_summary_is_of_order_statistics_over_ranks() -> None:
    found = summary(torch.stack([torch.arange(201.0), torch.full((201,), 3.0)]).double())
    assert found == pytest.approx(
        {"max_over_mean": 1.5, "p99_over_mean": 1.49, "p50_over_mean": 1.0, "min_over_mean": 0.5}
    )


def test_fit_never_gives_a_negative_term_on_noise_and_names_bad_input() -> None:
    g = torch.Generator().manual_seed(5)
    batches = [torch.randint(1, 300, (64,), generator=g) for _ in range(12)]
    times = [1e-3 * (1 + float(torch.rand((), generator=g))) for _ in range(12)]
    found = fit_cost_model(batches, times)
    assert min(found.linear, found.quadratic, found.per_sample, found.per_batch) >= 0
    with pytest.raises(ValueError, match="at least two"):
        fit_cost_model(batches[:1], times[:1])
    with pytest.raises(ValueError, match="> 0"):
        fit_cost_model(batches[:2], [0.0, 1.0])


@pytest.mark.parametrize(
    ("n", "value"), [(1, 0.0), (2, 0.5641895835), (3, 0.8462843753), (10, 1.5387527308), (100, 2.5075936)]
)
def test_expected_max_equals_tabled_order_statistics(n: int, value: float) -> None:
    assert expected_max_of_normals(n) == pytest.approx(value, abs=2e-6)


def test_expected_imbalance_of_one_and_of_two_ranks_in_closed_form() -> None:
    """E[max of two normals] = std / sqrt(pi) above the mean."""
    assert expected_imbalance(2.0, 0.5, 1) == pytest.approx(1.0, abs=1e-6)
    assert expected_imbalance(2.0, 0.5, 2) == pytest.approx(1 + 0.25 / math.sqrt(math.pi), abs=1e-6)


@pytest.mark.parametrize("name", ["uniform", "zipf1.2"])
def test_expected_imbalance_equals_a_monte_carlo(name: str) -> None:
    law, cost = LengthLaw.named(name, 1000), CostModel(linear=1.0, quadratic=1e-3)
    g = torch.Generator().manual_seed(2)
    costs = cost.of_lengths(law.sample((200, 64, 512), g))
    mean, std = cost.mean_and_std(law, 512)
    assert float(costs.mean()) == pytest.approx(mean, rel=0.01)
    assert float(costs.std()) == pytest.approx(std, rel=0.05)
    measured = summary(costs)["max_over_mean"] - 1
    # A heavy tail keeps the sum of 512 a little skewed, so the maximum lies above the normal's.
    assert measured == pytest.approx(expected_imbalance(mean, std, 64) - 1, rel=0.05 if name == "uniform" else 0.15)


@pytest.mark.parametrize(
    "law", [LengthLaw.named("uniform", 2000), LengthLaw.named("zipf1.2", 2000)], ids=lambda x: x.name
)
def test_bbs_removes_most_of_the_imbalance_and_global_nearly_all(law: LengthLaw) -> None:
    rows = {r.method: r for r in balance_rows(law, 64, cost=CostModel(linear=1.0))}
    assert rows["none"].max_over_mean == pytest.approx(rows["none"].expected_max_over_mean, rel=0.1)
    assert rows["bbs"].gain > 0.6
    assert rows["global"].gain > 0.9
    text = to_csv(list(rows.values()))
    assert text.count("\n") == 4
    assert text.startswith("law,num_ranks,method,max_over_mean")


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_global_assignment_keeps_counts(R, B, seed) -> None:
    costs = torch.rand(R, B, generator=torch.Generator().manual_seed(seed))
    target = global_assignment(costs)
    assert torch.equal(torch.bincount(target.reshape(-1), minlength=R), torch.full((R,), B))


@pytest.mark.parametrize("cost", [torch.tensor, np.float32, np.int64])
def test_a_cost_may_be_a_number_of_numpy_or_a_tensor(cost) -> None:
    two: Any = np.int64(2)
    bbs = BaseBatchShuffler([1, 9, 2, 8], cost, sub_batches_per_batch=two, batches_per_window=2)
    assert [sorted(batch) for batch in bbs] == [[1, 9], [2, 8]]
