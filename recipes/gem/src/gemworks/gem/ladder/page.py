"""`docs/ladder.md` from the CSVs: tables and what they say, losing rows included. Nothing on it is typed by hand."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from gemworks.gem.ladder.pair_page import latest_in_order, pair_table, pair_takeaways
from gemworks.gem.ladder.settings import RUNGS
from gemworks.gem.ladder.short_page import TARGETS, TECHNIQUES, in_short
from gemworks.gem.ladder.time_page import where_time_goes
from gemworks.gem.layers.report import chart as layer_chart
from gemworks.gem.presets import get_preset

Row = dict[str, str]
INTRO = """# The MFU ladder

Written by `python -m gemworks.gem.ladder --page` from the CSVs beside it: no figure here was typed. Every row is a
configuration of the same model, trained for real steps on synthetic data with the same seed; each adds one thing to the
row above (rows with `+` are measured beside the ladder: the next row builds on the one before them). Block and full
attention are different models with different FLOPs, so they are never in one table.

- *samples/s*: of a whole training step, data ready in host memory.
- *Local MFU*: sequence layers alone, forward and backward, FLOPs over 989 TFLOP/s x time. "at 512": from the layers'
  own run below, with batches of that many samples.
- *step MFU*: all model FLOPs of a step over 989 TFLOP/s x wall time; *mixed* divides by the peak of the mix of bf16 and
  FP8 products instead.
- *NE*: over the timed steps, each batch before it is learned from; the same batches in every row of a batch size.
- *step ms*: median, and 20th to 80th percentile. A wide range means that steps waited for a host that other processes
  kept busy: such rows of different runs compare badly.
- *commit*: what was measured. Rows of one commit come from one run or from runs on one kind of machine minutes apart;
  between commits everything under a row may have changed, and the takeaways say so.
"""
REPEAT = """\
## To repeat it

On one H200 with torch, triton and gemworks installed, these commands, each of which goes on where it was stopped:

```sh
python -m gemworks.gem.ladder --batch-size 256 --profile cuda_graphs --out docs/measured     # both ladders
python -m gemworks.gem.ladder --batch-size 256 --leave-one-out --out docs/measured
python -m gemworks.gem.layers --batch-size 512 --setting cuda_graphs --out docs/measured
python -m gemworks.gem.ladder --page docs/ladder.md --out docs/measured                      # this page
```

`--batch-size auto` looks for the largest batch that the padded row fits. `--smoke` runs every row on a CPU in seconds.
The ladder needs torchrec (the layers alone do not). Where nothing can be installed from an index, unpack the wheels of
torchrec 1.6.1, fbgemm-gpu 1.6.0, tensordict, iopath, pyre-extensions, typing-inspect, pyvers and orjson, which fit
torch 2.11, into one folder (`python -m zipfile -e WHEEL FOLDER`) and put it on PYTHONPATH. Of fbgemm-gpu, which is
large, the objects of one GPU architecture suffice.
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
    layers = read(measured / "layers_h200.csv")
    parts = [
        INTRO,
        "## In short\n",
        in_short({k: in_order(g) for k, g in _by_attention(read(measured / "ladder_h200.csv")).items()}, layers),
        TECHNIQUES,
        REPEAT,
    ]
    for title, file in (
        ("The ladder", "ladder_h200.csv"),
        ("The ladder at 64 samples", "ladder_b64_h200.csv"),
        ("Leave one out", "leave_one_out_h200.csv"),
    ):
        rows = read(measured / file)
        parts.append(f"## {title}\n")
        if not rows:
            parts.append(f"Not measured yet: there is no `{file}`.\n")
        for case, group in _cases(rows).items():
            ordered = in_order(group)
            parts.append(f"### {case}\n\n" + ladder_table(ordered, layers))
            parts.append(takeaways(ordered, chained=file.startswith("ladder")))
            if file == "ladder_h200.csv":
                parts.append(not_measured(ordered))
            picture = measured / f"{file.removesuffix('.csv')}_{group[0]['attention']}.png"
            if chart(picture, ordered, case):
                parts.append(f"![samples/s of each row]({_relative(picture.parent, page)}/{picture.name})\n")
    pair = read(measured / "ladder_h200x2.csv")
    parts += _two_gpus(pair)
    if kernels := where_time_goes(measured, read(measured / "ladder_h200.csv"), layers):
        parts += ["## Where a step's time goes\n", kernels]
    parts.append("## Layer by layer\n")
    if not layers:
        parts.append("Not measured yet: there is no `layers_h200.csv`.\n")
    else:
        parts.append(sequence_layers(layers))
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in layers:
        groups[f"{row['attention']} attention, {row['setting']}, batch {row['batch']}"].append(row)
    for name, group in groups.items():
        parts.append(f"### {name}\n\n" + layer_table(group))
        picture = f"layers_{group[0]['attention']}_{group[0]['setting']}_b{group[0]['batch']}.png"
        if layer_chart(measured / picture, group):
            parts.append(f"![time of each layer]({_relative(measured, page)}/{picture})\n")
    predicted = read(measured / "plan_predictions.csv")
    parts += ["## Thousands of GPUs, predicted\n", predictions(predicted, read(measured / "simulator_error.csv"))]
    parts += ["## Long run\n", long_run(read(measured / "long_run_h200.csv"))]
    rows = [*read(measured / "ladder_h200.csv"), *pair, *layers, *(r for r in predicted if _is_ours(r))]
    commands = sorted({row["command"] for row in rows if row["command"]})
    parts.append("## Commands\n\n```sh\n" + "\n".join(commands or ["python -m gemworks.gem.ladder"]) + "\n```\n")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(parts))


