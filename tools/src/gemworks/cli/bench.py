"""`gemworks bench`: run a library's own benchmark program, show its rows, compare them with older ones.

The program runs as `python -m gemworks.<library>.bench`, so that its CSV names a command that anybody can repeat. What
it prints is progress; the table comes from the CSV, which holds no row whose correctness check failed.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from gemworks.cli.compare import SHOWN_COLUMNS, compare, print_comparison, read_rows
from gemworks.cli.options import Json
from gemworks.cli.output import at_least, console, new_folder, print_error, print_json
from gemworks.gem.errors import RUN_FAILED, WRONG_INPUT

STEP = re.compile(r"\[(\d+)/(\d+)\] ")  # how a program says which of its steps begins
LAST_LINES = 12  # of a failed program's output, shown when they went by as progress


@dataclass(frozen=True)
class Suite:
    """A benchmark program.

    Attributes:
        module: run with `python -m`.
        out: the value of its `--out` for a folder.
        smoke: its arguments for tiny sizes, on any machine.
        what: one line of help.
        example: what follows `gemworks bench` in an example.
        several: some of it needs several processes.
    """

    module: str
    out: Callable[[Path], str]
    smoke: tuple[str, ...]
    what: str
    example: str = ""
    several: bool = False


SUITES: Mapping[str, Suite] = {
    "jagged": Suite(
        "gemworks.jagged.bench",
        lambda folder: str(folder / "jagged.csv"),
        ("--smoke",),
        "Attention on jagged lengths, beside its peers.",
        "jagged --compare docs/measured/jagged_h200.csv -- --budget-s 300",
    ),
    "precision": Suite(
        "gemworks.precision.bench",
        str,
        ("--smoke",),
        "FP8 casts, norms and linear layers, against bf16 and Transformer Engine.",
        "precision -- --only checks,casts",
    ),
    "parallel": Suite(
        "gemworks.parallel.bench",
        str,
        ("plan",),
        "Planner, balance of ranks, and on several GPUs: collectives and exposed communication.",
        "parallel --nproc 2 -- gpu",
        several=True,
    ),
    "netmem": Suite(
        "gemworks.netmem.bench",
        lambda folder: str(folder / "netmem.csv"),
        ("--smoke",),
        "Links, offload, activation budgets, and on two GPUs: copies by copy engines.",
        "netmem --nproc 2 -- --suite pair",
        several=True,
    ),
    "layers": Suite(
        "gemworks.gem.layers",
        str,
        ("--smoke",),
        "Local MFU: every layer type of a preset alone, forward and backward.",
        "layers -- --preset large",
    ),
    "ladder": Suite(
        "gemworks.gem.ladder",
        str,
        ("--smoke",),
        "The ablation ladder: whole training steps, one technique added per row.",
        "ladder --compare docs/measured/ladder_h200.csv -- --preset large",
    ),
}

bench_app = typer.Typer(
    name="bench",
    help="Run the benchmarks: correctness first, then numbers, CSV and plots.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Out = Annotated[
    Path | None,
    typer.Option(help="Folder for CSV, plots and log, without CSV files; runs/bench/<suite>-<time> if not given."),
]
Smoke = Annotated[bool, typer.Option("--smoke", help="Tiny sizes, in seconds, on any machine: does it run?")]
Nproc = Annotated[int, typer.Option(help="Processes, one per GPU, under torchrun.", metavar="NUMBER")]
Compare = Annotated[
    Path | None, typer.Option(help="Compare with this CSV of an earlier run, row by row.", metavar="OLD.csv")
]
Rest = Annotated[
    list[str] | None, typer.Argument(help="After --: arguments of the program itself.", metavar="[-- ARGS]...")
]


def _add_command(name: str, suite: Suite) -> None:
    def one(
        rest: Rest = None, out: Out = None, smoke: Smoke = False, compare: Compare = None, json: Json = False
    ) -> None:
        _bench(name, rest, out, smoke, 1, compare, json)

    def several(
        rest: Rest = None,
        out: Out = None,
        smoke: Smoke = False,
        nproc: Nproc = 1,
        compare: Compare = None,
        json: Json = False,
    ) -> None:
        _bench(name, rest, out, smoke, nproc, compare, json)

    more = f"python -m {suite.module} --help lists what can follow --"
    text = f"{suite.what}\n\nExample: gemworks bench {suite.example}\n\n{more}"
    bench_app.command(name=name, help=text)(several if suite.several else one)


for _name, _suite in SUITES.items():
    _add_command(_name, _suite)


def _bench(
    name: str, rest: list[str] | None, out: Path | None, smoke: bool, nproc: int, old: Path | None, json: bool
) -> None:
    suite = SUITES[name]
    at_least(1, nproc=nproc)
    before = None if old is None else read_rows(old)  # a wrong name answers before anything is measured
    folder = _new_folder(name, out)
    launcher = ["-m"] if nproc == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(nproc), "-m"]
    arguments = [*(suite.smoke if smoke else ()), *(rest or ())]
    command = [sys.executable, *launcher, suite.module, *arguments, "--out", suite.out(folder)]
    code, last_lines = _run(command, folder / "bench.log", f"bench {name}")
    rows = [row for path in sorted(folder.glob("*.csv")) for row in _rows_with_times(path)]
    comparison = None if before is None else compare(before, rows)
    if json:
        print_json(
            {
                "suite": name,
                "folder": str(folder),
                "failed": code != 0,
                "rows": rows,
                "comparison": comparison,
            }
        )
    elif rows or code == 0:
        print_rows(rows, name)
        if comparison is not None and old is not None:
            print_comparison(comparison, old)
        print(f"written to {folder}", file=sys.stderr)
    if code != 0:
        for line in last_lines:
            print(line, file=sys.stderr)
        print_error(
            f"bench {name}: the program ended with exit code {code}; what failed has no row; its output: "
            f"{folder / 'bench.log'}"
        )
        raise typer.Exit(WRONG_INPUT if code == WRONG_INPUT else RUN_FAILED)


def _new_folder(name: str, out: Path | None) -> Path:
    folder = out or Path("runs/bench") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    new_folder("--out", folder)
    if any(folder.glob("*.csv")):
        raise ValueError(f"--out: got {str(folder)!r}, which holds results already; expected a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _rows_with_times(path: Path) -> list[dict[str, str]]:
    try:
        return read_rows(path)
    except ValueError:  # a table of another kind, such as that of balance
        return []


def _run(command: Sequence[str], log: Path, title: str) -> tuple[int, list[str]]:
    """Run a program; its lines go to the log and past as progress. Returns its exit code and, if they were not left on
    the screen, its last lines."""
    lines: list[str] = []
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", bufsize=1
        ) as child,
        _progress(title) as (show, stays),
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                file.write(line)
                lines.append(line.rstrip())
                show(line.rstrip())
        except BaseException:
            child.terminate()
            raise
    return child.returncode, [] if stays else lines[-LAST_LINES:]


@contextlib.contextmanager
def _progress(title: str) -> Iterator[tuple[Callable[[str], None], bool]]:
    """How lines are shown: as a bar with the last one beside it on a terminal, one after the other elsewhere.

    Always on standard error. A line that starts with `[3/8]` moves the bar; until there is one it only shows that
    something happens.
    """
    if not sys.stderr.isatty():
        yield (lambda line: print(line, file=sys.stderr, flush=True)), True
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TimeElapsedColumn(), BarColumn(20), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        width = max(20, progress.console.width - 30)  # of the elapsed time and the bar

        def show(line: str) -> None:
            if step := STEP.match(line):
                # the step that begins now is not done
                progress.update(task, completed=int(step[1]) - 1, total=int(step[2]))
            progress.update(task, description=f"{title}: {line}"[:width])

        yield show, False


FIGURES = ("ms", "tflops", "gbps", "roofline_fraction", "ratio_to_best_peer")


def print_rows(rows: Sequence[Mapping[str, Any]], name: str) -> None:
    """The table of `gemworks bench`: one line per row that has a time."""
    from rich.table import Table

    timed = [row for row in rows if row.get("ms")]
    table = Table(title=f"bench {name}: {len(timed)} rows", title_justify="left")
    table.add_column("what")
    for header in ("ms", "TFLOP/s", "GB/s", "roofline", "x best peer"):
        table.add_column(header, justify="right")
    for row in timed:
        what = " ".join(row[key] for key in SHOWN_COLUMNS if row.get(key))
        table.add_row(what, *[_figure(row.get(key)) for key in FIGURES])
    console().print(table)


def _figure(text: str | None) -> str:
    try:
        return f"{float(text or ''):.4g}"
    except ValueError:
        return "-"
