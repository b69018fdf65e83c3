"""`gemworks checkpoint`: look into checkpoints, hand their dense part to other programs, cut them into other parts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from gemworks.cli.options import Json
from gemworks.cli.output import at_least, need, new_folder, print_json, print_lines, quiet, writable
from gemworks.gem.errors import RUN_FAILED

PROCESS_BYTES = 1 << 29  # more than a process with torch, gloo and its part takes

checkpoint_app = typer.Typer(
    name="checkpoint",
    help="Look into checkpoints, convert and reshard them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Which = Annotated[str, typer.Option("--checkpoint", help="best (by validation NE) or last, of a run.")]


@checkpoint_app.command(name="inspect")
def inspect_checkpoints(
    path: Annotated[Path, typer.Argument(help="A run's folder, or one checkpoint in it.", metavar="PATH")],
    against: Annotated[
        Path | None,
        typer.Option(help="Another checkpoint or run: says which tensors differ in name or shape.", metavar="PATH"),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Name every tensor of the newest one.")] = False,
    json: Json = False,
) -> None:
    """Say what a run's checkpoints hold, and whether they are whole.

    Example: gemworks checkpoint inspect runs/first

    Exit code 1 if one of them is damaged.
    """
    _folder(path)
    with quiet():
        from gemworks.gem.inspect_checkpoint import inspect

        result = inspect(path, against=against)
    if json:
        print_json(result)
    else:
        from gemworks.cli.output import print_checkpoints

        print_checkpoints(result, tensors=tensors)
    if not all(item["whole"] for item in result["checkpoints"]):
        raise typer.Exit(RUN_FAILED)


@checkpoint_app.command()
def convert(
    path: Annotated[Path, typer.Argument(help="A run's folder, or one checkpoint in it.", metavar="PATH")],
    out: Annotated[Path, typer.Argument(help="The file to write.", metavar="OUT.safetensors")],
    which: Which = "best",
    json: Json = False,
) -> None:
    """Write the dense part of a model as safetensors; embedding tables stay out.

    Example: gemworks checkpoint convert runs/first model.safetensors
    """
    _folder(path)
    writable("OUT", out, ".safetensors")
    need("safetensors", "safetensors")
    with quiet():
        from gemworks.gem.export_checkpoint import export_dense

        result = export_dense(path, out, which=which)
    if json:
        print_json(result)
    else:
        print_lines(
            f"{result['out']}: {len(result['tensors'])} tensors, {result['num_parameters']:,} parameters, "
            f"{result['num_bytes'] / 2**20:.1f} MiB, of step {result['step']}; "
            f"left out: {len(result['left_out'])} embedding tables"
        )


@checkpoint_app.command()
def reshard(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a training run.", metavar="RUN_DIR")],
    out: Annotated[Path, typer.Argument(help="Folder of a new run, which can be trained on.", metavar="OUT_DIR")],
    parts: Annotated[int, typer.Option(help="Files to cut the checkpoint into.", metavar="NUMBER")],
    json: Json = False,
) -> None:
    """Copy the best and last checkpoints into a new run folder, in other parts.

    Example: gemworks checkpoint reshard runs/first runs/second --parts 8

    Not needed to train with another number of GPUs: any checkpoint loads into
    any world.
    """
    _folder(run_dir)
    new_folder("OUT_DIR", out)
    at_least(1, parts=parts)
    _room_for(parts)
    with quiet():
        from gemworks.gem.export_checkpoint import reshard as rewrite

        result = rewrite(run_dir, out, parts)
    if json:
        print_json(result)
    else:
        steps = " and ".join(str(step) for step in result["steps"])
        print_lines(
            f"{result['out']}: step {steps} in {result['num_parts']} parts, {result['num_tensors']:,} tensors, "
            f"{result['num_bytes'] / 2**20:.1f} MiB; go on with it: gemworks train --run-dir {result['out']}"
        )


def _room_for(parts: int) -> None:
    """Parts are written by as many processes at once, and each has torch in its memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = max(1, memory // PROCESS_BYTES)
    if parts > most:
        raise ValueError(
            f"--parts: got {parts}, which as many processes write at once; expected at most {most} with this machine's "
            f"{memory / 2**30:.0f} GiB"
        )


def _folder(path: Path) -> None:
    if not path.is_dir():  # answers before torch is imported
        raise ValueError(f"{str(path)!r}: got no folder, expected that of a run or of a checkpoint")
