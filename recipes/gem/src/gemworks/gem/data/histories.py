"""From a log sorted by user and time to samples with their histories, a chunk at a time.

A sample's history of an event type is the user's newest events of that type with a strictly smaller timestamp: what
happens in the same second, the sample itself included, is not its past.

Between chunks only the last user's newest events are kept, so memory depends on the size of a chunk and on
`max_length`, not on the log or on how long a user's log is.

Shapes: N rows of a chunk, V events of one type, B samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
from gemworks.gem.data.causal import run_starts
from gemworks.gem.data.checks import apply_id_policy
from gemworks.gem.data.log_schema import TIME, TYPES, USER, LogSchema
from gemworks.gem.data.table import EventColumns, IdColumn, Slices, Table
from gemworks.gem.schema import IdFeature
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
SAMPLE_ID = "_sample_id"


def histories(chunks: Iterable[pa.Table], log: LogSchema, *, max_length: int) -> Iterator[Table]:
    """Samples of a log, in the order of its rows.

    Args:
        chunks: rows as `LogSchema.read` gives them, with `SAMPLE_ID`, sorted by user and time; chunks may cut users
            anywhere.
        log: the columns.
        max_length: newest events kept per event type.

    Yields:
        One table per chunk with as many samples as the chunk has rows.
    """
    kept: pa.Table | None = None
    for chunk in chunks:
        rows = chunk if kept is None else pa.concat_tables([kept, chunk]).combine_chunks()
        num_kept = rows.num_rows - chunk.num_rows
        yield _samples(rows, num_kept, log, max_length)
        kept = rows.take(pa.array(_rows_to_keep(rows, log, max_length)))


def _samples(rows: pa.Table, first: int, log: LogSchema, max_length: int) -> Table:
    """The rows from number `first` on as samples; those before are past only."""
    user_N, time_N, types_N = (rows[name].to_numpy() for name in (USER, TIME, TYPES))
    run_start_N, user_start_N = run_starts(user_N, time_N)
    ids_N = {f.name: _table_rows(rows[f.name].to_numpy(), f) for f in log.ids}
    floats_NC = _matrix(rows, log.event_floats)
    events: dict[str, EventColumns] = {}
    for bit, rule in enumerate(log.events):
        member_N = (types_N >> bit) & 1
        at_V = np.flatnonzero(member_N)
        before_S = np.concatenate([[0], np.cumsum(member_N, dtype=np.int64)])
        past_B = (before_S[run_start_N] - before_S[user_start_N])[first:]
        lengths_B = np.minimum(past_B, max_length)
        events[rule.name] = EventColumns(
            ids={name: values_N[at_V] for name, values_N in ids_N.items()},
            floats_VC=floats_NC[at_V],
            timestamps_V=time_N[at_V],
            slices=Slices(before_S[run_start_N][first:] - lengths_B, lengths_B),
        )
    user = IdFeature(name=USER, num_ids=log.num_users, table=USER)
    return Table(
        ids={
            USER: IdColumn.single(_table_rows(user_N[first:], user)),
            **{name: IdColumn.single(values_N[first:]) for name, values_N in ids_N.items()},
        },
        events=events,
        dense_NC=_matrix(rows, log.dense_names)[first:],
        timestamps_N=time_N[first:],
        labels_NK=_matrix(rows, log.tasks)[first:],
        sample_ids_N=rows[SAMPLE_ID].to_numpy()[first:],
    )


def _rows_to_keep(rows: pa.Table, log: LogSchema, max_length: int) -> Int64:
    """What the next chunk may need: the last user's newest events of each type, before its last timestamp and at it."""
    user_N, time_N, types_N = (rows[name].to_numpy() for name in (USER, TIME, TYPES))
    start = int(np.searchsorted(user_N, user_N[-1]))
    last_run = start + int(np.searchsorted(time_N[start:], time_N[-1]))
    kept = [np.zeros(0, dtype=np.int64)]
    for bit in range(len(log.events)):
        for first, end in ((start, last_run), (last_run, len(user_N))):
            kept.append(first + np.flatnonzero((types_N[first:end] >> bit) & 1)[-max_length:])
    return np.unique(np.concatenate(kept))


def _matrix(rows: pa.Table, names: tuple[str, ...]) -> NDArray[np.float32]:
    columns = [rows[name].to_numpy().astype(np.float32) for name in names]
    return np.stack(columns, axis=1) if columns else np.zeros((rows.num_rows, 0), dtype=np.float32)


def _table_rows(ids_N: Int64, feature: IdFeature) -> Int64:
    return apply_id_policy(ids_N, feature, "hash", rows_V=ids_N, where="")
