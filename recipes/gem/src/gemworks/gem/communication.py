"""How long a step of several ranks spends in collectives, and how much of that nothing hides: one step now and then.

Collectives run inside forward and backward, on threads and streams of their own, so clocks around phases cannot see
them. A profiler can; it costs some of the step that it watches, hence not more than one in ten seconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType, _profiler_enabled
from torch.profiler import ProfilerActivity, profile

EVERY_SECONDS = 10.0
SKIPPED_STEPS = 1  # the first one starts what later ones have


@dataclass(frozen=True)
class Communication:
    """Of one step on this rank, waiting for other ranks included.

    Attributes:
        ms: in which some collective ran.
        exposed_ms: of that, with no kernel and no copy on the GPU beside it; None on a CPU, where gloo hides nothing.
    """

    ms: float
    exposed_ms: float | None


class CommunicationProbe:
    """Watches one step in every ten seconds; `with probe(): step`.

    Args:
        device: of the steps.
        alone: a process on its own has nothing to watch.
        every_seconds: between two watched steps.

    Attributes:
        last: of the step watched last; None before the first, and while somebody else profiles.
    """

    def __init__(self, device: torch.device, *, alone: bool, every_seconds: float = EVERY_SECONDS) -> None:
        self._device, self._alone, self._every = device, alone, every_seconds
        self._num_steps, self._next = 0, 0.0
        self.last: Communication | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self._num_steps += 1
        late = self._num_steps > SKIPPED_STEPS and time.monotonic() >= self._next
        if self._alone or not late or _profiler_enabled():
            yield
            return
        cuda = self._device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=True) as profiler:
            yield
            if cuda:
                torch.cuda.synchronize(self._device)
        self.last = measure(profiler.events() or (), cuda=cuda)
        self._next = time.monotonic() + self._every


def measure(events: Sequence[Any], *, cuda: bool) -> Communication:
    """Time in collectives, from a profiler's events: NCCL's kernels on a GPU, what gloo records on a CPU."""
    moves: list[tuple[float, float]] = []
    busy: list[tuple[float, float]] = []
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if not cuda:
            if event.name.startswith("gloo:"):
                moves.append(span)
        elif event.device_type == DeviceType.CUDA:
            (moves if "nccl" in event.name.lower() else busy).append(span)
    moves, busy = union(moves), union(busy)
    total = sum(b - a for a, b in moves)
    hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in moves for c, d in busy if c < b and d > a) if cuda else 0
    return Communication(total / 1e3, (total - hidden) / 1e3 if cuda else None)


def union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """What the spans cover, in order and disjoint.

    >>> union([(5, 6), (1, 3), (2, 4)])
    [(1, 4), (5, 6)]
    """
    merged: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return merged
