"""Samples in columns, in host memory, and how rows of it become a `Batch`.

Every reader ends in a `Table`: MovieLens holds one for the whole log, parquet one per row group, synthetic data makes
one per batch. Lists are slices (start, length) of a shared store, so that overlapping histories are stored once.

Shapes: N samples of the table, B samples of a batch, V values of a store, T packed events, C columns, K tasks,
S = B + 1 offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from gemworks.gem.data.checks import check_offsets
from gemworks.gem.schema import Batch, Events, Schema
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Slices:
    """The rows of a jagged column: row n is `store[starts_N[n] : starts_N[n] + lengths_N[n]]`. Rows may overlap."""

    starts_N: Int64
    lengths_N: Int64

    @classmethod
    def from_offsets(cls, offsets_S: Int64, num_values: int, *, name: str) -> Slices:
        """Consecutive rows.

        Args:
            offsets_S: int64 [N + 1], from 0 to `num_values`, never falling.
            num_values: length of the store.
            name: of the column, for messages.

        Raises:
            ValueError: offsets negative, falling, or not ending at `num_values`.
        """
        check_offsets(offsets_S, num_values, name=name)
        return cls(offsets_S[:-1], np.diff(offsets_S))

    @classmethod
    def packed(cls, lengths_N: Int64) -> Slices:
        """Consecutive rows of given lengths."""
        return cls(np.cumsum(lengths_N) - lengths_N, lengths_N)

    @classmethod
    def concat(cls, parts: Sequence[tuple[Slices, int]]) -> Slices:
        """Rows of several stores (each with its number of values) in the concatenated store."""
        shifts = np.cumsum([0, *(num_values for _, num_values in parts)])
        return cls(
            np.concatenate([part.starts_N + shift for (part, _), shift in zip(parts, shifts, strict=False)]),
            np.concatenate([part.lengths_N for part, _ in parts]),
        )

    def take(self, rows_B: Int64) -> tuple[Int64, Int64]:
        """Positions in the store of the chosen rows, packed, and their lengths: int64 [T], int64 [B]."""
        lengths_B = self.lengths_N[rows_B]
        ends_B = np.cumsum(lengths_B)
        total = int(ends_B[-1]) if len(ends_B) else 0
        shifts_B = self.starts_N[rows_B] - (ends_B - lengths_B)
        return np.repeat(shifts_B, lengths_B) + np.arange(total, dtype=np.int64), lengths_B


@dataclass(frozen=True)
class IdColumn:
    """A categorical field with zero or more ids per sample."""

    values_V: Int64
    slices: Slices

    @classmethod
    def single(cls, values_N: Int64) -> IdColumn:
        """Exactly one id per sample."""
        num_samples = len(values_N)
        return cls(values_N, Slices(np.arange(num_samples, dtype=np.int64), np.ones(num_samples, dtype=np.int64)))


@dataclass(frozen=True)
class EventColumns:
    """One event type: per-event stores and the slice of them that is each sample's history, oldest first."""

    ids: Mapping[str, Int64]
    floats_VC: Float32
    timestamps_V: Int64
    slices: Slices


