"""Rank plans: enumerate, prune one view at a time, simulate what is left, and say why each loser lost."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemworks.parallel._check import kind, whole
from gemworks.parallel._lines import folded, plan_lines
from gemworks.parallel.cluster import ClusterSpec, Tier
from gemworks.parallel.memory import GIB, infeasible_report
from gemworks.parallel.placement import Split
from gemworks.parallel.plan import DensePlan, ExpertPlan, ParallelPlan, SparsePlan, View
from gemworks.parallel.profile import ModelProfile
from gemworks.parallel.simulation import Simulation, simulate
from gemworks.parallel.splits import place_splits
from gemworks.parallel.step_graph import SimulationConfig


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that was looked at.

    Attributes:
        plan: the plan.
        simulation: its prediction; None if it was not simulated because it is invalid.
        reason: why it is not the best; "" for the best.
    """

    plan: ParallelPlan
    simulation: Simulation | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Ranked plans.

    Attributes:
        best: the winner's prediction.
        ranked: feasible plans, fastest first.
        infeasible: plans that do not fit or cannot run, with the reason.
        sensitivity: sentences, one per tier.
        seconds: that the search took.
    """

    best: Simulation
    ranked: Sequence[Candidate]
    infeasible: Sequence[Candidate]
    sensitivity: Sequence[str]
    seconds: float

    def text(self, top: int = 10) -> str:
        """The first `top` plans, the reasons of the losers, and the sensitivity; at most 80 columns wide.

        A plan is the sizes of its views' axes, in the order of the heading; the best is also written out.
        """
        lines = [f"{len(self.ranked)} plans fit, {len(self.infeasible)} do not; {self.seconds:.1f} s"]
        lines += [*plan_lines(self.best.plan.text(), "best  "), "", *_heading(self.best.plan)]
        for i, c in enumerate(self.ranked[:top]):
            s = c.simulation
            assert s is not None
            figures = f"{i + 1:>3} {s.step_us / 1e3:>9.2f} {s.mfu:>6.1%} {s.memory.total / GIB:>6.1f}"
            lines.append(f"{figures}  {_sizes(c.plan)}")
            lines += [f"    {late}"] if (late := _averaged(c.plan)) else []
            lines += folded(c.reason, " " * 6, " " * 4) if c.reason else []
        for c in self.infeasible[:3]:
            late = f" ({late})" if (late := _averaged(c.plan)) else ""
            lines += folded(f"{_sizes(c.plan)}{late}: {c.reason.splitlines()[0]}", " " * 6, "  - ")
        lines.append("")
        for sentence in (*self.sensitivity, self.best.validation):
            lines += folded(sentence)
        return "\n".join(lines)

    def to_json(self, top: int = 50) -> str:
        """The same for machines."""
        rows: list[dict[str, Any]] = []
        for c in [*self.ranked[:top], *self.infeasible[:top]]:
            s = c.simulation
            rows.append(
                {
                    "plan": c.plan.to_dict(),
                    "step_us": None if s is None else s.step_us,
                    "mfu": None if s is None else s.mfu,
                    "reason": c.reason,
                }
            )
        content = {
            "best": self.best.to_dict(),
            "plans": rows,
            "sensitivity": list(self.sensitivity),
            "seconds": self.seconds,
        }
        return json.dumps(content, sort_keys=True)


def search(
    model: ModelProfile,
    cluster: ClusterSpec,
    config: SimulationConfig | None = None,
    *,
    include: Iterable[ParallelPlan] = (),
    keep: int = 6,
) -> SearchResult:
    """Find the fastest plan that fits.

    First each view is varied alone with the others fixed (dense, then experts, then sparse, twice around); then the
    `keep` best of every view are simulated in all combinations. Every plan that was simulated is ranked.

    Args:
        model, cluster, config: as for `simulate`.
        include: plans to rank as well, whatever the pruning says (the published one, say).
        keep: per view.

    Raises:
        ValueError: no plan fits; names the one that needs least.
    """
    whole("keep", keep, unit="how many of each view are combined")
    kind("model", model, ModelProfile, "gem_like() makes one")
    start = time.perf_counter()
    s = _Search(model, cluster, config or SimulationConfig())
    options = _options(model, cluster)
    current: dict[View, Any] = {
        "dense": options["dense"][-1],
        "experts": options["experts"][-1],
        "sparse": options["sparse"][-1],
    }
    shortlist: dict[View, list[Any]] = {}
    for _ in range(2):
        for view in ("dense", "experts", "sparse"):
            tried = [(s.score(_plan({**current, view: o})), i) for i, o in enumerate(options[view])]
            tried.sort()
            shortlist[view] = [options[view][i] for _, i in tried[:keep]]
            current[view] = shortlist[view][0]
    for d in shortlist["dense"]:
        for e in shortlist["experts"]:
            for t in shortlist["sparse"]:
                s.score(_plan({"dense": d, "experts": e, "sparse": t}))
    for plan in include:
        s.score(plan)
    fits = [x for x in s.seen.values() if x.simulation is not None and x.simulation.memory.fits]
    if not fits:
        least = min((x for x in s.seen.values() if x.simulation is not None), key=lambda x: x.simulation.memory.total)  # type: ignore[union-attr]
        assert least.simulation is not None
        report = infeasible_report(least.plan, model, cluster, least.simulation.memory)
        raise ValueError(
            f"search: no plan fits {cluster.shape_text()}; the one that needs least, {least.plan.text()}:\n{report}"
        )
    fits.sort(key=lambda x: x.simulation.step_us)  # type: ignore[union-attr]
    best = fits[0].simulation
    assert best is not None
    ranked = [
        dataclasses.replace(x, reason="" if x.simulation is best else why_slower(x.simulation, best))  # type: ignore[arg-type]
        for x in fits
    ]
    infeasible = [x for x in s.seen.values() if x.simulation is None or not x.simulation.memory.fits]
    return SearchResult(
        best=best,
        ranked=ranked,
        infeasible=infeasible,
        sensitivity=_sensitivity(fits, model, cluster, s.config),
        seconds=time.perf_counter() - start,
    )


def _options(model: ModelProfile, cluster: ClusterSpec) -> dict[View, list[Any]]:
    """Every part that a plan of the cluster's size can have; [None] for a view that the model does not need."""
    world = cluster.num_gpus
    options: dict[View, list[Any]] = {
        "dense": [DensePlan(shard=k, replica=world // k) for k in _divisors(world)],
        "experts": [None],
        "sparse": [None],
    }
    if model.num_experts:
        options["experts"] = [
            ExpertPlan(expert=a, expert_shard=b, replica=world // a // b)
            for a in _divisors(world)
            if model.num_experts % a == 0
            for b in _divisors(world // a)
            if b <= 1024
        ]
    if model.tables:
        options["sparse"] = [
            SparsePlan(table_group=g, replica_shard=r, replica=world // g // r)
            for g in _divisors(world)
            for r in _divisors(world // g)
            if cluster.gpus_per_domain % r == 0
        ]
    return options


def why_slower(loser: Simulation, best: Simulation) -> str:
    """The items that cost a plan its place, largest first; says so if they tie."""
    delta = {k: loser.items.get(k, 0.0) - best.items.get(k, 0.0) for k in sorted(set(loser.items) | set(best.items))}
    worse = sorted((k for k in delta if delta[k] > 0), key=lambda k: -delta[k])[:2]
    slower = loser.step_us - best.step_us
    if slower <= 0 or not worse:
        return "as fast as the best"
    causes = ", ".join(f"{k} +{delta[k] / 1e3:.2f} ms" for k in worse)
    return f"{slower / 1e3:.2f} ms slower: {causes}"


_VIEW_WIDTHS: Mapping[View, int] = {"dense": 11, "experts": 16, "sparse": 0}  # of 131,072 GPUs, the last one is free


def _heading(plan: ParallelPlan) -> list[str]:
    """Three lines: each view's axes under its name, in the order of `_sizes`."""
    axes: dict[View, list[str]] = {view: list(reversed(plan.sizes(view))) for view in plan.views()}
    cells: dict[View, list[str]] = {
        view: [f"{view} {names[0]}", *(f"x {name}" for name in names[1:])] for view, names in axes.items()
    }
    lines = []
    for row in range(max(map(len, cells.values()))):
        figures = f"{'':>3} {'step ms':>9} {'MFU':>6} {'GiB':>6}" if row == 0 else " " * 27
        words = [(cells[view][row] if row < len(cells[view]) else "").ljust(_VIEW_WIDTHS[view]) for view in cells]
        lines.append(f"{figures}  {'  '.join(words)}".rstrip())
    return lines


def _sizes(plan: ParallelPlan) -> str:
    """The sizes alone, a column per view: "16 x 256      2 x 16 x 128      2 x 2048 x 1"."""
    cells = [
        " x ".join(map(str, reversed(plan.sizes(view).values()))).ljust(_VIEW_WIDTHS[view]) for view in plan.views()
    ]
    return "  ".join(cells).rstrip()


def _averaged(plan: ParallelPlan) -> str:
    """What sizes do not say of a plan."""
    late = plan.sparse is not None and plan.sparse.sync_every > 1
    return f"tables averaged every {plan.sparse.sync_every} steps" if late and plan.sparse is not None else ""


class _Search:
    def __init__(self, model: ModelProfile, cluster: ClusterSpec, config: SimulationConfig) -> None:
        self.model, self.cluster, self.config = model, cluster, config
        self.seen: dict[str, Candidate] = {}
        self._splits: dict[tuple[Any, ...], dict[str, Split] | None] = {}

    def score(self, plan: ParallelPlan) -> tuple[bool, float]:
        """Sort key: plans that fit first, then by time; those that don't by their need."""
        key = plan.text()
        if key not in self.seen:
            self.seen[key] = self._look(plan)
        s = self.seen[key].simulation
        if s is None:
            return True, float("inf")
        return (False, s.step_us) if s.memory.fits else (True, s.memory.total)

    def _look(self, plan: ParallelPlan) -> Candidate:
        problems = plan.problems(self.cluster, num_experts=self.model.num_experts or None)
        if problems:
            return Candidate(plan=plan, simulation=None, reason=problems[0])
        splits: dict[View, Mapping[str, Split]] = {}
        for view in plan.views():
            part = getattr(plan, view)
            if (view, part) not in self._splits:
                alone = place_splits(plan, self.model, self.cluster, views=(view,))
                self._splits[view, part] = None if alone is None else alone[view]
            found = self._splits[view, part]
            if found is None:
                return Candidate(
                    plan=plan, simulation=None, reason=(f"{view} does not factor along {self.cluster.shape_text()}")
                )
            splits[view] = found
        s = simulate(plan, self.model, self.cluster, self.config, splits=splits, check_memory=False)
        over = s.memory.total - s.memory.capacity
        largest = max(s.memory.parts, key=lambda k: s.memory.parts[k])
        reason = (
            f"{over / GIB:.1f} GiB too much, most of it {largest} ({s.memory.parts[largest] / GIB:.1f} GiB)"
            if over > 0
            else ""
        )
        return Candidate(plan=plan, simulation=s, reason=reason)


def _plan(parts: Mapping[View, Any]) -> ParallelPlan:
    return ParallelPlan(dense=parts["dense"], experts=parts["experts"], sparse=parts["sparse"])


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _divisor(n: int, most: int) -> int:
    """The largest divisor of `n` up to `most`."""
    return max(k for k in _divisors(n) if k <= most)


def _sensitivity(
    fits: Sequence[Candidate], model: ModelProfile, cluster: ClusterSpec, config: SimulationConfig
) -> list[str]:
    best = fits[0].simulation
    assert best is not None
    lines: list[str] = []
    names: dict[Tier, str] = {"nvlink": "NVLink", "zone": "the zone network", "cross_zone": "cross-zone"}
    for tier in cluster.needed_tiers():
        slow = cluster.scaled(tier, 0.5)
        times = []
        for c in fits[:20]:
            s = simulate(c.plan, model, slow, config, check_memory=False)
            times.append((s.step_us, c.plan))
        winner = min(times, key=lambda x: x[0])
        same = winner[1] == best.plan
        text = f"if {names[tier]} were 2x slower: {times[0][0] / 1e3:.2f} ms ({times[0][0] / best.step_us - 1:+.1%})"
        lines.append(
            text
            + (
                "; the same plan stays best"
                if same
                else f"; then {winner[1].text()} would win with {winner[0] / 1e3:.2f} ms"
            )
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One step of a ladder: what was added, and what it is predicted to give."""

    name: str
    plan: ParallelPlan
    simulation: Simulation


def ladders(
    model: ModelProfile,
    cluster: ClusterSpec,
    config: SimulationConfig | None = None,
    *,
    shard: int = 256,
    expert: int = 2,
    expert_shard: int = 16,
    table_group: int = 256,
    sync_every: int = 16,
) -> dict[str, list[Rung]]:
    """What each dimension of the published plan buys on a cluster.

    Dense: 1D (all weights sharded over the world), 2D (shard x replica), 3D (experts spread too), with the sparse part
    as published. Sparse: V1 (tables over the world), V2 (groups with whole replicas, averaged in every step and every
    `sync_every` steps), V3 (replicas sharded over an NVLink domain), with the dense part as published. Rungs that don't
    fit a GPU are kept; their memory says so.

    Args:
        model, cluster, config: as for `simulate`.
        shard, expert, expert_shard, table_group: of the published plan; each the largest that is not above it and
            divides what it splits.
        sync_every: steps between means over replicas of tables; the published interval is not known, 16 is our choice.
    """
    world = cluster.num_gpus
    shard, table_group = _divisor(world, shard), _divisor(world, table_group)
    replica_shard = math.gcd(cluster.gpus_per_domain, world // table_group)
    expert = _divisor(math.gcd(world, model.num_experts), expert)
    expert_shard = _divisor(world // expert, expert_shard)

    def plan(sh: int, e: int, es: int, g: int, r: int, every: int = sync_every) -> ParallelPlan:
        return ParallelPlan.for_world(
            world,
            shard=sh,
            expert=e if model.num_experts else None,
            expert_shard=es if model.num_experts else 1,
            table_group=g if model.tables else None,
            replica_shard=r if model.tables else 1,
            sync_every=every if model.tables and world > g * r else 1,
        )

    rungs = {
        "dense": [
            ("1D: sharded over the world", plan(world, 1, world, table_group, replica_shard)),
            (f"2D: shard {shard}, replicas", plan(shard, 1, shard, table_group, replica_shard)),
            (f"3D: experts {expert} x {expert_shard}", plan(shard, expert, expert_shard, table_group, replica_shard)),
        ],
        "sparse": [
            ("V1: tables over the world", plan(shard, expert, expert_shard, world, 1)),
            (f"V2: groups of {table_group}, averaged each step", plan(shard, expert, expert_shard, table_group, 1, 1)),
            (f"V2: averaged every {sync_every}", plan(shard, expert, expert_shard, table_group, 1)),
            (
                f"V3: replicas sharded over {replica_shard}, every {sync_every}",
                plan(shard, expert, expert_shard, table_group, replica_shard),
            ),
        ],
    }
    return {
        kind: [
            Rung(name=name, plan=p, simulation=simulate(p, model, cluster, config, check_memory=False))
            for name, p in steps
        ]
        for kind, steps in rungs.items()
    }


def ladder_text(found: Mapping[str, Sequence[Rung]]) -> str:
    """The ladders as a table."""
    lines = [f"{'ladder':8} {'rung':38} {'step ms':>9} {'MFU':>6} {'scaling':>8} {'GiB':>7}"]
    for dimension, rungs in found.items():
        for r in rungs:
            s = r.simulation
            lines.append(
                f"{dimension:8} {r.name:38} {s.step_us / 1e3:>9.2f} {s.mfu:>6.1%} {s.scaling_ratio:>8.1%} "
                f"{s.memory.total / GIB:>7.1f}" + ("" if s.memory.fits else "  does not fit")
            )
    said = dict.fromkeys(r.simulation.validation for rungs in found.values() for r in rungs)
    return "\n".join([*lines, *said])
