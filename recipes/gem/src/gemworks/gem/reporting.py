"""What a run shows while it goes: a live progress bar on a terminal, status lines when the output is piped."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

BAR_CELLS = 20


@dataclass(frozen=True)
class StepRow:
    """The figures of the steps since the last row.

    Attributes:
        step: steps done.
        total_steps: of the whole run.
        loss: weighted mean of the tasks' log-losses, nats.
        ne: of the primary task, on the rows' own rate.
        samples_per_s, tokens_per_s: wall time of the steps, waiting for data included; a token is one event.
        flops_per_s: model FLOPs, forward and backward.
        mfu: share of the GPU's peak; None on a CPU.
        step_ms: wall time per step.
        data_wait_ms: of it, waiting for the reader.
        lr, sparse_lr: learning rates of the last step.
        grad_norm: of the dense part in the last finite step, before clipping.
        forward_ms, backward_ms, optimizer_ms: of step_ms, by phase; the tables' update is part of backward.
        communication_ms: inside the phases, while a collective ran, in one step of the last ten seconds; None for a
            process on its own, and before such a step.
        exposed_communication_ms: of it, with nothing else on the GPU; None on a CPU.
        num_skipped: steps of the run so far whose loss or gradient was not finite.
    """

    step: int
    total_steps: int
    loss: float
    ne: float
    samples_per_s: float
    tokens_per_s: float
    flops_per_s: float
    mfu: float | None
    step_ms: float
    data_wait_ms: float
    lr: float
    sparse_lr: float
    grad_norm: float
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    optimizer_ms: float = 0.0
    communication_ms: float | None = None
    exposed_communication_ms: float | None = None
    num_skipped: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def si(value: float, unit: str = "") -> str:
    """A rate with three digits and an SI prefix.

    >>> si(12345.0), si(2.5e9, "FLOP/s"), si(7.0)
    ('12.3k', '2.50 GFLOP/s', '7.00')
    """
    scales = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (0.0, ""))
    factor, prefix = next((max(f, 1.0), p) for f, p in scales if abs(value) >= f)
    short = value / factor
    digits = 2 if abs(short) < 10 else 1 if abs(short) < 100 else 0
    return f"{short:.{digits}f}{' ' if unit else ''}{prefix}{unit}"


def figures(row: StepRow) -> str:
    """The figures of a row on one line, the same in the progress bar and in status lines."""
    work = si(row.flops_per_s, "FLOP/s") if row.mfu is None else f"MFU {100 * row.mfu:.1f}%"
    return (
        f"loss {row.loss:.4f}  NE {row.ne:.4f}  {si(row.samples_per_s)} samples/s  {si(row.tokens_per_s)} tokens/s  "
        f"{work}  {row.step_ms:.0f} ms/step"
    )


def left(row: StepRow) -> str:
    """How long the steps that are left take at this row's pace, for lines; a live bar has a column of its own."""
    seconds = (row.total_steps - row.step) * row.step_ms / 1e3
    if seconds < 1:
        return ""
    return f"  {seconds:.0f} s left" if seconds < 120 else f"  {seconds / 60:.0f} min left"


def split(row: StepRow) -> str:
    """Where the time of a step went, in ms, for the log file."""
    parts = f"data {row.data_wait_ms:.0f}, forward {row.forward_ms:.0f}, backward {row.backward_ms:.0f}"
    parts += f", optimizer {row.optimizer_ms:.0f}"
    if row.communication_ms is not None:
        parts += f"; communication {row.communication_ms:.0f}"
    if row.exposed_communication_ms is not None:
        parts += f", exposed {row.exposed_communication_ms:.0f}"
    return f"({parts})"


class Display(Protocol):
    """Where a run reports to."""

    def start(self, total_steps: int, done: int = 0) -> None: ...
    def advance(self) -> None:
        """One step is done."""
        ...

    def row(self, row: StepRow) -> None: ...
    def message(self, text: str) -> None: ...
    def stop(self) -> None: ...


def open_display(console: Console) -> Display:
    """A live bar where the console is a terminal, lines elsewhere."""
    return BarDisplay(console) if console.is_terminal else LineDisplay(console)


class LineDisplay:
    """One plain line per row: for pipes, log files and schedulers."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self, total_steps: int, done: int = 0) -> None:
        pass

    def advance(self) -> None:
        pass

    def row(self, row: StepRow) -> None:
        filled = round(BAR_CELLS * row.step / row.total_steps)
        width = len(str(row.total_steps))
        self.message(
            f"{'█' * filled}{'░' * (BAR_CELLS - filled)} {row.step:>{width}}/{row.total_steps}  {figures(row)}"
            f"{left(row)}"
        )

    def message(self, text: str) -> None:
        # straight to the file: a line must not be wrapped at the width of a terminal that is not there
        self._console.file.write(text + "\n")
        self._console.file.flush()

    def stop(self) -> None:
        pass


class SilentDisplay:
    """Shows nothing: for the ranks after the first."""

    def start(self, total_steps: int, done: int = 0) -> None:
        pass

    def advance(self) -> None:
        pass

    def row(self, row: StepRow) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def stop(self) -> None:
        pass


class LoggingDisplay:
    """Another display, and the same lines with the time of day in a file.

    Args:
        inner: the other display.
        path: the file; lines are appended.
    """

    def __init__(self, inner: Display, path: Path) -> None:
        self._inner = inner
        self._path = path

    def _write(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")

    def start(self, total_steps: int, done: int = 0) -> None:
        self._inner.start(total_steps, done)

    def advance(self) -> None:
        self._inner.advance()

    def row(self, row: StepRow) -> None:
        self._write(f"{row.step:>{len(str(row.total_steps))}}/{row.total_steps}  {figures(row)}  {split(row)}")
        self._inner.row(row)

    def message(self, text: str) -> None:
        self._write(text)
        self._inner.message(text)

    def stop(self) -> None:
        self._inner.stop()


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get("figures", "")))


class BarDisplay:
    """A live progress bar with the newest figures under it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("[bold cyan]train"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TextColumn("[dim]eta"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._figures = Progress(_Figures(), console=console, refresh_per_second=4)
        self._live: Any = None

    def start(self, total_steps: int, done: int = 0) -> None:
        from rich.console import Group
        from rich.live import Live

        self._task = self._progress.add_task("train", total=total_steps, completed=done)
        self._text = self._figures.add_task("figures", figures="")
        self._live = Live(Group(self._progress, self._figures), console=self._console, refresh_per_second=4)
        self._live.start()

    def advance(self) -> None:
        self._progress.advance(self._task)

    def row(self, row: StepRow) -> None:
        self._figures.update(self._text, figures=figures(row))

    def message(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
