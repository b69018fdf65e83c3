"""What is wrong with a run's inputs is said before the first step, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gemworks.gem.data.movielens_files import fetch
from gemworks.gem.data.parquet_schema import ParquetSchema
from gemworks.gem.data.parquet_write import write_schema, write_table
from gemworks.gem.data.synthetic import Synthetic, SyntheticSpec
from gemworks.gem.presets import load_config
from gemworks.gem.train import train


def write_parquet(folder: Path, parts: tuple[str, ...]) -> None:
    """The synthetic source of `tiny` as a parquet set with some of its parts."""
    tiny = load_config("tiny").data
    source = Synthetic(
        SyntheticSpec(
            num_samples=1024,
            max_length=tiny.max_length,
            num_id_fields=tiny.num_id_fields,
            num_ids=tiny.num_ids,
            num_dense=tiny.num_dense,
            num_event_types=tiny.num_event_types,
            num_event_fields=tiny.num_event_fields,
        )
    )
    declared = ParquetSchema(source.schema)
    write_schema(folder, declared)
    for part in parts:
        rows = np.arange(min(source.num_samples(part), 256))
        write_table(folder / part / "part-00000.parquet", declared, source.table(part, rows))


def parquet_config(folder: Path):
    return load_config(
        "tiny", sets=["data.source=parquet", f"data.path={folder}", "train.max_steps=2", "train.device=cpu"]
    )


def test_a_missing_part_is_named_before_training(tmp_path):
    write_parquet(tmp_path / "data", ("train", "valid"))
    with pytest.raises(ValueError, match=r"data\.path: the parquet data .* has no test samples"):
        train(parquet_config(tmp_path / "data"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_from_parquet_ends_with_a_summary(tmp_path):
    write_parquet(tmp_path / "data", ("train", "valid", "test"))
    summary = train(parquet_config(tmp_path / "data"), tmp_path / "run")
    assert summary["num_steps"] == 2
    assert summary["source"] == "parquet"
    assert np.isfinite(summary["ne"])


def test_a_file_in_place_of_the_data_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match=r"data\.path: cannot make the folder"):
        fetch(tmp_path / "file")


def test_a_run_folder_that_cannot_exist_is_named():
    with pytest.raises(ValueError, match=r"run folder '/proc/x': cannot be written"):
        train(load_config("tiny", sets=["train.max_steps=1"]), "/proc/x")
