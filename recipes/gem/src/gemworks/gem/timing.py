"""Where the time of a step goes: waiting for data, forward, backward, optimizer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

PHASES: tuple[str, ...] = ("forward", "backward", "optimizer")


class StepClock:
    """Wall time, samples, tokens and FLOPs of training steps; time outside of `wait` and `work` is not counted.

    The phases lie inside `work`; what they leave of it is moving batches, metrics and bookkeeping.
    """

    def __init__(self) -> None:
        self.wait_seconds = self.work_seconds = self.flops = 0.0
        self.forward_seconds = self.backward_seconds = self.optimizer_seconds = 0.0
        self.num_steps = self.num_samples = self.num_tokens = 0

    @property
    def seconds(self) -> float:
        return self.wait_seconds + self.work_seconds

    def add(self, other: StepClock) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def per_step_ms(self, what: str) -> float:
        """Mean milliseconds per step of "wait", "work" or a phase."""
        return 1e3 * getattr(self, f"{what}_seconds") / max(self.num_steps, 1)


class PhaseTimer:
    """Seconds per phase: wall time on a CPU, the stream's own time between two events on a GPU.

    Args:
        device: where the phases run.

    >>> timer = PhaseTimer(torch.device("cpu"))
    >>> with timer("forward"):
    ...     time.sleep(0.01)
    >>> timer.drain()["forward"] >= 0.01, timer.drain()["forward"]
    (True, 0.0)
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        with torch.profiler.record_function(f"gem::{phase}"):
            if self._on_gpu:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                yield
                end.record()
                self._events.append((phase, begin, end))
            else:
                began = time.perf_counter()
                yield
                self._seconds[phase] += time.perf_counter() - began

    def drain(self) -> dict[str, float]:
        """Seconds by phase since the last call; on a GPU it waits for the events."""
        for phase, begin, end in self._events:
            end.synchronize()
            self._seconds[phase] += begin.elapsed_time(end) / 1e3
        self._events.clear()
        drained, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return drained
