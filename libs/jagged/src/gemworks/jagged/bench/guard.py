"""Keeps a run alive when a peer hangs, or leaves the device unusable: the process starts itself again without it."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field


@dataclass
class State:
    """What a process that goes on needs to know; the rows are in the CSV already.

    Attributes:
        began: wall clock at the start of the run, in seconds.
        group: index of the group of cases that is measured.
        broken: contender -> why this group has no row of it.
        failed: cases without a number of ours.
    """

    began: float = field(default_factory=time.time)
    group: int = 0
    broken: dict[str, str] = field(default_factory=dict)
    failed: int = 0

    @property
    def seconds(self) -> float:
        return time.time() - self.began


class Guard:
    """`enter` names what runs now; when it runs for longer than `limit_s`, the run goes on without it."""

    def __init__(self, state: State, arguments: list[str], limit_s: float, *, active: bool) -> None:
        self.state, self._arguments, self._limit_s, self._active = state, arguments, limit_s, active
        self._name, self._since = "", time.monotonic()
        if active:
            threading.Thread(target=self._watch, daemon=True).start()

    def enter(self, name: str) -> None:
        self._since, self._name = time.monotonic(), name

    def leave(self) -> None:
        self._name = ""

    def check_device(self, synchronize: Callable[[], None], name: str, reason: str) -> None:
        """After an exception: where the device answers nothing any more, start again without that contender."""
        try:
            synchronize()
        except Exception as error:  # of whatever type: the context is lost
            self._restart(name, f"{reason}; {type(error).__name__} at the next call: the device context was lost")

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            name, since = self._name, self._since
            if name and time.monotonic() - since > self._limit_s:
                self._restart(name, f"stopped after {self._limit_s:.0f} s: it hung, or compiled for longer")

    def _restart(self, name: str, reason: str) -> None:
        if not self._active:
            raise RuntimeError(f"{name}: {reason}")
        self.state.broken[name] = f"cannot run: {reason}"
        print(f"  {name}: {reason}; going on in a new process", flush=True)
        sys.stdout.flush()
        os.execv(  # not a child: the device context of this process has to end first
            sys.executable,
            [
                sys.executable,
                "-m",
                "gemworks.jagged.bench",
                *self._arguments,
                "--resume",
                json.dumps(asdict(self.state)),
            ],
        )
