"""Planes as the linear layer asks for them: one call per operand, sent to the backend that the registry chose."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from gemworks.precision import quantization
from gemworks.precision.backends import DeviceSpec, choose, device_spec, interpreting
from gemworks.precision.constants import kept_zeros
from gemworks.precision.formats import Format
from gemworks.precision.hadamard import Hadamard
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.recipe import GemmKind, Recipe
from gemworks.precision.regroup import regroup
from gemworks.precision.rng import Stochastic
from gemworks.precision.scales import ScaleMode
from gemworks.precision.tensor_scaling import TensorPlane, quantize_tensor
from gemworks.precision.tiles import ALONG_COLUMNS, ALONG_ROWS
from torch import Tensor


@dataclass(frozen=True)
class CastSpec:
    """Everything about a cast but its input and direction."""

    kind: GemmKind
    format: Format = Format.E4M3
    scale_mode: ScaleMode = ScaleMode.RCEIL
    stochastic: Stochastic | None = None
    hadamard: Hadamard | None = None
    power_of_two: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Looked up several times for each cast.
        return hash((self.kind, self.format, self.scale_mode, self.stochastic, self.hadamard, self.power_of_two))

    @property
    def block(self) -> int:
        """Width at which codes are rounded (regrouping widens it afterwards)."""
        return 128 if self.kind is GemmKind.FP8_BLOCK128 else 32

    @property
    def whole_tensor(self) -> bool:
        """Does one scale serve all of it?"""
        return self.kind is GemmKind.FP8_TENSOR

    @property
    def regroups(self) -> bool:
        """Are blocks of 32 merged to 128?"""
        return self.kind is GemmKind.MXFP8_REGROUP128


Plane = MXTensor | TensorPlane
"""What the products of a layer multiply."""


def check_has_blocks(spec: CastSpec) -> None:
    """Raise ValueError for a cast that no epilogue can make: its scale is known when all of the tensor is."""
    if spec.whole_tensor:
        raise ValueError(
            f"spec: kind {spec.kind.value!r} has one scale for a tensor, known only when all of it is computed, so "
            "that no kernel that computes it can cast it; use mx_linear behind it, or a kind with blocks"
        )


def cast_tensor(
    x: Tensor, directions: int, spec: CastSpec, backend: str = "auto"
) -> tuple[TensorPlane | None, TensorPlane | None]:
    """Quantise `x [M, K]` under one scale: the plane for products along K (ALONG_ROWS) and along M (ALONG_COLUMNS), of
    the same codes; None for what is not asked for."""
    if x.is_cuda or backend == "triton":
        if x.stride(-1) != 1 and x.stride(0) == 1:
            # Rows of the transpose are columns.
            swapped = (directions & ALONG_ROWS) * ALONG_COLUMNS | (directions & ALONG_COLUMNS) // ALONG_COLUMNS
            turned = cast_tensor(x.t(), swapped, spec, backend)
            columns, rows = (plane and plane.t() for plane in turned)
            return rows, columns
        if _backend_of(x, spec, backend) == "triton":
            from gemworks.precision.triton_tensor import fits_tensor, triton_cast_tensor

            if fits_tensor(x):
                return triton_cast_tensor(x, directions, spec.format, spec.power_of_two)
    plane = quantize_tensor(x, 1 if directions & ALONG_ROWS else 0, spec.format, power_of_two=spec.power_of_two)
    if directions != ALONG_ROWS | ALONG_COLUMNS:
        return (plane, None) if directions == ALONG_ROWS else (None, plane)
    codes = plane.codes.t().contiguous().t()
    return plane, TensorPlane(codes, plane.scale, plane.shape, 0, plane.format)


def _one_plane(planes: tuple[TensorPlane | None, TensorPlane | None]) -> TensorPlane:
    plane = planes[0] or planes[1]
    assert plane is not None, "one direction was asked for"
    return plane


def cast(x: Tensor, dim: int | None, spec: CastSpec, backend: str = "auto") -> tuple[Any, Tensor]:
    """Quantise a matrix along `dim` (None: squares) as `spec` says.

    Args:
        x: `[M, K]`.
        dim: 0, 1, or None for square blocks.
        spec: the cast.
        backend: as in `choose`.

    Returns:
        The plane (`MXTensor`, or `TensorPlane` of one scale), and a scalar int64 tensor with the number of inexact
        codes (0 unless regrouping).
    """
    if spec.whole_tensor:
        planes = cast_tensor(x, ALONG_COLUMNS if dim == 0 else ALONG_ROWS, spec, backend)
        return _one_plane(planes), kept_zeros(x.device, torch.int64)
    if _backend_of(x, spec, backend) == "triton":
        from gemworks.precision.triton_casts import triton_cast

        return triton_cast(x, dim, spec)
    if dim is None:
        plane = quantization.quantize_square(
            x, spec.format, spec.scale_mode, block=spec.block, stochastic=spec.stochastic
        )
    else:
        plane = quantization.quantize(
            x,
            dim,
            spec.format,
            spec.scale_mode,
            block=spec.block,
            stochastic=spec.stochastic,
            hadamard=spec.hadamard,
        )
    if spec.regroups:
        return regroup(plane, square=dim is None)
    return plane, torch.zeros((), dtype=torch.int64, device=x.device)


def cast_both(x: Tensor, spec: CastSpec, backend: str = "auto") -> tuple[Any, Any, Tensor]:
    """Both directions of one matrix; one read where the backend has the kernel. Returns row plane, column plane,
    count."""
    if spec.hadamard is not None:
        raise ValueError("hadamard: a transform acts along one contraction; cast the two directions separately")
    if spec.whole_tensor:
        return *cast_tensor(x, ALONG_ROWS | ALONG_COLUMNS, spec, backend), kept_zeros(x.device, torch.int64)
    if _backend_of(x, spec, backend) == "triton":
        from gemworks.precision.triton_casts import triton_cast_both

        return triton_cast_both(x, spec)
    rows, inexact_rows = cast(x, 1, spec, "reference")
    columns, inexact_columns = cast(x, 0, spec, "reference")
    return rows, columns, inexact_rows + inexact_columns


@dataclass(frozen=True)
class SquarePlanes:
    """One quantisation in squares, as three readers want it.

    Attributes:
        rows: along K, every row of a square with the square's scale.
        columns: along M, likewise.
        transposed: the square plane of the transpose `[K, M]`.
        inexact: int64 count.
    """

    rows: MXTensor
    columns: MXTensor
    transposed: MXTensor
    inexact: Tensor


def cast_squares(x: Tensor, spec: CastSpec, backend: str = "auto") -> SquarePlanes:
    """Quantise a matrix in squares once, for both contractions: the codes of `columns` are those of `rows`.

    Raises:
        ValueError: a Hadamard transform, which acts along one dim.
    """
    if spec.hadamard is not None:
        raise ValueError("hadamard: a transform acts along one dim; squares have two")
    check_has_blocks(spec)
    if _backend_of(x, spec, backend) == "triton":
        from gemworks.precision.triton_squares import fits_squares, triton_cast_squares

        if fits_squares(x, spec):
            return triton_cast_squares(x, spec)
    plane, inexact = cast(x, None, spec, backend)
    codes, codes_t = plane.codes.contiguous(), plane.codes.t().contiguous()
    (m, k), block, last = plane.shape, plane.block, (plane.format, plane.scale_mode)
    along_rows = plane.scales.repeat_interleave(block, 0)[:m]
    along_columns = plane.scales.repeat_interleave(block, 1)[:, :k]
    return SquarePlanes(
        MXTensor(codes, along_rows, (m, k), 1, block, *last),
        MXTensor(codes_t.t(), along_columns, (m, k), 0, block, *last),
        MXTensor(codes_t, plane.scales.t().contiguous(), (k, m), None, block, *last),
        inexact,
    )


def device_of(x: Tensor) -> DeviceSpec:
    """The device of a tensor as the rules see it."""
    return device_spec(x.device)


@lru_cache(maxsize=256)
def _backend_on_gpu(kind: GemmKind, device: torch.device, backend: str) -> str:
    return choose("cast", kind, (0, 0, 0), device_spec(device), backend).backend


def _backend_of(x: Tensor, spec: CastSpec, backend: str) -> str:
    if x.is_cuda:
        return _backend_on_gpu(spec.kind, x.device, backend)
    chosen = choose("cast", spec.kind, (0, 0, 0), device_of(x), backend).backend
    if chosen == "triton" and x.device.type == "cpu" and backend == "auto" and interpreting():
        return "reference"  # the interpreter is for tests that name it
    return chosen


def cast_backend(chosen: Recipe) -> str:
    """The recipe's backend as casts understand it (cuBLAS has no cast)."""
    return "auto" if chosen.backend == "scaled_mm" else chosen.backend
