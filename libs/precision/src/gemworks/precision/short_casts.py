"""The casts of the layer's short ways: what depends on sizes alone is made once for each of them, and a call allocates
its results as the products take them and starts one kernel.

All of bf16 activations and gradients (`fits`) and contiguous weights, with features in multiples of the block; E4M3
unless a plane's format says otherwise. Codes and scales are those of `triton_casts`, bit by bit.

Shape letters: M rows, P rows rounded up to 128, K features, N output features, W the width of a block (32 or 128).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from gemworks.precision.casts import CastSpec
from gemworks.precision.constants import made_once
from gemworks.precision.formats import Format
from gemworks.precision.launch import Launcher, Setup, integers, launcher_of
from gemworks.precision.mxtensor import padded_rows
from gemworks.precision.tiles import ALONG_COLUMNS, ALONG_ROWS, tile_config
from torch import Tensor

BOTH = ALONG_ROWS | ALONG_COLUMNS
BF16, F8, F32, U8 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.uint8
SQUARES_OPTIONS = {"num_warps": 8}
Four = tuple[Tensor, Tensor, Tensor, Tensor]
# Sizes that a layer keeps casts for; the rows of packed sequences differ from step to step.
MAX_SIZES = 4096


class Cache(dict[tuple[Any, ...], Any]):
    """What was made for sizes; begun anew when there are too many."""

    def keep(self, key: tuple[Any, ...], made: Any) -> Any:
        """Store and return it."""
        if len(self) >= MAX_SIZES:
            self.clear()
        self[key] = made
        return made


def fits(x: Tensor) -> bool:
    """Can the kernels read this matrix as it lies?"""
    stride, one = x.stride()
    return one == 1 and stride % 8 == 0 and 0 < stride < 2**22 and 0 < x.shape[0] < 2**26 and (x.data_ptr() % 16 == 0)


def unread_count(device: torch.device) -> Tensor:
    """int64 that kernels add to and nobody reads: the counts of casts whose counts are not asked for."""
    return made_once("unread count", device, lambda: torch.zeros((), dtype=torch.int64, device=device))


@lru_cache(maxsize=1)
def launchers() -> tuple[Launcher, Launcher, Launcher, Launcher, Launcher]:
    """Of the kernels, which are not imported before they are needed: tiles, squares, weights, any squares, reading."""
    from gemworks.precision.kernel_cast import cast_square_kernel
    from gemworks.precision.kernel_reading import dequantise_kernel
    from gemworks.precision.kernel_square import cast_squares_kernel, cast_weight_kernel
    from gemworks.precision.kernel_tile import cast_tile_kernel

    kernels = (cast_tile_kernel, cast_squares_kernel, cast_weight_kernel, cast_square_kernel, dequantise_kernel)
    tile, squares, weight, square, read = (launcher_of(kernel) for kernel in kernels)
    return tile, squares, weight, square, read


def words(directions: int) -> tuple[torch.dtype | None, ...]:
    """What the kernels take activations and codes as."""
    rows = torch.int32 if directions & ALONG_ROWS else U8
    return torch.int32, rows, None, torch.int64 if directions & ALONG_COLUMNS else U8


@lru_cache(maxsize=256)
def _tile_setup(spec: CastSpec, directions: int, ragged: bool, packed: bool) -> Setup:
    from gemworks.precision.triton_tiles import tile_setup

    config = tile_config(spec.block, spec.regroups, directions)
    made = tile_setup(config, spec, spec.block, directions, PACKED=packed, RAGGED=ragged)
    taken = words(directions) if packed else (None, *words(directions)[1:])
    return Setup(made.constants, made.options, taken)


@lru_cache(maxsize=256)
def _square_setup(spec: CastSpec, taken: tuple[torch.dtype | None, ...], **more: Any) -> Setup:
    from gemworks.precision.triton_tiles import cast_flags

    flags = cast_flags(spec)
    constants = {name: flags[name] for name in ("FORMAT", "MODE", "HARDWARE")} | more
    return Setup(constants, SQUARES_OPTIONS, taken)


@lru_cache(maxsize=256)
def _any_square_setup(spec: CastSpec) -> Setup:
    from gemworks.precision.triton_casts import square_constants

    constants, options = square_constants(spec, spec.block, 128)
    return Setup(constants, options, (None, U8))


class TileCast:
    """Blocks of W along the rows of `x [M, K]` (codes `[P, K]`, scales `[P, K / W]`) and along its columns (codes, as a
    left operand `[K, P]` or as a right one `[P, K]`, scales `[K, P / W]`); lines of scales are contiguous.

    Codes are E4M3 and scales fp32 where W is 128, bytes where it is 32. A direction that is not asked for repeats the
    other.
    """

    __slots__ = ("columns", "dtypes", "grid", "key", "launcher", "numbers", "rows", "setup")

    def __init__(
        self, spec: CastSpec, directions: int, left: bool, m: int, k: int, stride: int, dtype: torch.dtype = BF16
    ) -> None:
        width = 128 if spec.regroups else spec.block
        packed = dtype is BF16
        p, ragged, stride = padded_rows(m), m % 16 != 0, stride // 2 if packed else stride
        config = tile_config(spec.block, spec.regroups, directions)
        column_tiles = -(-k // config.columns)
        self.launcher = launchers()[0]
        self.setup = _tile_setup(spec, directions, ragged, packed)
        self.grid = (-(-p // config.rows) * column_tiles, 1, 1)
        self.numbers = (p, k, stride, column_tiles, m)
        self.key = (self.setup, dtype, stride % 16 == 0)
        self.dtypes = (F8, F32) if width == 128 else (U8, U8)
        self.rows = ((p, k), (k, 1), (p, k // width), (1, p)) if directions & ALONG_ROWS else None
        shape, strides = ((k, p), (p, 1)) if left else ((p, k), (1, p))
        self.columns = (shape, strides, (k, p // width), (1, k)) if directions & ALONG_COLUMNS else None

    def __call__(self, x: Tensor, count: Tensor) -> Four:
        """Row codes and scales, column codes and scales; inexact codes are added to count."""
        make, (code, scale), device = torch.empty_strided, self.dtypes, x.device
        if self.rows is not None:
            shape, strides, scale_shape, scale_strides = self.rows
            codes = codes_t = make(shape, strides, dtype=code, device=device)
            scales = scales_t = make(scale_shape, scale_strides, dtype=scale, device=device)
        if self.columns is not None:
            shape, strides, scale_shape, scale_strides = self.columns
            codes_t = make(shape, strides, dtype=code, device=device)
            scales_t = make(scale_shape, scale_strides, dtype=scale, device=device)
            if self.rows is None:
                codes, scales = codes_t, scales_t
        tensors = (x, codes, scales, codes_t, scales_t, count)  # pyright: ignore[reportPossiblyUnboundVariable]
        if not self.launcher.again(self.grid, tensors, self.numbers, self.key):
            self.launcher.look_up(self.grid, tensors, self.numbers, self.setup, self.key)
        return tensors[1:5]


class SquareCast:
    """Squares of 128 x 128, quantised once: codes `[P, K]` with a scale for each row, and what the weight gradient
    takes: as a left operand codes `[K, P]` with a scale for each column of x, as a right one `[P, K]` with one a
    square."""

    __slots__ = ("codes_t", "fills", "grid", "k", "key", "launcher", "left", "numbers", "p", "padded", "setup")

    def __init__(self, spec: CastSpec, left: bool, m: int, k: int, stride: int) -> None:
        p, ragged, stride = padded_rows(m), m % 16 != 0, stride // 2
        rows, columns = p // 128, k // 128
        self.left, self.p, self.k, self.padded = left, p, k, -(-rows // 4) * 4
        self.fills = self.padded != rows
        self.codes_t = ((k, p), (p, 1)) if left else ((p, k), (1, p))
        self.launcher = launchers()[1]
        self.setup = _square_setup(spec, (torch.int32, torch.int32, None, torch.int64), RAGGED=ragged)
        self.grid = (rows * columns, 1, 1)
        self.numbers = (p, k, stride, columns, self.padded, m)
        self.key = (self.setup, stride % 16 == 0)

    def __call__(self, x: Tensor) -> Four:
        """Codes and scales of forward or dgrad, codes and scales of the weight gradient."""
        make, device, p, k, padded = torch.empty_strided, x.device, self.p, self.k, self.padded
        codes = make((p, k), (k, 1), dtype=F8, device=device)
        scales = make((p, k // 128), (1, p), dtype=F32, device=device)
        codes_t = make(*self.codes_t, dtype=F8, device=device)
        scales_t = make((k, p // 128), (1, k), dtype=F32, device=device)
        square = make((padded, k // 128), (1, padded), dtype=F32, device=device)
        if self.fills:
            square.fill_(1.0)  # what pads a contraction must be finite
        tensors = (x, codes, scales, codes_t, scales_t, square)
        if not self.launcher.again(self.grid, tensors, self.numbers, self.key):
            self.launcher.look_up(self.grid, tensors, self.numbers, self.setup, self.key)
        return codes, scales, codes_t, scales_t if self.left else square


class WeightCast:
    """A weight `[N, K]` in 128 x 128 squares, rounded under their scales, by one kernel for both products."""

    __slots__ = ("directions", "grid", "k", "key", "launcher", "n", "numbers", "setup")

    def __init__(self, spec: CastSpec, directions: int, dtype: torch.dtype, n: int, k: int) -> None:
        self.n, self.k, self.directions = n, k, directions
        packed = dtype is torch.bfloat16
        padded, padded_t = -(-k // 512) * 4, -(-n // 512) * 4
        self.launcher = launchers()[2]
        taken = (torch.int32 if packed else None, *words(directions)[1:])
        self.setup = _square_setup(spec, taken, DIRECTIONS=directions, PACKED=packed)
        self.grid = (n // 128 * (k // 128), 1, 1)
        self.numbers = (n, k, padded, padded_t)
        self.key = (self.setup, padded % 16 == 0, padded_t % 16 == 0)

    def __call__(self, weight: Tensor) -> Four:
        """Forward's right operand `[K, N]` and dgrad's `[N, K]`, each with its scales. A direction that is not asked
        for repeats the other."""
        n, k, directions = self.n, self.k, self.directions
        if directions & ALONG_ROWS:
            codes, square = codes_t, square_t = right_operand(n, k, weight.device)
        if directions & ALONG_COLUMNS:
            codes_t, square_t = right_operand(k, n, weight.device)
            if not directions & ALONG_ROWS:
                codes, square = codes_t, square_t
        tensors = (weight, codes, square, codes_t, square_t)  # pyright: ignore[reportPossiblyUnboundVariable]
        if not self.launcher.again(self.grid, tensors, self.numbers, self.key):
            self.launcher.look_up(self.grid, tensors, self.numbers, self.setup, self.key)
        return tensors[1:]


class RegroupedWeight:
    """A weight `[N, K]`, or its transpose, in 32 x 32 squares merged to 128 x 128, as a product's right operand."""

    __slots__ = ("grid", "k", "keys", "launcher", "n", "numbers", "setup")

    def __init__(self, spec: CastSpec, transposed: bool, dtype: torch.dtype, n: int, k: int) -> None:
        strides = (1, k) if transposed else (k, 1)
        self.n, self.k = (k, n) if transposed else (n, k)
        self.launcher = launchers()[3]
        self.setup = _any_square_setup(spec)
        self.grid = (self.n // 128, self.k // 128, 1)
        self.numbers = (self.n, self.k, *strides, 0, 0, -(-self.k // 512) * 4)
        self.keys = tuple((self.setup, dtype, aligned, integers(*self.numbers)) for aligned in (False, True))

    def __call__(self, weight: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Codes `[K, N]` (of the transpose `[N, K]`) and scales; inexact codes are added to count."""
        n, k = self.n, self.k
        codes, square = right_operand(n, k, weight.device, fill=False)  # the kernel does
        scales = torch.empty(n // 128, k // 128, dtype=U8, device=weight.device)
        tensors, key = (weight, codes, scales, square, count), self.keys[count.data_ptr() % 16 == 0]
        if not self.launcher.again(self.grid, tensors, self.numbers, key):
            self.launcher.look_up(self.grid, tensors, self.numbers, self.setup, key)
        return codes, square


class Reading:
    """A plane of 32-wide blocks as bf16: the first lines of what a `TileCast` wrote, as far as `length`. Strides are
    those of lines of codes, and of lines and blocks of scales."""

    __slots__ = ("grid", "key", "launcher", "numbers", "setup", "shape", "strides")

    def __init__(self, lines: int, length: int, code_line: int, scale_line: int, scale_block: int, right: bool) -> None:
        from gemworks.precision.triton_reading import reading_grid, reading_setup

        self.shape, self.strides = ((length, lines), (1, length)) if right else ((lines, length), (length, 1))
        self.launcher = launchers()[4]
        self.grid, swap = reading_grid(lines, length)
        self.setup = reading_setup(1, 32, Format.E4M3, swap)
        self.numbers = (lines, length, length, code_line, 1, scale_line, scale_block)
        self.key = (self.setup, U8, BF16, integers(*self.numbers))

    def __call__(self, codes: Tensor, scales: Tensor) -> Tensor:
        """`[lines, length]`, as a right operand `[length, lines]`."""
        out = torch.empty_strided(self.shape, self.strides, dtype=BF16, device=codes.device)
        tensors = (codes, scales, out)
        if not self.launcher.again(self.grid, tensors, self.numbers, self.key):
            self.launcher.look_up(self.grid, tensors, self.numbers, self.setup, self.key)
        return out


def right_operand(n: int, k: int, device: torch.device, fill: bool = True) -> tuple[Tensor, Tensor]:
    """Codes `[K, N]` and scales of squares, `[P, N / 128]` with P = K / 128 rounded up to 4, as cuBLAS takes them."""
    padded = -(-k // 512) * 4
    codes = torch.empty_strided((k, n), (1, k), dtype=F8, device=device)
    square = torch.empty_strided((padded, n // 128), (1, padded), dtype=F32, device=device)
    if fill and padded != k // 128:
        square.fill_(1.0)  # what pads a contraction must be finite
    return codes, square
