"""What a shell asks of the planner, answered as text and as JSON: `python -m gemworks.parallel`, `gemworks plan`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from gemworks.parallel import presets
from gemworks.parallel._check import whole
from gemworks.parallel._lines import folded
from gemworks.parallel.cluster import ClusterSpec
from gemworks.parallel.describe import describe
from gemworks.parallel.picture import draw_plan
from gemworks.parallel.placement import Placement, place
from gemworks.parallel.plan import ParallelPlan
from gemworks.parallel.planner import ladder_text, ladders, search
from gemworks.parallel.profile import ModelProfile, gem_like
from gemworks.parallel.simulation import simulate, with_validation
from gemworks.parallel.splits import model_traffic
from gemworks.parallel.step_graph import Balance, SimulationConfig

Question = Literal["search", "ladder", "simulate", "place", "ranks"]
CLUSTERS: Mapping[str, Callable[..., ClusterSpec]] = {
    "roce": presets.roce_cluster,
    "h200": presets.h200_host,
    "gb200": presets.gb200_rack,
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The words of a command line.

    Attributes:
        cluster: a preset (`CLUSTERS`) or the path of a cluster file.
        gpus: its size; None: its own.
        model: "gem-like", or the path of a profile (ModelProfile's JSON).
        balance: how ranks' batches are evened out: none, bbs or global.
        errors: simulator_error.csv whose measured errors every prediction carries.
        shard, expert, expert_shard, table_group, replica_shard, sync_every: of the plan; unused by "search". Without
            `expert` a model with experts keeps them all on each rank; without `table_group` "simulate" spreads one
            copy of the tables over all GPUs.
        top, keep: of "search": plans to show, and candidates kept per view.
        ranks: of "ranks": which; None: all.
        picture: where to draw the groups on the tiers (SVG).
        trace: where to write the predicted step for chrome://tracing or Perfetto.
    """

    cluster: str = "roce"
    gpus: int | None = None
    model: str = "gem-like"
    balance: str = "bbs"
    errors: Path | None = None
    shard: int = 1
    expert: int | None = None
    expert_shard: int = 1
    table_group: int | None = None
    replica_shard: int = 1
    sync_every: int = 1
    top: int = 10
    keep: int = 6
    ranks: Sequence[int] | None = None
    picture: Path | None = None
    trace: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The same content for people and for machines."""

    text: str
    json: str


def answer(question: Question, request: Request) -> Answer:
    """Plan, predict or describe; writes the picture and the trace if asked to.

    Raises:
        ValueError: names the word, what it was and what was expected; or the plan is invalid or does not fit.
        OSError: a picture or a trace cannot be written.
    """
    whole("top", request.top, unit="plans to show")
    cluster, model = _cluster(request), _model(request)
    config = _config(request)
    if question == "search":
        found = search(model, cluster, config, keep=request.keep)
        best = found.best
        _write(request, best.plan, cluster, model, best.chrome_trace)
        return Answer(text=found.text(request.top), json=found.to_json(request.top))
    if question == "ladder":
        _write(request, None, cluster, model, None)
        rungs = ladders(model, cluster, config)
        content = {kind: [{"rung": r.name, **r.simulation.to_dict()} for r in steps] for kind, steps in rungs.items()}
        return Answer(text=ladder_text(rungs), json=json.dumps(content, sort_keys=True))
    plan = ParallelPlan.for_world(
        cluster.num_gpus,
        shard=request.shard,
        expert=request.expert if request.expert is not None or not model.num_experts else 1,
        expert_shard=request.expert_shard,
        table_group=_table_group(question, request, cluster, model),
        replica_shard=request.replica_shard,
        sync_every=request.sync_every,
    )
    if question == "simulate":
        step = simulate(plan, model, cluster, config)
        _write(request, plan, cluster, model, step.chrome_trace)
        return Answer(text=step.text(), json=step.to_json())
    _write(request, plan, cluster, model, None)
    placement = place(plan, cluster, model_traffic(plan, model))
    said = "\n".join([placement.text(), *folded(config.validation)])
    if question == "place":
        return Answer(text=said, json=_placement_json(placement, config))
    holdings = describe(
        placement.layout,
        cluster,
        num_experts=model.num_experts if plan.experts is not None else None,
        tables=model.tables if plan.sparse is not None else (),
        ranks=request.ranks,
    )
    return Answer(text=f"{said}\n\n{holdings.text()}", json=holdings.to_json())


def _table_group(question: Question, request: Request, cluster: ClusterSpec, model: ModelProfile) -> int | None:
    """A step without its model's tables would be no prediction of it: one copy over all GPUs if nothing is said."""
    if request.table_group is not None or question != "simulate" or not model.tables:
        return request.table_group
    parts = max(1, request.replica_shard)
    return cluster.num_gpus // parts if cluster.num_gpus % parts == 0 else 1  # then the plan names the divisors


def _write(
    request: Request,
    plan: ParallelPlan | None,
    cluster: ClusterSpec,
    model: ModelProfile,
    trace: Callable[[], str] | None,
) -> None:
    if request.picture is not None:
        if plan is None:
            raise ValueError("--picture: got a file, expected none: a ladder has many plans")
        request.picture.write_text(
            draw_plan(place(plan, cluster, model_traffic(plan, model)).layout, cluster), encoding="utf-8"
        )
    if request.trace is not None:
        if trace is None:
            raise ValueError("--trace: got a file, expected none: only search and simulate predict a step")
        request.trace.write_text(trace(), encoding="utf-8")


def _placement_json(placement: Placement, config: SimulationConfig) -> str:
    views = {
        view: {"tiers": dict(v.tiers), "how": v.how, "predicted_us": v.cost_us, "row_major_us": v.row_major_us}
        for view, v in placement.views.items()
    }
    content = {"plan": placement.layout.plan.to_dict(), "views": views, "validation": config.validation}
    return json.dumps(content, sort_keys=True)


def _cluster(request: Request) -> ClusterSpec:
    name, gpus = request.cluster, request.gpus
    if name in CLUSTERS:
        return CLUSTERS[name]() if gpus is None else CLUSTERS[name](gpus)
    if not Path(name).is_file():
        raise ValueError(f"--cluster: got {name!r}, expected {', '.join(CLUSTERS)}, or the path of a cluster file")
    spec = ClusterSpec.from_toml(name)
    return spec if gpus is None else spec.resized(gpus)


def _model(request: Request) -> ModelProfile:
    if request.model == "gem-like":
        return gem_like()
    if not Path(request.model).is_file():
        raise ValueError(f"model profile: got {request.model!r}, expected gem-like or the path of a profile (JSON)")
    return ModelProfile.from_json(request.model)


def _config(request: Request) -> SimulationConfig:
    if request.balance not in get_args(Balance):
        raise ValueError(f"--balance: got {request.balance!r}, expected none, bbs or global")
    config = SimulationConfig(balance=request.balance)  # type: ignore[arg-type]
    if request.errors is None:
        return config
    try:
        return with_validation(config, request.errors.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"measured errors {str(request.errors)!r}: {error}; expected a simulator_error.csv, as `python -m "
            "gemworks.parallel.validate` writes it"
        ) from error
