"""The loader: every sample once, the same order after a resume, fair splits over ranks, a thread that behaves."""

import json
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from gemworks.gem.config import DataConfig
from gemworks.gem.data import Loader, Synthetic, SyntheticSpec, open_loader, open_source
from gemworks.gem.schema import Batch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.reference
SOURCE = Synthetic(SyntheticSpec(num_samples=203, max_length=8, num_id_fields=1, num_dense=1))


def loader(**changes: Any) -> Loader:
    return Loader(SOURCE, "train", **{"batch_size": 16, "prefetch": 0, **changes})


def sample_ids(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch.sample_ids_B.tolist()]


def test_time_order_without_a_window():
    assert sample_ids(loader()) == list(range(203))
    assert len(loader()) == 13


@settings(max_examples=40, deadline=None)
@given(
    window=st.integers(0, 250),
    batch_size=st.integers(1, 210),
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
def test_ranks_together_hold_every_sample_once_and_pair_up_with_one_process(
    window: int, batch_size: int, world_size: int, epoch: int
):
    one = loader(batch_size=batch_size * world_size, shuffle_window=window)
    ranks = [
        loader(batch_size=batch_size, shuffle_window=window, rank=r, world_size=world_size) for r in range(world_size)
    ]
    seen: list[int] = []
    assert len({len(r) for r in ranks} | {len(one)}) == 1
    for step in range(len(one)):
        position = step * batch_size * world_size
        parts = [r.rows_at(epoch, position) for r in ranks]
        assert max(len(p) for p in parts) <= batch_size
        assert max(len(p) for p in parts) - min(len(p) for p in parts) <= 1
        joined = np.concatenate(parts)
        assert joined.tolist() == one.rows_at(epoch, position).tolist()
        seen += joined.tolist()
    assert sorted(seen) == list(range(203))
    if window > 1:
        assert all(row // window == place // window for place, row in enumerate(seen))
    else:
        assert seen == list(range(203))


def test_shuffling_differs_between_epochs_and_seeds_and_repeats_with_the_same():
    a = loader(shuffle_window=50)
    first, second = sample_ids(a), sample_ids(a)
    assert first != second
    assert first != list(range(203))
    assert sample_ids(loader(shuffle_window=50)) == first
    assert sample_ids(loader(shuffle_window=50, seed=1)) != first
    windows = [[i - start for i in first[start : start + 50]] for start in (0, 50, 100, 150)]
    assert all(sorted(window) == list(range(50)) for window in windows)
    assert len({tuple(window) for window in windows}) == 4, "each window has an order of its own"


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("stop_after", [0, 1, 5, 12, 13])
def test_resume_at_any_batch_boundary_gives_the_rest(prefetch: int, stop_after: int):
    """L4: the reader's position survives; two epochs, broken after `stop_after` batches of the second."""
    unbroken = loader(shuffle_window=32)
    expected = sample_ids(unbroken) + sample_ids(unbroken)
    broken = loader(shuffle_window=32, prefetch=prefetch)
    got = sample_ids(broken)
    iterator = iter(broken)
    got += sample_ids(next(iterator) for _ in range(stop_after))
    state = json.loads(json.dumps(broken.state_dict()))
    del iterator
    resumed = loader(shuffle_window=32, prefetch=prefetch)
    resumed.load_state_dict(state)
    got += sample_ids(resumed)
    assert got == expected
    assert (resumed.epoch, resumed.position) == (2, 0)


def test_resume_with_another_number_of_ranks():
    two = [loader(batch_size=16, rank=r, world_size=2, shuffle_window=64) for r in range(2)]
    iterators = [iter(r) for r in two]
    got = [i for _ in range(3) for it in iterators for i in next(it).sample_ids_B.tolist()]
    assert two[0].state_dict() == two[1].state_dict()
    three = [loader(batch_size=16, rank=r, world_size=3, shuffle_window=64) for r in range(3)]
    for r in three:
        r.load_state_dict(two[0].state_dict())
    for parts in zip(*three, strict=True):
        got += sample_ids(parts)
    assert got == sample_ids(loader(shuffle_window=64))


def test_leaving_a_loop_early_keeps_the_position():
    a = loader(prefetch=2)
    for batch in a:
        if int(batch.sample_ids_B[0]) >= 32:
            break
    assert a.position == 48
    assert sample_ids(a) == list(range(48, 203))


def test_ranks_may_get_an_empty_batch():
    """M2: more ranks than samples in the last step; the empty batch is whole and legal."""
    ranks = [loader(batch_size=50, rank=r, world_size=4) for r in range(4)]
    last = [list(r)[-1] for r in ranks]
    assert sorted(b.num_samples for b in last) == [0, 1, 1, 1]
    empty = next(b for b in last if b.num_samples == 0)
    assert empty.ids.keys() == last[-1].ids.keys()
    assert empty.events["type_0"].offsets_S.tolist() == [0]
    assert empty.ids.stride() == 0


class Failing(Synthetic):
    """Raises when a given row is read; counts reads."""

    def __init__(self, bad_row: int) -> None:
        super().__init__(SOURCE.spec)
        self.bad_row, self.reads = bad_row, 0

    def read(self, split: str, rows_B: np.ndarray) -> Batch:
        self.reads += 1
        if self.bad_row in rows_B:
            raise RuntimeError(f"row {self.bad_row} is broken")
        return super().read(split, rows_B)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_reading_error_arrives_after_the_batches_before_it(prefetch: int):
    batches = iter(Loader(Failing(40), "train", batch_size=16, prefetch=prefetch))
    assert [len(next(batches).sample_ids_B) for _ in range(2)] == [16, 16]
    with pytest.raises(RuntimeError, match="row 40 is broken"):
        next(batches)


def prefetch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("gemworks-prefetch")]


def test_the_thread_reads_ahead_only_so_far_and_ends_with_its_iterator():
    source = Failing(-1)
    batches = iter(Loader(source, "train", batch_size=1, prefetch=3))
    next(batches)
    end = time.monotonic() + 60
    while source.reads < 4 and time.monotonic() < end:  # the batch that was taken, and three ahead
        time.sleep(0.01)
    time.sleep(0.3)
    assert 4 <= source.reads <= 6
    assert len(prefetch_threads()) == 1
    del batches
    assert not prefetch_threads()
    list(Loader(source, "train", batch_size=16, prefetch=3))
    assert not prefetch_threads()


def test_a_state_of_other_data_or_settings_is_refused():
    state = loader().state_dict()
    other = Loader(Synthetic(SyntheticSpec(num_samples=203, max_length=16)), "train", batch_size=16)
    with pytest.raises(ValueError, match=r"fingerprint was .* when saved"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="seed was 0 when saved and is 5 now"):
        loader(seed=5).load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle_window was 0"):
        loader(shuffle_window=9).load_state_dict(state)
    with pytest.raises(ValueError, match="it is no loader's state"):
        loader().load_state_dict({"epoch": 1})
    with pytest.raises(ValueError, match="position 999"):
        loader().load_state_dict({**state, "position": 999})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size: got 0, expected at least 1"),
        ({"shuffle_window": -1}, "shuffle_window: got -1"),
        ({"prefetch": -1}, "prefetch: got -1"),
        ({"rank": 2, "world_size": 2}, "rank, world_size: got 2 and 2"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        loader(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message is for machines without CUDA")
def test_pinned_memory_needs_cuda():
    with pytest.raises(ValueError, match="pass pin_memory=False"):
        loader(pin_memory=True)


@pytest.mark.gpu
def test_pinned_batches_move_to_the_device():
    batch = next(iter(loader(pin_memory=True, prefetch=2)))
    assert batch.dense_BC.is_pinned()
    assert batch.ids.values().is_pinned()
    assert batch.events["type_0"].timestamps_T.is_pinned()
    moved = batch.to("cuda", non_blocking=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert moved.event_ids.length_per_key() == batch.event_ids.length_per_key()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(moved.dense_BC.cpu(), batch.dense_BC)


def test_only_the_train_part_is_shuffled():
    config = DataConfig(source="synthetic", num_samples=203, max_length=8, shuffle_window=64, batch_size=16)
    source = open_source(config)
    assert sample_ids(open_loader(source, config, "train")) != list(range(203))
    assert sample_ids(open_loader(source, config, "valid")) == list(range(203, 228))


def test_wrong_splits_are_named():
    with pytest.raises(ValueError, match="split: got 'dev', expected one of train, valid, test"):
        Loader(SOURCE, "dev", batch_size=4)
