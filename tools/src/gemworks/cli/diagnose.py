"""`gemworks probe`, `trace` and `mfu`: which layers bear FP8, where a step's time went, its share of the peak."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from gemworks.cli.options import ConfigFile, Json, Preset, Sets
from gemworks.cli.output import (
    PICTURES,
    at_least,
    console,
    print_json,
    print_lines,
    quiet,
    readable,
    terminal_columns,
    writable,
)

Item = TypeVar("Item")
COLUMNS_BEFORE_NAME = 40  # in the lines of KernelTable.to_text
MIN_NAME_COLUMNS = 20  # a kernel's name is not cut to less, however narrow the terminal


def probe(
    source: Annotated[
        str,
        typer.Argument(
            help="MODULE:FUNCTION; called without arguments it returns (model, batches), or with a third value, the "
            "step: (model, batch) -> loss.",
            metavar="MODULE:FUNCTION",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Write the recipe that convert() reads.", metavar="FILE")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write one row per layer, format and product.", metavar="FILE")
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(help="A format to try, in order of preference; may be repeated.", metavar="RECIPE"),
    ] = None,
    min_sqnr_db: Annotated[float, typer.Option(help="Least quality of every product.", metavar="DB")] = 22.0,
    min_speedup: Annotated[float, typer.Option(help="Least speed against bf16, on a GPU.", metavar="X")] = 1.0,
    json: Json = False,
) -> None:
    """Measure every linear layer of a model on real batches, and choose its FP8 format.

    Example: gemworks probe my_trainer.fp8:make --out recipe.toml

    The recipe is then used by gemworks.precision.convert(model, "recipe.toml").
    """
    writable("--out", out, ".toml")
    writable("--csv", csv)
    for option, value in (("--min-sqnr-db", min_sqnr_db), ("--min-speedup", min_speedup)):
        if not math.isfinite(value):
            raise ValueError(f"{option}: got {value}, expected a finite number")
    # What the user's code prints is progress: the answer has standard output for itself.
    with quiet(), contextlib.redirect_stdout(sys.stderr):
        from gemworks.precision import probe as run_probe

        made = _call(source)
        options: dict[str, Any] = {"min_sqnr_db": min_sqnr_db, "min_speedup": min_speedup}
        if candidate:
            options["candidates"] = tuple(candidate)
        report = run_probe(*made, **options)
    if out is not None:
        report.save_file(out)
    rows = report.rows()
    if csv is not None:
        _write_csv(csv, rows)
    if json:
        print_json({"layers": rows, "recipe": report.recipe.layers})
    else:
        print_lines(str(report))


def trace(
    traces: Annotated[
        list[Path], typer.Argument(help="Files of torch.profiler, .json or .json.gz; one per rank.", metavar="TRACE...")
    ],
    kernels: Annotated[int, typer.Option(help="Kernels to list, by time.", metavar="NUMBER")] = 10,
    png: Annotated[Path | None, typer.Option(help="Draw the first trace's timeline.", metavar="FILE")] = None,
    json: Json = False,
) -> None:
    """Report what overlapped with what in a profiler trace of any program, and who waited.

    Example: gemworks trace runs/first/profile/step_20.json.gz

    With the traces of several ranks: who waited for whom. CPU-only traces work too.
    """
    writable("--png", png, *PICTURES)
    at_least(0, kernels=kernels)
    for path in traces:
        readable(path, "a trace that torch.profiler exported")
    if len({path.resolve() for path in traces}) < len(traces):
        raise ValueError("TRACE...: got the same file twice, expected one per rank")
    with quiet():
        from gemworks.netmem.overlap import kernel_table, overlap_report, plot_timeline, rank_waits, read_trace

        read = [_named(path, read_trace) for path in traces]
        reports = [overlap_report(item) for item in read]
        tables = [kernel_table(item) for item in read]
        waits = rank_waits(read) if len(read) > 1 else None
        if png is not None:
            plot_timeline(read[0], png)
    if json:
        print_json(
            {
                "traces": [
                    {"path": str(path), **report.to_dict(), "kernels": table.to_dict()["kernels"]}
                    for path, report, table in zip(traces, reports, tables, strict=True)
                ],
                "rank_waits": None if waits is None else asdict(waits),
            }
        )
        return
    columns = terminal_columns()
    for path, report, table in zip(traces, reports, tables, strict=True):
        print(path)
        print_lines(report.to_text())
        width = () if columns is None else (max(columns - COLUMNS_BEFORE_NAME, MIN_NAME_COLUMNS),)
        print(table.to_text(kernels, *width))
    if waits is not None:
        print_lines(waits.to_text())


def _named(path: Path, read: Callable[[Path], Item]) -> Item:
    """Of several traces the wrong one is named."""
    try:
        return read(path)
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {str(error).removeprefix('source: ')}") from error


def mfu(
    step_ms: Annotated[float, typer.Option(help="Wall time of a whole training step.", metavar="MS")],
    preset: Preset = None,
    config: ConfigFile = None,
    sets: Sets = None,
    gpus: Annotated[int, typer.Option(help="GPUs that take part.", metavar="NUMBER")] = 1,
    samples: Annotated[
        int | None,
        typer.Option(help="Samples of a step over all GPUs; data.batch_size x train.accumulate if not given."),
    ] = None,
    flops: Annotated[
        float | None, typer.Option(help="FLOPs of a step over all GPUs, instead of a configuration.", metavar="NUMBER")
    ] = None,
    peak_tflops: Annotated[
        float, typer.Option(help="Dense peak of one GPU; H100 and H200 in bf16: 989.", metavar="TFLOPS")
    ] = 989.0,
    json: Json = False,
) -> None:
    """Say which share of the GPUs' peak a training step uses, counting useful FLOPs only.

    Example: gemworks mfu --preset base --set data.length_law=zipf --step-ms 350

    Example: gemworks mfu --flops 2.1e15 --step-ms 180 --gpus 16
    """
    at_least(1, samples=samples, gpus=gpus)
    for option, value in (("--step-ms", step_ms), ("--flops", flops), ("--peak-tflops", peak_tflops)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{option}: got {value}, expected a positive number")
    peak = peak_tflops * 1e12
    if flops is not None:
        if preset or config or sets or samples:
            raise ValueError(
                "--flops: got it beside a configuration; give plain numbers, or --preset, --config, --set and --samples"
            )
        with quiet():
            from gemworks.gem.efficiency import mfu as share

            result: dict[str, Any] = {"training_flops": flops, "by_kind": None}
    else:
        from gemworks.gem.presets import load_config

        resolved = load_config(preset, toml=config, sets=sets or ())
        with quiet():
            from gemworks.gem.data import open_source
            from gemworks.gem.efficiency import BWD_FACTOR, count_expected_flops
            from gemworks.gem.efficiency import mfu as share

            num_samples = samples or resolved.data.batch_size * resolved.train.accumulate  # over all ranks
            count = count_expected_flops(resolved, open_source(resolved.data).schema, num_samples)
        kinds = {kind: (1.0 + BWD_FACTOR) * value for kind, value in count.by_kind().items()}
        result = {
            "training_flops": count.training,
            "by_kind": kinds,
            "num_samples": num_samples,
            "length_law": resolved.data.length_law,
            "max_length": resolved.data.max_length,
        }
    result |= {"step_ms": step_ms, "num_gpus": gpus, "peak_flops_per_second": peak}
    result["mfu"] = share(result["training_flops"], step_ms / 1e3, num_gpus=gpus, peak_flops_per_second=peak)
    if result["mfu"] > 1:
        raise ValueError(
            f"MFU: got {result['mfu']:.0%}, and no GPU does more than its peak; --step-ms is the wall time of a whole "
            f"step, --gpus counts all that take part, and --peak-tflops is that of the dtype (FP8: 1979 on an H200)"
        )
    if json:
        print_json(result)
    else:
        print_mfu(result)


def print_mfu(result: dict[str, Any]) -> None:
    """The table of `gemworks mfu`, and the share in one line."""
    from rich.table import Table

    out, total = console(), result["training_flops"]
    if result["by_kind"] is not None:
        law = f"{result['length_law']} up to {result['max_length']:,}"
        table = Table(title=f"{result['num_samples']:,} samples, lengths {law}", title_justify="left")
        table.add_column("part")
        for name in ("training TFLOP", "share"):
            table.add_column(name, justify="right")
        for kind, value in sorted(result["by_kind"].items(), key=lambda item: -item[1]):
            table.add_row(kind, f"{value / 1e12:.4g}", f"{value / total:.1%}")
        out.print(table)
    gpus = f"{result['num_gpus']:,} GPU{'s' if result['num_gpus'] > 1 else ''}"
    peak = result["peak_flops_per_second"] / 1e12
    out.print(f"{total / 1e12:.4g} TFLOP in {result['step_ms']:g} ms on {gpus} of {peak:g} TFLOP/s", highlight=False)
    out.print(f"MFU {result['mfu']:.2%}", highlight=False)


def _call(source: str) -> tuple[Any, ...]:
    """What `MODULE:FUNCTION` returns; modules of the current folder count, as for `python -m`."""
    module_name, _, function_name = source.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"MODULE:FUNCTION: got {source!r}, expected such as my_trainer.fp8:make")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".")[0] and error.name != module_name:
            raise
        raise ValueError(f"MODULE:FUNCTION: got {source!r}, but there is no module {error.name!r} here") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(function):
        raise ValueError(f"MODULE:FUNCTION: got {source!r}, but {module_name} has no function {function_name!r}")
    made = function()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(
            f"{source}: returned {type(made).__name__}, expected (model, batches) or (model, batches, step)"
        )
    return made


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        if not rows:  # no layer had a format to try: an empty file, as the report says why
            return
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
