"""Trains a GEM and says how good it is: `python -m gemworks.gem.train --preset small --set train.seed=1`."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemworks.gem.config import GemConfig
from gemworks.gem.errors import report
from gemworks.gem.presets import load_config
from gemworks.gem.process import prepare_process

if TYPE_CHECKING:
    from gemworks.gem.data import Source
    from rich.console import Console

PIPED_WIDTH = 120  # columns of the summary table where there is no terminal


def train(config: GemConfig, run_dir: str | Path | None = None, *, console: Console | None = None) -> dict[str, Any]:
    """Trains and evaluates one model, or goes on with a run that was interrupted.

    Args:
        config: of the run.
        run_dir: a folder for its files; None: `runs/<preset>-<source>-<date>-<time>`. If it holds an unfinished run of
            the same configuration, that run goes on; a finished one is left as it is.
        console: where to report; None: standard output.

    Returns:
        The content of `summary.json`.

    Raises:
        ValueError: wrong configuration, data or folder; another configuration in the folder; another job at work in it.
        Preempted: a SIGTERM came. The run saved a checkpoint and goes on when it is called again.
        RuntimeError: the run failed, for instance because the loss became NaN or the disk is full.
    """
    prepare_process()
    # torchrec takes seconds to import; `--help` and a wrong configuration answer at once
    from gemworks.gem.data import open_source
    from gemworks.gem.device import resolve_device
    from gemworks.gem.reporting import LoggingDisplay, open_display
    from gemworks.gem.run import Run
    from gemworks.gem.run_dir import RunDir, default_run_dir
    from gemworks.gem.signals import StopRequest
    from gemworks.gem.summary import table
    from gemworks.gem.trainer import Trainer
    from rich.console import Console

    console = console or Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    with StopRequest() as stop:
        device = resolve_device(config.train.device)
        source = open_source(config.data)
        _check_parts(source, config)
        trainer = Trainer(config, source, device)
        folder = RunDir.claim(run_dir or default_run_dir(config), config)
        display = LoggingDisplay(open_display(console), folder.log_path)
        try:
            summary = folder.summary()
            if summary is None:
                summary = Run(config, source, trainer, folder, display, stop).go()
            else:
                display.message(f"{folder.path} holds a complete run; nothing is left to do")
        except Exception as error:
            display.message(f"{type(error).__name__}: {error}")
            with folder.log_path.open("a", encoding="utf-8") as log:
                traceback.print_exception(error, file=log)
            raise
        finally:
            display.stop()
            folder.close()
    console.print(table(summary))
    console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
    return summary


def _check_parts(source: Source, config: GemConfig) -> None:
    """A missing part is noticed before training, not after it."""
    for part in ("train", "valid", "test"):
        if part not in source.splits or source.num_samples(part) == 0:
            raise ValueError(
                f"data.path: the {config.data.source} data at {config.data.path!r} has no {part} samples, and a run "
                "needs train, valid and test; write that part, or choose other data"
            )


def run_config(
    preset: str | None, toml: str | Path | None, sets: Sequence[str], run_dir: str | Path | None
) -> GemConfig:
    """The configuration that a command line means: the folder's own when it names a run and nothing else."""
    from gemworks.gem.run_dir import RunDir

    if preset is None and toml is None and not sets and run_dir is not None and RunDir(run_dir).config_path.is_file():
        return RunDir.open(run_dir).config()
    return load_config(preset, toml=toml, sets=sets)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, which `gemworks.gem.errors` explains."""
    parser = argparse.ArgumentParser(
        prog="python -m gemworks.gem.train", description="Train a GEM and compare it with its baselines."
    )
    parser.add_argument("--preset", help="tiny, small, base or large (default: small)")
    parser.add_argument("--config", metavar="FILE", help="TOML file laid over the preset")
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="values such as train.seed=1"
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="folder of the run, new or to be gone on with (default: runs/<preset>-<source>-<date>-<time>)",
    )
    given = parser.parse_args(arguments)
    try:
        train(run_config(given.preset, given.config, given.set, given.run_dir), given.run_dir)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
