"""`gemworks data`: JSON and tables for synthetic and parquet data, errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gemworks.cli.app import run

pytestmark = pytest.mark.reference

SYNTHETIC = ["--preset", "tiny", "--set", "data.num_samples=256", "--set", "data.max_length=8"]


@pytest.fixture
def parquet_sets(tmp_path: Path) -> list[str]:
    from gemworks.gem.data import Synthetic, SyntheticSpec
    from gemworks.gem.data.parquet_schema import ParquetSchema
    from gemworks.gem.data.parquet_write import write_schema, write_table

    source = Synthetic(SyntheticSpec(num_samples=64, max_length=8, num_id_fields=1))
    declared = ParquetSchema(source.schema)
    write_schema(tmp_path / "clicks", declared)
    for split in source.splits:
        table = source.table(split, np.arange(source.num_samples(split)))
        write_table(tmp_path / f"clicks/{split}/part-0.parquet", declared, table, row_group_samples=16)
    return ["--set", "data.source=parquet", "--set", f"data.path={tmp_path / 'clicks'}"]


def test_inspect_prints_one_json_object_and_draws(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "inspect", *SYNTHETIC, "--json", "--png", "lengths.png"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["source"] == "synthetic"
    train = result["splits"]["train"]
    assert (train["num_samples"], train["num_inspected"], train["first_time"]) == (256, 256, "2023-11-14 22:13:20")
    assert sum(part["num_samples"] for part in train["events"]["type_0"]["lengths"]) == 256
    assert set(train["label_rates"]) == {"click", "conversion"}
    assert Path("lengths.png").read_bytes().startswith(b"\x89PNG")


def test_inspect_shows_tables_and_bars(capsys: pytest.CaptureFixture[str], parquet_sets: list[str]) -> None:
    assert run(["data", "inspect", *parquet_sets, "--max-samples", "32"]) == 0
    out = capsys.readouterr().out
    assert "parquet: schema" in out
    assert "field_0 (1,000)" in out
    assert [word for word in next(line for line in out.splitlines() if "│ train" in line).split("│") if word.strip()][
        1:3
    ] == ["      64 ", "   32 "]
    assert "type_0, train: " in out
    assert "4-7 █" in out


def test_fetch_checks_every_row_group(capsys: pytest.CaptureFixture[str], parquet_sets: list[str]) -> None:
    assert run(["data", "fetch", *parquet_sets]) == 0
    assert "parquet: train 64, valid 8, test 8 samples; all 6 row groups checked in " in capsys.readouterr().out
    assert run(["data", "fetch", *parquet_sets, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_samples"] == {"train": 64, "valid": 8, "test": 8}


def test_fetch_names_a_damaged_row_group(capsys: pytest.CaptureFixture[str], parquet_sets: list[str]) -> None:
    import pyarrow.parquet as pq

    path = Path("clicks/train/part-0.parquet")
    with pq.ParquetFile(path) as file:
        chunk = file.metadata.row_group(2).column(0)
    content = bytearray(path.read_bytes())
    content[(chunk.dictionary_page_offset or chunk.data_page_offset) + 40] ^= 255
    path.write_bytes(bytes(content))
    assert run(["data", "fetch", *parquet_sets]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "part-0.parquet, row group 2 (rows 32 to 47), column 'timestamp': unreadable" in err
    assert "write it again" in err


def test_fetch_prepares_the_files_of_a_public_log(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taobao").mkdir()
    Path("taobao/UserBehavior.csv").write_text("".join(f"1,{i},3,pv,{100 + i}\n" for i in range(20)), encoding="utf-8")
    sets = ["--set", "data.source=taobao", "--set", "data.path=taobao", "--set", "data.max_length=4"]
    assert run(["data", "fetch", *sets]) == 0
    assert "taobao: train 16, valid 2, test 2 samples; all 3 row groups checked in taobao/.gemworks/taobao-" in (
        " ".join(capsys.readouterr().out.split())
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", *SYNTHETIC, "--max-samples", "1"], "error: max_samples: got 1, expected at least 2"),
        (["inspect", *SYNTHETIC, "--png", "lengths.csv"], "error: --png: got 'lengths.csv', expected a file that ends"),
        (["inspect", "--set", "data.source=parquet"], "error: data.path: got nothing, expected the folder of the parq"),
        (
            ["fetch", "--set", "data.source=criteo", "--set", "data.path=nowhere"],
            "error: data.path: nowhere is no folder",
        ),
        (["fetch", "--set", "data.source=criteoo"], "error: data.source: got 'criteoo'"),
        (["fetchh"], "error: No such command 'fetchh'. Did you mean 'fetch'?"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1
