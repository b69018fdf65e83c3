"""Launching the Triton casts: shapes, grids and tile sizes. Codes and scales are bit-equal to the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from gemworks.precision.casts import CastSpec
from gemworks.precision.formats import Format
from gemworks.precision.hadamard import hadamard_signs
from gemworks.precision.kernel_cast import (
    cast_both_kernel,
    cast_rows_kernel,
    cast_square_kernel,
)
from gemworks.precision.kernel_square_tile import cast_square_tile_kernel
from gemworks.precision.kernel_tile import cast_tile_kernel
from gemworks.precision.launch import integers, launch
from gemworks.precision.mxtensor import MXTensor, padded_rows
from gemworks.precision.quantization import ROW_BLOCK_SIZES, SQUARE_BLOCK_SIZES, check_input
from gemworks.precision.rng import STREAM_COLUMNS, STREAM_ROWS
from gemworks.precision.tiles import ALONG_COLUMNS, ALONG_ROWS, TileConfig, square_config, tile_config
from gemworks.precision.triton_tiles import (
    TilePlanes,
    TileSetup,
    cast_flags,
    fits_tiles,
    new_count,
    packs,
    plane_of,
    planes_of,
    tile_planes,
    tile_setup,
    tile_words,
    width_of,
)
from torch import Tensor


@dataclass(frozen=True)
class CastConfig:
    """Tile of a cast kernel."""

    rows: int
    columns: int
    num_warps: int


def rows_config(block: int, regroup: bool, hadamard: int, transposed: bool, stochastic: bool) -> CastConfig:
    """Tile of the one-direction cast: a pure function of what the kernel does.

    `transposed` means that the quantised dim is the strided one in memory (a column cast of a row-major matrix).
    """
    width = max(block, 128 if regroup else 32, hadamard)
    if transposed:
        return CastConfig(32 if stochastic else 64, max(width, 128), 4 if width <= 128 else 8)
    return CastConfig(max(1, 4096 // max(width, 256)), max(width, 256), 4)


@dataclass(frozen=True)
class BothConfig:
    """Tile of the two-direction cast, and the strips in which it is read."""

    rows: int
    columns: int
    sub_rows: int
    sub_columns: int
    num_warps: int


def both_config(block: int, regroup: bool, stochastic: bool) -> BothConfig:
    """Tile of the two-direction cast: a pure function of what the kernel does."""
    if stochastic:
        return BothConfig(128, 128, 32, 32, 8)
    return BothConfig(128, 128, 64, 64, 8)


def two_axes(num_row_tiles: int, num_column_tiles: int) -> tuple[tuple[int, int], bool]:
    """A grid, and whether its axes are exchanged: the second axis of a CUDA grid ends at 65,535."""
    swap = num_column_tiles > 65535
    return ((num_column_tiles, num_row_tiles) if swap else (num_row_tiles, num_column_tiles)), swap


def seed_and_step(spec: CastSpec) -> tuple[int, int]:
    """Arguments of the random words; zeros when rounding to nearest."""
    return (spec.stochastic.seed, spec.stochastic.step) if spec.stochastic is not None else (0, 0)


@lru_cache(maxsize=256)
def _cast_setup(
    config: TileConfig, spec: CastSpec, block: int, directions: int, packed: bool, ragged: bool
) -> TileSetup:
    return tile_setup(config, spec, block, directions, PACKED=packed, RAGGED=ragged)


def cast_tiles(x: Tensor, spec: CastSpec, block: int, written: TilePlanes, directions: int) -> None:
    """Run the tile kernel."""
    num_rows, num_columns = x.shape
    packed, ragged = packs(x), num_rows % 16 != 0
    setup = _cast_setup(tile_config(block, spec.regroups, directions), spec, block, directions, packed, ragged)
    grid, column_tiles = setup.grid(num_rows, num_columns)
    stride = x.stride(0) // 2 if packed else x.stride(0)
    launch(
        cast_tile_kernel,
        grid,
        (
            x,
            *written.tensors,
            padded_rows(num_rows),
            num_columns,
            stride,
            column_tiles,
            num_rows,
        ),
        setup.constants,
        setup.options,
        # What the kernel writes is new, so aligned; `fits_tiles` leaves sizes of one kind.
        (setup, packed or x.dtype, stride % 16 == 0, x.data_ptr() % 16 == 0),
        (torch.int32 if packed else None, *tile_words(directions)),
    )


def triton_cast(x: Tensor, dim: int | None, spec: CastSpec, block: int | None = None) -> tuple[MXTensor, Tensor]:
    """`casts.cast` by a Triton kernel: one read of x, one write of codes and scales.

    Args:
        x: `[M, K]`, any strides.
        dim: 0, 1, or None for squares.
        spec: the cast.
        block: overrides the kind's block (attention heads: 64, 128, 256).
    """
    block = spec.block if block is None else block
    if dim is None:
        return _cast_square(x, spec, block)
    front = check_input(x, dim, block, ROW_BLOCK_SIZES)
    assert front is not None, "dim was given"
    if x.dim() != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected 2 dims; flatten the leading dims first")
    rows = x if front == 1 else x.t()
    num_rows, num_columns = rows.shape
    width = width_of(spec, block)
    straight, across = fits_tiles(rows, spec, block), fits_tiles(rows.t(), spec, block)
    if rows.numel() and (straight or across):
        tiles, directions = (rows, ALONG_ROWS) if straight else (rows.t(), ALONG_COLUMNS)
        written = tile_planes(tiles, spec, block, directions)
        cast_tiles(tiles, spec, block, written, directions)
        shape = (x.shape[0], x.shape[1])
        plane = plane_of(written.codes, written.scales, front, shape, width, spec)
        return plane, written.inexact
    inexact = torch.zeros((), dtype=torch.int64, device=x.device)
    size = spec.hadamard.size if spec.hadamard is not None else 0
    padded = -(-num_columns // size) * size if size else num_columns
    packed = -(-padded // 2) if spec.format is Format.E2M1 else padded
    codes = torch.empty(num_rows, packed, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_rows, -(-padded // width), dtype=torch.uint8, device=x.device)
    if codes.numel():
        config = rows_config(block, spec.regroups, size, rows.stride(1) != 1, spec.stochastic is not None)
        signs = hadamard_signs(spec.hadamard, x.device) if spec.hadamard is not None else inexact
        grid, swap = two_axes(-(-num_rows // config.rows), -(-padded // config.columns))
        constants = {
            "ROWS": config.rows,
            "COLUMNS": config.columns,
            "BLOCK": block,
            "STREAM": STREAM_ROWS if front == 1 else STREAM_COLUMNS,
            "HADAMARD": size,
            "SWAP": swap,
            **cast_flags(spec),
        }
        sizes = (num_rows, num_columns, *rows.stride(), *scales.stride(), padded)
        normalise = 1.0 / math.sqrt(size) if size else 1.0
        launch(
            cast_rows_kernel,
            (*grid, 1),
            (rows, codes, scales, inexact, signs, *sizes, *seed_and_step(spec), normalise),
            constants,
            {"num_warps": config.num_warps},
        )
    if front == 0:
        codes, scales = codes.t(), scales.t()
    shape = tuple(x.shape)
    return MXTensor(codes, scales, shape, front, width, spec.format, spec.scale_mode, spec.hadamard), inexact


def triton_cast_both(x: Tensor, spec: CastSpec) -> tuple[MXTensor, MXTensor, Tensor]:
    """`casts.cast_both` by one kernel: x is read once (2 B an element in bf16), both planes written (2.06 B)."""
    check_input(x, 1, spec.block, ROW_BLOCK_SIZES)
    if x.dim() != 2 or spec.format is Format.E2M1:
        raise ValueError(
            f"x: got shape {tuple(x.shape)}, format {spec.format.value!r}; expected 2 dims of e4m3 or e5m2"
        )
    num_rows, num_columns = x.shape
    if x.numel() and fits_tiles(x, spec, spec.block):
        written = tile_planes(x, spec, spec.block, ALONG_ROWS | ALONG_COLUMNS)
        cast_tiles(x, spec, spec.block, written, ALONG_ROWS | ALONG_COLUMNS)
        return (*planes_of(x, spec, spec.block, written), written.inexact)
    planes, tensors, inexact = empty_planes(x, spec)
    if x.numel():
        config = both_config(spec.block, spec.regroups, spec.stochastic is not None)
        constants = {
            "ROWS": config.rows,
            "COLUMNS": config.columns,
            "SUB_ROWS": config.sub_rows,
            "SUB_COLUMNS": config.sub_columns,
            "BLOCK": spec.block,
            **cast_flags(spec),
        }
        launch(
            cast_both_kernel,
            (-(-num_rows // config.rows), -(-num_columns // config.columns), 1),
            (x, *tensors, inexact, num_rows, num_columns, *x.stride(), *seed_and_step(spec)),
            constants,
            {"num_warps": config.num_warps},
        )
    return (*planes, inexact)


def empty_planes(x: Tensor, spec: CastSpec) -> tuple[tuple[MXTensor, MXTensor], tuple[Tensor, ...], Tensor]:
    """Uninitialised planes of `x [M, K]` both ways, the four tensors a kernel writes, and a zero count."""
    num_rows, num_columns = x.shape
    width = width_of(spec, spec.block)
    new = {"dtype": torch.uint8, "device": x.device}
    codes, scales = torch.empty(num_rows, num_columns, **new), torch.empty(num_rows, -(-num_columns // width), **new)
    codes_t, scales_t = (
        torch.empty(num_columns, num_rows, **new),
        torch.empty(num_columns, -(-num_rows // width), **new),
    )
    inexact = torch.zeros((), dtype=torch.int64, device=x.device)
    shape, common = (num_rows, num_columns), (width, spec.format, spec.scale_mode)
    planes = MXTensor(codes, scales, shape, 1, *common), MXTensor(codes_t.t(), scales_t.t(), shape, 0, *common)
    return planes, (codes, scales, codes_t, scales_t), inexact


def _cast_square(x: Tensor, spec: CastSpec, block: int) -> tuple[MXTensor, Tensor]:
    check_input(x, None, block, SQUARE_BLOCK_SIZES)
    if x.dim() != 2 or spec.format is Format.E2M1:
        raise ValueError(
            f"x: got shape {tuple(x.shape)}, format {spec.format.value!r}; expected 2 dims of e4m3 or e5m2"
        )
    inexact = new_count(x, spec)
    num_rows, num_columns = x.shape
    width = width_of(spec, block)
    codes = torch.empty(num_rows, num_columns, dtype=torch.uint8, device=x.device)
    scales = torch.empty(-(-num_rows // width), -(-num_columns // width), dtype=torch.uint8, device=x.device)
    # As cuBLAS takes them: blocks of the contraction contiguous, padded to four with ones.
    padded = -(-scales.shape[1] // 4) * 4
    wide = scales
    if width == 128:
        wide = torch.empty(scales.shape[0], padded, dtype=torch.float32, device=x.device)
    if fits_square_tiles(x, spec, block):
        ragged, stride = num_rows % 16 != 0, x.stride(0) // 2
        setup = _square_tile_setup(square_config(block, spec.regroups), spec, block, ragged)
        grid, column_tiles = setup.grid(num_rows, num_columns)
        launch(
            cast_square_tile_kernel,
            grid,
            (x, codes, scales, wide, inexact, num_columns, stride, column_tiles, padded, num_rows),
            setup.constants,
            setup.options,
            (setup, stride % 16 == 0, x.data_ptr() % 16 == 0, width),
            (torch.int32, torch.int32),
        )
    elif x.numel():
        seed, step = seed_and_step(spec)
        tile = 128 if width == 128 else 64
        launch(
            cast_square_kernel,
            (-(-num_rows // tile), -(-num_columns // tile), 1),
            (
                x,
                codes,
                scales,
                wide,
                inexact,
                num_rows,
                num_columns,
                x.stride(0),
                x.stride(1),
                seed,
                step,
                padded,
            ),
            *square_constants(spec, block, tile),
            (spec, block, x.dtype, x.data_ptr() % 16 == 0, integers(*x.shape, *x.stride(), seed, step, padded)),
        )
    factors = wide.t() if width == 128 else None
    shape = (num_rows, num_columns)
    return MXTensor.unchecked(codes, scales, factors, shape, None, width, spec.format, spec.scale_mode), inexact


def fits_square_tiles(x: Tensor, spec: CastSpec, block: int) -> bool:
    """Can the kernel of bf16 tiles make these squares? E5M2 is regrouped by the general one alone."""
    plain = spec.format is Format.E4M3 or not spec.regroups
    return plain and x.numel() > 0 and fits_tiles(x, spec, block) and packs(x)


@lru_cache(maxsize=256)
def _square_tile_setup(config: TileConfig, spec: CastSpec, block: int, ragged: bool) -> TileSetup:
    setup = tile_setup(config, spec, block, ALONG_ROWS, RAGGED=ragged)
    del setup.constants["DIRECTIONS"]
    return setup


@lru_cache(maxsize=256)
def square_constants(spec: CastSpec, block: int, tile: int) -> tuple[dict[str, int | bool], dict[str, int]]:
    """Constants and options of the kernel of any squares, in programs of `tile` rows and columns."""
    return {"TILE": tile, "BLOCK": block, **cast_flags(spec)}, {"num_warps": 8 if tile == 128 else 4}
