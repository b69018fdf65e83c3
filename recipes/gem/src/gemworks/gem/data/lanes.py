"""Row groups dealt to lanes, so that each rank decodes its own row groups and no others.

A data set has a fixed number of lanes, whatever the number of ranks. Row groups go to lanes in time order, each to the
lane with the fewest rows so far. A step takes equally many rows of every lane, and a rank owns a contiguous range of
lanes. So the samples of a step depend on the number of lanes and not on the number of ranks, and any number of ranks
that divides the lanes reads nothing twice. (The idea of a canonical partition under a changing number of ranks is that
of MosaicML Streaming's elastic determinism, https://docs.mosaicml.com/projects/streaming.)

Lanes have unequal numbers of rows. Steps are dealt by lanes as long as all lanes have rows; what is left, at most one
row group per lane and a step, is dealt evenly, and there the ranks share row groups.

Shapes: G row groups, L lanes, B places or rows.
"""

from __future__ import annotations

import numpy as np
from gemworks.gem.data.hashing import permutation
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


class Lanes:
    """The order of the rows of a split, lane by lane.

    Args:
        sizes_G: int64 [G], rows of each row group, in time order.
        num_lanes: L.
        shuffle_window: rows are permuted inside consecutive windows of this many of their lane; 0 or 1 keeps time
            order.
        seed: of the permutations.

    Attributes:
        num_common: rows that every lane has.

    >>> lanes = Lanes(np.array([2, 2, 3]), 2)
    >>> lanes.num_rows_L.tolist(), lanes.num_common
    ([5, 2], 2)
    >>> lanes.rows_of_lane(0, epoch=0, first=1, last=4).tolist()
    [1, 4, 5]
    """

    def __init__(self, sizes_G: Int64, num_lanes: int, *, shuffle_window: int = 0, seed: int = 0) -> None:
        self.num_lanes = num_lanes
        self._window = shuffle_window
        self._seed = seed
        self.num_rows_L = np.zeros(num_lanes, dtype=np.int64)
        groups_L: list[list[int]] = [[] for _ in range(num_lanes)]
        for group, size in enumerate(sizes_G.tolist()):
            lane = int(np.argmin(self.num_rows_L))
            groups_L[lane].append(group)
            self.num_rows_L[lane] += size
        first_row_G = np.cumsum(sizes_G) - sizes_G
        self._first_rows = [first_row_G[groups] for groups in groups_L]
        self._ends = [np.cumsum(sizes_G[groups]) for groups in groups_L]
        self.num_common = int(self.num_rows_L.min())
        self._ends_of_tails_L = np.cumsum(self.num_rows_L - self.num_common)

    def rows_of_lane(self, lane: int, *, epoch: int, first: int, last: int) -> Int64:
        """Rows of the split at the lane's places [first, last) in an epoch."""
        return self._at(lane, epoch, np.arange(first, last, dtype=np.int64))

    def rows_in_order(self, *, epoch: int, first: int, last: int) -> Int64:
        """Rows at places [first, last) of the whole order: lanes in turn while all have rows, then lane after lane."""
        places_B = np.arange(first, last, dtype=np.int64)
        tail_B = places_B - self.num_common * self.num_lanes
        lane_B = np.where(
            tail_B < 0, places_B % self.num_lanes, np.searchsorted(self._ends_of_tails_L, tail_B, side="right")
        )
        tails_L = self.num_rows_L - self.num_common
        first_of_tail_L = self._ends_of_tails_L - tails_L
        in_lane_B = np.where(tail_B < 0, places_B // self.num_lanes, self.num_common + tail_B - first_of_tail_L[lane_B])
        rows_B = np.empty(len(places_B), dtype=np.int64)
        for lane in np.unique(lane_B).tolist():
            at = np.flatnonzero(lane_B == lane)
            rows_B[at] = self._at(lane, epoch, in_lane_B[at])
        return rows_B

    def _at(self, lane: int, epoch: int, places_B: Int64) -> Int64:
        """Rows at the given places of a lane."""
        places_B = self._shuffled(lane, epoch, places_B)
        group_B = np.searchsorted(self._ends[lane], places_B, side="right")
        size_before_B = np.concatenate([[0], self._ends[lane]])[group_B]
        return self._first_rows[lane][group_B] + places_B - size_before_B

    def _shuffled(self, lane: int, epoch: int, places_B: Int64) -> Int64:
        window = self._window
        if window <= 1 or len(places_B) == 0:
            return places_B
        shuffled_B = np.empty_like(places_B)
        index_B = places_B // window
        for index in np.unique(index_B).tolist():
            start, at = index * window, np.flatnonzero(index_B == index)
            order = permutation(min(window, int(self.num_rows_L[lane]) - start), self._seed, epoch, lane, index)
            shuffled_B[at] = start + order[places_B[at] - start]
        return shuffled_B
