"""From columns to a batch: right values for any rows, empty things included, and refusals that say why."""

import numpy as np
import pytest
import torch
from gemworks.gem.data.checks import apply_id_policy, check_event_times, check_finite, check_labels, check_offsets
from gemworks.gem.data.hashing import hash_u64, permutation, uniform
from gemworks.gem.data.table import EventColumns, IdColumn, Slices, Table, bucket
from gemworks.gem.schema import EventType, IdFeature, Schema
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.reference
COLOR = IdFeature(name="color", num_ids=50, table="color")
SCHEMA = Schema(
    ids=(COLOR, IdFeature(name="tags", num_ids=50, table="tags")),
    dense_names=("price",),
    events=(EventType(name="view", ids=(COLOR,), float_names=("dwell", "price")),),
    tasks=("click",),
)


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def make_table(tag_lists: list[list[int]], view_lists: list[list[int]]) -> Table:
    """One sample per pair of lists; views carry their id as colour, time and float."""
    num = len(tag_lists)
    tags = np.array([t for tags in tag_lists for t in tags], dtype=np.int64)
    views = np.array([v for views in view_lists for v in views], dtype=np.int64)
    return Table(
        ids={
            "color": IdColumn.single(np.arange(num, dtype=np.int64)),
            "tags": IdColumn(tags, Slices.packed(np.array([len(t) for t in tag_lists], dtype=np.int64))),
        },
        events={
            "view": EventColumns(
                {"color": views},
                np.stack([views, -views], axis=1).astype(np.float32),
                views,
                Slices.packed(np.array([len(v) for v in view_lists], dtype=np.int64)),
            )
        },
        dense_NC=np.arange(num, dtype=np.float32)[:, None],
        timestamps_N=np.full(num, 100, dtype=np.int64),
        labels_NK=np.zeros((num, 1), dtype=np.float32),
        sample_ids_N=np.arange(num, dtype=np.int64) * 10,
    )


LISTS = st.lists(
    st.tuples(st.lists(st.integers(0, 49), max_size=3), st.lists(st.integers(0, 49), max_size=9).map(sorted)),
    max_size=7,
)


@settings(max_examples=60, deadline=None)
@given(lists=LISTS, data=st.data())
def test_a_batch_holds_exactly_the_chosen_rows(lists: list[tuple[list[int], list[int]]], data: st.DataObject):
    table = make_table([tags for tags, _ in lists], [views for _, views in lists])
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=9)) if lists else []
    batch = table.batch(SCHEMA, np.array(rows, dtype=np.int64))
    assert batch.num_samples == len(rows)
    assert batch.sample_ids_B.tolist() == [10 * r for r in rows]
    tags, views = batch.ids["tags"], batch.events["view"]
    event_ids = batch.event_ids["view/color"]
    assert torch.equal(event_ids.offsets(), views.offsets_S)
    for place, row in enumerate(rows):
        tag_part = slice(int(tags.offsets()[place]), int(tags.offsets()[place + 1]))
        view_part = slice(int(views.offsets_S[place]), int(views.offsets_S[place + 1]))
        assert tags.values()[tag_part].tolist() == lists[row][0]
        assert views.timestamps_T[view_part].tolist() == lists[row][1]
        assert event_ids.values()[view_part].tolist() == lists[row][1]
        assert views.floats_TC[view_part].tolist() == [[v, -v] for v in lists[row][1]]
    longest = max((len(lists[r][1]) for r in rows), default=0)
    assert views.max_length == bucket(longest)
    assert views.max_length >= longest
    # Selecting and joining tables keeps all of it.
    array = np.array(rows, dtype=np.int64)
    joined = Table.concat([table.select(array), table.select(array[::-1].copy())])
    again = joined.batch(SCHEMA, np.arange(len(rows), dtype=np.int64))
    assert torch.equal(again.event_ids.values(), batch.event_ids.values())
    back = joined.batch(SCHEMA, np.arange(len(rows), 2 * len(rows), dtype=np.int64)[::-1].copy())
    assert torch.equal(back.ids.values(), batch.ids.values())
    assert torch.equal(back.events["view"].offsets_S, views.offsets_S)


def test_the_per_key_sums_are_those_torchrec_computes():
    batch = make_table([[1], [], [2, 3]], [[4, 5], [], [6]]).batch(SCHEMA, int64(2, 0, 1))
    lengths = batch.ids.lengths().view(2, 3)
    assert batch.ids.length_per_key() == lengths.sum(dim=1).tolist()
    assert batch.ids.offset_per_key() == [0, 3, 6]
    assert batch.event_ids.length_per_key() == [3]


