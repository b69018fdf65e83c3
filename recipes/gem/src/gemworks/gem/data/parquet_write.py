"""Writes a `Table` as a parquet data set that `ParquetSource` reads back.

Shapes: N samples, V values of a store.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from gemworks.gem.data.parquet_schema import SCHEMA_FILE, ParquetSchema
from gemworks.gem.data.table import Slices, Table
from numpy.typing import NDArray

ROW_GROUP_SAMPLES = 4096


def write_schema(folder: str | Path, declared: ParquetSchema) -> None:
    """Write `schema.toml`, creating the folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / SCHEMA_FILE).write_text(declared.to_toml(), encoding="utf-8")


def write_table(
    path: str | Path, declared: ParquetSchema, table: Table, *, row_group_samples: int = ROW_GROUP_SAMPLES
) -> None:
    """Write all samples of a table to one parquet file, creating its folder.

    Args:
        path: file, normally `<data set>/<split>/part-00000.parquet`.
        declared: schema and column names.
        table: the samples; its columns must be those of the schema.
        row_group_samples: rows per row group, the unit in which a reader loads.
    """
    columns: dict[str, pa.Array] = {"timestamp": pa.array(table.timestamps_N)}
    schema = declared.schema
    for index, task in enumerate(schema.tasks):
        columns[task] = pa.array(table.labels_NK[:, index].astype(np.int8))
    for index, name in enumerate(schema.dense_names):
        columns[name] = pa.array(np.ascontiguousarray(table.dense_NC[:, index]))
    for feature in schema.ids:
        column = table.ids[feature.name]
        columns[feature.name] = _lists(column.values_V, column.slices)
    for event in schema.events:
        events = table.events[event.name]
        columns[f"{event.name}/timestamp"] = _lists(events.timestamps_V, events.slices)
        for feature in event.ids:
            columns[f"{event.name}/{feature.name}"] = _lists(events.ids[feature.name], events.slices)
        for index, name in enumerate(event.float_names):
            columns[f"{event.name}/{name}"] = _lists(events.floats_VC[:, index], events.slices)
    columns["sample_id"] = pa.array(table.sample_ids_N)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    arrow = pa.table({declared.column(name): array for name, array in columns.items()})
    pq.write_table(arrow, path, row_group_size=row_group_samples)


def _lists(values_V: NDArray[Any], slices: Slices) -> pa.Array:
    positions_T, lengths_N = slices.take(np.arange(len(slices.lengths_N), dtype=np.int64))
    offsets_S = np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets_S), pa.array(np.ascontiguousarray(values_V[positions_T])))
