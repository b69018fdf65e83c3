"""Which tile the norm kernels take: a pure function of the width. Letters: D width."""

from __future__ import annotations

from dataclasses import dataclass

from gemworks.jagged.jagged import next_power_of_two


@dataclass(frozen=True)
class NormConfig:
    """Rows per tile, warps per program, tiles in flight (where a program has more than one), and the programs of a
    backward that sums columns per multiprocessor. `streams`: rows that are read leave the cache first.
    """

    rows: int
    num_warps: int
    stages: int = 1
    programs: int | None = None
    streams: bool = False

    @property
    def read_policy(self) -> str:
        return "evict_first" if self.streams else ""


# (D, whether columns are summed) -> what `gemworks.jagged.tune.use_table` put in force; empty as shipped.
TUNED: dict[tuple[int, bool], NormConfig] = {}


def norm_config(width: int, *, sums_columns: bool = False) -> NormConfig:
    """32 values per thread (four 16-byte vectors in bf16); one warp owns a row as long as it can.

    A row that is spread over several warps pays a trip through shared memory for every reduction; narrow rows share a
    program, so that each has 8 KiB in flight. A backward that also sums columns (gradients of weight and bias) holds
    three values more per element and gets half as many, or it would not leave registers for a second program.

    >>> norm_config(512), norm_config(8192).num_warps
    (NormConfig(rows=2, num_warps=1, stages=1, programs=None, streams=False), 8)
    """
    if tuned := TUNED.get((width, sums_columns)):
        return tuned
    block = next_power_of_two(width)
    warp_values = 512 if sums_columns else 1024
    if block <= 256:
        return NormConfig(4 * warp_values // max(block, 16), 4)
    return NormConfig(max(warp_values // block, 1), max(block // warp_values, 1), 3 if sums_columns else 1)