@dataclass(frozen=True)
class Table:
    """N samples. `ids` and `events` are keyed by the names in the schema."""

    ids: Mapping[str, IdColumn]
    events: Mapping[str, EventColumns]
    dense_NC: Float32
    timestamps_N: Int64
    labels_NK: Float32
    sample_ids_N: Int64

    @property
    def num_samples(self) -> int:
        return len(self.timestamps_N)

    def select(self, rows_B: Int64) -> Table:
        """A compact copy of the chosen rows, in the given order."""
        ids: dict[str, IdColumn] = {}
        for name, column in self.ids.items():
            positions_T, lengths_B = column.slices.take(rows_B)
            ids[name] = IdColumn(column.values_V[positions_T], Slices.packed(lengths_B))
        events: dict[str, EventColumns] = {}
        for name, columns in self.events.items():
            positions_T, lengths_B = columns.slices.take(rows_B)
            events[name] = EventColumns(
                ids={feature: values_V[positions_T] for feature, values_V in columns.ids.items()},
                floats_VC=columns.floats_VC[positions_T],
                timestamps_V=columns.timestamps_V[positions_T],
                slices=Slices.packed(lengths_B),
            )
        return Table(
            ids=ids,
            events=events,
            dense_NC=self.dense_NC[rows_B],
            timestamps_N=self.timestamps_N[rows_B],
            labels_NK=self.labels_NK[rows_B],
            sample_ids_N=self.sample_ids_N[rows_B],
        )

    @classmethod
    def concat(cls, tables: Sequence[Table]) -> Table:
        """Tables with the same columns, one after another."""
        first = tables[0]
        if len(tables) == 1:
            return first
        return cls(
            ids={
                name: IdColumn(
                    np.concatenate([t.ids[name].values_V for t in tables]),
                    Slices.concat([(t.ids[name].slices, len(t.ids[name].values_V)) for t in tables]),
                )
                for name in first.ids
            },
            events={
                name: EventColumns(
                    ids={f: np.concatenate([t.events[name].ids[f] for t in tables]) for f in first.events[name].ids},
                    floats_VC=np.concatenate([t.events[name].floats_VC for t in tables]),
                    timestamps_V=np.concatenate([t.events[name].timestamps_V for t in tables]),
                    slices=Slices.concat([(t.events[name].slices, len(t.events[name].timestamps_V)) for t in tables]),
                )
                for name in first.events
            },
            dense_NC=np.concatenate([t.dense_NC for t in tables]),
            timestamps_N=np.concatenate([t.timestamps_N for t in tables]),
            labels_NK=np.concatenate([t.labels_NK for t in tables]),
            sample_ids_N=np.concatenate([t.sample_ids_N for t in tables]),
        )

    def batch(self, schema: Schema, rows_B: Int64) -> Batch:
        """The chosen rows, in the given order, as one batch in ordinary host memory.

        Args:
            schema: names which columns go where.
            rows_B: int64 [B], row numbers; B = 0 is legal.
        """
        return self.select(rows_B).whole_batch(schema)

    def whole_batch(self, schema: Schema) -> Batch:
        """All rows as one batch that shares memory with the table where it can. Lists must be packed, as `select`
        leaves them."""
        ids = [self.ids[feature.name] for feature in schema.ids]
        events: dict[str, Events] = {}
        event_keys: list[str] = []
        event_values: list[Int64] = []
        event_lengths: list[Int64] = []
        for event in schema.events:
            columns = self.events[event.name]
            lengths_B = columns.slices.lengths_N
            for feature in event.ids:
                event_keys.append(schema.event_key(event.name, feature.name))
                event_values.append(columns.ids[feature.name])
                event_lengths.append(lengths_B)
            events[event.name] = Events(
                floats_TC=torch.from_numpy(columns.floats_VC),
                timestamps_T=torch.from_numpy(columns.timestamps_V),
                offsets_S=_offsets(lengths_B),
                max_length=bucket(int(lengths_B.max(initial=0))),
            )
        return Batch(
            ids=keyed_jagged(
                [f.name for f in schema.ids],
                [column.values_V for column in ids],
                [column.slices.lengths_N for column in ids],
                self.num_samples,
            ),
            event_ids=keyed_jagged(event_keys, event_values, event_lengths, self.num_samples),
            dense_BC=torch.from_numpy(self.dense_NC),
            timestamps_B=torch.from_numpy(self.timestamps_N),
            labels_BK=torch.from_numpy(self.labels_NK),
            sample_ids_B=torch.from_numpy(self.sample_ids_N),
            events=events,
        )


def bucket(length: int) -> int:
    """The smallest power of two that is at least `length`, and at least 1: neighbours share a compiled kernel.

    >>> [bucket(n) for n in (0, 1, 2, 3, 64, 65)]
    [1, 1, 2, 4, 64, 128]
    """
    return 1 << max(length - 1, 0).bit_length()


def keyed_jagged(
    keys: Sequence[str], values: Sequence[Int64], lengths: Sequence[Int64], num_samples: int
) -> KeyedJaggedTensor:
    """A torchrec tensor with its per-key sums filled in, so that nothing later reads lengths back from a device."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # seconds to import, and a schema needs none of it

    lengths_all = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
    length_per_key = [len(v) for v in values]
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.from_numpy(_joined(values)),
        lengths=torch.from_numpy(lengths_all),
        offsets=_offsets(lengths_all),
        stride=num_samples,
        length_per_key=length_per_key,
        offset_per_key=np.concatenate([[0], np.cumsum(length_per_key)]).astype(int).tolist(),
    )


def _joined(values: Sequence[Int64]) -> Int64:
    """The arrays one after another; no copy where they are consecutive parts of one array already."""
    if not values:
        return np.zeros(0, dtype=np.int64)
    base = values[0].base
    if isinstance(base, np.ndarray) and base.ndim == 1 and base.dtype == np.int64 and base.flags.c_contiguous:
        starts = [(v.ctypes.data - base.ctypes.data) // base.itemsize for v in values]
        ends = [start + len(v) for start, v in zip(starts, values, strict=True)]
        if all(v.base is base and v.flags.c_contiguous for v in values) and starts[1:] == ends[:-1]:
            return base[starts[0] : ends[-1]]
    return np.concatenate(values)


def _offsets(lengths_B: Int64) -> Tensor:
    offsets_S = np.zeros(len(lengths_B) + 1, dtype=np.int64)
    np.cumsum(lengths_B, out=offsets_S[1:])
    return torch.from_numpy(offsets_S)
