"""Tiles of the fast casts, alone and behind a norm or an activation: pure functions of what the kernel does.

A thread takes eight rows by eight columns where rows * columns = 2048 * warps. Blocks of 32 rows stay in one warp where
a tile is 64 columns wide (8 threads across, 4 down), so that their maxima are exchanged by shuffles alone.
"""

from __future__ import annotations

from dataclasses import dataclass

ALONG_ROWS, ALONG_COLUMNS = 1, 2


@dataclass(frozen=True)
class TileConfig:
    """Rows (a multiple of 32, and of 128 for wide column blocks), columns and warps of one program.

    max_registers: a limit for the compiler. two_passes: norm + cast in two kernels, the sum and statistics first.
    """

    rows: int
    columns: int
    num_warps: int
    max_registers: int | None = None
    two_passes: bool = False


def tile_config(block: int, regroup: bool, directions: int) -> TileConfig:
    """Tile of the cast along rows (1), columns (2) or both (3)."""
    if directions == ALONG_ROWS:
        return TileConfig(32, 256, 4)
    if directions == ALONG_COLUMNS or (block == 32 and not regroup):
        return TileConfig(128, 64, 4)
    return TileConfig(128, 128, 8)


def activation_tile_config(block: int, regroup: bool, directions: int) -> TileConfig:
    """Tile of activation + cast."""
    return tile_config(block, regroup, directions)


Shape = tuple[int, int, int, int | None]


def tile_candidates(block: int, regroup: bool, directions: int) -> list[TileConfig]:
    """What the benchmark's `--tune` tries: few, as each is a kernel to compile."""
    wide = block == 128 or regroup
    both: list[Shape] = [(128, 128, 8, None), (128, 128, 8, 80), (128, 128, 16, None), (128, 128, 16, 64)]
    both += [(128, 256, 16, None), (256, 128, 16, None)]
    if not wide:
        both += [(128, 64, 4, None), (128, 64, 4, 80), (128, 64, 8, None), (256, 64, 8, None)]
        both += [(64, 128, 4, None), (64, 64, 2, None), (64, 64, 4, None)]
    rows: list[Shape] = [(32, 256, 4, None), (64, 128, 4, None), (64, 256, 8, None), (32, 256, 8, None)]
    columns: list[Shape] = [(128, 64, 4, None), (128, 64, 8, None), (128, 128, 8, None), (256, 64, 8, None)]
    columns += [(256, 128, 16, None), (128, 32, 2, None)]
    shapes = {ALONG_ROWS: rows, ALONG_COLUMNS: columns, ALONG_ROWS | ALONG_COLUMNS: both}[directions]
    least_rows = 128 if wide and directions & ALONG_COLUMNS else 1
    least_columns = 128 if wide and directions & ALONG_ROWS else 1
    return [TileConfig(*shape) for shape in shapes if shape[0] >= least_rows and shape[1] >= least_columns]


def norm_sum_width(num_columns: int) -> int:
    """Columns that the first of two passes over a norm reads at a time."""
    return min(4096, max(16, 1 << (num_columns - 1).bit_length()))


def norm_tile_config(num_columns: int, wide: bool) -> TileConfig:
    """Tile of norm + cast: whole rows in registers where blocks are 32 rows high and a row has at most 1024 columns,
    otherwise two passes.
    """
    if wide:
        return TileConfig(128, 128, 8, None, True)
    if num_columns > 1024:
        return TileConfig(128, 64, 4, None, True)
    columns = min(1024, max(128, 1 << (num_columns - 1).bit_length()))
    return TileConfig(32, columns, max(2, columns // 64), 128 if columns == 1024 else None)


def norm_tile_candidates(num_columns: int, wide: bool) -> list[TileConfig]:
    """What the benchmark's `--tune` tries for norm + cast: in one pass, then in two."""
    once: list[Shape]
    two: list[Shape]
    if wide:
        once = [(128, 128, 8, 128)]
        two = [(128, 128, 8, None), (128, 128, 8, 80), (128, 128, 16, None), (128, 128, 16, 64)]
        two += [(128, 256, 16, None), (256, 128, 16, None)]
    else:
        once = [(32, 1024, 16, 128)]
        if num_columns <= 512:
            once = [(32, 512, 8, None), (32, 512, 8, 96), (32, 512, 8, 80), (32, 512, 16, 64), (64, 512, 16, None)]
        elif num_columns <= 1024:
            once = [(32, 1024, 16, None), (32, 1024, 16, 64), (32, 1024, 32, 64), (32, 512, 8, 96)]
        two = [(128, 128, 8, None), (128, 64, 4, None), (128, 64, 8, None), (128, 128, 16, None)]
        two += [(64, 128, 4, None), (256, 64, 8, None)]
    return [TileConfig(*shape) for shape in once] + [TileConfig(*shape, True) for shape in two]
