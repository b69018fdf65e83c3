"""What the kernels on tiles share: which matrices they take, what they are started with, and the planes that they
write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.precision.backends import interpreting
from gemworks.precision.casts import CastSpec
from gemworks.precision.constants import kept_zeros
from gemworks.precision.formats import Format
from gemworks.precision.kernel_common import FORMATS, MODES
from gemworks.precision.mxtensor import MXTensor, padded_rows, scale_shape
from gemworks.precision.tiles import ALONG_COLUMNS, ALONG_ROWS, TileConfig
from torch import Tensor


def cast_flags(spec: CastSpec) -> dict[str, int | bool]:
    """Constants that every cast kernel takes from the spec."""
    return {
        "FORMAT": FORMATS[spec.format.value],
        "MODE": MODES[spec.scale_mode.value],
        "REGROUP": spec.regroups,
        "STOCHASTIC": spec.stochastic is not None,
        "HARDWARE": not interpreting(),
    }


def packs(x: Tensor) -> bool:
    """Does the tile kernel read this tensor as pairs of bf16 in int32?"""
    return x.dtype is torch.bfloat16 and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0


def fits_tiles(x: Tensor, spec: CastSpec, block: int) -> bool:
    """Can the fast kernel cast `x [M, K]`? Otherwise the general one does: odd sizes and strides, transforms, noise."""
    num_rows, num_columns = x.shape
    plain = spec.stochastic is None and spec.hadamard is None and spec.format is not Format.E2M1 and block in (32, 128)
    return (
        plain
        and x.stride(1) == 1
        and num_columns % 16 == 0
        # Offsets inside a tile are 32-bit.
        and num_rows < 2**26
        and 0 < x.stride(0) < 2**22
    )


@dataclass(frozen=True, eq=False)
class TileSetup:
    """What a tile kernel is started with, but for its tensors and sizes. Made once for each cast; hashed by identity.

    Attributes:
        config: the tile.
        constants: `cast_flags` without noise, the tile, and what else the kernel needs.
        options: warps and registers.
    """

    config: TileConfig
    constants: dict[str, int | bool]
    options: dict[str, int]

    def grid(self, num_rows: int, num_columns: int) -> tuple[tuple[int, int, int], int]:
        """One dim of programs, and how many of them lie side by side."""
        column_tiles = -(-num_columns // self.config.columns)
        return (-(-padded_rows(num_rows) // self.config.rows) * column_tiles, 1, 1), column_tiles


def tile_setup(config: TileConfig, spec: CastSpec, block: int, directions: int, **more: int | bool) -> TileSetup:
    """The setup of a tile kernel; `more` are its own constants."""
    flags = cast_flags(spec)
    del flags["STOCHASTIC"]
    shape = {"R8": config.rows // 8, "C": config.columns, "B": block, "DIRECTIONS": directions}
    return TileSetup(config, {**shape, **flags, **more}, config.options)


@dataclass(frozen=True)
class TilePlanes:
    """What a tile kernel writes, as it takes it. A direction that is not asked for may repeat the other's tensors.

    codes uint8 `[M, K]` and `[K, M]`; scales `[K / width, M]` and `[M / width, K]`, bytes, or fp32 where blocks are 128
    wide; inexact: int64 count. M is rounded up (`padded_rows`).
    """

    codes: Tensor
    scales: Tensor
    codes_t: Tensor
    scales_t: Tensor
    inexact: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of the kernels, which take them as `tile_words`."""
        return self.codes, self.scales, self.codes_t, self.scales_t, self.inexact


def tile_words(directions: int) -> tuple[torch.dtype | None, ...]:
    """The words in which tile kernels store codes, row codes and column codes."""
    rows = torch.int32 if directions & ALONG_ROWS else None
    return rows, None, torch.int64 if directions & ALONG_COLUMNS else None


def tile_planes(x: Tensor, spec: CastSpec, block: int, directions: int, count: Tensor | None = None) -> TilePlanes:
    """Uninitialised planes of `x [M, K]`; count is a zero for inexact codes."""
    width, device = width_of(spec, block), x.device
    dtype = torch.float32 if width == 128 else torch.uint8
    m, k = padded_rows(x.shape[0]), x.shape[1]
    sides: list[Tensor] = []
    if directions & ALONG_ROWS:
        sides.append(torch.empty(m, k, dtype=torch.uint8, device=device))
        sides.append(torch.empty(-(-k // width), m, dtype=dtype, device=device))
    if directions & ALONG_COLUMNS:
        sides.append(torch.empty(k, m, dtype=torch.uint8, device=device))
        sides.append(torch.empty(-(-m // width), k, dtype=dtype, device=device))
    return TilePlanes(sides[0], sides[1], sides[-2], sides[-1], new_count(x, spec) if count is None else count)


def new_count(x: Tensor, spec: CastSpec) -> Tensor:
    """A zero that the kernel adds to; one for all casts that add nothing."""
    if spec.regroups:
        return torch.zeros((), dtype=torch.int64, device=x.device)
    return no_count(x.device)


def no_count(device: torch.device) -> Tensor:
    """An int64 zero, never written."""
    return kept_zeros(device, torch.int64)


def plane_of(codes: Tensor, scales: Tensor, dim: int, shape: tuple[int, int], width: int, spec: CastSpec) -> MXTensor:
    """The plane along `dim` that a tile kernel wrote: codes `[lines, length]`, scales `[blocks, lines]`.

    Either may be longer than x is, zero behind it; fp32 scales keep their length.
    """
    if dim == 0:
        codes = codes.t()
    else:
        scales = scales.t()
    if width == 128:
        return MXTensor.unchecked(codes, None, scales, shape, dim, width, spec.format, spec.scale_mode)
    if codes.shape != shape:
        rows, columns = scale_shape(shape, dim, width)
        scales = scales[:rows, :columns]
    return MXTensor.unchecked(codes, scales, None, shape, dim, width, spec.format, spec.scale_mode)


def planes_of(
    x: Tensor, spec: CastSpec, block: int, written: TilePlanes, directions: int = ALONG_ROWS | ALONG_COLUMNS
) -> tuple[MXTensor, MXTensor]:
    """Both planes; where only rows were asked for, that plane twice."""
    shape, width = (x.shape[0], x.shape[1]), width_of(spec, block)
    rows = plane_of(written.codes, written.scales, 1, shape, width, spec)
    if not directions & ALONG_COLUMNS:
        return rows, rows
    return rows, plane_of(written.codes_t, written.scales_t, 0, shape, width, spec)


def width_of(spec: CastSpec, block: int) -> int:
    """Elements per scale of what is stored, whatever block codes are rounded in."""
    return 128 if spec.regroups else block
