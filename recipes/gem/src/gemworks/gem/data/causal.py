"""Sums over the past of a log, where "past" means a strictly smaller timestamp.

Ties are the trap: in MovieLens-100K three quarters of the events share user and timestamp with another one, so
"earlier in the file" would leak labels of the same moment.

Shapes: N events, C value columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def causal_sums(
    groups_N: NDArray[np.int64], timestamps_N: NDArray[np.int64], values_NC: NDArray[np.float64]
) -> NDArray[np.float64]:
    """For each event, the sum of `values` over the events of its group with a strictly smaller timestamp.

    Args:
        groups_N: int64 [N], which events belong together.
        timestamps_N: int64 [N], in any order.
        values_NC: float64 [N, C]. Sums are exact where all partial sums are (integers, multiples of 2^-20), and only
            then independent of other groups to the last bit.

    Returns:
        float64 [N, C].

    >>> causal_sums(np.array([0, 0, 0, 1]), np.array([5, 5, 9, 9]), np.ones((4, 1)))[:, 0].tolist()
    [0.0, 0.0, 2.0, 0.0]
    """
    order_N = np.lexsort((timestamps_N, groups_N))
    run_start_N, group_start_N = _run_starts(groups_N[order_N], timestamps_N[order_N])
    totals_SC = np.zeros((len(order_N) + 1, values_NC.shape[1]))
    np.cumsum(values_NC[order_N], axis=0, out=totals_SC[1:])
    sums_NC = np.empty_like(values_NC, dtype=np.float64)
    sums_NC[order_N] = totals_SC[run_start_N] - totals_SC[group_start_N]
    return sums_NC


def first_and_last(
    groups_N: NDArray[np.int64], timestamps_N: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Timestamps of the group's first event and of its last strictly earlier event.

    Returns:
        int64 [N] twice; the event's own timestamp where it has no past.

    >>> first, last = first_and_last(np.array([0, 0, 0]), np.array([5, 7, 9]))
    >>> first.tolist(), last.tolist()
    ([5, 5, 5], [5, 5, 7])
    """
    order_N = np.lexsort((timestamps_N, groups_N))
    sorted_N = timestamps_N[order_N]
    run_start_N, group_start_N = _run_starts(groups_N[order_N], sorted_N)
    first_N = np.empty_like(timestamps_N)
    last_N = np.empty_like(timestamps_N)
    first_N[order_N] = sorted_N[group_start_N]
    last_N[order_N] = sorted_N[np.where(run_start_N > group_start_N, run_start_N - 1, run_start_N)]
    return first_N, last_N


def _run_starts(
    groups_N: NDArray[np.int64], timestamps_N: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of a log sorted by (group, timestamp): where each event's run of ties begins, and where its group begins."""
    positions_N = np.arange(len(groups_N), dtype=np.int64)
    new_group_N = np.ones(len(groups_N), dtype=bool)
    new_group_N[1:] = groups_N[1:] != groups_N[:-1]
    new_run_N = new_group_N.copy()
    new_run_N[1:] |= timestamps_N[1:] != timestamps_N[:-1]
    return (
        np.maximum.accumulate(np.where(new_run_N, positions_N, 0)),
        np.maximum.accumulate(np.where(new_group_N, positions_N, 0)),
    )
