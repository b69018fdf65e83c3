"""What a plan's axes carry in a step, where that puts them on the cluster's tiers, and the groups that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemworks.parallel.cluster import ClusterSpec, Collective, Tier
from gemworks.parallel.layout import Layout
from gemworks.parallel.placement import Split, Traffic, best_split, default_constraints, ranks_of_split
from gemworks.parallel.plan import VIEW_AXES, ParallelPlan, View
from gemworks.parallel.profile import ModelProfile


def model_traffic(plan: ParallelPlan, model: ModelProfile) -> tuple[Traffic, ...]:
    """What every axis carries per step, in total; the basis of the placement."""
    found: list[Traffic] = []

    def add(view: View, axis: str, collective: Collective, nbytes: float, calls: float = 1.0) -> None:
        if nbytes > 0 and plan.sizes(view)[axis] > 1:
            found.append(Traffic(view=view, axis=axis, collective=collective, nbytes=nbytes, calls=calls))

    d, e, s = plan.dense, plan.experts, plan.sparse
    n = max(1, sum(x.kind == "dense" for x in model.layers))
    add("dense", "shard", "all_gather", model.dense_params / n * model.weight_bytes, 2 * n)
    add("dense", "shard", "reduce_scatter", model.dense_params / n * model.gradient_bytes, n)
    pieces = n if d.shard > 1 else 1  # replicated weights are averaged in one piece
    add("dense", "replica", "all_reduce", model.dense_params / pieces / d.shard * model.gradient_bytes, pieces)
    if e is not None and model.num_experts:
        k = sum(x.kind == "expert" for x in model.layers)
        weights = model.expert_params / k / e.expert
        exchange = sum(x.exchange_bytes for x in model.layers) / k * e.expert
        add("experts", "expert", "all_gather", exchange, 2 * k)
        add("experts", "expert", "reduce_scatter", exchange, 2 * k)
        add("experts", "expert_shard", "all_gather", weights * model.weight_bytes, 2 * k)
        add("experts", "expert_shard", "reduce_scatter", weights * model.gradient_bytes, k)
        add("experts", "replica", "all_reduce", weights / e.expert_shard * model.gradient_bytes, k)
    if s is not None and model.tables:
        weights = model.table_bytes / s.table_group
        add("sparse", "table_group", "all_to_all", model.ids_per_batch * model.bytes_per_row, 2)
        add("sparse", "table_group", "all_to_all", model.ids_per_batch * 8)
        add("sparse", "replica_shard", "all_gather", model.table_weight_bytes / s.table_group)
        add("sparse", "replica_shard", "all_gather", weights)
        add("sparse", "replica_shard", "reduce_scatter", weights)
        add("sparse", "replica", "all_reduce", weights / s.replica_shard, 1 / s.sync_every)
    return tuple(found)


def place_splits(
    plan: ParallelPlan, model: ModelProfile, cluster: ClusterSpec, views: Sequence[View] | None = None
) -> dict[View, dict[str, Split]] | None:
    """The cheapest tier split of every view for this model's traffic; None if a view does not factor along the cluster.

    Args:
        plan, model, cluster: what goes where.
        views: only these; all of the plan's if None.
    """
    traffic = model_traffic(plan, model)
    found: dict[View, dict[str, Split]] = {}
    for view in views or plan.views():
        axes = VIEW_AXES[view]
        limits: dict[str, Tier] = {a: t for (v, a), t in default_constraints(plan, cluster).items() if v == view}
        best = best_split(
            tuple(plan.sizes(view).values()), axes, cluster, [t for t in traffic if t.view == view], limits
        )
        if best is None:
            return None
        found[view] = dict(zip(axes, best[1], strict=True))
    return found


def layout_of_splits(plan: ParallelPlan, splits: Mapping[View, Mapping[str, Split]], cluster: ClusterSpec) -> Layout:
    """The groups of tier splits."""
    return Layout(
        plan=plan,
        ranks={
            v: ranks_of_split(tuple(plan.sizes(v).values()), [splits[v][a] for a in VIEW_AXES[v]], cluster)
            for v in plan.views()
        },
    )


def num_communicators(plan: ParallelPlan, splits: Mapping[View, Mapping[str, Split]], cluster: ClusterSpec) -> int:
    """Distinct process groups of rank 0, beyond the world's, from the splits alone."""
    seen: set[tuple[int, ...]] = set()
    capacity = (cluster.gpus_per_domain, cluster.domains_per_zone, cluster.num_zones)
    for view in plan.views():
        axes = VIEW_AXES[view]
        for i, axis in enumerate(axes):
            if plan.sizes(view)[axis] == 1:
                continue
            members = [0]
            unit = 1
            for tier in range(3):
                # Later axes vary faster inside a tier, as in `ranks_of_split`.
                stride = unit
                for later in axes[i + 1 :]:
                    stride *= splits[view][later][tier]
                members = [m + k * stride for k in range(splits[view][axis][tier]) for m in members]
                unit *= capacity[tier]
            if len(members) < plan.world_size:
                seen.add(tuple(sorted(members)))
    return len(seen)
