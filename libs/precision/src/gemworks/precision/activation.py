"""Activation and cast together: planes of `act(x)` rounded to x's dtype, without a round trip of `act(x)` to memory.

Whatever the backend, the planes are exactly those of the `y` it computed; `y` itself may differ in its last bit between
backends, as exponentials do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gemworks.precision.backends import choose
from gemworks.precision.casts import CastSpec, cast, cast_both, cast_squares, check_has_blocks, device_of
from gemworks.precision.mxtensor import MXTensor, padded_rows
from gemworks.precision.tiles import ALONG_COLUMNS, ALONG_ROWS, fused_tile_config
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class ActivationCast:
    """Result of `activation_cast` and `activation_gradient_cast`: planes along K and M (None if not asked for; of
    squares, the square plane of the transpose), the values y that they are of (None likewise), inexact codes."""

    rows: MXTensor
    columns: MXTensor | None
    y: Tensor | None
    inexact: Tensor


def activation_cast(
    x: Tensor,
    spec: CastSpec,
    activation: str,
    *,
    columns: bool = True,
    square: bool = False,
    return_y: bool = False,
    backend: str = "auto",
) -> ActivationCast:
    """Planes of `activation(x)`; one kernel for bf16 on a GPU where both sizes are multiples of 16, otherwise two.

    Args:
        x: `[M, K]`.
        spec: the cast.
        activation: `relu`, `silu`, `gelu` (by erf) or `gelu_tanh`.
        columns: also the plane along M.
        square: quantise squares once, for both contractions (`cast_squares`); with columns.
        return_y: also `activation(x)`.
        backend: as in `choose`.

    Raises:
        ValueError: an unknown activation, other than 2 dims, squares of one plane, or a Hadamard transform (not shared
            between directions).

    >>> import torch
    >>> from gemworks.precision.recipe import GemmKind
    >>> out = activation_cast(torch.tensor([[-1.0, 2.0] * 16]), CastSpec(GemmKind.MXFP8), "relu", columns=False)
    >>> out.rows.dequantize()[0, :2]
    tensor([0., 2.])
    """
    _check(x, spec, activation)
    if square and not columns:
        raise ValueError("square: squares serve both contractions; leave columns set, or unset square")
    chosen = choose("cast", spec.kind, (0, 0, 0), device_of(x), backend).backend
    by_kernels = chosen == "triton" and (x.is_cuda or backend == "triton")
    if by_kernels and x.numel():
        from gemworks.precision import triton_squares
        from gemworks.precision.triton_tiles import fits_tiles, packs

        fused = not square or (triton_squares.IN_EPILOGUES and triton_squares.fits_squares(x, spec))
        if fused and x.is_contiguous() and fits_tiles(x, spec, spec.block) and packs(x):
            return _activation_tiles(x, spec, activation, columns, return_y, square=square)
    # PyTorch's own kernel computes in fp32 and rounds once too, and moves 4 bytes an element of bf16, not 20.
    y = ACTIVATIONS[activation](x) if by_kernels else ACTIVATIONS[activation](x.float()).to(x.dtype)
    if square:
        made = cast_squares(y, spec, backend)
        return ActivationCast(made.rows, made.transposed, y if return_y else None, made.inexact)
    return _planes(y, spec, columns, return_y, backend)


def activation_gradient_cast(
    dy: Tensor,
    x: Tensor,
    spec: CastSpec,
    activation: str,
    *,
    columns: bool = True,
    return_y: bool = False,
    backend: str = "auto",
) -> ActivationCast:
    """Planes of `dy * activation'(x)`, the gradient that the linear layer in front of an activation quantises; one
    kernel where `activation_cast` is one.

    Reads 4 bytes an element and writes about 2 for both planes, as the gradient alone does: the cast is free.

    Args:
        dy: `[M, K]`, the activation's output gradient.
        x: `[M, K]` of the same dtype, the activation's input.
        spec: the cast.
        activation: as in `activation_cast`.
        columns: also the plane along M.
        return_y: also the gradient itself, as `y`.
        backend: as in `choose`.

    Raises:
        ValueError: as `activation_cast`, or dy unlike x.

    >>> import torch
    >>> from gemworks.precision.recipe import GemmKind
    >>> x = torch.tensor([[-1.0, 2.0] * 16])
    >>> out = activation_gradient_cast(torch.full((1, 32), 3.0), x, CastSpec(GemmKind.MXFP8), "relu", columns=False)
    >>> out.rows.dequantize()[0, :2]
    tensor([0., 3.])
    """
    _check(x, spec, activation)
    if dy.shape != x.shape or dy.dtype != x.dtype:
        raise ValueError(f"dy: got {tuple(dy.shape)} {dy.dtype}, expected x's {tuple(x.shape)} {x.dtype}")
    chosen = choose("cast", spec.kind, (0, 0, 0), device_of(x), backend).backend
    if chosen == "triton" and (x.is_cuda or backend == "triton") and x.numel():
        from gemworks.precision.triton_tiles import fits_tiles, packs

        both = (x, dy)
        if all(t.is_contiguous() and fits_tiles(t, spec, spec.block) and packs(t) for t in both):
            return _activation_tiles(x, spec, activation, columns, return_y, dy)
    with torch.enable_grad():
        leaf = x.detach().float().requires_grad_()
        (dx,) = torch.autograd.grad(ACTIVATIONS[activation](leaf), leaf, dy.float())
    return _planes(dx.to(x.dtype), spec, columns, return_y, backend)


def _check(x: Tensor, spec: CastSpec, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, expected one of {sorted(ACTIVATIONS)}")
    if x.dim() != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected 2 dims; flatten the leading dims first")
    if spec.hadamard is not None:
        raise ValueError("hadamard: not fused with an activation; cast y separately")
    check_has_blocks(spec)


def _planes(y: Tensor, spec: CastSpec, columns: bool, return_y: bool, backend: str) -> ActivationCast:
    if columns:
        plane_rows, plane_columns, inexact = cast_both(y, spec, backend)
    else:
        (plane_rows, inexact), plane_columns = cast(y, 1, spec, backend), None
    return ActivationCast(plane_rows, plane_columns, y if return_y else None, inexact)


def _activation_tiles(
    x: Tensor,
    spec: CastSpec,
    activation: str,
    columns: bool,
    return_y: bool,
    dy: Tensor | None = None,
    square: bool = False,
) -> ActivationCast:
    """Of `activation(x)`, or with dy of its gradient."""
    from gemworks.precision.kernel_activation import ACTIVATIONS as CODES
    from gemworks.precision.kernel_activation import activation_gradient_kernel, activation_tile_kernel
    from gemworks.precision.launch import launch
    from gemworks.precision.triton_squares import empty_squares, planes_of_squares
    from gemworks.precision.triton_tiles import TilePlanes, no_count, planes_of, tile_planes, tile_setup, tile_words

    num_rows, num_columns = x.shape
    y = torch.empty_like(x) if return_y else x
    directions = ALONG_ROWS | ALONG_COLUMNS if columns else ALONG_ROWS
    squares = empty_squares(num_rows, num_columns, x.device) if square else None
    if squares is None:
        written = tile_planes(x, spec, spec.block, directions)
    else:
        written = TilePlanes(*squares, no_count(x.device))
    config = fused_tile_config(spec.block, spec.regroups, directions)
    own = {"WRITE_Y": return_y, "SQUARES": square} if dy is None else {"WRITE_DX": return_y}
    constants = {"ACTIVATION": CODES[activation], "RAGGED": num_rows % 16 != 0, **own}
    setup = tile_setup(config, spec, spec.block, directions, **constants)
    grid, column_tiles = setup.grid(num_rows, num_columns)
    read = (x,) if dy is None else (dy, x)
    launch(
        activation_tile_kernel if dy is None else activation_gradient_kernel,
        grid,
        (
            *read,
            y,
            *written.tensors,
            padded_rows(num_rows),
            num_columns,
            column_tiles,
            num_rows,
        ),
        setup.constants,
        setup.options,
        None,
        (*(torch.int32 for _ in read), torch.int32, *tile_words(directions)),
    )
    if squares is None:
        planes = planes_of(x, spec, spec.block, written, directions)
    else:
        planes = planes_of_squares(squares, num_rows, spec)
    return ActivationCast(planes[0], planes[1] if columns else None, y if return_y else None, written.inexact)
