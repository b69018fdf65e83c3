"""Trains a GEM and says how good it is: `python -m gemworks.gem.train --preset small --set train.seed=1`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemworks.gem.config import GemConfig
from gemworks.gem.errors import report
from gemworks.gem.presets import load_config
from gemworks.gem.process import prepare_process

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 120  # columns of the summary table where there is no terminal


def train(config: GemConfig, run_dir: str | Path | None = None, *, console: Console | None = None) -> dict[str, Any]:
    """Trains and evaluates one model.

    Args:
        config: of the run.
        run_dir: a new folder for its files; None: `runs/<preset>-<source>-<date>-<time>`.
        console: where to report; None: standard output.

    Returns:
        The content of `summary.json`.

    Raises:
        ValueError: wrong configuration, data or folder.
        RuntimeError: the run failed, for instance because the loss became NaN.
    """
    prepare_process()
    # torchrec takes seconds to import; `--help` and a wrong configuration answer at once
    from gemworks.gem.data import open_source
    from gemworks.gem.device import resolve_device
    from gemworks.gem.reporting import open_display
    from gemworks.gem.run import Run
    from gemworks.gem.run_dir import RunDir, default_run_dir
    from gemworks.gem.summary import table
    from gemworks.gem.trainer import Trainer
    from rich.console import Console

    console = console or Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    device = resolve_device(config.train.device)
    source = open_source(config.data)
    trainer = Trainer(config, source, device)
    folder = RunDir.create(run_dir or default_run_dir(config), config)
    display = open_display(console)
    try:
        summary = Run(config, source, trainer, folder, display).go()
    finally:
        display.stop()
        folder.close()
    console.print(table(summary))
    console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 fine, 1 the run failed, 2 the input is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m gemworks.gem.train", description="Train a GEM and compare it with its baselines."
    )
    parser.add_argument("--preset", help="tiny, small, base or large (default: small)")
    parser.add_argument("--config", metavar="FILE", help="TOML file laid over the preset")
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="values such as train.seed=1"
    )
    parser.add_argument("--run-dir", metavar="DIR", help="new folder (default: runs/<preset>-<source>-<date>-<time>)")
    given = parser.parse_args(arguments)
    try:
        train(load_config(given.preset, toml=given.config, sets=given.set), given.run_dir)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
