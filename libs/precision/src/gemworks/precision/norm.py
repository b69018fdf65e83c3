"""Norm and cast together: `norm_cast` for planes, `norm_backward` for the gradient; trainable in `norm_linear`.

    h = x + residual,  y = norm(h) * weight + bias (rounded to x's dtype),  planes = quantise(y)

Whatever the backend, the planes are exactly those of the `y` it computed; `y` itself may differ in its last bit between
backends, as sums are ordered differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from gemworks.precision.backends import choose
from gemworks.precision.casts import CastSpec, cast, cast_squares, device_of
from gemworks.precision.mxtensor import MXTensor, padded_rows
from gemworks.precision.tiles import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    TileConfig,
    fused_tile_config,
    norm_sum_tile,
    norm_turn,
)
from torch import Tensor

if TYPE_CHECKING:
    from gemworks.precision.triton_casts import TileSetup

NORMS = ("rms", "layer")


@dataclass(frozen=True)
class NormCast:
    """Result of `norm_cast`.

    Attributes:
        rows, columns: planes of y along K and along M (None if not asked for). Of squares, columns is the square plane
            of y's transpose.
        hidden: x + residual in x's dtype (x itself without a residual).
        mean, rstd: fp32 `[M]`, for backward; mean is zero for RMSNorm.
        y: the normalised values, None unless asked for.
        inexact: count of inexact codes.
    """

    rows: MXTensor | None
    columns: MXTensor | None
    hidden: Tensor
    mean: Tensor
    rstd: Tensor
    y: Tensor | None
    inexact: Tensor


def norm_cast(
    x: Tensor,
    weight: Tensor,
    spec: CastSpec,
    *,
    norm: str = "rms",
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    columns: bool = True,
    square: bool = False,
    return_y: bool = False,
    backend: str = "auto",
) -> NormCast:
    """Residual addition, norm and cast: one kernel on a GPU.

    Args:
        x: `[M, K]`.
        weight, bias: `[K]`; bias only with `norm="layer"`.
        spec: the cast.
        norm: `rms` or `layer`.
        residual: `[M, K]`, added before the norm; the sum is returned as `hidden`.
        eps: added to the variance (mean square).
        columns: also the plane along M.
        square: quantise squares once, for both contractions (`cast_squares`); with columns.
        return_y: also y.
        backend: as in `choose`.

    Raises:
        ValueError: shapes, norm name, squares of one plane, or a Hadamard transform (which no fused norm can share
            between directions).
    """
    if norm not in NORMS:
        raise ValueError(f"norm: got {norm!r}, expected one of {NORMS}")
    if x.dim() != 2 or weight.shape != x.shape[1:] or (bias is not None and bias.shape != weight.shape):
        raise ValueError(f"x and weight: got {tuple(x.shape)} and {tuple(weight.shape)}, expected [M, K] and [K]")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual: got {tuple(residual.shape)} {residual.dtype}, expected x's {tuple(x.shape)} {x.dtype}"
        )
    if bias is not None and norm == "rms":
        raise ValueError("bias: RMSNorm has none; use norm='layer'")
    if spec.hadamard is not None:
        raise ValueError("hadamard: not fused with a norm; cast y separately")
    if square and not columns:
        raise ValueError("square: squares serve both contractions; leave columns set, or unset square")
    chosen = choose("cast", spec.kind, (0, 0, 0), device_of(x), backend).backend
    if chosen == "triton" and (x.is_cuda or backend == "triton") and x.numel():
        return _triton_norm_cast(x, weight, spec, norm, bias, residual, eps, columns, square, return_y)
    hidden = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    h = hidden.float()
    mean = h.mean(1) if norm == "layer" else torch.zeros(x.shape[0], device=x.device)
    centred = h - mean[:, None]
    rstd = (centred.square().mean(1) + eps).rsqrt()
    y = centred * rstd[:, None] * weight.float()
    if bias is not None:
        y = y + bias.float()
    y = y.to(x.dtype)
    if square:
        made = cast_squares(y, spec, "reference")
        kept = y if return_y else None
        return NormCast(made.rows, made.transposed, hidden, mean, rstd, kept, made.inexact)
    rows, inexact = cast(y, 1, spec, "reference")
    plane_columns = None
    if columns:
        plane_columns, more = cast(y, 0, spec, "reference")
        inexact = inexact + more
    return NormCast(rows, plane_columns, hidden, mean, rstd, y if return_y else None, inexact)


@lru_cache(maxsize=64)
def _zero(device: torch.device) -> Tensor:
    """fp32 `[1]`, never written: every row's mean where a norm has none."""
    return torch.zeros(1, dtype=torch.float32, device=device)


def norm_config(num_columns: int, wide: bool) -> tuple[int, int, int]:
    """Rows and columns of a tile and warps. Rows are the column plane's block, so that they stay in cache."""
    return (128, 128, 8) if wide else (32, 256 if num_columns > 128 else 128, 8)


