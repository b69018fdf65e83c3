"""Several processes that get ready at the same time and measure one after the other.

Compiling and the first calls take most of a short measurement, and they run well side by side; the timed part wants the
machine for itself. Each process calls `wait` when it is warm, then measures inside `turn`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Options that say who was measured beside whom, what was foreseen and when to give up, not what was measured.
OPTIONS = ("--turns", "--of", "--order", "--patience-s", "--peaks", "--row-s")


def without_options(argv: Sequence[str]) -> list[str]:
    """A command line without what only its turns needed, as it is published.

    >>> without_options(["--steps", "6", "--turns", "meet", "--of", "2", "--order=1", "--out", "measured"])
    ['--steps', '6', '--out', 'measured']
    """
    kept: list[str] = []
    skip = False
    for text in argv:
        if not skip and text.partition("=")[0] not in OPTIONS:
            kept.append(text)
        skip = not skip and text in OPTIONS
    return kept


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options from which `Turns.of` makes a command's turns."""
    parser.add_argument("--turns", type=Path, help="folder where processes meet that warm up side by side")
    parser.add_argument("--of", type=int, default=1, help="how many of them")
    parser.add_argument("--order", type=int, default=0, help="how many of them measure before this one")
    parser.add_argument("--patience-s", type=float, default=120.0, help="how long they wait for each other")


class Turns:
    """A meeting point in a folder of the machine.

    Args:
        folder: of this meeting; empty at first.
        number: of processes that meet.
        patience_s: how long to wait for the others; then go on without them.
        order: how many turns come before this one's.

    >>> import tempfile
    >>> turns = Turns(Path(tempfile.mkdtemp()), number=1)
    >>> turns.wait()
    1
    >>> with turns.turn():
    ...     pass
    """

    def __init__(self, folder: Path, number: int, *, patience_s: float = 120.0, order: int = 0) -> None:
        self.folder, self.number, self.patience_s, self.order = folder, number, patience_s, order
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Turns | None:
        """Those of a command line with `add_options`; None for a command that takes none."""
        if args.turns is None:
            return None
        return cls(args.turns, args.of, patience_s=args.patience_s, order=args.order)

    def arrive(self) -> None:
        """This process is ready, or will never be; twice is as good as once."""
        (self.folder / f"ready.{os.getpid()}").touch()

    def leave(self) -> None:
        """This process will measure nothing more, whether it had its turn or failed before."""
        self.arrive()
        (self.folder / f"done.{os.getpid()}").touch()

    def wait(self) -> int:
        """Waits until all are ready; returns how many are."""
        self.arrive()
        return self.wait_only()

    def wait_only(self) -> int:
        """As `wait`, of others: this process is not one of them."""
        return self._wait_for("ready", self.number)

    def after(self, number: int) -> int:
        """Waits until so many turns are over, of processes that have ended too; returns how many are."""
        return self._wait_for("done", number)

    def _wait_for(self, kind: str, number: int) -> int:
        deadline = time.monotonic() + self.patience_s
        while (found := self._count(kind)) < number and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _count(self, kind: str) -> int:
        pids = {path.suffix[1:] for path in self.folder.glob(f"{kind}.*")}
        if kind == "done":  # so is who was ready and has ended since without a word, as a command that `--row-s` ends
            pids |= {path.suffix[1:] for path in self.folder.glob("ready.*") if not _runs(int(path.suffix[1:]))}
        return len(pids)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Alone among the processes that meet here, and after those of a lower order."""
        self.after(self.order)
        with (self.folder / "turn").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                (self.folder / f"done.{os.getpid()}").touch()
                fcntl.flock(file, fcntl.LOCK_UN)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, but there
    return True
