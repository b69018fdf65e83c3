"""Text files of public logs, read in blocks: errors name file, line and the fix.

Shapes: N rows.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv

BLOCK_BYTES = 1 << 23


def find_files(folder: str | Path, patterns: Sequence[str], *, what: str) -> list[Path]:
    """Files of a folder (or of its `data` folder) that match any of some patterns, by name.

    Raises:
        ValueError: no such folder, or no such file in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"data.path: {folder} is no folder; expected the folder with {what}")
    for place in (folder, folder / "data"):
        found = sorted({path for pattern in patterns for path in place.glob(pattern) if path.is_file()})
        if found:
            return found
    raise ValueError(
        f"data.path: {folder} holds no {' or '.join(patterns)}; download {what} by hand and put the files there"
    )


def read_text(
    path: Path, columns: Mapping[str, pa.DataType], *, delimiter: str, header: bool, block_bytes: int = BLOCK_BYTES
) -> Iterator[pa.Table]:
    """Rows of a delimited text file, plain or gzipped, in tables of about `block_bytes` of text.

    Args:
        path: the file.
        columns: names and types; of a file with a header those that are wanted, otherwise all, in the file's order.
        delimiter: between columns.
        header: whether the first line names the columns.
        block_bytes: read at a time.

    Raises:
        ValueError: an empty or unreadable file, missing columns, a row that is too short or long, a value of another
            type.
    """
    if header:
        _check_header(path, list(columns), delimiter)
    num_read = int(header)
    try:
        reader = pa_csv.open_csv(
            path,
            read_options=pa_csv.ReadOptions(
                use_threads=False, block_size=block_bytes, column_names=None if header else list(columns)
            ),
            parse_options=pa_csv.ParseOptions(delimiter=delimiter, quote_char=False),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict(columns), include_columns=list(columns), strings_can_be_null=False, null_values=[""]
            ),
        )
        for batch in reader:
            yield pa.Table.from_batches([batch])
            num_read += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path}, after line {num_read}: {' '.join(str(error).split())}; expected {len(columns)} columns "
            f"({', '.join(columns)}), separated by {delimiter!r}: the file is truncated, damaged or of another format"
        ) from error


def count_lines(path: Path) -> int:
    """Lines of a file, plain or gzipped; a last line without an end counts."""
    num_lines, last = 0, b"\n"
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            num_lines += block.count(b"\n")
            last = block[-1:]
    return num_lines + (last != b"\n")


def _check_header(path: Path, wanted: Sequence[str], delimiter: str) -> None:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        names = next(csv.reader(file, delimiter=delimiter), [])
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ValueError(
            f"{path}, line 1: column {missing[0]!r} is missing (it has {', '.join(names) or 'nothing'}); is it the "
            "file that its name says, with its header?"
        )
