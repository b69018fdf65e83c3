"""The three products of a linear layer by planes: the definition that the layer's other ways repeat bit by bit.

    forward  y  = x  W^T     contraction K
    dgrad    dx = dy W       contraction N
    wgrad    dW = dy^T x     contraction M

Each operand is quantised along the contraction of the product that reads it, so input and gradient are needed both
ways.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from gemworks.precision.casts import CastSpec, Plane, cast, cast_both, cast_squares
from gemworks.precision.constants import kept_zeros
from gemworks.precision.gemms import gemm
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.recipe import GemmKind, GemmRecipe, Recipe, Save
from gemworks.precision.rng import Stochastic
from gemworks.precision.tensor_scaling import TensorPlane
from torch import Tensor


@lru_cache(maxsize=1024)
def recipe_of(text: str) -> Recipe:
    """The recipe that an op carries as text."""
    return Recipe.from_toml(text)


@dataclass(frozen=True)
class LinearSpecs:
    """The casts of one recipe, made once: left operands (x, dy twice), right operands (the weight twice, x)."""

    forward: CastSpec
    dgrad: CastSpec
    wgrad: CastSpec
    forward_weight: CastSpec
    dgrad_weight: CastSpec
    wgrad_input: CastSpec


@lru_cache(maxsize=1024)
def specs_of(text: str) -> LinearSpecs:
    """The casts of a recipe by its text; gradients without their noise, which depends on the step."""
    chosen = recipe_of(text)
    mode, hadamard = chosen.scale_mode, chosen.hadamard
    forward, dgrad, wgrad, power = chosen.forward, chosen.dgrad, chosen.wgrad, chosen.power_of_two_scales
    return LinearSpecs(
        CastSpec(forward.kind, forward.left, mode, power_of_two=power),
        CastSpec(dgrad.kind, dgrad.left, mode, power_of_two=power),
        CastSpec(wgrad.kind, wgrad.left, mode, hadamard=hadamard, power_of_two=power),
        CastSpec(forward.kind, forward.right, mode, power_of_two=power),
        CastSpec(dgrad.kind, dgrad.right, mode, power_of_two=power),
        CastSpec(wgrad.kind, wgrad.right, mode, hadamard=hadamard, power_of_two=power),
    )


def weight_is_square(gemm_recipe: GemmRecipe, chosen: Recipe) -> bool:
    """Do this product's weights use square blocks?"""
    return chosen.square_weights or (gemm_recipe.kind is not GemmKind.MXFP8 and not chosen.row_weights)


def weight_plane(weight: Tensor, gemm_recipe: GemmRecipe, chosen: Recipe, transposed: bool) -> tuple[Any, Tensor]:
    """The weight as the second operand: `[N, K]` along K for forward, its transpose along N for dgrad; and the
    count."""
    specs = specs_of(chosen.text)
    spec = specs.forward_weight if gemm_recipe is chosen.forward else specs.dgrad_weight
    if weight_is_square(gemm_recipe, chosen):
        # The transpose is quantised, not the plane transposed: the same bits, and codes in the order of the product.
        return cast(weight.t() if transposed else weight, None, spec, chosen.backend)
    plane, inexact = cast(weight, 0 if transposed else 1, spec, chosen.backend)
    return (plane.t() if transposed else plane), inexact


def forward_planes(x_MK: Tensor, chosen: Recipe, keep_columns: bool) -> tuple[Any, Plane | None, Tensor]:
    """The input's row plane for forward and, if kept for backward, what the weight gradient takes: its column plane or,
    with `square_inputs`, the square plane of its transpose; and the inexact count."""
    spec = specs_of(chosen.text).forward
    if keep_columns:
        if chosen.square_inputs:
            squares = cast_squares(x_MK, spec, chosen.backend)
            return squares.rows, squares.transposed, squares.inexact
        return cast_both(x_MK, spec, chosen.backend)
    rows, inexact = cast(x_MK, 1, spec, chosen.backend)
    return rows, None, inexact


def no_counts(device: torch.device) -> Tensor:
    """int64 `[2]` of zeros, never written: the counts of arithmetic that loses no codes."""
    return kept_zeros(device, torch.int64, 2)


