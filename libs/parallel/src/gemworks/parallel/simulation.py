"""Predict a training step: compute, collectives on their tiers, overlap, imbalance, memory.

One rank's step is a graph of operations on four queues: compute, NVLink collectives, network collectives, and the
host that launches compute where the profile says how long that takes. A queue runs its operations in the order of
launch; an operation starts when its queue is free and its inputs are there. The compute queue's waiting is charged to
what ran meanwhile on the queue that it waits for, so the items of the report add up to the step exactly:

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
from dataclasses import dataclass
from typing import Any

from gemworks.parallel._check import kind, one_of
from gemworks.parallel._lines import folded, plan_lines
from gemworks.parallel.cluster import ClusterSpec, Tier
from gemworks.parallel.costs import GroupShape
from gemworks.parallel.lengths import expected_imbalance
from gemworks.parallel.measured_error import error_rows, text_of
from gemworks.parallel.memory import InfeasiblePlan, MemoryEstimate, estimate_memory, infeasible_report
from gemworks.parallel.placement import Split, split_shape, tier_splits
from gemworks.parallel.plan import VIEW_AXES, ParallelPlan, View
from gemworks.parallel.profile import ModelProfile
from gemworks.parallel.splits import num_communicators, place_splits
from gemworks.parallel.step_graph import SimulationConfig, StepGraph
from gemworks.parallel.timeline import Op, run_ops


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
        collectives: "view.axis collective" -> (calls, us in total, hidden behind compute or not, tier).
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
        """For people; stable, and at most 80 columns wide."""
        lines = [
            *plan_lines(self.plan.text(), "plan     "),
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
        lines += ["", f"{'collective, hidden or not':44} {'calls':>5} {'ms':>9}  tier"]
        for label, (calls, us, tier) in self.collectives.items():
            lines.append(f"{label:44} {calls:>5} {us / 1e3:>9.3f}  {tier or '-'}")
        sent = ", ".join(f"{t} {b / 1e9:.2f} GB" for t, b in self.bytes_by_tier.items())
        lines += ["", f"sent per rank: {sent or '-'}", "memory", self.memory.text(), *folded(self.validation)]
        return "\n".join(lines)

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
        thread = {"compute": 0, "nvlink": 1, "network": 2, "host": 3}
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
        ValueError: the plan is invalid here, lacks a view that the model needs, or does not factor along the cluster.
        InfeasiblePlan: it needs more memory than a GPU has.
    """
    kind("plan", plan, ParallelPlan)
    kind("model", model, ModelProfile, "gem_like() makes one")
    rules = config or SimulationConfig()
    plan.validate(cluster, num_experts=model.num_experts or None)
    one_of("model.dtype", model.dtype, cluster.gpu.peak_flops_per_s)
    if model.num_experts and plan.experts is None:
        raise ValueError(
            f"plan: has no experts view, but {model.name} has expert layers; give expert, 1 to keep all on each rank"
        )
    if model.tables and plan.sparse is None:
        raise ValueError(
            f"plan: has no sparse view, but {model.name} has {len(model.tables)} tables; give table_group, "
            f"{plan.world_size} for one copy over all ranks"
        )
    if splits is not None:
        _check_splits(plan, splits, cluster)
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
    graph = StepGraph(plan, model, cluster, rules, shapes, slow)
    graph.build()
    items = run_ops(graph.ops, rules.sm_slowdown)
    step_us = max(o.end for o in graph.ops)
    peak = cluster.gpu.peak_flops_per_s[model.dtype]
    return Simulation(
        plan=plan,
        model=model.name,
        cluster=f"{cluster.name}: {cluster.shape_text()}",
        step_us=step_us,
        items=items,
        alone_us=graph.alone_us,
        local_mfu=model.flops / (graph.alone_us * 1e-6 * peak),
        scaling_ratio=graph.alone_us / step_us,
        imbalance=slow,
        memory=memory,
        collectives=graph.calls,
        bytes_by_tier=graph.sent,
        splits=where,
        ops=graph.ops,
        validation=rules.validation,
    )


def _check_splits(plan: ParallelPlan, splits: Mapping[View, Mapping[str, Split]], cluster: ClusterSpec) -> None:
    for view in plan.views():
        ways = tier_splits(tuple(plan.sizes(view).values()), cluster)
        found = tuple(tuple(splits.get(view, {}).get(axis, ())) for axis in VIEW_AXES[view])
        if found not in ways:
            raise ValueError(
                f"splits: got {dict(splits.get(view, {}))} for {view}, expected (ranks in a domain, domains, zones) of "
                f"each axis, that make {plan.text()} on {cluster.shape_text()}; place_splits finds them"
            )


def with_validation(config: SimulationConfig, csv_text: str) -> SimulationConfig:
    """`config` that states the measured error of the simulator.

    Args:
        csv_text: of simulator_error.csv; see `error_rows`.
    """
    return dataclasses.replace(config, validation=text_of(error_rows(csv_text)))
