"""Tiles of the fast cast and of norm + cast: pure functions of what the kernel does.

A thread takes eight rows by eight columns where rows * columns = 2048 * warps. Blocks of 32 rows stay in one warp where
a tile is 64 columns wide (8 threads across, 4 down), so that their maxima are exchanged by shuffles alone.
"""

from __future__ import annotations

from dataclasses import dataclass

ALONG_ROWS, ALONG_COLUMNS = 1, 2


@dataclass(frozen=True)
class TileConfig:
    """Rows (a multiple of 32, and of 128 for wide column blocks), columns and warps of one program."""

    rows: int
    columns: int
    num_warps: int
    max_registers: int | None = None


def tile_config(block: int, regroup: bool, directions: int) -> TileConfig:
    """Tile of the cast along rows (1), columns (2) or both (3)."""
    if directions == ALONG_ROWS:
        return TileConfig(32, 256, 4)
    if directions == ALONG_COLUMNS or (block == 32 and not regroup):
        return TileConfig(128, 64, 4)
    return TileConfig(128, 128, 8)


def tile_candidates(block: int, regroup: bool, directions: int) -> list[TileConfig]:
    """What the benchmark's `--tune` tries: few, as each is a kernel to compile."""
    wide = block == 128 or regroup
    shapes = {
        ALONG_ROWS: [(32, 256, 4), (64, 128, 4), (64, 256, 8), (16, 512, 4)],
        ALONG_COLUMNS: [(128, 64, 4), (128, 128, 8), (256, 64, 8), (256, 128, 16)],
        ALONG_ROWS | ALONG_COLUMNS: [(128, 64, 4), (256, 64, 8), (64, 128, 4), (128, 128, 8), (128, 256, 16)],
    }[directions]
    rows = 128 if wide and directions & ALONG_COLUMNS else 1
    columns = 128 if wide and directions & ALONG_ROWS else 1
    return [TileConfig(*shape) for shape in shapes if shape[0] >= rows and shape[1] >= columns]


def norm_tile_config(num_columns: int, wide: bool) -> TileConfig:
    """Tile of norm + cast: whole rows in registers where blocks are 32 rows high and a row has at most 1024 columns.

    Blocks of 128 rows do not fit; their tiles are read back from L2, so few programs at a time keep that in cache.
    """
    if wide:
        return TileConfig(128, 128, 8, 128)
    columns = min(1024, max(128, 1 << (num_columns - 1).bit_length()))
    return TileConfig(32, columns, max(2, columns // 64), 128 if columns == 1024 else None)


def norm_tile_candidates(wide: bool) -> list[TileConfig]:
    """What the benchmark's `--tune` tries for norm + cast."""
    if wide:
        return [TileConfig(128, 128, 8, 128), TileConfig(128, 128, 8), TileConfig(128, 256, 16, 128)]
    return [TileConfig(32, 512, 8), TileConfig(32, 512, 8, 128), TileConfig(32, 1024, 16), TileConfig(32, 256, 4)]
