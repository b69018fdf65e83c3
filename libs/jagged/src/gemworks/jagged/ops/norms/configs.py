"""Which tile the norm kernels take: a pure function of the width. Letters: D width."""

from __future__ import annotations

from dataclasses import dataclass

from gemworks.jagged.jagged import next_power_of_two

WARPS_PER_SM = 16  # of a backward that sums columns: enough loads in flight, few enough partial sums
REGISTERS_PER_SM = 65_536  # of sm_90 and sm_100


@dataclass(frozen=True)
class NormConfig:
    """Rows per tile, warps per program, and tiles in flight (where a program has more than one).

    For a backward that sums columns also:

    Attributes:
        programs: per multiprocessor, with registers capped so that as many do fit. None: 16 warps' worth, not capped.
        columns: a row is pieces of that many columns (a power of two; rows is 1 then). None: one tile of the next
            power of two.
    """

    rows: int
    num_warps: int
    stages: int = 1
    programs: int | None = None
    columns: int | None = None

    def programs_per_sm(self) -> int:
        return self.programs or max(WARPS_PER_SM // self.num_warps, 1)

    def max_registers(self) -> int | None:
        """Per thread; None where there is nothing to cap (255 is the most that a thread may have).

        >>> NormConfig(1, 8, programs=2).max_registers(), NormConfig(1, 8).max_registers()
        (128, None)
        """
        if self.programs is None:
            return None
        registers = REGISTERS_PER_SM // (32 * self.num_warps * self.programs) // 8 * 8  # handed out in eights
        return registers if registers < 255 else None


# (D, whether columns are summed) -> what `gemworks.jagged.tune.use_table` put in force; empty as shipped.
TUNED: dict[tuple[int, bool], NormConfig] = {}


def norm_config(width: int, *, sums_columns: bool = False) -> NormConfig:
    """32 values per thread (four 16-byte vectors in bf16), 16 of narrow rows; one warp owns a row as long as it can.

    A row that is spread over several warps pays a trip through shared memory for every reduction; narrow rows share a
    program. A backward that also sums columns (gradients of weight and bias) holds three values more per element: it
    gets half as many, and for narrow rows one wide program per multiprocessor, so that there are few sums to add up.
    Measured on one H200 (benchmarks/norm_variants.py): dropping what was read from the cache first gains nothing.

    Such a backward starts as many programs as are meant to run at once. Those of powers of two fit by themselves; the
    masks of other widths take more registers than that leaves, so these are capped (not timed yet). Where 4
    does not divide the width, values are read one or two at a time and the cap would cost 56 to 170 bytes of spills.

    >>> norm_config(512).rows, norm_config(8192).num_warps, norm_config(3000, sums_columns=True).max_registers()
    (2, 8, 128)
    """
    if tuned := TUNED.get((width, sums_columns)):
        return tuned
    block = max(next_power_of_two(width), 16)
    if block <= 256:
        return NormConfig(8192 // block, 16, 3) if sums_columns else NormConfig(2048 // block, 4)
    warp_values = 512 if sums_columns else 1024
    rows, num_warps = max(warp_values // block, 1), max(block // warp_values, 1)
    if not sums_columns:
        return NormConfig(rows, num_warps)
    capped = block != width and width % 4 == 0
    return NormConfig(rows, num_warps, 3, programs=WARPS_PER_SM // num_warps if capped else None)
