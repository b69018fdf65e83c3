"""Who died: ranks write a beat into the store; when a collective fails or times out the others name the silent ones.

gloo notices a closed connection at once and a silent peer after the group's time-out; either way its error does not
say who it was. On NCCL the process is aborted by its watchdog instead, and torchrun's error file names the first
failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class RankFailure(RuntimeError):
    """A collective failed; `ranks` are those whose beat stopped (empty: none did, or the store itself is gone)."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class Heartbeat:
    """Beats of this rank, and a look at the others'.

    Args:
        store: shared by all ranks; one of its own (`dist.PrefixStore("beat", store)`), as stores serialise calls.
        rank, world_size: of the process.
        interval_s: between beats. A rank counts as dead after `patience` intervals without one.
        patience: see above.

    Example:
        >>> with Heartbeat(dist.HashStore(), 0, 1, interval_s=0.01) as beat:
        ...     time.sleep(0.05)
        ...     beat.silent_ranks()
        ()
    """

    def __init__(
        self,
        store: dist.distributed_c10d.Store,
        rank: int,
        world_size: int,
        *,
        interval_s: float = 1.0,
        patience: float = 3.0,
    ) -> None:
        self._store, self._rank, self._world = store, rank, world_size
        self._interval, self._patience = interval_s, patience
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gemworks-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def silent_ranks(self) -> tuple[int, ...]:
        """Ranks whose counter does not move within `patience` intervals, without those that left; it waits that
        long."""
        before = [self.beats(r) for r in range(self._world)]
        time.sleep(self._interval * self._patience)
        still = [r for r in range(self._world) if r != self._rank and self.beats(r) == before[r]]
        gone = self.left_ranks()
        return tuple(r for r in still if r not in gone)

    def left_ranks(self) -> tuple[int, ...]:
        """Ranks whose `guard` has failed: they may be gone, but because of another."""
        return tuple(r for r in range(self._world) if self._store.add(f"left/{r}", 0))

    def beats(self, rank: int) -> int:
        """How often a rank has beaten so far, for whoever watches one rank without waiting in `silent_ranks`."""
        return self._store.add(f"beat/{rank}", 0)

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Turn a failure of the collectives inside into a `RankFailure` that names the dead.

        Args:
            what: for the message, such as "step 12".
        """
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            try:
                silent, gone = self.silent_ranks(), self.left_ranks()
                # Ranks notice a death at different times, each when a group of its own fails. Who notices later must
                # not take for dead those that have gone because of it.
                self._store.add(f"left/{self._rank}", 1)
            except (RuntimeError, dist.DistError):
                raise RankFailure(f"{what}: a collective failed and the store is gone: its host died", ()) from error
            if silent:
                named = f"ranks {list(silent)} stopped"
            elif gone:
                named = f"no rank died, but ranks {list(gone)} have left"
            else:
                named = "every rank is alive: ranks disagree on the collective"
            raise RankFailure(f"{what}: a collective failed; {named}", silent) from error

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self._beat()
            except (RuntimeError, dist.DistError):
                return

    def _beat(self) -> None:
        self._store.add(f"beat/{self._rank}", 1)
