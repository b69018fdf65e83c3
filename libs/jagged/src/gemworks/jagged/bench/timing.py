"""Times closures in turn, and the ceilings of the machine that the times are read against."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import quantiles

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 cache
LEAD_CYCLES = 1_500_000  # about a millisecond in which the host gets ahead of the device


@dataclass(frozen=True)
class Time:
    """Median and the 20th and 80th percentile, in ms."""

    ms: float
    ms_p20: float
    ms_p80: float

    @classmethod
    def of(cls, samples: list[float]) -> Time:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        cuts = quantiles(samples, n=10, method="inclusive")
        return cls(cuts[4], cuts[1], cuts[7])


class Clock:
    """Times one call: on a CUDA device between two events, with a cold L2 and the host ahead; else by the wall."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if self.cuda else None

    def sample(self, run: Callable[[], object], repeats: int) -> list[float]:
        if not self.cuda:
            out = []
            for _ in range(repeats):
                begin = time.perf_counter()
                run()
                out.append((time.perf_counter() - begin) * 1e3)
            return out
        assert self._flush is not None
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in events:
            self._flush.zero_()
            torch.cuda._sleep(LEAD_CYCLES)
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]


def time_in_turn(
    clock: Clock,
    runs: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    repeats: int,
    round_ms: float = float("inf"),
    enter: Callable[[str], None] = lambda name: None,
) -> tuple[dict[str, Time], dict[str, Exception]]:
    """Each closure `repeats` times a round, round after round, so that a drift of the clock meets all of them.

    Args:
        round_ms: what the repeats of one closure in one round may take; at least one is made.
        enter: called with a name before its closure runs.

    Returns:
        Times, and what the closures raised that have none; the others go on without them.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    errors: dict[str, Exception] = {}

    def step(name: str, repeats: int) -> list[float]:
        enter(name)
        try:
            return clock.sample(runs[name], repeats)
        except Exception as error:  # of any kind: it is reported as the result of this closure
            errors[name] = error
            return []

    counts = {}
    for name in runs:
        first = step(name, 2)  # compiles and warms up
        counts[name] = max(1, int(min(repeats, round_ms / max(first[-1], 1e-6)))) if first else 0
    for _ in range(rounds):
        for name in runs:
            if name not in errors:
                samples[name] += step(name, min(repeats, counts[name]))
    return {name: Time.of(x) for name, x in samples.items() if name not in errors}, errors


@dataclass(frozen=True)
class Ceilings:
    copy_gbps: float
    bf16_tflops: float
    clock_mhz: float | None


def measure_ceilings(clock: Clock, device: torch.device) -> Ceilings:
    """Read + write of a large copy, and a square bf16 matrix product, both of random data."""
    size, side = (1 << 29, 8192) if clock.cuda else (1 << 20, 128)

    def copy_ms() -> float:
        x = torch.randn(size, device=device, dtype=torch.bfloat16)
        y = torch.empty_like(x)
        return Time.of(clock.sample(lambda: y.copy_(x), 10)[2:]).ms

    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = Time.of(clock.sample(lambda: a @ b, 10)[2:]).ms
    mhz = None
    if clock.cuda:
        try:
            mhz = float(torch.cuda.clock_rate(device))
        except (RuntimeError, ModuleNotFoundError, ImportError):  # needs pynvml
            mhz = None
    return Ceilings(4 * size / copy_ms() / 1e6, 2 * side**3 / product / 1e9, mhz)
