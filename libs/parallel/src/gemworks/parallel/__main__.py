"""`python -m gemworks.parallel simulate | search | place`: predictions for people, or as JSON with `--json`.

    python -m gemworks.parallel simulate --gpus 4096 --shard 256 --expert 2 --expert-shard 16 \
        --table-group 256 --replica-shard 8 --trace step.json
    python -m gemworks.parallel search --gpus 1024 --top 5
    python -m gemworks.parallel place --gpus 4096 --shard 256 --table-group 256 --replica-shard 8

A cluster is a preset (roce, h200, gb200) or a cluster file; a model is "gem-like" or a profile file (ModelProfile's
JSON). `--errors` names a simulator_error.csv, so that every prediction carries the measured error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gemworks.parallel import presets
from gemworks.parallel.cluster import ClusterSpec
from gemworks.parallel.placement import Placement, place
from gemworks.parallel.plan import ParallelPlan
from gemworks.parallel.planner import search
from gemworks.parallel.profile import ModelProfile, gem_like
from gemworks.parallel.simulation import simulate, with_validation
from gemworks.parallel.splits import model_traffic
from gemworks.parallel.step_graph import SimulationConfig

_PRESETS = {"roce": presets.roce_cluster, "h200": presets.h200_host, "gb200": presets.gb200_rack}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit code 2 with one line for the caller's mistakes."""
    parser = argparse.ArgumentParser(prog="python -m gemworks.parallel", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("simulate", "predict one step of a plan"),
        ("search", "rank plans, with the reason each loser lost"),
        ("place", "which tier each group of a plan crosses"),
    ):
        sub = commands.add_parser(name, help=text)
        sub.add_argument("--gpus", type=int, default=None, help="size of the preset, or of the resized file")
        sub.add_argument("--cluster", default="roce", help=f"{', '.join(_PRESETS)}, or a cluster file")
        sub.add_argument("--model", default="gem-like", help="gem-like, or a profile file")
        sub.add_argument("--json", action="store_true", help="for machines")
        sub.add_argument("--errors", type=Path, default=None, help="simulator_error.csv of this kind of cluster")
        if name == "search":
            sub.add_argument("--top", type=int, default=10, help="plans to print")
            continue
        sub.add_argument("--shard", type=int, required=True, help="FSDP shard group")
        sub.add_argument("--expert", type=int, default=None, help="ranks that experts are spread over")
        sub.add_argument("--expert-shard", type=int, default=1, help="ranks that an expert's weights are sharded over")
        sub.add_argument("--table-group", type=int, default=None, help="ranks of one copy of the tables")
        sub.add_argument("--replica-shard", type=int, default=1, help="ranks that share one replica of a table shard")
        sub.add_argument("--sync-every", type=int, default=1, help="steps between means over table replicas")
        if name == "simulate":
            sub.add_argument("--trace", type=Path, default=None, help="write the timeline as a Chrome trace")
    args = parser.parse_args(argv)
    try:
        print(_run(args))
    except (ValueError, FileNotFoundError) as error:
        print(f"{parser.prog} {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> str:
    cluster, model, config = _cluster(args), _model(args), SimulationConfig()
    if args.errors is not None:
        config = with_validation(config, args.errors.read_text())
    if args.command == "search":
        found = search(model, cluster, config)
        return found.to_json(args.top) if args.json else found.text(args.top)
    plan = ParallelPlan.for_world(
        cluster.num_gpus,
        shard=args.shard,
        expert=args.expert if args.expert is not None or not model.num_experts else 1,
        expert_shard=args.expert_shard,
        table_group=args.table_group,
        replica_shard=args.replica_shard,
        sync_every=args.sync_every,
    )
    if args.command == "place":
        placement = place(plan, cluster, model_traffic(plan, model))
        return _placement_json(placement) if args.json else placement.text()
    step = simulate(plan, model, cluster, config)
    if args.trace is not None:
        args.trace.write_text(step.chrome_trace())
    return step.to_json() if args.json else step.text()


def _placement_json(placement: Placement) -> str:
    views = {
        view: {"tiers": dict(v.tiers), "how": v.how, "predicted_us": v.cost_us, "row_major_us": v.row_major_us}
        for view, v in placement.views.items()
    }
    return json.dumps({"plan": placement.layout.plan.to_dict(), "views": views}, sort_keys=True)


def _cluster(args: argparse.Namespace) -> ClusterSpec:
    if args.cluster in _PRESETS:
        make = _PRESETS[args.cluster]
        return make() if args.gpus is None else make(args.gpus)
    if not Path(args.cluster).exists():
        raise ValueError(f"--cluster: got {args.cluster!r}, expected one of {sorted(_PRESETS)} or a file that is there")
    spec = ClusterSpec.from_toml(args.cluster)
    return spec if args.gpus is None else spec.resized(args.gpus)


def _model(args: argparse.Namespace) -> ModelProfile:
    if args.model == "gem-like":
        return gem_like()
    if not Path(args.model).exists():
        raise ValueError(f"--model: got {args.model!r}, expected gem-like or a file that is there")
    return ModelProfile.from_json(args.model)


if __name__ == "__main__":
    raise SystemExit(main())
