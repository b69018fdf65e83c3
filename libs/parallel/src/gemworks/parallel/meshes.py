"""The views of a plan as torch `DeviceMesh`es over deduplicated process groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from gemworks.parallel._check import kind
from gemworks.parallel.cluster import ClusterSpec
from gemworks.parallel.layout import Layout
from gemworks.parallel.placement import Placement, Traffic, place
from gemworks.parallel.plan import VIEW_AXES, ParallelPlan, View
from torch.distributed.device_mesh import DeviceMesh

DEFAULT_TIMEOUT = timedelta(minutes=5)


# Groups of the current world by (members, time-out). torch names a group that its members alone create by their ranks:
# destroyed and made again, it would find its own old address in the store. So a group is made once and kept.
_groups: dict[tuple[tuple[int, ...], timedelta], dist.ProcessGroup] = {}
_groups_world: dist.ProcessGroup | None = None


def members_group(members: Sequence[int], timeout: timedelta = DEFAULT_TIMEOUT) -> dist.ProcessGroup:
    """A process group that its members alone create; the world's own if they are the world.

    The same members with the same time-out get the same group, so that no communicator is made twice.

    Args:
        members: global ranks, this one among them.
        timeout: of its collectives; the world's own group keeps the one of `init_process_group`.
    """
    global _groups_world
    world = dist.group.WORLD
    assert world is not None
    if sorted(members) == list(range(dist.get_world_size())):
        return world
    if _groups_world is not world:
        _groups.clear()
        _groups_world = world
    key = (tuple(members), timeout)
    if key not in _groups:
        # A world that is bound to its device makes NCCL groups by splitting its communicator, which waits for ranks
        # that are no members. Unbound, the group gets a communicator of its own at its first collective.
        bound, world.bound_device_id = world.bound_device_id, None
        try:
            group = dist.new_group(list(members), timeout=timeout, use_local_synchronization=True)
        finally:
            world.bound_device_id = bound
        assert isinstance(group, dist.ProcessGroup)
        _groups[key] = group
    return _groups[key]


class Meshes:
    """Process groups and `DeviceMesh`es of one rank; made by `build_meshes`.

    Groups are made for axes with more than one rank only, once per member list, by their members alone. An axis of one
    rank has no group and is left out of meshes.

    Attributes:
        placement: where everything is.
        layout: the same, the numbers.
        rank: this process.
        num_communicators: distinct process groups that this rank uses, beyond the world's.

    Raises:
        ValueError: a group's ranks do not ascend; on every rank alike.
    """

    def __init__(self, placement: Placement, device_type: str, timeout: timedelta) -> None:
        self.placement = placement
        self.layout: Layout = placement.layout
        for view, axis in self.layout.used_axes():
            groups = self.layout.groups(view, axis)
            falls = (groups.diff(dim=1) < 0).any(dim=1)
            if bool(falls.any()):
                # A rank's coordinate along the axis would not be its place in the group: rows and shards would be
                # looked for on the wrong rank.
                raise ValueError(
                    f"placement: got the {view}.{axis} group {groups[falls][0].tolist()}, expected ranks that ascend: "
                    "torch orders a group's ranks itself; number the view by placement.ascending(ranks)"
                )
        self.rank = dist.get_rank()
        self.device_type = device_type
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for members in self.layout.communicators(self.rank):
            # Every rank walks its axes in the same order, so members meet in the same order.
            self._groups[members] = members_group(members, timeout)
        self.num_communicators = len(self._groups)

    def group(self, view: View, axis: str) -> dist.ProcessGroup | None:
        """The process group of an axis, or None for an axis of one rank.

        Raises:
            ValueError: no such view or axis.
        """
        members = self.layout.group_of(self.rank, view, axis)
        if len(members) == 1:
            return None
        if members == tuple(range(self.layout.plan.world_size)):
            group = dist.group.WORLD
            assert group is not None
            return group
        return self._groups[members]

    def mesh(self, view: View, axes: Sequence[str] | None = None) -> DeviceMesh | None:
        """A view, or some of its axes, as a `DeviceMesh` with the placement's rank permutation.

        Args:
            view: of the plan.
            axes: which, outermost first; the view's own order if None. Axes of one rank are dropped.

        Returns:
            The mesh, named by its axes (this rank's slice of the world when `axes` is a part), or None if all axes
            have one rank.
        """
        sizes = self.layout.plan.sizes(view)
        wanted = VIEW_AXES[view] if axes is None else tuple(axes)
        unknown = [a for a in wanted if a not in sizes]
        if unknown:
            raise ValueError(f"axes: got {unknown}, expected some of {VIEW_AXES[view]} of the view {view}")
        used = [a for a in wanted if sizes[a] > 1]
        if not used:
            return None
        here = self.layout.coordinates(self.rank, view)
        index = tuple(slice(None) if a in used else here[a] for a in VIEW_AXES[view])
        kept = [a for a in VIEW_AXES[view] if a in used]
        array = self.layout.ranks[view][index].permute([kept.index(a) for a in used]).contiguous()
        groups = [self.group(view, a) for a in used]
        assert all(g is not None for g in groups)
        if len(used) == 1:
            return DeviceMesh.from_group(groups[0], self.device_type, mesh_dim_names=(used[0],))  # type: ignore[arg-type]
        return DeviceMesh.from_group(groups, self.device_type, mesh=array, mesh_dim_names=tuple(used))  # type: ignore[arg-type]


def build_meshes(
    plan: ParallelPlan,
    cluster: ClusterSpec,
    *,
    device_type: str = "cpu",
    traffic: Sequence[Traffic] | None = None,
    placement: Placement | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Meshes:
    """Create this rank's process groups and meshes; every rank of the world calls it.

    For the numbers alone, without processes, use `place(plan, cluster).layout`.

    Args:
        plan: validated against the cluster.
        cluster: its ranks are the world's.
        device_type: "cpu" or "cuda".
        traffic: for the placement; see `place`.
        placement: take this one instead of searching.
        timeout: after it a collective whose peer died raises (gloo) or aborts the process (NCCL), so that nothing
            hangs. An axis over the whole world uses the world's own group, with the time-out of `init_process_group`.

    Raises:
        ValueError: `torch.distributed` is not initialised, its world is not the plan's, or the placement is of another
            plan.
    """
    kind("plan", plan, ParallelPlan)
    kind("timeout", timeout, timedelta)
    if not dist.is_initialized():
        raise ValueError("build_meshes: torch.distributed is not initialised; call init_process_group first")
    if dist.get_world_size() != plan.world_size:
        raise ValueError(
            f"plan: got {plan.world_size} ranks, expected {dist.get_world_size()}, the world of this process group; "
            "make a plan with ParallelPlan.for_world"
        )
    if placement is not None and placement.layout.plan != plan:
        raise ValueError(
            f"placement: got one of {placement.layout.plan.text()}, expected {plan.text()}; call place(plan)"
        )
    return Meshes(placement or place(plan, cluster, traffic), device_type, timeout)
