"""What compute and copies over the host link cost one another while both use device memory.

A link's rate is measured on an idle GPU, but offloading happens beside kernels that wait for device memory themselves:
they lose some of its bandwidth to the copies, and the copies some of theirs. Both are measured in one run per
direction, a forward beside a stream of copies that outlasts it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gemworks.netmem.ledger import HBM, BandwidthLedger
from gemworks.netmem.movers import WAYS, Way

PIECE_BYTES = 32 << 20
# with fewer pieces inside the window their first and last end tell nothing of the rate
_MIN_PIECES = 4


@dataclass(frozen=True)
class Contention:
    """Copies and compute beside one another, one direction at a time.

    Attributes:
        bytes_per_s: rate of the host link beside compute, by way; at most the ledger's.
        seconds_per_byte: how much longer compute takes for each byte that moves beside it, by way.
    """

    bytes_per_s: dict[Way, float]
    seconds_per_byte: dict[Way, float]


def rate_within(ends_s: Sequence[float], window_s: float, piece_bytes: int) -> float | None:
    """Bytes per second of equal pieces that followed one another, from those that ended in `[0, window_s]`.

    None: too few of them to say.

    >>> rate_within([-1.0, 1.0, 2.0, 3.0, 4.0, 9.0], 5.0, 10)
    10.0
    >>> rate_within([1.0, 2.0], 5.0, 10)
    """
    inside = [t for t in ends_s if 0 <= t <= window_s]
    if len(inside) < _MIN_PIECES:
        return None
    return (len(inside) - 1) * piece_bytes / (inside[-1] - inside[0])


class _Traffic:
    """Copies over the host link one way, for as long as asked."""

    def __init__(self, way: Way, bytes_per_s: float, device: torch.device) -> None:
        self._bytes_per_s = bytes_per_s
        host = torch.empty(PIECE_BYTES, dtype=torch.uint8).pin_memory()
        there = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
        self._source, self._target = (there, host) if way == "up" else (host, there)
        self._stream = torch.cuda.Stream(device)

    def start(self, seconds: float, after: torch.cuda.Event) -> list[torch.cuda.Event]:
        """Queue that much at the link's rate, to begin after an event; an event ends each piece."""
        ends = []
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            for _ in range(int(seconds * self._bytes_per_s / PIECE_BYTES) + 1):
                self._target.copy_(self._source, non_blocking=True)
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record(self._stream)
        return ends


def measure_contention(
    run: Callable[[], Any],
    alone_s: float,
    ledger: BandwidthLedger,
    device: torch.device,
    clock: Callable[[Callable[[], Any]], tuple[Any, float]],
    repeats: int,
) -> Contention:
    """Run compute beside copies of each direction.

    Args:
        run: compute, such as a forward.
        alone_s: its time without copies.
        ledger: rates of the idle links.
        device: on a CPU nothing is measured: the ledger's rates, and a byte of device-memory traffic a byte.
        clock: calls what it is given and returns (its result, seconds); the device has finished by then.
        repeats: timed runs, of which the median counts.
    """
    rates: dict[Way, float] = {way: ledger.link(f"host.{way}").bytes_per_s for way in WAYS}
    seconds_per_byte = dict.fromkeys(WAYS, 1 / ledger.capacity[HBM])
    if device.type != "cuda":
        return Contention(rates, seconds_per_byte)
    for way in WAYS:
        traffic = _Traffic(way, rates[way], device)
        times: list[float] = []
        found: list[float] = []

        def beside(traffic: _Traffic = traffic) -> tuple[list[torch.cuda.Event], torch.cuda.Event, torch.cuda.Event]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()  # the clock's device sleeps first; copies meanwhile would be over before a short forward is
            pieces = traffic.start(2 * alone_s, begin)
            run()
            end.record()
            return pieces, begin, end

        for _ in range(repeats + 1):
            (pieces, begin, end), seconds = clock(beside)
            times.append(seconds)
            ends_s = [begin.elapsed_time(piece) / 1e3 for piece in pieces]
            rate = rate_within(ends_s, begin.elapsed_time(end) / 1e3, PIECE_BYTES)
            if rate is not None:
                found.append(rate)
        beside_s = statistics.median(times[1:])
        if found:
            rates[way] = min(rates[way], statistics.median(found))
        seconds_per_byte[way] = max(0.0, beside_s - alone_s) / (rates[way] * beside_s)
    return Contention(rates, seconds_per_byte)
