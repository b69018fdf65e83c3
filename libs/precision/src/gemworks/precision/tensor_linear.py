"""The linear layer with one scale a tensor, for eager layers of bf16 activations: two casts a tensor, both ways out of
one read, and products that take them as they are. The general way (`products`) gives the same bits.

Shape letters: M rows, K input and N output features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.precision.formats import Format
from gemworks.precision.recipe import GemmKind, Recipe, Save
from gemworks.precision.scaled_mm import tensor_mm
from gemworks.precision.tensor_scaling import TensorPlane
from gemworks.precision.tiles import ALONG_COLUMNS, ALONG_ROWS
from torch import Tensor

BF16 = torch.bfloat16
BOTH = ALONG_ROWS | ALONG_COLUMNS


@dataclass(frozen=True)
class TensorPlan:
    """What a layer of one recipe does.

    Attributes:
        gradients: element format of output gradients; inputs and weights are E4M3.
        power_of_two: as in `Recipe.power_of_two_scales`.
        keep: the input's codes are kept for the weight gradient, not the input.
        fast: `fast_accumulation` of forward, dgrad and wgrad.
    """

    gradients: Format
    power_of_two: bool
    keep: bool
    fast: tuple[bool, bool, bool]

    def cast(self, x: Tensor, directions: int, format: Format) -> tuple[TensorPlane | None, TensorPlane | None]:
        """Both planes of x, None for a direction that is not asked for."""
        from gemworks.precision.triton_tensor import triton_cast_tensor

        return triton_cast_tensor(x, directions, format, self.power_of_two)


def tensor_plan_of(chosen: Recipe, dtype: torch.dtype, weight_dtype: torch.dtype, k: int, n: int) -> TensorPlan | None:
    """The plan of a layer, None where the general way is the only one."""
    gemms = (chosen.forward, chosen.dgrad, chosen.wgrad)
    if (
        set(chosen.kinds) != {GemmKind.FP8_TENSOR}
        or {chosen.forward.left, *(gemm.right for gemm in gemms)} != {Format.E4M3}
        or chosen.dgrad.left is not chosen.wgrad.left
        or chosen.backend != "auto"
        or dtype is not BF16
        or weight_dtype not in (BF16, torch.float32)
        or k % 16
        or n % 16
    ):
        return None
    keep = chosen.save is not Save.HIGH_PRECISION
    fast = (chosen.forward.fast_accumulation, chosen.dgrad.fast_accumulation, chosen.wgrad.fast_accumulation)
    return TensorPlan(chosen.dgrad.left, chosen.power_of_two_scales, keep, fast)


class TensorLinear(torch.autograd.Function):
    """y `[M, N]` of x `[M, K]`, weight `[N, K]` and bias, by a plan."""

    @staticmethod
    def forward(ctx, x, weight, bias, plan: TensorPlan, save: bool, _counts):  # pyright: ignore[reportIncompatibleMethodOverride]
        (m, k), n = x.shape, weight.shape[0]
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.sizes = plan, (m, k, n)
        ctx.bias_dtype = None if bias is None else bias.dtype
        keep = save and plan.keep
        rows, columns = plan.cast(x, BOTH if keep else ALONG_ROWS, Format.E4M3)
        # Cast for dgrad in the same read where that keeps no more than the input's codes are.
        keep_weight = ctx.needs_input_grad[0] and n <= m
        rows_w, columns_w = plan.cast(weight, BOTH if keep_weight else ALONG_ROWS, Format.E4M3)
        assert rows is not None
        assert rows_w is not None
        y = tensor_mm(rows, rows_w, BF16, plan.fast[0])
        # Tensors go through autograd, so that hooks on saved tensors see them.
        kept_w = (None, None) if columns_w is None else columns_w.tensors
        kept = (x if save else None, None) if columns is None else columns.tensors
        ctx.save_for_backward(weight, *kept_w, *kept)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dy is None:
            return None, None, None, None, None, None
        from gemworks.precision.short_casts import fits

        plan: TensorPlan = ctx.plan
        m, k, n = ctx.sizes
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        weight, codes_w, scale_w, x, scale_x = ctx.saved_tensors
        if dy.dtype is not BF16 or not fits(dy):
            dy = dy.to(BF16, copy=True, memory_format=torch.contiguous_format)  # new memory lies on 16 bytes
        dx = dw = db = None
        rows = columns = None
        if need_dx or need_dw:
            directions = (ALONG_ROWS if need_dx else 0) | (ALONG_COLUMNS if need_dw else 0)
            rows, columns = plan.cast(dy, directions, plan.gradients)
        if rows is not None:
            if codes_w is None:
                _, plane_w = plan.cast(weight, ALONG_COLUMNS, Format.E4M3)
            else:
                plane_w = TensorPlane.unchecked(codes_w, scale_w, (n, k), 0, Format.E4M3)
            assert plane_w is not None
            dx = tensor_mm(rows, plane_w.t(), BF16, plan.fast[1])
        if columns is not None:
            if scale_x is None:
                _, plane_x = plan.cast(x, ALONG_COLUMNS, Format.E4M3)
            else:
                plane_x = TensorPlane.unchecked(x, scale_x, (m, k), 0, Format.E4M3)
            assert plane_x is not None
            dw = tensor_mm(columns.t(), plane_x.t(), weight.dtype, plan.fast[2])
        if need_db and ctx.bias_dtype is not None:
            db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None
