"""`mx_linear`: a linear layer whose three products are quantised, as one opaque op with a gradient.

    forward  y  = x  W^T     contraction K
    dgrad    dx = dy W       contraction N
    wgrad    dW = dy^T x     contraction M

Each operand is quantised along the contraction of the product that reads it, so input and gradient are needed both
ways.
The op is opaque to torch.compile; planes are made inside.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from gemworks.precision import te_backend
from gemworks.precision.backends import choose, cost_note, device_spec, shape_rule, warn_once
from gemworks.precision.casts import CastSpec, cast, cast_both, cast_squares
from gemworks.precision.exact import ExactLinear, ExactPlan, exact_plan_of
from gemworks.precision.gemms import gemm
from gemworks.precision.hopper import HopperLinear, Plan, plan_of
from gemworks.precision.mxtensor import MXTensor, padded_rows
from gemworks.precision.op import define_op, differentiate
from gemworks.precision.plane_weight import PlaneWeight
from gemworks.precision.recipe import GemmKind, GemmRecipe, Recipe, Save, recipe
from gemworks.precision.rng import Stochastic
from gemworks.precision.short_casts import fits
from torch import Tensor
from torch.nn.functional import pad


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
    forward, dgrad, wgrad = chosen.forward, chosen.dgrad, chosen.wgrad
    return LinearSpecs(
        CastSpec(forward.kind, forward.left, mode),
        CastSpec(dgrad.kind, dgrad.left, mode),
        CastSpec(wgrad.kind, wgrad.left, mode, hadamard=hadamard),
        CastSpec(forward.kind, forward.right, mode),
        CastSpec(dgrad.kind, dgrad.right, mode),
        CastSpec(wgrad.kind, wgrad.right, mode, hadamard=hadamard),
    )


def weight_is_square(gemm_recipe: GemmRecipe, chosen: Recipe) -> bool:
    """Do this product's weights use square blocks?"""
    return chosen.square_weights or (gemm_recipe.kind is not GemmKind.MXFP8 and not chosen.row_weights)


def weight_plane(weight: Tensor, gemm_recipe: GemmRecipe, chosen: Recipe, transposed: bool) -> tuple[MXTensor, Tensor]:
    """The weight as the second operand: `[N, K]` along K for forward, its transpose along N for dgrad; and the
    count."""
    specs = specs_of(chosen.text)
    spec = specs.forward_weight if gemm_recipe is chosen.forward else specs.dgrad_weight
    if weight_is_square(gemm_recipe, chosen):
        # The transpose is quantised, not the plane transposed: the same bits, and codes in the order of the product.
        return cast(weight.t() if transposed else weight, None, spec, chosen.backend)
    plane, inexact = cast(weight, 0 if transposed else 1, spec, chosen.backend)
    return (plane.t() if transposed else plane), inexact


def forward_planes(x_MK: Tensor, chosen: Recipe, keep_columns: bool) -> tuple[MXTensor, MXTensor | None, Tensor]:
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


@lru_cache(maxsize=64)
def no_counts(device: torch.device) -> Tensor:
    """int64 `[2]` of zeros, never written: the counts of arithmetic that loses no codes."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def linear_forward(
    x_MK: Tensor, weight: Tensor | MXTensor, bias: Tensor | None, chosen: Recipe, save: bool, out_dtype: torch.dtype
) -> tuple[Tensor, MXTensor | None, Tensor]:
    """y `[M, N]`, the plane kept for backward (None: the input itself is), and int64 `[2]` inexact codes of input and
    weight.

    `weight` may be a plane already (an FSDP shard gathered in FP8): then it is used as it is.
    """
    counts = no_counts(x_MK.device)
    kept: MXTensor | None = None
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
        y = gemm(rows, plane_w, chosen.forward.kind, out_dtype, chosen.backend)
        if save and chosen.save is not Save.HIGH_PRECISION:
            kept = columns if chosen.save is Save.BOTH else rows
    return (y if bias is None else y.add_(bias)), kept, counts


def forward_op(
    x_MK: Tensor, weight: Tensor | MXTensor, bias: Tensor | None, chosen: Recipe, save: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`linear_forward` with an op's flat results: the kept plane as codes and scales, empty if none. What is kept for
    the weight gradient alone has its rows padded (`padded_rows`) with zero codes."""
    y, kept, counts = linear_forward(x_MK, weight, bias, chosen, save, out_dtype)
    counts = counts.clone()
    if kept is None:
        empty = torch.empty(0, dtype=torch.uint8, device=x_MK.device)
        return y, empty, empty.clone(), counts
    # In one layout, whatever the backend: the compiler is told sizes and strides. Scales lie block by block in memory,
    # and the contraction of the weight gradient is padded as the fast casts pad it.
    if kept.dim == 1:
        return y, kept.codes, kept.scales.t().contiguous().t(), counts
    codes = kept.tensors[0] if kept.dim is None else kept.tensors[0].t()
    num_rows = padded_rows(x_MK.shape[0])
    if codes.shape[1] != num_rows:
        codes = pad(codes, (0, num_rows - codes.shape[1]))
    return y, codes if kept.dim is None else codes.t(), kept.scales.contiguous(), counts


