"""Pages of the site that are generated: what runs where, every measured row, the index of decisions."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Columns that tell one row of a measurement from another, and what is shown of its result; not the machine's.
SHOWN = (
    *("op", "layer", "row", "config", "recipe", "shape", "head_dim", "direction", "format", "setting", "attention"),
    *("kernel", "impl", "batch", "law", "num_ranks", "gpus", "method", "plan", "tier", "item", "seed", "examples"),
    *("ms", "tflops", "gbps", "roofline_fraction"),
    *("best_peer", "ratio_to_best_peer", "memory_gib", "exposed_ms", "local_mfu", "step_mfu", "samples_per_s"),
    *("ratio_to_bf16", "sqnr_db", "predicted_ms", "measured_ms", "error_pct", "ne", "auc", "max_over_mean", "gain"),
    *("e2e_mfu", "scaling_ratio", "predicted_bytes", "measured_bytes", "ne_difference_percent", "low_percent"),
    *("high_percent", "us", "tensor_pipe_percent", "issue_percent", "dram_percent", "l2_percent", "registers", "gpu"),
)
MAX_ROWS = 400  # of a page; nobody reads more, and a phone needs seconds to lay them out
Rows = Sequence[dict[str, str]]


def support() -> str:
    """Which backend runs what, from the rules that dispatch follows."""
    from gemworks import jagged, precision

    note = "`gemworks doctor` says the same of your machine, with reasons; nothing falls back silently."
    lines = ["# What runs where", "", "Generated from the rules that dispatch follows.", note, "", "## Jagged ops", ""]
    lines += ["The first backend of an op that takes the dtype and the architecture is the one that runs.", ""]
    lines += _table(grouped_support(jagged.support()))
    names = ("product or cast", "recipe", "architecture", "backend: kernel")
    rows = [(op, kind, place, kernel) for place, op, kind, kernel in precision.support_table()]
    merged: dict[tuple[str, str, str], list[str]] = {}
    for op, kind, place, kernel in rows:
        merged.setdefault((op, kind, kernel), []).append(place)
    lines += ["", "## Linear layers in FP8", ""]
    lines += _table(
        [dict(zip(names, (op, kind, ", ".join(p), kernel), strict=True)) for (op, kind, kernel), p in merged.items()]
    )
    return "\n".join(lines) + "\n"


def grouped_support(support: Sequence[Any]) -> list[dict[str, str]]:
    """One line per op and backend; its dtypes, architectures and directions are a full product, as a rule states them.

    Raises:
        ValueError: they are not, so that one line would say too much.
    """
    groups: dict[tuple[str, str, Any], list[Any]] = {}
    for row in support:
        groups.setdefault((row.op, row.backend, row.max_head_dim), []).append(row)
    order = list(dict.fromkeys(row.op for row in support))
    lines = []
    for (op, backend, width), rows in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        dtypes, places, directions = (
            list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("dtype", "architecture", "direction")
        )
        if len(set(rows)) != len(dtypes) * len(places) * len(directions):
            raise ValueError(f"support of {op} by {backend}: got {len(set(rows))} rows, expected every combination")
        lines.append(
            {
                "op": f"`{op}`",
                "backend": backend,
                "architectures": ", ".join(places),
                "dtypes": ", ".join(dtypes),
                "directions": ", ".join(directions),
                "widest head": "" if width is None else str(width),
            }
        )
    return lines


def measured() -> dict[str, str]:
    """Page -> text: an index of the committed measurements, and a page for each CSV."""
    index = ["# Measured rows", "", "Each row is a claim: its CSV has the commit, the command and the spread; an early",
             "one that lacks its commit has a dash here. Losing rows stay in. What they say, in words and pictures:",
             "[the MFU ladder](../ladder.md), [where Local MFU goes](../local_mfu.md),",
             "[attention beside its peers](../jagged.md), [five dimensions on three tiers](../parallel.md).", "",
             "| measurement | rows | device | commits | file |", "|---|---:|---|---|---|"]  # fmt: skip
    pages = {}
    for path in sorted((ROOT / "docs/measured").glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if not rows:
            continue
        devices = ", ".join(sorted({row.get("gpu") or row.get("device") or "" for row in rows} - {""}))
        commits = ", ".join(dict.fromkeys(row["commit"] for row in rows if row.get("commit"))) or "-"
        cells = (f"[{path.stem}]({path.stem}.md)", str(len(rows)), devices, commits, f"[{path.name}]({path.name})")
        index.append(f"| {' | '.join(cells)} |")
        pages[f"measured/{path.stem}.md"] = measurement(path, rows)
    return {"measured/index.md": "\n".join(index) + "\n", **pages}


def measurement(path: Path, rows: Rows) -> str:
    """The page of one CSV: what all rows have in common as a sentence, the rest as a table."""
    num_rows = len(rows)
    rows, which = _main(rows)
    shown = [name for name in SHOWN if any(row.get(name) for row in rows)] or list(rows[0])[:8]
    same = [name for name in shown if len({row.get(name) or "" for row in rows}) == 1 and len(rows) > 1]
    columns = [name for name in shown if name not in same]
    same = [name for name in same if name != "seed"]  # says nothing where it is always the same
    lines = ["---", "hide: [toc]", "---", "", f"# {path.stem}", "", f"{num_rows} rows; the whole file, with commits "
             f"and commands: [{path.name}]({path.name}).{which}", ""]  # fmt: skip
    if same:
        lines += ["In all of them: " + ", ".join(f"{name} {rows[0][name]}" for name in same) + ".", ""]
    lines += _table([{name: _short(row.get(name) or "") for name in columns} for row in rows])
    return "\n".join(lines) + "\n"


def _main(rows: Rows) -> tuple[Rows, str]:
    """Of a long file our rows, as each names its best peer, or whole steps without their parts; and a note."""
    if len(rows) <= MAX_ROWS:
        return rows, ""
    ours = [row for row in rows if row.get("impl", "").startswith("gemworks")]
    if ours and any(row.get("best_peer") for row in ours):
        return ours, f" Here: the {len(ours)} rows of gemworks, with the best peer of each; the file has every peer's."
    steps = [row for row in rows if row.get("item") == "step"]
    if steps:
        return steps, f" Here: the {len(steps)} whole steps; their parts are in the file."
    return rows, ""


def decisions() -> str:
    """The index of decisions."""
    lines = [
        "# Decisions",
        "",
        "One page each: context, decision, consequence. What a later one replaced says so, here and on its page.",
        "",
        "| number | decision |",
        "|---|---|",
    ]
    for path in sorted((ROOT / "docs/decisions").glob("[0-9]*.md")):
        text = path.read_text(encoding="utf-8")
        heading = text.split("\n")[0]
        found = re.fullmatch(r"# (\d{4}):? (.+)", heading)
        if found is None:
            raise ValueError(f"{path}: got {heading!r}, expected '# NNNN: what was decided'")
        title = found[2] if "_" in found[2].split()[0] else found[2][:1].upper() + found[2][1:]
        later = re.match(r".*\n\n\*(Superseded|Changed in part) by (\[\d{4}\]\([\w.-]+\))", text)
        note = f" ({later[1][:1].lower()}{later[1][1:]} by {later[2]})" if later else ""
        lines.append(f"| {found[1]} | [{title}]({path.name}){note} |")
    return "\n".join(lines) + "\n"


def _table(rows: Rows) -> Iterator[str]:
    """Columns of numbers are aligned to the right."""
    yield f"| {' | '.join(name.replace('_', ' ') for name in rows[0])} |"
    yield f"|{'|'.join('---:' if _is_numeric(rows, name) else '---' for name in rows[0])}|"
    for row in rows:
        yield f"| {' | '.join(value.replace('|', chr(92) + '|') for value in row.values())} |"


def _is_numeric(rows: Rows, name: str) -> bool:
    values = [row[name] for row in rows if row[name]]
    return (
        bool(values)
        and sum(re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?", value) is not None for value in values) > len(values) / 2
    )


def _short(text: str) -> str:
    try:
        return f"{float(text):.4g}" if "." in text or "e" in text else text
    except ValueError:
        return text if len(text) <= 120 else text[:117] + "..."
