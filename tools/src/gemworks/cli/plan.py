"""`gemworks plan`: search for a parallel plan, predict a step, say who holds what: as gemworks.parallel says."""

from __future__ import annotations

import csv
import json as json_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from gemworks.cli.options import Json
from gemworks.cli.output import at_least, print_json, quiet, readable, writable

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
SyncEvery = Annotated[int, typer.Option(help="Steps between means over table replicas.", metavar="N")]
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
    _answer("search", json, cluster, gpus, profile, balance, measured, top=top, keep=keep, picture=picture, trace=trace)


@plan_app.command()
def simulate(
    shard: Shard,
    expert: Expert = None,
    expert_shard: ExpertShard = 1,
    table_group: TableGroup = None,
    replica_shard: ReplicaShard = 1,
    sync_every: SyncEvery = 1,
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
    _answer(
        "simulate",
        json,
        cluster,
        gpus,
        profile,
        balance,
        measured,
        shard=shard,
        expert=expert,
        expert_shard=expert_shard,
        table_group=table_group,
        replica_shard=replica_shard,
        sync_every=sync_every,
        picture=picture,
        trace=trace,
    )


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
        list[int] | None,
        typer.Option(help="A rank to list; may be repeated; all if not given.", metavar="NUMBER"),
    ] = None,
    picture: Picture = None,
    json: Json = False,
) -> None:
    """Say which rank holds what: its place, its groups, its weights, experts and table rows.

    Example: gemworks plan ranks --cluster h200 --gpus 8 --shard 8 --table-group 4 --replica-shard 2
    """
    _answer(
        "ranks",
        json,
        cluster,
        gpus,
        profile,
        shard=shard,
        expert=expert,
        expert_shard=expert_shard,
        table_group=table_group,
        replica_shard=replica_shard,
        ranks=rank,
        picture=picture,
    )


def _answer(
    question: Literal["search", "simulate", "ranks"],
    as_json: bool,
    cluster: str,
    gpus: int | None,
    profile: Path | None,
    balance: str = "bbs",
    errors: Path | None = None,
    **words: Any,
) -> None:
    """What the library answers to these words."""
    writable("--picture", words.get("picture"), ".svg")
    writable("--trace", words.get("trace"))
    at_least(1, gpus=gpus, **{name: size for name, size in words.items() if isinstance(size, int)})
    if errors is not None:
        _measured_steps(errors)
    with quiet():
        from gemworks.parallel.command import Request, answer

        model = "gem-like" if profile is None else str(profile)
        found = answer(
            question, Request(cluster=cluster, gpus=gpus, model=model, balance=balance, errors=errors, **words)
        )
    if as_json:
        print_json(json_module.loads(found.json))
    else:
        print(found.text)


def _measured_steps(path: Path) -> None:
    """Says that a file holds no measured errors, before torch is imported."""
    readable(path, "a simulator_error.csv")
    try:
        columns = next(csv.reader(path.read_text(encoding="utf-8").splitlines()), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"--measured: got {str(path)!r}, which is no CSV ({error})") from error
    if missing := {"config", "split", "error_pct"} - set(columns):
        raise ValueError(
            f"--measured: got {str(path)!r} without the columns {', '.join(sorted(missing))}; expected a "
            f"simulator_error.csv, as `python -m gemworks.parallel.validate` writes it"
        )
