"""Tables of the ladder's rows for the pages, and what they say; losing rows included."""

from __future__ import annotations

import csv
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from gemworks.gem.ladder.settings import FULL_STACK, RUNGS
from gemworks.gem.presets import get_preset

Row = dict[str, str]
MAIN_LAW = "uniform"
NO_ROOM = "NoRoom"  # how the note of a row begins that was not tried, as its GPU had no memory for it
LAWS = {
    "uniform": "lengths uniform up to {} (mean/max 0.5)",
    "uniform_0.7": "lengths uniform from 0.4 of {} (mean/max 0.7)",
    "zipf": "lengths by Zipf's law up to {}",
}
FLAT = 0.02  # a ratio this near to 1 says nothing in one run
GAINS, FLAT_WORD, UNCERTAIN, LOSES = "Gains", "Nearly flat in this run", "Uncertain (the ranges overlap)", "Loses"


def read(path: Path) -> list[Row]:
    """The rows of a CSV; none if there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def law_of(row: Mapping[str, str]) -> str:
    """The law of a row's lengths; a row without one has the ladder's own."""
    return row.get("law") or MAIN_LAW


def sets_of(row: Mapping[str, str]) -> str:
    """What a row's command set beside its options: a column of the ladder of several GPUs, else in the command.

    >>> sets_of({"command": "python -m gemworks.gem.ladder --set data.num_ids=9 --steps 6 --set=model.dim=64"})
    'data.num_ids=9 model.dim=64'
    """
    if row.get("sets") is not None:
        return row["sets"]
    words = shlex.split(row.get("command") or "")
    after = [value for option, value in pairwise(words) if option == "--set"]
    joined = [word.removeprefix("--set=") for word in words if word.startswith("--set=")]
    return shlex.join(after + joined)


def preset_of(row: Mapping[str, str]) -> str:
    """A row's model: a column of the ladder of several GPUs, else in the command.

    >>> preset_of({"command": "python -m gemworks.gem.ladder --preset base --steps 6"}), preset_of({"command": ""})
    ('base', 'large')
    """
    if row.get("preset"):
        return row["preset"]
    words = [part for word in shlex.split(row.get("command") or "") for part in word.split("=", 1)]
    given = [value for option, value in pairwise(words) if option == "--preset"]
    return given[-1] if given else "tiny" if "--smoke" in words else "large"


def _made_with(row: Mapping[str, str]) -> str:
    """What a row was started with, where that is not what the rows of a ladder have."""
    parts = [f", preset `{row['preset']}`"] if row.get("preset") not in (None, "", "large") else []
    parts += [f", from `{row['setting']}`"] if row.get("setting") not in (None, "", FULL_STACK) else []
    return "".join(parts) + (f", with `{sets}`" if (sets := sets_of(row)) else "")


def percent(text: str) -> str:
    return f"{100 * float(text):.1f} %" if text else ""


def cases(rows: Sequence[Row], *, chained: bool = True) -> dict[str, list[Row]]:
    """Rows by what they compare in, the ladder's own law first; those without one technique by batch and stack too."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: law_of(row) != MAIN_LAW):
        lengths = LAWS.get(law_of(row), f"{law_of(row)} lengths up to {{}}").format(row["max_len"])
        stack = "" if chained else f"{stack_of(row)}, batch {row['batch']}, "
        groups[f"{row['attention']} attention, {stack}{lengths}, {row['gpu'] or 'a CPU'}{_made_with(row)}"].append(row)
    return groups


def stack_of(row: Row) -> str:
    """
    >>> stack_of({"row": "half_tables without GDPA"}), stack_of({"row": "without GDPA"})
    ('half_tables', 'full stack')
    """
    stack, without, _ = row["row"].partition("without ")
    return (stack.strip() or "full stack") if without else row["row"]


def by_attention(rows: Sequence[Row], law: str = MAIN_LAW) -> dict[str, list[Row]]:
    """Rows of one law by kind of attention, as the ladder has them; none that was started with `--set`."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if law_of(row) == law and not sets_of(row):
            groups[row["attention"]].append(row)
    return {attention: in_order(group) for attention, group in groups.items()}


def is_side(name: str) -> bool:
    return any(rung.name == name and rung.side for rung in RUNGS)


def latest(rows: Sequence[Row], key: Callable[[Row], tuple[str, ...]]) -> list[Row]:
    """The last row of each key. One without room was not tried, so it hides none that was."""
    last: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if key(row) not in last or not row.get("note", "").startswith(NO_ROOM):
            last[key(row)] = row
    return list(last.values())


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The rows as the ladder has them, whatever the order in which they were measured; the last measurement counts."""
    names = [rung.name for rung in RUNGS]
    last = latest(rows, lambda row: (row["row"], row["batch"]))
    return sorted(last, key=lambda row: names.index(row["row"]) if row["row"] in names else -1)


