"""Which tile the norm kernels take: a pure function of the width. Letters: D width."""

from __future__ import annotations

from dataclasses import dataclass

from gemworks.jagged.jagged import next_power_of_two


@dataclass(frozen=True)
class NormConfig:
    """Rows per tile, warps per program, and tiles in flight (where a program has more than one)."""

    rows: int
    num_warps: int
    stages: int = 1


# (D, whether columns are summed) -> what `gemworks.jagged.tune.use_table` put in force; empty as shipped.
TUNED: dict[tuple[int, bool], NormConfig] = {}


def norm_config(width: int, *, sums_columns: bool = False) -> NormConfig:
    """32 values per thread (four 16-byte vectors in bf16), 16 of narrow rows; one warp owns a row as long as it can.

    A row that is spread over several warps pays a trip through shared memory for every reduction; narrow rows share a
    program. A backward that also sums columns (gradients of weight and bias) holds three values more per element: it
    gets half as many, and for narrow rows one wide program per multiprocessor, so that there are few sums to add up.
    Measured on one H200 (benchmarks/norm_variants.py): dropping what was read from the cache first gains nothing.

    >>> norm_config(512), norm_config(8192).num_warps
    (NormConfig(rows=2, num_warps=1, stages=1), 8)
    """
    if tuned := TUNED.get((width, sums_columns)):
        return tuned
    block = max(next_power_of_two(width), 16)
    if block <= 256:
        return NormConfig(8192 // block, 16, 3) if sums_columns else NormConfig(2048 // block, 4)
    warp_values = 512 if sums_columns else 1024
    return NormConfig(max(warp_values // block, 1), max(block // warp_values, 1), 3 if sums_columns else 1)
