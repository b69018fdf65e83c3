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

    max_registers: a limit for the compiler.
    """

    rows: int
    columns: int
    num_warps: int
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """As a launch takes them."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, **limit}


def tile_config(block: int, regroup: bool, directions: int) -> TileConfig:
    """Tile of the cast along rows (1), columns (2) or both (3). Chosen by `bench --tune` on one H200."""
    if directions == ALONG_ROWS:
        return TileConfig(32, 256, 4)
    if directions == ALONG_COLUMNS:
        return TileConfig(256, 64, 8) if block == 32 and not regroup else TileConfig(128, 64, 4)
    if block == 32 and not regroup:
        return TileConfig(128, 64, 4)
    return TileConfig(128, 128, 8, 80)


def fused_tile_config(block: int, regroup: bool, directions: int) -> TileConfig:
    """Tile of the cast behind a norm or an activation."""
    if directions != ALONG_ROWS | ALONG_COLUMNS:
        return tile_config(block, regroup, directions)
    if block == 32 and not regroup:
        return TileConfig(128, 64, 4, 96)
    return TileConfig(128, 128, 8, 80)


def square_config(block: int, regroup: bool) -> TileConfig:
    """Tile of the cast of squares that is stored once; as wide and as high as a square of 128 where there are such."""
    return TileConfig(128, 128, 8) if block == 128 or regroup else TileConfig(128, 64, 4)


Shape = tuple[int, int, int, int | None]


def tile_candidates(block: int, regroup: bool, directions: int) -> list[TileConfig]:
    """What the benchmark's `--tune` tries: few, as each is a kernel to compile."""
    wide = block == 128 or regroup
    both: list[Shape] = [
        (128, 128, 8, None),
        (128, 128, 8, 80),
        (128, 128, 8, 96),
        (128, 128, 16, 64),
        (128, 256, 16, None),
    ]
    if not wide:
        both += [(128, 64, 4, None), (128, 64, 4, 72), (128, 64, 4, 96), (256, 64, 8, None), (64, 128, 4, None)]
    rows: list[Shape] = [(32, 256, 4, None), (64, 128, 4, None), (64, 256, 8, None), (32, 256, 8, None)]
    columns: list[Shape] = [(128, 64, 4, None), (128, 64, 8, None), (128, 128, 8, None), (256, 64, 8, None)]
    columns += [(256, 128, 16, None), (128, 32, 2, None)]
    shapes = {ALONG_ROWS: rows, ALONG_COLUMNS: columns, ALONG_ROWS | ALONG_COLUMNS: both}[directions]
    least_rows = 128 if wide and directions & ALONG_COLUMNS else 1
    least_columns = 128 if wide and directions & ALONG_ROWS else 1
    return [TileConfig(*shape) for shape in shapes if shape[0] >= least_rows and shape[1] >= least_columns]


def square_candidates(block: int, regroup: bool) -> list[TileConfig]:
    """The same for squares that are stored once."""
    shapes: list[Shape] = [(128, 128, 8, None), (128, 128, 16, None)]
    if block != 128 and not regroup:
        shapes += [(128, 64, 4, None), (64, 128, 4, None), (32, 256, 4, None), (64, 256, 8, None)]
    return [TileConfig(*shape) for shape in shapes]


def norm_config(num_columns: int, wide: bool) -> tuple[int, int, int]:
    """Rows and columns of a tile of the general norm + cast, and warps.
    Rows are the column plane's block, so that they stay in cache."""
    return (128, 128, 8) if wide else (32, 256 if num_columns > 128 else 128, 8)


def norm_sum_tile(config: TileConfig, num_columns: int) -> tuple[int, int]:
    """Rows and columns that a program of the sum reads at a time: 32 elements a thread, and rows that divide a tile's.

    >>> norm_sum_tile(TileConfig(128, 64, 4), 1024), norm_sum_tile(TileConfig(128, 64, 4), 10000)
    ((4, 1024), (1, 4096))
    """
    width = min(4096, max(16, 1 << (num_columns - 1).bit_length()))
    return min(config.rows, max(1, 1024 * config.num_warps // width)), width


def norm_turn(rows: int, num_columns: int) -> int:
    """Blocks of `rows` rows whose sums make one turn: 12 MiB of bf16, a fraction of an H200's cache of 50 MB, and more
    programs than run at a time."""
    return max(1, 12 * 2**20 // (2 * rows * num_columns))
