"""Several processes that get ready at the same time and measure one after the other.

Compiling and the first calls take most of a short measurement, and they run well side by side; the timed part wants the
machine for itself. Each process calls `wait` when it is warm, then measures inside `turn`.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turns:
    """A meeting point in a folder of the machine.

    Args:
        folder: of this meeting; empty at first.
        number: of processes that meet.
        patience_s: how long to wait for the others; then go on without them.

    >>> import tempfile
    >>> turns = Turns(Path(tempfile.mkdtemp()), number=1)
    >>> turns.wait()
    1
    >>> with turns.turn():
    ...     pass
    """

    def __init__(self, folder: Path, number: int, *, patience_s: float = 120.0) -> None:
        self.folder, self.number, self.patience_s = folder, number, patience_s
        folder.mkdir(parents=True, exist_ok=True)

    def arrive(self) -> None:
        """This process is ready, or will never be; twice is as good as once."""
        (self.folder / f"ready.{os.getpid()}").touch()

    def wait(self) -> int:
        """Waits until all are ready; returns how many are."""
        self.arrive()
        deadline = time.monotonic() + self.patience_s
        while (ready := len(list(self.folder.glob("ready.*")))) < self.number and time.monotonic() < deadline:
            time.sleep(0.05)
        return ready

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Alone among the processes that meet here."""
        with (self.folder / "turn").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)
