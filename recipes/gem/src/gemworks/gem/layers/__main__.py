"""Local MFU of a preset, layer by layer: every layer type alone, forward and backward.

python -m gemworks.gem.layers --out docs/measured                 # `large` on a GPU
python -m gemworks.gem.layers --smoke --out runs/layers           # `tiny` on a CPU: seconds
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from gemworks.gem.config import ConfigError, GemConfig
from gemworks.gem.config_checks import check
from gemworks.gem.data import open_source
from gemworks.gem.device import resolve_device
from gemworks.gem.efficiency import LengthHistogram
from gemworks.gem.implement import PROBE
from gemworks.gem.ladder.settings import SETTINGS
from gemworks.gem.layers import report
from gemworks.gem.layers.parts import Part, make_parts
from gemworks.gem.layers.timing import Bound, call_of, host_functions, host_ms, replayed, split_call, time_call
from gemworks.gem.presets import load_config
from gemworks.gem.turns import Turns, add_options
from gemworks.jagged.bench.timing import Ceilings, Clock, measure_ceilings


def draw_lengths(config: GemConfig, seed: int) -> torch.Tensor:
    """Lengths of one batch under the configuration's law, int64 [B]."""
    law = LengthHistogram.of_law(config.data.length_law, config.data.max_length, 1.0)
    values, shares = torch.tensor(list(law.counts)), torch.tensor(list(law.counts.values()), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    return values[torch.multinomial(shares, config.data.batch_size, replacement=True, generator=generator)]


LAYERS = (
    *("embeddings", "tokens", "events", "hsp", "pffn", "attention", "layer", "norm", "first summary", "summary"),
    *("experts", "head"),
)
SMALL_BATCH = 128  # of calls that only compile: how a sum is cut into parts follows from the sizes seen first
WRONG_ANSWER = "WrongAnswer: its output or a gradient is not finite"


@dataclass(frozen=True)
class Prepared:
    """A layer type that has run before, or why it cannot; `run` is its forward and backward."""

    part: Part
    run: Callable[[], object] | None
    note: str = ""


def prepare(config: GemConfig, device: torch.device, *, seed: int = 0, only: Sequence[str] = ()) -> list[Prepared]:
    """Every layer type of a configuration, called twice: what is compiled on the way is compiled.

    Args:
        config: of the model, with its kernels; data gives the batch size and the law of lengths.
        device: where to run.
        seed: of lengths and inputs.
        only: names of layers; all if empty.
    """
    torch.manual_seed(seed)
    schema = open_source(config.data).schema
    lengths = {event.name: draw_lengths(config, seed + i) for i, event in enumerate(schema.events)}
    dtype = torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32
    prepared = []
    for part in make_parts(config, schema, lengths, device):
        if only and part.name.split(".")[-1].split("/")[0] not in only:
            continue
        if part.forward is None:
            prepared.append(Prepared(part, None, part.refusal))
            continue
        run = call_of(part, dtype, device)
        try:
            is_finite = all(x is None or bool(x.isfinite().all()) for x in run())
            run()
            if config.train.cuda_graphs and device.type == "cuda":
                run = replayed(run)
        except (RuntimeError, NotImplementedError) as error:
            prepared.append(Prepared(part, None, report.note_of(error)))
            continue
        prepared.append(Prepared(part, run) if is_finite else Prepared(part, None, WRONG_ANSWER))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    return prepared


def measure_prepared(
    prepared: Sequence[Prepared], device: torch.device, bound: Bound, *, repeats: int = 10, trace: bool = True
) -> Iterator[report.Measured]:
    """Times of layer types, one after another; a trace of each on a GPU."""
    for layer in prepared:
        part, run = layer.part, layer.run
        facts = (part.name, part.count, part.flops, part.is_sequence)
        if run is None:
            yield report.Measured(*facts, None, None, 0.0, layer.note)
            continue
        on_gpu = device.type == "cuda"
        timed = time_call(run, device, repeats=repeats)
        host = host_ms(run) if on_gpu else None
        split = split_call(run) if trace and on_gpu else None
        yield report.Measured(*facts, timed, split, bound.ms_of(part), host_ms=host)


def measure(
    config: GemConfig,
    device: torch.device,
    ceilings: Ceilings,
    *,
    repeats: int = 10,
    trace: bool = True,
    only: Sequence[str] = (),
    bound: Bound | None = None,
) -> list[report.Measured]:
    """Every layer type of a configuration.

    Args:
        config, device, only: of `prepare`, with its seed 0.
        ceilings: copy and product rates of this run.
        repeats: timed calls per layer.
        trace: take a profiler trace too.
        bound: least times of products that were timed before in this run.
    """
    bound = bound or Bound(ceilings.copy_gbps, ceilings.bf16_tflops, device)
    prepared = prepare(config, device, only=only)
    return list(measure_prepared(prepared, device, bound, repeats=repeats, trace=trace))


@dataclass(frozen=True)
class Case:
    """One kind of attention under one setting."""

    attention: str
    setting: str
    config: GemConfig

    @property
    def key(self) -> tuple[str, ...]:
        data = self.config.data
        return (self.attention, self.setting, str(data.batch_size), data.length_law)


def cases_of(args: argparse.Namespace, device: torch.device) -> list[Case]:
    """What the command line asks for.

    Raises:
        ConfigError: an unknown key or value, or linears that only a whole model can choose.
    """
    sets = [f"data.batch_size={args.batch_size}", *args.sets]
    cases = []
    for attention in args.attention or ["block", "full"]:
        for setting in args.setting or ["gemworks"]:
            config = load_config(args.preset, sets=[*sets, f"model.attention={attention}"])
            config = SETTINGS[setting](config)
            check(
                config.kernels.linears != PROBE,
                "kernels.linears",
                config.kernels.linears,
                f"'bf16' or a recipe such as 'fp8_block128' in setting {setting!r}: a probe measures a whole model, "
                "and here each layer is alone",
            )
            if device.type == "cpu":
                config = replace(config, train=replace(config.train, dtype="float32"))
            cases.append(Case(attention, setting, config))
    return cases


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gemworks.gem.layers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="large")
    parser.add_argument("--attention", choices=("block", "full", "window"), action="append")
    parser.add_argument(
        "--setting", choices=tuple(SETTINGS), action="append", help="kernels; several are measured in turn"
    )
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--only", action="append", default=[], choices=LAYERS, help="of these layer types")
    parser.add_argument("--no-trace", action="store_true", help="times only, not what they go to")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of layers_h200.csv and the charts")
    parser.add_argument("--csv", default="layers_h200.csv", help="name of the CSV in it")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="print each layer's N longest kernels")
    parser.add_argument("--host", type=int, default=0, metavar="N", help="print each layer's N longest host functions")
    add_options(parser)
    parser.add_argument("--redo", action="store_true", help="measure again what the CSV has")
    parser.add_argument("--smoke", action="store_true", help="`tiny`, a small batch, two repeats")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    device = resolve_device("auto")
    if args.smoke:
        args.preset, args.repeats, args.batch_size = "tiny", 2, 8
    try:
        cases = cases_of(args, device)
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    have = set() if args.redo else report.done(args.out / args.csv)
    cases = [case for case in cases if case.key not in have]
    turns = Turns.of(args)
    if turns is None:
        num_wrong = 0
        ceilings = measure_ceilings(Clock(device), device)
        for number, case in enumerate(cases, 1):
            print(f"[{number}/{len(cases)}] {case.attention} attention, {case.setting}", flush=True)
            prepared = prepare(case.config, device, seed=args.seed, only=args.only)
            _measure_case(args, case, prepared, ceilings, device)
            num_wrong += _num_wrong(prepared)
        return 1 if num_wrong else 0
    torch._dynamo.config.recompile_limit = 8 * max(len(cases), 1)
    try:
        for case in cases:  # what a small batch compiles serves the batch to measure
            small = case.config.with_data(batch_size=min(SMALL_BATCH, case.config.data.batch_size))
            prepare(small, device, seed=args.seed, only=args.only)
        _free(device)
    finally:
        turns.arrive()
    turns.wait()
    num_wrong = 0
    with turns.turn():
        ceilings = measure_ceilings(Clock(device), device)
        for case in cases:
            prepared = prepare(case.config, device, seed=args.seed, only=args.only)
            _measure_case(args, case, prepared, ceilings, device)
            num_wrong += _num_wrong(prepared)
            del prepared
            _free(device)
    return 1 if num_wrong else 0


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _num_wrong(prepared: Sequence[Prepared]) -> int:
    """Layers whose answer was wrong; they have no number."""
    return sum(layer.note == WRONG_ANSWER for layer in prepared)


