"""`docs/ladder.md` from the CSVs: tables and what they say, losing rows included. Nothing on it is typed by hand."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from gemworks.gem.ladder.settings import RUNGS

Row = dict[str, str]
INTRO = """# The MFU ladder

Written by `python -m gemworks.gem.ladder --page` from the CSVs beside it: no figure here was typed. Every row is a
configuration of the same model, trained for real steps on synthetic data with the same seed; each adds one thing to the
row above (rows with `+` are measured beside the ladder: the next row builds on the one before them). Block and full
attention are different models with different FLOPs, so they are never in one table.

- *samples/s*: of a whole training step, data ready in host memory.
- *Local MFU*: sequence layers alone, forward and backward, FLOPs over 989 TFLOP/s x time.
- *step MFU*: all model FLOPs of a step over 989 TFLOP/s x wall time; *mixed* divides by the peak of the mix of bf16 and
  FP8 products instead.
- *NE*: over the timed steps, each batch before it is learned from; the same batches in every row of a batch size.
"""


def read(path: Path) -> list[Row]:
    """The rows of a CSV; none if there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_page(page: Path, measured: Path) -> None:
    """Writes the page.

    Args:
        page: the Markdown file.
        measured: folder of ladder_h200.csv, leave_one_out_h200.csv, layers_h200.csv and their charts.
    """
    parts = [INTRO]
    for title, file in (("The ladder", "ladder_h200.csv"), ("Leave one out", "leave_one_out_h200.csv")):
        rows = read(measured / file)
        parts.append(f"## {title}\n")
        if not rows:
            parts.append(f"Not measured yet: there is no `{file}`.\n")
        for case, group in _cases(rows).items():
            parts.append(f"### {case}\n\n" + ladder_table(in_order(group)))
            parts.append(takeaways(in_order(group), chained=file.startswith("ladder")))
    layers = read(measured / "layers_h200.csv")
    parts.append("## Layer by layer\n")
    if not layers:
        parts.append("Not measured yet: there is no `layers_h200.csv`.\n")
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in layers:
        groups[f"{row['attention']} attention, {row['setting']}, batch {row['batch']}"].append(row)
    for name, group in groups.items():
        parts.append(f"### {name}\n\n" + layer_table(group))
        chart = f"layers_{group[0]['attention']}_{group[0]['setting']}.png"
        if (measured / chart).is_file():
            parts.append(f"![time of each layer]({_relative(measured, page)}/{chart})\n")
    commands = sorted({row["command"] for row in [*read(measured / "ladder_h200.csv"), *layers] if row["command"]})
    parts.append("## Commands\n\n```sh\n" + "\n".join(commands or ["python -m gemworks.gem.ladder"]) + "\n```\n")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(parts))


def _relative(folder: Path, page: Path) -> str:
    try:
        return folder.resolve().relative_to(page.resolve().parent).as_posix()
    except ValueError:
        return folder.as_posix()


def _cases(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        where = row["gpu"] or "a CPU"
        groups[f"{row['attention']} attention, {row['law']} lengths up to {row['max_len']}, {where}"].append(row)
    return groups


def _percent(text: str) -> str:
    return f"{100 * float(text):.1f} %" if text else ""


def _is_side(name: str) -> bool:
    return any(rung.name == name and rung.side for rung in RUNGS)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The rows as the ladder has them, whatever the order in which they were measured; the last measurement counts."""
    names = [rung.name for rung in RUNGS]
    latest = {(row["row"], row["batch"]): row for row in rows}
    return sorted(latest.values(), key=lambda row: names.index(row["row"]) if row["row"] in names else -1)


def ladder_table(rows: Sequence[Row]) -> str:
    """A Markdown table of one ladder's rows."""
    lines = [
        "| row | adds | batch | samples/s | Local MFU | step MFU | mixed | step ms | peak GiB | padding | recompute "
        "| NE |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = f"+ {row['row']}" if _is_side(row["row"]) else row["row"]
        cells = [
            name, row["added"], row["batch"], row["samples_per_s"], _percent(row["local_mfu"]),
            _percent(row["step_mfu"]), _percent(row["mixed_mfu"]), row["step_ms"], row["peak_gib"],
            _percent(row["padding"]), _percent(row["recompute"]), row["ne"],
        ]  # fmt: skip
        if not row["step_ms"]:
            cells[3] = row["note"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def takeaways(rows: Sequence[Row], *, chained: bool = True) -> str:
    """What each row gained or lost over the one that it builds on, and where the whole ladder ended.

    Args:
        rows: of one ladder, in its order.
        chained: each row builds on the one above; otherwise all on the first.
    """
    base: Row | None = None
    first: Row | None = None
    said = []
    for row in rows:
        if not row["samples_per_s"]:
            continue
        first = first or row
        if base is not None:
            ratio = float(row["samples_per_s"]) / float(base["samples_per_s"])
            word = "nearly flat in this run" if abs(ratio - 1) < 0.02 else ("gains" if ratio > 1 else "loses")
            said.append(f"- `{row['row']}` over `{base['row']}`: x{ratio:.3f} samples/s, {word}.")
        if base is None or (chained and not _is_side(row["row"])):
            base = row
    if chained and first is not None and base is not None and base is not first:
        ratio = float(base["samples_per_s"]) / float(first["samples_per_s"])
        said.append(f"- `{base['row']}` over `{first['row']}`: x{ratio:.2f} samples/s.")
    return "\n".join(said) + "\n"


def layer_table(rows: Sequence[Row]) -> str:
    """A Markdown table of one run of `layers`."""
    lines = [
        "| layer | times | ms | MFU | share of time | tensor cores ms | other kernels ms | gaps ms | least ms | note |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row["layer"], row["count"], row["ms"], _percent(row["local_mfu"]), _percent(row["share_of_time"]),
            row["tensor_core_ms"], row["memory_ms"], row["gap_ms"], row["bound_ms"], row["note"],
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