def _triton_norm_cast(
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
    from gemworks.precision import triton_squares
    from gemworks.precision.triton_casts import fits_tiles, packs

    x = x.contiguous()
    residual = residual.contiguous() if residual is not None else None
    hidden = torch.empty_like(x) if residual is not None else x
    tiles = fits_tiles(x, spec, spec.block) and packs(x) and (residual is None or packs(residual))
    fused = not square or (triton_squares.IN_EPILOGUES and tiles and triton_squares.fits_squares(x, spec))
    y = torch.empty_like(x) if return_y or not fused else None
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if norm == "layer" else _zero(x.device).expand(x.shape[0])
    tensors = (x, weight, bias, residual, hidden, y, mean, rstd)
    # Where squares are made of y, the norm's own planes are not read: of its variants with y, the one with both planes
    # is what a GPU has checked.
    if tiles:
        planes, inexact = _norm_tiles(*tensors, spec, norm, eps, columns, square and fused)
    else:
        planes, inexact = _norm_general(*tensors, spec, norm, eps, columns)
    if not fused:
        assert y is not None
        made = cast_squares(y, spec, "triton")
        return NormCast(made.rows, made.transposed, hidden, mean, rstd, y if return_y else None, made.inexact)
    return NormCast(planes[0], planes[1] if columns else None, hidden, mean, rstd, y, inexact)


def _norm_general(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    hidden: Tensor,
    y: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    spec: CastSpec,
    norm: str,
    eps: float,
    columns: bool,
) -> tuple[tuple[MXTensor, MXTensor], Tensor]:
    """Any size, dtype and rounding, in one kernel that reads x for the statistics and again for the result."""
    from gemworks.precision.kernel_norm import norm_cast_kernel
    from gemworks.precision.launch import launch
    from gemworks.precision.triton_casts import cast_flags, empty_planes, seed_and_step

    num_rows, num_columns = x.shape
    planes, tensors, inexact = empty_planes(x, spec)
    rows_tile, columns_tile, num_warps = norm_config(num_columns, spec.block == 128 or spec.regroups)
    constants = {
        "HAS_RESIDUAL": residual is not None,
        "HAS_BIAS": bias is not None,
        "SUBTRACT_MEAN": norm == "layer",
        "WRITE_Y": y is not None,
        "DIRECTIONS": 3 if columns else 1,
        "ROWS": rows_tile,
        "COLUMNS": columns_tile,
        "BLOCK": spec.block,
        **cast_flags(spec),
    }
    added = (x, residual if residual is not None else x)
    affine = (weight, bias if bias is not None else weight)
    written = (hidden, y if y is not None else x, mean, rstd, *tensors, inexact)
    launch(
        norm_cast_kernel,
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
    from gemworks.precision.triton_casts import tile_setup

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
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    hidden: Tensor,
    y: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    spec: CastSpec,
    norm: str,
    eps: float,
    columns: bool,
    square: bool,
) -> tuple[tuple[MXTensor, MXTensor], Tensor]:
    """Contiguous bf16: the sum with each row's statistics, and tiles of the sum, in one grid (decision 0252)."""
    from gemworks.precision.kernel_norm_tile import norm_cast_kernel
    from gemworks.precision.launch import launch
    from gemworks.precision.triton_casts import TilePlanes, planes_of, tile_planes, tile_words
    from gemworks.precision.triton_squares import empty_squares, planes_of_squares

    num_rows, num_columns = x.shape
    directions = ALONG_ROWS | ALONG_COLUMNS if columns else ALONG_ROWS
    config = fused_tile_config(spec.block, spec.regroups, directions)
    flags = (residual is not None, bias is not None, norm == "layer", y is not None, num_rows % 16 != 0, square)
    setup = _norm_setup(config, spec, directions, num_columns, *flags)
    column_tiles = -(-num_columns // config.columns)
    sizes = (padded_rows(num_rows), num_columns)
    row_blocks = -(-sizes[0] // config.rows)
    turn = min(row_blocks, norm_turn(config.rows, num_columns))
    sums = turn * (config.rows // int(setup.constants["ROWS"] * setup.constants["STEPS"]))
    programs = (-(-row_blocks // turn) + 1) * (sums + turn * column_tiles)
    # One kernel makes all zeros: the count of inexact codes, and behind it what tiles wait for.
    zeros = torch.zeros(row_blocks + 4, dtype=torch.int32, device=x.device)
    count, ready = zeros[:2].view(torch.int64)[0], zeros[4:]
    squares = empty_squares(num_rows, num_columns, x.device) if square else None
    written = tile_planes(x, spec, spec.block, directions, count) if squares is None else TilePlanes(*squares, count)
    added = (x, residual if residual is not None else hidden, hidden)
    affine = (weight, bias if bias is not None else weight, y if y is not None else hidden)
    arguments = (*added, *affine, mean, rstd, ready, *written.tensors, *sizes, column_tiles, num_rows, turn, eps)
    pairs = torch.int32
    words = (pairs, pairs, pairs, None, None, pairs, None, None, None, *tile_words(directions))
    launch(norm_cast_kernel, (programs, 1, 1), arguments, setup.constants, setup.options, None, words)
    if squares is not None:
        return planes_of_squares(squares, num_rows, spec), count
    return planes_of(x, spec, spec.block, written, directions), count


def norm_backward(
    dy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    norm: str,
    has_bias: bool,
    d_hidden: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of hidden (plus `d_hidden`, what came to it from elsewhere), weight and bias, in fp32 arithmetic.

    One kernel and two small sums on a GPU, up to 16,384 features; the same bits each time.
    """
    if (dy.is_cuda or backend == "triton") and dy.numel() and dy.shape[1] <= 16384:
        return _norm_backward_triton(dy, hidden, weight, mean, rstd, norm, has_bias, d_hidden)
    d, xhat = dy.float(), (hidden.float() - mean[:, None]) * rstd[:, None]
    scaled = d * weight.float()
    dx = scaled - xhat * (scaled * xhat).mean(1, keepdim=True)
    if norm == "layer":
        dx = dx - scaled.mean(1, keepdim=True)
    dx = dx * rstd[:, None]
    if d_hidden is not None:
        dx = dx + d_hidden.float()
    return dx.to(hidden.dtype), (d * xhat).sum(0), d.sum(0) if has_bias else None


NORM_PROGRAMS = 1024


def _norm_backward_triton(
    dy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    norm: str,
    has_bias: bool,
    d_hidden: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    from gemworks.precision.kernel_norm_backward import norm_backward_kernel
    from gemworks.precision.launch import launch

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
