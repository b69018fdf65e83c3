"""Which rank takes which coordinate: a search that puts heavy traffic on fast tiers.

The views of a plan are independent: each may number the same world in its own way, because every view's collectives
carry the ranks' own data. So each view is placed alone, by the predicted time of its collectives.

Candidates are (1) every order of the axes, row-major among them, (2) every way of splitting the axes over the tiers
(so many ranks of an axis inside an NVLink domain, so many domains inside a zone, so many zones); a group's cost
depends on that split only, so these cover all mixed-radix numberings; (3) on small worlds, swaps of two ranks starting
from the best so far.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from gemworks.parallel._check import kind, number, one_of
from gemworks.parallel.cluster import COLLECTIVES, TIERS, ClusterSpec, Collective, Tier
from gemworks.parallel.costs import GroupShape, collective_cost
from gemworks.parallel.layout import Layout, _lines, widest_tier
from gemworks.parallel.plan import VIEW_AXES, ParallelPlan, View
from torch import Tensor

GIB = 2**30
MAX_SWAP_RANKS = 16


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """A collective that all groups of an axis run in each step.

    Attributes:
        view, axis: whose groups.
        collective: which.
        nbytes: S per call, in bytes, as the cluster file defines it.
        calls: per step.
    """

    view: View
    axis: str
    collective: Collective
    nbytes: float
    calls: float = 1.0

    def __post_init__(self) -> None:
        one_of("view", self.view, VIEW_AXES)
        one_of(f"axis of {self.view}", self.axis, VIEW_AXES[self.view])
        one_of("collective", self.collective, COLLECTIVES)
        number("nbytes", self.nbytes, least=0)
        number("calls", self.calls, least=0)


@dataclass(frozen=True, kw_only=True)
class PlacedView:
    """One placed view.

    Attributes:
        ranks: global ranks, one dim per axis.
        how: the axes' split over the tiers, or the order, or "swaps".
        cost_us: predicted time of the view's collectives per step.
        row_major_us: the same for the row-major numbering.
        tiers: axis -> the slowest tier that its groups cross; None for one rank.
    """

    ranks: Tensor
    how: str
    cost_us: float
    row_major_us: float
    tiers: Mapping[str, Tier | None]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Every view placed.

    Attributes:
        layout: the groups.
        views: how each view was placed and what it is predicted to cost.
    """

    layout: Layout
    views: Mapping[View, PlacedView]

    def text(self) -> str:
        """A table, stable."""
        rows = [f"{'view':8} {'axis':14} {'size':>6}  {'tier':10}  placement"]
        for view, placed in self.views.items():
            for axis, size in self.layout.plan.sizes(view).items():
                tier = placed.tiers[axis] or "-"
                rows.append(f"{view:8} {axis:14} {size:>6}  {tier:10}  {placed.how}")
            rows.append(f"{view:8} predicted {placed.cost_us:.0f} us a step, row-major {placed.row_major_us:.0f} us")
        return "\n".join(rows)


