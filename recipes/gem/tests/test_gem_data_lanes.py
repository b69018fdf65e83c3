"""Row groups split across ranks: each decodes its own, nothing is lost or repeated, and steps do not depend on it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemworks.gem.config import DataConfig
from gemworks.gem.data import Loader, ParquetSource, Synthetic, SyntheticSpec, open_loader
from gemworks.gem.data.lanes import Lanes
from gemworks.gem.data.parquet_schema import ParquetSchema
from gemworks.gem.data.parquet_write import write_schema, write_table
from gemworks.gem.data.shared_cache import SharedCache
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.reference


class Grouped:
    """Row groups of given sizes; only their numbers of rows matter here."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = np.array(sizes, dtype=np.int64)
        self.splits = ("train",)
        self.schema = None

    def num_samples(self, split: str) -> int:
        return int(self.sizes.sum())

    def row_groups(self, split: str) -> np.ndarray:
        return self.sizes

    def read(self, split: str, rows_B: np.ndarray) -> None: ...

    def fingerprint(self) -> dict[str, int]:
        return {"num_samples": self.num_samples("train")}


def ranks(source: object, world_size: int, global_batch: int, **options: Any) -> list[Loader]:
    return [
        Loader(
            source,  # pyright: ignore[reportArgumentType]
            "train",
            batch_size=global_batch // world_size,
            rank=rank,
            world_size=world_size,
            prefetch=0,
            **options,
        )
        for rank in range(world_size)
    ]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    per_lane=st.integers(1, 5),
    window=st.sampled_from([0, 1, 7, 64]),
    epoch=st.integers(0, 2),
)
def test_a_step_is_the_same_for_1_2_and_4_ranks_and_an_epoch_holds_every_row_once(
    sizes: list[int], per_lane: int, window: int, epoch: int
):
    source, num_lanes = Grouped(sizes), 4
    steps_of: list[list[list[int]]] = []
    for world_size in (1, 2, 4):
        loaders = ranks(source, world_size, num_lanes * per_lane, num_lanes=num_lanes, shuffle_window=window)
        steps = []
        for position in range(0, source.num_samples("train"), num_lanes * per_lane):
            parts = [loader.rows_at(epoch, position) for loader in loaders]
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            steps.append(np.concatenate(parts).tolist())
        assert len(steps) == len(loaders[0])
        steps_of.append(steps)
    assert steps_of[0] == steps_of[1] == steps_of[2]
    assert sorted(row for step in steps_of[0] for row in step) == list(range(source.num_samples("train")))


def test_lanes_move_through_time_together():
    lanes = Lanes(np.full(12, 5), 4)
    assert lanes.num_common == 15
    for place in range(15):
        rows = [int(lanes.rows_of_lane(lane, epoch=0, first=place, last=place + 1)[0]) for lane in range(4)]
        assert (
            max(rows) - min(rows) == 15
        )  # three row groups apart at most: never the head of one and the end of another


def test_lanes_are_balanced_to_within_a_row_group():
    lanes = Lanes(np.array([100, 1, 1, 1] * 10), 4)
    assert int(lanes.num_rows_L.max() - lanes.num_rows_L.min()) <= 100


def test_a_cache_makes_what_two_threads_want_once_and_forgets_what_failed():
    cache: SharedCache[int] = SharedCache(2)
    begun, go = threading.Event(), threading.Event()
    made: list[str] = []

    def slow() -> int:
        made.append("slow")
        begun.set()
        assert go.wait(10)
        return 1

    def fail() -> int:
        made.append("fail")
        raise OSError("no disk")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cache.get, "a", slow)
        assert begun.wait(10)
        second = threads.submit(cache.get, "a", slow)
        go.set()
        assert (first.result(), second.result(), made) == (1, 1, ["slow"])
    for _ in range(2):
        with pytest.raises(OSError, match="no disk"):
            cache.get("b", fail)
    assert made == ["slow", "fail", "fail"]
    cache.get("c", lambda: 3)
    cache.get("a", fail)  # used last: "c" goes next
    cache.get("d", lambda: 4)
    assert (cache.get("a", lambda: 5), cache.get("c", lambda: 6)) == (1, 6)


