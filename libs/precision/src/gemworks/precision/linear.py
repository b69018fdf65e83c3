"""`mx_linear`: a linear layer whose three products are quantised, and which of its ways a call takes.

| way | taken by | made of |
|---|---|---|
| the op (`linear_op`) | compiled layers, dispatch modes, tensor subclasses | `products`, behind one opaque op |
| short (`hopper`, `exact`, `tensor_linear`) | eager layers of bf16 activations and plain recipes on a GPU that has such a plan | casts and products alone |
| eager | the rest | `products` |

All three give the same bits. A transform of `torch.func` that is active takes the op too. A recipe that names the backend
`transformer_engine` takes none of them: that library computes the whole layer (`te_backend`), with its own casts and bits.
"""  # noqa: E501

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache

import gemworks.precision.linear_op  # noqa: F401 - defines the op
import torch
from gemworks.precision import te_backend
from gemworks.precision.backends import DeviceSpec, choose, cost_note, device_spec, shape_rule, warn_once
from gemworks.precision.checks import SUPPORTED_DTYPES, check_floating, check_same_device, check_step
from gemworks.precision.exact import ExactLinear, ExactPlan, exact_plan_of
from gemworks.precision.hopper import HopperLinear, Plan, plan_of
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.plane_weight import PlaneWeight
from gemworks.precision.products import linear_backward, linear_forward, no_counts, recipe_of
from gemworks.precision.recipe import GemmKind, Recipe, recipe
from gemworks.precision.short_casts import fits
from gemworks.precision.tensor_linear import TensorLinear, TensorPlan, tensor_plan_of
from torch import Tensor


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
            ctx.save_for_backward(x if save else None, weight)
        else:
            # Tensors go through autograd, so that hooks on saved tensors see them.
            ctx.save_for_backward(None, weight, *kept.tensors)
            ctx.plane = type(kept), kept.meta
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
        source = x
        if kept:
            made, meta = ctx.plane
            source = made.unchecked(*kept, *meta)
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
) -> Plan | ExactPlan | TensorPlan | None:
    """The short way of a layer, made once; what it costs in speed is said once, as the general way does."""
    if device.type not in ("cpu", "cuda"):
        return None
    chosen, spec = recipe_of(text), device_spec(device)
    plan = short_way(chosen, spec, dtype, weight_dtype, k, n)
    if type(plan) is ExactPlan:
        note = cost_note(choose("gemm", GemmKind.MXFP8, (0, k, n), spec, chosen.backend), spec)
        if note is not None:
            warn_once(note)
    return plan


def short_way(
    chosen: Recipe, spec: DeviceSpec, dtype: torch.dtype, weight_dtype: torch.dtype, k: int, n: int
) -> Plan | ExactPlan | TensorPlan | None:
    """The plan of a layer that `hopper`, `exact` or `tensor_linear` knows a way with little work for the host for; None
    elsewhere."""
    if spec.type != "cuda":
        return None
    if chosen.forward.kind is GemmKind.FP8_TENSOR:
        multiplies = choose("gemm", GemmKind.FP8_TENSOR, (0, k, n), spec, chosen.backend).backend == "scaled_mm"
        return tensor_plan_of(chosen, dtype, weight_dtype, k, n) if multiplies else None
    if chosen.forward.kind is not GemmKind.MXFP8:
        return plan_of(chosen, dtype, weight_dtype, k, n) if spec.capability == 90 else None
    if choose("gemm", GemmKind.MXFP8, (0, k, n), spec, chosen.backend).backend != "triton":
        return None
    return exact_plan_of(chosen, dtype, weight_dtype, k, n)


_PLAIN = (Tensor, torch.nn.Parameter)
_SHORT = {Plan: HopperLinear, ExactPlan: ExactLinear, TensorPlan: TensorLinear}


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
        ValueError: types, dtypes, shapes or devices that do not fit together, a step outside of [0, 2^32), or features
            that the recipe's blocks do not divide; `convert` would leave such a layer in bf16.

    >>> y = mx_linear(torch.randn(3, 128), torch.randn(256, 128), None, "mxfp8")
    >>> y.shape
    torch.Size([3, 256])
    """
    chosen = recipe(recipe_or_name)
    y, _ = linear_with_counts(x, weight, bias, chosen, step)
    return y


def _check_arguments(x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Recipe) -> None:
    """Raise ValueError for what no way takes."""
    check_floating("x", x)
    check_floating("weight", weight)
    if weight.dim() != 2:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected [out_features, in_features]")
    n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected last dim {k}, in_features of weight {(n, k)}")
    check_same_device("weight", weight, "x", x)
    if not chosen.is_bf16 and weight.dtype not in SUPPORTED_DTYPES:
        raise ValueError(
            f"weight: got dtype {weight.dtype}, expected one of {', '.join(map(str, SUPPORTED_DTYPES))}; cast it first"
        )
    if bias is not None:
        check_floating("bias", bias)
        if bias.shape != (n,):
            raise ValueError(f"bias: got shape {tuple(bias.shape)}, expected {(n,)}, out_features of weight {(n, k)}")
        check_same_device("bias", bias, "x", x)
    multiple = chosen.feature_multiple
    if k % multiple or n % multiple:
        raise ValueError(
            f"weight: shape {(n, k)}, recipe {chosen.name!r} needs both features to be multiples of {multiple}; pad "
            f"the layer, or leave it in bf16 as convert() does by rule ({shape_rule(k, n, chosen)})"
        )


def linear_with_counts(
    x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Recipe, step: int
) -> tuple[Tensor, Tensor]:
    """`mx_linear` and its int64 `[2]` count of inexact codes (input, weight), on the device."""
    _check_arguments(x, weight, bias, chosen)
    step = check_step(step)
    n, k = weight.shape
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
            regroups = type(plan) is Plan and plan.spec.regroups
            counts = torch.zeros(2, dtype=torch.int64, device=x.device) if regroups else None
            y = _SHORT[type(plan)].apply(x_MK, weight, bias, plan, save, counts)
            counts = no_counts(x.device) if counts is None else counts
        else:
            y, counts = _EagerLinear.apply(x_MK, weight, bias, chosen, step, save, out_dtype)  # pyright: ignore[reportGeneralTypeIssues]
            counts = no_counts(x.device) if counts is None else counts
    # FSDP2 warns about views, so a matrix is handed back as it is.
    return (y if x.dim() == 2 else y.reshape(*x.shape[:-1], n)), counts
