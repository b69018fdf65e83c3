"""Metrics against independent definitions: scikit-free loops, closed forms, and properties."""

from __future__ import annotations

import math

import pytest
import torch
from gemworks.gem.metrics import (
    BinaryMetrics,
    Predictions,
    auc,
    binary_entropy,
    log_loss,
    normalized_entropy,
    paired_bootstrap,
)
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.reference


def auc_by_pairs(scores: list[float], labels: list[int]) -> float:
    positives = [s for s, y in zip(scores, labels, strict=True) if y == 1]
    negatives = [s for s, y in zip(scores, labels, strict=True) if y == 0]
    won = sum(1.0 if p > n else 0.5 if p == n else 0.0 for p in positives for n in negatives)
    return won / (len(positives) * len(negatives))


scored = st.lists(st.tuples(st.integers(-4, 4), st.integers(0, 1)), min_size=2, max_size=60)


@given(scored)
def test_auc_equals_the_count_over_all_pairs(samples: list[tuple[int, int]]) -> None:
    scores = [s / 4 for s, _ in samples]
    labels = [y for _, y in samples]
    got = auc(torch.tensor(scores), torch.tensor(labels))
    if len(set(labels)) == 1:
        assert math.isnan(got)
    else:
        assert got == pytest.approx(auc_by_pairs(scores, labels), abs=1e-15)


@given(scored, st.randoms(use_true_random=False))
def test_auc_does_not_depend_on_order(samples: list[tuple[int, int]], random) -> None:
    shuffled = list(samples)
    random.shuffle(shuffled)
    first, second = (
        auc(torch.tensor([float(s) for s, _ in x]), torch.tensor([y for _, y in x])) for x in (samples, shuffled)
    )
    assert first == second or (math.isnan(first) and math.isnan(second))


def test_auc_refuses_nan() -> None:
    with pytest.raises(ValueError, match="scores: got NaN"):
        auc(torch.tensor([0.0, float("nan")]), torch.tensor([0, 1]))


def test_auc_counts_exactly_where_float32_could_not() -> None:
    """A perfect ranking of 3 + 20,000,000 samples: the pair counts pass 2^24."""
    n = 6_000_000
    scores = torch.arange(n + 3, dtype=torch.float64)
    labels = torch.zeros(n + 3)
    labels[-3:] = 1
    assert auc(scores, labels) == 1.0
    labels = torch.zeros(n + 3)
    labels[0] = 1
    assert auc(scores, labels) == 0.0


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.93])
def test_ne_of_the_own_rate_is_one(rate: float) -> None:
    n = 1000
    labels = (torch.arange(n) < rate * n).double()
    logits = torch.full((n,), math.log(rate / (1 - rate)), dtype=torch.float64)
    assert normalized_entropy(logits, labels) == pytest.approx(1.0, abs=1e-12)


def test_ne_against_the_formula_in_plain_python() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(500, generator=generator, dtype=torch.float64) * 3
    labels = (torch.rand(500, generator=generator) < 0.3).double()
    loss = 0.0
    for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
        p = 1 / (1 + math.exp(-z))
        loss -= y * math.log(p) + (1 - y) * math.log(1 - p)
    rate = sum(labels.tolist()) / 500
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    assert normalized_entropy(logits, labels) == pytest.approx(loss / 500 / entropy, rel=1e-12)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_has_no_ne_and_no_auc(label: float) -> None:
    predictions = Predictions(1)
    predictions.update(torch.zeros(5, 1), torch.full((5, 1), label), torch.arange(5))
    quality = predictions.compute()[0]
    assert math.isnan(quality.ne)
    assert math.isnan(quality.auc)
    assert quality.log_loss == pytest.approx(math.log(2))
    assert math.isnan(quality.calibration) == (label == 0.0)


def test_nothing_seen_is_nan_not_an_exception() -> None:
    assert math.isnan(BinaryMetrics(2).compute()[1].ne)
    assert math.isnan(Predictions(2).compute()[1].auc)


def test_confident_logits_stay_finite() -> None:
    logits = torch.tensor([800.0, -800.0, 800.0])
    labels = torch.tensor([1.0, 0.0, 0.0])
    assert log_loss(logits, labels).tolist() == pytest.approx([0.0, 0.0, 800.0])


def test_entropy_refuses_what_is_no_rate() -> None:
    assert binary_entropy(0.0) == binary_entropy(1.0) == 0.0
    with pytest.raises(ValueError, match="rate: got"):
        binary_entropy(1.5)


