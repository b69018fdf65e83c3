"""Predict a training step: compute, collectives on their tiers, overlap, imbalance, memory.

One rank's step is a graph of operations on three queues: compute, NVLink collectives, network collectives. A queue
runs its operations in the order of launch; an operation starts when its queue is free and its inputs are there. The
compute queue's waiting is charged to what ran meanwhile on the queue that it waits for, so the items of the report add
up to the step
exactly:

    E2E MFU = Local MFU x Scaling Ratio,   Scaling Ratio = time of the layers alone / step time

What is modelled and what not: all ranks run the same graph; the slowest rank's batch sets compute times (the expected
maximum over ranks, see `lengths`); collectives of one queue do not overlap one another; compute slows down by
`sm_slowdown` while a collective runs; nothing of a step overlaps the next one. There is no pipeline parallelism, so
there are no bubbles.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gemworks.parallel.cluster import ClusterSpec, Collective, Tier
from gemworks.parallel.costs import CollectiveCost, GroupShape, collective_cost
from gemworks.parallel.layout import Layout
from gemworks.parallel.lengths import expected_imbalance
from gemworks.parallel.memory import InfeasiblePlan, MemoryEstimate, estimate_memory, infeasible_report
from gemworks.parallel.placement import Split, Traffic, best_split, default_constraints, ranks_of_split, split_shape
from gemworks.parallel.plan import VIEW_AXES, ParallelPlan, View
from gemworks.parallel.profile import LayerProfile, ModelProfile
from gemworks.parallel.timeline import Op, Queue, run_ops

Balance = Literal["none", "bbs", "global"]


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """How a step is run.

    Attributes:
        balance: of ranks' batches.
        balance_gain: method -> share of the excess over the mean that it removes; the defaults are of the balance table
            (window of 16 batches of 8 sub-batches, uniform and Zipf lengths, 64 to 4,096 ranks).
        sm_slowdown: of compute while a collective runs; 0.092: two 8192 matmuls under an NCCL all-gather of 256 MiB on
            two H200.
        prefetch: gather weights one layer ahead.
        overlap_exchange: expert exchange overlaps the neighbouring layers.
        overlap_tables: table gathers are launched ahead.
        keep_gathered: gathered dense weights stay for backward (no second all-gather).
        peer_us: cost of every peer in an all-to-all, on top of its bytes. Nothing here measures it, so it is 0: what
            groups of tables save in time over tables on the whole world depends on it.
        validation: the error of these predictions on hardware, printed with every result.
    """

    balance: Balance = "bbs"
    balance_gain: Mapping[str, float] = field(default_factory=lambda: {"none": 0.0, "bbs": 0.7, "global": 0.95})
    sm_slowdown: float = 0.092
    prefetch: bool = True
    overlap_exchange: bool = True
    overlap_tables: bool = True
    keep_gathered: bool = False
    peer_us: float = 0.0
    validation: str = "error: no measurement on file for this cluster; closed forms and conservation only"


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A predicted step.

    Attributes:
        plan, model, cluster: names and the plan itself.
        step_us: predicted.
        items: label -> us; they sum to `step_us`.
        alone_us: all layers run alone, the reference of the Scaling Ratio.
        local_mfu, scaling_ratio: their product is `mfu`.
        imbalance: expected maximum over ranks / mean of a batch's cost, after balancing.
        memory: of one rank.
        collectives: label -> (calls, us in total, tier).
        bytes_by_tier: sent by an average rank per step.
        splits: view -> axis -> (ranks in a domain, domains in a zone, zones).
        ops: the timeline.
        validation: how far to trust it.
    """

    plan: ParallelPlan
    model: str
    cluster: str
    step_us: float
    items: Mapping[str, float]
    alone_us: float
    local_mfu: float
    scaling_ratio: float
    imbalance: float
    memory: MemoryEstimate
    collectives: Mapping[str, tuple[int, float, Tier | None]]
    bytes_by_tier: Mapping[str, float]
    splits: Mapping[View, Mapping[str, Split]]
    ops: Sequence[Op]
    validation: str

    @property
    def mfu(self) -> float:
        """End to end."""
        return self.local_mfu * self.scaling_ratio

    def text(self) -> str:
        """For people; stable."""
        lines = [
            f"plan     {self.plan.text()}",
            f"model    {self.model}",
            f"cluster  {self.cluster}",
            f"step     {self.step_us / 1e3:.2f} ms",
            f"MFU      {self.mfu:.1%} = local {self.local_mfu:.1%} x scaling {self.scaling_ratio:.1%}",
            f"imbalance {self.imbalance:.4f} (expected max / mean over ranks)",
            "",
            f"{'item':44} {'ms':>9} {'share':>7}",
        ]
        for label, us in sorted(self.items.items(), key=lambda kv: (-kv[1], kv[0])):
            lines.append(f"{label:44} {us / 1e3:>9.3f} {us / self.step_us:>7.1%}")
        lines += ["", f"{'collective':44} {'calls':>5} {'ms':>9}  tier"]
        for label, (calls, us, tier) in self.collectives.items():
            lines.append(f"{label:44} {calls:>5} {us / 1e3:>9.3f}  {tier or '-'}")
        sent = ", ".join(f"{t} {b / 1e9:.2f} GB" for t, b in self.bytes_by_tier.items())
        return "\n".join([*lines, "", f"sent per rank: {sent or '-'}", "memory", self.memory.text(), self.validation])

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without the timeline."""
        return {
            "plan": self.plan.to_dict(),
            "model": self.model,
            "cluster": self.cluster,
            "step_us": self.step_us,
            "mfu": self.mfu,
            "local_mfu": self.local_mfu,
            "scaling_ratio": self.scaling_ratio,
            "imbalance": self.imbalance,
            "items_us": dict(self.items),
            "collectives": {k: {"calls": c, "us": u, "tier": t} for k, (c, u, t) in self.collectives.items()},
            "bytes_by_tier": dict(self.bytes_by_tier),
            "memory_bytes": dict(self.memory.parts),
            "memory_total_bytes": self.memory.total,
            "splits": {v: {a: list(s) for a, s in axes.items()} for v, axes in self.splits.items()},
            "validation": self.validation,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    def chrome_trace(self) -> str:
        """The timeline for chrome://tracing or Perfetto."""
        thread = {"compute": 0, "nvlink": 1, "network": 2}
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": t, "args": {"name": q}} for q, t in thread.items()
        ]
        events += [
            {
                "name": o.name,
                "cat": o.label,
                "ph": "X",
                "pid": 0,
                "tid": thread[o.queue],
                "ts": o.start,
                "dur": o.end - o.start,
            }
            for o in self.ops
        ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


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
    add("dense", "replica", "all_reduce", model.dense_params / n / d.shard * model.gradient_bytes, n)
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
        add("sparse", "replica_shard", "all_gather", weights, 2)
        add("sparse", "replica_shard", "reduce_scatter", weights)
        add("sparse", "replica", "all_reduce", weights / s.replica_shard)
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


class _Builder:
    """Builds the operations of one step."""

    def __init__(
        self,
        plan: ParallelPlan,
        model: ModelProfile,
        cluster: ClusterSpec,
        config: SimulationConfig,
        shapes: Mapping[tuple[View, str], GroupShape],
        slow: float,
    ) -> None:
        self.plan, self.model, self.cluster, self.config, self.shapes, self.slow = (
            plan,
            model,
            cluster,
            config,
            shapes,
            slow,
        )
        self.ops: list[Op] = []
        self.calls: dict[str, tuple[int, float, Tier | None]] = {}
        self.sent: dict[str, float] = {}
        self.alone_us = 0.0
        self._cache: dict[tuple[Any, ...], CollectiveCost] = {}

    def compute(self, name: str, parts: dict[str, float], deps: Sequence[int | None]) -> int:
        us = sum(parts.values())
        self.ops.append(Op(name, "compute", us, _known(deps), next(iter(parts), "compute"), parts))
        return len(self.ops) - 1

    def collective(
        self, view: View, axis: str, collective: Collective, nbytes: float, deps: Sequence[int | None], name: str
    ) -> int | None:
        """Launch one; None if there is nothing to move."""
        shape = self.shapes.get((view, axis))
        if shape is None or shape.size == 1 or nbytes <= 0:
            return None
        key = (view, axis, collective, nbytes)
        if key not in self._cache:
            self._cache[key] = collective_cost(collective, shape, nbytes, self.cluster)
        cost = self._cache[key]
        duration = cost.us + (self.config.peer_us * (shape.size - 1) if collective == "all_to_all" else 0.0)
        label = f"exposed: {view}.{axis} {collective}"
        count, us, _ = self.calls.get(label, (0, 0.0, None))
        self.calls[label] = (count + 1, us + duration, shape.widest_tier)
        for tier, b in cost.bytes_by_tier.items():
            self.sent[tier] = self.sent.get(tier, 0.0) + b
        queue: Queue = "nvlink" if shape.widest_tier == "nvlink" else "network"
        self.ops.append(Op(f"{name} {view}.{axis} {collective}", queue, duration, _known(deps), label))
        return len(self.ops) - 1

    def layer_parts(self, x: LayerProfile, backward: bool) -> dict[str, float]:
        forward_us, backward_us = x.times_us(self.cluster, self.model.dtype)
        base = backward_us if backward else forward_us
        self.alone_us += base
        again = x.recompute * forward_us if backward else 0.0
        late = (base + again) * x.length_share * (self.slow - 1)
        return {k: v for k, v in {"compute": base, "recompute": again, "imbalance": late}.items() if v}

    def build(self) -> None:
        plan, model, c = self.plan, self.model, self.config
        s = plan.sparse
        layers = model.layers
        has_tables = s is not None and bool(model.tables)
        table_bytes = model.table_bytes / s.table_group if s is not None else 0.0
        rows_bytes = model.ids_per_batch * model.bytes_per_row
        lookup_us = 2 * rows_bytes / self.cluster.gpu.hbm_bytes_per_s * 1e6

        # Forward: tables first, then layers.
        embedded: int | None = None
        if has_tables:
            gather = self.collective("sparse", "replica_shard", "all_gather", table_bytes, [], "forward")
            ids = self.collective("sparse", "table_group", "all_to_all", model.ids_per_batch * 8, [], "ids")
            self.alone_us += lookup_us
            lookup = self.compute("lookup", {"lookup and table update": lookup_us}, [gather, ids])
            embedded = self.collective("sparse", "table_group", "all_to_all", rows_bytes, [lookup], "rows")
        done: list[int] = []
        weights: dict[int, int | None] = {}
        returned: dict[int, int | None] = {}

        def gather_weights(i: int, deps: Sequence[int | None], phase: str) -> int | None:
            x = layers[i]
            if x.kind == "dense":
                return self.collective(
                    "dense", "shard", "all_gather", x.params * model.weight_bytes, deps, f"{phase} {x.name}"
                )
            ranks = self._expert_ranks()
            return self.collective(
                "experts",
                "expert_shard",
                "all_gather",
                x.params / ranks * model.weight_bytes,
                deps,
                f"{phase} {x.name}",
            )

        for i, x in enumerate(layers):
            ahead = range(i, min(i + 2, len(layers))) if c.prefetch else (i,)
            before = done[i - 1] if i else None
            launched = done[i - 1] if i >= 1 else None
            for j in ahead:
                if j not in weights:
                    weights[j] = gather_weights(j, [launched], "forward")
            inputs: list[int | None] = [before, weights[i], embedded if i == 0 else None]
            if x.kind == "expert":
                source = (done[i - 2] if i >= 2 else embedded) if c.overlap_exchange else (before if i else embedded)
                inputs.append(
                    self.collective(
                        "experts",
                        "expert",
                        "all_gather",
                        x.exchange_bytes * self._expert_ranks(),
                        [source],
                        f"forward {x.name}",
                    )
                )
            late = i - 2 if c.overlap_exchange else i - 1
            inputs += [v for k, v in returned.items() if k == late]
            done.append(self.compute(f"forward {x.name}", self.layer_parts(x, False), inputs))
            if x.kind == "expert":
                returned[i] = self.collective(
                    "experts",
                    "expert",
                    "reduce_scatter",
                    x.exchange_bytes * self._expert_ranks(),
                    [done[i]],
                    f"forward {x.name}",
                )

        # Backward mirrors it.
        reduced: list[int | None] = []
        last = done[-1]
        pending = list(returned.values())[-1:] if returned else []
        table_gather: int | None = None
        back: dict[int, int] = {}
        weights = {}
        back_returned: dict[int, int | None] = {}
        order = list(reversed(range(len(layers))))
        for step, i in enumerate(order):
            x = layers[i]
            ahead = order[step : step + 2] if c.prefetch else [i]
            launched = back[order[step - 1]] if step >= 1 else last
            for j in ahead:
                keep = j == len(layers) - 1 or (c.keep_gathered and layers[j].kind == "dense")
                if j not in weights:
                    weights[j] = None if keep else gather_weights(j, [launched], "backward")
            before = back[order[step - 1]] if step else last
            inputs = [before, weights[i], *(pending if step == 0 else [])]
            if x.kind == "expert":
                source = (back[order[step - 2]] if step >= 2 else last) if c.overlap_exchange else before
                inputs.append(
                    self.collective(
                        "experts",
                        "expert",
                        "all_gather",
                        x.exchange_bytes * self._expert_ranks(),
                        [source],
                        f"backward {x.name}",
                    )
                )
            late = order[step - 2] if c.overlap_exchange and step >= 2 else order[step - 1] if step else -1
            inputs += [v for k, v in back_returned.items() if k == late]
            if has_tables and c.overlap_tables and i == min(1, len(layers) - 1):
                table_gather = self.collective(
                    "sparse", "replica_shard", "all_gather", table_bytes, [before], "backward"
                )
            back[i] = self.compute(f"backward {x.name}", self.layer_parts(x, True), inputs)
            if x.kind == "expert":
                back_returned[i] = self.collective(
                    "experts",
                    "expert",
                    "reduce_scatter",
                    x.exchange_bytes * self._expert_ranks(),
                    [back[i]],
                    f"backward {x.name}",
                )
            reduced += self._reduce(x, back[i])
        final = back[order[-1]]
        if has_tables:
            assert s is not None
            tail = [final, *back_returned.values()]
            grads = self.collective("sparse", "table_group", "all_to_all", rows_bytes, tail, "gradients")
            if not c.overlap_tables:
                table_gather = self.collective("sparse", "replica_shard", "all_gather", table_bytes, tail, "backward")
            update_us = 1.5 * lookup_us
            self.alone_us += update_us
            final = self.compute("table update", {"lookup and table update": update_us}, [final, grads, table_gather])
            publish = self.collective("sparse", "replica_shard", "reduce_scatter", table_bytes, [final], "publish")
            self.collective(
                "sparse",
                "replica",
                "all_reduce",
                table_bytes / s.replica_shard,
                [publish if publish is not None else final],
                "publish",
            )
        stored = model.dense_params / plan.dense.shard
        if plan.experts is not None:
            stored += model.expert_params / plan.experts.expert / plan.experts.expert_shard
        else:
            stored += model.expert_params
        self.compute(
            "optimizer",
            {"optimizer": stored / 1e6 * model.optimizer_us_per_million},
            [final, *reduced, *back_returned.values()],
        )

    def _expert_ranks(self) -> int:
        return 1 if self.plan.experts is None else self.plan.experts.expert

    def _reduce(self, x: LayerProfile, dep: int) -> list[int | None]:
        plan, g = self.plan, self.model.gradient_bytes
        if x.kind == "dense":
            view, axis, params, shards = "dense", "shard", x.params, plan.dense.shard
        else:
            e = plan.experts
            view, axis, params, shards = (
                "experts",
                "expert_shard",
                x.params / self._expert_ranks(),
                1 if e is None else e.expert_shard,
            )
        name = f"backward {x.name}"
        scatter = self.collective(view, axis, "reduce_scatter", params * g, [dep], name)  # type: ignore[arg-type]
        reduce = self.collective(
            view,
            "replica",
            "all_reduce",
            params / shards * g,
            [dep if scatter is None else scatter],
            name,  # type: ignore[arg-type]
        )
        return [scatter, reduce]


def _known(deps: Sequence[int | None]) -> list[int]:
    return [d for d in deps if d is not None]


def simulate(
    plan: ParallelPlan,
    model: ModelProfile,
    cluster: ClusterSpec,
    config: SimulationConfig | None = None,
    *,
    splits: Mapping[View, Mapping[str, Split]] | None = None,
    check_memory: bool = True,
) -> Simulation:
    """Predict one training step.

    Args:
        plan: validated against the cluster and the model's experts.
        model: times or FLOPs per layer.
        cluster: rates.
        config: how the step is run.
        splits: where the axes lie; the best for the model's traffic if None.
        check_memory: refuse a plan that does not fit.

    Raises:
        ValueError: the plan is invalid here, or does not factor along the cluster.
        InfeasiblePlan: it needs more memory than a GPU has.
    """
    rules = config or SimulationConfig()
    plan.validate(cluster, num_experts=model.num_experts or None)
    where = splits or place_splits(plan, model, cluster)
    if where is None:
        raise ValueError(
            f"plan: {plan.text()} does not factor along {cluster.shape_text()}; make the axes of each view split into "
            "the tier sizes"
        )
    communicators = num_communicators(plan, where, cluster)
    memory = estimate_memory(plan, model, cluster, communicators)
    if check_memory and not memory.fits:
        raise InfeasiblePlan(infeasible_report(plan, model, cluster, memory))
    mean, std = model.cost.mean_and_std(model.law, model.samples_per_rank)
    slow = 1 + (expected_imbalance(mean, std, plan.world_size) - 1) * (1 - rules.balance_gain[rules.balance])
    shapes: dict[tuple[View, str], GroupShape] = {
        (v, a): split_shape(plan.sizes(v)[a], s) for v, axes in where.items() for a, s in axes.items()
    }
    builder = _Builder(plan, model, cluster, rules, shapes, slow)
    builder.build()
    items = run_ops(builder.ops, rules.sm_slowdown)
    step_us = max(o.end for o in builder.ops)
    peak = cluster.gpu.peak_flops_per_s[model.dtype]
    return Simulation(
        plan=plan,
        model=model.name,
        cluster=f"{cluster.name}: {cluster.shape_text()}",
        step_us=step_us,
        items=items,
        alone_us=builder.alone_us,
        local_mfu=model.flops / (builder.alone_us * 1e-6 * peak),
        scaling_ratio=builder.alone_us / step_us,
        imbalance=slow,
        memory=memory,
        collectives=builder.calls,
        bytes_by_tier=builder.sent,
        splits=where,
        ops=builder.ops,
        validation=rules.validation,
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


def with_validation(config: SimulationConfig, csv_text: str) -> SimulationConfig:
    """`config` that states the measured error of the simulator.

    Args:
        csv_text: of simulator_error.csv: columns config, split, predicted_ms, measured_ms, error_pct; only rows with
            split "validate" count.
    """
    import csv
    import io
    import statistics

    rows = [r for r in csv.DictReader(io.StringIO(csv_text)) if r["split"] == "validate"]
    if not rows:
        raise ValueError(
            "csv_text: got no row with split=validate, expected measurements that were not used to calibrate"
        )
    errors = sorted(abs(float(r["error_pct"])) for r in rows)
    gpus = sorted({r.get("gpu", "") for r in rows} - {""})
    text = (
        f"error: median {statistics.median(errors):.1f} %, worst {errors[-1]:.1f} % over {len(rows)} measured steps "
        f"that were not used to calibrate ({', '.join(gpus) or 'device not named'}); beyond those it is extrapolation"
    )
    return dataclasses.replace(config, validation=text)
