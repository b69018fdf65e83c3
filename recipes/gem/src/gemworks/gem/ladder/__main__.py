"""The ablation ladder: real training steps on synthetic data, one thing added per row; goes on where it stopped.

python -m gemworks.gem.ladder --out docs/measured                     # `large` on a GPU, block and full attention
python -m gemworks.gem.ladder --leave-one-out --out docs/measured     # the full stack without one technique at a time
python -m gemworks.gem.ladder --page docs/ladder.md --out docs/measured   # the page, from the CSVs
python -m gemworks.gem.ladder --smoke --out runs/ladder               # `tiny` on a CPU: every row, seconds each
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from gemworks.gem.config import ConfigError, DataConfig, GemConfig
from gemworks.gem.config_checks import check
from gemworks.gem.data import Source, open_source
from gemworks.gem.device import resolve_device
from gemworks.gem.implement import PROBE
from gemworks.gem.ladder import room, rows
from gemworks.gem.ladder.page import write_page
from gemworks.gem.ladder.settings import FULL_STACK, NOT_YET, RUNGS, WITHOUT, build
from gemworks.gem.ladder.step import StepCost, TrainingRow, compile_small, free, read_batches, run_steps
from gemworks.gem.ladder.tables import MAIN_LAW, read
from gemworks.gem.layers.__main__ import measure
from gemworks.gem.layers.report import COLUMNS as LAYER_COLUMNS
from gemworks.gem.layers.report import Measured, Row, Total, append_csv, common_columns, note_of, rows_of, total_of
from gemworks.gem.layers.timing import Bound
from gemworks.gem.presets import load_config
from gemworks.gem.schema import Batch
from gemworks.gem.turns import Turns, add_options
from gemworks.jagged.bench.timing import Ceilings, Clock, measure_ceilings

# Batches that only compile. How a sum is cut into parts follows from the sizes that the compiler saw first, so they are
# not tiny; several processes have room for theirs at once.
SMALL_BATCH = 64
SEQUENCE_LAYERS = ("hsp", "pffn", "attention")


# What a row may fail with and stay in the table, with its reason: no kernel for it on this device, memory that is full,
# a compiler's refusal (all of them RuntimeErrors), a package that is not there. An assertion is a defect of ours.
REFUSALS = (RuntimeError, ImportError)


PROBED_WHOLE = "no Local MFU: what a probe chose is of a whole model"


@dataclass(frozen=True)
class Planned:
    """A row to measure: its configuration, or why it cannot be."""

    name: str
    added: str
    config: GemConfig
    refusal: str


def largest_batch(base: GemConfig, device: torch.device, *, limit: int) -> int:
    """The largest batch, in steps of 1, 2, 3, 4, 6, 8, 12, 16, ... samples, whose padded row trains without running out
    of memory.

    Raises:
        ValueError: not even one sample fits.
    """
    sizes = [n for n in sorted({m << k for m in (2, 3) for k in range(20)} | {1}) if n <= limit]
    found = 0
    for size in sizes:
        config = build(base.with_data(batch_size=size))[RUNGS[0].name]
        source = open_source(config.data)
        try:
            batches = read_batches(config, source, 2, pin=device.type == "cuda")
            run_steps(config, source, batches, device, warmup=1)
        except torch.OutOfMemoryError:
            break
        finally:
            free(device)
        found = size
    if not found:
        raise ValueError(f"preset: one sample of {base.preset!r} does not fit padded; choose a smaller preset")
    return found


def planned_rows(base: GemConfig, *, leave_one_out: bool, stack: str = FULL_STACK) -> Iterator[Planned]:
    """The rows of one ladder, on a base configuration that has its kind of attention; without one technique at a time
    those of `stack`."""
    configs = build(base)
    if not leave_one_out:
        for rung in RUNGS:
            yield Planned(rung.name, rung.added, configs[rung.name], rung.refusal(base))
        return
    full, is_full = configs[stack], stack == FULL_STACK
    yield Planned("full stack" if is_full else stack, f"all rows of the ladder up to {stack}", full, "")
    for name, change in WITHOUT.items():
        row, config, refusal = f"without {name}" if is_full else f"{stack} without {name}", full, ""
        try:
            config = change(full)
        except ConfigError as error:  # something else of the stack needs it
            refusal = f"{NOT_YET}{error}"
        if refusal or config != full:
            yield Planned(row, "", config, refusal)


def check_names(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Refuses a name that means nothing: what it asks for would be left out without a word.

    >>> check_names("--rows", ["norm"], ["stream", "norms"])
    Traceback (most recent call last):
    gemworks.gem.typed_config.ConfigError: --rows: got 'norm', expected some of stream, norms
    """
    for name in given:
        check(name in known, option, name, f"some of {', '.join(dict.fromkeys(known))}")


