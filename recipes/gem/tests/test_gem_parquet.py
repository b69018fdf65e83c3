"""Parquet data sets: written and read back equal, and every kind of bad file is named with place and fix."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gemworks.gem.config import DataConfig
from gemworks.gem.data import Loader, ParquetSource, Synthetic, SyntheticSpec, open_source
from gemworks.gem.data.parquet_schema import ParquetSchema, read_schema
from gemworks.gem.data.parquet_write import write_schema, write_table
from gemworks.gem.schema import EventType, IdFeature, Schema

pytestmark = pytest.mark.reference
USER = IdFeature(name="user", num_ids=10, table="user")
ITEM = IdFeature(name="item", num_ids=20, table="item")
DECLARED = ParquetSchema(
    Schema(
        ids=(USER, ITEM),
        dense_names=("price",),
        events=(EventType(name="view", ids=(ITEM,), float_names=("dwell",)),),
        tasks=("click",),
    ),
    {"view/item": "viewed"},
)
ROWS: dict[str, Any] = {
    "timestamp": [100, 110, 120],
    "click": [0, 1, 0],
    "price": [1.5, -2.0, 0.0],
    "user": [1, 2, 3],
    "item": pa.array([[4], [], [5, 6]]),
    "view/timestamp": pa.array([[10, 20, 20], [], [5]], pa.list_(pa.int64())),
    "viewed": pa.array([[1, 2, 3], [], [4]], pa.list_(pa.int32())),
    "view/dwell": pa.array([[0.5, 1.0, 1.5], [], [2.0]], pa.list_(pa.float32())),
}


def write(folder: Path, rows: dict[str, Any], *, split: str = "train", name: str = "part-0.parquet") -> Path:
    write_schema(folder, DECLARED)
    (folder / split).mkdir(exist_ok=True)
    pq.write_table(pa.table(rows), folder / split / name, row_group_size=2)
    return folder


def read_all(folder: Path, **options: Any) -> Any:
    source = ParquetSource(folder, **options)
    return source.read("train", np.arange(source.num_samples("train"), dtype=np.int64))


def test_a_hand_written_file_becomes_the_batch_it_says(tmp_path: Path):
    batch = read_all(write(tmp_path, ROWS))
    assert batch.timestamps_B.tolist() == [100, 110, 120]
    assert batch.labels_BK.tolist() == [[0], [1], [0]]
    assert batch.dense_BC.tolist() == [[1.5], [-2.0], [0.0]]
    assert batch.ids["user"].values().tolist() == [1, 2, 3]
    assert batch.ids["item"].lengths().tolist() == [1, 0, 2]
    assert batch.ids["item"].values().tolist() == [4, 5, 6]
    view = batch.events["view"]
    assert (view.offsets_S.tolist(), view.timestamps_T.tolist()) == ([0, 3, 3, 4], [10, 20, 20, 5])
    assert (view.floats_TC.tolist(), view.max_length) == ([[0.5], [1.0], [1.5], [2.0]], 4)
    assert batch.event_ids["view/item"].values().tolist() == [1, 2, 3, 4]
    assert batch.sample_ids_B.tolist() == [0, 1, 2]


def test_max_length_keeps_the_newest_events(tmp_path: Path):
    view = read_all(write(tmp_path, ROWS), max_length=2).events["view"]
    assert (view.offsets_S.tolist(), view.timestamps_T.tolist()) == ([0, 2, 2, 3], [20, 20, 5])


def test_written_data_reads_back_equal_across_files_and_row_groups(tmp_path: Path):
    source = Synthetic(SyntheticSpec(num_samples=104, max_length=8, num_id_fields=2))
    declared = ParquetSchema(source.schema)
    write_schema(tmp_path, declared)
    halves = (("a", np.arange(50)), ("b", np.arange(50, 104)))
    for name, rows in halves:
        write_table(tmp_path / f"train/{name}.parquet", declared, source.table("train", rows), row_group_samples=16)
    write_table(tmp_path / "test/a.parquet", declared, source.table("test", np.arange(13)))
    again = open_source(DataConfig(source="parquet", path=str(tmp_path), max_length=8))
    assert again.schema == source.schema
    assert (again.splits, again.num_samples("train"), again.num_samples("test")) == (("train", "test"), 104, 13)
    for one, two in zip(
        Loader(source, "train", batch_size=24, shuffle_window=40),
        Loader(again, "train", batch_size=24, shuffle_window=40),
        strict=True,
    ):
        assert torch.equal(one.sample_ids_B, two.sample_ids_B)
        assert torch.equal(one.ids.values(), two.ids.values())
        assert torch.equal(one.event_ids.values(), two.event_ids.values())
        assert torch.equal(one.event_ids.lengths(), two.event_ids.lengths())
        assert torch.equal(one.dense_BC, two.dense_BC)
        assert torch.equal(one.labels_BK, two.labels_BK)
        for name, events in one.events.items():
            assert torch.equal(events.floats_TC, two.events[name].floats_TC)
            assert torch.equal(events.timestamps_T, two.events[name].timestamps_T)
    empty = again.read("train", np.zeros(0, dtype=np.int64))
    assert (empty.num_samples, empty.event_ids.keys()) == (0, source.read("train", np.arange(1)).event_ids.keys())


def test_memory_is_bound_by_row_groups(tmp_path: Path):
    source = Synthetic(SyntheticSpec(num_samples=400, max_length=4, num_id_fields=1))
    declared = ParquetSchema(source.schema)
    write_schema(tmp_path, declared)
    write_table(tmp_path / "train/a.parquet", declared, source.table("train", np.arange(400)), row_group_samples=10)
    again = ParquetSource(tmp_path)
    for _ in Loader(again, "train", batch_size=16):
        assert len(again._cache) <= 8


def test_samples_without_ids_of_their_own_are_numbered_across_splits(tmp_path: Path):
    write(tmp_path, ROWS)
    write(tmp_path, ROWS, split="test")
    source = ParquetSource(tmp_path)
    assert source.read("test", np.array([2, 0])).sample_ids_B.tolist() == [5, 3]


def changed(**changes: Any) -> dict[str, Any]:
    return {**ROWS, **{key.replace("__", "/"): value for key, value in changes.items()}}


LISTS = pa.list_(pa.int64())
BAD_VALUES = [
    (
        changed(click=[0, 1, 2]),
        r"part-0\.parquet \(row group 1\), row 2: label 'click' is 2\.0, expected 0 or 1; binarise",
    ),
    (changed(price=[0.0, float("nan"), 1.0]), r"row 1: column 'price' holds nan, expected a finite number; fill"),
    (changed(price=[0.0, None, 1.0]), r"row 1: column 'price' holds a null; fill"),
    (changed(user=[1, 2, 10]), r"row 2: id 10 of feature 'user' is outside table 'user' with 10 rows"),
    (changed(user=[-1, 2, 3]), r"row 0: id -1 of feature 'user' is outside"),
    (changed(viewed=pa.array([[1, 2, 3], [], [20]], LISTS)), r"row 2: id 20 of feature 'item' is outside table 'item'"),
    (changed(viewed=pa.array([[1, 2], [], [4]], LISTS)), r"row 0: column 'viewed' lists 2 values but .* lists 3"),
    (changed(viewed=pa.array([[1, 2, 3], [], None], LISTS)), r"row 2: column 'viewed' holds a null"),
    (changed(viewed=pa.array([[1, None, 3], [], [4]], LISTS)), r"row 0: column 'viewed' holds a null"),
    (changed(view__timestamp=pa.array([[20, 10, 30], [], [5]], LISTS)), r"row 0: .* falls from 20 to 10; sort"),
    (
        changed(view__timestamp=pa.array([[1, 2, 3], [], [120]], LISTS)),
        r"row 2: .* an event at 120, .* leaks",
    ),
    (
        changed(view__dwell=pa.array([[0.5, float("inf"), 1.0], [], [1.0]])),
        r"row 0: column 'view/dwell' holds inf, expected a finite number",
    ),
]


@pytest.mark.parametrize(("rows", "message"), BAD_VALUES)
def test_bad_values_are_named_with_file_row_and_column(tmp_path: Path, rows: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        read_all(write(tmp_path, rows))


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in ROWS.items() if key != name}


BAD_COLUMNS = [
    (without("click"), r"part-0\.parquet: column 'click' is missing \(it has timestamp, .*\[columns\] in schema\.toml"),
    (without("viewed"), r"column 'viewed' is missing"),
    (changed(user=["a", "b", "c"]), r"column 'user' has type string, expected an integer or a list of integers; cast"),
    (changed(price=["a", "b", "c"]), r"column 'price' has type string, expected a number"),
    (changed(viewed=[1, 2, 3]), r"column 'viewed' has type int64, expected a list of integers"),
    (changed(timestamp=[1.0, 2.0, 3.0]), r"column 'timestamp' has type double, expected an integer \(seconds"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_COLUMNS)
def test_missing_and_wrong_columns_are_named_at_opening(tmp_path: Path, rows: dict[str, Any], message: str):
    write(tmp_path, rows)
    with pytest.raises(ValueError, match=message):
        ParquetSource(tmp_path)


def test_ids_outside_their_table_can_be_hashed(tmp_path: Path):
    folder = write(tmp_path, changed(user=[1, -7, 10**12]))
    one, two = (read_all(folder, id_policy="hash").ids["user"].values() for _ in range(2))
    assert one[0] == 1
    assert bool(((one >= 0) & (one < 10)).all())
    assert torch.equal(one, two)


def test_a_truncated_file_is_named(tmp_path: Path):
    path = write(tmp_path, ROWS) / "train/part-0.parquet"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 40])
    with pytest.raises(ValueError, match=r"part-0\.parquet: unreadable .* the file is truncated or no parquet"):
        ParquetSource(tmp_path)


def test_a_file_damaged_in_the_middle_is_named_when_read(tmp_path: Path):
    path = write(tmp_path, ROWS) / "train/part-0.parquet"
    with pq.ParquetFile(path) as file:
        start = file.metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 24] = b"\xff" * 24
    path.write_bytes(bytes(content))
    source = ParquetSource(tmp_path)
    source.read("train", np.array([0]))
    with pytest.raises(
        ValueError,
        match=r"part-0\.parquet, row group 1 \(rows 2 to 2\), column 'timestamp': unreadable .* damaged: write it",
    ):
        source.read("train", np.array([2]))


def test_missing_things_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"data\.path: .*nowhere is no folder"):
        ParquetSource(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"schema\.toml is missing; declare the columns there"):
        ParquetSource(tmp_path)
    write_schema(tmp_path, DECLARED)
    with pytest.raises(ValueError, match=r"no rows in train/\*\.parquet"):
        ParquetSource(tmp_path)
    with pytest.raises(ValueError, match=r"data\.path: got nothing"):
        open_source(DataConfig(source="parquet"))
    source = ParquetSource(write(tmp_path, ROWS))
    with pytest.raises(ValueError, match="split: got 'valid', expected one of train"):
        source.num_samples("valid")
    with pytest.raises(ValueError, match="rows: got 3 to 3, expected 0 to 2"):
        source.read("train", np.array([3]))


def test_the_schema_file_says_the_same_as_the_object(tmp_path: Path):
    write_schema(tmp_path, DECLARED)
    assert read_schema(tmp_path / "schema.toml") == DECLARED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks = [", "not valid TOML"),
        ("dense = []", "key 'tasks' is missing; add it"),
        ("tasks = ['a']\nlabel = 'b'", "unknown key 'label', expected some of"),
        ("tasks = ['a']\n[[ids]]\nname = 'user'", r"ids\[0\]: key 'num_ids' is missing"),
        ("tasks = ['a']\n[[ids]]\nname = 'user'\nnum_ids = 0", r"ids\[0\]: num_ids is 0, expected a positive integer"),
        ("tasks = 'click'", r"schema.toml: tasks is 'click', expected a list of names"),  # not its letters
        ("tasks = 3", r"schema.toml: tasks is 3, expected a list of names"),
        ("tasks = ['a']\nids = ['user']", r"ids is \['user'\], expected tables, each under \[\[ids\]\]"),
        ("tasks = ['a']\nevents = 1", r"events is 1, expected tables"),
        ("tasks = ['a']\ndense = ['a']", "column 'a' is declared twice"),
        ("tasks = ['a']\n[columns]\nb = 'c'", "'b' is no column of this schema"),
    ],
)
def test_a_wrong_schema_file_is_named_with_its_key(tmp_path: Path, text: str, message: str):
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_schema(tmp_path / "schema.toml")
