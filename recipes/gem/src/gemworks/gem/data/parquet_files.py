"""Parquet files as they lie on disk: do they open, do they hold the declared columns, do they agree with each other.

Every refusal names file, row group, column and the fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from gemworks.gem.data.parquet_decode import check_column_type
from gemworks.gem.data.parquet_schema import SCHEMA_FILE, ParquetSchema

UNREADABLE = (pa.ArrowException, OSError)


@dataclass(frozen=True)
class RowGroup:
    """Where some consecutive rows of a split lie."""

    path: Path
    index: int  # in the file
    first_in_file: int
    num_rows: int
    has_sample_id: bool


def inspect_files(paths: Sequence[Path], declared: ParquetSchema) -> dict[Path, list[RowGroup]]:
    """The row groups of each file, after the columns of all files were checked; reads the files' footers only.

    Raises:
        ValueError: a file that does not open, a missing column, a wrong type, or files that contradict each other.
    """
    groups: dict[Path, list[RowGroup]] = {}
    first: tuple[Path, pa.Schema] | None = None
    for path in paths:
        try:
            with pq.ParquetFile(path) as file:
                columns, metadata = file.schema_arrow, file.metadata
        except UNREADABLE as error:
            raise ValueError(
                f"{path}: unreadable ({_one_line(error)}); the file is truncated or no parquet: write it again, or "
                "move it out of the folder to go on without its rows"
            ) from error
        _check_columns(path, columns, declared, first)
        first = first or (path, columns)
        groups[path] = []
        num_before = 0
        for index in range(metadata.num_row_groups):
            num_rows = metadata.row_group(index).num_rows
            has_sample_id = declared.column("sample_id") in columns.names
            groups[path].append(RowGroup(path, index, num_before, num_rows, has_sample_id))
            num_before += num_rows
    return groups


def _check_columns(
    path: Path, columns: pa.Schema, declared: ParquetSchema, first: tuple[Path, pa.Schema] | None
) -> None:
    for logical in declared.logical_names():
        name = declared.column(logical)
        there = name in columns.names
        before = "" if first is None else _in_first(name, *first)
        if first is not None and logical == "sample_id" and there != (name in first[1].names):
            raise ValueError(
                f"{path}: column {name!r} is {'here' if there else 'missing'}, but {first[0].name} "
                f"{'lacks' if there else 'has'} it: the schema changed between the files and numbered samples would "
                "repeat; write the column into all files or into none"
            )
        if not there:
            if logical == "sample_id":
                continue
            raise ValueError(
                f"{path}: column {name!r} is missing (it has {', '.join(columns.names)}){before}; correct the file, or "
                f"name the right column under [columns] in {SCHEMA_FILE}"
            )
        check_column_type(declared, logical, columns.field(name).type, where=str(path), before=before)


def _in_first(name: str, path: Path, columns: pa.Schema) -> str:
    if name not in columns.names:
        return ""
    return f"; in {path.name} it is {columns.field(name).type}: the schema changed between the files"


def read_columns(group: RowGroup, declared: ParquetSchema) -> pa.Table:
    """The declared columns of a row group; page checksums are verified where the writer left them.

    Raises:
        ValueError: the row group cannot be read; names the first such column.
    """
    names = [declared.column(n) for n in declared.logical_names() if n != "sample_id" or group.has_sample_id]
    try:
        return _read(group, names)
    except UNREADABLE as error:
        column, cause = _first_unreadable(group, names) or (None, error)
        named = "" if column is None else f", column {column!r}"
        raise ValueError(
            f"{group.path}, row group {group.index} (rows {group.first_in_file} to "
            f"{group.first_in_file + group.num_rows - 1}){named}: unreadable "
            f"({_one_line(cause)}); the file is truncated or damaged: write it again, or move it out of the folder to "
            "go on without its rows"
        ) from error


def _read(group: RowGroup, names: Sequence[str]) -> pa.Table:
    with pq.ParquetFile(group.path, page_checksum_verification=True) as file:
        return file.read_row_group(group.index, columns=list(names), use_threads=False)


def _first_unreadable(group: RowGroup, names: Sequence[str]) -> tuple[str, Exception] | None:
    for name in names:
        try:
            _read(group, [name])
        except UNREADABLE as error:
            return name, error
    return None


def _one_line(error: BaseException) -> str:
    """Arrow's messages with their line breaks taken out."""
    return " ".join(str(error).split())
