"""Launching norm + cast, in tiles or in general, and the norm's gradient."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from gemworks.precision import triton_squares
from gemworks.precision.casts import CastSpec, cast_squares
from gemworks.precision.constants import kept_zeros
from gemworks.precision.kernel_norm import norm_cast_kernel as general_kernel
from gemworks.precision.kernel_norm_backward import norm_backward_kernel
from gemworks.precision.kernel_norm_tile import norm_cast_kernel as tile_kernel
from gemworks.precision.launch import launch
from gemworks.precision.mxtensor import MXTensor, padded_rows
from gemworks.precision.norm import NormCast
from gemworks.precision.tiles import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    TileConfig,
    fused_tile_config,
    norm_config,
    norm_sum_tile,
    norm_turn,
)
from gemworks.precision.triton_casts import empty_planes, seed_and_step
from gemworks.precision.triton_squares import empty_squares, planes_of_squares
from gemworks.precision.triton_tiles import (
    TilePlanes,
    TileSetup,
    cast_flags,
    fits_tiles,
    packs,
    planes_of,
    tile_planes,
    tile_setup,
    tile_words,
)
from torch import Tensor


@dataclass(frozen=True)
class Operands:
    """What both kernels read and write beside planes: `[M, K]`, `[K]` (weight, bias), fp32 `[M]` (mean, rstd)."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    hidden: Tensor
    y: Tensor | None
    mean: Tensor
    rstd: Tensor


def triton_norm_cast(
    x: Tensor,
    weight: Tensor,
    spec: CastSpec,
    norm: str,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    columns: bool,
    square: bool,
    return_y: bool,
) -> NormCast:
    """`norm_cast` by the kernel that fits."""
    x = x.contiguous()
    residual = residual.contiguous() if residual is not None else None
    hidden = torch.empty_like(x) if residual is not None else x
    tiles = fits_tiles(x, spec, spec.block) and packs(x) and (residual is None or packs(residual))
    fused = not square or (triton_squares.IN_EPILOGUES and tiles and triton_squares.fits_squares(x, spec))
    y = torch.empty_like(x) if return_y or not fused else None
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    # The norm that has no mean writes none: one zero stands for every row's.
    mean = torch.empty_like(rstd) if norm == "layer" else kept_zeros(x.device, torch.float32, 1).expand(x.shape[0])
    tensors = Operands(x, weight, bias, residual, hidden, y, mean, rstd)
    # Where squares are made of y, the norm's own planes are not read: of its variants with y, the one with both planes
    # is what a GPU has checked.
    if tiles:
        planes, inexact = _norm_tiles(tensors, spec, norm, eps, columns, square and fused)
    else:
        planes, inexact = _norm_general(tensors, spec, norm, eps, columns)
    if not fused:
        assert y is not None
        made = cast_squares(y, spec, "triton")
        return NormCast(made.rows, made.transposed, hidden, mean, rstd, y if return_y else None, made.inexact)
    return NormCast(planes[0], planes[1] if columns else None, hidden, mean, rstd, y, inexact)