def _two_gpus(rows: Sequence[Row]) -> list[str]:
    parts = ["## Two GPUs\n"]
    if not rows:
        parts.append("Not measured yet: there is no `ladder_h200x2.csv`.\n")
    for case, group in _cases(rows).items():
        ordered = latest_in_order(group)
        parts += [f"### {case}, two GPUs\n\n" + pair_table(ordered), pair_takeaways(ordered)]
    return parts


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


def _by_attention(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["attention"]].append(row)
    return groups


def _percent(text: str) -> str:
    return f"{100 * float(text):.1f} %" if text else ""


def _is_side(name: str) -> bool:
    return any(rung.name == name and rung.side for rung in RUNGS)


def _added(row: Row) -> str:
    """In today's words, where the ladder still has the row."""
    return next((rung.added for rung in RUNGS if rung.name == row["row"]), row["added"])


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The rows as the ladder has them, whatever the order in which they were measured; the last measurement counts."""
    names = [rung.name for rung in RUNGS]
    latest = {(row["row"], row["batch"]): row for row in rows}
    return sorted(latest.values(), key=lambda row: names.index(row["row"]) if row["row"] in names else -1)


def ladder_table(rows: Sequence[Row], layers: Sequence[Row] = ()) -> str:
    """A Markdown table of one ladder's rows; `layers` has the Local MFU of rows whose own run did not time layers."""
    lines = [
        "| row | adds | batch | samples/s | Local MFU | step MFU | mixed | step ms | peak GiB | padding | recompute "
        "| NE | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = f"+ {row['row']}" if _is_side(row["row"]) else row["row"]
        cells = [
            name, _added(row), row["batch"], row["samples_per_s"], _local(row, layers),
            _percent(row["step_mfu"]), _percent(row["mixed_mfu"]), _spread(row), row["peak_gib"],
            _percent(row["padding"]), _percent(row["recompute"]), row["ne"], row["commit"],
        ]  # fmt: skip
        if not row["step_ms"]:
            cells[3] = row["note"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _spread(row: Row) -> str:
    """Median of a step, with the 20th and 80th percentile."""
    if not row["step_ms"]:
        return ""
    ends = f" ({float(row['ms_p20']):.0f}-{float(row['ms_p80']):.0f})" if row["ms_p20"] and row["ms_p80"] else ""
    return f"{float(row['step_ms']):.1f}{ends}"


def _local(row: Row, layers: Sequence[Row]) -> str:
    """Local MFU of a row's sequence layers: its own, or the latest that `layers` measured, with its batch size."""
    if row["local_mfu"]:
        return _percent(row["local_mfu"])
    found = [
        x for x in layers
        if (x["layer"], x["attention"], x["setting"]) == ("sequence layers", row["attention"], row["row"])
    ]  # fmt: skip
    return f"{_percent(found[-1]['local_mfu'])} at {found[-1]['batch']}" if found else ""


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
            other = "" if row["commit"] == base["commit"] else " (of another commit)"
            said.append(f"- `{row['row']}` over `{base['row']}`{other}: x{ratio:.3f} samples/s, {word}.")
        if base is None or (chained and not _is_side(row["row"])):
            base = row
    if chained and first is not None and base is not None and base is not first:
        ratio = float(base["samples_per_s"]) / float(first["samples_per_s"])
        said.append(f"- `{base['row']}` over `{first['row']}`: x{ratio:.2f} samples/s.")
    return "\n".join(said) + "\n"


def not_measured(rows: Sequence[Row]) -> str:
    """The rows that a table lacks, and those that cannot be measured yet, with the reason."""
    have = {row["row"] for row in rows}
    base = get_preset("large").with_model(attention=rows[0]["attention"])
    refused = {rung.name: rung.refusal(base) for rung in RUNGS}
    missing = [name for name, refusal in refused.items() if name not in have and not refusal]
    lines = [f"Rows that this table lacks: {', '.join(missing)}."] if missing else []
    lines += [f"- `{name}`: {refusal}." for name, refusal in refused.items() if refusal]
    return "\n".join(lines) + "\n"


def sequence_layers(rows: Sequence[Row]) -> str:
    """Local MFU of all sequence layers together, beside the target and what this run's rates allow."""
    lines = [
        "All sequence layers of a run together: their Local MFU, the target, and the Local MFU if every layer took the "
        "least time that the copy and product rates of the same run allow. Which layers a run has is in its table.\n",
        "| attention | setting | batch | Local MFU | target | least time's | share of it | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["layer"] == "sequence layers":
            least = row["note"].rpartition(" ")[2]
            lines.append(
                f"| {row['attention']} | {row['setting']} | {row['batch']} | {_percent(row['local_mfu'])} "
                f"| {_percent(TARGETS.get(row['attention'], ''))} | {_percent(least)} "
                f"| {_percent(row['roofline_fraction'])} | {row['commit']} |"
            )
    return "\n".join(lines) + "\n"


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


def _is_ours(row: Row) -> bool:
    """Of the layers measured here; the file holds other models' predictions too."""
    return "ladder.thousands" in row["command"]


def predictions(rows: Sequence[Row], errors: Sequence[Row]) -> str:
    """Tables per size of the cluster: predicted steps, and where the time of the whole plan goes."""
    ours = [row for row in rows if _is_ours(row)]
    if not ours:
        return "Not predicted yet: `plan_predictions.csv` has no row of `python -m gemworks.gem.ladder.thousands`.\n"
    lines = [
        "Nothing in this section was measured on more than the GPUs of the tables above: the planner's simulator takes "
        "the layers measured on one GPU to a published kind of cluster.\n",
        _simulator_error(errors),
        "| GPUs | model, plan | step ms | end-to-end MFU | Scaling Ratio |",
        "|---|---|---|---|---|",
    ]
    for row in ours:
        if row["item"] == "step":
            name = row["plan"].split(": dense shard")[0]
            lines.append(
                f"| {row['gpus']} | {name} | {float(row['ms']):.1f} | {_percent(row['e2e_mfu'])} "
                f"| {_percent(row['scaling_ratio'])} |"
            )
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


def long_run(rows: Sequence[Row]) -> str:
    """The run's pieces, its NE at the start and at the end, and how flat its throughput and memory were."""
    trained = [row for row in rows if row["event"] == "train"]
    if not trained:
        return "Not measured yet: there is no `long_run_h200.csv`.\n"
    pieces: dict[str, float] = {}
    for row in rows:
        pieces[row["piece"]] = max(pieces.get(row["piece"], 0.0), float(row["second"]))
    speeds = sorted(float(row["samples_per_s"]) for row in trained[1:] or trained)
    memory = [float(row["memory_mib"]) for row in trained if row["memory_mib"]]
    lines = [
        f"- {len(pieces)} pieces, {sum(pieces.values()) / 60:.1f} minutes; "
        f"{sum(row['event'] == 'killed' for row in rows)} kills, each gone on with.",
        f"- step {trained[0]['step']} to {trained[-1]['step']}: NE {float(trained[0]['ne']):.4f} to "
        f"{float(trained[-1]['ne']):.4f}.",
        f"- samples/s: median {speeds[len(speeds) // 2]:.0f}, 10 % {speeds[len(speeds) // 10]:.0f}, "
        f"90 % {speeds[len(speeds) * 9 // 10]:.0f}.",
    ]
    if memory:
        lines.append(f"- memory in use: {min(memory):.0f} to {max(memory):.0f} MiB.")
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
    axes.barh(names, speeds, color=["#a0aec0" if _is_side(row["row"]) else "#2b6cb0" for row in shown])
    for at, (row, speed) in enumerate(zip(shown, speeds, strict=True)):
        text = f"  {speed:.0f}" + (f", {_percent(row['step_mfu'])}" if row["step_mfu"] else "")
        text += f" ({row['commit']})" if row.get("commit") else ""
        axes.text(speed, at, text, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(right=1.35 * max(speeds))
    beside = "; grey: measured beside the ladder" if any(_is_side(row["row"]) for row in shown) else ""
    axes.set_xlabel(f"samples/s of whole training steps\nlabel: step MFU against 989 TFLOP/s (commit){beside}")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
