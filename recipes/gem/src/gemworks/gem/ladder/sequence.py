"""Local MFU of the sequence layers, from runs of `layers`: pooling, PFFN and self-attention, all of a model.

Merging the events' fields comes once, before the layers, and is stated apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemworks.gem.efficiency import H200_BF16_PEAK_FLOPS
from gemworks.gem.ladder.tables import LAWS, MAIN_LAW, Row, law_of, percent

TARGETS = {"block": 0.40, "full": 0.42}  # Local MFU of the sequence layers of `large`
PARTS = ("hsp", "pffn", "attention")
ONE_GRAPH, EVENTS = "layer", "events"


@dataclass(frozen=True)
class SequenceRun:
    """One run of `layers`.

    Attributes:
        first: a row of it, for what all of them say.
        ms: of all sequence layers, forward and backward.
        apart: Local MFU of the three parts run alone; `missing` says which of them the run has not.
        one_graph: Local MFU of a layer compiled as one graph, as in a step; None if it was not timed.
        with_events: as `apart`, with the merge of the events; None if it was not timed.
        bound: Local MFU if every part took the least time that the run's rates allow.
    """

    first: Row
    ms: float
    apart: float
    one_graph: float | None
    with_events: float | None
    bound: float
    missing: tuple[str, ...]

    @property
    def best(self) -> float:
        return max(self.apart, self.one_graph or 0.0)

    @property
    def name(self) -> str:
        """What was run, in words."""
        law = law_of(self.first)
        more = "" if law == MAIN_LAW else f", {LAWS[law].format(self.first['max_len'])}"
        return f"{self.first['attention']} attention, {self.first['setting']}, batch {self.first['batch']}{more}"


def last_runs(layers: Sequence[Row]) -> list[list[Row]]:
    """The rows of `layers` by run (attention, setting, batch, law), the last of each; in the order of the file."""
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in layers:
        key = (row["attention"], row["setting"], row["batch"], law_of(row))
        if any(row["layer"] == other["layer"] for other in runs.get(key, ())):
            del runs[key]
        runs.setdefault(key, []).append(row)
    return list(runs.values())


def sequence_runs(layers: Sequence[Row]) -> list[SequenceRun]:
    """The Local MFU of each last run that timed one of the parts."""
    out = []
    for group in last_runs(layers):
        timed: dict[str, list[Row]] = {}  # by layer, whatever the type of its events
        for row in group:
            if row["ms"]:
                timed.setdefault(row["layer"].rpartition(".")[2], []).append(row)
        parts = [row for name in PARTS for row in timed.get(name, ())]
        if parts:
            ms, graphs, events = _ms(parts), timed.get(ONE_GRAPH), timed.get(EVENTS)
            out.append(
                SequenceRun(
                    group[0],
                    ms,
                    _mfu(parts, ms),
                    _mfu(graphs, sum(float(row["ms"]) for row in graphs), count=1) if graphs else None,
                    _mfu([*parts, *events], ms + _ms(events)) if events else None,
                    _mfu(parts, sum(int(row["count"]) * float(row["bound_ms"]) for row in parts)),
                    tuple(name for name in PARTS if name not in timed),
                )
            )
    return out


def _ms(rows: Sequence[Row]) -> float:
    return sum(int(row["count"]) * float(row["ms"]) for row in rows)


def _mfu(rows: Sequence[Row], ms: float, *, count: int | None = None) -> float:
    """FLOPs of the rows over the peak x ms; each as often as it says, or `count` times."""
    gflop = sum((count or int(row["count"])) * float(row["tflops"]) * float(row["ms"]) for row in rows)
    return gflop * 1e12 / (H200_BF16_PEAK_FLOPS * ms) if ms else 0.0


def local_of(row: Row, runs: Sequence[SequenceRun]) -> str:
    """Local MFU of a ladder's row: its own, or what a run of `layers` with its setting found, of the row's batch if
    there is one, or with the batch that it is of."""
    if row["local_mfu"]:
        return percent(row["local_mfu"])
    wanted = (row["attention"], row["row"], law_of(row))
    found = [r for r in runs if (r.first["attention"], r.first["setting"], law_of(r.first)) == wanted and not r.missing]
    same = [r for r in found if r.first["batch"] == row["batch"]]
    if same:
        return _percent(same[-1].apart)
    return f"{_percent(found[-1].apart)} at {found[-1].first['batch']}" if found else ""


def sequence_table(runs: Sequence[SequenceRun]) -> str:
    """A Markdown table of the runs, beside the targets and what each run's rates allow."""
    lines = [
        "Local MFU of pooling, PFFN and self-attention, run alone and as often as the model has them; *one graph*: the "
        "three of a layer compiled together, as in a step; *with events*: and the merge of the events' fields before "
        "the layers; *allowed*: if each took the least time that the copy and product rates of the same run allow.\n",
        "| run | apart | one graph | with events | target | allowed | share of it | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        apart = _percent(run.apart) + (f" (no {', '.join(run.missing)})" if run.missing else "")
        cells = [
            run.name, apart, _percent(run.one_graph), _percent(run.with_events),
            _percent(TARGETS.get(run.first["attention"])), _percent(run.bound), _percent(run.best / run.bound),
            run.first["commit"],
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _percent(share: float | None) -> str:
    return "" if share is None else percent(str(share))
