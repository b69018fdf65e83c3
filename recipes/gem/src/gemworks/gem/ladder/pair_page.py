"""The page's section on several GPUs, from `ladder_h200x2.csv`."""

from __future__ import annotations

from collections.abc import Sequence

from gemworks.gem.ladder.pair import COLLECTIVES, RUNGS
from gemworks.gem.ladder.tables import latest, ratio_of, verdict

Row = dict[str, str]
# What a row changes, it changes in this one; FP8 gathers in the row with the same linears.
COMPARED_WITH = {"fp8_gather": "fp8_linears"}
BASE = "fsdp"
ALONE = ("one_gpu", "one_gpu_global")


def latest_in_order(rows: Sequence[Row]) -> list[Row]:
    """The last measurement of each row and batch, as the ladder has them; of one of `cases`."""
    names = [rung.name for rung in RUNGS]
    known = [row for row in rows if row["row"] in names]
    last = latest(known, lambda row: (row["row"], row["batch"], row["num_gpus"]))
    return sorted(last, key=lambda row: (int(row["batch"]) // max(int(row["num_gpus"]), 1), names.index(row["row"])))


def pair_table(rows: Sequence[Row]) -> str:
    """Markdown tables of one ladder's rows: what came of them, what else there is, and exposed time per collective."""
    lines = [
        "| row | is | GPUs | batch | samples/s | E2E MFU | Scaling Ratio | exposed ms | peak GiB |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        is_ = row["added"] if row["samples_per_s"] else f"{row['added']}. No number: {row['note']}"
        cells = [
            row["row"], is_, row["num_gpus"], row["batch"], row["samples_per_s"], _percent(row["step_mfu"], 1),
            _scaling_ratio(row), row["exposed_ms"], row["peak_gib"],
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| row | batch | step ms | loss against one GPU | NE | communication ms | commit |", "|---" * 7 + "|"]
    for row in rows:
        if row["step_ms"]:
            loss = _percent(row["loss_vs_one_gpu"], 2)
            cells = [row["row"], row["batch"], row["step_ms"], loss, row["ne"], row["communication_ms"], row["commit"]]
            lines.append("| " + " | ".join(cells) + " |")
    traced = [row for row in rows if row["exposed_ms"]]
    if traced:
        used = [name for name in COLLECTIVES if any(float(row[f"exposed_{name}_ms"]) for row in traced)]
        lines += ["", "Exposed ms of a step per collective (its kernels run and nothing else does):", ""]
        lines += ["| row | batch | " + " | ".join(used) + " |", "|---" * (len(used) + 2) + "|"]
        for row in traced:
            cells = [f"{float(row[f'exposed_{name}_ms']):.2f}" for name in used]
            lines.append(f"| {row['row']} | {row['batch']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def pair_takeaways(rows: Sequence[Row]) -> str:
    """What each row gained or lost against the one that it changes one thing in."""
    measured = {(row["row"], row["batch"]): row for row in rows if row["step_ms"]}
    said: list[str] = []
    other = False
    for (name, batch), row in measured.items():
        base = measured.get((COMPARED_WITH.get(name, BASE), batch))
        if name in ALONE or base is None or base is row:
            continue
        word = verdict(row, base)
        said.append(f"- `{name}` over `{base['row']}`, batch {batch}: {ratio_of(row, base)} samples/s, {word.lower()}.")
        other = other or row["commit"] != base["commit"]
    if other or any("\\*" in _scaling_ratio(row) for row in rows):
        said.append("- \\*: the two rows are of different commits, so more than this may have changed between them.")
    return "\n".join(said) + "\n"


def _scaling_ratio(row: Row) -> str:
    """Marked where the row of one GPU is of another commit."""
    ratio = row["scaling_ratio"]
    return ratio + ("\\*" if ratio and row.get("one_gpu_commit", row["commit"]) != row["commit"] else "")


def _percent(text: str, digits: int) -> str:
    return f"{100 * float(text):.{digits}f} %" if text else ""
