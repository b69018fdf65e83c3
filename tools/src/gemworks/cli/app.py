"""The `gemworks` command: its subcommands, and what they have in common.

Nothing here may import torch: help, completion and configuration answer at once. A command imports what it needs when
it runs.
Exit codes: 0 fine, 1 the run failed, 2 the user's input is wrong, 75 stopped by SIGTERM and to be started again.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from gemworks.cli.bench import bench_app
from gemworks.cli.checkpoint import checkpoint_app
from gemworks.cli.data import data_app
from gemworks.cli.diagnose import mfu, probe, trace
from gemworks.cli.options import ConfigFile, Json, Preset, Sets
from gemworks.cli.output import console, print_error, print_json, quiet
from gemworks.cli.plan import plan_app
from gemworks.gem.errors import WRONG_INPUT, end, report, write_error_file

INTERRUPTED = 130  # 128 + SIGINT, as shells say it

app = typer.Typer(
    name="gemworks",
    help="Plan, train, measure and diagnose recommendation models at scale.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(checkpoint_app)
app.add_typer(data_app)
app.add_typer(plan_app)
app.add_typer(bench_app)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            found = metadata.version("gemworks-cli")
        except metadata.PackageNotFoundError:
            found = "source tree"
        print(f"gemworks {found}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Plan, train, measure and diagnose recommendation models at scale.

    Exit codes: 0 fine, 1 the run failed, 2 your input is wrong, 75 stopped by SIGTERM: start it again.
    """


@app.command()
def train(
    preset: Preset = None,
    config: ConfigFile = None,
    sets: Sets = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run, new or to be gone on with; runs/<preset>-<source>-<date>-<time> if not given.",
            metavar="DIR",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train a model and compare it with its baselines.

    Example: gemworks train --preset tiny --set train.max_steps=50 --run-dir runs/first

    A run that was interrupted goes on: gemworks train --run-dir runs/first
    """
    from gemworks.gem.train import run_config
    from gemworks.gem.train import train as run_training

    resolved = run_config(preset, config, sets or (), run_dir)
    with quiet():
        summary = run_training(resolved, run_dir, console=_progress_console(json))
    if json and os.environ.get("RANK", "0") == "0":  # of several processes one prints; the summary is the same on each
        print_json(summary)


@app.command(name="eval")
def evaluate(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a training run.", metavar="RUN_DIR")],
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    checkpoint: Annotated[str, typer.Option(help="best (by validation NE) or last.")] = "best",
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda; the run's own setting if not given.")] = None,
    json: Json = False,
) -> None:
    """Evaluate the stored model of a run.

    Example: gemworks eval runs/first --json
    """
    from gemworks.gem.run_dir import RunDir

    RunDir.open(run_dir)  # a wrong folder answers before torch is imported
    with quiet():
        from gemworks.gem.evaluate import evaluate_run

        result = evaluate_run(run_dir, split=split, which=checkpoint, device=device)
    if json:
        print_json(result)
    else:
        from gemworks.cli.output import print_evaluation

        print_evaluation(result)


@app.command()
def config(preset: Preset = None, config: ConfigFile = None, sets: Sets = None, json: Json = False) -> None:
    """Print the resolved configuration, as TOML or JSON.

    Example: gemworks config --preset small --set model.num_layers=4
    """
    from gemworks.gem.presets import load_config

    resolved = load_config(preset, toml=config, sets=sets or ())
    if json:
        print_json(resolved.to_mapping())
    else:
        print(resolved.to_toml(), end="")


@app.command()
def doctor(json: Json = False) -> None:
    """Look at this machine: versions, devices, and which backend every op would use and why.

    Example: gemworks doctor --json
    """
    with quiet():
        from gemworks.cli.doctor import examine

        findings = examine()
    if json:
        print_json(findings)
    else:
        from gemworks.cli.output import print_findings

        print_findings(findings)


for command in (probe, trace, mfu):
    app.command()(command)


def _progress_console(json: bool) -> Any:
    """Progress goes to standard error when standard output is for JSON; None is the trainer's own choice."""
    return console(stderr=True) if json else None


def _one_value_per_set(arguments: Sequence[str]) -> list[str]:
    """`--set a=1 b=2` as `--set a=1 --set b=2`: an option of typer takes a fixed number of values.

    >>> _one_value_per_set(["train", "--set", "a=1", "b=2", "--json"])
    ['train', '--set', 'a=1', '--set', 'b=2', '--json']
    """
    spread: list[str] = []
    inside = False
    for word in arguments:
        inside = word == "--set" or (inside and not word.startswith("-"))
        if inside and word != "--set" and spread[-1] != "--set":
            spread.append("--set")
        spread.append(word)
    return spread


def _refuse_empty(words: Sequence[str]) -> None:
    """An empty word is a shell variable that was never set; as a folder it would be the one that one stands in.

    Raises:
        ValueError: there is one. What follows `--` is another program's.
    """
    for previous, word in zip(["gemworks", *words], words, strict=False):
        if word == "--":
            return
        if not word or re.fullmatch(r"--[a-z-]+=", word):
            where = word.removesuffix("=") or previous
            raise ValueError(f"{where}: got '', expected a value; is a shell variable unset?")


def run(arguments: Sequence[str] | None = None) -> int:
    """The whole command line; returns the exit code."""
    words = _one_value_per_set(sys.argv[1:] if arguments is None else arguments)
    try:
        _refuse_empty(words)
        result = app(
            args=words,
            prog_name="gemworks",
            standalone_mode=False,
        )
    except typer.Abort:
        print_error("interrupted")
        return INTERRUPTED
    except Exception as error:
        usage = getattr(error, "format_message", None)  # how typer, and click under older ones, say it
        if usage is None:
            write_error_file(error)
            return report(error)
        if type(error).__name__ != "NoArgsIsHelpError":
            where = getattr(getattr(error, "ctx", None), "command_path", "gemworks")
            print_error(f"{usage()} ({where} --help says more)")
        return int(getattr(error, "exit_code", WRONG_INPUT))
    if result == INTERRUPTED:  # typer turns Ctrl-C into this
        print_error("interrupted")
    return result if isinstance(result, int) else 0


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a bar that a terminal cannot show must not end a run
    end(run())


if __name__ == "__main__":
    main()
