"""A click log becomes samples with histories: nothing of the same second or later, in bounded memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gemworks.gem.data import ParquetSource
from gemworks.gem.data.external_sort import FAN_IN, ExternalSort
from gemworks.gem.data.log_schema import EventRule, LogSchema
from gemworks.gem.data.prepare import prepare_log, read_parquet_log
from gemworks.gem.schema import IdFeature
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.reference
LOG = LogSchema(
    num_users=50,
    ids=(IdFeature(name="item", num_ids=100, table="item"),),
    tasks=("click",),
    events=(
        EventRule(name="clicked", column="click", values=(1,)),
        EventRule(name="seen", column="click", values=(0, 1)),
    ),
    dense_names=("price",),
    event_floats=("dwell",),
)


def random_log(num_rows: int, *, num_users: int, num_times: int, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    return pa.table(
        {
            "user": random.integers(0, num_users, num_rows),
            "item": random.integers(0, 100, num_rows),
            "time": random.integers(0, num_times, num_rows),
            "click": random.integers(0, 2, num_rows),
            "price": random.random(num_rows),
            "dwell": random.random(num_rows),
        }
    )


def parts_of(table: pa.Table, size: int) -> list[tuple[str, pa.Table]]:
    return [("log", table.slice(first, size)) for first in range(0, table.num_rows, size)]


def expected(table: pa.Table, max_length: int) -> list[dict[str, Any]]:
    """The definition, row by row: O(rows squared)."""
    rows = [{**row, "number": number} for number, row in enumerate(table.to_pylist())]
    samples = []
    for row in sorted(rows, key=lambda r: (r["time"], r["user"], r["number"])):
        past = [r for r in rows if r["user"] == row["user"] and r["time"] < row["time"]]
        past = sorted(past, key=lambda r: (r["time"], r["number"]))
        clicked, seen = [r for r in past if r["click"]][-max_length:], past[-max_length:]
        samples.append({**row, "clicked": clicked, "seen": seen})
    return samples


def check(folder: Path, wanted: list[dict[str, Any]]) -> None:
    source = ParquetSource(folder)
    got = {"item": [], "dwell": [], "time": [], "length": [], "sample": []}
    place = 0
    for split in source.splits:
        batch = source.read(split, np.arange(source.num_samples(split)))
        for row in range(batch.num_samples):
            sample = wanted[place]
            place += 1
            assert int(batch.sample_ids_B[row]) == sample["number"]
            assert int(batch.timestamps_B[row]) == sample["time"]
            assert int(batch.labels_BK[row, 0]) == sample["click"]
            assert float(batch.dense_BC[row, 0]) == pytest.approx(sample["price"])
            for name, events in batch.events.items():
                part = slice(int(events.offsets_S[row]), int(events.offsets_S[row + 1]))
                past = sample[name]
                assert events.timestamps_T[part].tolist() == [r["time"] for r in past]
                assert batch.event_ids[f"{name}/item"].values()[part].tolist() == [r["item"] for r in past]
                assert events.floats_TC[part, 0].tolist() == pytest.approx([r["dwell"] for r in past])
    assert place == len(wanted)
    assert got


MEASURE = """
import json, sys, tracemalloc
import pyarrow as pa
from gemworks.gem.data.log_schema import EventRule, LogSchema
from gemworks.gem.data.prepare import prepare_log, read_parquet_log
from gemworks.gem.schema import IdFeature
log = LogSchema(
    num_users=50,
    ids=(IdFeature(name="item", num_ids=100, table="item"),),
    tasks=("click",),
    events=tuple(EventRule(name=f"click_{i}", column="click", values=(i,)) for i in (0, 1)),
)
figures = []
for path in sys.argv[1:]:
    tracemalloc.start()
    parts = read_parquet_log([path], log, batch_rows=2000)
    done = prepare_log(parts, log, path + ".data", max_length=1, max_rows=16384, row_group_samples=1024)
    figures.append({
        "python_bytes": tracemalloc.get_traced_memory()[1],
        "arrow_bytes": pa.default_memory_pool().max_memory(),  # since the start: the smaller log comes first
        "num_samples": sum(done.num_samples.values()),
        "most_rows_held": done.most_rows_held,
        "most_samples_held": done.most_samples_held,
    })
    tracemalloc.stop()
