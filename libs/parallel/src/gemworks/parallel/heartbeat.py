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
    """A collective failed.

    Attributes:
        ranks: those whose beat stopped; empty: none did, or the store itself is gone.
        left: those whose `guard` had failed before, the first to leave first. Where a rank failed by its own error,
            it is this first one, and nobody's `ranks` name it.
    """

    def __init__(self, message: str, ranks: tuple[int, ...], left: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks, self.left = ranks, left


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
        self._mark = 0  # of this rank in the store; above 0: its guard has failed, and it has entered none since
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
        still = self._still()
        gone = self.left_ranks()
        return tuple(r for r in still if r not in gone)

    def left_ranks(self) -> tuple[int, ...]:
        """Ranks whose last `guard` has failed, in the order of leaving: they may be gone, but because of another, or by
        an error of their own."""
        marks = {r: self._store.add(f"left/{r}", 0) for r in range(self._world)}
        return tuple(sorted((r for r in marks if marks[r]), key=marks.__getitem__))

    def beats(self, rank: int) -> int:
        """How often a rank has beaten so far, for whoever watches one rank without waiting in `silent_ranks`."""
        return self._store.add(f"beat/{rank}", 0)

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Turn a failure of the collectives inside into a `RankFailure` that names the dead.

        A rank that goes on after a failure has not left: entering the next guard takes that back.

        Args:
            what: for the message, such as "step 12".
        """
        try:
            if self._mark:
                self._store.add(f"left/{self._rank}", -self._mark)
                self._mark = 0
            yield
        except (RuntimeError, dist.DistError) as error:
            try:
                still, left = self._still(), self.left_ranks()
                # Ranks notice a death at different times, each when a group of its own fails. Who notices later must
                # not take for dead those that have gone because of it.
                if not self._mark:
                    self._mark = self._store.add("left", 1)
                    self._store.add(f"left/{self._rank}", self._mark)
            except (RuntimeError, dist.DistError):
                text = f"{what}: a collective failed and the store is gone: its host died or left"
                raise RankFailure(text, ()) from error
            gone = tuple(r for r in left if r != self._rank)
            silent = tuple(r for r in still if r not in gone)
            if silent:
                named = f"ranks {list(silent)} stopped"
            elif gone:
                named = f"no rank died, but ranks {list(gone)} have left"
            else:
                named = "every rank is alive: ranks disagree on the collective"
            raise RankFailure(f"{what}: a collective failed; {named}", silent, gone) from error

    def _still(self) -> list[int]:
        """Others whose counter does not move while this waits."""
        before = [self.beats(r) for r in range(self._world)]
        time.sleep(self._interval * self._patience)
        return [r for r in range(self._world) if r != self._rank and self.beats(r) == before[r]]

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self._beat()
            except (RuntimeError, dist.DistError):
                return

    def _beat(self) -> None:
        self._store.add(f"beat/{self._rank}", 1)
