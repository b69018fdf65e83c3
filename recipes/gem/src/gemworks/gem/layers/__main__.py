"""Local MFU of a preset, layer by layer: every layer type alone, forward and backward.

python -m gemworks.gem.layers --out docs/measured                 # `large` on a GPU
python -m gemworks.gem.layers --smoke --out runs/layers           # `tiny` on a CPU: seconds
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from gemworks.gem.config import ConfigError, GemConfig
from gemworks.gem.data import open_source
from gemworks.gem.device import resolve_device
from gemworks.gem.efficiency import LengthHistogram
from gemworks.gem.ladder.settings import SETTINGS
from gemworks.gem.layers import report
from gemworks.gem.layers.parts import make_parts
from gemworks.gem.layers.timing import Bound, call_of, split_call, time_call
from gemworks.gem.presets import load_config
from gemworks.jagged.bench.timing import Ceilings, Clock, measure_ceilings


def draw_lengths(config: GemConfig, seed: int) -> torch.Tensor:
    """Lengths of one batch under the configuration's law, int64 [B]."""
    law = LengthHistogram.of_law(config.data.length_law, config.data.max_length, 1.0)
    values, shares = torch.tensor(list(law.counts)), torch.tensor(list(law.counts.values()), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    return values[torch.multinomial(shares, config.data.batch_size, replacement=True, generator=generator)]


def measure(
    config: GemConfig,
    device: torch.device,
    ceilings: Ceilings,
    *,
    seed: int = 0,
    repeats: int = 10,
    trace: bool = True,
    only: Sequence[str] = (),
    bound: Bound | None = None,
) -> list[report.Measured]:
    """Every layer type of a configuration.

    Args:
        config: of the model, with its kernels; data gives the batch size and the law of lengths.
        device: where to run; traces are taken on a GPU.
        ceilings: copy and product rates of this run.
        seed: of lengths and inputs.
        repeats: timed calls per layer.
        trace: take a profiler trace too.
        only: names of layers; all if empty.
        bound: least times of products that were timed before in this run.
    """
    torch.manual_seed(seed)
    schema = open_source(config.data).schema
    lengths = {event.name: draw_lengths(config, seed + i) for i, event in enumerate(schema.events)}
    dtype = torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32
    bound = bound or Bound(ceilings.copy_gbps, ceilings.bf16_tflops, device)
    measured = []
    for part in make_parts(config, schema, lengths, device):
        if only and part.name.split(".")[-1].split("/")[0] not in only:
            continue
        facts = (part.name, part.count, part.flops, part.is_sequence)
        if part.forward is None:
            measured.append(report.Measured(*facts, None, None, 0.0, part.refusal))
            continue
        run = call_of(part, dtype, device)
        try:
            timed = time_call(run, device, repeats=repeats)
            split = split_call(run) if trace and device.type == "cuda" else None
        except (RuntimeError, NotImplementedError) as error:
            note = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            measured.append(report.Measured(*facts, None, None, 0.0, note))
            continue
        measured.append(report.Measured(*facts, timed, split, bound.ms_of(part)))
        del part, run
    return measured


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gemworks.gem.layers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="large")
    parser.add_argument("--attention", choices=("block", "full", "window"), action="append")
    parser.add_argument(
        "--setting", choices=tuple(SETTINGS), action="append", help="kernels; several are measured in turn"
    )
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--only", action="append", default=[], metavar="LAYER")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of layers_h200.csv and the charts")
    parser.add_argument("--csv", default="layers_h200.csv", help="name of the CSV in it")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="print each layer's N longest kernels")
    parser.add_argument("--smoke", action="store_true", help="`tiny`, a small batch, two repeats")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    device = resolve_device("auto")
    sets = [f"data.batch_size={args.batch_size}", *args.sets]
    if args.smoke:
        args.preset, args.repeats, sets = "tiny", 2, ["data.batch_size=8", *args.sets]
    ceilings = measure_ceilings(Clock(device), device)
    print(f"copy {ceilings.copy_gbps:.0f} GB/s, bf16 product {ceilings.bf16_tflops:.0f} TFLOP/s")
    bound = Bound(ceilings.copy_gbps, ceilings.bf16_tflops, device)
    for attention in args.attention or ["block", "full"]:
        for setting in args.setting or ["gemworks"]:
            try:
                config = load_config(args.preset, sets=[*sets, f"model.attention={attention}"])
                config = SETTINGS[setting](config)
            except (ConfigError, ValueError) as error:
                print(error, file=sys.stderr)
                return 2
            if device.type == "cpu":
                config = replace(config, train=replace(config.train, dtype="float32"))
            layers = measure(
                config, device, ceilings, seed=args.seed, repeats=args.repeats, only=args.only, bound=bound
            )
            _report(args, config, layers, ceilings, device, attention, setting)
    return 0


def _report(
    args: argparse.Namespace,
    config: GemConfig,
    layers: list[report.Measured],
    ceilings: Ceilings,
    device: torch.device,
    attention: str,
    setting: str,
) -> None:
    lengths_B = draw_lengths(config, args.seed)
    common = report.common_columns(
        device, module="gemworks.gem.layers", copy_gbps=ceilings.copy_gbps, tflops=ceilings.bf16_tflops,
        mhz=ceilings.clock_mhz,
    )  # fmt: skip
    common |= {
        "attention": attention, "setting": setting, "batch": str(config.data.batch_size), "dtype": config.train.dtype,
        "law": config.data.length_law, "mean_len": f"{lengths_B.double().mean():.1f}",
        "max_len": str(int(lengths_B.max())), "seed": str(args.seed),
    }  # fmt: skip
    rows = report.rows_of(layers, common)
    report.append_csv(args.out / args.csv, rows, report.COLUMNS)
    print(f"\n{config.preset}, {attention} attention, {setting}, B{config.data.batch_size}")
    print(f"{'layer':18} {'x':>3} {'ms':>9} {'MFU %':>7} {'tensor':>8} {'memory':>8} {'gaps':>8} {'bound':>8}")
    for row in rows:
        cells = (row["ms"], f"{100 * float(row['local_mfu']):.1f}" if row["local_mfu"] else "-")
        split = (row["tensor_core_ms"], row["memory_ms"], row["gap_ms"], row["bound_ms"])
        line = f"{row['layer']:18} {row['count']:>3} {cells[0]:>9} {cells[1]:>7} " + " ".join(f"{c:>8}" for c in split)
        print(f"{line}  {row['note']}".rstrip())
    print("worst: " + ", ".join(x.name for x in report.worst(layers)))
    for x in layers:
        for name, ms, launches in (x.split.kernels if x.split else ())[: args.kernels]:
            print(f"  {x.name:12} {ms:8.4f} ms  x{launches:<5.1f} {name[:110]}")
    title = f"{config.preset}, {attention} attention, {setting}"
    report.chart(args.out / f"layers_{attention}_{setting}.png", layers, title)


if __name__ == "__main__":
    sys.exit(main())