def _builds_on_sides(name: str) -> Iterator[str]:
    """The rows beside the ladder that a row builds on, the nearest first."""
    named = {rung.name: rung.over for rung in RUNGS}
    while name := named.get(name, ""):
        yield name


def compared(rows: Sequence[Row], *, chained: bool) -> Iterator[tuple[Row, Row | None]]:
    """Every row with the one that it builds on, or None.

    Args:
        rows: of one ladder, in its order.
        chained: each row builds on the one that its rung names (where that has no number, on the one which that one's
            rung names), or else on the one above that is not measured beside the ladder; otherwise all on the first. A
            row without a number is nobody's base.
    """
    have = {(row["row"], row["batch"]): row for row in rows if row["samples_per_s"]}
    base: Row | None = None
    for row in rows:
        measured = bool(row["samples_per_s"])
        sides = (have.get((name, row["batch"])) for name in _builds_on_sides(row["row"])) if chained else ()
        own = next((side for side in sides if side is not None), base)
        yield row, own if measured else None
        if measured and (base is None or (chained and not is_side(row["row"]))):
            base = row


def speeds(row: Row) -> tuple[float, float] | None:
    """Samples/s at the 80th and at the 20th percentile of a row's steps, or None where they were not kept."""
    if not (row.get("ms_p20") and row.get("ms_p80")):
        return None
    return 1e3 * int(row["batch"]) / float(row["ms_p80"]), 1e3 * int(row["batch"]) / float(row["ms_p20"])


def ratio_of(row: Row, base: Row) -> str:
    """The ratio of samples/s with its range: the slow steps of one over the quick ones of the other, and the reverse.
    \\*: of another commit."""
    own, other = speeds(row), speeds(base)
    text = f"x{float(row['samples_per_s']) / float(base['samples_per_s']):.3f}"
    if own and other:
        text += f" ({own[0] / other[1]:.2f}-{own[1] / other[0]:.2f})"
    return text + ("" if row["commit"] == base["commit"] else "\\*")


def verdict(row: Row, base: Row) -> str:
    """What a ratio says. Where the middle steps of the two, 20th to 80th percentile, overlap, it says nothing."""
    own, other = speeds(row), speeds(base)
    if own and other and own[0] <= other[1] and other[0] <= own[1]:
        return UNCERTAIN
    ratio = float(row["samples_per_s"]) / float(base["samples_per_s"])
    return FLAT_WORD if abs(ratio - 1) < FLAT else (GAINS if ratio > 1 else LOSES)


def repeated(rows: Sequence[Row], alone: Sequence[Row] = ()) -> str:
    """How far runs of one row differ, of the row that differs most; "" if none was measured twice.

    Args:
        rows: of one kind of attention and one law, all measurements.
        alone: of leaving one out, of the same kind and law; its `full stack` is a row of the ladder.
    """
    runs: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in [*rows, *(row | {"row": FULL_STACK} for row in alone if row["row"] == "full stack")]:
        if row["samples_per_s"] and not sets_of(row):
            runs[row["row"], row["batch"]].append(row)

    def apart(found: Sequence[Row]) -> float:
        each = [float(row["samples_per_s"]) for row in found]
        return max(each) / min(each)

    (name, batch), found = max(runs.items(), key=lambda item: apart(item[1]), default=(("", ""), []))
    if len(found) < 2:
        return ""
    each = ", ".join(f"{float(row['samples_per_s']):.0f} ({row['commit']})" for row in found)
    return (
        f"How far runs differ: `{name}` with {found[0]['attention']} attention and {batch} samples gave {each} "
        f"samples/s (commit), x{apart(found):.2f} apart. A smaller gain or loss between rows that were measured once "
        "may be its run's.\n"
    )


def _over(row: Row, base: Row | None) -> str:
    """The ratio of samples/s to the row that it builds on, which is named where its rung names it."""
    if base is None:
        return ""
    is_named = base["row"] in _builds_on_sides(row["row"])
    name = f" `{base['row']}`" if is_named else ""
    return ratio_of(row, base) + name


def _added(row: Row, batch: str) -> str:
    """In today's words, where the ladder still has the row; with its batch, if that is another, or why it has none."""
    words = next((rung.added for rung in RUNGS if rung.name == row["row"]), row["added"])
    if row["batch"] != batch:
        words += f"; {row['batch']} samples"
    return words if row["samples_per_s"] else f"{words}. No number: {row['note']}".removeprefix(". ")


