"""The ladder of several GPUs: the recipe on all ranks, one thing on or off per row, against one GPU.

torchrun --nproc-per-node 2 -m gemworks.gem.ladder.pair --batch-size 256 --out docs/measured
torchrun --nproc-per-node 2 -m gemworks.gem.ladder.pair --smoke --out runs/pair      # `tiny` on a CPU, gloo

Rows go to `ladder_h200x2.csv`. `one_gpu` is the first rank alone with one rank's batch: what the Scaling Ratio divides
by. `one_gpu_global` is the first rank alone with everybody's samples: what losses are compared with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from gemworks.gem.config import ConfigError, GemConfig
from gemworks.gem.data import open_source
from gemworks.gem.device import resolve_device
from gemworks.gem.efficiency import H200_BF16_PEAK_FLOPS
from gemworks.gem.ladder.rows import COLUMNS as LADDER_COLUMNS
from gemworks.gem.ladder.settings import WITHOUT_GRAPHS, Change, build
from gemworks.gem.ladder.step import free
from gemworks.gem.layers.report import Row, append_csv, common_columns
from gemworks.gem.layers.timing import Time
from gemworks.gem.presets import load_config
from gemworks.gem.ranks import Ranks, open_ranks
from gemworks.gem.trainer import Trainer

COLUMNS = (
    *LADDER_COLUMNS[: LADDER_COLUMNS.index("loss")],
    *("scaling_ratio", "loss_vs_one_gpu", "data_wait_ms"),
    *LADDER_COLUMNS[LADDER_COLUMNS.index("loss") :],
)
LOSS_TOLERANCE = 0.02  # relative, of the mean over the timed steps; ranks round their sums in another order


@dataclass(frozen=True)
class PairRung:
    """One row.

    Attributes:
        name, added: as in the ladder.
        change: of the configuration.
        alone: "": all ranks; else the first rank alone, with one rank's samples ("local") or everybody's ("global").
        refusal: why it cannot run yet.
    """

    name: str
    added: str
    change: Change = lambda config: config
    alone: str = ""
    refusal: str = ""


NOT_YET = "not measured: the recipe's parallelize() has no switch for it; gemworks.parallel's own benchmark measures it"
RUNGS = (
    PairRung("one_gpu", "one GPU, one rank's batch", alone="local"),
    PairRung("one_gpu_global", "one GPU, everybody's batch", alone="global"),
    PairRung("fsdp", "dense part sharded (FSDP2), tables sharded (torchrec)"),
    PairRung("bbs", "base-batch shuffling over 8 steps", lambda c: c.with_data(balance_window=8)),
    PairRung("experts", "experts spread over the ranks", refusal=NOT_YET),
    PairRung("sharded_replicas", "replicas of table shards sharded", refusal=NOT_YET),
    PairRung("copy_engine", "all-gathers on copy engines", refusal=NOT_YET),
    PairRung("fp8_gather", "weights gathered in FP8", refusal=NOT_YET),
)


@dataclass(frozen=True)
class PairCost:
    """Of one row: the wall time of its timed steps less what they waited for data, their mean loss, and totals."""

    step: Time
    wait_ms: float
    samples_per_s: float
    flops_per_s: float
    peak_gib: float | None
    ne: float | None
    loss: float


def run_row(config: GemConfig, ranks: Ranks, device: torch.device, *, warmup: int, steps: int) -> PairCost:
    """Real training steps; every rank of `ranks` calls it."""
    config = replace(config, train=replace(config.train, max_steps=warmup + steps, epochs=1))
    trainer = Trainer(config, open_source(config.data), device, ranks)
    times: list[float] = []
    rows = []
    for step in trainer.steps():
        row = trainer.take_row()
        if step == warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if step > warmup:
            rows.append(row)
            times.append(row.step_ms - row.data_wait_ms)
    timed = Time.of(times)
    samples = mean(row.samples_per_s * row.step_ms for row in rows) / timed.ms
    flops = mean(row.flops_per_s * row.step_ms for row in rows) / timed.ms
    return PairCost(
        timed,
        mean(row.data_wait_ms for row in rows),
        samples,
        flops,
        torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
        rows[-1].ne,
        mean(row.loss for row in rows),
    )


class Pair:
    """Runs the rows in order and writes them; the first two are what the others are compared with.

    Args:
        args: of the command line.
        ranks: all of them.
        device: this rank's.
    """

    def __init__(self, args: argparse.Namespace, ranks: Ranks, device: torch.device) -> None:
        self.args, self.ranks, self.device = args, ranks, device
        self.costs: dict[str, PairCost] = {}

    def climb(self, base: GemConfig) -> None:
        stack = build(base)[self.args.setting]
        for rung in RUNGS:
            if self.args.rows and rung.name not in self.args.rows:
                continue
            batch = self.args.batch_size * (1 if rung.alone == "local" else self.ranks.world_size)
            config = rung.change(stack.with_data(batch_size=batch))
            note = rung.refusal
            if not note:
                cost, note = self._run(config, rung)
                if cost is not None:
                    self.costs[rung.name] = cost
            if self.ranks.is_first:
                row = self._row(rung, config, self.costs.get(rung.name), note)
                append_csv(self.args.out / "ladder_h200x2.csv", [row], COLUMNS)
                print(f"{rung.name:18} {row['samples_per_s'] or '-':>9} samples/s {row['step_ms'] or '-':>9} ms  "
                      f"scaling {row['scaling_ratio'] or '-'}  {row['note']}", flush=True)  # fmt: skip

    def _run(self, config: GemConfig, rung: PairRung) -> tuple[PairCost | None, str]:
        sizes = {"warmup": self.args.warmup, "steps": self.args.steps}
        try:
            if rung.alone:
                ours = self.ranks.on_first(lambda: run_row(config, Ranks(), self.device, **sizes))
            else:
                ours = run_row(config, self.ranks, self.device, **sizes)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if self.ranks.world_size > 1 and not rung.alone:
                raise  # the ranks may no longer be in step with each other
            return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        free(self.device)
        return ours, ""

    def _row(self, rung: PairRung, config: GemConfig, cost: PairCost | None, note: str) -> Row:
        gpus = 1 if rung.alone else self.ranks.world_size
        common = common_columns(self.device, module="gemworks.gem.ladder.pair", copy_gbps=0.0, tflops=0.0, mhz=None)
        row = dict.fromkeys(COLUMNS, "") | common | {"copy_gbps": "", "bf16_tflops": ""}
        row |= {
            "row": rung.name, "added": rung.added, "attention": self.args.attention,
            "batch": str(config.data.batch_size), "law": config.data.length_law,
            "max_len": str(config.data.max_length), "dtype": config.train.dtype, "seed": str(config.train.seed),
            "steps": str(self.args.steps), "note": note, "num_gpus": str(gpus) if self.device.type == "cuda" else "0",
        }  # fmt: skip
        if cost is None:
            return row
        row |= {
            "samples_per_s": f"{cost.samples_per_s:.1f}", "step_ms": f"{cost.step.ms:.3f}", "ms": f"{cost.step.ms:.3f}",
            "ms_p20": f"{cost.step.ms_p20:.3f}", "ms_p80": f"{cost.step.ms_p80:.3f}",
            "data_wait_ms": f"{cost.wait_ms:.3f}", "loss": f"{cost.loss:.6f}",
            "ne": f"{cost.ne:.5f}" if cost.ne else "",
            "flops_per_step": f"{cost.flops_per_s * cost.step.ms / 1e3:.6g}",
            "tflops": f"{cost.flops_per_s / 1e12:.4g}",
        }  # fmt: skip
        if cost.peak_gib is not None:
            row["peak_gib"] = f"{cost.peak_gib:.2f}"
            row["step_mfu"] = f"{cost.flops_per_s / (gpus * H200_BF16_PEAK_FLOPS):.4f}"
        alone, whole = self.costs.get("one_gpu"), self.costs.get("one_gpu_global")
        if alone is not None and not rung.alone:
            row["scaling_ratio"] = f"{alone.step.ms / cost.step.ms:.4f}"
        if whole is not None and not rung.alone:
            row["loss_vs_one_gpu"] = f"{cost.loss / whole.loss - 1.0:.5f}"
            # shuffling deals other samples to a step, so its losses are of other batches
            if config.data.balance_window == 0 and abs(cost.loss / whole.loss - 1.0) > LOSS_TOLERANCE:
                row["note"] = (
                    f"WrongAnswer: loss {cost.loss:.4f}, and {whole.loss:.4f} on one GPU with the same samples"
                )
        return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="torchrun -m gemworks.gem.ladder.pair", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--preset", default="large")
    parser.add_argument("--attention", choices=("block", "full"), default="block")
    parser.add_argument("--setting", default=WITHOUT_GRAPHS, help="row of the ladder to start from")
    parser.add_argument("--batch-size", type=int, default=256, help="samples of a rank")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rows", action="append", default=[])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of ladder_h200x2.csv")
    parser.add_argument("--smoke", action="store_true", help="`tiny`, a few steps")
    args = parser.parse_args(argv)
    if args.smoke:
        args.preset, args.batch_size, args.steps, args.warmup, args.setting = "tiny", 16, 2, 1, "stream"
    try:
        base = load_config(args.preset, sets=[*args.sets, f"model.attention={args.attention}"])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    device = resolve_device("auto")
    with open_ranks(300.0, cuda=device.type == "cuda") as ranks:
        if device.type == "cuda":
            device = torch.device("cuda", ranks.local_rank)
            torch.cuda.set_device(device)
        else:
            base = replace(base, train=replace(base.train, dtype="float32"))
        Pair(args, ranks, device).climb(base)
    return 0


if __name__ == "__main__":
    sys.exit(main())
