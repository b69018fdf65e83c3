"""SIGTERM: the scheduler wants its machine back. The run saves itself at the next step and asks to be started again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from gemworks.gem.errors import Preempted


class StopRequest:
    """Notes a SIGTERM while it is entered; outside of the main thread, where Python has no signals, it notes nothing.

    with StopRequest() as stop:
        ...
        stop.check()  # raises Preempted once the signal has come

    Attributes:
        requested: the signal has come to this process.
        agree: makes that a decision of all ranks, each of which then calls `check`; set by whoever knows them.
    """

    def __init__(self) -> None:
        self.requested = False
        self.agree: Callable[[bool], bool] = bool
        self._before: Any = None
        self._installed = False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, self._before)
            self._installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.requested = True

    def check(self, *, alone: bool = False) -> None:
        """Raises `Preempted` if the signal has come, to any rank; with `alone` to this one."""
        if self.requested if alone else self.agree(self.requested):
            raise Preempted("stopped by SIGTERM; the same command goes on from the last checkpoint")
