"""Planes as the linear layer asks for them: one call per operand, sent to the backend that the registry chose."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from gemworks.precision import quantization
from gemworks.precision.backends import DeviceSpec, choose, device_spec, interpreting
from gemworks.precision.formats import Format
from gemworks.precision.hadamard import Hadamard
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.recipe import GemmKind, Recipe
from gemworks.precision.regroup import regroup
from gemworks.precision.rng import Stochastic
from gemworks.precision.scales import ScaleMode
from torch import Tensor


@dataclass(frozen=True)
class CastSpec:
    """Everything about a cast but its input and direction."""

    kind: GemmKind
    format: Format = Format.E4M3
    scale_mode: ScaleMode = ScaleMode.RCEIL
    stochastic: Stochastic | None = None
    hadamard: Hadamard | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Looked up several times for each cast.
        return hash((self.kind, self.format, self.scale_mode, self.stochastic, self.hadamard))

    @property
    def block(self) -> int:
        """Width at which codes are rounded (regrouping widens it afterwards)."""
        return 128 if self.kind is GemmKind.FP8_BLOCK128 else 32

    @property
    def regroups(self) -> bool:
        """Are blocks of 32 merged to 128?"""
        return self.kind is GemmKind.MXFP8_REGROUP128


def cast(x: Tensor, dim: int | None, spec: CastSpec, backend: str = "auto") -> tuple[MXTensor, Tensor]:
    """Quantise a matrix along `dim` (None: squares) as `spec` says.

    Args:
        x: `[M, K]`.
        dim: 0, 1, or None for square blocks.
        spec: the cast.
        backend: as in `choose`.

    Returns:
        The plane, and a scalar int64 tensor with the number of inexact codes (0 unless regrouping).
    """
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


def cast_both(x: Tensor, spec: CastSpec, backend: str = "auto") -> tuple[MXTensor, MXTensor, Tensor]:
    """Both directions of one matrix; one read where the backend has the kernel. Returns row plane, column plane,
    count."""
    if spec.hadamard is not None:
        raise ValueError("hadamard: a transform acts along one contraction; cast the two directions separately")
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
