"""`python -m gemworks.parallel search | ladder | simulate | place | ranks`: for people, or as JSON with `--json`.

    python -m gemworks.parallel simulate --gpus 4096 --shard 256 --expert 2 --expert-shard 16 \
        --table-group 256 --replica-shard 8 --trace step.json
    python -m gemworks.parallel search --gpus 1024 --top 5
    python -m gemworks.parallel place --gpus 4096 --shard 256 --table-group 256 --replica-shard 8

A cluster is a preset (roce, h200, gb200) or a cluster file; a model is "gem-like" or a profile file (ModelProfile's
JSON). `--errors` names a simulator_error.csv, so that every prediction carries the measured error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gemworks.parallel.command import CLUSTERS, Request, answer


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit code 2 with one line for the caller's mistakes."""
    parser = argparse.ArgumentParser(prog="python -m gemworks.parallel", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("search", "rank plans, with the reason each loser lost"),
        ("ladder", "what each dimension of the published plan buys"),
        ("simulate", "predict one step of a plan"),
        ("place", "which tier each group of a plan crosses"),
        ("ranks", "which rank holds what"),
    ):
        # Defaults are those of `Request`.
        sub = commands.add_parser(name, help=text, argument_default=argparse.SUPPRESS)
        sub.add_argument("--gpus", type=int, help="size of the preset, or of the resized file")
        sub.add_argument("--cluster", help=f"{', '.join(CLUSTERS)}, or a cluster file (default: roce)")
        sub.add_argument("--model", help="gem-like, or a profile file (default: gem-like)")
        sub.add_argument("--balance", help="how batches are evened out: none, bbs or global (default: bbs)")
        sub.add_argument("--errors", type=Path, help="simulator_error.csv of this kind of cluster")
        sub.add_argument("--picture", type=Path, help="draw the groups on the tiers (SVG)")
        sub.add_argument("--json", action="store_true", default=False, help="for machines")
        if name in ("search", "simulate"):
            sub.add_argument("--trace", type=Path, help="write the timeline as a Chrome trace")
        if name == "search":
            sub.add_argument("--top", type=int, help="plans to print (default: 10)")
            sub.add_argument("--keep", type=int, help="candidates kept per view before all are combined (default: 6)")
        if name in ("search", "ladder"):
            continue
        sub.add_argument("--shard", type=int, required=True, help="FSDP shard group")
        sub.add_argument("--expert", type=int, help="ranks that experts are spread over")
        sub.add_argument("--expert-shard", type=int, help="ranks that an expert's weights are sharded over")
        sub.add_argument("--table-group", type=int, help="ranks of one copy of the tables")
        sub.add_argument("--replica-shard", type=int, help="ranks that share one replica of a table shard")
        sub.add_argument("--sync-every", type=int, help="steps between means over table replicas")
        if name == "ranks":
            sub.add_argument("--rank", dest="ranks", type=int, action="append", help="a rank to list; may be repeated")
    words = vars(parser.parse_args(argv))
    question, as_json = words.pop("command"), words.pop("json")
    try:
        found = answer(question, Request(**words))
    except (ValueError, OSError) as error:
        print(f"{parser.prog} {question}: {error}", file=sys.stderr)
        return 2
    print(found.json if as_json else found.text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