def default_traffic(plan: ParallelPlan) -> tuple[Traffic, ...]:
    """Traffic of a generic recommender, for when no model profile is at hand.

    2 GiB of dense weights in bf16 gathered twice and reduced once, 4 GiB of expert weights likewise, 0.25 GiB of
    activations per rank and direction for the experts, table shards of 4 GiB gathered twice and reduced once and
    averaged over replicas every `sync_every` steps, 0.25 GiB of looked-up rows each way. An expert's weights and a
    table shard are divided by their model-parallel size. Only the ratios matter here.
    """
    kind("plan", plan, ParallelPlan)
    found = [
        Traffic(view="dense", axis="shard", collective="all_gather", nbytes=2 * GIB, calls=2),
        Traffic(view="dense", axis="shard", collective="reduce_scatter", nbytes=2 * GIB),
        Traffic(view="dense", axis="replica", collective="all_reduce", nbytes=2 * GIB / plan.dense.shard),
    ]
    if plan.experts is not None:
        e = plan.experts
        weights = 4 * GIB / e.expert
        found += [
            Traffic(view="experts", axis="expert", collective="all_gather", nbytes=0.25 * GIB * e.expert, calls=2),
            Traffic(view="experts", axis="expert", collective="reduce_scatter", nbytes=0.25 * GIB * e.expert, calls=2),
            Traffic(view="experts", axis="expert_shard", collective="all_gather", nbytes=weights, calls=2),
            Traffic(view="experts", axis="expert_shard", collective="reduce_scatter", nbytes=weights),
            Traffic(view="experts", axis="replica", collective="all_reduce", nbytes=weights / e.expert_shard),
        ]
    if plan.sparse is not None:
        s = plan.sparse
        found += [
            Traffic(view="sparse", axis="table_group", collective="all_to_all", nbytes=0.25 * GIB, calls=2),
            Traffic(view="sparse", axis="replica_shard", collective="all_gather", nbytes=4 * GIB, calls=2),
            Traffic(view="sparse", axis="replica_shard", collective="reduce_scatter", nbytes=4 * GIB),
            Traffic(
                view="sparse",
                axis="replica",
                collective="all_reduce",
                nbytes=4 * GIB / s.replica_shard,
                calls=1 / s.sync_every,
            ),
        ]
    return tuple(found)


def default_constraints(plan: ParallelPlan, cluster: ClusterSpec) -> dict[tuple[View, str], Tier]:
    """How far axes may reach unless the caller says otherwise.

    Shards of table replicas stay in an NVLink domain. FSDP shard groups stay in a zone when they fit one, with the
    replicas across zones, as in the published system: a shard group over several zones is at best a little faster in a
    model that trusts the slow tier, and far slower when that tier is worse than the file says.

    Returns:
        (view, axis) -> the widest tier that it may cross.
    """
    limits: dict[tuple[View, str], Tier] = {}
    if plan.dense.shard <= cluster.gpus_per_zone and cluster.gpus_per_zone % plan.dense.shard == 0:
        limits["dense", "shard"] = "zone"
    if plan.sparse is not None:
        limits["sparse", "replica_shard"] = "nvlink"
    return limits


def place(
    plan: ParallelPlan,
    cluster: ClusterSpec,
    traffic: Sequence[Traffic] | None = None,
    *,
    constraints: Mapping[tuple[View, str], Tier] | None = None,
) -> Placement:
    """Place every view of a plan.

    Args:
        plan: validated against `cluster` first.
        cluster: rates and shape.
        traffic: what each axis carries; `default_traffic(plan)` if None.
        constraints: (view, axis) -> the widest tier that it may cross; on top of `default_constraints`, whose entries
            it can lift with "cross_zone".

    Returns:
        A `Placement` whose predicted cost is never above row-major's, unless a constraint rules row-major out.

    Raises:
        ValueError: the plan does not fit the cluster, or no numbering meets the constraints, or a constraint is on an
            axis that the plan lacks.
    """
    kind("plan", plan, ParallelPlan)
    plan.validate(cluster)
    items = tuple(default_traffic(plan) if traffic is None else traffic)
    limits = default_constraints(plan, cluster)
    for (view, axis), tier in (constraints or {}).items():
        one_of(f"constraints: axis of {view}", axis, plan.sizes(view))
        one_of(f"constraints: tier of {view}.{axis}", tier, TIERS)
    limits.update(constraints or {})
    views: dict[View, PlacedView] = {}
    for view in plan.views():
        mine = tuple(t for t in items if t.view == view)
        views[view] = _place_view(view, plan, cluster, mine, {a: t for (v, a), t in limits.items() if v == view})
    return Placement(layout=Layout(plan=plan, ranks={v: p.ranks for v, p in views.items()}), views=views)


def view_cost_us(view: View, ranks: Tensor, cluster: ClusterSpec, traffic: Sequence[Traffic]) -> float:
    """Predicted time of a view's collectives, one after the other.

    Args:
        view: whose axes `ranks` has.
        ranks: int64, one dim per axis.
        cluster: rates.
        traffic: items of other views are ignored.
    """
    axes = VIEW_AXES[view]
    return sum(
        t.calls * collective_cost(t.collective, _lines(ranks, axes.index(t.axis)), t.nbytes, cluster).us
        for t in traffic
        if t.view == view and ranks.shape[axes.index(t.axis)] > 1
    )