def linear_forward(
    x_MK: Tensor, weight: Tensor | MXTensor, bias: Tensor | None, chosen: Recipe, save: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Plane | None, Tensor]:
    """y `[M, N]`, the plane kept for backward (None: the input itself is), and int64 `[2]` inexact codes of input and
    weight.

    `weight` may be a plane already (an FSDP shard gathered in FP8): then it is used as it is.
    """
    counts = no_counts(x_MK.device)
    kept: Plane | None = None
    if chosen.forward.kind is GemmKind.BF16:
        dense = weight.dequantize(x_MK.dtype) if isinstance(weight, MXTensor) else weight.to(x_MK.dtype)
        y = (x_MK @ dense.t()).to(out_dtype)
    else:
        rows, columns, inexact_x = forward_planes(x_MK, chosen, save and chosen.save is Save.BOTH)
        if isinstance(weight, MXTensor):
            plane_w, inexact_w = weight, counts[1]
        else:
            plane_w, inexact_w = weight_plane(weight, chosen.forward, chosen, transposed=False)
        if chosen.forward.kind is GemmKind.MXFP8_REGROUP128:
            counts = torch.stack((inexact_x, inexact_w))
        fast = chosen.forward.fast_accumulation
        y = gemm(rows, plane_w, chosen.forward.kind, out_dtype, chosen.backend, fast=fast)
        if save and chosen.save is not Save.HIGH_PRECISION:
            kept = columns if chosen.save is Save.BOTH else rows
    return (y if bias is None else y.add_(bias)), kept, counts


def linear_backward(
    dy_MN: Tensor,
    x_MK: Tensor | Plane,
    weight: Tensor | MXTensor,
    chosen: Recipe,
    step: int,
    need_dx: bool,
    need_dw: bool,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """dx `[M, K]` and dW `[N, K]` (None where not needed), from the input or the plane of it that was kept: along K,
    along M, or square and transposed."""
    specs = specs_of(chosen.text)
    dgrad, wgrad = specs.dgrad, specs.wgrad
    if chosen.stochastic_gradients:
        noise = Stochastic(chosen.seed, step)
        dgrad, wgrad = replace(dgrad, stochastic=noise), replace(wgrad, stochastic=noise)
    quantise_rows = need_dx and dgrad.kind is not GemmKind.BF16
    quantise_columns = need_dw and wgrad.kind is not GemmKind.BF16
    rows: Plane | None = None
    columns: Plane | None = None
    dx: Tensor | None = None
    dw: Tensor | None = None
    if quantise_rows and quantise_columns and dgrad == wgrad:
        if chosen.square_gradients:
            squares = cast_squares(dy_MN, dgrad, chosen.backend)
            rows, columns = squares.rows, squares.columns
        else:
            rows, columns, _ = cast_both(dy_MN, dgrad, chosen.backend)
    elif chosen.square_gradients and (quantise_rows or quantise_columns):
        squares = cast_squares(dy_MN, dgrad if quantise_rows else wgrad, chosen.backend)
        rows, columns = squares.rows if quantise_rows else None, squares.columns if quantise_columns else None
    else:
        if quantise_rows:
            rows = cast(dy_MN, 1, dgrad, chosen.backend)[0]
        if quantise_columns:
            columns = cast(dy_MN, 0, wgrad, chosen.backend)[0]
    if need_dx:
        if rows is None:
            dense = weight.dequantize(dy_MN.dtype) if isinstance(weight, MXTensor) else weight.to(dy_MN.dtype)
            dx = (dy_MN @ dense).to(dx_dtype)
        else:
            if isinstance(weight, MXTensor):
                plane_w = weight.t() if weight.dim is None else _requantise(weight, chosen)
            else:
                plane_w = weight_plane(weight, chosen.dgrad, chosen, transposed=True)[0]
            fast = chosen.dgrad.fast_accumulation
            dx = gemm(rows, plane_w, dgrad.kind, dx_dtype, chosen.backend, fast=fast)
    if need_dw:
        kept = x_MK if isinstance(x_MK, MXTensor | TensorPlane) else None
        fast = chosen.wgrad.fast_accumulation
        # Under one scale the codes along K are those along M.
        serves = kept is not None and (
            kept.dim != 1 or (isinstance(kept, TensorPlane) and isinstance(columns, TensorPlane))
        )
        if columns is not None and kept is not None and serves:
            plane_x_t = kept if kept.dim is None else kept.t()
            dw = gemm(columns.t(), plane_x_t, wgrad.kind, dw_dtype, chosen.backend, in_parts=True, fast=fast)
        else:
            dense_x = kept.dequantize(dy_MN.dtype) if kept is not None else x_MK
            assert isinstance(dense_x, Tensor)
            if columns is None:
                dw = (dy_MN.t() @ dense_x.to(dy_MN.dtype)).to(dw_dtype)
            else:
                if chosen.square_inputs:
                    plane_x_t = cast(dense_x.t(), None, specs.wgrad_input, chosen.backend)[0]
                else:
                    plane_x_t = cast(dense_x, 0, specs.wgrad_input, chosen.backend)[0].t()
                dw = gemm(columns.t(), plane_x_t, wgrad.kind, dw_dtype, chosen.backend, in_parts=True, fast=fast)
    return dx, dw


def _requantise(weight: MXTensor, chosen: Recipe) -> MXTensor:
    """A gathered plane along K, read along N: dequantised (exact) and quantised again; rounds twice."""
    dense = weight.dequantize(torch.bfloat16)
    return cast(dense, 0, specs_of(chosen.text).dgrad_weight, chosen.backend)[0].t()