class Ladder:
    """Measures rows and writes them.

    Args:
        args: of the command line.
        device: where to train.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        name = "leave_one_out_h200.csv" if args.leave_one_out else "ladder_h200.csv"
        self.path: Path = args.out / (args.csv or name)
        self.num_wrong = 0  # rows whose answer was wrong, which have no number
        self._source: Source | None = None
        self._batches: dict[DataConfig, list[Batch]] = {}
        self._fixed_gib: float | None = None  # the rows are all of one model

    @cached_property
    def ceilings(self) -> Ceilings:
        """Of this run; measured when the first row asks."""
        return measure_ceilings(Clock(self.device), self.device)

    @cached_property
    def bound(self) -> Bound:
        return Bound(self.ceilings.copy_gbps, self.ceilings.bf16_tflops, self.device)

    @cached_property
    def common(self) -> Row:
        return common_columns(
            self.device, module="gemworks.gem.ladder", copy_gbps=self.ceilings.copy_gbps,
            tflops=self.ceilings.bf16_tflops, mhz=self.ceilings.clock_mhz,
        )  # fmt: skip

    def pending(self, bases: Sequence[GemConfig]) -> list[tuple[Planned, rows.Case]]:
        """The rows that the CSV does not have.

        One ladder after the other; with `--rows` one row of all ladders after the other, in the order given.
        """
        have = set() if self.args.redo else rows.done(self.path)
        options = {"leave_one_out": self.args.leave_one_out, "stack": self.args.stack}
        plans = [(base, plan) for base in bases for plan in planned_rows(base, **options)]
        if self.args.rows:
            order = self.args.rows
            plans = sorted((p for p in plans if p[1].name in order), key=lambda p: order.index(p[1].name))
        left = []
        for base, plan in plans:
            data = plan.config.data
            case = rows.Case(base.model.attention, data.batch_size, data.length_law, data.max_length)
            if rows.key_of(plan.name, case) not in have:
                left.append((plan, case))
        return left

    def climb(self, bases: Sequence[GemConfig], deadline: float) -> None:
        """Measures every pending row; stops before a row that would begin after the deadline."""
        pending = self.pending(bases)
        for number, (plan, case) in enumerate(pending, 1):
            print(f"[{number}/{len(pending)}] {plan.name}, {case.attention} attention", flush=True)
            if time.monotonic() > deadline:
                print(f"budget is over before {plan.name} ({case.attention}); start the same command again")
                return
            self._measure(plan, case)
            free(self.device)

    def climb_in_turn(self, bases: Sequence[GemConfig], turns: Turns) -> None:
        """Every pending row: all compiled beside other processes, then all measured without them."""
        pending = self.pending(bases)
        torch._dynamo.config.recompile_limit = 8 * max(len(pending), 1)
        try:
            for plan, _ in pending:
                self._compile(plan)
            for plan, _ in pending:  # batches are made before the turn
                self._data(plan.config, self.args.warmup + self.args.steps)
        finally:
            turns.arrive()
        turns.wait()
        with turns.turn():
            for plan, case in pending:
                self._measure(plan, case)
                free(self.device, compiled=False)

    def _compile(self, plan: Planned) -> None:
        """What fails here fails again, or does not, when the row is measured; then it is noted."""
        if plan.refusal:
            return
        try:
            source = self._source = self._source or open_source(plan.config.data)
            size = min(SMALL_BATCH, plan.config.data.batch_size)
            config = plan.config.with_data(batch_size=size, balance_window=0)
            small = read_batches(config, source, 2, pin=False)
            compile_small(config, source, small, self.device)
        except REFUSALS as error:
            print(f"{plan.name}, compiling: {note_of(error)}", flush=True)
            free(self.device, compiled=False)

    def _measure(self, plan: Planned, case: rows.Case) -> None:
        """Measures a row and appends it to the CSV; one that cannot run stays in the table, with its reason."""
        cost: StepCost | None = None
        local: Total | None = None
        note, config = plan.refusal or self._no_room(plan), plan.config
        if not note:
            try:
                source, batches = self._data(config, self.args.warmup + self.args.steps)
                row = TrainingRow(config, source, batches, self.device, warmup=self.args.warmup)
                cost = row.measure(trace=plan.name in self.args.profile)
                row.close()
                free(self.device, compiled=False)
                if note := rows.wrong_answer(self.path, plan.name, case, self.args.steps, cost):
                    cost, self.num_wrong = None, self.num_wrong + 1
                elif self.args.no_local or (self.args.local and plan.name not in self.args.local):
                    pass
                elif config.kernels.linears == PROBE:
                    note = PROBED_WHOLE
                else:
                    local = total_of(self._layers(plan.name, case, config), sequence_only=True)
            except REFUSALS as error:
                note = note_of(error)
        if cost is not None and cost.split is not None:
            self._write_kernels(plan.name, case, cost)
        common = self._mean_length(config)
        found = rows.make_row(
            plan.name, plan.added, case, config, cost, local, common, steps=self.args.steps, note=note
        )  # fmt: skip
        rows.append(self.path, found)
        print(_line(found), flush=True)

    def _no_room(self, plan: Planned) -> str:
        """Why a row would run out of memory, or ""; says what it is expected to take."""
        if self.device.type != "cuda":
            return ""
        if self._fixed_gib is None:
            self._fixed_gib = room.fixed_gib(plan.config)
        found = [row for path in (*self.args.peaks, self.path) for row in read(path)]
        measured = room.of_model(found, self.args.preset, self.args.sets)
        needed = room.expected(plan.config, room.builds_on(plan.name), measured, fixed_gib=self._fixed_gib)
        if needed is None:
            return ""
        print(f"{plan.name}: {needed.gib:.1f} GiB expected, from {needed.source}", flush=True)
        return room.refusal(needed, lambda: room.free_gib(self.device)) if needed.decides else ""

    def _layers(self, name: str, case: rows.Case, config: GemConfig) -> list[Measured]:
        """The sequence layers alone; of a traced row they go to the layers' CSV too."""
        if self.args.local_batch_size is not None:
            config = config.with_data(batch_size=self.args.local_batch_size)
        traced = name in self.args.profile
        layers = measure(
            config, self.device, self.ceilings, only=SEQUENCE_LAYERS, repeats=5, trace=traced, bound=self.bound
        )  # fmt: skip
        if traced:
            common = self._mean_length(config) | {
                "attention": case.attention, "setting": name, "batch": str(config.data.batch_size),
                "dtype": config.train.dtype, "law": case.law, "max_len": str(case.max_len), "seed": "0",
            }  # fmt: skip
            append_csv(self.args.out / "layers_h200.csv", rows_of(layers, common), LAYER_COLUMNS)
        return layers

    def _data(self, config: GemConfig, steps: int) -> tuple[Source, list[Batch]]:
        source = self._source = self._source or open_source(config.data)
        key = config.data
        if key not in self._batches:
            if self.args.turns is None:  # row by row: the rows of one batch size learn from the same
                self._batches.clear()
            self._batches[key] = read_batches(config, source, steps, pin=self.device.type == "cuda")
        return source, self._batches[key]

    def _mean_length(self, config: GemConfig) -> Row:
        batches = self._batches.get(config.data, [])
        events = [e for batch in batches for e in batch.events.values()]
        if not events:
            return self.common
        mean = sum(int(e.offsets_S[-1]) for e in events) / sum(e.offsets_S.shape[0] - 1 for e in events)
        return self.common | {"mean_len": f"{mean:.1f}"}

    def _write_kernels(self, name: str, case: rows.Case, cost: StepCost) -> None:
        split = cost.split
        assert split is not None
        lines = [f"{ms:9.4f} ms  x{launches:<7.1f} {kernel}" for kernel, ms, launches in split.kernels[:40]]
        law = "" if case.law == MAIN_LAW else f" ({case.law})"
        head = (
            f"one step of {name}, {case.attention} attention{law}: tensor cores {split.tensor_core_ms:.2f} ms, "
            f"other kernels {split.memory_ms:.2f} ms, gaps {split.gap_ms:.2f} ms"
        )
        path = self.args.out / f"ladder_{case.attention}_{name}{'' if not law else f'_{case.law}'}_kernels.txt"
        path.write_text("\n".join([head, *lines]) + "\n")
        print("\n".join([head, *lines[:15]]))