# One axis' share of the tiers: ranks inside an NVLink domain, domains inside a zone, zones.
Split = tuple[int, int, int]


def tier_splits(sizes: Sequence[int], cluster: ClusterSpec) -> tuple[tuple[Split, ...], ...]:
    """Every way to split axes over the tiers.

    Args:
        sizes: of the axes; their product is the cluster's number of GPUs.
        cluster: its shape.

    Returns:
        One tuple of splits per way; empty if the sizes don't factor along the shape.
    """
    return _tier_splits(tuple(sizes), (cluster.gpus_per_domain, cluster.domains_per_zone, cluster.num_zones))


@lru_cache(maxsize=4096)
def _tier_splits(sizes: tuple[int, ...], capacity: tuple[int, int, int]) -> tuple[tuple[Split, ...], ...]:
    def walk(i: int, left: tuple[int, int, int]) -> Iterator[tuple[Split, ...]]:
        if i == len(sizes):
            if left == (1, 1, 1):
                yield ()
            return
        for a in _divisors(math.gcd(sizes[i], left[0])):
            for b in _divisors(math.gcd(sizes[i] // a, left[1])):
                c = sizes[i] // a // b
                if left[2] % c == 0:
                    for rest in walk(i + 1, (left[0] // a, left[1] // b, left[2] // c)):
                        yield ((a, b, c), *rest)

    return tuple(walk(0, capacity))


@lru_cache(maxsize=4096)
def _divisors(n: int) -> tuple[int, ...]:
    return tuple(k for k in range(1, n + 1) if n % k == 0)


def split_shape(size: int, split: Split) -> GroupShape:
    """How the groups of an axis with this split lie."""
    return GroupShape(size=size, num_domains=split[1] * split[2], num_zones=split[2])


def split_tier(split: Split) -> Tier | None:
    """The slowest tier that an axis with this split crosses."""
    return "cross_zone" if split[2] > 1 else "zone" if split[1] > 1 else "nvlink" if split[0] > 1 else None


def best_split(
    sizes: Sequence[int],
    axes: Sequence[str],
    cluster: ClusterSpec,
    traffic: Sequence[Traffic],
    limits: Mapping[str, Tier],
) -> tuple[float, tuple[Split, ...]] | None:
    """The cheapest tier split of a view's axes within the limits; None if there is none.

    Ties go to the split that keeps later (inner) axes nearest.
    """
    best: tuple[float, tuple[int, ...], tuple[Split, ...]] | None = None
    cache: dict[tuple[int, Split], float] = {}
    by_axis = {i: [t for t in traffic if t.axis == axis] for i, axis in enumerate(axes)}
    for splits in tier_splits(sizes, cluster):
        if any(
            axis in limits and not _within(split_tier(s), limits[axis]) for axis, s in zip(axes, splits, strict=True)
        ):
            continue
        cost = 0.0
        for i, split in enumerate(splits):
            if sizes[i] == 1:
                continue
            if (i, split) not in cache:
                shape = split_shape(sizes[i], split)
                cache[i, split] = sum(
                    t.calls * collective_cost(t.collective, shape, t.nbytes, cluster).us for t in by_axis[i]
                )
            cost += cache[i, split]
        tie = tuple(-s[0] for s in reversed(splits))
        if best is None or (cost, tie) < best[:2]:
            best = (cost, tie, splits)
    return None if best is None else (best[0], best[2])


def ranks_of_split(sizes: Sequence[int], splits: Sequence[Split], cluster: ClusterSpec) -> Tensor:
    """The numbering of a tier split: int64, one dim per axis."""
    k = len(sizes)
    dims = [s[2] for s in splits] + [s[1] for s in splits] + [s[0] for s in splits]
    array = torch.arange(cluster.num_gpus).reshape(dims)
    order = [i + j for i in range(k) for j in (0, k, 2 * k)]
    return array.permute(order).reshape(tuple(sizes))


def _within(tier: Tier | None, limit: Tier) -> bool:
    order: tuple[Tier, ...] = ("nvlink", "zone", "cross_zone")
    return tier is None or order.index(tier) <= order.index(limit)


def _view_tiers(view: View, ranks: Tensor, cluster: ClusterSpec) -> dict[str, Tier | None]:
    return {
        axis: None if ranks.shape[i] == 1 else widest_tier(_lines(ranks, i), cluster)
        for i, axis in enumerate(VIEW_AXES[view])
    }


def _place_view(
    view: View, plan: ParallelPlan, cluster: ClusterSpec, traffic: Sequence[Traffic], limits: Mapping[str, Tier]
) -> PlacedView:
    axes = VIEW_AXES[view]
    sizes = tuple(plan.sizes(view).values())
    row_major = torch.arange(plan.world_size).reshape(sizes)
    row_major_us = view_cost_us(view, row_major, cluster, traffic)

    def allowed(ranks: Tensor) -> bool:
        tiers = _view_tiers(view, ranks, cluster)
        return all(_within(tiers[a], t) for a, t in limits.items() if a in tiers)

    best: tuple[float, Tensor, str] | None = None
    if allowed(row_major):
        best = (row_major_us, row_major, "row-major")
    for order in itertools.permutations(range(len(axes))):
        ranks = torch.arange(plan.world_size).reshape([sizes[i] for i in order])
        ranks = ranks.permute([order.index(i) for i in range(len(axes))]).contiguous()
        cost = view_cost_us(view, ranks, cluster, traffic)
        if (best is None or cost < best[0] * (1 - 1e-12)) and allowed(ranks):
            best = (cost, ranks, "order " + " > ".join(axes[i] for i in order))
    found = best_split(sizes, axes, cluster, traffic, limits)
    if found is not None and (best is None or found[0] < best[0] * (1 - 1e-12)):
        text = ", ".join(f"{a} {s[0]}x{s[1]}x{s[2]}" for a, s, n in zip(axes, found[1], sizes, strict=True) if n > 1)
        best = (found[0], ranks_of_split(sizes, found[1], cluster), f"nvlink x zone x cross: {text}")
    if best is None:
        wanted = ", ".join(f"{view}.{a} within {t}" for a, t in limits.items())
        raise ValueError(
            f"place: no numbering of {plan.text()} on {cluster.shape_text()} keeps {wanted}; make those axes divide "
            "the tier's size"
        )
    if plan.world_size <= MAX_SWAP_RANKS and traffic:
        best = _swap(view, best, cluster, traffic, allowed)
    return PlacedView(
        ranks=best[1],
        how=best[2],
        cost_us=best[0],
        row_major_us=row_major_us,
        tiers=_view_tiers(view, best[1], cluster),
    )


def _swap(
    view: View,
    start: tuple[float, Tensor, str],
    cluster: ClusterSpec,
    traffic: Sequence[Traffic],
    allowed: Callable[[Tensor], bool],
) -> tuple[float, Tensor, str]:
    """Hill climbing: swap two ranks while that helps."""
    cost, ranks, how = start
    flat = ranks.reshape(-1).clone()
    improved = True
    while improved:
        improved = False
        for i, j in itertools.combinations(range(flat.numel()), 2):
            candidate = flat.clone()
            candidate[[i, j]] = flat[[j, i]]
            candidate = ascending(candidate.reshape(ranks.shape))
            new = view_cost_us(view, candidate, cluster, traffic)
            if new < cost * (1 - 1e-9) and allowed(candidate):
                flat, cost, how, improved = candidate.reshape(-1), new, "swaps", True
    return cost, flat.reshape(ranks.shape), how


def ascending(ranks: Tensor) -> Tensor:
    """A numbering nearby whose ranks ascend along every axis: torch orders the ranks of a group so, whatever it is
    given.

    Sorting along one dim leaves the dims sorted before in order (Gale and Karp, "A phenomenon in the theory of
    sorting", 1972).
    """
    for dim in range(ranks.ndim):
        ranks = ranks.sort(dim=dim).values
    return ranks