def ladder_table(
    rows: Sequence[Row], local: Callable[[Row], str] = lambda row: percent(row["local_mfu"]), *, chained: bool = True
) -> str:
    """A Markdown table of one ladder's rows: what each adds, and what came of it.

    Args:
        rows: in the ladder's order.
        local: what to say of a row's Local MFU.
        chained: of `compared`.
    """
    lines = [
        f"Of {rows[0]['batch']} samples each, where nothing else is said.\n",
        "| row | adds | samples/s | over | step MFU | Local MFU | peak GiB | NE |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, base in compared(rows, chained=chained):
        cells = [
            f"+ {row['row']}" if chained and is_side(row["row"]) else row["row"], _added(row, rows[0]["batch"]),
            row["samples_per_s"], _over(row, base), percent(row["step_mfu"]), local(row), row["peak_gib"],
            row["ne"],
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def more_table(rows: Sequence[Row]) -> str:
    """What `ladder_table` leaves out."""
    lines = [
        "| row | batch | step ms | FLOPs of a step | mixed MFU | padding | recompute | steps | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["step_ms"]:
            cells = [
                row["row"], row["batch"], _spread(row), row["flops_per_step"], percent(row["mixed_mfu"]),
                percent(row["padding"]), percent(row["recompute"]), row["steps"], row["commit"],
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _spread(row: Row) -> str:
    """Median of a step, with the 20th and 80th percentile."""
    ends = f" ({float(row['ms_p20']):.0f}-{float(row['ms_p80']):.0f})" if row["ms_p20"] and row["ms_p80"] else ""
    return f"{float(row['step_ms']):.1f}{ends}"


def takeaways(rows: Sequence[Row], *, chained: bool = True) -> str:
    """Which rows gained, lost, or did neither, and where the whole ladder ended.

    Args:
        rows: of one ladder, in its order.
        chained: of `compared`.
    """
    said: dict[str, list[str]] = {word: [] for word in (GAINS, FLAT_WORD, UNCERTAIN, LOSES)}
    first: Row | None = None
    last: Row | None = None
    other = False
    for row, base in compared(rows, chained=chained):
        if base is not None:
            said[verdict(row, base)].append(f"`{row['row']}` {_over(row, base)}")
            other = other or row["commit"] != base["commit"]
        if row["samples_per_s"] and (first is None or not is_side(row["row"])):
            first, last = first or row, row
    lines = [f"- {word}: {', '.join(names)}." for word, names in said.items() if names]
    if chained and first is not None and last is not None and last is not first:
        lines.append(
            f"- The whole ladder, `{last['row']}` over `{first['row']}`: "
            f"x{float(last['samples_per_s']) / float(first['samples_per_s']):.2f} samples/s."
        )
    if other:
        lines.append("- \\*: the two rows are of different commits, so more than this may have changed between them.")
    return "\n".join(lines) + "\n"


def not_measured(rows: Sequence[Row]) -> str:
    """The rows that a table lacks, and those that cannot be measured yet, with the reason."""
    have = {row["row"] for row in rows}
    base = get_preset("large").with_model(attention=rows[0]["attention"])
    refused = {rung.name: rung.refusal(base) for rung in RUNGS}
    missing = [name for name, refusal in refused.items() if name not in have and not refusal]
    lines = [f"- Rows that this table lacks: {', '.join(missing)}."] if missing else []
    lines += [f"- `{name}`: {refusal}." for name, refusal in refused.items() if refusal and name not in have]
    return "\n".join(lines) + "\n"


def chart(path: Path, rows: Sequence[Row], title: str) -> bool:
    """A bar of samples/s per row, with its step MFU and commit; False without a measured row."""
    shown = [row for row in rows if row["samples_per_s"]]
    if not shown:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.35 * len(shown) + 1.5))
    names = [f"{row['row']}, batch {row['batch']}" for row in shown]
    speeds = [float(row["samples_per_s"]) for row in shown]
    axes.barh(names, speeds, color=["#a0aec0" if is_side(row["row"]) else "#2b6cb0" for row in shown])
    for at, (row, speed) in enumerate(zip(shown, speeds, strict=True)):
        text = f"  {speed:.0f}" + (f", {percent(row['step_mfu'])}" if row["step_mfu"] else "")
        text += f" ({row['commit']})" if row.get("commit") else ""
        axes.text(speed, at, text, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(right=1.35 * max(speeds))
    beside = "; grey: measured beside the ladder" if any(is_side(row["row"]) for row in shown) else ""
    axes.set_xlabel(f"samples/s of whole training steps\nlabel: step MFU against 989 TFLOP/s (commit){beside}")
    figure.suptitle(title, fontsize=11)  # over the whole width: over the axes alone long ones are cut
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