def test_shuffling_stays_in_a_window_of_its_lane_and_differs_between_epochs():
    lanes = Lanes(np.full(8, 10), 2, shuffle_window=20)
    plain = Lanes(np.full(8, 10), 2)
    first, second = (lanes.rows_of_lane(0, epoch=epoch, first=0, last=40) for epoch in (0, 1))
    assert first.tolist() != second.tolist()
    in_order = plain.rows_of_lane(0, epoch=0, first=0, last=40)
    for start in (0, 20):
        window = slice(start, start + 20)
        assert sorted(first[window]) == in_order[window].tolist() != first[window].tolist()


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    """210 samples in 3 files, row groups of 10 and uneven ends."""
    source = Synthetic(SyntheticSpec(num_samples=210, max_length=4, num_id_fields=1))
    declared = ParquetSchema(source.schema)
    write_schema(tmp_path, declared)
    for number, (first, last) in enumerate([(0, 95), (95, 100), (100, 210)]):
        table = source.table("train", np.arange(first, last))
        write_table(tmp_path / f"train/part-{number}.parquet", declared, table, row_group_samples=10)
    return tmp_path


class Watched(ParquetSource):
    """Counts what it decodes."""

    decoded: list[int]

    def _decode(self, split: str, index: int):
        self.decoded = [*getattr(self, "decoded", []), index]
        return super()._decode(split, index)


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_decodes_its_own_row_groups_once(data_set: Path, world_size: int):
    decoded: list[list[int]] = []
    seen: list[int] = []
    for rank in range(world_size):
        source = Watched(data_set)
        loader = Loader(
            source, "train", batch_size=16 // world_size, rank=rank, world_size=world_size, num_lanes=4, prefetch=0
        )
        seen += [i for batch in loader for i in batch.sample_ids_B.tolist()]
        decoded.append(source.decoded)
    assert sorted(seen) == list(range(210))
    num_groups = len(ParquetSource(data_set).row_groups("train"))
    assert sorted({g for part in decoded for g in part}) == list(range(num_groups))
    # Only the uneven end, at most one row group of each lane and those of its last step, is read by several ranks.
    shared = [g for g in range(num_groups) if sum(g in part for part in decoded) > 1]
    assert len(shared) <= 2 * 4
    assert min(shared, default=num_groups) >= num_groups - 2 * 4
    for part in decoded:
        assert max(part.count(g) for g in part) == 1


def test_resume_with_another_number_of_ranks_and_lanes_kept(data_set: Path):
    source = ParquetSource(data_set)

    def loaders(world_size: int) -> list[Loader]:
        return ranks(source, world_size, 16, num_lanes=4, shuffle_window=40)

    def step_of(parts: tuple) -> list[int]:
        return [i for part in parts for i in part.sample_ids_B.tolist()]

    whole = [step_of(parts) for parts in zip(*loaders(1), strict=True)]
    two = loaders(2)
    begun = [iter(loader) for loader in two]
    got = [step_of(tuple(next(part) for part in begun)) for _ in range(5)]
    four = loaders(4)
    for loader in four:
        loader.load_state_dict(two[0].state_dict())
    got += [step_of(parts) for parts in zip(*four, strict=True)]
    assert got == whole
    with pytest.raises(ValueError, match="num_lanes was 4 when saved and is 2 now"):
        ranks(source, 2, 16, num_lanes=2, shuffle_window=40)[0].load_state_dict(two[0].state_dict())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_neither_order_nor_values(data_set: Path, threads: int):
    def ids(prefetch: int) -> list[list[int]]:
        loader = Loader(
            ParquetSource(data_set),
            "train",
            batch_size=12,
            shuffle_window=50,
            prefetch=prefetch,
            prefetch_threads=threads,
        )
        return [batch.event_ids.values().tolist() + batch.sample_ids_B.tolist() for batch in loader]

    assert ids(prefetch=4) == ids(prefetch=0)


@pytest.mark.parametrize(
    ("world_size", "batch_size", "num_lanes"),
    [(3, 8, 4), (2, 3, 4), (1, 8, 0)],
)
def test_lanes_that_do_not_fit_are_named(data_set: Path, world_size: int, batch_size: int, num_lanes: int):
    with pytest.raises(ValueError, match=rf"num_lanes: got {num_lanes}, expected a multiple of the number of ranks"):
        Loader(ParquetSource(data_set), "train", batch_size=batch_size, world_size=world_size, num_lanes=num_lanes)


def test_sources_without_row_groups_have_no_lanes():
    source = Synthetic(SyntheticSpec(num_samples=64, max_length=4))
    with pytest.raises(ValueError, match=r"Synthetic has no row groups to deal; set data\.num_lanes=1"):
        open_loader(source, DataConfig(num_lanes=4), "train")


def test_several_ranks_without_lanes_are_told_what_it_costs(data_set: Path):
    with pytest.warns(UserWarning, match=r"each of 2 ranks decodes every row group; set it to a multiple of 2"):
        Loader(ParquetSource(data_set), "train", batch_size=8, world_size=2)