print(json.dumps(figures))
"""


@settings(max_examples=15, deadline=None)
@given(
    num_rows=st.integers(1, 120),
    num_users=st.sampled_from([1, 3, 40]),
    num_times=st.sampled_from([1, 4, 1000]),
    max_length=st.sampled_from([1, 2, 64]),
    max_rows=st.sampled_from([FAN_IN, 37, 1000]),
    seed=st.integers(0, 10),
)
def test_histories_are_the_definition_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory,
    num_rows: int,
    num_users: int,
    num_times: int,
    max_length: int,
    max_rows: int,
    seed: int,
):
    table = random_log(num_rows, num_users=num_users, num_times=num_times, seed=seed)
    folder = tmp_path_factory.mktemp("log") / "data"
    prepare_log(parts_of(table, 50), LOG, folder, max_length=max_length, max_rows=max_rows, row_group_samples=9)
    check(folder, expected(table, max_length))


def test_no_label_reaches_a_sample_at_its_time_or_before(tmp_path: Path):
    """Flipping one label changes no feature of any sample that isn't later."""
    table = random_log(300, num_users=3, num_times=40)
    row = 150
    flipped = table["click"].to_numpy().copy()
    flipped[row] = 1 - flipped[row]
    other = table.set_column(3, "click", pa.array(flipped))
    time, user = table["time"][row].as_py(), table["user"][row].as_py()
    changed = 0
    batches = []
    for name, log in (("a", table), ("b", other)):
        prepare_log(parts_of(log, 64), LOG, tmp_path / name, max_length=8, shares=(1.0, 0.0))
        batches.append(ParquetSource(tmp_path / name).read("train", np.arange(300)))
    one, two = (batch.events["clicked"] for batch in batches)
    for place in range(300):
        pasts = [e.timestamps_T[int(e.offsets_S[place]) : int(e.offsets_S[place + 1])].tolist() for e in (one, two)]
        same = pasts[0] == pasts[1]
        later = int(batches[0].timestamps_B[place]) > time and int(batches[0].ids["user"].values()[place]) == user
        assert same or later
        changed += not same
    assert changed > 0


