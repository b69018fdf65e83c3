"""KuaiRand, Criteo and Taobao from tiny files in their format, written here."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from gemworks.gem.config import DataConfig
from gemworks.gem.data import criteo, open_source
from gemworks.gem.data.log_files import read_text
from gemworks.gem.model.gem import check_schema
from gemworks.gem.presets import get_preset

pytestmark = pytest.mark.reference

TAOBAO = """\
1,2268318,2520377,pv,1511544070
1,2333346,2520771,buy,1511561733
2,2268318,2520377,cart,1511544070
1,2576651,149192,fav,1511561733
1,2576651,149192,pv,1511572885
"""

KUAIRAND_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)
KUAIRAND_1 = f"""{KUAIRAND_HEADER}
0,7,20220408,1300,1649397600500,1,0,0,0,0,0,1,21000,20000,0,0,0,0,1
0,8,20220408,1300,1649397600900,0,0,0,0,0,0,0,0,15000,0,0,0,0,1
1,7,20220408,1400,1649401200000,0,1,0,0,0,0,0,100,20000,0,0,0,0,4
"""
KUAIRAND_2 = f"""{KUAIRAND_HEADER}
0,9,20220422,900,1650589200000,1,1,0,0,0,0,1,30000,30000,0,0,0,1,1
"""


def criteo_line(label: int, number: int, *, missing: bool = False) -> str:
    integers = ["" if missing and i == 3 else str(number + i - 2) for i in range(13)]
    categories = ["" if missing and i == 5 else f"{(number * 31 + i) * 2654435761 % 2**32:08x}" for i in range(26)]
    return "\t".join([str(label), *integers, *categories]) + "\n"


def rows(num: int) -> np.ndarray:
    return np.arange(num, dtype=np.int64)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path.parent


def test_taobao_rows_become_samples_with_four_histories(tmp_path: Path):
    write(tmp_path / "UserBehavior.csv", TAOBAO)
    config = DataConfig(source="taobao", path=str(tmp_path), num_ids=3_000_000, max_length=4)
    source = open_source(config)
    assert [e.name for e in source.schema.events] == ["pv", "cart", "fav", "buy"]
    assert source.schema.tasks == ("intent", "buy")
    assert {s: source.num_samples(s) for s in source.splits} == {"train": 4, "valid": 0, "test": 1}
    train, test = source.read("train", rows(4)), source.read("test", rows(1))
    assert train.timestamps_B.tolist() == [1511544070, 1511544070, 1511561733, 1511561733]
    assert train.labels_BK.tolist() == [[0, 0], [1, 0], [1, 1], [1, 0]]
    # Purchase and favourite of one second don't see each other; both see the page view before.
    assert train.events["pv"].offsets_S.tolist() == [0, 0, 0, 1, 2]
    assert train.events["buy"].offsets_S.tolist() == [0, 0, 0, 0, 0]
    assert {name: events.timestamps_T.tolist() for name, events in test.events.items()} == {
        "pv": [1511544070],
        "cart": [],
        "fav": [1511561733],
        "buy": [1511561733],
    }
    assert test.event_ids["buy/item"].values().tolist() == [2333346]
    assert (test.ids["user"].values().tolist(), test.ids["category"].values().tolist()) == ([1], [149192])


def test_kuairand_rows_of_all_files_become_samples(tmp_path: Path):
    write(tmp_path / "data/log_standard_4_08_to_4_21_1k.csv", KUAIRAND_1)
    write(tmp_path / "data/log_standard_4_22_to_5_08_1k.csv", KUAIRAND_2)
    source = open_source(DataConfig(source="kuairand", path=str(tmp_path), max_length=4))
    assert source.schema.tasks == ("is_click", "long_view", "is_like")
    train, test = source.read("train", rows(3)), source.read("test", rows(1))
    assert train.timestamps_B.tolist() == [1649397600, 1649397600, 1649401200]
    assert train.labels_BK.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert train.ids["tab"].values().tolist() == [1, 1, 4]
    assert train.dense_BC[:, 0].tolist() == pytest.approx(np.log1p([20.0, 15.0, 20.0]).tolist())
    assert train.events["clicked"].timestamps_T.tolist() == []  # 0.4 s apart is the same second
    assert (test.labels_BK.tolist(), test.ids["is_rand"].values().tolist()) == ([[1, 1, 1]], [1])
    assert test.event_ids["clicked/video"].values().tolist() == [7]
    assert test.events["clicked"].floats_TC[0].tolist() == pytest.approx(np.log1p([20.0, 21.0]).tolist())
    assert test.event_ids["skipped/video"].values().tolist() == [8]


def test_criteo_days_become_samples_without_histories(tmp_path: Path):
    """Days in the order of their numbers: day_10 comes after day_2."""
    for day, num in ((10, 4), (2, 3)):
        lines = "".join(criteo_line(i % 2, 100 * day + i, missing=i == 1) for i in range(num))
        write(tmp_path / f"day_{day}", lines)
    source = open_source(DataConfig(source="criteo", path=str(tmp_path), num_ids=5000))
    assert {s: source.num_samples(s) for s in source.splits} == {"train": 3, "valid": 2, "test": 2}
    assert (source.schema.events, len(source.schema.ids), len(source.schema.dense_names)) == ((), 26, 13)
    train, test = source.read("train", rows(3)), source.read("test", rows(2))
    assert train.labels_BK[:, 0].tolist() == [0, 1, 0]
    assert (set(train.timestamps_B.tolist()), set(test.timestamps_B.tolist())) == ({2 * 86400}, {10 * 86400})
    assert train.dense_BC[0].tolist() == pytest.approx(np.log1p(np.arange(198, 211)).tolist())
    assert train.dense_BC[1, 3] == 0
    ids = {name: train.ids[name].values().tolist() for name in train.ids.keys()}  # noqa: SIM118
    assert [row for row, value in enumerate(ids["cat_5"]) if value == 0] == [1]
    assert all(0 < value < 5000 for name, values in ids.items() if name != "cat_5" for value in values)
    assert sorted([*train.sample_ids_B.tolist(), *test.sample_ids_B.tolist()]) == [0, 1, 2, 5, 6]


def test_gem_says_that_it_needs_histories(tmp_path: Path):
    write(tmp_path / "day_0", criteo_line(1, 1) * 10)
    source = open_source(DataConfig(source="criteo", path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"schema\.events: got no event type, .* \(criteo has none\)"):
        check_schema(source.schema, get_preset("tiny"))


def test_criteo_one_gzipped_day_is_split_by_shares_and_equal_hashes_stay_equal(tmp_path: Path):
    lines = "".join(criteo_line(1, 7) for _ in range(20))
    with gzip.open(tmp_path / "day_0.gz", "wt") as file:
        file.write(lines)
    source = open_source(DataConfig(source="criteo", path=str(tmp_path), num_ids=100))
    assert {s: source.num_samples(s) for s in source.splits} == {"train": 16, "valid": 2, "test": 2}
    values = source.read("train", rows(16)).ids["cat_0"].values()
    assert len(set(values.tolist())) == 1


def test_a_prepared_data_set_is_found_again_and_made_again_when_files_or_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "UserBehavior.csv"
    write(path, TAOBAO)
    config = DataConfig(source="taobao", path=str(tmp_path), num_ids=100, max_length=4)
    open_source(config)
    with monkeypatch.context() as patched:
        patched.setattr("gemworks.gem.data.taobao.prepare_log", lambda *a, **k: pytest.fail("prepared again"))
        assert open_source(config).num_samples("train") == 4
    write(path, TAOBAO + "3,1,1,pv,1511572999\n")
    assert open_source(config).num_samples("train") == 4
    assert len(list((tmp_path / ".gemworks").glob("taobao-*"))) == 2
    open_source(DataConfig(source="taobao", path=str(tmp_path), num_ids=200, max_length=4))
    assert len(list((tmp_path / ".gemworks").glob("taobao-*"))) == 3


@pytest.mark.parametrize(
    ("source", "name", "text", "message"),
    [
        (
            "taobao",
            "UserBehavior.csv",
            TAOBAO + "1,2,3,pv\n",
            r"UserBehavior\.csv, after line 0: .*[Ee]xpected 5 columns",
        ),
        ("taobao", "UserBehavior.csv", "1,x,3,pv,4\n", r"UserBehavior\.csv, after line 0: .*'?x'?.*expected 5 columns"),
        (
            "taobao",
            "UserBehavior.csv",
            "1,2,3,view,4\n",
            r"line 1: behaviour 'view', expected one of pv, cart, fav, buy",
        ),
        ("taobao", "UserBehavior.csv", "1,,3,pv,4\n", r"UserBehavior\.csv, row 0: column 'item' holds a null"),
        ("taobao", "UserBehavior.csv", "", r"UserBehavior\.csv, after line 0: Empty CSV file; expected 5 columns"),
        (
            "kuairand",
            "log_a.csv",
            "user_id,video_id\n1,2\n",
            r"log_a\.csv, line 1: column 'time_ms' is missing \(it has u",
        ),
        (
            "kuairand",
            "log_a.csv",
            KUAIRAND_1.replace(",20000,", ",,", 1),
            r"row 0: column 'log_duration' holds nan, expe",
        ),
        (
            "kuairand",
            "log_a.csv",
            KUAIRAND_1.replace("500,1,0,", "500,2,0,"),
            r"row 0: column 'is_click' holds label 2",
        ),
        ("criteo", "day_0", criteo_line(2, 1), r"day_0, line 1: the label is 2, expected 0 or 1 in the first column"),
        ("criteo", "day_0", criteo_line(1, 1)[2:], r"day_0, after line 0: .*[Ee]xpected 40 columns"),
        ("criteo", "day_0", criteo_line(1, 1) + criteo_line(1, 1)[:-3] + "xy\n", r"line 2: column cat_25 holds '.*xy'"),
        (
            "criteo",
            "other",
            "",
            r"data\.path: .* holds no day_\* or train\.txt; download Criteo's day_0 to day_23 by hand",
        ),
    ],
)
def test_bad_files_are_named_with_file_line_and_fix(tmp_path: Path, source: str, name: str, text: str, message: str):
    write(tmp_path / name, text)
    with pytest.raises(ValueError, match=message):
        open_source(DataConfig(source=source, path=str(tmp_path)))  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.glob(".gemworks/*-*"))
    assert not list(tmp_path.glob(".gemworks/.*"))


@pytest.mark.parametrize("source", ["taobao", "kuairand", "criteo"])
def test_missing_folders_are_named(tmp_path: Path, source: str):
    with pytest.raises(ValueError, match=rf"data\.path: got nothing, expected the folder of the {source} files"):
        open_source(DataConfig(source=source))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"data\.path: .*nowhere is no folder; expected the folder with"):
        open_source(DataConfig(source=source, path=str(tmp_path / "nowhere")))  # pyright: ignore[reportArgumentType]


def test_files_are_read_in_blocks(tmp_path: Path):
    write(tmp_path / "day_0", "".join(criteo_line(0, i) for i in range(400)))
    sizes = [
        t.num_rows
        for t in read_text(tmp_path / "day_0", criteo.COLUMNS, delimiter="\t", header=False, block_bytes=4096)
    ]
    assert (sum(sizes), len(sizes) > 10, max(sizes) < 40) == (400, True, True)


def test_tables_too_small_for_criteo_are_named(tmp_path: Path):
    write(tmp_path / "day_0", criteo_line(0, 1))
    with pytest.raises(ValueError, match=r"data\.num_ids: got 1, expected at least 2"):
        open_source(DataConfig(source="criteo", path=str(tmp_path), num_ids=1))