def test_calibration_is_mean_prediction_over_mean_label() -> None:
    stream = BinaryMetrics(1)
    stream.update(torch.full((10, 1), math.log(0.3 / 0.7)), torch.tensor([[1.0]] * 2 + [[0.0]] * 8))
    assert stream.compute()[0].calibration == pytest.approx(1.5)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 2**31))
def test_streams_merge_to_what_one_stream_sees(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    logits = torch.randn(n, 2, generator=generator)
    labels = (torch.rand(n, 2, generator=generator) < 0.4).float()
    ids = torch.arange(n)
    whole, merged = Predictions(2), Predictions(2)
    stream, parts = BinaryMetrics(2), BinaryMetrics(2)
    whole.update(logits, labels, ids)
    stream.update(logits, labels)
    start = 0
    for size in sizes:
        piece = slice(start, start + size)
        p, b = Predictions(2), BinaryMetrics(2)
        p.update(logits[piece], labels[piece], ids[piece])
        b.update(logits[piece], labels[piece])
        merged.merge(p)
        parts.merge(b)
        start += size
    # predictions are kept whole: cutting them into batches changes not one bit
    for one, other in zip(whole.compute(), merged.compute(), strict=True):
        assert repr(one) == repr(other)
    for one, other in zip(stream.compute(), parts.compute(), strict=True):
        assert one.num_samples == other.num_samples
        assert one.log_loss == pytest.approx(other.log_loss, rel=1e-12, nan_ok=True)
        assert one.ne == pytest.approx(other.ne, rel=1e-12, nan_ok=True)


def test_stream_state_round_trip() -> None:
    stream, loaded = BinaryMetrics(1), BinaryMetrics(1)
    stream.update(torch.tensor([[0.3], [-1.0]]), torch.tensor([[1.0], [0.0]]))
    loaded.load_state_dict(stream.state_dict())
    assert loaded.compute() == stream.compute()
    stream.reset()
    assert loaded.num_samples == 2
    assert stream.num_samples == 0


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"expected \[N, 2\] twice"):
        BinaryMetrics(2).update(torch.zeros(3, 1), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="expected three equal"):
        paired_bootstrap(torch.zeros(3), torch.zeros(4), torch.zeros(3))
    with pytest.raises(ValueError, match="one class"):
        paired_bootstrap(torch.zeros(3), torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match="same tasks"):
        BinaryMetrics(2).merge(BinaryMetrics(1))


def noisy_predictors(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(n, generator=generator, dtype=torch.float64)
    labels = (torch.rand(n, generator=generator) < torch.sigmoid(truth)).double()
    noise_a, noise_b = torch.randn(2, n, generator=generator, dtype=torch.float64) * 0.3
    return truth + noise_a, truth + noise_b, labels


def test_bootstrap_is_seeded_and_does_not_depend_on_the_chunk() -> None:
    a, b, y = noisy_predictors(400, 0)
    one = paired_bootstrap(a, b, y, num_resamples=150, seed=3, chunk=150)
    assert one == paired_bootstrap(a, b, y, num_resamples=150, seed=3, chunk=150)
    assert one != paired_bootstrap(a, b, y, num_resamples=150, seed=4, chunk=150)
    other = paired_bootstrap(a, b, y, num_resamples=150, seed=3, chunk=7)
    assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=1e-12)


def test_bootstrap_difference_is_the_difference_of_ne_and_signs_swap() -> None:
    a, b, y = noisy_predictors(300, 5)
    ab = paired_bootstrap(a, b, y, num_resamples=200)
    ba = paired_bootstrap(b, a, y, num_resamples=200)
    assert ab.difference == pytest.approx(normalized_entropy(a, y) - normalized_entropy(b, y), abs=1e-12)
    assert (ab.low, ab.high) == pytest.approx((-ba.high, -ba.low), abs=1e-12)


def test_bootstrap_leaves_out_resamples_of_one_class() -> None:
    """One positive in four: a third of the resamples have none, and no NE."""
    found = paired_bootstrap(torch.zeros(4), torch.ones(4), torch.tensor([1.0, 0.0, 0.0, 0.0]), num_resamples=200)
    assert math.isfinite(found.low)
    assert math.isfinite(found.high)


def test_bootstrap_covers_zero_at_the_stated_rate_when_there_is_no_difference() -> None:
    """Two equally noisy predictors: the 90 % interval must miss zero in about 10 % of worlds, not in 0 % or 50 %."""
    missed = sum(
        paired_bootstrap(*noisy_predictors(300, seed), num_resamples=200, confidence=0.9).excludes_zero
        for seed in range(200)
    )
    assert 8 <= missed <= 34
