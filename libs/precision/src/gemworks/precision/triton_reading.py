"""Launching the kernels that read planes: codes times scales, and scales as products take them."""

from __future__ import annotations

from functools import lru_cache

import torch
from gemworks.precision.formats import Format
from gemworks.precision.kernel_common import FORMATS
from gemworks.precision.kernel_reading import dequantise_kernel, wide_scales_kernel
from gemworks.precision.launch import Setup, integers, launch, launcher_of
from gemworks.precision.mxtensor import MXTensor, padded_rows
from gemworks.precision.triton_casts import two_axes
from torch import Tensor


def reading_grid(num_rows: int, num_columns: int) -> tuple[tuple[int, int, int], bool]:
    """The grid that reads a plane, and whether its axes are exchanged."""
    grid, swap = two_axes(-(-num_rows // 32), -(-num_columns // 128))
    return (*grid, 1), swap


@lru_cache(maxsize=256)
def reading_setup(block_rows: int, block_columns: int, format: Format, swap: bool) -> Setup:
    """How the kernel that reads a plane of such blocks is started."""
    constants = {"ROWS": 32, "COLUMNS": 128, "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns}
    return Setup({**constants, "FORMAT": FORMATS[format.value], "SWAP": swap}, {"num_warps": 4})


def readable_length(contraction: int) -> int:
    """As long as a contraction is made before dequantised operands are multiplied: cuBLAS takes bf16 operands whose
    contraction is no multiple of 8 at a third of the speed.

    >>> readable_length(264), readable_length(257)
    (264, 384)
    """
    return contraction if contraction % 8 == 0 else padded_rows(contraction)


def triton_dequantize(plane: MXTensor, dtype: torch.dtype = torch.bfloat16, length: int | None = None) -> Tensor:
    """`plane.dequantize(dtype, keep_transform=True)` of a matrix in one pass; lines start on multiples of 8. With a
    length, its lines are that long, zero behind the plane's own."""
    if len(plane.padded_shape) != 2 or plane.format is Format.E2M1:
        raise ValueError(f"plane: shape {plane.shape}, format {plane.format.value!r}; expected 2 dims of e4m3 or e5m2")
    num_rows, num_columns = plane.padded_shape
    shown = num_columns if length is None else length
    # Products want lines that start on 16 bytes.
    line = -(-shown // 8) * 8
    out = torch.empty(num_rows, line, dtype=dtype, device=plane.codes.device)
    if shown != line:
        out = out[:, :shown]
    if shown != num_columns:
        out[:, num_columns:].zero_()
    if num_rows and num_columns:
        block_rows = plane.block if plane.dim in (0, None) else 1
        block_columns = plane.block if plane.dim in (1, None) else 1
        grid, swap = reading_grid(num_rows, num_columns)
        setup = reading_setup(block_rows, block_columns, plane.format, swap)
        tensors = (plane.codes, plane.scales, out)
        numbers = (num_rows, num_columns, line, *plane.codes.stride(), *plane.scales.stride())
        aligned = [tensor.data_ptr() % 16 == 0 for tensor in tensors]
        key = (setup, plane.codes.dtype, dtype, *aligned, integers(*numbers))
        reading = launcher_of(dequantise_kernel)
        if not reading.again(grid, tensors, numbers, key):
            reading.look_up(grid, tensors, numbers, setup, key)
    return out


def triton_wide_scales(scales: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """fp32 scales `[num_rows, num_columns]` with strides `(1, num_rows)` from E8M0 bytes, padded with 1; one kernel."""
    out = torch.empty(num_columns, num_rows, dtype=torch.float32, device=scales.device)
    launch(
        wide_scales_kernel,
        (-(-num_rows // 256), -(-num_columns // 8), 1),
        (scales, out, *scales.shape, *scales.stride(), num_rows, num_columns),
        {"ROWS": 256, "COLUMNS": 8},
        {"num_warps": 4},
    )
    return out.t()
