"""Damaged parts and files that contradict each other: the message names file, row group, column and the fix."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gemworks.gem.data import Loader, ParquetSource, Synthetic, SyntheticSpec
from gemworks.gem.data.parquet_schema import ParquetSchema
from gemworks.gem.data.parquet_write import write_schema, write_table

pytestmark = pytest.mark.reference
SOURCE = Synthetic(SyntheticSpec(num_samples=96, max_length=4, num_id_fields=1, num_dense=1))


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three files of 32 samples in row groups of 8."""
    declared = ParquetSchema(SOURCE.schema)
    write_schema(tmp_path, declared)
    paths = [tmp_path / f"train/part-{number}.parquet" for number in range(3)]
    for number, path in enumerate(paths):
        rows = np.arange(32 * number, 32 * number + 32)
        write_table(path, declared, SOURCE.table("train", rows), row_group_samples=8)
    return paths


def folder(parts: list[Path]) -> Path:
    return parts[0].parent.parent


def test_a_part_in_the_middle_that_does_not_open_is_named(parts: list[Path]):
    parts[1].write_bytes(parts[1].read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"part-1\.parquet: unreadable .*: write it again, or move it out of the fold"):
        ParquetSource(folder(parts))
    parts[1].write_bytes(b"")
    with pytest.raises(ValueError, match=r"part-1\.parquet: unreadable"):
        ParquetSource(folder(parts))
    parts[1].rename(parts[1].with_suffix(".bad"))
    assert ParquetSource(folder(parts)).num_samples("train") == 64


def test_one_flipped_bit_in_the_middle_part_is_found_and_named(parts: list[Path]):
    with pq.ParquetFile(parts[1]) as file:
        names = file.schema_arrow.names
        place = names.index("dense_0")
        chunk = file.metadata.row_group(2).column(place)
    content = bytearray(parts[1].read_bytes())
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content[start + chunk.total_compressed_size - 3] ^= 1
    parts[1].write_bytes(bytes(content))
    batches = iter(Loader(ParquetSource(folder(parts)), "train", batch_size=8, prefetch=2, prefetch_threads=2))
    good = [int(next(batches).sample_ids_B[0]) for _ in range(6)]
    assert good == [0, 8, 16, 24, 32, 40]
    match = r"part-1\.parquet, row group 2 \(rows 16 to 23\), column 'dense_0': unreadable .*: write it again"
    with pytest.raises(ValueError, match=match):
        next(batches)


def change(path: Path, **columns: pa.Array | None) -> None:
    table = pq.read_table(path)
    for name, array in columns.items():
        at = table.schema.get_field_index(name)
        table = table.remove_column(at) if array is None else table.set_column(at, name, array)
    pq.write_table(table, path)


def test_a_type_that_changes_between_files_is_named_with_both(parts: list[Path]):
    change(parts[2], field_0=pa.array(["a"] * 32))
    match = (
        r"part-2\.parquet: column 'field_0' has type string, expected .*; in part-0\.parquet it is .*int64.*: the sch"
    )
    with pytest.raises(ValueError, match=match):
        ParquetSource(folder(parts))


def test_a_column_that_disappears_is_named_with_what_it_was(parts: list[Path]):
    change(parts[1], dense_0=None)
    match = r"part-1\.parquet: column 'dense_0' is missing .*; in part-0\.parquet it is float: the schema changed"
    with pytest.raises(ValueError, match=match):
        ParquetSource(folder(parts))


@pytest.mark.parametrize("without", [0, 2])
def test_sample_ids_in_some_files_only_are_refused(parts: list[Path], without: int):
    change(parts[without], sample_id=None)
    with pytest.raises(
        ValueError, match=r"column 'sample_id' is (here|missing), but part-0.* into all files or into n"
    ):
        ParquetSource(folder(parts))


def test_a_harmless_change_of_type_is_read(parts: list[Path]):
    plain = [row[0] for row in pq.read_table(parts[1])["field_0"].to_pylist()]
    change(parts[1], field_0=pa.array(plain, pa.int16()))
    rows = np.arange(96)
    got = ParquetSource(folder(parts)).read("train", rows).ids["field_0"].values()
    assert got.tolist() == SOURCE.read("train", rows).ids["field_0"].values().tolist()


def test_an_unfinished_file_is_not_read(parts: list[Path]):
    (parts[0].parent / ".part-3.parquet.77.part").write_bytes(b"half")
    assert ParquetSource(folder(parts)).num_samples("train") == 96