def test_an_empty_batch_is_legal():
    batch = make_table([[1]], [[2]]).batch(SCHEMA, int64())
    assert (batch.num_samples, batch.ids.stride(), batch.events["view"].max_length) == (0, 0, 1)
    assert batch.events["view"].floats_TC.shape == (0, 2)
    assert batch.to("cpu").dense_BC.shape == (0, 1)


def test_all_empty_sequences_are_legal():
    """J3's kind: no sample has any event."""
    batch = make_table([[], []], [[], []]).batch(SCHEMA, int64(0, 1))
    view = batch.events["view"]
    assert (view.offsets_S.tolist(), view.max_length, view.timestamps_T.shape) == ([0, 0, 0], 1, (0,))
    assert batch.event_ids["view/color"].lengths().tolist() == [0, 0]
    assert batch.ids["color"].values().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (int64(0, 3, 2, 4), "view: offsets fall from 3 to 2 at row 1; expected a running sum"),
        (int64(-1, 2, 4), r"view: offsets\[0\] is -1, expected 0"),
        (int64(0, -2, 4), "view: offsets fall from 0 to -2 at row 0"),
        (int64(0, 2), "view: the last offset is 2 but there are 4 values; the file is truncated"),
        (int64(), "view: offsets must be one-dimensional with at least one entry"),
    ],
)
def test_bad_offsets_are_refused(offsets: np.ndarray, message: str):
    with pytest.raises(ValueError, match=message):
        check_offsets(offsets, 4, name="view")
    with pytest.raises(ValueError, match=message):
        Slices.from_offsets(offsets, 4, name="view")


def test_ids_outside_the_table_are_refused_or_hashed():
    values, rows = int64(7, 50, -3, 10**15), int64(4, 5, 6, 6)
    message = r"log, row 5: id 50 of feature 'color' is outside table 'color' with 50 rows \(valid: 0 to 49\); raise"
    with pytest.raises(ValueError, match=message):
        apply_id_policy(values, COLOR, "error", rows_V=rows, where="log")
    with pytest.raises(ValueError, match="row 6: id -3 of feature 'color'"):
        apply_id_policy(int64(-3), COLOR, "error", rows_V=int64(6), where="log")
    hashed = apply_id_policy(values, COLOR, "hash", rows_V=rows, where="log")
    assert hashed[0] == 7
    assert ((hashed >= 0) & (hashed < 50)).all()
    assert hashed.tolist() == apply_id_policy(values, COLOR, "hash", rows_V=rows, where="log").tolist()
    spread = apply_id_policy(np.arange(1000, 6000), COLOR, "hash", rows_V=np.zeros(5000, dtype=np.int64), where="log")
    assert np.bincount(spread, minlength=50).min() > 60
    with pytest.raises(ValueError, match="id_policy: got 'drop', expected 'error' or 'hash'"):
        apply_id_policy(values, COLOR, "drop", rows_V=rows, where="log")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("bad", [2.0, -1.0, 0.5, float("nan")])
def test_labels_outside_zero_and_one_are_refused(bad: float):
    labels = np.zeros((3, 2))
    labels[1, 1] = bad
    with pytest.raises(ValueError, match=rf"log, row 1: label 'buy' is {bad}, expected 0 or 1; binarise"):
        check_labels(labels, ("click", "buy"), where="log")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_no_numbers_are_refused(bad: float):
    values = np.zeros((3, 2))
    values[2, 0] = bad
    with pytest.raises(ValueError, match=rf"log, row 2: column 'price' holds {bad}, expected a finite number; fill"):
        check_finite(values, ("price", "dwell"), where="log")


def test_event_times_that_fall_or_leak_are_refused():
    lengths, now, rows = int64(2, 1), int64(10, 5), int64(7, 8)
    check_event_times(int64(3, 3, 1), lengths, now, name="t", rows_N=rows, where="log")
    with pytest.raises(ValueError, match="log, row 7: column 't' falls from 4 to 3; sort the events"):
        check_event_times(int64(4, 3, 1), lengths, now, name="t", rows_N=rows, where="log")
    with pytest.raises(ValueError, match="log, row 8: column 't' holds an event at 5, the sample itself is at 5"):
        check_event_times(int64(3, 4, 5), lengths, now, name="t", rows_N=rows, where="log")


def test_hashed_numbers_are_even_and_independent_of_shape():
    numbers = uniform(3, np.arange(20000))
    assert numbers.mean() == pytest.approx(0.5, abs=0.01)
    assert np.corrcoef(numbers[:-1], numbers[1:])[0, 1] == pytest.approx(0, abs=0.03)
    grid = hash_u64(1, np.arange(4)[:, None], np.arange(3)[None, :])
    assert grid[2, 1] == hash_u64(1, 2, 1)[0]
    assert sorted(permutation(17, 5).tolist()) == list(range(17))
