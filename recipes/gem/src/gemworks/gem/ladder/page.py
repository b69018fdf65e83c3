"""`docs/ladder.md` from the CSVs: what came out. Nothing on it is typed by hand; `detail_page` writes the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gemworks.gem.ladder import detail_page
from gemworks.gem.ladder.long_page import PICTURE, curves, long_run
from gemworks.gem.ladder.pair_page import latest_in_order, pair_table, pair_takeaways
from gemworks.gem.ladder.plan_page import predictions
from gemworks.gem.ladder.sequence import local_of, sequence_runs, sequence_table
from gemworks.gem.ladder.short_page import TECHNIQUES, in_short
from gemworks.gem.ladder.tables import (
    MAIN_LAW,
    Row,
    by_attention,
    cases,
    chart,
    in_order,
    ladder_table,
    law_of,
    not_measured,
    read,
    repeated,
    sets_of,
    stack_of,
    takeaways,
)

INTRO = """# The MFU ladder

Written by `python -m gemworks.gem.ladder --page` from the CSVs beside it: no figure here was typed. Every row is a
configuration of the same model, trained for real steps on synthetic data with the same seed; each adds one thing to the
row above (rows with `+` are measured beside the ladder: the next row builds on the one before them). Block and full
attention are different models with different FLOPs, so they are never in one table.

- *samples/s*: of a whole training step, data ready in host memory. *over*: its ratio to the row that this one builds
  on, which is named if it is beside the ladder; in brackets the range that the 20th to 80th percentile of their steps
  leaves; \\*: the two are of different commits. Where the range has 1 in it, the ratio says nothing.
- *step MFU*: all model FLOPs of a step over 989 TFLOP/s x wall time.
- *Local MFU*: sequence layers alone, forward and backward, FLOPs over 989 TFLOP/s x time, from [the layers' own
  runs](#sequence-layers). "at 512": with batches of that many samples, where the row's own was not measured.
- *NE*: over the timed steps, each batch before it is learned from; the same batches in every row of a batch size.

Step times with their spread, FLOPs, padding, recomputation, MFU against the peak of the mix of bf16 and FP8 products,
commits and commands, and every layer's table: [the ladder in detail]({details}).
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


def write_page(page: Path, measured: Path) -> None:
    """Writes the page, and the one with the details beside it.

    Args:
        page: the Markdown file.
        measured: folder of ladder_h200.csv, leave_one_out_h200.csv, layers_h200.csv and their charts.
    """
    page.parent.mkdir(parents=True, exist_ok=True)
    details = page.with_name(f"{page.stem}_details.md")
    runs, rows = sequence_runs(read(measured / "layers_h200.csv")), read(measured / "ladder_h200.csv")
    alone = read(measured / "leave_one_out_h200.csv")
    parts = [INTRO.format(details=details.name), "## In short\n", in_short(by_attention(rows), runs)]
    for attention in ("block", "full"):
        own = [[row for row in r if (row["attention"], law_of(row)) == (attention, MAIN_LAW)] for r in (rows, alone)]
        parts += [text] if (text := repeated(*own)) else []
    parts += [
        f"With lengths of the law `{law}`:\n\n" + in_short(by_attention(rows, law), runs, law)
        for law in sorted({law_of(row) for row in rows} - {MAIN_LAW})
    ]
    for title, file in detail_page.LADDERS.items():
        parts.append(f"## {title}\n")
        found = read(measured / file)
        if not found:
            parts.append(f"Not measured yet: there is no `{file}`.\n")
        chained = file.startswith("ladder")
        for case, group in cases(found, chained=chained).items():
            ordered = in_order(group)
            parts += [f"### {case}\n", ladder_table(ordered, partial(local_of, runs=runs), chained=chained)]
            parts.append(takeaways(ordered, chained=chained))
            if file == "ladder_h200.csv" and law_of(group[0]) == MAIN_LAW:
                parts.append(not_measured(ordered))
            law = "" if law_of(group[0]) == MAIN_LAW else f"_{law_of(group[0])}"
            law += re.sub(r"[^\w.]+", "_", f" {sets}") if (sets := sets_of(group[0])) else ""
            batch = "" if chained else f"_{stack_of(group[0]).replace(' ', '_')}_b{group[0]['batch']}"
            picture = measured / f"{file.removesuffix('.csv')}_{group[0]['attention']}{batch}{law}.png"
            if chart(picture, ordered, case):
                parts.append(f"![samples/s of each row]({detail_page.relative(picture.parent, page)}/{picture.name})\n")
    parts.append("## Sequence layers\n")
    parts.append(sequence_table(runs) if runs else "Not measured yet: there is no `layers_h200.csv`.\n")
    parts += _two_gpus(read(measured / "ladder_h200x2.csv"))
    predicted = read(measured / "plan_predictions.csv")
    parts += ["## Thousands of GPUs, predicted\n", predictions(predicted, read(measured / "simulator_error.csv"))]
    trained = read(measured / "long_run_h200.csv")
    parts += ["## Long run\n", long_run(trained)]
    if curves(measured / PICTURE, trained):
        parts.append(f"![NE, samples/s and memory]({detail_page.relative(measured, page)}/{PICTURE})\n")
    parts += [TECHNIQUES, REPEAT]
    page.write_text("\n".join(parts).rstrip() + "\n")
    detail_page.write_details(details, measured, page.name)


def _two_gpus(rows: Sequence[Row]) -> list[str]:
    parts = ["## Two GPUs\n"]
    if not rows:
        parts.append("Not measured yet: there is no `ladder_h200x2.csv`.\n")
    for case, group in cases(rows).items():
        ordered = latest_in_order(group)
        parts += [f"### {case}, two GPUs\n\n" + pair_table(ordered), pair_takeaways(ordered)]
    return parts
