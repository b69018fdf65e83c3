"""How long compute really waits for copies: events around every wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gemworks.netmem.arena import Fence
from gemworks.netmem.movers import CudaMover


class MeteredMover(CudaMover):
    """As `CudaMover`; while `measure_ms` runs something, it takes the time of every wait of the compute stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None

    def compute_waits(self, fence: Fence) -> None:
        if self._waits is None:
            super().compute_waits(fence)
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        before.record(stream)
        super().compute_waits(fence)
        after.record(stream)
        self._waits.append((before, after))

    def measure_ms(self, run: Callable[[], Any]) -> float:
        """Milliseconds that compute stands still for copies while `run` is executed on the device."""
        torch.cuda.synchronize(self._device)
        self._waits = []
        try:
            run()
            torch.cuda.synchronize(self._device)
            return sum(before.elapsed_time(after) for before, after in self._waits)
        finally:
            self._waits = None