def _line(row: Row) -> str:
    if not row["step_ms"]:
        return f"{row['attention']:6} {row['row']:34} {row['note']}"
    shares = " ".join(f"{k} {row[k] or '-'}" for k in ("local_mfu", "step_mfu", "peak_gib", "ne"))
    speed = f"{row['samples_per_s']:>9} samples/s {row['step_ms']:>10} ms"
    return f"{row['attention']:6} {row['row']:34} {speed}  {shares}  {row['note']}"


def _batch_size(text: str) -> int | None:
    return None if text == "auto" else int(text)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gemworks.gem.ladder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="large")
    parser.add_argument("--attention", choices=("block", "full"), action="append")
    parser.add_argument("--batch-size", type=_batch_size, default=128, help="of all rows, or auto: what padding fits")
    parser.add_argument("--largest", type=int, default=1024, help="where --batch-size auto stops looking")
    parser.add_argument("--law", default="uniform", choices=("uniform", "uniform_0.7", "zipf"))
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rows", action="append", default=[], help="only these rows, in this order")
    parser.add_argument("--profile", action="append", default=[], metavar="ROW", help="trace a step of this row")
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument(
        "--stack",
        default=FULL_STACK,
        choices=[rung.name for rung in RUNGS],
        help="the row that --leave-one-out starts from",
    )
    parser.add_argument("--no-local", action="store_true", help="leave out Local MFU")
    parser.add_argument("--local", action="append", default=[], metavar="ROW", help="Local MFU of these rows only")
    parser.add_argument("--local-batch-size", type=int, help="batch of the layers alone; default: the row's")
    parser.add_argument("--redo", action="store_true", help="measure rows again that the CSV has")
    add_options(parser)
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no row after this many seconds")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the CSVs")
    parser.add_argument("--csv", help="name of the CSV in it")
    parser.add_argument(
        "--peaks",
        type=Path,
        action="append",
        default=[],
        metavar="CSV",
        help="rows measured before, from which the memory of those to come is foreseen, besides the CSV's own",
    )
    parser.add_argument("--page", type=Path, help="write this page from the CSVs, and do nothing else")
    parser.add_argument("--smoke", action="store_true", help="`tiny`, a few steps")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    args = arguments(argv)
    if args.page is not None:
        write_page(args.page, args.out)
        return 0
    if args.smoke:
        args.preset, args.batch_size, args.steps, args.warmup = "tiny", 8, 2, 1
    device = resolve_device("auto")
    sets = [f"data.batch_size={args.batch_size or 1}", f"data.length_law={args.law}", *args.sets]
    try:
        bases = [
            load_config(args.preset, sets=[*sets, f"model.attention={kind}"])
            for kind in args.attention or ("block", "full")
        ]
        known = [plan.name for plan in planned_rows(bases[0], leave_one_out=args.leave_one_out, stack=args.stack)]
        for option in ("rows", "profile", "local"):
            check_names(f"--{option}", getattr(args, option), known)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if device.type == "cpu":
        bases = [replace(base, train=replace(base.train, dtype="float32")) for base in bases]
    if args.batch_size is None:
        size = min(largest_batch(base, device, limit=args.largest) for base in bases)
        print(f"largest batch that the padded row fits: {size}")
        bases = [base.with_data(batch_size=size) for base in bases]
    ladder, turns = Ladder(args, device), Turns.of(args)
    if turns is None:
        ladder.climb(bases, began + args.budget_s)
    else:
        ladder.climb_in_turn(bases, turns)
    print(f"{ladder.path}: {len(rows.done(ladder.path))} rows, {time.monotonic() - began:.0f} s")
    return 1 if ladder.num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