def _measure_case(
    args: argparse.Namespace, case: Case, prepared: list[Prepared], ceilings: Ceilings, device: torch.device
) -> None:
    print(f"copy {ceilings.copy_gbps:.0f} GB/s, bf16 product {ceilings.bf16_tflops:.0f} TFLOP/s")
    bound = Bound(ceilings.copy_gbps, ceilings.bf16_tflops, device)
    layers = list(measure_prepared(prepared, device, bound, repeats=args.repeats, trace=not args.no_trace))
    _report(args, case.config, layers, ceilings, device, case.attention, case.setting)
    for layer in prepared if args.host else ():
        if layer.run is not None:
            for name, ms, calls in host_functions(layer.run)[: args.host]:
                print(f"  {layer.part.name:12} {ms:8.4f} ms on the host  x{calls:<5.1f} {name}")
    sys.stdout.flush()


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
    rows = report.rows_of(layers, common, whole_model=not args.only)
    report.append_csv(args.out / args.csv, rows, report.COLUMNS)
    print(f"\n{config.preset}, {attention} attention, {setting}, B{config.data.batch_size}")
    heads = " ".join(f"{name:>8}" for name in ("tensor", "memory", "gaps", "host", "bound"))
    print(f"{'layer':18} {'x':>3} {'ms':>9} {'MFU %':>7} {heads}")
    for row in rows:
        cells = (row["ms"], f"{100 * float(row['local_mfu']):.1f}" if row["local_mfu"] else "-")
        split = (row["tensor_core_ms"], row["memory_ms"], row["gap_ms"], row["host_ms"], row["bound_ms"])
        line = f"{row['layer']:18} {row['count']:>3} {cells[0]:>9} {cells[1]:>7} " + " ".join(f"{c:>8}" for c in split)
        print(f"{line}  {row['note']}".rstrip())
    print("worst: " + ", ".join(x.name for x in report.worst(layers)))
    for x in layers:
        for name, ms, launches in (x.split.kernels if x.split else ())[: args.kernels]:
            print(f"  {x.name:12} {ms:8.4f} ms  x{launches:<5.1f} {name[:110]}")
    data = config.data
    report.chart(args.out / report.chart_name(attention, setting, str(data.batch_size), data.length_law), rows)


if __name__ == "__main__":
    sys.exit(main())
