"""Launching the cast of 128 x 128 squares that is stored both ways."""

from __future__ import annotations

from functools import lru_cache

import torch
from gemworks.precision.casts import CastSpec, SquarePlanes
from gemworks.precision.kernel_square import cast_squares_kernel
from gemworks.precision.launch import launch
from gemworks.precision.mxtensor import MXTensor, padded_rows
from gemworks.precision.triton_tiles import cast_flags, fits_tiles, no_count, packs, plane_of
from torch import Tensor

SQUARES_WARPS = 8


def fits_squares(x: Tensor, spec: CastSpec) -> bool:
    """Can the kernel quantise `x [M, K]`: bf16 in multiples of 16, blocks rounded at 128."""
    return spec.block == 128 and x.numel() > 0 and fits_tiles(x, spec, 128) and packs(x)


@lru_cache(maxsize=64)
def _setup(spec: CastSpec, ragged: bool) -> tuple[dict[str, int | bool], dict[str, int]]:
    flags = cast_flags(spec)
    constants = {name: flags[name] for name in ("FORMAT", "MODE", "HARDWARE")}
    return {**constants, "RAGGED": ragged}, {"num_warps": SQUARES_WARPS}


# Squares in the epilogues of norm and activation: their bits were checked on an H200, their speed was never measured.
IN_EPILOGUES = False


def empty_squares(real_rows: int, k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `store_squares` writes of a matrix: codes `[M, K]`, scales `[K / 128, M]`, codes `[K, M]`, squares."""
    m = padded_rows(real_rows)
    row_tiles, column_tiles = m // 128, -(-k // 128)
    padded = -(-row_tiles // 4) * 4
    codes = torch.empty(m, k, dtype=torch.uint8, device=device)
    codes_t = torch.empty(k, m, dtype=torch.uint8, device=device)
    scales = torch.empty(column_tiles, m, dtype=torch.float32, device=device)
    # What pads a contraction must be finite.
    fresh = torch.empty if padded == row_tiles else torch.ones
    return codes, scales, codes_t, fresh(column_tiles, padded, dtype=torch.float32, device=device)


def planes_of_squares(
    made: tuple[Tensor, Tensor, Tensor, Tensor], real_rows: int, spec: CastSpec
) -> tuple[MXTensor, MXTensor]:
    """The plane along K, and the square one of the transpose."""
    codes, scales, codes_t, square = made
    k = codes.shape[1]
    transposed = (codes_t, None, square.t(), (k, real_rows), None, 128, spec.format, spec.scale_mode)
    return plane_of(codes, scales, 1, (real_rows, k), 128, spec), MXTensor.unchecked(*transposed)


def triton_cast_squares(x: Tensor, spec: CastSpec) -> SquarePlanes:
    """`casts.cast_squares` by one kernel: 2 bytes an element read, 2 written, and each element rounded once."""
    real_rows, k = x.shape
    m, ragged = padded_rows(real_rows), real_rows % 16 != 0
    row_tiles, column_tiles = m // 128, -(-k // 128)
    codes, scales, codes_t, square = made = empty_squares(real_rows, k, x.device)
    scales_t = torch.empty(row_tiles, k, dtype=torch.float32, device=x.device)
    stride = x.stride(0) // 2
    launch(
        cast_squares_kernel,
        (row_tiles * column_tiles, 1, 1),
        (
            x,
            codes,
            scales,
            codes_t,
            scales_t,
            square,
            m,
            k,
            stride,
            column_tiles,
            square.shape[1],
            real_rows,
        ),
        *_setup(spec, ragged),
        (spec, ragged, stride % 16 == 0, x.data_ptr() % 16 == 0),
        (torch.int32, torch.int32, None, torch.int64),
    )
    rows, transposed = planes_of_squares(made, real_rows, spec)
    columns = plane_of(codes_t, scales_t, 0, (real_rows, k), 128, spec)
    return SquarePlanes(rows, columns, transposed, no_count(x.device))
