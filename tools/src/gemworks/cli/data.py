"""`gemworks data`: get a data set ready, and look at it. The data set is the one that a configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from gemworks.cli.options import ConfigFile, Json, Preset, Sets
from gemworks.cli.output import PICTURES, console, print_json, print_lines, quiet, writable

BAR_WIDTH = 32

data_app = typer.Typer(
    name="data",
    help="Get a data set ready, and look at it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@data_app.command()
def fetch(preset: Preset = None, config: ConfigFile = None, sets: Sets = None, json: Json = False) -> None:
    """Download, prepare or check a data set, so that training can start.

    movielens is downloaded; kuairand, criteo and taobao are prepared from
    files under data.path; every row of a parquet data set is checked;
    synthetic data needs nothing.

    Example: gemworks data fetch --preset small
    """
    from gemworks.gem.presets import load_config

    data = load_config(preset, toml=config, sets=sets or ()).data
    with quiet():
        from gemworks.gem.data import open_source

        result = _fetched(data.source, open_source(data))
    if json:
        print_json(result)
    else:
        counts = ", ".join(f"{split} {num:,}" for split, num in result["num_samples"].items())
        print_lines(f"{result['source']}: {counts} samples; {result['what']}")


@data_app.command()
def inspect(
    preset: Preset = None,
    config: ConfigFile = None,
    sets: Sets = None,
    max_samples: Annotated[
        int, typer.Option(help="Samples read per split, spread evenly over it.", metavar="NUMBER")
    ] = 65536,
    png: Annotated[Path | None, typer.Option(help="Also draw the history lengths.", metavar="FILE")] = None,
    json: Json = False,
) -> None:
    """Show a data set's schema, counts, history lengths, label rates and time span.

    Example: gemworks data inspect --set data.source=parquet --set data.path=clicks
    """
    from gemworks.gem.presets import load_config

    writable("--png", png, *PICTURES)
    data = load_config(preset, toml=config, sets=sets or ()).data
    with quiet():
        from gemworks.gem.data import open_source
        from gemworks.gem.data.inspection import draw_lengths, inspect_source

        result = {"source": data.source, **inspect_source(open_source(data), max_samples=max_samples)}
        if png is not None:
            draw_lengths(png, result)
    if json:
        print_json(result)
    else:
        _print_inspection(result)


def _fetched(name: str, source: Any) -> dict[str, Any]:
    from gemworks.gem.data import ParquetSource
    from gemworks.gem.data.inspection import check_all

    folder = None
    if isinstance(source, ParquetSource):
        folder = str(source.folder)
        what = f"all {check_all(source):,} row groups checked in {folder}"
    else:
        what = {"synthetic": "made when read, nothing to fetch"}.get(name, "files checked by hash")
    return {
        "source": name,
        "folder": folder,
        "what": what,
        "num_samples": {split: source.num_samples(split) for split in source.splits},
    }


def _print_inspection(result: dict[str, Any]) -> None:
    from gemworks.gem.data.inspection import range_label
    from rich.table import Table

    out = console()
    schema, splits = result["schema"], result["splits"]
    fields = Table(title=f"{result['source']}: schema", title_justify="left")
    for name in ("role", "name", "columns"):
        fields.add_column(name)
    fields.add_row("tasks", "", ", ".join(schema["tasks"]))
    fields.add_row("ids", "", ", ".join(f"{f['name']} ({f['num_ids']:,})" for f in schema["ids"]))
    fields.add_row("dense", "", ", ".join(schema["dense"]))
    for event in schema["events"]:
        columns = [f"{f['name']} ({f['num_ids']:,})" for f in event["ids"]]
        fields.add_row("events", event["name"], ", ".join([*columns, *event["floats"]]))
    out.print(fields)
    counts = Table(title="samples", title_justify="left")
    for name in ("part", "samples", "read", "first (UTC)", "last (UTC)", *schema["tasks"]):
        counts.add_column(name, justify="left" if name == "part" else "right")
    for split, figures in splits.items():
        rates = [
            "-" if rate != rate else f"{rate:.4f}" for rate in figures["label_rates"].values()
        ]  # NaN is not itself
        num_read = f"{figures['num_inspected']:,}"
        times = (figures["first_time"] or "-", figures["last_time"] or "-")
        counts.add_row(split, f"{figures['num_samples']:,}", num_read, *times, *rates)
    out.print(counts)
    for event in schema["events"]:
        for split, figures in splits.items():
            lengths = figures["events"][event["name"]]
            if not figures["num_inspected"]:
                continue
            out.print(
                f"{event['name']}, {split}: {lengths['mean_length']:.1f} events a sample, at most "
                f"{lengths['max_length']:,}",
                highlight=False,
            )
            most = max(part["num_samples"] for part in lengths["lengths"])
            for part in lengths["lengths"]:
                bar = "█" * -(-BAR_WIDTH * part["num_samples"] // most)
                print(f"  {range_label(part):>13} {bar:<{BAR_WIDTH}} {part['num_samples']:,}")
