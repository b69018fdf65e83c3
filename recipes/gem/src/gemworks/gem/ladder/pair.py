"""The ladder of several GPUs: the recipe on all ranks, one thing on or off per row, against one GPU.

torchrun --nproc-per-node 2 -m gemworks.gem.ladder.pair --batch-size 256 --out docs/measured
torchrun --nproc-per-node 2 -m gemworks.gem.ladder.pair --smoke --out runs/pair      # `tiny` on a CPU, gloo

Rows go to `ladder_h200x2.csv`. `one_gpu` is the first rank alone with one rank's batch: what the Scaling Ratio divides
by. `one_gpu_global` is the first rank alone with everybody's samples: what losses are compared with. Both are read back
from the CSV, so that several commands may measure a ladder together (`--turns`): all compile at the same time, the
first one's rows are measured while the others have no model yet, then one row after the other.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from gemworks.gem.config import ConfigError, GemConfig
from gemworks.gem.data import Source, open_source
from gemworks.gem.device import resolve_device
from gemworks.gem.efficiency import H200_BF16_PEAK_FLOPS
from gemworks.gem.ladder import room
from gemworks.gem.ladder.pair_row import PairCost, PairRow, compile_small, mean_length
from gemworks.gem.ladder.rows import COLUMNS as LADDER_COLUMNS
from gemworks.gem.ladder.settings import FULL_STACK, Change, build, chain, kernels, train
from gemworks.gem.ladder.step import free
from gemworks.gem.ladder.tables import law_of, read
from gemworks.gem.layers.report import Row, append_csv, check_columns, common_columns, note_of
from gemworks.gem.presets import load_config
from gemworks.gem.ranks import Ranks, open_ranks
from gemworks.gem.turns import Turns, add_options

# Of these collectives the exposed time has a column; gloo's and all others are in the sum only.
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "peer_copy", "barrier")
COLUMNS = (
    *LADDER_COLUMNS[: LADDER_COLUMNS.index("loss")],
    *("scaling_ratio", "loss_vs_one_gpu", "communication_ms", "exposed_ms"),
    *(f"exposed_{name}_ms" for name in COLLECTIVES),
    *LADDER_COLUMNS[LADDER_COLUMNS.index("loss") :],
    *("preset", "setting", "sets", "one_gpu_commit"),  # the last: of the row that the Scaling Ratio divides by
)
# Rows that agree in these are of one model, trained alike on the same samples.
SAME = ("attention", "max_len", "steps", "seed", "preset", "setting", "sets", "gpu")
FILE = "ladder_h200x2.csv"
CONTEXTS_GIB = 4.0  # what a process holds of a GPU without having computed, several times over
PATIENCE_S = 20.0
LOSS_TOLERANCE = 0.02  # relative, of the mean over the timed steps; ranks round their sums in another order


@dataclass(frozen=True)
class PairRung:
    """One row.

    Attributes:
        name, added: as in the ladder.
        change: of the configuration.
        alone: "": all ranks; else the first rank alone, with one rank's samples ("local") or everybody's ("global").
    """

    name: str
    added: str
    change: Change = lambda config: config
    alone: str = ""


def spread(**changes: object) -> Change:
    return lambda config: config.with_parallel(**changes)


def balanced(config: GemConfig) -> GemConfig:
    return config.with_data(balance_window=4)


SMALL_WEIGHT = 1 << 20
FP8 = chain(kernels(linears="fp8_block128"), train(compile=False))
RUNGS = (
    PairRung("one_gpu", "one GPU, one rank's batch", alone="local"),
    PairRung("one_gpu_global", "one GPU, everybody's batch", alone="global"),
    PairRung("fsdp", "dense part by FSDP2, gathered in bf16; tables by torchrec", spread(gather="bfloat16")),
    PairRung("fsdp_float32", "fsdp, but weights gathered as they are stored", spread(gather="stored")),
    PairRung(
        "small_whole", "fsdp, weights below 1 M elements whole on each GPU",
        spread(gather="bfloat16", min_shard_numel=SMALL_WEIGHT),
    ),
    PairRung("fsdp_kept", "fsdp, gathered weights kept for backward", spread(gather="bfloat16", keep_gib=16.0)),
    PairRung("replicated", "weights whole on each GPU, gradients averaged when backward ends", spread(shard=1)),
    PairRung("experts", "fsdp, experts spread over the ranks (EP 2)", spread(gather="bfloat16", experts=2)),
    PairRung(
        "sharded_tables", "fsdp, rows of tables over both ranks",
        spread(gather="bfloat16", tables="fully_sharded"),
    ),
    PairRung(
        "sharded_replicas", "fsdp, replicas of tables sharded over the ranks",
        spread(gather="bfloat16", tables="fully_sharded", table_replica_shard=2),
    ),
    PairRung("copy_engine", "fsdp, gathers by copy engines", spread(gather="bfloat16", all_gather="copy_engine")),
    PairRung("bbs", "fsdp, base-batch shuffling over 4 steps", chain(spread(gather="bfloat16"), balanced)),
    PairRung("placement", "fsdp, ranks in order", spread(gather="bfloat16", placement="row_major")),
    PairRung("fp8_linears", "fsdp, FP8 linears, uncompiled; gathered in bf16", chain(FP8, spread(gather="bfloat16"))),
    PairRung("fp8_gather", "the row above, quantised weights gathered in FP8", chain(FP8, spread(gather="fp8"))),
    PairRung(
        "all", "fsdp, EP 2, tables over both ranks, copy engines, small weights whole, base-batch shuffling",
        chain(
            spread(
                gather="bfloat16", experts=2, tables="fully_sharded", all_gather="copy_engine",
                min_shard_numel=SMALL_WEIGHT,
            ),
            balanced,
        ),
    ),
)  # fmt: skip


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Ends the process, with where each of its threads is, if what is inside takes longer; 0: never.

    A collective that one rank never begins waits for minutes; a command that ends leaves the time to other rows. The
    next turns see that it has ended; only who waits for it to measure rows of one GPU waits for `--patience-s`.
    """
    if seconds <= 0:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def read_reference(path: Path, name: str, row: Row, batch: int) -> Row | None:
    """The newest row of that name and batch with a time, of the same lengths and of what `SAME` names."""
    found = [r for r in read(path) if (r["row"], r["batch"]) == (name, str(batch)) and r["step_ms"]]
    same = (r for r in reversed(found) if law_of(r) == law_of(row) and all(r.get(key) == row[key] for key in SAME))
    return next(same, None)


