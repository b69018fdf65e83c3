"""Turns logs and streams of samples into a parquet data set, at a memory bound that the data's size doesn't enter.

log -> sort by user and time on disk -> histories, chunk by chunk -> sort by time on disk -> row groups.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from gemworks.gem.data.external_sort import FAN_IN, ExternalSort
from gemworks.gem.data.histories import SAMPLE_ID, histories
from gemworks.gem.data.log_schema import TIME, USER, LogSchema
from gemworks.gem.data.parquet_files import UNREADABLE
from gemworks.gem.data.parquet_schema import ParquetSchema
from gemworks.gem.data.parquet_write import ROW_GROUP_SAMPLES, to_arrow, write_schema

MAX_ROWS = 1 << 20  # of a click log: about 200 MB with the copies that sorting makes
ROW_GROUPS_PER_FILE = 256
SPLIT_SHARES = (0.8, 0.1)  # train, valid; the rest is test


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a preparation did.

    Attributes:
        folder: the data set.
        num_samples: per split.
        most_rows_held: the largest number of log rows in memory at a time.
        most_samples_held: the largest number of samples with histories in memory at a time.
    """

    folder: Path
    num_samples: Mapping[str, int]
    most_rows_held: int
    most_samples_held: int


def prepare_log(
    parts: Iterable[tuple[str, pa.Table]],
    log: LogSchema,
    folder: str | Path,
    *,
    max_length: int,
    shares: tuple[float, float] = SPLIT_SHARES,
    max_rows: int = MAX_ROWS,
    row_group_samples: int = ROW_GROUP_SAMPLES,
) -> Prepared:
    """Make a data set with histories of a log.

    Args:
        parts: rows of the log in any order, in tables of bounded size, each with the name of its file. Sample ids
            number the rows in this order.
        log: the columns and their roles.
        folder: the data set to write; must not exist. It appears whole or not at all.
        max_length: newest events kept per event type.
        shares: of the samples in time order that train and validate; the rest tests.
        max_rows: memory bound: log rows held at a time, and events held at a time in finished histories.
        row_group_samples: samples per row group.

    Raises:
        ValueError: `folder` is there already, an empty log, or what `LogSchema.read` refuses.
    """
    declared = log.samples()
    with new_folder(folder) as (part_folder, scratch):
        by_user = ExternalSort([USER, TIME], scratch / "by_user", max_rows=max_rows)
        first_row: dict[str, int] = {}
        for where, table in parts:
            rows = log.read(table, where=where, first_row=first_row.get(where, 0))
            numbers = np.arange(by_user.num_rows, by_user.num_rows + rows.num_rows, dtype=np.int64)
            by_user.add(rows.append_column(SAMPLE_ID, pa.array(numbers)))
            first_row[where] = first_row.get(where, 0) + rows.num_rows
        if not by_user.num_rows:
            raise ValueError(f"{folder}: the log has no rows; nothing to prepare")
        events_per_sample = 1 + max_length * len(log.events)
        max_samples = max(FAN_IN, max_rows // events_per_sample)
        by_time = ExternalSort(["timestamp"], scratch / "by_time", max_rows=max_samples)
        for samples in histories(_pieces(by_user.tables(), max_samples), log, max_length=max_length):
            by_time.add(to_arrow(declared, samples))
        num_samples = split_counts(by_time.num_rows, shares)
        write_splits(by_time.tables(), declared, part_folder, num_samples, row_group_samples)
    return Prepared(
        folder=Path(folder),
        num_samples=num_samples,
        most_rows_held=by_user.most_rows_held,
        most_samples_held=by_time.most_rows_held,
    )


def prepare_samples(
    tables: Iterable[pa.Table],
    declared: ParquetSchema,
    folder: str | Path,
    num_samples: Mapping[str, int],
    *,
    row_group_samples: int = ROW_GROUP_SAMPLES,
) -> Prepared:
    """Make a data set of samples that are in time order already.

    Args:
        tables: samples as `to_arrow` gives them.
        declared: their schema.
        folder: the data set to write; must not exist. It appears whole or not at all.
        num_samples: of each split, in the order of time; together the number of samples.
        row_group_samples: samples per row group.
    """
    with new_folder(folder) as (part_folder, _):
        write_splits(tables, declared, part_folder, num_samples, row_group_samples)
    return Prepared(folder=Path(folder), num_samples=num_samples, most_rows_held=0, most_samples_held=0)


def split_counts(num_samples: int, shares: tuple[float, float]) -> dict[str, int]:
    """Samples of train, valid and test.

    Raises:
        ValueError: shares that leave nothing to train on.

    >>> split_counts(105, (0.8, 0.1))
    {'train': 84, 'valid': 10, 'test': 11}
    """
    if not (0 < shares[0] <= 1 and 0 <= shares[1] <= 1 and sum(shares) <= 1):
        raise ValueError(f"shares: got {shares}, expected the shares of train and valid, together at most 1")
    num_train = int(num_samples * shares[0])
    num_seen = int(num_samples * (shares[0] + shares[1]))
    return {"train": num_train, "valid": num_seen - num_train, "test": num_samples - num_seen}


def write_splits(
    tables: Iterable[pa.Table],
    declared: ParquetSchema,
    folder: Path,
    num_samples: Mapping[str, int],
    row_group_samples: int,
) -> None:
    """Write samples in time order to the files of each split, in row groups of equal size but for the last one."""
    write_schema(folder, declared)
    rest = _Rows(tables)
    for split, num in num_samples.items():
        (folder / split).mkdir()
        num_per_file = row_group_samples * ROW_GROUPS_PER_FILE
        for number, first in enumerate(range(0, num, num_per_file)):
            num_rows = min(num_per_file, num - first)
            _write_file(folder / split / f"part-{number:05d}.parquet", rest, num_rows, row_group_samples)
    if rest.take(1) is not None:
        raise ValueError(f"num_samples: got {dict(num_samples)}, but there are more samples than that")


def _write_file(path: Path, rest: _Rows, num_rows: int, row_group_samples: int) -> None:
    writer: pq.ParquetWriter | None = None
    try:
        for first in range(0, num_rows, row_group_samples):
            group = rest.take(min(row_group_samples, num_rows - first))
            if group is None:
                raise ValueError(f"{path}: there are fewer samples than num_samples says")
            writer = writer or pq.ParquetWriter(path, group.schema, write_page_checksum=True)
            writer.write_table(group, row_group_size=row_group_samples)
    finally:
        if writer is not None:
            writer.close()


class _Rows:
    """A stream of tables, taken in pieces of other sizes."""

    def __init__(self, tables: Iterable[pa.Table]) -> None:
        self._tables = iter(tables)
        self._held: pa.Table | None = None

    def take(self, num: int) -> pa.Table | None:
        """The next `num` rows; None where there are fewer."""
        parts: list[pa.Table] = []
        while num:
            if self._held is None or not self._held.num_rows:
                self._held = next(self._tables, None)
                if self._held is None:
                    return None
            parts.append(self._held.slice(0, num))
            self._held = self._held.slice(num)
            num -= parts[-1].num_rows
        return pa.concat_tables(parts)


@contextlib.contextmanager
def new_folder(folder: str | Path) -> Iterator[tuple[Path, Path]]:
    """A folder to fill, and one for scratch files on the same disk. `folder` appears when all went well.

    Raises:
        ValueError: `folder` is there already, or nothing can be written beside it.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} is there already; name another folder, or delete it first")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot write there ({error.strerror}); choose a folder that can be written"
        ) from error
    try:
        for name in ("by_user", "by_time"):
            (work / "scratch" / name).mkdir(parents=True)
        yield work / "data", work / "scratch"
        os.replace(work / "data", folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _pieces(tables: Iterable[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of at most `num_rows`."""
    for table in tables:
        for first in range(0, table.num_rows, num_rows):
            yield table.slice(first, num_rows)


def read_parquet_log(paths: Sequence[str | Path], log: LogSchema, *, batch_rows: int) -> Iterator[tuple[str, pa.Table]]:
    """The declared columns of parquet files, in tables of at most `batch_rows` rows, each with its file's name.

    Memory is bound by the largest row group of the files.

    Raises:
        ValueError: no file, or one that cannot be read; names file, row and the fix.
    """
    if not paths:
        raise ValueError("paths: got no file; name at least one parquet file of the log")
    names = [log.column(logical) for logical in log.logical_names()]
    for path in map(Path, paths):
        num_read = 0
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                there = [name for name in names if name in file.schema_arrow.names]
                for group in range(file.num_row_groups):  # one at a time: asked for all, arrow holds on to those read
                    batches = file.iter_batches(batch_rows, row_groups=[group], columns=there, use_threads=False)
                    for batch in batches:
                        yield str(path), pa.Table.from_batches([batch])
                        num_read += batch.num_rows
        except UNREADABLE as error:
            raise ValueError(
                f"{path}: unreadable after row {num_read} ({' '.join(str(error).split())}); the file is missing, "
                "truncated or damaged: write it again"
            ) from error
