"""A log of interactions, declared: which columns it has, and what its rows become, as samples and as events.

Shapes: N rows of the log, E event types.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
from gemworks.gem.data.parquet_schema import ParquetSchema
from gemworks.gem.schema import EventType, IdFeature, Schema
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
TimeUnit = Literal["s", "ms", "us", "ns"]
UNITS_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
USER, TIME, TYPES = "user", "time", "_types"


@dataclass(frozen=True, kw_only=True)
class EventRule:
    """Which rows of the log are events of one type: those whose `column` (integers) holds one of `values`."""

    name: str
    column: str
    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LogSchema:
    """The columns of a log, and their roles.

    Every row is a sample: its user, `ids` and `dense_names` are what is known before its labels are. Every row is
    also an event, of each type whose rule it meets, in the histories of later samples of the same user; events show
    `ids` and `event_floats`, which may be known only afterwards (how long it was watched).

    Attributes:
        num_users: rows of the user table.
        ids: other categorical columns (item, category), integers or strings. Integers inside [0, num_ids) stay as they
            are, others are hashed into that range: no vocabulary has to fit in memory.
        dense_names: float columns of a sample.
        tasks: label columns, 0 or 1; the first one is the primary task.
        events: event types.
        event_floats: float columns of events.
        columns: logical name to the file's name, where they differ; the logical names of the two columns that every log
            has are "user" and "time".
        time_unit: of an integer time column; a column of timestamps knows its own. Times become whole seconds: what
            happens in one second is not the past of anything in it.

    Raises:
        ValueError: no task, no event type for a log that has users, more than 31 types, or a name used twice.
    """

    num_users: int
    ids: tuple[IdFeature, ...]
    tasks: tuple[str, ...]
    events: tuple[EventRule, ...]
    dense_names: tuple[str, ...] = ()
    event_floats: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    time_unit: TimeUnit = "s"

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("tasks: got none, expected the name of at least one column of labels")
        if not 1 <= len(self.events) <= 31:
            raise ValueError(f"events: got {len(self.events)} event types, expected 1 to 31")
        if self.time_unit not in UNITS_PER_SECOND:
            raise ValueError(f"time_unit: got {self.time_unit!r}, expected one of {', '.join(UNITS_PER_SECOND)}")
        if self.num_users < 1:
            raise ValueError(f"num_users: got {self.num_users}, expected at least 1")
        names = [USER, TIME, *(f.name for f in self.ids), *self.dense_names, *self.tasks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"column {twice[0]!r} has two roles before the label; give it one")
        unknown = sorted(set(self.columns) - set(self.logical_names()))
        if unknown:
            raise ValueError(f"columns: {unknown[0]!r} is no column here; expected some of {self.logical_names()}")

    def logical_names(self) -> list[str]:
        """Every column that is read, once."""
        names = [USER, TIME, *(f.name for f in self.ids), *self.dense_names, *self.event_floats, *self.tasks]
        return list(dict.fromkeys([*names, *(rule.column for rule in self.events)]))

    def column(self, logical: str) -> str:
        """The file's name of a logical column."""
        return self.columns.get(logical, logical)

    def samples(self) -> ParquetSchema:
        """The schema of the data set that the log becomes."""
        return ParquetSchema(
            Schema(
                ids=(IdFeature(name=USER, num_ids=self.num_users, table=USER), *self.ids),
                dense_names=self.dense_names,
                events=tuple(
                    EventType(name=rule.name, ids=self.ids, float_names=self.event_floats) for rule in self.events
                ),
                tasks=self.tasks,
            )
        )

    def read(self, table: pa.Table, *, where: str, first_row: int) -> pa.Table:
        """Some rows of the log in fixed types, under their logical names, with a bit mask of the event types.

        Args:
            table: the rows as they are in the file.
            where: file, for messages.
            first_row: row number of the first one, for messages.

        Raises:
            ValueError: a missing column, a null, a wrong type, a label that is not 0 or 1, a number that is not finite;
                names file, row, column and the fix.
        """
        place = _Place(self, table, where, first_row)
        columns: dict[str, NDArray[np.generic]] = {USER: place.ids(USER), TIME: place.seconds()}
        for feature in self.ids:
            columns[feature.name] = place.ids(feature.name)
        for name in dict.fromkeys((*self.dense_names, *self.event_floats)):
            columns[name] = place.floats(name)
        for task in self.tasks:
            columns[task] = place.labels(task)
        types_N = np.zeros(table.num_rows, dtype=np.int32)
        for bit, rule in enumerate(self.events):
            types_N |= np.isin(place.integers(rule.column), rule.values).astype(np.int32) << bit
        return pa.table({**columns, TYPES: types_N})


