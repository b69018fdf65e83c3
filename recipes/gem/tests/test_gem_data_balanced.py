"""Base-batch shuffling in the reader: the same samples, evener batches, resumable, no word between ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gemworks.gem.config import DataConfig
from gemworks.gem.data import Loader, Synthetic, SyntheticSpec, open_loader
from gemworks.gem.data.balanced import BalancedLoader, join, num_tokens
from gemworks.gem.schema import Batch

B, WINDOW = 16, 4
SOURCE = Synthetic(SyntheticSpec(num_samples=700, max_length=64, length_law="zipf", seed=3))
TRAIN = SOURCE.num_samples("train")


def loaders(
    world_size: int, *, window: int = WINDOW, shuffle_window: int = 0, prefetch: int = 0
) -> list[BalancedLoader]:
    return [
        BalancedLoader(
            SOURCE,
            "train",
            balance_window=window,
            batch_size=B,
            rank=r,
            world_size=world_size,
            shuffle_window=shuffle_window,
            prefetch=prefetch,
        )
        for r in range(world_size)
    ]


def ids(batches: list[Batch]) -> list[list[int]]:
    return [b.sample_ids_B.tolist() for b in batches]


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_epoch_has_the_samples_of_the_plain_reader_and_steps_of_the_same_size(world_size: int) -> None:
    plain = [
        list(Loader(SOURCE, "train", batch_size=B, rank=r, world_size=world_size, prefetch=0))
        for r in range(world_size)
    ]
    dealt = [list(x) for x in loaders(world_size)]
    for r in range(world_size):
        assert [b.num_samples for b in dealt[r]] == [b.num_samples for b in plain[r]]
        per_window = B * WINDOW
        a, b = (np.concatenate([x.sample_ids_B.numpy() for x in batches]) for batches in (plain[r], dealt[r]))
        for i in range(0, len(a), per_window):  # a sample moves inside its window and inside its rank alone
            assert set(a[i : i + per_window]) == set(b[i : i + per_window])
    assert any(x != y for x, y in zip(ids(plain[0]), ids(dealt[0]), strict=True))


def test_batches_of_a_window_are_evener_and_the_heaviest_comes_first() -> None:
    num_windows = TRAIN // (B * WINDOW)
    plain = [num_tokens(b) for b in Loader(SOURCE, "train", batch_size=B, prefetch=0)]
    dealt = [num_tokens(b) for b in loaders(1)[0]]
    spread = []
    for costs in (plain, dealt):
        windows = np.array(costs[: num_windows * WINDOW]).reshape(num_windows, WINDOW)
        spread.append(float((windows.max(1) / windows.mean(1)).mean()) - 1)
    assert spread[1] < 0.5 * spread[0]
    windows = np.array(dealt[: num_windows * WINDOW]).reshape(num_windows, WINDOW)
    assert (np.diff(windows, axis=1) <= 0).all()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("stop", [1, 5, 8])
def test_a_resumed_reader_goes_on_as_the_unbroken_one(stop: int, prefetch: int) -> None:
    unbroken = loaders(1, shuffle_window=50)[0]
    want = ids(list(unbroken)) + ids(list(unbroken))
    first = loaders(1, shuffle_window=50, prefetch=prefetch)[0]
    got = ids(list(itertools.islice(iter(first), stop)))
    assert first.num_given == stop * B
    second = loaders(1, shuffle_window=50, prefetch=prefetch)[0]
    second.load_state_dict(first.state_dict())
    got += ids(list(second)) + ids(list(second))
    assert got == want


def test_joined_batches_are_the_batch_of_the_joined_rows() -> None:
    rows = np.arange(40)
    whole = SOURCE.read("train", rows)
    parts = join([SOURCE.read("train", rows[a:b]) for a, b in ((0, 7), (7, 8), (8, 40))])
    for name in ("dense_BC", "timestamps_B", "labels_BK", "sample_ids_B"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))
    for a, b in ((whole.ids, parts.ids), (whole.event_ids, parts.event_ids)):
        assert a.keys() == b.keys()
        assert torch.equal(a.values(), b.values())
        assert torch.equal(a.lengths(), b.lengths())
    for name, e in whole.events.items():
        other = parts.events[name]
        for field in ("floats_TC", "timestamps_T", "offsets_S"):
            assert torch.equal(getattr(e, field), getattr(other, field))
        assert other.max_length == e.max_length


def test_the_configuration_chooses_it_for_training_alone() -> None:
    config = DataConfig(num_samples=700, max_length=64, batch_size=B, balance_window=WINDOW)
    assert isinstance(open_loader(SOURCE, config, "train"), BalancedLoader)
    assert not isinstance(open_loader(SOURCE, config, "valid"), BalancedLoader)
    assert not isinstance(open_loader(SOURCE, DataConfig(batch_size=B), "train"), BalancedLoader)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"a multiple of 8"):
        BalancedLoader(SOURCE, "train", balance_window=2, batch_size=12)
    with pytest.raises(ValueError, match="at least 2 steps"):
        BalancedLoader(SOURCE, "train", balance_window=1, batch_size=16)
    state = loaders(1)[0].state_dict()
    with pytest.raises(ValueError, match="balance_window was 4 when saved and is 2 now"):
        loaders(1, window=2)[0].load_state_dict(state)
    half = loaders(1)[0]
    next(iter(half))
    with pytest.raises(ValueError, match="in the middle of a balanced window"):
        loaders(2)[0].load_state_dict(half.state_dict())
    two = BalancedLoader(SOURCE, "train", balance_window=WINDOW, batch_size=half.batch_size // 2, world_size=2)
    with pytest.raises(ValueError, match=r"on 1 ranks when saved.* on 2 now"):
        two.load_state_dict(half.state_dict())  # as many samples a step, but dealt by two
    with pytest.raises(ValueError, match="balance_window"):
        DataConfig(balance_window=-1)
