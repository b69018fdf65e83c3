"""`gemworks plan`: search for a parallel plan, predict a step, say who holds what: as gemworks.parallel says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from gemworks.cli.options import Json
from gemworks.cli.output import print_json, quiet

if TYPE_CHECKING:
    from gemworks.parallel import ClusterSpec, ModelProfile, ParallelPlan, SimulationConfig

CLUSTERS = ("roce", "h200", "gb200")

plan_app = typer.Typer(
    name="plan",
    help="Plan a cluster: search, predict a step, say which rank holds what.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Gpus = Annotated[int | None, typer.Option(help="GPUs of the cluster; its own size if not given.", metavar="NUMBER")]
Cluster = Annotated[
    str, typer.Option(help="roce, h200 (one host), gb200 (one rack), or a cluster file (TOML).", metavar="NAME|FILE")
]
Profile = Annotated[
    Path | None,
    typer.Option(help="Model profile (JSON of ModelProfile); one shaped like GEM if not given.", metavar="FILE"),
]
Measured = Annotated[
    Path | None,
    typer.Option(help="simulator_error.csv of your GPUs, to state how wrong predictions are.", metavar="FILE"),
]
Balance = Annotated[str, typer.Option(help="How ranks' batches are evened out: none, bbs or global.", metavar="HOW")]
Shard = Annotated[int, typer.Option(help="Ranks that share the dense weights (FSDP).", metavar="N")]
Expert = Annotated[int | None, typer.Option(help="Ranks that the experts are spread over.", metavar="N")]
ExpertShard = Annotated[int, typer.Option(help="Ranks that share one expert's weights.", metavar="N")]
TableGroup = Annotated[int | None, typer.Option(help="Ranks that share the embedding tables.", metavar="N")]
ReplicaShard = Annotated[int, typer.Option(help="Ranks that share one replica of a table shard.", metavar="N")]
Picture = Annotated[Path | None, typer.Option(help="Draw the groups on the tiers (SVG).", metavar="FILE")]
Trace = Annotated[
    Path | None, typer.Option(help="Write the predicted step for chrome://tracing or Perfetto.", metavar="FILE")
]


@plan_app.command()
def search(
    gpus: Gpus = None,
    cluster: Cluster = "roce",
    profile: Profile = None,
    balance: Balance = "bbs",
    measured: Measured = None,
    top: Annotated[int, typer.Option(help="Plans to show.", metavar="NUMBER")] = 10,
    keep: Annotated[int, typer.Option(help="Candidates kept per view before all are combined.", metavar="NUMBER")] = 6,
    picture: Picture = None,
    trace: Trace = None,
    json: Json = False,
) -> None:
    """Rank plans for a cluster, and say why each loser lost.

    Example: gemworks plan search --gpus 4096 --picture plan.svg
    """
    with quiet():
        from gemworks import parallel

        spec, model, config = _cluster(cluster, gpus), _model(profile), _config(balance, measured)
        found = parallel.search(model, spec, config, keep=keep)
        _draw(found.best.plan, spec, picture)
    if trace is not None:
        trace.write_text(found.best.chrome_trace(), encoding="utf-8")
    if json:
        _print_json_text(found.to_json(top))
    else:
        print(found.text(top))


@plan_app.command()
def simulate(
    shard: Shard,
    expert: Expert = None,
    expert_shard: ExpertShard = 1,
    table_group: TableGroup = None,
    replica_shard: ReplicaShard = 1,
    gpus: Gpus = None,
    cluster: Cluster = "roce",
    profile: Profile = None,
    balance: Balance = "bbs",
    measured: Measured = None,
    picture: Picture = None,
    trace: Trace = None,
    json: Json = False,
) -> None:
    """Predict one training step of a plan: time, MFU, every lost millisecond, memory.

    Example: gemworks plan simulate --gpus 4096 --shard 256 --expert 2 --expert-shard 16 --table-group 256
    --replica-shard 8 --trace step.json
    """
    with quiet():
        from gemworks import parallel

        spec, model, config = _cluster(cluster, gpus), _model(profile), _config(balance, measured)
        plan = _plan(spec, shard, expert, expert_shard, table_group, replica_shard)
        found = parallel.simulate(plan, model, spec, config)
        _draw(plan, spec, picture)
    if trace is not None:
        trace.write_text(found.chrome_trace(), encoding="utf-8")
    if json:
        print_json(found.to_dict())
    else:
        print(found.text())


@plan_app.command()
def ranks(
    shard: Shard,
    expert: Expert = None,
    expert_shard: ExpertShard = 1,
    table_group: TableGroup = None,
    replica_shard: ReplicaShard = 1,
    gpus: Gpus = None,
    cluster: Cluster = "roce",
    profile: Profile = None,
    rank: Annotated[
        list[int] | None, typer.Option(help="A rank to list; may be repeated; all if not given.", metavar="NUMBER")
    ] = None,
    picture: Picture = None,
    json: Json = False,
) -> None:
    """Say which rank holds what: its place, its groups, its weights, experts and table rows.

    Example: gemworks plan ranks --cluster h200 --gpus 8 --shard 8 --table-group 4 --replica-shard 2
    """
    with quiet():
        from gemworks import parallel

        spec, model = _cluster(cluster, gpus), _model(profile)
        plan = _plan(spec, shard, expert, expert_shard, table_group, replica_shard)
        placed = parallel.place(plan, spec)
        found = parallel.describe(
            placed.layout,
            spec,
            num_experts=model.num_experts if plan.experts is not None else None,
            tables=model.tables if plan.sparse is not None else (),
            ranks=rank,
        )
        _draw(plan, spec, picture)
    if json:
        _print_json_text(found.to_json())
    else:
        print(placed.text())
        print()
        print(found.text())


def _cluster(name: str, gpus: int | None) -> ClusterSpec:
    from gemworks.parallel import ClusterSpec, presets

    if name in CLUSTERS:
        make = {"roce": presets.roce_cluster, "h200": presets.h200_host, "gb200": presets.gb200_rack}[name]
        return make() if gpus is None else make(gpus)
    if not Path(name).is_file():
        raise ValueError(f"--cluster: got {name!r}, expected {', '.join(CLUSTERS)}, or the path of a cluster file")
    spec = ClusterSpec.from_toml(Path(name))
    return spec if gpus is None else spec.resized(gpus)


def _model(profile: Path | None) -> ModelProfile:
    from gemworks.parallel import ModelProfile
    from gemworks.parallel.profile import gem_like

    return gem_like() if profile is None else ModelProfile.from_json(profile)


def _config(balance: str, measured: Path | None) -> SimulationConfig:
    from gemworks.parallel import SimulationConfig
    from gemworks.parallel.simulation import with_validation

    if balance not in ("none", "bbs", "global"):
        raise ValueError(f"--balance: got {balance!r}, expected none, bbs or global")
    config = SimulationConfig(balance=balance)
    return config if measured is None else with_validation(config, measured.read_text(encoding="utf-8"))


def _plan(
    spec: ClusterSpec, shard: int, expert: int | None, expert_shard: int, table_group: int | None, replica_shard: int
) -> ParallelPlan:
    from gemworks.parallel import ParallelPlan

    return ParallelPlan.for_world(
        spec.num_gpus,
        shard=shard,
        expert=expert,
        expert_shard=expert_shard,
        table_group=table_group,
        replica_shard=replica_shard,
    )


def _draw(plan: ParallelPlan, spec: ClusterSpec, picture: Path | None) -> None:
    if picture is not None:
        from gemworks.parallel import place
        from gemworks.parallel.picture import draw_plan

        picture.write_text(draw_plan(place(plan, spec).layout, spec), encoding="utf-8")


def _print_json_text(text: str) -> None:
    import json

    content: dict[str, Any] = json.loads(text)
    print_json(content)
