"""Trains a GEM and says how good it is: `python -m gemworks.gem.train --preset small --set train.seed=1`."""

from __future__ import annotations

import argparse
import contextlib
import errno
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gemworks.gem.config import GemConfig
from gemworks.gem.errors import Preempted, end, report, write_error_file
from gemworks.gem.presets import load_config
from gemworks.gem.process import prepare_process

if TYPE_CHECKING:
    import torch
    from gemworks.gem.data import Source
    from gemworks.gem.ranks import Ranks
    from gemworks.gem.signals import StopRequest
    from gemworks.precision import Recipe
    from rich.console import Console

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
PIPED_WIDTH = 120  # columns of the summary table where there is no terminal


def train(config: GemConfig, run_dir: str | Path | None = None, *, console: Console | None = None) -> dict[str, Any]:
    """Trains and evaluates one model, or goes on with a run that was interrupted.

    Where the environment says that this is one of several processes (WORLD_SIZE and its companions, as torchrun sets
    them), all of them train together.

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
        RuntimeError: the run failed, for instance because the loss became NaN, the disk is full, or another rank ended.
    """
    prepare_process()
    # torchrec takes seconds to import; `--help` and a wrong configuration answer at once
    from gemworks.gem.device import resolve_device, select_device
    from gemworks.gem.ranks import open_ranks
    from gemworks.gem.signals import StopRequest
    from gemworks.gem.summary import table
    from rich.console import Console

    # names of folders and of tasks are text, brackets and colons included
    console = console or Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, markup=False, emoji=False)
    with StopRequest() as stop:
        device = resolve_device(config.train.device)
        if device.index is not None:
            select_device(device)
        with open_ranks(config.train.rank_timeout_seconds, cuda=device.type == "cuda") as ranks:
            stop.agree = ranks.any
            try:
                summary, folder = _train(config, run_dir, device, ranks, stop, console)
            except Preempted:
                raise
            except Exception as error:
                _raise(ranks.explain(error), error)
    if ranks.is_first:
        console.print(table(summary))
        console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)
    return summary


def _train(
    config: GemConfig,
    run_dir: str | Path | None,
    device: torch.device,
    ranks: Ranks,
    stop: StopRequest,
    console: Console,
) -> tuple[dict[str, Any], Path]:
    """What each rank does; returns the summary and the folder."""
    from gemworks.gem.reporting import LoggingDisplay, SilentDisplay, open_display
    from gemworks.gem.run import Run
    from gemworks.gem.run_dir import RunDir, default_run_dir
    from gemworks.gem.trainer import Trainer

    source = _open_source(config, ranks)
    trainer = Trainer(config, source, device, ranks, _probed_before(config, run_dir))
    claimed: list[RunDir] = []

    def claim() -> tuple[Path, bool]:
        claimed.append(RunDir.claim(run_dir or default_run_dir(config), config))
        return claimed[0].path, claimed[0].resumed

    path, resumed = ranks.on_first(claim)
    folder = claimed[0] if claimed else RunDir.follow(path, resumed=resumed)
    log = folder.log_path if ranks.is_first else path / f"rank_{ranks.rank}.log"
    display = LoggingDisplay(open_display(console) if ranks.is_first else SilentDisplay(), log)
    try:
        summary = ranks.on_first(folder.summary)
        if summary is None:
            summary = Run(config, source, trainer, folder, display, stop).go()
        else:
            display.message(f"{folder.path} holds a complete run; nothing is left to do")
    except Exception as error:
        told = error if isinstance(error, Preempted) else ranks.explain(_named(error, path))
        with contextlib.suppress(OSError):  # a disk without room has none for this either
            display.message(f"{type(told).__name__}: {told}")
            with log.open("a", encoding="utf-8") as file:
                traceback.print_exception(error, file=file)
                if told is not error:
                    file.write(f"{type(told).__name__}: {told}\n")
        _raise(told, error)
    finally:
        display.stop()
        folder.close()
    return summary, path


def _probed_before(config: GemConfig, run_dir: str | Path | None) -> Recipe | None:
    """What a run that goes on has probed: another choice would be another model."""
    from gemworks.gem.implement import PROBE
    from gemworks.gem.run_dir import RunDir

    return None if config.kernels.linears != PROBE or run_dir is None else RunDir(run_dir).linears()


def _named(error: Exception, folder: Path) -> Exception:
    """A failed write of a log or a figure, which by itself says neither where nor what to do."""
    if not isinstance(error, OSError) or error.errno not in UNWRITABLE:
        return error
    return RuntimeError(
        f"run folder {str(folder)!r}: cannot be written any more ({error.strerror}); make room there, and "
        "start the same command again: it goes on from the newest checkpoint"
    )


def _raise(told: Exception, error: Exception) -> NoReturn:
    if told is error:
        raise error
    raise told from error


def _open_source(config: GemConfig, ranks: Ranks) -> Source:
    """The data, checked. The first rank opens it before the others: it may have to be fetched or prepared first."""
    from gemworks.gem.data import open_source

    opened: list[Source] = []

    def first() -> None:
        opened.append(open_source(config.data))
        _check_parts(opened[0], config)

    ranks.on_first(first)
    return opened[0] if opened else open_source(config.data)


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
        write_error_file(error)
        return report(error)
    return 0


if __name__ == "__main__":
    end(main())
