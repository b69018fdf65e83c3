"""Intervals of time: their union, and how much of one they cover."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[float, float]


def union(spans: Sequence[Span]) -> list[Span]:
    """The same time as disjoint spans, in order.

    >>> union([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    merged: list[Span] = []
    for a, b in sorted(spans):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return merged


def covered(start: float, end: float, busy: Sequence[Span]) -> float:
    """How much of start..end lies in `busy`, spans that do not overlap.

    >>> covered(1.0, 5.0, [(0.0, 2.0), (4.0, 9.0)])
    2.0
    """
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in busy)
