"""The page's section on thousands of GPUs, from its CSVs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gemworks.gem.ladder.tables import Row, percent


def is_ours(row: Row) -> bool:
    """Of the layers measured here; the file holds other models' predictions too."""
    return "ladder.thousands" in row["command"]


def predictions(rows: Sequence[Row], errors: Sequence[Row]) -> str:
    """Tables per size of the cluster: predicted steps, and where the time of the whole plan goes."""
    ours = [row for row in rows if is_ours(row)]
    if not ours:
        return "Not predicted yet: `plan_predictions.csv` has no row of `python -m gemworks.gem.ladder.thousands`.\n"
    lines = [
        "Nothing in this section was measured on more than the GPUs of the tables above: the planner's simulator takes "
        "the layers measured on one GPU to a published kind of cluster.\n",
        _simulator_error(errors),
        "End-to-end MFU, and in brackets the Scaling Ratio; step times are in `plan_predictions.csv`.",
    ]
    plans: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for row in ours:
        if row["item"] == "step":
            model, _, plan = row["plan"].split(": dense shard")[0].partition(" attention, ")
            share = f"{percent(row['e2e_mfu'])} ({percent(row['scaling_ratio'])})"
            plans[model][plan][row["gpus"]] = share
    for model, named in plans.items():
        sizes = sorted({size for cells in named.values() for size in cells}, key=int)
        lines += ["", f"| {model} attention | " + " | ".join(f"{size} GPUs" for size in sizes) + " |"]
        lines.append("|---" * (len(sizes) + 1) + "|")
        lines += [
            f"| {plan} | " + " | ".join(cells.get(size, "") for size in sizes) + " |" for plan, cells in named.items()
        ]
    lines += ["", "Where the step of the whole plan goes (ms):", ""]
    whole: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in ours:
        model, _, plan = row["plan"].partition(" attention, ")
        if plan.startswith("all:"):
            whole[model, row["gpus"]][row["item"]] = row["ms"]
    columns = [f"{model}, {gpus}" for model, gpus in whole]
    lines += ["| item | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for item in dict.fromkeys(item for items in whole.values() for item in items):
        cells = [f"{float(items[item]):.2f}" if item in items else "" for items in whole.values()]
        lines.append(f"| {item} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _simulator_error(errors: Sequence[Row]) -> str:
    sizes = sorted(abs(float(row["error_pct"])) for row in errors if row["split"] == "validate" and row["error_pct"])
    if not sizes:
        return "The simulator's error is not measured: there is no `simulator_error.csv`.\n"
    gpus = ", ".join(sorted({row["num_gpus"] for row in errors}, key=int))
    median = sizes[len(sizes) // 2]
    return (
        f"On {gpus} GPU(s) the same simulator missed steps that it had not been fitted to by {median:.1f} % (median of "
        f"{len(sizes)}) and {sizes[-1]:.1f} % (worst).\n"
    )
