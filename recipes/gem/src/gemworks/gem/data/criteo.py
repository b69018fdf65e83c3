"""Criteo's terabyte click log, from its files `day_0` to `day_23`.

Tab separated, no header, rows in time order: label (1 clicked), 13 integers (mostly counts), 26 categories as 32-bit
hexadecimal hashes; a missing value is an empty field.
Source: https://ailab.criteo.com/download-criteo-1tb-click-logs-dataset/. Files of that format under other names
(`train.txt` of the Kaggle challenge has it too) are read as one day.

There is no user, so samples have no histories: no event types. All that is known of time is the day. Dense columns are
log(1 + max(x, 0)), 0 where missing, as in facebookresearch/dlrm. Categories are hashed into tables whose row 0 means
"missing". With several days the first half of the last one validates and the second half tests; with one day the last
two tenths do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from gemworks.gem.data.hashing import hash_u64
from gemworks.gem.data.log_files import count_lines, find_files, read_text
from gemworks.gem.data.parquet_schema import ParquetSchema
from gemworks.gem.data.parquet_write import to_arrow
from gemworks.gem.data.prepare import SPLIT_SHARES, prepare_samples, split_counts
from gemworks.gem.data.prepared import prepared_folder
from gemworks.gem.data.table import IdColumn, Table
from gemworks.gem.schema import IdFeature, Schema
from numpy.typing import NDArray

DAY_SECONDS = 86400
INTEGERS = tuple(f"int_{i}" for i in range(13))
CATEGORIES = tuple(f"cat_{i}" for i in range(26))
COLUMNS = {
    "click": pa.int64(),
    **{name: pa.int64() for name in INTEGERS},
    **{name: pa.string() for name in CATEGORIES},
}
NUM_DIGITS = 8  # of a 32-bit hash in hexadecimal
_NOT_HEX = 255
_NIBBLES = np.full(256, _NOT_HEX, dtype=np.uint8)
for _digit in range(16):
    _NIBBLES[[ord(f"{_digit:x}"), ord(f"{_digit:X}")]] = _digit


def sample_schema(num_ids: int) -> ParquetSchema:
    """The columns of a sample, with tables of `num_ids` rows."""
    ids = tuple(IdFeature(name=name, num_ids=num_ids, table=name) for name in CATEGORIES)
    return ParquetSchema(Schema(ids=ids, dense_names=INTEGERS, events=(), tasks=("click",)))


def prepare(folder: str | Path, *, num_ids: int) -> Path:
    """The prepared data set of a folder with Criteo's files.

    Raises:
        ValueError: missing files, tables too small, or rows that are not as described; names file, line and the fix.
    """
    if num_ids < 2:
        raise ValueError(f"data.num_ids: got {num_ids}, expected at least 2: row 0 is for missing values")
    files = find_files(folder, ["day_*", "train.txt"], what="Criteo's day_0 to day_23")
    files.sort(key=_day)

    def write(target: Path) -> None:
        prepare_samples(_samples(files, num_ids), sample_schema(num_ids), target, _splits(files))

    return prepared_folder(files, "criteo", {"num_ids": num_ids}, write)


def _day(path: Path) -> int:
    named = re.fullmatch(r"day_(\d+)(\.tsv|\.txt|\.csv)?(\.gz)?", path.name)
    return int(named[1]) if named else 0


def _splits(files: Sequence[Path]) -> dict[str, int]:
    lines = [count_lines(path) for path in files]
    if len(files) == 1:
        return split_counts(lines[0], SPLIT_SHARES)
    num_valid = lines[-1] // 2
    return {"train": sum(lines[:-1]), "valid": num_valid, "test": lines[-1] - num_valid}


def _samples(files: Sequence[Path], num_ids: int) -> Iterator[pa.Table]:
    declared = sample_schema(num_ids)
    num_before = 0
    for path in files:
        num_in_file = 0
        for rows in read_text(path, COLUMNS, delimiter="\t", header=False):
            num = rows.num_rows
            label_N = rows["click"].fill_null(-1).to_numpy()
            bad = np.flatnonzero((label_N != 0) & (label_N != 1))
            if len(bad):
                raise ValueError(
                    f"{path}, line {num_in_file + int(bad[0]) + 1}: the label is {label_N[bad[0]]}, expected 0 or 1 in "
                    "the first column; is it a file with labels?"
                )
            where = (path, num_in_file + 1)
            table = Table(
                ids={name: IdColumn.single(_hashed(rows[name], num_ids, name, *where)) for name in CATEGORIES},
                events={},
                dense_NC=np.stack(
                    [np.log1p(np.maximum(rows[name].fill_null(0).to_numpy(), 0)) for name in INTEGERS], axis=1
                ).astype(np.float32),
                timestamps_N=np.full(num, _day(path) * DAY_SECONDS, dtype=np.int64),
                labels_NK=label_N[:, None].astype(np.float32),
                sample_ids_N=num_before + np.arange(num, dtype=np.int64),
            )
            yield to_arrow(declared, table)
            num_before += num
            num_in_file += num


def _hashed(column: pa.ChunkedArray, num_ids: int, name: str, path: Path, first_line: int) -> NDArray[np.int64]:
    """Rows of a table: 0 where the field is empty, otherwise 1 + hash."""
    array = column.combine_chunks()
    offsets_S = np.frombuffer(array.buffers()[1], dtype=np.int32)[array.offset :][: len(array) + 1].astype(np.int64)
    characters = np.frombuffer(array.buffers()[2] or b"", dtype=np.uint8)
    length_N = np.diff(offsets_S)
    value_N = np.zeros(len(array), dtype=np.int64)
    bad_N = length_N > NUM_DIGITS
    for place in range(NUM_DIGITS):
        there = np.flatnonzero(length_N > place)
        nibbles = _NIBBLES[characters[offsets_S[there] + place]]
        bad_N[there] |= nibbles == _NOT_HEX
        value_N[there] = value_N[there] * 16 + nibbles
    if bad_N.any():
        row = int(np.argmax(bad_N))
        raise ValueError(
            f"{path}, line {first_line + row}: column {name} holds {array[row].as_py()!r}, expected up to {NUM_DIGITS} "
            "hexadecimal digits or nothing; the file is damaged or of another format"
        )
    row_N = 1 + (hash_u64(value_N) % np.uint64(num_ids - 1)).astype(np.int64)
    return np.where(length_N == 0, 0, row_N)
