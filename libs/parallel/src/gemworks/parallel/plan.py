"""A plan: how one world of ranks is split for dense weights, experts and embedding tables.

Every view is a factorisation of the same world. The five dimensions of the published system are shard, replica,
expert, table group and table replica (Engineering at Meta, 2026-08-03); `expert_shard`, `replica_shard` and the
replicas of experts say how experts and table replicas nest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gemworks.parallel._check import kind, whole
from gemworks.parallel.cluster import ClusterSpec

View = Literal["dense", "experts", "sparse"]
VIEWS: tuple[View, ...] = ("dense", "experts", "sparse")

# Axes of a view, outermost first: this is the row-major order.
VIEW_AXES: Mapping[View, tuple[str, ...]] = {
    "dense": ("replica", "shard"),
    "experts": ("replica", "expert_shard", "expert"),
    "sparse": ("replica", "table_group", "replica_shard"),
}


@dataclass(frozen=True, kw_only=True)
class DensePlan:
    """2D FSDP: weights sharded over `shard` ranks, that group repeated `replica` times."""

    shard: int
    replica: int = 1


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """Experts over `expert` ranks; an expert's weights sharded over `expert_shard`, repeated `replica` times."""

    expert: int
    expert_shard: int = 1
    replica: int = 1


@dataclass(frozen=True, kw_only=True)
class SparsePlan:
    """Tables model-parallel over `table_group` ranks.

    A table shard has `replica_shard * replica` replicas: `replica_shard` of them hold a part each (within one NVLink
    domain) and gather it for the lookup; across `replica` the parts are averaged by an all-reduce, every `sync_every`
    steps (1: replicas never differ; above 1: local updates in between, as torchrec's two-dimensional tables allow).
    """

    table_group: int
    replica_shard: int = 1
    replica: int = 1
    sync_every: int = 1