def test_memory_does_not_grow_with_the_log(tmp_path: Path):
    """Five times the rows: the same peak of memory (numpy's as tracemalloc sees it, and arrow's)."""
    paths = []
    for num_rows in (20_000, 100_000):
        paths.append(tmp_path / f"log-{num_rows}.parquet")
        with pq.ParquetWriter(paths[-1], random_log(1, num_users=1, num_times=1).schema) as writer:
            for first in range(0, num_rows, 20_000):
                writer.write_table(random_log(20_000, num_users=400, num_times=10**6, seed=first), row_group_size=2000)
    arguments = [sys.executable, "-c", MEASURE, *map(str, paths)]
    small, large = json.loads(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    assert (small["num_samples"], large["num_samples"]) == (20_000, 100_000)
    for figures in (small, large):
        assert figures["most_rows_held"] <= 16384
        assert figures["most_samples_held"] <= 16384 // 3
    peaks = [figures["python_bytes"] + figures["arrow_bytes"] for figures in (small, large)]
    assert peaks[1] < 1.35 * peaks[0]


@pytest.mark.parametrize("num_rows", [0, 1, 16, 17, 300, 1500])
def test_the_external_sort_sorts_stably_within_its_bound(tmp_path: Path, num_rows: int):
    random = np.random.default_rng(num_rows)
    a_N, b_N = random.integers(0, 9, num_rows), random.integers(0, 3, num_rows)
    sorter = ExternalSort(["a", "b"], tmp_path, max_rows=FAN_IN)
    table = pa.table({"a": a_N, "b": b_N, "row": np.arange(num_rows)})
    for first in range(0, num_rows, 70):
        sorter.add(table.slice(first, 70))
    pieces = list(sorter.tables())
    rows = np.concatenate([[], *(piece["row"].to_numpy() for piece in pieces)])
    assert rows.tolist() == np.lexsort((b_N, a_N)).tolist()
    assert sorter.most_rows_held <= FAN_IN
    assert all(piece.num_rows <= FAN_IN for piece in pieces)


def test_strings_and_timestamps_are_read(tmp_path: Path):
    table = pa.table(
        {
            "uid": ["ann", "bob", "ann"],
            "item": ["x", "y", "z"],
            "at": pa.array([5_000, 6_000, 7_999], pa.timestamp("ms")),
            "click": [True, False, True],
        }
    )
    log = LogSchema(
        num_users=1 << 20,
        ids=(IdFeature(name="item", num_ids=1 << 20, table="item"),),
        tasks=("click",),
        events=(EventRule(name="clicked", column="click", values=(1,)),),
        columns={"user": "uid", "time": "at"},
    )
    prepare_log([("log", table)], log, tmp_path / "data", max_length=4, shares=(1.0, 0.0))
    batch = ParquetSource(tmp_path / "data").read("train", np.arange(3))
    assert batch.timestamps_B.tolist() == [5, 6, 7]
    users = batch.ids["user"].values().tolist()
    assert (users[0] == users[2], users[0] == users[1]) == (True, False)
    assert batch.events["clicked"].offsets_S.tolist() == [0, 0, 0, 1]
    assert batch.event_ids["clicked/item"].values().tolist() == batch.ids["item"].values()[:1].tolist()


ROWS: dict[str, Any] = {
    "user": [1, 2],
    "item": [3, 4],
    "time": [5, 6],
    "click": [0, 1],
    "price": [1.0, 2.0],
    "dwell": [1.0, 2.0],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"user": [1.5, 2.0]}, r"a\.parquet: column 'user' has type double, expected integers or strings; cast it"),
        ({"user": [1, None]}, r"a\.parquet, row 11: column 'user' holds a null; fill or drop"),
        ({"time": ["a", "b"]}, r"a\.parquet: column 'time' has type string, expected integers; cast it"),
        ({"click": [0, 3]}, r"a\.parquet, row 11: column 'click' holds label 3, expected 0 or 1; binarise"),
        ({"price": [float("nan"), 1.0]}, r"a\.parquet, row 10: column 'price' holds nan, expected a finite number"),
        ({"dwell": ["a", "b"]}, r"column 'dwell' has type string, expected numbers; cast it"),
        ({"item": None}, r"a\.parquet: column 'item' is missing \(it has user, .*\); name the right one: columns="),
    ],
)
def test_bad_rows_are_named_with_file_row_and_column(changes: dict[str, Any], message: str):
    rows = {name: value for name, value in {**ROWS, **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        LOG.read(pa.table(rows), where="a.parquet", first_row=10)


def test_a_log_that_cannot_be_read_to_its_end_leaves_nothing_behind(tmp_path: Path):
    path = tmp_path / "log.parquet"
    pq.write_table(random_log(400, num_users=9, num_times=99), path, row_group_size=100, write_page_checksum=True)
    with pq.ParquetFile(path) as file:
        chunk = file.metadata.row_group(2).column(0)
    content = bytearray(path.read_bytes())
    content[(chunk.dictionary_page_offset or chunk.data_page_offset) + 40] ^= 255
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"log\.parquet: unreadable after row 200 .*: write it again"):
        prepare_log(read_parquet_log([path], LOG, batch_rows=100), LOG, tmp_path / "data", max_length=4)
    with pytest.raises(ValueError, match=r"none\.parquet: unreadable after row 0 .* the file is missing"):
        list(read_parquet_log([tmp_path / "none.parquet"], LOG, batch_rows=9))
    with pytest.raises(ValueError, match="the log has no rows"):
        prepare_log([], LOG, tmp_path / "data", max_length=4)
    assert [p.name for p in tmp_path.iterdir()] == ["log.parquet"]
    prepare_log(parts_of(pa.table(ROWS), 9), LOG, tmp_path / "data", max_length=4)
    with pytest.raises(ValueError, match="is there already; name another folder"):
        prepare_log(parts_of(pa.table(ROWS), 9), LOG, tmp_path / "data", max_length=4)
