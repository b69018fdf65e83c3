"""What a reader refuses, and how it says so: the thing, its place, what was expected, the fix.

Shapes: N samples, V values, S = N + 1 offsets, C columns, K tasks.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from gemworks.gem.data.hashing import hash_u64
from gemworks.gem.schema import IdFeature
from numpy.typing import NDArray

IdPolicy = Literal["error", "hash"]


def check_offsets(offsets_S: NDArray[np.int64], num_values: int, *, name: str) -> None:
    """Offsets start at 0, never fall, and end at the number of values.

    Raises:
        ValueError: with the column's name, the first bad position and its values.
    """
    if offsets_S.ndim != 1 or len(offsets_S) == 0:
        raise ValueError(
            f"{name}: offsets must be one-dimensional with at least one entry, got shape {offsets_S.shape}"
        )
    if offsets_S[0] != 0:
        raise ValueError(
            f"{name}: offsets[0] is {offsets_S[0]}, expected 0; subtract the first offset from all of them"
        )
    falling = np.flatnonzero(np.diff(offsets_S) < 0)
    if len(falling):
        row = int(falling[0])
        raise ValueError(
            f"{name}: offsets fall from {offsets_S[row]} to {offsets_S[row + 1]} at row {row}; "
            "expected a running sum of list lengths, which are never negative"
        )
    if offsets_S[-1] != num_values:
        raise ValueError(
            f"{name}: the last offset is {offsets_S[-1]} but there are {num_values} values; "
            "the file is truncated or offsets belong to another column"
        )


def apply_id_policy(
    values_V: NDArray[np.int64], feature: IdFeature, policy: IdPolicy, *, rows_V: NDArray[np.int64], where: str
) -> NDArray[np.int64]:
    """Ids that fit the feature's table: refuse the others, or hash them into range.

    Args:
        values_V: int64 [V].
        feature: gives name, table and `num_ids`.
        policy: "error" raises; "hash" replaces an id outside [0, num_ids) by a fixed hash of it (ids inside stay).
        rows_V: int64 [V], the sample of each value, for the message.
        where: file or source, for the message.

    Returns:
        int64 [V]; the input itself when nothing had to change.

    Raises:
        ValueError: an id outside the table under "error".

    >>> color = IdFeature(name="color", num_ids=4, table="color")
    >>> hashed = apply_id_policy(np.array([3, 9]), color, "hash", rows_V=np.array([0, 1]), where="doc")
    >>> int(hashed[0]), 0 <= int(hashed[1]) < 4
    (3, True)
    """
    if policy not in ("error", "hash"):
        raise ValueError(f"id_policy: got {policy!r}, expected 'error' or 'hash'")
    outside_V = (values_V < 0) | (values_V >= feature.num_ids)
    if not outside_V.any():
        return values_V
    if policy == "error":
        at = int(np.argmax(outside_V))
        raise ValueError(
            f"{where}, row {rows_V[at]}: id {values_V[at]} of feature {feature.name!r} is outside table "
            f"{feature.table!r} with {feature.num_ids} rows (valid: 0 to {feature.num_ids - 1}); raise num_ids in the "
            "schema, re-encode the column, or set data.id_policy = 'hash'"
        )
    hashed_V = (hash_u64(values_V) % np.uint64(feature.num_ids)).astype(np.int64)
    return np.where(outside_V, hashed_V, values_V)


def check_labels(
    labels_NK: NDArray[np.floating], tasks: tuple[str, ...], *, rows_N: NDArray[np.int64] | None = None, where: str
) -> None:
    """Labels are 0 or 1 (NaN is neither).

    Args:
        labels_NK: [N, K].
        tasks: names of the K tasks.
        rows_N: the row in the file of each sample, for the message; None: row n is sample n.
        where: file or source, for the message.

    Raises:
        ValueError: with task, row and value of the first bad label.
    """
    bad_NK = ~((labels_NK == 0) | (labels_NK == 1))
    if bad_NK.any():
        row, task = (int(i) for i in np.argwhere(bad_NK)[0])
        raise ValueError(
            f"{where}, row {row if rows_N is None else rows_N[row]}: label {tasks[task]!r} is {labels_NK[row, task]}, "
            "expected 0 or 1; binarise the column (for example rating >= 4) before it becomes a label"
        )


def check_finite(
    values_NC: NDArray[np.floating], names: tuple[str, ...], *, rows_N: NDArray[np.int64] | None, where: str
) -> None:
    """No NaN and no infinity.

    Args:
        values_NC: [N, C].
        names: of the C columns.
        rows_N: the sample of each row where rows are events; None: row n is sample n.
        where: file or source, for the message.

    Raises:
        ValueError: with column, row and value of the first bad entry.
    """
    bad_NC = ~np.isfinite(values_NC)
    if bad_NC.any():
        row, column = (int(i) for i in np.argwhere(bad_NC)[0])
        sample = row if rows_N is None else int(rows_N[row])
        raise ValueError(
            f"{where}, row {sample}: column {names[column]!r} holds {values_NC[row, column]}, "
            "expected a finite number; fill missing values (0 after standardising, plus a column that says "
            "it was missing)"
        )


def check_event_times(
    times_V: NDArray[np.int64],
    lengths_N: NDArray[np.int64],
    timestamps_N: NDArray[np.int64],
    *,
    name: str,
    rows_N: NDArray[np.int64],
    where: str,
) -> None:
    """Event times never fall inside a sample, and lie strictly before the sample's own time.

    Args:
        times_V: int64 [V], packed.
        lengths_N: int64 [N], events of each sample.
        timestamps_N: int64 [N], when each sample was scored.
        name: of the column, for messages.
        rows_N: the row in the file of each sample.
        where: file or source, for the message.

    Raises:
        ValueError: with row and both times.
    """
    sample_V = np.repeat(np.arange(len(lengths_N)), lengths_N)
    late_V = times_V >= timestamps_N[sample_V]
    if late_V.any():
        at = int(np.argmax(late_V))
        raise ValueError(
            f"{where}, row {rows_N[sample_V[at]]}: column {name!r} holds an event at {times_V[at]}, the sample itself "
            f"is at {timestamps_N[sample_V[at]]}; keep only events with a smaller timestamp, or the label leaks"
        )
    falls_V = (np.diff(times_V) < 0) & (np.diff(sample_V) == 0)
    if falls_V.any():
        at = int(np.argmax(falls_V))
        raise ValueError(
            f"{where}, row {rows_N[sample_V[at]]}: column {name!r} falls from {times_V[at]} to {times_V[at + 1]}; "
            "sort the events of each sample by time, oldest first"
        )