VIEW_KINDS: Mapping[View, type] = {"dense": DensePlan, "experts": ExpertPlan, "sparse": SparsePlan}


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """The views of one world.

    Attributes:
        dense: always there.
        experts: None if the model has none.
        sparse: None if the model has no sharded tables.

    Example:
        >>> plan = ParallelPlan.for_world(4096, shard=256, expert=2, expert_shard=16, table_group=256, replica_shard=8)
        >>> plan.sparse
        SparsePlan(table_group=256, replica_shard=8, replica=2, sync_every=1)
    """

    dense: DensePlan
    experts: ExpertPlan | None = None
    sparse: SparsePlan | None = None

    def __post_init__(self) -> None:
        kind("dense", self.dense, DensePlan)
        for view in self.views():
            kind(view, getattr(self, view), VIEW_KINDS[view])
            for axis, size in self.sizes(view).items():
                whole(f"{view}.{axis}", size)
        if self.sparse is not None:
            whole("sparse.sync_every", self.sparse.sync_every, unit="steps")
        world = self.world_size
        for view in self.views():
            product = math.prod(self.sizes(view).values())
            if product != world:
                text = " x ".join(f"{a} {n}" for a, n in self.sizes(view).items())
                rest = product // self.sizes(view)["replica"]
                fix = (
                    f"set {view}.replica={world // rest}"
                    if world % rest == 0
                    else f"make {' x '.join(a for a in self.sizes(view) if a != 'replica')} divide {world}"
                )
                raise ValueError(f"{view}: got {text} = {product} ranks, expected {world} as in dense; {fix}")

    @property
    def world_size(self) -> int:
        return self.dense.shard * self.dense.replica

    def views(self) -> tuple[View, ...]:
        """The views that the plan has."""
        return tuple(v for v in VIEWS if getattr(self, v) is not None)

    def sizes(self, view: View) -> dict[str, int]:
        """Axis -> size, outermost first in row-major order.

        Raises:
            ValueError: the plan lacks the view.
        """
        part = getattr(self, view, None)
        if part is None:
            raise ValueError(f"view: got {view!r}, expected one of {self.views()}, which the plan has")
        return {axis: getattr(part, axis) for axis in VIEW_AXES[view]}

    @classmethod
    def for_world(
        cls,
        world_size: int,
        *,
        shard: int,
        expert: int | None = None,
        expert_shard: int = 1,
        table_group: int | None = None,
        replica_shard: int = 1,
        sync_every: int = 1,
    ) -> ParallelPlan:
        """The plan of `world_size` ranks with every replica count filled in.

        Raises:
            ValueError: a product does not divide `world_size`; the message names divisors nearby. Or a size of a view
                that the plan does not have.
        """
        whole("world_size", world_size)
        for name, size, view_of in (
            ("expert_shard", expert_shard, expert),
            ("replica_shard", replica_shard, table_group),
            ("sync_every", sync_every, table_group),
        ):
            if view_of is None and size != 1:
                missing = "expert" if name == "expert_shard" else "table_group"
                raise ValueError(f"{name}: got {size!r} without {missing}, expected both or neither; give {missing}")

        def rest(view: View, **axes: int) -> int:
            for axis, size in axes.items():
                whole(f"{view}.{axis}", size)
            product = math.prod(axes.values())
            if world_size % product:
                text = " x ".join(f"{a} {n}" for a, n in axes.items())
                raise ValueError(
                    f"{view}: got {text} = {product}, expected a divisor of the world size {world_size}; "
                    f"the nearest divisors are {_near_divisors(world_size, product)}"
                )
            return world_size // product

        return cls(
            dense=DensePlan(shard=shard, replica=rest("dense", shard=shard)),
            experts=None
            if expert is None
            else ExpertPlan(
                expert=expert,
                expert_shard=expert_shard,
                replica=rest("experts", expert=expert, expert_shard=expert_shard),
            ),
            sparse=None
            if table_group is None
            else SparsePlan(
                table_group=table_group,
                replica_shard=replica_shard,
                replica=rest("sparse", table_group=table_group, replica_shard=replica_shard),
                sync_every=sync_every,
            ),
        )

    def problems(self, cluster: ClusterSpec, *, num_experts: int | None = None) -> list[str]:
        """Why the plan cannot run on the cluster, each with what to change; empty if it can.

        Args:
            cluster: where.
            num_experts: of the model, if it is known.
        """
        kind("cluster", cluster, ClusterSpec, "take one of presets")
        if num_experts is not None:
            whole("num_experts", num_experts)
        found: list[str] = []
        world = self.world_size
        if world != cluster.num_gpus:
            found.append(
                f"world: the plan has {world} ranks, the cluster {cluster.num_gpus} GPUs ({cluster.shape_text()}); "
                f"use cluster.resized({world}) or set dense.replica={max(1, cluster.num_gpus // self.dense.shard)}"
            )
        if self.sparse is not None and self.sparse.replica_shard > 1:
            r = self.sparse.replica_shard
            if r > cluster.gpus_per_domain or cluster.gpus_per_domain % r:
                fits = max(
                    k for k in range(1, cluster.gpus_per_domain + 1) if cluster.gpus_per_domain % k == 0 and k <= r
                )
                found.append(
                    f"sparse.replica_shard: got {r}, expected a divisor of the {cluster.gpus_per_domain} GPUs of an "
                    f"NVLink domain: shards are gathered over NVLink every step; set replica_shard={fits} and "
                    f"replica={self.sparse.replica * r // fits}"
                )
        if self.experts is not None and num_experts is not None and num_experts % self.experts.expert:
            divisors = [k for k in range(1, num_experts + 1) if num_experts % k == 0]
            found.append(
                f"experts.expert: got {self.experts.expert} ranks for {num_experts} experts, expected a divisor of "
                f"{num_experts}: "
                f"one of {divisors}"
            )
        return found

    def validate(self, cluster: ClusterSpec, *, num_experts: int | None = None) -> None:
        """Raise `ValueError` with every entry of `problems`, one a line."""
        found = self.problems(cluster, num_experts=num_experts)
        if found:
            raise ValueError("the plan cannot run here:\n" + "\n".join(f"- {p}" for p in found))

    def to_dict(self) -> dict[str, Any]:
        """For JSON and TOML."""
        return {v: dataclasses.asdict(getattr(self, v)) for v in self.views()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ParallelPlan:
        """The inverse of `to_dict`.

        Raises:
            ValueError: an unknown view or axis.
        """
        unknown = sorted(set(content) - set(VIEW_KINDS))
        if unknown or "dense" not in content:
            raise ValueError(f"plan: got views {sorted(content)}, expected dense and optionally experts and sparse")
        parts: dict[str, Any] = {}
        for view, values in content.items():
            fields = dataclasses.fields(VIEW_KINDS[view])  # type: ignore[index]
            names = {f.name for f in fields}
            needed = {f.name for f in fields if f.default is dataclasses.MISSING}
            if not isinstance(values, Mapping) or set(values) - names or needed - set(values):
                got = sorted(values) if isinstance(values, Mapping) else repr(values)
                raise ValueError(f"{view}: got {got}, expected the axes {sorted(needed)} and some of {sorted(names)}")
            parts[view] = VIEW_KINDS[view](**values)  # type: ignore[index]
        return cls(**parts)

    def text(self) -> str:
        """One line, stable."""
        text = "; ".join(
            f"{v} " + " x ".join(f"{a} {n}" for a, n in reversed(self.sizes(v).items())) for v in self.views()
        )
        late = self.sparse is not None and self.sparse.sync_every > 1
        return f"{text}, averaged every {self.sparse.sync_every} steps" if late and self.sparse else text


def _near_divisors(world: int, value: int) -> list[int]:
    divisors = [k for k in range(1, world + 1) if world % k == 0]
    below = [k for k in divisors if k <= value][-1:]
    above = [k for k in divisors if k > value][:1]
    return below + above