@dataclass(frozen=True)
class _Place:
    """Columns of some rows of a file, checked."""

    log: LogSchema
    table: pa.Table
    where: str
    first_row: int

    def array(self, logical: str) -> pa.Array:
        name = self.log.column(logical)
        if name not in self.table.column_names:
            raise ValueError(
                f"{self.where}: column {name!r} is missing (it has {', '.join(self.table.column_names)}); name the "
                f"right one: columns={{{logical!r}: ...}}"
            )
        array = self.table[name].combine_chunks()
        if array.null_count:
            row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
            self.refuse(row, logical, "holds a null; fill or drop such rows before")
        return array

    def refuse(self, row: int, logical: str, text: str) -> None:
        raise ValueError(f"{self.where}, row {self.first_row + row}: column {self.log.column(logical)!r} {text}")

    def integers(self, logical: str) -> Int64:
        array = self.array(logical)
        if not (pa.types.is_integer(array.type) or pa.types.is_boolean(array.type)):
            raise ValueError(
                f"{self.where}: column {self.log.column(logical)!r} has type {array.type}, expected integers; cast it"
            )
        return array.to_numpy(zero_copy_only=False).astype(np.int64)

    def ids(self, logical: str) -> Int64:
        array = self.array(logical)
        if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
            return hash_strings(array)
        if not pa.types.is_integer(array.type):
            raise ValueError(
                f"{self.where}: column {self.log.column(logical)!r} has type {array.type}, expected integers or "
                "strings; cast it"
            )
        return array.to_numpy(zero_copy_only=False).astype(np.int64)

    def seconds(self) -> Int64:
        array = self.array(TIME)
        if pa.types.is_timestamp(array.type):
            return array.cast(pa.int64()).to_numpy() // UNITS_PER_SECOND[array.type.unit]
        return self.integers(TIME) // UNITS_PER_SECOND[self.log.time_unit]

    def floats(self, logical: str) -> NDArray[np.float32]:
        array = self.array(logical)
        if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            raise ValueError(
                f"{self.where}: column {self.log.column(logical)!r} has type {array.type}, expected numbers; cast it"
            )
        values_N = array.to_numpy(zero_copy_only=False).astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(values_N))
        if len(bad):
            self.refuse(
                int(bad[0]), logical, f"holds {values_N[bad[0]]}, expected a finite number; fill missing values"
            )
        return values_N

    def labels(self, logical: str) -> NDArray[np.int8]:
        values_N = self.integers(logical)
        bad = np.flatnonzero((values_N != 0) & (values_N != 1))
        if len(bad):
            self.refuse(int(bad[0]), logical, f"holds label {values_N[bad[0]]}, expected 0 or 1; binarise it before")
        return values_N.astype(np.int8)


def hash_strings(array: pa.Array) -> Int64:
    """63 hashed bits of each string, the same on every machine: int64 [N], 0 or more.

    >>> a, b = hash_strings(pa.array(["x", "x"])).tolist()
    >>> a == b
    True
    """
    encoded = array.dictionary_encode()
    hashes = [hashlib.blake2b(s.encode(), digest_size=8).digest() for s in encoded.dictionary.to_pylist()]
    hash_U = np.frombuffer(b"".join(hashes), dtype="<u8").astype(np.uint64) >> np.uint64(1)
    return hash_U.astype(np.int64)[encoded.indices.to_numpy()]
