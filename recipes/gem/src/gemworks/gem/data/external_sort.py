"""Sorting a stream of arrow tables that doesn't fit in memory: sorted runs on disk, then merges of a few at a time.

(The textbook algorithm: D. E. Knuth, "The Art of Computer Programming", volume 3, section 5.4, external sorting.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

FAN_IN = 16  # runs merged at a time
_ORDER = "_order"


class ExternalSort:
    """Sorts rows by some columns, equal ones in the order in which they came.

    Args:
        keys: columns to sort by, ascending, the most important one first; of integers, without nulls.
        folder: where runs are written; an empty folder of the caller's, which may be deleted afterwards.
        max_rows: rows held in memory at a time (and once more while they are being sorted).

    Attributes:
        num_rows: rows added.
        most_rows_held: the largest number of rows that were in memory at a time; at most `max_rows`, however many rows
            there are.

    Raises:
        ValueError: `max_rows` too small to merge with.
    """

    def __init__(self, keys: Sequence[str], folder: str | Path, *, max_rows: int) -> None:
        if max_rows < FAN_IN:
            raise ValueError(f"max_rows: got {max_rows}, expected at least {FAN_IN}, a row of each run being merged")
        self._keys = (*keys, _ORDER)
        self._folder = Path(folder)
        self._max_rows = max_rows
        self._held: list[pa.Table] = []
        self._num_held = 0
        self._runs: list[Path] = []
        self._num_runs = 0
        self.num_rows = 0
        self.most_rows_held = 0

    def add(self, table: pa.Table) -> None:
        """Take rows; all tables have the same schema. Tables may have any size."""
        for start in range(0, table.num_rows, self._max_rows):
            part = table.slice(start, self._max_rows)
            if self._num_held + part.num_rows > self._max_rows:
                self._spill()
            order = pa.array(np.arange(self.num_rows, self.num_rows + part.num_rows, dtype=np.int64))
            self._held.append(part.append_column(_ORDER, order))
            self._count(part.num_rows)
            self.num_rows += part.num_rows

    def tables(self) -> Iterator[pa.Table]:
        """All rows in order, in tables of at most `max_rows` rows; once."""
        self._spill()
        while len(self._runs) > FAN_IN:
            group, self._runs = self._runs[:FAN_IN], self._runs[FAN_IN:]
            self._write(self._merge(group))
            for run in group:
                run.unlink()
        for table in self._merge(self._runs):
            yield table.drop_columns([_ORDER])

    def _count(self, change: int) -> None:
        self._num_held += change
        self.most_rows_held = max(self.most_rows_held, self._num_held)

    def _spill(self) -> None:
        """Sort what is held and write it as a run."""
        if self._held:
            table = pa.concat_tables(self._held)
            self._held = []
            self._write(iter([self._sorted(table)]))
            self._count(-table.num_rows)

    def _sorted(self, table: pa.Table) -> pa.Table:
        order_N = np.lexsort([table[key].to_numpy() for key in reversed(self._keys)])
        return table.combine_chunks().take(pa.array(order_N))

    def _write(self, tables: Iterator[pa.Table]) -> None:
        """Write a run in pieces of which one of each merged run fits in memory."""
        path = self._folder / f"run-{self._num_runs:06d}.arrow"
        self._num_runs += 1
        first = next(tables)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, first.schema) as writer:
            writer.write_table(first, max_chunksize=self._max_rows // FAN_IN)
            for table in tables:
                writer.write_table(table, max_chunksize=self._max_rows // FAN_IN)
        self._runs.append(path)

    def _merge(self, runs: Sequence[Path]) -> Iterator[pa.Table]:
        """The rows of some runs in order; of each run one piece is held.

        Everything up to the first end of a piece that has another one behind it can be sorted and given out.
        """
        files = [pa.OSFile(str(run), "rb") for run in runs]
        try:
            pieces = [_Pieces(pa.ipc.open_file(file), self._keys) for file in files]
            while True:
                self._count(sum(piece.refill() for piece in pieces))
                open_ends = [piece.last_key() for piece in pieces if piece.has_more]
                limit = min(open_ends) if open_ends else None
                parts = [part for piece in pieces if (part := piece.take_until(limit)).num_rows]
                if not parts:
                    return
                table = self._sorted(pa.concat_tables(parts))
                yield table
                self._count(-table.num_rows)
        finally:
            for file in files:
                file.close()


class _Pieces:
    """A sorted run, read piece by piece."""

    def __init__(self, reader: pa.ipc.RecordBatchFileReader, keys: Sequence[str]) -> None:
        self._reader, self._names = reader, keys
        self._num_read = 0
        self._table: pa.Table | None = None
        self._keys: list[NDArray[np.int64]] = []

    @property
    def has_more(self) -> bool:
        """Whether there are rows behind the piece that is held."""
        return self._num_read < self._reader.num_record_batches

    def refill(self) -> int:
        """Read the next piece if nothing is held; returns the number of rows read."""
        if self._table is not None or not self.has_more:
            return 0
        self._hold(pa.Table.from_batches([self._reader.get_batch(self._num_read)]))
        self._num_read += 1
        assert self._table is not None
        return self._table.num_rows

    def last_key(self) -> tuple[int, ...]:
        return tuple(int(key_N[-1]) for key_N in self._keys)

    def take_until(self, limit: tuple[int, ...] | None) -> pa.Table:
        """The held rows up to a key, inclusive, or all of them; they are no longer held."""
        table = self._table
        if table is None:
            return pa.table({})
        num = table.num_rows if limit is None else num_up_to(self._keys, limit)
        self._hold(table.slice(num))
        return table.slice(0, num)

    def _hold(self, table: pa.Table) -> None:
        self._table = table if table.num_rows else None
        self._keys = [table[name].to_numpy() for name in self._names]


def num_up_to(keys: Sequence[NDArray[np.int64]], limit: tuple[int, ...]) -> int:
    """How many rows, sorted by several keys, are at most `limit`.

    >>> num_up_to([np.array([1, 1, 2]), np.array([5, 7, 0])], (1, 6))
    1
    """
    first, last = 0, len(keys[0])
    for key_N, value in zip(keys, limit, strict=True):
        part = key_N[first:last]
        first, last = (
            first + int(np.searchsorted(part, value, side="left")),
            first + int(np.searchsorted(part, value, side="right")),
        )
    return last
