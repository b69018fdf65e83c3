"""A user's own data from parquet files with a declared schema.

A data set is a folder with `schema.toml` and the folders `train`, `valid`, `test`, each with `*.parquet` files that are
read in the order of their names, rows in time order. Row groups are decoded whole, checked and kept in a small cache,
so memory is bound by row groups, not by the data set.

Shapes: B samples of a batch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from gemworks.gem.data.checks import IdPolicy
from gemworks.gem.data.parquet_decode import RowGroupDecoder, check_column_type
from gemworks.gem.data.parquet_schema import SCHEMA_FILE, ParquetSchema, read_schema
from gemworks.gem.data.table import EventColumns, IdColumn, Slices, Table
from gemworks.gem.schema import Batch
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
SPLITS = ("train", "valid", "test")
CACHED_ROW_GROUPS = 8


@dataclass(frozen=True)
class _RowGroup:
    path: Path
    index: int  # in the file
    first_in_file: int
    num_rows: int
    has_sample_id: bool


class ParquetSource:
    """Samples from a folder of parquet files.

    Args:
        folder: the data set.
        declared: its schema; None reads `schema.toml` in the folder.
        max_length: newest events kept per event type; None keeps all.
        id_policy: what to do with ids outside their table.

    Raises:
        ValueError: a missing folder or file, a truncated file, a missing column or a wrong type; bad values are found
            when their row group is read, with file, row, column and the fix in the message.
    """

    def __init__(
        self,
        folder: str | Path,
        declared: ParquetSchema | None = None,
        *,
        max_length: int | None = None,
        id_policy: IdPolicy = "error",
    ) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(
                f"data.path: {self.folder} is no folder; expected {SCHEMA_FILE} and {', '.join(SPLITS)} in it"
            )
        self.declared = declared if declared is not None else read_schema(self.folder / SCHEMA_FILE)
        self.schema = self.declared.schema
        self.max_length = max_length
        self.id_policy: IdPolicy = id_policy
        self._groups: dict[str, list[_RowGroup]] = {}
        for split in SPLITS:
            if (self.folder / split).is_dir():
                paths = sorted((self.folder / split).glob("*.parquet"))
                self._groups[split] = [group for path in paths for group in self._inspect(path)]
        if not any(self._groups.values()):
            raise ValueError(
                f"{self.folder}: no rows in train/*.parquet, valid/*.parquet or test/*.parquet; write them first"
            )
        self._ends = {s: np.cumsum([g.num_rows for g in groups], dtype=np.int64) for s, groups in self._groups.items()}
        sizes = [self.num_samples(split) for split in self.splits]
        self._first_ids = dict(zip(self.splits, np.cumsum([0, *sizes]).tolist(), strict=False))
        self._cache: OrderedDict[tuple[str, int], Table] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._groups)

    def num_samples(self, split: str) -> int:
        if split not in self._groups:
            raise ValueError(
                f"split: got {split!r}, expected one of {', '.join(self._groups)}; is {self.folder / split} there?"
            )
        ends = self._ends[split]
        return int(ends[-1]) if len(ends) else 0

    def fingerprint(self) -> dict[str, Any]:
        """What must agree for a loader's state to make sense."""
        return {
            "source": "parquet",
            "schema": self.declared.to_toml(),
            "num_samples": {s: self.num_samples(s) for s in self.splits},
        }

    def read(self, split: str, rows_B: Int64) -> Batch:
        """Rows of a split as a batch; touches only the row groups they lie in."""
        num_samples = self.num_samples(split)
        if len(rows_B) and (rows_B.min() < 0 or rows_B.max() >= num_samples):
            raise ValueError(
                f"rows: got {rows_B.min()} to {rows_B.max()}, expected 0 to {num_samples - 1} in {split!r}"
            )
        ends = self._ends[split]
        group_B = np.searchsorted(ends, rows_B, side="right")
        touched, inverse_B = np.unique(group_B, return_inverse=True)
        if len(touched) == 0:
            return self._empty().batch(self.schema, rows_B)
        parts: list[Table] = []
        place_B = np.empty(len(rows_B), dtype=np.int64)
        taken = 0
        for number, group in enumerate(touched.tolist()):
            at = np.flatnonzero(inverse_B == number)
            first = int(ends[group]) - self._groups[split][group].num_rows
            parts.append(self._group(split, group).select(rows_B[at] - first))
            place_B[at] = taken + np.arange(len(at))
            taken += len(at)
        return Table.concat(parts).batch(self.schema, place_B)

    def _empty(self) -> Table:
        """No rows at all."""
        none = np.zeros(0, dtype=np.int64)
        return Table(
            ids={f.name: IdColumn(none, Slices(none, none)) for f in self.schema.ids},
            events={
                e.name: EventColumns(
                    {f.name: none for f in e.ids},
                    np.zeros((0, len(e.float_names)), dtype=np.float32),
                    none,
                    Slices(none, none),
                )
                for e in self.schema.events
            },
            dense_NC=np.zeros((0, len(self.schema.dense_names)), dtype=np.float32),
            timestamps_N=none,
            labels_NK=np.zeros((0, len(self.schema.tasks)), dtype=np.float32),
            sample_ids_N=none,
        )

    def _inspect(self, path: Path) -> list[_RowGroup]:
        """Row groups of a file after its columns were checked."""
        try:
            with pq.ParquetFile(path) as file:
                arrow, metadata = file.schema_arrow, file.metadata
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(
                f"{path}: unreadable ({_one_line(error)}); the file is truncated or no parquet: write it again"
            ) from error
        for logical in self.declared.logical_names():
            name = self.declared.column(logical)
            if name not in arrow.names:
                if logical == "sample_id":
                    continue
                raise ValueError(
                    f"{path}: column {name!r} is missing (it has {', '.join(arrow.names)}); correct the file, or name "
                    f"the right column under [columns] in {SCHEMA_FILE}"
                )
            check_column_type(self.declared, logical, arrow.field(name).type, where=str(path))
        groups: list[_RowGroup] = []
        first = 0
        for index in range(metadata.num_row_groups):
            num_rows = metadata.row_group(index).num_rows
            groups.append(_RowGroup(path, index, first, num_rows, self.declared.column("sample_id") in arrow.names))
            first += num_rows
        return groups

    def _group(self, split: str, index: int) -> Table:
        """A decoded and checked row group, from the cache where possible."""
        with self._lock:
            key = (split, index)
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            table = self._decode(split, index)
            self._cache[key] = table
            if len(self._cache) > CACHED_ROW_GROUPS:
                self._cache.popitem(last=False)
            return table

    def _decode(self, split: str, index: int) -> Table:
        group = self._groups[split][index]
        names = [n for n in self.declared.logical_names() if n != "sample_id" or group.has_sample_id]
        try:
            with pq.ParquetFile(group.path) as file:
                arrow = file.read_row_group(group.index, columns=[self.declared.column(n) for n in names])
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(
                f"{group.path}, row group {group.index}: unreadable ({_one_line(error)}); the file is truncated or "
                "damaged: write it again"
            ) from error
        first_id = self._first_ids[split] + int(self._ends[split][index]) - group.num_rows
        return RowGroupDecoder(
            arrow,
            self.declared,
            where=str(group.path),
            first_row=group.first_in_file,
            max_length=self.max_length,
            id_policy=self.id_policy,
        ).table(first_id if not group.has_sample_id else None)


def _one_line(error: BaseException) -> str:
    """Arrow's messages with their line breaks taken out."""
    return " ".join(str(error).split())
