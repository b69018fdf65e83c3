"""Who is in which group: every view as an array of global ranks, as pure numbers.

Nothing here needs a process group, so 16,384 ranks are as easy as eight. Placement permutes ranks inside a view's array
and never devices: permuting visible devices has reordered gathers silently (NVIDIA/nccl#1906).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from gemworks.parallel._check import kind
from gemworks.parallel.cluster import ClusterSpec, Tier
from gemworks.parallel.plan import VIEW_AXES, ParallelPlan, View
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The views of a plan as arrays of global ranks.

    Attributes:
        plan: the plan.
        ranks: view -> int64 array, one dim per axis in the order of `VIEW_AXES[view]`; holds each rank once.

    Example:
        >>> layout = Layout.row_major(ParallelPlan.for_world(8, shard=4))
        >>> layout.groups("dense", "shard").tolist()
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        >>> layout.group_of(6, "dense", "replica")
        (2, 6)
    """

    plan: ParallelPlan
    ranks: Mapping[View, Tensor]

    def __post_init__(self) -> None:
        kind("plan", self.plan, ParallelPlan)
        world = torch.arange(self.plan.world_size)
        for view in self.plan.views():
            array = self.ranks.get(view)
            if not isinstance(array, Tensor | None) or (array is not None and array.dtype != torch.int64):
                got = array.dtype if isinstance(array, Tensor) else type(array).__name__
                raise ValueError(f"ranks[{view!r}]: got {got}, expected an int64 tensor")
            want = tuple(self.plan.sizes(view).values())
            if array is None or tuple(array.shape) != want:
                got = None if array is None else tuple(array.shape)
                raise ValueError(f"ranks[{view!r}]: got shape {got}, expected {want} as the plan's {VIEW_AXES[view]}")
            if not torch.equal(array.reshape(-1).sort().values, world):
                raise ValueError(f"ranks[{view!r}]: expected a permutation of 0..{self.plan.world_size - 1}")

    @staticmethod
    def row_major(plan: ParallelPlan) -> Layout:
        """Ranks in order, the last axis of `VIEW_AXES` varying fastest."""
        kind("plan", plan, ParallelPlan)
        return Layout(
            plan=plan,
            ranks={v: torch.arange(plan.world_size).reshape(tuple(plan.sizes(v).values())) for v in plan.views()},
        )

    def groups(self, view: View, axis: str) -> Tensor:
        """All groups along one axis.

        Args:
            view: of the plan.
            axis: of the view.

        Returns:
            int64 [num_groups, size]: the global ranks of each group, in the axis' order.

        Raises:
            ValueError: no such view or axis.
        """
        return _lines(self._array(view), self._dim(view, axis))

    def group_of(self, rank: int, view: View, axis: str) -> tuple[int, ...]:
        """The global ranks of the group along `axis` that `rank` belongs to, in the axis' order."""
        array, dim = self._array(view), self._dim(view, axis)
        index: list[int | slice] = list(self._coords(rank, view))
        index[dim] = slice(None)
        return tuple(array[tuple(index)].tolist())

    def coordinates(self, rank: int, view: View) -> dict[str, int]:
        """Axis -> coordinate of a rank."""
        return dict(zip(VIEW_AXES[view], self._coords(rank, view), strict=True))

    def used_axes(self) -> list[tuple[View, str]]:
        """The axes with more than one rank: only these need communicators."""
        return [(v, a) for v in self.plan.views() for a, n in self.plan.sizes(v).items() if n > 1]

    def communicators(self, rank: int) -> list[tuple[int, ...]]:
        """The distinct process groups, beyond the world's, that `rank` needs: used axes only, equal member lists once.

        Returns:
            Member lists, each sorted as in the axis' order, in the order of first use. A group as large as the world
            is left out if its order is the world's own: the default group serves it.
        """
        world = tuple(range(self.plan.world_size))
        seen: dict[tuple[int, ...], None] = {}
        for view, axis in self.used_axes():
            members = self.group_of(rank, view, axis)
            if members != world:
                seen.setdefault(members, None)
        return list(seen)

    def crossings(self, cluster: ClusterSpec) -> dict[tuple[View, str], Tier | None]:
        """For every axis the slowest tier that any of its groups crosses; None for an axis of one rank."""
        found: dict[tuple[View, str], Tier | None] = {}
        for view in self.plan.views():
            for axis, size in self.plan.sizes(view).items():
                found[view, axis] = None if size == 1 else widest_tier(self.groups(view, axis), cluster)
        return found

    def _array(self, view: View) -> Tensor:
        self.plan.sizes(view)
        return self.ranks[view]

    def _dim(self, view: View, axis: str) -> int:
        if axis not in VIEW_AXES[view]:
            raise ValueError(f"axis: got {axis!r}, expected one of {VIEW_AXES[view]} of the view {view}")
        return VIEW_AXES[view].index(axis)

    def _coords(self, rank: int, view: View) -> list[int]:
        if not isinstance(rank, int) or not 0 <= rank < self.plan.world_size:
            raise ValueError(f"rank: got {rank!r}, expected 0..{self.plan.world_size - 1}")
        return (self._array(view) == rank).nonzero()[0].tolist()


def _lines(array: Tensor, dim: int) -> Tensor:
    return array.movedim(dim, -1).reshape(-1, array.shape[dim])


def widest_tier(groups: Tensor, cluster: ClusterSpec) -> Tier:
    """The slowest tier that any group crosses.

    Args:
        groups: int64 [num_groups, size], size > 1.
        cluster: where.
    """
    zones, domains = groups // cluster.gpus_per_zone, groups // cluster.gpus_per_domain
    if bool((zones != zones[:, :1]).any()):
        return "cross_zone"
    return "zone" if bool((domains != domains[:, :1]).any()) else "nvlink"
