"""From the arrow columns of one row group to a checked `Table`.

Shapes: N samples of a row group, V values of a list column, C columns, K tasks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from gemworks.gem.data.checks import IdPolicy, apply_id_policy, check_event_times, check_finite, check_labels
from gemworks.gem.data.parquet_schema import ParquetSchema
from gemworks.gem.data.table import EventColumns, IdColumn, Slices, Table
from gemworks.gem.schema import EventType, IdFeature
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


def check_column_type(declared: ParquetSchema, logical: str, got: pa.DataType, *, where: str) -> None:
    """A column's arrow type fits its role.

    Raises:
        ValueError: with file, column, both types.
    """
    schema, name = declared.schema, declared.column(logical)
    is_list = pa.types.is_list(got) or pa.types.is_large_list(got)
    value = got.value_type if is_list else got
    integer = pa.types.is_integer(value)
    number = integer or pa.types.is_floating(value) or pa.types.is_boolean(value)
    if "/" in logical and logical.split("/")[0] in {e.name for e in schema.events}:
        event = next(e for e in schema.events if e.name == logical.split("/")[0])
        floats = logical.split("/", 1)[1] in event.float_names
        fits = is_list and (number if floats else integer)
        expected = f"a list of {'numbers' if floats else 'integers'}"
    elif logical in ("timestamp", "sample_id"):
        fits, expected = integer and not is_list, "an integer (seconds for timestamps)"
    elif logical in {f.name for f in schema.ids}:
        fits, expected = integer, "an integer or a list of integers"
    else:
        fits, expected = number and not is_list, "a number"
    if not fits:
        raise ValueError(f"{where}: column {name!r} has type {got}, expected {expected}; cast it when writing the file")


class RowGroupDecoder:
    """Turns one row group into a `Table`, checking every value on the way.

    Args:
        arrow: the row group's declared columns.
        declared: schema and column names.
        where: file name, for messages.
        first_row: row number in the file of its first row, for messages.
        max_length: newest events kept per event type; None keeps all.
        id_policy: what to do with ids outside their table.
    """

    def __init__(
        self,
        arrow: pa.Table,
        declared: ParquetSchema,
        *,
        where: str,
        first_row: int,
        max_length: int | None,
        id_policy: IdPolicy,
    ) -> None:
        self._arrow, self._declared, self._where = arrow, declared, where
        self._rows_N = first_row + np.arange(arrow.num_rows, dtype=np.int64)
        self._max_length = max_length
        self._id_policy: IdPolicy = id_policy

    def table(self, first_sample_id: int | None) -> Table:
        """The decoded samples.

        Args:
            first_sample_id: samples are numbered from here; None: the column `sample_id` says.

        Raises:
            ValueError: nulls, labels outside {0, 1}, NaN, ids outside their table, lists of different lengths, events
                out of order or not before the sample; names file, row, column and the fix.
        """
        schema, num_rows = self._declared.schema, len(self._rows_N)
        timestamps_N = self._scalars("timestamp").astype(np.int64)
        labels_NK = self._matrix(schema.tasks)
        check_labels(labels_NK, schema.tasks, rows_N=self._rows_N, where=self._where)
        dense_NC = self._matrix(schema.dense_names)
        check_finite(dense_NC, schema.dense_names, rows_N=self._rows_N, where=self._where)
        return Table(
            ids={feature.name: self._ids(feature) for feature in schema.ids},
            events={event.name: self._events(event, timestamps_N) for event in schema.events},
            dense_NC=dense_NC,
            timestamps_N=timestamps_N,
            labels_NK=labels_NK,
            sample_ids_N=(
                self._scalars("sample_id").astype(np.int64)
                if first_sample_id is None
                else first_sample_id + np.arange(num_rows, dtype=np.int64)
            ),
        )

    def _matrix(self, names: tuple[str, ...]) -> NDArray[np.float32]:
        columns = [self._scalars(name).astype(np.float32) for name in names]
        return np.stack(columns, axis=1) if columns else np.zeros((len(self._rows_N), 0), dtype=np.float32)

    def _ids(self, feature: IdFeature) -> IdColumn:
        values_V, lengths_N = self._lists(feature.name)
        rows_V = np.repeat(self._rows_N, lengths_N)
        values_V = apply_id_policy(
            values_V.astype(np.int64), feature, self._id_policy, rows_V=rows_V, where=self._where
        )
        return IdColumn(values_V, Slices.packed(lengths_N))

    def _events(self, event: EventType, timestamps_N: Int64) -> EventColumns:
        rows_N, where = self._rows_N, self._where
        times = f"{event.name}/timestamp"
        times_V, lengths_N = self._lists(times)
        times_V = times_V.astype(np.int64)
        rows_V = np.repeat(rows_N, lengths_N)
        check_event_times(
            times_V, lengths_N, timestamps_N, name=self._declared.column(times), rows_N=rows_N, where=where
        )

        def same_length(part: str) -> NDArray[Any]:
            logical = f"{event.name}/{part}"
            values_V, other_N = self._lists(logical)
            bad = np.flatnonzero(other_N != lengths_N)
            if len(bad):
                raise ValueError(
                    f"{where}, row {rows_N[bad[0]]}: column {self._declared.column(logical)!r} lists {other_N[bad[0]]} "
                    f"values but {self._declared.column(times)!r} lists {lengths_N[bad[0]]}; all lists of an event "
                    "type need one entry per event"
                )
            return values_V

        ids: dict[str, Int64] = {}
        for feature in event.ids:
            values_V = same_length(feature.name).astype(np.int64)
            ids[feature.name] = apply_id_policy(values_V, feature, self._id_policy, rows_V=rows_V, where=where)
        floats = [same_length(name).astype(np.float32) for name in event.float_names]
        floats_VC = np.stack(floats, axis=1) if floats else np.zeros((len(times_V), 0), dtype=np.float32)
        check_finite(floats_VC, tuple(f"{event.name}/{n}" for n in event.float_names), rows_N=rows_V, where=where)
        slices = Slices.packed(lengths_N)
        if self._max_length is not None:
            kept_N = np.minimum(lengths_N, self._max_length)
            slices = Slices(slices.starts_N + lengths_N - kept_N, kept_N)
        return EventColumns(ids, floats_VC, times_V, slices)

    def _column(self, logical: str) -> pa.Array:
        name = self._declared.column(logical)
        array = self._arrow.column(name).combine_chunks()
        self._refuse_nulls(array, name, np.arange(len(array)))
        return array

    def _refuse_nulls(self, array: pa.Array, name: str, row_V: Int64) -> None:
        if array.null_count:
            bad = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
            raise ValueError(
                f"{self._where}, row {self._rows_N[row_V[bad]]}: column {name!r} holds a null; fill "
                "missing values before writing (an empty list where there is nothing)"
            )

    def _scalars(self, logical: str) -> NDArray[Any]:
        """One number per row."""
        return self._column(logical).to_numpy(zero_copy_only=False)

    def _lists(self, logical: str) -> tuple[NDArray[Any], Int64]:
        """Packed values and the number per row (1 in a plain column)."""
        array = self._column(logical)
        if not isinstance(array, pa.ListArray | pa.LargeListArray):
            return array.to_numpy(zero_copy_only=False), np.ones(len(array), dtype=np.int64)
        lengths_N = array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        values = array.flatten()
        self._refuse_nulls(values, self._declared.column(logical), np.repeat(np.arange(len(array)), lengths_N))
        return values.to_numpy(zero_copy_only=False), lengths_N
