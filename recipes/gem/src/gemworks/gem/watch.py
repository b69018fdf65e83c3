"""Ends this process when another rank is gone and the main thread cannot notice.

A collective on GPUs keeps the host waiting inside CUDA, where no exception arrives: the process would sit there until
NCCL's watchdog aborts it, and would then be the one that failed. Two threads look instead. One waits for a word of the
next rank, whose connection closes the moment it dies; whoever loses the next rank says so in the store. The other looks
there every second and, unless the main thread ends by itself, ends the process with a message that names the rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gemworks.gem.errors import RUN_FAILED, report, write_error_file
from gemworks.parallel.heartbeat import Heartbeat, RankFailure
from torch.distributed import ProcessGroup

LOOK_SECONDS = 1.0
GRACE_SECONDS = 10.0  # for the main thread, to end as it would on its own: with a log line, its files closed
FOREVER = timedelta(days=365)
LOST = "lost"


class Watch:
    """Looks after the next rank (the first follows the last) until `leave`.

    Args:
        group: gloo group of all ranks, of its own.
        store: connection of its own.
        heart: beats of all ranks.
        rank, world_size: of this process.
        silent_seconds: a next rank without a heartbeat for so long hangs.
        blame: what to say of a rank that is gone.
        grace_seconds: between the news and the end.
        end: called with the failure; does not return.
    """

    def __init__(
        self,
        group: ProcessGroup,
        store: Any,
        heart: Heartbeat,
        rank: int,
        world_size: int,
        *,
        silent_seconds: float,
        blame: Callable[[int], str],
        grace_seconds: float = GRACE_SECONDS,
        end: Callable[[RankFailure], None] | None = None,
    ) -> None:
        self._group, self._store, self._heart = group, store, heart
        self._next, self._before = (rank + 1) % world_size, (rank - 1) % world_size
        self._silent, self._grace, self._blame, self._end = silent_seconds, grace_seconds, blame, end or end_process
        self._ended = threading.Event()
        self._next_left = threading.Event()
        self._store_in_use = threading.Lock()  # a store serves one call at a time
        self._threads = [
            threading.Thread(target=run, name=f"gemworks-watch-{run.__name__}", daemon=True)
            for run in (self._listen, self._look)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """The main thread ends by itself from here on."""
        self._ended.set()

    def leave(self) -> None:
        """Stop, and let the rank before know that this one ends on purpose."""
        self.stop()
        with contextlib.suppress(RuntimeError):
            work = dist.isend(torch.ones(1), self._before, group=self._group)
            if work is not None:
                work.wait(timedelta(seconds=LOOK_SECONDS))

    def join(self) -> None:
        """Wait, not for long, for the next rank to leave too."""
        self._threads[0].join(3 * LOOK_SECONDS)

    def _listen(self) -> None:
        try:
            work = dist.irecv(torch.zeros(1), self._next, group=self._group)
            assert work is not None
            work.wait(FOREVER)
            self._next_left.set()
        except RuntimeError:
            if not self._ended.is_set():
                self._tell(self._blame(self._next))

    def _tell(self, text: str) -> None:
        with contextlib.suppress(RuntimeError, dist.DistError), self._store_in_use:
            self._store.compare_set(LOST, "", text)  # the first to notice is right: the others follow from it

    def _look(self) -> None:
        beats, heard = -1, time.monotonic()
        text = ""
        while not text and not self._ended.wait(LOOK_SECONDS):
            try:
                with self._store_in_use:
                    text = self._store.get(LOST).decode() if self._store.check([LOST]) else ""
                now = self._heart.beats(self._next)
            except (RuntimeError, dist.DistError):
                text = "the store is gone, and with it the machine of the launcher; start again"
                break
            if now != beats:
                beats, heard = now, time.monotonic()
            elif time.monotonic() - heard > self._silent and not self._next_left.is_set():
                self._tell(self._blame(self._next))
        if text and not self._ended.wait(self._grace):
            self._end(RankFailure(text, ()))


def end_process(failure: RankFailure) -> None:
    """Says what happened, to torchrun too, and ends the process whatever its other threads wait for."""
    try:
        raise failure
    except RankFailure as error:
        write_error_file(error)
        report(error)
    sys.stderr.flush()
    os._exit(RUN_FAILED)
