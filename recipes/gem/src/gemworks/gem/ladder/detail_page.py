"""`docs/ladder_details.md`: all of the ladder's columns, where a step's time goes, every layer, and the commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from gemworks.gem.ladder.plan_page import is_ours
from gemworks.gem.ladder.sequence import last_runs
from gemworks.gem.ladder.tables import LAWS, MAIN_LAW, Row, cases, in_order, law_of, more_table, percent, read
from gemworks.gem.ladder.time_page import where_time_goes
from gemworks.gem.layers.report import chart as layer_chart
from gemworks.gem.layers.report import chart_name
from gemworks.gem.turns import without_options

LADDERS: Mapping[str, str] = {
    "The ladder": "ladder_h200.csv",
    "Leave one out": "leave_one_out_h200.csv",
}
INTRO = """# The ladder in detail

Written with [the ladder]({page}) from the same CSVs.

- *step ms*: median, and 20th to 80th percentile. A wide range means that steps waited for a host that other processes
  kept busy: such rows of different runs compare badly.
- *mixed MFU*: against the peak of the mix of bf16 and FP8 products. *recompute*: products computed again for backward
  over the model's own; empty where a compiler decides what is.
- *commit*: what was measured. Rows of one commit come from one run or from runs on one kind of machine minutes apart;
  between commits everything under a row may have changed.
"""


def write_details(page: Path, measured: Path, main: str) -> None:
    """Writes the page.

    Args:
        page: the Markdown file.
        measured: folder of the CSVs and charts.
        main: file name of the ladder's page.
    """
    layers, rows = read(measured / "layers_h200.csv"), read(measured / "ladder_h200.csv")
    parts = [INTRO.format(page=main)]
    for title, file in LADDERS.items():
        for case, group in cases(read(measured / file), chained=file.startswith("ladder")).items():
            parts.append(f"## {title}: {case}\n\n" + more_table(in_order(group)))
    if kernels := where_time_goes(measured, rows, layers):
        parts += ["## Where a step's time goes\n", kernels]
    if layers:
        parts.append("## Layer by layer\n")
    for group in largest(last_runs(layers)):
        first = group[0]
        law = "" if law_of(first) == MAIN_LAW else f", {LAWS[law_of(first)].format(first['max_len'])}"
        parts.append(f"### {first['attention']} attention, {first['setting']}, batch {first['batch']}{law}\n")
        parts.append(layer_table(group))
        picture = chart_name(first["attention"], first["setting"], first["batch"], law_of(first))
        if any(row["tensor_core_ms"] for row in group) and layer_chart(measured / picture, group):
            parts.append(f"![time of each layer]({relative(measured, page)}/{picture})\n")
    predicted = [row for row in read(measured / "plan_predictions.csv") if is_ours(row)]
    told = [*rows, *read(measured / "ladder_h200x2.csv"), *layers, *predicted]
    commands = sorted({shlex.join(without_options(shlex.split(row["command"]))) for row in told if row["command"]})
    parts.append("## Commands\n\n```sh\n" + "\n".join(commands or ["python -m gemworks.gem.ladder"]) + "\n```\n")
    page.write_text("\n".join(parts).rstrip() + "\n")


def relative(folder: Path, page: Path) -> str:
    """A folder, as a page's links name it."""
    try:
        return folder.resolve().relative_to(page.resolve().parent).as_posix()
    except ValueError:
        return folder.as_posix()


def largest(runs: Sequence[list[Row]]) -> list[list[Row]]:
    """Of the runs of one kind of attention, setting and law, the one with the most samples."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for run in sorted(runs, key=lambda run: int(run[0]["batch"])):
        found[run[0]["attention"], run[0]["setting"], law_of(run[0])] = run
    return list(found.values())


def layer_table(rows: Sequence[Row]) -> str:
    """A Markdown table of one run of `layers`."""
    lines = [
        "| layer | times | ms | MFU | share of time | tensor cores ms | other kernels ms | gaps ms | least ms | note |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row["layer"], row["count"], row["ms"], percent(row["local_mfu"]), percent(row["share_of_time"]),
            row["tensor_core_ms"], row["memory_ms"], row["gap_ms"], row["bound_ms"], row["note"],
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
