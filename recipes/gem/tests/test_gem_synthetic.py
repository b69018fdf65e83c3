"""Synthetic data: reproducible anywhere, lengths by their law, and a signal only in order and timing."""

import numpy as np
import pytest
import torch
from gemworks.gem.config import DataConfig
from gemworks.gem.data import Synthetic, SyntheticSpec, open_source
from gemworks.gem.data.synthetic import LengthLaw
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

pytestmark = pytest.mark.reference
SOURCE = Synthetic(SyntheticSpec(num_samples=16384, max_length=64))
NUM = 8192


def rows(num: int) -> np.ndarray:
    return np.arange(num, dtype=np.int64)


def events_of(source: Synthetic, split: str, num: int, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sample, class and age in seconds of every event of one type, from the batch alone."""
    batch = source.read(split, rows(num))
    events = batch.events[name]
    sample_T = torch.repeat_interleave(events.offsets_S.diff())
    age_T = batch.timestamps_B[sample_T] - events.timestamps_T
    category_T = batch.event_ids[f"{name}/category"].values()
    assert torch.equal(batch.event_ids[f"{name}/item"].values() % 16, category_T)
    return sample_T.numpy(), (category_T % 4).numpy(), age_T.numpy()


def test_a_sample_does_not_depend_on_its_batch():
    whole = SOURCE.read("train", rows(40))
    for part in (np.array([7]), np.array([39, 0, 7])):
        batch = SOURCE.read("train", part)
        assert torch.equal(batch.labels_BK, whole.labels_BK[part])
        assert torch.equal(batch.dense_BC, whole.dense_BC[part])
        for name, events in batch.events.items():
            other = whole.events[name]
            for place, row in enumerate(part.tolist()):
                mine = slice(int(events.offsets_S[place]), int(events.offsets_S[place + 1]))
                theirs = slice(int(other.offsets_S[row]), int(other.offsets_S[row + 1]))
                assert torch.equal(events.timestamps_T[mine], other.timestamps_T[theirs])
                items, all_items = (b.event_ids[f"{name}/item"].values() for b in (batch, whole))
                assert torch.equal(items[mine], all_items[theirs])


@pytest.mark.parametrize("block_events", [1, 7, 100])
def test_blocks_change_nothing(block_events: int, monkeypatch: pytest.MonkeyPatch):
    spec = SyntheticSpec(num_samples=64, max_length=16, num_event_fields=3)
    whole = Synthetic(spec).read("train", rows(40))
    bayes_BK = Synthetic(spec).bayes_probabilities("train", rows(40))
    monkeypatch.setattr("gemworks.gem.data.synthetic.BLOCK_EVENTS", block_events)
    batch = Synthetic(spec).read("train", rows(40))
    assert torch.equal(batch.event_ids.values(), whole.event_ids.values())
    for name, events in batch.events.items():
        assert torch.equal(events.timestamps_T, whole.events[name].timestamps_T)
        assert torch.equal(events.floats_TC, whole.events[name].floats_TC)
    assert np.array_equal(Synthetic(spec).bayes_probabilities("train", rows(40)), bayes_BK)


def test_ids_of_a_batch_lie_in_one_array_that_no_other_batch_shares():
    one, two = (SOURCE.read("train", rows(4)).event_ids.values() for _ in range(2))
    assert one.data_ptr() != two.data_ptr()
    one.zero_()
    assert two.any()


def test_seeds_differ_and_splits_do_not_overlap():
    other = Synthetic(SyntheticSpec(num_samples=16384, max_length=64, seed=1))
    assert not torch.equal(SOURCE.read("train", rows(64)).labels_BK, other.read("train", rows(64)).labels_BK)
    ids = [SOURCE.read(s, rows(SOURCE.num_samples(s))[[0, -1]]).sample_ids_B.tolist() for s in SOURCE.splits]
    assert ids == [[0, 16383], [16384, 18431], [18432, 20479]]


@pytest.mark.parametrize(("law", "least", "mean"), [("uniform", 1, 64.5), ("uniform_0.7", 52, 90.0), ("zipf", 1, None)])
def test_lengths_follow_their_law(law: LengthLaw, least: int, mean: float | None):
    source = Synthetic(SyntheticSpec(num_samples=NUM, max_length=128, length_law=law))
    lengths = source.read("train", rows(NUM)).events["type_1"].offsets_S.diff().numpy()
    assert (lengths.min(), lengths.max()) == (least, 128)
    n = np.arange(1, 129)
    if mean is None:
        mean = float((n * n**-1.2).sum() / (n**-1.2).sum())
        assert (lengths == 1).mean() == pytest.approx(1 / (n**-1.2).sum(), abs=0.02)
    assert lengths.mean() == pytest.approx(mean, rel=0.04)
    assert source.describe().startswith(f"synthetic: seed 0, lengths {law}, mean ")


def test_events_are_in_order_and_before_their_sample():
    batch = SOURCE.read("train", rows(500))
    for events in batch.events.values():
        sample_T = torch.repeat_interleave(events.offsets_S.diff())
        same_sample = sample_T[1:] == sample_T[:-1]
        assert bool((events.timestamps_T.diff()[same_sample] >= 0).all())
        assert bool((events.timestamps_T < batch.timestamps_B[sample_T]).all())


def test_the_bayes_probability_can_be_read_from_the_batch():
    """A in the last hour speaks for, B against: nothing hidden is needed to reach the stated optimum."""
    evidence_B = np.zeros(NUM)
    for name in ("type_0", "type_1"):
        sample_T, class_T, age_T = events_of(SOURCE, "test", 2048, name)
        recent_T = age_T <= 3600
        assert (recent_T | (age_T >= 86400)).all()
        signs_T = recent_T * ((class_T == 0).astype(float) - (class_T == 1))
        evidence_B += np.bincount(sample_T, weights=signs_T, minlength=NUM)
    sure_B = 1 / (1 + np.exp(-np.log(0.9 / 0.1) * evidence_B[:2048]))
    expected_BK = np.stack([0.05 + 0.9 * sure_B, 0.15 + 0.7 * sure_B], axis=1)
    assert np.allclose(SOURCE.bayes_probabilities("test", rows(2048)), expected_BK)


def test_bayes_probabilities_are_calibrated():
    p_BK = SOURCE.bayes_probabilities("train", rows(NUM))
    y_BK = SOURCE.read("train", rows(NUM)).labels_BK.numpy()
    loss_BK = -np.log(np.where(y_BK == 1, p_BK, 1 - p_BK)) / np.log(2)
    stated = SOURCE.bayes_ne("train", num_samples=NUM)
    error_K = loss_BK.std(axis=0) / np.sqrt(NUM)
    for column, task in enumerate(("click", "conversion")):
        assert abs(loss_BK[:, column].mean() - stated[task]) < 4 * error_K[column]
        assert 0.2 < stated[task] < 0.7


def test_each_bayes_probability_is_the_share_of_ones_where_it_is_stated():
    """Short histories take few values of the probability, each with thousands of samples."""
    source = Synthetic(SyntheticSpec(num_samples=16384, max_length=4))
    p_B = source.bayes_probabilities("train", rows(16384))[:, 0].round(9)
    y_B = source.read("train", rows(16384)).labels_BK[:, 0].numpy()
    common = [p for p, count in zip(*np.unique(p_B, return_counts=True), strict=True) if count > 500]
    assert len(common) >= 5
    for p in common:
        inside = p_B == p
        assert abs(y_B[inside].mean() - p) < 4 * np.sqrt(p * (1 - p) / inside.sum())


def bag_features(split: str, num: int) -> torch.Tensor:
    """What a model without order can know: counts per category and type, ids, dense columns, lengths."""
    batch = SOURCE.read(split, rows(num))
    parts = [batch.dense_BC]
    for name, events in batch.events.items():
        sample_T = torch.repeat_interleave(events.offsets_S.diff())
        counts = torch.zeros(num, 16)
        category_T = batch.event_ids[f"{name}/category"].values()
        counts.index_put_((sample_T, category_T), torch.ones(len(sample_T)), accumulate=True)
        floats = torch.zeros(num).index_add_(0, sample_T, events.floats_TC[:, 0])
        parts += [counts, floats[:, None], torch.log(events.offsets_S.diff().float())[:, None]]
    return torch.cat(parts, dim=1)


def test_an_order_blind_model_learns_nothing():
    torch.manual_seed(0)
    train, test = bag_features("train", NUM), bag_features("test", 2048)
    mean, deviation = train.mean(0), train.std(0)
    train, test = (train - mean) / deviation, (test - mean) / deviation
    y_train = SOURCE.read("train", rows(NUM)).labels_BK[:, 0]
    y_test = SOURCE.read("test", rows(2048)).labels_BK[:, 0]
    model = nn.Sequential(nn.Linear(train.shape[1], 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    for start in range(0, NUM, 64):
        loss = binary_cross_entropy_with_logits(model(train[start : start + 64])[:, 0], y_train[start : start + 64])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        ne = float(binary_cross_entropy_with_logits(model(test)[:, 0], y_test)) / np.log(2)
    assert 0.98 < ne < 1.1


def test_marginals_do_not_depend_on_the_label():
    y_B = SOURCE.read("train", rows(NUM)).labels_BK[:, 0].numpy()
    columns = bag_features("train", NUM).numpy()
    ages_B = []
    for name in ("type_0", "type_1"):
        sample_T, _, age_T = events_of(SOURCE, "train", NUM, name)
        ages_B.append(np.bincount(sample_T, weights=np.log1p(age_T)) / np.bincount(sample_T))
    columns = np.concatenate([columns, np.stack(ages_B, axis=1)], axis=1)
    ones, zeros = columns[y_B == 1], columns[y_B == 0]
    spread = np.sqrt(ones.var(axis=0) / len(ones) + zeros.var(axis=0) / len(zeros))
    assert np.abs((ones.mean(axis=0) - zeros.mean(axis=0)) / spread).max() < 4


def test_every_size_is_configurable():
    config = DataConfig(
        source="synthetic", num_samples=64, max_length=8, num_id_fields=3, num_ids=7, num_dense=2, num_event_types=3,
        num_event_fields=4,
    )  # fmt: skip
    source = open_source(config)
    schema, batch = source.schema, source.read("train", rows(16))
    assert (len(schema.ids), len(schema.dense_names), len(schema.events)) == (3, 2, 3)
    assert [f.name for f in schema.events[2].ids] == ["item", "category", "extra_0", "extra_1"]
    assert batch.ids.keys() == [f.name for f in schema.ids]
    assert batch.dense_BC.shape == (16, 2)
    for event in schema.events:
        for feature in event.ids:
            values = batch.event_ids[schema.event_key(event.name, feature.name)].values()
            assert 0 <= int(values.min()) <= int(values.max()) < feature.num_ids
    bare = Synthetic(SyntheticSpec(num_samples=64, num_id_fields=0, num_dense=0)).read("train", rows(4))
    assert (bare.ids.keys(), bare.dense_BC.shape) == ([], (4, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 1}, "num_samples: got 1, expected at least 8"),
        ({"num_event_fields": 1}, "num_event_fields: got 1, expected at least 2"),
        ({"num_items": 100}, "num_items: got 100, expected a positive multiple of 16"),
        ({"length_law": "normal"}, "length_law: got 'normal'"),
        ({"tilt": 0.5}, "tilt: got 0.5"),
        ({"flips": (0.6, 0.1)}, "pair_share, flips"),
    ],
)
def test_wrong_specs_are_named(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        SyntheticSpec(**changes)
