"""The page's section on the long run, and its curves, from the CSV that `benchmarks/long_run.py` writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from gemworks.gem.ladder.tables import Row

STARTS = ("started", "started again")
PICTURE = "long_run_h200.png"
AVERAGED = 10  # lines of the log that make the NE at the start and at the end
AIM_MINUTES = 20  # of training


@dataclass
class Span:
    """One life of the trainer: from its start to its kill or its end.

    Attributes:
        piece: which it belongs to.
        began: second of the piece.
        event: with which it began, of `STARTS`.
        lines: of its log.
    """

    piece: str
    began: float
    event: str
    lines: list[Row] = field(default_factory=list)

    @property
    def trained_s(self) -> float:
        """From its first line to its last: without the start and the steps before the first line."""
        return second(self.lines[-1]) - second(self.lines[0]) if self.lines else 0.0

    @property
    def start_s(self) -> float | None:
        """Until its first line, so with the steps of that line; None without one."""
        return second(self.lines[0]) - self.began if self.lines else None

    @property
    def steady(self) -> list[Row]:
        """Its lines without the first, whose steps compile."""
        return self.lines[1:]


def second(row: Row) -> float:
    return float(row["second"])


def has_memory(line: Row) -> bool:
    """Whether the trainer was still there when the memory beside its line was read."""
    return bool(line["memory_mib"]) and float(line["memory_mib"]) > 0


def last_memory(span: Span) -> str:
    """MiB of its last line that has any; `?` without one."""
    known = [line["memory_mib"] for line in span.lines if has_memory(line)]
    return f"{float(known[-1]):.0f}" if known else "?"


def spans(rows: Sequence[Row]) -> list[Span]:
    """The lives of the trainer, in order."""
    found: list[Span] = []
    for row in rows:
        if row["event"] in STARTS:
            found.append(Span(row["piece"], second(row), row["event"]))
        elif row["event"] == "train":
            if not found or found[-1].piece != row["piece"]:
                found.append(Span(row["piece"], 0.0, STARTS[0]))
            found[-1].lines.append(row)
    return found


def trained_seconds(rows: Sequence[Row]) -> float:
    """Of training, without starts, saves at the end of pieces and the steps that a kill took back."""
    return sum(span.trained_s for span in spans(rows))


def long_run(rows: Sequence[Row]) -> str:
    """The run's pieces, its NE at the start and at the end, and how flat its throughput and memory were."""
    lives = [span for span in spans(rows) if span.lines]
    lines = [line for span in lives for line in span.lines]
    if not lines:
        return "Not measured yet: there is no `long_run_h200.csv`.\n"
    walls = _walls(rows)
    starts = ", ".join(f"{span.start_s:.0f}" for span in lives)
    first, last = lines[:AVERAGED], lines[-AVERAGED:]
    kills = sum(row["event"] == "killed" for row in rows)
    told = {key: {row[key] for row in rows if row.get(key)} for key in ("gpu", "commit", "note")}
    where = f"`base` on one {'/'.join(sorted(told['gpu']))}" if told["gpu"] else "`base`"
    text = [
        f"{where}{', commit ' + ' '.join(sorted(told['commit'])) if told['commit'] else ''}, by "
        "`recipes/gem/benchmarks/long_run.py`; pieces are processes of their own, each of which goes on from the files "
        "that the one before it cut.\n",
        f"- {len(walls)} pieces, {trained_seconds(rows) / 60:.1f} minutes of training ({AIM_MINUTES} were the aim) in "
        f"{sum(walls.values()) / 60:.1f} minutes; {kills} kill{'s' if kills != 1 else ''}, gone on with after "
        f"it. Until a start's first line ({lines[0]['step']} steps): {starts} s.",
        f"- step {lines[0]['step']} to {lines[-1]['step']}: NE {_mean(first, 'ne'):.4f} (first {len(first)} lines) to "
        f"{_mean(last, 'ne'):.4f} (last {len(last)}).",
    ]
    steady = [line for span in lives for line in span.steady]
    if steady:
        speeds = sorted(float(line["samples_per_s"]) for line in steady)
        text.append(
            f"- samples/s: median {median(speeds):.0f}, 10 % {speeds[len(speeds) // 10]:.0f}, "
            f"90 % {speeds[len(speeds) * 9 // 10]:.0f}; median from start to start "
            + ", ".join(f"{median(float(line['samples_per_s']) for line in s.steady):.0f}" for s in lives if s.steady)
            + "."
        )
    if memory := [float(line["memory_mib"]) for line in steady or lines if has_memory(line)]:
        text.append(
            f"- memory in use: {min(memory):.0f} to {max(memory):.0f} MiB; at the end of each start "
            + ", ".join(last_memory(span) for span in lives)
            + "."
        )
    text += [
        f"- Piece {piece} was cut off from outside: it has no end, and no files to go on from."
        for piece in walls
        if not any(row["piece"] == piece and row["event"].startswith("ended") for row in rows)
    ]
    text += [f"- {note}." for note in sorted(told["note"])]
    return "\n".join(text) + "\n"


def _mean(lines: Sequence[Row], key: str) -> float:
    return fmean(float(line[key]) for line in lines)


def _walls(rows: Sequence[Row]) -> dict[str, float]:
    walls: dict[str, float] = {}
    for row in rows:
        walls[row["piece"]] = max(walls.get(row["piece"], 0.0), second(row))
    return walls


def curves(path: Path, rows: Sequence[Row]) -> bool:
    """NE, samples/s and memory over the minutes of the run, its starts and kills marked; False without a line."""
    lives = [span for span in spans(rows) if span.steady]
    if not lives:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    walls, before, total = _walls(rows), {}, 0.0
    for piece, wall in walls.items():
        before[piece], total = total, total + wall
    figure, panels = plt.subplots(3, 1, figsize=(9, 7), sharex=True, layout="constrained")
    for axes, key, label in zip(panels, ("ne", "samples_per_s", "memory_mib"), ("NE", "samples/s", "MiB"), strict=True):
        for span in lives:
            known = [line for line in span.steady if (has_memory(line) if key == "memory_mib" else line[key])]
            minutes = [(before[span.piece] + second(line)) / 60 for line in known]
            axes.plot(minutes, [float(line[key]) for line in known], color="#2b6cb0", linewidth=1)
        for row in rows:
            if row["event"] in (*STARTS, "killed"):
                killed = row["event"] == "killed"
                at = (before[row["piece"]] + second(row)) / 60
                axes.axvline(at, color="#c53030" if killed else "#a0aec0", linewidth=1, linestyle=":")
        if key != "ne":
            axes.set_ylim(bottom=0)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("minutes, pieces one after the other; dotted: the trainer starts (grey) or is killed (red)")
    figure.suptitle("The long run of `base`: NE of each line's samples before they are learned from", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