def kept_plane(codes: Tensor, scales: Tensor, shape: tuple[int, int], chosen: Recipe) -> MXTensor:
    """The plane that a forward kept, from its codes and scales."""
    block = 32 if chosen.forward.kind is GemmKind.MXFP8 else 128
    dim = 0 if chosen.save is Save.BOTH else 1
    if chosen.save is Save.BOTH and chosen.square_inputs:
        dim, shape = None, (shape[1], shape[0])
    return MXTensor.unchecked(codes, scales, None, shape, dim, block, chosen.forward.left, chosen.scale_mode)


def linear_backward(
    dy_MN: Tensor,
    x_MK: Tensor | MXTensor,
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
    rows: MXTensor | None = None
    columns: MXTensor | None = None
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
            dx = gemm(rows, plane_w, dgrad.kind, dx_dtype, chosen.backend)
    if need_dw:
        kept = x_MK if isinstance(x_MK, MXTensor) else None
        if columns is not None and kept is not None and kept.dim != 1:
            plane_x_t = kept if kept.dim is None else kept.t()
            dw = gemm(columns.t(), plane_x_t, wgrad.kind, dw_dtype, chosen.backend)
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
                dw = gemm(columns.t(), plane_x_t, wgrad.kind, dw_dtype, chosen.backend)
    return dx, dw


def _requantise(weight: MXTensor, chosen: Recipe) -> MXTensor:
    """A gathered plane along K, read along N: dequantised (exact) and quantised again; rounds twice."""
    dense = weight.dequantize(torch.bfloat16)
    return cast(dense, 0, specs_of(chosen.text).dgrad_weight, chosen.backend)[0].t()


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe_text: str, step: int, save: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return forward_op(x, weight, bias, recipe_of(recipe_text), save, out_dtype)


def _fake_linear(x, weight, bias, recipe_text, step, save, out_dtype):
    chosen = recipe_of(recipe_text)
    y = x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)
    counts = x.new_empty(2, dtype=torch.int64)
    if not save or chosen.save is Save.HIGH_PRECISION or chosen.forward.kind is GemmKind.BF16:
        return y, x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.uint8), counts
    block = 32 if chosen.forward.kind is GemmKind.MXFP8 else 128
    m, k = x.shape
    if chosen.save is Save.BOTH and chosen.square_inputs:
        squares = (-(-k // block), -(-m // block))
        codes = x.new_empty((k, padded_rows(m)), dtype=torch.uint8)
        return y, codes, x.new_empty(squares, dtype=torch.uint8), counts
    if chosen.save is Save.BOTH:
        codes = x.new_empty((k, padded_rows(m)), dtype=torch.uint8).t()
        return y, codes, x.new_empty((-(-m // block), k), dtype=torch.uint8), counts
    return y, x.new_empty((m, k), dtype=torch.uint8), x.new_empty((-(-k // block), m), dtype=torch.uint8).t(), counts


def _linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    codes: Tensor,
    scales: Tensor,
    recipe_text: str,
    step: int,
    need_dx: bool,
    need_dw: bool,
    x_dtype: torch.dtype,
    num_features: int,
) -> tuple[Tensor, Tensor]:
    return backward_op(
        dy, x, weight, weight.dtype, codes, scales, recipe_text, step, need_dx, need_dw, x_dtype, num_features
    )


def backward_op(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | MXTensor,
    dw_dtype: torch.dtype,
    codes: Tensor,
    scales: Tensor,
    recipe_text: str,
    step: int,
    need_dx: bool,
    need_dw: bool,
    x_dtype: torch.dtype,
    num_features: int,
) -> tuple[Tensor, Tensor]:
    """`linear_backward` with an op's flat arguments and results; a kept plane is told from none by its dims."""
    chosen = recipe_of(recipe_text)
    source = x if codes.dim() != 2 else kept_plane(codes, scales, (dy.shape[0], num_features), chosen)
    dx, dw = linear_backward(dy, source, weight, chosen, step, need_dx, need_dw, x_dtype, dw_dtype)
    if dx is None:
        dx = torch.empty(0, device=dy.device, dtype=x_dtype)
    return dx, torch.empty(0, device=dy.device, dtype=dw_dtype) if dw is None else dw


def _fake_linear_backward(dy, x, weight, codes, scales, recipe_text, step, need_dx, need_dw, x_dtype, num_features):
    dx = dy.new_empty((dy.shape[0], num_features) if need_dx else 0, dtype=x_dtype)
    dw = weight.new_empty((dy.shape[1], num_features) if need_dw else 0)
    return dx, dw


def _setup_context(ctx, inputs, output) -> None:
    x, weight, bias, recipe_text, step, _, _ = inputs
    _, codes, scales, counts = output
    # The input itself is kept only where no plane replaces it.
    keep_input = codes.dim() != 2
    ctx.save_for_backward(x if keep_input else codes.new_empty(0), weight, codes, scales)
    ctx.recipe_text, ctx.step, ctx.x_dtype, ctx.num_features = recipe_text, step, x.dtype, x.shape[1]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(codes, scales, counts)
    # Otherwise a zero gradient as large as the kept plane is written in each backward.
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, *_unused):
    if dy is None:
        return None, None, None, None, None, None, None
    x, weight, codes, scales = ctx.saved_tensors
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    dx, dw = torch.ops.gemworks_precision.linear_backward(
        dy, x, weight, codes, scales, ctx.recipe_text, ctx.step, need_dx, need_dw, ctx.x_dtype, ctx.num_features
    )
    db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if need_db and ctx.bias_dtype is not None else None
    return dx if need_dx else None, dw if need_dw else None, db, None, None, None, None


define_op("linear", _linear, _fake_linear)
define_op("linear_backward", _linear_backward, _fake_linear_backward)
differentiate("linear", _backward, _setup_context)


def _source(weight: Tensor) -> Tensor | MXTensor:
    return weight.plane() if isinstance(weight, PlaneWeight) else weight


class _EagerLinear(torch.autograd.Function):
    """What the op computes, without the op: dispatching it takes the host as long as everything else that it does."""

    @staticmethod
    def forward(ctx, x, weight, bias, chosen: Recipe, step, save, out_dtype):  # pyright: ignore[reportIncompatibleMethodOverride]
        y, kept, counts = linear_forward(x, _source(weight), bias, chosen, save, out_dtype)
        ctx.set_materialize_grads(False)
        ctx.chosen, ctx.step, ctx.x_dtype, ctx.plane = chosen, step, x.dtype, None
        ctx.bias_dtype = None if bias is None else bias.dtype
        if kept is None:
            ctx.save_for_backward(x, weight)
        else:
            # Tensors go through autograd, so that hooks on saved tensors see them.
            ctx.save_for_backward(None, weight, *kept.tensors)
            ctx.plane = kept.meta
        if chosen.forward.kind is GemmKind.MXFP8_REGROUP128:
            ctx.mark_non_differentiable(counts)
            return y, counts
        return y, None

    @staticmethod
    def backward(ctx, dy, _=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dy is None:
            return None, None, None, None, None, None, None
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        x, weight, *kept = ctx.saved_tensors
        source = x if not kept else MXTensor.unchecked(*kept, *ctx.plane)
        dx, dw = linear_backward(
            dy, source, _source(weight), ctx.chosen, ctx.step, need_dx, need_dw, ctx.x_dtype, weight.dtype
        )
        db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if need_db and ctx.bias_dtype is not None else None
        return dx, dw, db, None, None, None, None


def _runs_eagerly(x: Tensor, weight: Tensor) -> bool:
    """Nothing watches ops: no compiler, no mode, no transform, no tensor subclass but ours."""
    return (
        (type(weight) in _PLAIN or isinstance(weight, PlaneWeight))
        and type(x) in _PLAIN
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


@lru_cache(maxsize=256)
def _plan_of(
    text: str, device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype, k: int, n: int
) -> Plan | ExactPlan | None:
    """The short way of a layer, which `hopper` or `exact` knows; None elsewhere."""
    if device.type not in ("cpu", "cuda"):
        return None
    chosen, spec = recipe_of(text), device_spec(device)
    if spec.type != "cuda":
        return None
    if chosen.forward.kind is GemmKind.MXFP8:
        choice = choose("gemm", GemmKind.MXFP8, (0, k, n), spec, chosen.backend)
        plan = exact_plan_of(chosen, dtype, weight_dtype, k, n) if choice.backend == "triton" else None
        if plan is not None and (note := cost_note(choice, spec)) is not None:
            warn_once(note)
        return plan
    return plan_of(chosen, dtype, weight_dtype, k, n) if spec.capability == 90 else None


_PLAIN = (Tensor, torch.nn.Parameter)


def mx_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe_or_name: str | Recipe = "mxfp8",
    *,
    step: int = 0,
) -> Tensor:
    """`x W^T + bias` with quantised products.

    Args:
        x: `[..., K]`, fp32, bf16 or fp16. Any number of rows.
        weight: `[N, K]`, usually the fp32 or bf16 master; quantised on the fly, its gradient has its dtype.
        bias: `[N]`.
        recipe_or_name: a recipe or preset name.
        step: training step, for stochastic rounding.

    Returns:
        `[..., N]` in x's dtype (under autocast, in autocast's).

    Raises:
        ValueError: features that the recipe's blocks do not divide; `convert` would leave such a layer in bf16.

    >>> y = mx_linear(torch.randn(3, 128), torch.randn(256, 128), None, "mxfp8")
    >>> y.shape
    torch.Size([3, 256])
    """
    chosen = recipe(recipe_or_name)
    y, _ = linear_with_counts(x, weight, bias, chosen, step)
    return y


def linear_with_counts(
    x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Recipe, step: int
) -> tuple[Tensor, Tensor]:
    """`mx_linear` and its int64 `[2]` count of inexact codes (input, weight), on the device."""
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x: last dim {x.shape[-1]}, expected in_features {weight.shape[1]} of weight {tuple(weight.shape)}"
        )
    multiple = chosen.feature_multiple
    n, k = weight.shape
    if k % multiple or n % multiple:
        raise ValueError(
            f"weight: shape {(n, k)}, recipe {chosen.name!r} needs both features to be multiples of {multiple}; "
            f"pad the "
            f"layer, or leave it in bf16 as convert() does by rule ({shape_rule(k, n, chosen)})"
        )
    out_dtype = x.dtype
    autocast = torch.is_autocast_enabled(x.device.type)
    if autocast:
        out_dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(out_dtype)
    if chosen.backend == te_backend.NAME:
        choose("gemm", chosen.forward.kind, (0, k, n), device_spec(x.device), chosen.backend)  # raises where it can't
        return te_backend.te_linear(x, weight, bias, chosen), torch.zeros(2, dtype=torch.int64, device=x.device)
    save = torch.is_grad_enabled() and weight.requires_grad
    x_MK = x if x.dim() == 2 else x.reshape(-1, k)
    with torch.autocast(x.device.type, enabled=False) if autocast else nullcontext():
        if not _runs_eagerly(x, weight):
            y, _, _, counts = torch.ops.gemworks_precision.linear(
                x_MK, weight, bias, chosen.text, step, save, out_dtype
            )
        elif (
            (plan := _plan_of(chosen.text, x.device, out_dtype, weight.dtype, k, n)) is not None
            and fits(x_MK)
            and (
                # A weight gathered as codes has no memory of its own.
                (type(plan) is Plan and weight.is_square)
                if isinstance(weight, PlaneWeight)
                else (weight.is_contiguous() and weight.data_ptr() % 16 == 0)
            )
        ):
            counts = torch.zeros(2, dtype=torch.int64, device=x.device) if plan.spec.regroups else None
            y = (HopperLinear if type(plan) is Plan else ExactLinear).apply(x_MK, weight, bias, plan, save, counts)
            counts = no_counts(x.device) if counts is None else counts
        else:
            y, counts = _EagerLinear.apply(x_MK, weight, bias, chosen, step, save, out_dtype)  # pyright: ignore[reportGeneralTypeIssues]
            counts = no_counts(x.device) if counts is None else counts
    # FSDP2 warns about views, so a matrix is handed back as it is.
    return (y if x.dim() == 2 else y.reshape(*x.shape[:-1], n)), counts