def _norm_general(
    on: Operands, spec: CastSpec, norm: str, eps: float, columns: bool
) -> tuple[tuple[MXTensor, MXTensor], Tensor]:
    """Any size, dtype and rounding, in one kernel that reads x for the statistics and again for the result."""
    num_rows, num_columns = on.x.shape
    planes, tensors, inexact = empty_planes(on.x, spec)
    rows_tile, columns_tile, num_warps = norm_config(num_columns, spec.block == 128 or spec.regroups)
    constants = {
        "HAS_RESIDUAL": on.residual is not None,
        "HAS_BIAS": on.bias is not None,
        "SUBTRACT_MEAN": norm == "layer",
        "WRITE_Y": on.y is not None,
        "DIRECTIONS": 3 if columns else 1,
        "ROWS": rows_tile,
        "COLUMNS": columns_tile,
        "BLOCK": spec.block,
        **cast_flags(spec),
    }
    added = (on.x, on.residual if on.residual is not None else on.x)
    affine = (on.weight, on.bias if on.bias is not None else on.weight)
    written = (on.hidden, on.y if on.y is not None else on.x, on.mean, on.rstd, *tensors, inexact)
    launch(
        general_kernel,
        (-(-num_rows // rows_tile), 1, 1),
        (*added, *affine, *written, num_rows, num_columns, eps, *seed_and_step(spec)),
        constants,
        {"num_warps": num_warps},
    )
    return planes, inexact


# Steps of a program of the sum in one grid: what it costs to say that a share is finished is paid once for all of them.
NORM_STEPS = 4


@lru_cache(maxsize=256)
def _norm_setup(
    config: TileConfig,
    spec: CastSpec,
    directions: int,
    num_columns: int,
    has_residual: bool,
    has_bias: bool,
    subtract: bool,
    write_y: bool,
    ragged: bool,
    square: bool,
) -> TileSetup:
    rows, width = norm_sum_tile(config, num_columns)
    return tile_setup(
        config,
        spec,
        spec.block,
        directions,
        HAS_RESIDUAL=has_residual,
        HAS_BIAS=has_bias,
        SUBTRACT_MEAN=subtract,
        WRITE_Y=write_y,
        RAGGED=ragged,
        ROWS=rows,
        STEPS=min(NORM_STEPS, config.rows // rows),
        WIDTH=width,
        SQUARES=square,
    )


def _norm_tiles(
    on: Operands, spec: CastSpec, norm: str, eps: float, columns: bool, square: bool
) -> tuple[tuple[MXTensor, MXTensor], Tensor]:
    """Contiguous bf16: the sum with each row's statistics, and tiles of the sum, in one grid (decision 0252)."""
    num_rows, num_columns = on.x.shape
    directions = ALONG_ROWS | ALONG_COLUMNS if columns else ALONG_ROWS
    config = fused_tile_config(spec.block, spec.regroups, directions)
    given = (on.residual is not None, on.bias is not None, norm == "layer", on.y is not None)
    flags = (*given, num_rows % 16 != 0, square)
    setup = _norm_setup(config, spec, directions, num_columns, *flags)
    column_tiles = -(-num_columns // config.columns)
    sizes = (padded_rows(num_rows), num_columns)
    row_blocks = -(-sizes[0] // config.rows)
    turn = min(row_blocks, norm_turn(config.rows, num_columns))
    sums = turn * (config.rows // int(setup.constants["ROWS"] * setup.constants["STEPS"]))
    programs = (-(-row_blocks // turn) + 1) * (sums + turn * column_tiles)
    # One kernel makes all zeros: the count of inexact codes, and behind it what tiles wait for.
    zeros = torch.zeros(row_blocks + 4, dtype=torch.int32, device=on.x.device)
    count, ready = zeros[:2].view(torch.int64)[0], zeros[4:]
    squares = empty_squares(num_rows, num_columns, on.x.device) if square else None
    written = tile_planes(on.x, spec, spec.block, directions, count) if squares is None else TilePlanes(*squares, count)
    added = (on.x, on.residual if on.residual is not None else on.hidden, on.hidden)
    affine = (on.weight, on.bias if on.bias is not None else on.weight, on.y if on.y is not None else on.hidden)
    arguments = (*added, *affine, on.mean, on.rstd, ready, *written.tensors, *sizes, column_tiles, num_rows, turn, eps)
    pairs = torch.int32
    words = (pairs, pairs, pairs, None, None, pairs, None, None, None, *tile_words(directions))
    launch(tile_kernel, (programs, 1, 1), arguments, setup.constants, setup.options, None, words)
    if squares is not None:
        return planes_of_squares(squares, num_rows, spec), count
    return planes_of(on.x, spec, spec.block, written, directions), count


NORM_PROGRAMS = 1024


def triton_norm_backward(
    dy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    norm: str,
    has_bias: bool,
    d_hidden: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`norm_backward` by one kernel, and two small sums."""
    dy, hidden = dy.contiguous(), hidden.contiguous()
    num_rows, num_columns = dy.shape
    width = max(16, 1 << (num_columns - 1).bit_length())
    rows = max(1, 2048 // width)
    share = -(-num_rows // (NORM_PROGRAMS * rows)) * rows
    programs = -(-num_rows // share)
    dx = torch.empty_like(hidden)
    sums = torch.empty(2 if has_bias else 1, programs, num_columns, dtype=torch.float32, device=dy.device)
    launch(
        norm_backward_kernel,
        (programs, 1, 1),
        (
            dy,
            hidden,
            weight,
            mean,
            rstd,
            d_hidden.contiguous() if d_hidden is not None else dy,
            dx,
            sums[0],
            sums[-1],
            num_rows,
            num_columns,
            share,
        ),
        {
            "SUBTRACT_MEAN": norm == "layer",
            "HAS_BIAS": has_bias,
            "ADD": d_hidden is not None,
            "ROWS": rows,
            "C": width,
        },
        {"num_warps": 8},
    )
    totals = sums.sum(1)
    return dx, totals[0], totals[1] if has_bias else None