class Pair:
    """Measures the rows and writes them.

    Args:
        args: of the command line.
        ranks: all of them.
        device: this rank's.
    """

    def __init__(self, args: argparse.Namespace, ranks: Ranks, device: torch.device) -> None:
        self.args, self.ranks, self.device = args, ranks, device
        self.path: Path = args.out / FILE
        check_columns(self.path, COLUMNS)  # now, and not when the first row has been measured
        self.num_wrong = 0
        self._source: Source | None = None
        self._turns = Turns.of(args)
        self._alone: Turns | None = None
        if args.turns is not None:
            # rows of one GPU are measured before anybody makes a model: two of them fill it
            self._alone = Turns(args.turns / "alone", 1, patience_s=args.patience_s)

    def planned(self, base: GemConfig) -> list[tuple[PairRung, GemConfig]]:
        """The rows of this command, in the order given, each with its configuration."""
        stack, num_ranks = build(base)[self.args.setting], self.args.ranks or self.ranks.world_size
        rungs, chosen = {rung.name: rung for rung in RUNGS}, []
        for text in self.args.rows or rungs:
            name, _, size = text.partition("@")
            batch = int(size or self.args.batch_size) * (1 if rungs[name].alone == "local" else num_ranks)
            chosen.append((rungs[name], rungs[name].change(stack.with_data(batch_size=batch))))
        return chosen

    def climb(self, base: GemConfig) -> None:
        """Every row; with `--turns` beside other commands until the time counts.

        Raises:
            RuntimeError: without `--turns`, somebody else holds memory of a GPU: nothing could be said of the rows.
        """
        try:
            planned = self.planned(base)
            if self._turns is None:
                self._check_alone()
            torch._dynamo.config.recompile_limit = 16 * len(planned)
            ready: PairRow | None = None
            if self._turns is not None:
                ready = self._get_ready(planned)
            with self._turn():
                for rung, config in planned:
                    with _at_most(self.args.row_s):
                        cost, note, length = self._measure(rung, config, ready)
                    ready = None
                    self._write(rung, config, cost, note, length)
        finally:
            self._leave()

    def _check_alone(self) -> None:
        if self.device.type != "cuda":
            return
        until = time.monotonic() + PATIENCE_S  # a process that has ended gives its memory back seconds later
        while room.free_gib(self.device)[1] > CONTEXTS_GIB and time.monotonic() < until:
            time.sleep(0.5)
        held = self.ranks.gather(room.free_gib(self.device)[1])
        if max(held) > CONTEXTS_GIB:
            raise RuntimeError(
                f"--turns: got none where others hold {', '.join(f'{gib:.1f}' for gib in held)} GiB of the ranks' "
                f"GPUs, contexts included, expected at most {CONTEXTS_GIB:.0f}; end those processes (nvidia-smi names "
                f"them), or let the commands take turns"
            )

    def _leave(self) -> None:
        """Nobody waits for this command any more, even if it failed before its turn."""
        if self._turns is None or not self.ranks.is_first:
            return
        self._turns.leave()
        if self._alone is not None and self.args.order == 0:
            self._alone.arrive()

    def _get_ready(self, planned: Sequence[tuple[PairRung, GemConfig]]) -> PairRow | None:
        """Compiles, meets the others, and makes the first row's model once nobody needs the memory any more."""
        turns = self._turns
        assert turns is not None
        try:
            for rung, config in planned:
                if rung.alone:
                    self.ranks.on_first(lambda c=config: compile_small(c, self.source(c), Ranks(), self.device))
                else:
                    compile_small(config, self.source(config), self.ranks, self.device)
        finally:
            if self.ranks.is_first:
                turns.arrive()
        self.ranks.on_first(turns.wait)
        (_, config), first = planned[0], None
        if self.args.order > 0:
            assert self._alone is not None
            self.ranks.on_first(self._alone.wait_only)
            first = self._row(config, self.ranks)  # of all ranks: `main` refuses rows of one GPU here
            built = Turns(self.args.turns / "built", self.args.of - 1, patience_s=45.0)
            self.ranks.on_first(built.wait)
        return first

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._turns is None:
            yield
            return
        turn = self._turns.turn()
        self.ranks.on_first(turn.__enter__)
        try:
            yield
        finally:
            if self.ranks.is_first:
                turn.__exit__(None, None, None)

    def source(self, config: GemConfig) -> Source:
        self._source = self._source or open_source(config.data)
        return self._source

    def _row(self, config: GemConfig, ranks: Ranks) -> PairRow:
        sizes = {"warmup": self.args.warmup, "steps": self.args.steps}
        return PairRow(config, self.source(config), ranks, self.device, **sizes)

    def _measure(
        self, rung: PairRung, config: GemConfig, ready: PairRow | None
    ) -> tuple[PairCost | None, str, float | None]:
        """Cost, or why there is none; and the mean length of the row's batches."""

        def measure(ranks: Ranks, row: PairRow | None = None) -> tuple[PairCost, float]:
            row = row or self._row(config, ranks)
            cost, length = row.measure(trace=self.args.trace), mean_length(row.batches)
            row.close()
            return cost, length

        try:
            if rung.alone:
                if no_room := self.ranks.on_first(lambda: self._no_room(rung, config)):
                    return None, no_room, None
                cost, length = self.ranks.on_first(lambda: measure(Ranks()))
            else:
                cost, length = measure(self.ranks, ready)
            return cost, "", length
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if self.ranks.world_size > 1 and not rung.alone:
                raise  # the ranks may no longer be in step with each other
            note = note_of(error)
        free(self.device)  # only here: as long as the error is there its frames hold the row's memory
        return None, note, None

    def _no_room(self, rung: PairRung, config: GemConfig) -> str:
        """Why one GPU has no room for a row's batch, or ""; everybody's samples may be too many for it."""
        if self.device.type != "cuda":
            return ""
        found = room.of_model(read(self.path), self.args.preset, self.args.sets)
        measured = [{**row, "row": "one"} for row in found if row["row"] in ("one_gpu", "one_gpu_global")]
        needed = room.expected(config, ["one"], measured, fixed_gib=room.fixed_gib(config))
        return "" if needed is None else room.refusal(needed, lambda: room.free_gib(self.device))

    def _write(self, rung: PairRung, config: GemConfig, cost: PairCost | None, note: str, length: float | None) -> None:
        if not self.ranks.is_first:
            return
        row = self._columns(rung, config, cost, note)
        if length is not None:
            row["mean_len"] = f"{length:.1f}"
        append_csv(self.path, [row], COLUMNS)
        print(f"{rung.name:18} {row['samples_per_s'] or '-':>9} samples/s {row['step_ms'] or '-':>9} ms  "
              f"mfu {row['step_mfu'] or '-'} scaling {row['scaling_ratio'] or '-'} "
              f"loss {row['loss_vs_one_gpu'] or '-'} communication {row['communication_ms'] or '-'} "
              f"exposed {row['exposed_ms'] or '-'} GiB {row['peak_gib'] or '-'}{self._left()} "
              f"{row['note']}", flush=True)  # fmt: skip

    def _left(self) -> str:
        """GiB of this rank's GPU that the rows so far did not give back: the next one's peak has them too."""
        if self.device.type != "cuda":
            return ""
        return f" left {torch.cuda.memory_allocated(self.device) / 2**30:.2f}"

    def _columns(self, rung: PairRung, config: GemConfig, cost: PairCost | None, note: str) -> Row:
        gpus = 1 if rung.alone else self.ranks.world_size
        common = common_columns(self.device, module="gemworks.gem.ladder.pair", copy_gbps=0.0, tflops=0.0, mhz=None)
        row = dict.fromkeys(COLUMNS, "") | common | {"copy_gbps": "", "bf16_tflops": ""}
        row |= {
            "row": rung.name, "added": rung.added, "attention": self.args.attention,
            "batch": str(config.data.batch_size), "law": config.data.length_law,
            "max_len": str(config.data.max_length), "dtype": config.train.dtype, "seed": str(config.train.seed),
            "steps": str(self.args.steps), "note": note, "num_gpus": str(gpus) if self.device.type == "cuda" else "0",
            "preset": self.args.preset, "setting": self.args.setting, "sets": shlex.join(self.args.sets),
        }  # fmt: skip
        if cost is None:
            return row
        if not math.isfinite(cost.loss):
            self.num_wrong += 1
            return row | {"note": f"WrongAnswer: the loss is {cost.loss}"}
        alone = read_reference(self.path, "one_gpu", row, config.data.batch_size // gpus)
        whole = read_reference(self.path, "one_gpu_global", row, config.data.batch_size)
        difference = None if whole is None or rung.alone else cost.loss / float(whole["loss"]) - 1.0
        if difference is not None:
            row["loss_vs_one_gpu"] = f"{difference:.5f}"
            # shuffling deals other samples to a step, so its losses are of other batches
            if config.data.balance_window == 0 and abs(difference) > LOSS_TOLERANCE:
                assert whole is not None
                self.num_wrong += 1
                wrong = f"loss {cost.loss:.4f}, and {whole['loss']} on one GPU with the same samples"
                return row | {"note": f"WrongAnswer: {wrong}"}
        row |= {
            "samples_per_s": f"{cost.samples_per_s:.1f}", "step_ms": f"{cost.step.ms:.3f}", "ms": f"{cost.step.ms:.3f}",
            "ms_p20": f"{cost.step.ms_p20:.3f}", "ms_p80": f"{cost.step.ms_p80:.3f}", "loss": f"{cost.loss:.6f}",
            "ne": f"{cost.ne:.5f}" if cost.ne else "",
            "flops_per_step": f"{cost.flops_per_s * cost.step.ms / 1e3:.6g}",
            "tflops": f"{cost.flops_per_s / 1e12:.4g}",
        }  # fmt: skip
        if cost.peak_gib is not None:
            row["peak_gib"] = f"{cost.peak_gib:.2f}"
            row["step_mfu"] = f"{cost.flops_per_s / (gpus * H200_BF16_PEAK_FLOPS):.4f}"
        if alone is not None and not rung.alone:
            row["scaling_ratio"] = f"{float(alone['step_ms']) / cost.step.ms:.4f}"
            row["one_gpu_commit"] = alone["commit"]
        if cost.communication_ms is not None:
            row["communication_ms"] = f"{cost.communication_ms:.3f}"
            row["exposed_ms"] = f"{sum(cost.exposed_ms.values()):.3f}"
            row |= {f"exposed_{name}_ms": f"{cost.exposed_ms.get(name, 0.0):.3f}" for name in COLLECTIVES}
        return row


def _row_name(text: str) -> str:
    """A row's name, or with its samples of a rank: "fsdp@128"."""
    name, at, size = text.partition("@")
    if name not in {rung.name for rung in RUNGS} or (at and not (size.isdecimal() and int(size))):
        names = ", ".join(rung.name for rung in RUNGS)
        raise argparse.ArgumentTypeError(f"got {text!r}, expected one of {names}, or such as fsdp@128")
    return text


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends the process with 2 where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="torchrun -m gemworks.gem.ladder.pair", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--preset", default="large")
    parser.add_argument("--attention", choices=("block", "full"), default="block")
    parser.add_argument("--setting", default=FULL_STACK, help="row of the ladder to start from")
    parser.add_argument("--batch-size", type=int, default=256, help="samples of a rank")
    parser.add_argument("--ranks", type=int, help="how many share a batch, where one process measures rows of one GPU")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument(
        "--rows",
        action="append",
        default=[],
        type=_row_name,
        metavar="ROW",
        help="in this order; row@samples of a rank",
    )
    parser.add_argument("--row-s", type=float, default=0.0, help="end the command if a row takes longer; 0: never")
    parser.add_argument("--no-trace", action="store_false", dest="trace", help="no exposed communication")
    add_options(parser)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--out", type=Path, default=Path("."), help=f"folder of {FILE}")
    parser.add_argument("--smoke", action="store_true", help="`tiny`, a few steps")
    args = parser.parse_args(argv)
    alone = {rung.name for rung in RUNGS if rung.alone}
    if args.order > 0 and (refused := [text for text in args.rows or alone if text.partition("@")[0] in alone]):
        parser.error(
            f"--rows: got {', '.join(sorted(refused))} with --order {args.order}, expected rows of all ranks: others "
            "hold models by then, so a row of one GPU would not be alone; measure it in the command with --order 0"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.smoke:
        args.preset, args.batch_size, args.steps, args.warmup, args.setting = "tiny", 16, 2, 2, "stream"
        # wide enough for FP8 gathers; experts for two ranks; bf16, as the gathers are
        args.sets = ["model.dim=64", "model.expert_dim=256", "kernels.linears_min_features=64", *args.sets]
    try:
        base = load_config(args.preset, sets=[*args.sets, f"model.attention={args.attention}"])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    base = replace(base, train=replace(base.train, dtype="bfloat16"))
    device = resolve_device("auto")
    with open_ranks(300.0, cuda=device.type == "cuda") as ranks:
        if device.type == "cuda":
            device = torch.device("cuda", ranks.local_rank)
            torch.cuda.set_device(device)
        pair = Pair(args, ranks, device)
        pair.climb(base)
    return 1 if pair.num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
