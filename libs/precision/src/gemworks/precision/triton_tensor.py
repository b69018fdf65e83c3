"""Launching the casts under one scale for a tensor; codes and scales are those of `tensor_scaling`, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from gemworks.precision.backends import interpreting
from gemworks.precision.formats import Format
from gemworks.precision.kernel_common import FORMATS
from gemworks.precision.kernel_tensor import amax_kernel, cast_tensor_kernel
from gemworks.precision.launch import launch
from gemworks.precision.mxtensor import padded_rows
from gemworks.precision.tensor_scaling import TensorPlane
from gemworks.precision.tiles import ALONG_COLUMNS, ALONG_ROWS
from gemworks.precision.triton_tiles import packs
from torch import Tensor

WARPS = {"num_warps": 8}
# Programs of the first kernel: a few for each processor, as each ends with an atomic on one address.
AMAX_PROGRAMS = 1056


def fits_tensor(x: Tensor) -> bool:
    """Can the kernels cast `x [M, K]`, K contiguous? Elsewhere the reference does."""
    return (
        x.numel() > 0
        and x.stride(1) == 1
        and x.shape[1] % 16 == 0
        and x.shape[0] < 2**26
        and 0 < x.stride(0) < 2**22  # offsets inside a tile are 32-bit
    )


@lru_cache(maxsize=64)
def _constants(
    packed: bool, ragged: bool, format: Format, power_of_two: bool, directions: int
) -> tuple[Mapping[str, int | bool], Mapping[str, int | bool]]:
    reading = {"PACKED": packed, "RAGGED": ragged, "HARDWARE": not interpreting()}
    writing = {"DIRECTIONS": directions, "FORMAT": FORMATS[format.value], "POWER_OF_TWO": power_of_two}
    return reading, reading | writing


def triton_cast_tensor(
    x: Tensor, directions: int, format: Format, power_of_two: bool
) -> tuple[TensorPlane | None, TensorPlane | None]:
    """Two kernels: x is read twice, its largest magnitude in between (4 bytes an element read in bf16, 1 or 2 written).

    Args:
        x: `[M, K]` that fits (`fits_tensor`).
        directions: ALONG_ROWS, ALONG_COLUMNS or both.
        format: `e4m3` or `e5m2`.
        power_of_two: as in `quantize_tensor`.

    Returns:
        The plane whose codes are contiguous along K and the one along M; None for a direction not asked for. Zero codes
        lie behind the rows, up to a multiple of 128.
    """
    real_rows, k = x.shape
    rows, packed, ragged = padded_rows(real_rows), packs(x), real_rows % 16 != 0
    column_tiles = -(-k // 128)
    tiles = rows // 128 * column_tiles
    stride = x.stride(0) // 2 if packed else x.stride(0)
    amax = torch.zeros(1, dtype=torch.int32, device=x.device)
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    along_rows, along_columns = bool(directions & ALONG_ROWS), bool(directions & ALONG_COLUMNS)
    made = [
        torch.empty(shape, dtype=torch.uint8, device=x.device)
        for shape, asked in (((rows, k), along_rows), ((k, rows), along_columns))
        if asked
    ]
    codes, codes_t = made[0], made[-1]
    reading, writing = _constants(packed, ragged, format, power_of_two, directions)
    word = torch.int32 if packed else None
    key = (packed or x.dtype, ragged, stride % 16 == 0, k % 16 == 0, x.data_ptr() % 16 == 0)
    launch(
        amax_kernel,
        (min(tiles, AMAX_PROGRAMS), 1, 1),
        (x, amax, k, stride, column_tiles, tiles, real_rows),
        reading,
        WARPS,
        key,
        (word,),
    )
    launch(
        cast_tensor_kernel,
        (tiles, 1, 1),
        (x, codes, codes_t, amax, scale, rows, k, stride, column_tiles, tiles, real_rows),
        writing,
        WARPS,
        (*key, format, power_of_two, directions),
        (word, torch.int32 if along_rows else torch.uint8, torch.int64 if along_columns else torch.uint8),
    )
    shape = (real_rows, k)
    return (
        TensorPlane.unchecked(codes, scale, shape, 1, format) if along_rows else None,
        TensorPlane.unchecked(codes_t.t(), scale, shape, 0, format) if along_columns else None,
    )
