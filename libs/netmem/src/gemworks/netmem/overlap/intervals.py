"""Sets of time as sorted lists of disjoint half-open intervals, in microseconds."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Merge overlapping and touching intervals.

    >>> union([(5, 6), (0, 2), (1, 3), (3, 4)])
    [(0, 4), (5, 6)]
    """
    merged: Intervals = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Intervals) -> float:
    """Length of a merged set."""
    return sum(end - start for start, end in intervals)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The part of a outside b; both merged.

    >>> subtract([(0, 10)], [(2, 3), (8, 20)])
    [(0, 2), (3, 8)]
    """
    left: Intervals = []
    at = 0
    for start, end in a:
        while at < len(b) and b[at][1] <= start:
            at += 1
        k = at
        while k < len(b) and b[k][0] < end:
            if b[k][0] > start:
                left.append((start, b[k][0]))
            start = max(start, b[k][1])
            k += 1
        if start < end:
            left.append((start, end))
    return left


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The part of a inside b; both merged.

    >>> intersect([(0, 10)], [(2, 3), (8, 20)])
    [(2, 3), (8, 10)]
    """
    return subtract(a, subtract(a, b))
