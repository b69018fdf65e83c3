"""The linear layer on Hopper's 128-wide FP8 products with little work for the host: no planes, no ops but those that
make memory, cast and multiply.

For eager layers of bf16 activations under recipes of `fp8_block128` or `mxfp8_regroup128` (the weight gradient may be
bf16) whose features are multiples of 128; the rest takes the general way (`linear`), which gives the same bits.
Operands are made in the order in which cuBLAS takes them (`scaled_mm`): left `[M, K]`, right `[K, N]` with columns
contiguous, fp32 scales.

Shape letters: M rows, P rows rounded up to 128, K input and N output features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from gemworks.precision.casts import CastSpec
from gemworks.precision.formats import Format
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.plane_weight import PlaneWeight
from gemworks.precision.recipe import GemmKind, Recipe, Save
from gemworks.precision.scaled_mm import (
    PLAIN,
    ROWS128,
    SQUARES128,
    Operands,
    multiply_pieces,
    num_pieces,
    num_processors,
    square_scales,
)
from gemworks.precision.short_casts import (
    BF16,
    BOTH,
    F8,
    Cache,
    Four,
    RegroupedWeight,
    SquareCast,
    TileCast,
    WeightCast,
    fits,
    unread_count,
)
from gemworks.precision.tiles import ALONG_COLUMNS, ALONG_ROWS
from torch import Tensor

# A weight's plane for dgrad is kept from forward to backward where it is smaller than this, or than an eighth of the
# input's: a read of the weight against memory.
KEPT_WEIGHT_BYTES = 2**22


@dataclass(frozen=True, eq=False)
class Plan:
    """What a layer of one recipe, device and shape of weight does; made once.

    Attributes:
        spec: of all its casts.
        keep: the input is quantised both ways and what the weight gradient takes is kept.
        square_inputs, square_gradients: as in `Recipe`.
        dense_dw: the weight gradient is bf16.
        casts: by what they do and the sizes that they do it to.
    """

    spec: CastSpec
    keep: bool
    square_inputs: bool
    square_gradients: bool
    dense_dw: bool
    casts: Cache = field(default_factory=Cache)

    def tiles(self, x: Tensor, directions: int, left: bool, count: Tensor | None = None) -> Four:
        """`TileCast` of x; inexact codes are added to count."""
        m, k = x.shape
        key = (m, k, x.stride(0), directions, left)
        cast = self.casts.get(key)
        if cast is None:
            cast = self.casts.keep(key, TileCast(self.spec, directions, left, m, k, key[2]))
        return cast(x, unread_count(x.device) if count is None else count)

    def squares(self, x: Tensor, left: bool) -> Four:
        """`SquareCast` of x."""
        m, k = x.shape
        key = (m, k, x.stride(0), left)
        cast = self.casts.get(key)
        if cast is None:
            cast = self.casts.keep(key, SquareCast(self.spec, left, m, k, key[2]))
        return cast(x)

    def weight(self, weight: Tensor, directions: int, count: Tensor | None = None) -> Four:
        """The weight as forward's right operand (ALONG_ROWS) and dgrad's (ALONG_COLUMNS); one that is not asked for
        repeats the other. Inexact codes of both are added to count."""
        cast: Any = self.casts.get((directions,))
        if cast is None:
            n, k = weight.shape
            if not self.spec.regroups:
                cast = WeightCast(self.spec, directions, weight.dtype, n, k)
            else:
                cast = RegroupedWeight(self.spec, directions == ALONG_COLUMNS, weight.dtype, n, k)
            self.casts.keep((directions,), cast)
        if not self.spec.regroups:
            return cast(weight)
        codes, square = cast(weight, unread_count(weight.device) if count is None else count)
        return codes, square, codes, square


def gathered(plane: MXTensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """A square plane of a weight `[N, K]` as forward's right operand `[K, N]`, or transposed as dgrad's `[N, K]`, and
    its scales; all codes and no more, as FSDP2 gathers them."""
    codes = plane.codes
    if transposed:
        codes, plane = codes.t().contiguous(), plane.t()
    return codes.view(F8).t(), square_scales(plane, codes.shape[1] // 128)


def plan_of(chosen: Recipe, dtype: torch.dtype, weight_dtype: torch.dtype, k: int, n: int) -> Plan | None:
    """The plan of a layer, None where the general way is the only one."""
    forward, dgrad, wgrad = chosen.forward, chosen.dgrad, chosen.wgrad
    wide, dense = forward.kind, wgrad.kind is GemmKind.BF16
    formats = {forward.left, forward.right, dgrad.left, dgrad.right}
    if not dense:
        formats |= {wgrad.left, wgrad.right}
    regroups = wide is GemmKind.MXFP8_REGROUP128
    if (
        not (regroups or wide is GemmKind.FP8_BLOCK128)
        or dgrad.kind is not wide
        or not (dense or wgrad.kind is wide)
        or (regroups and (chosen.square_inputs or chosen.square_gradients))
        or formats != {Format.E4M3}
        or chosen.stochastic_gradients
        or chosen.hadamard_size
        or chosen.row_weights
        or chosen.save is Save.ROW
        or chosen.backend != "auto"
        or dtype is not BF16
        or weight_dtype not in (BF16, torch.float32)
        or k % 128
        or n % 128
    ):
        return None
    keep = chosen.save is Save.BOTH
    return Plan(
        CastSpec(wide, Format.E4M3, chosen.scale_mode), keep, chosen.square_inputs, chosen.square_gradients, dense
    )


def multiply(left: Tensor, right: Tensor, scale_a: Tensor, scale_b: Tensor, square: bool, dtype: torch.dtype) -> Tensor:
    """`left @ right` by cuBLAS."""
    return torch._scaled_mm_v2(  # pyright: ignore[reportPrivateImportUsage]
        left, right, [scale_a], ROWS128, PLAIN, [scale_b], SQUARES128 if square else ROWS128, PLAIN, None, dtype
    )


class HopperLinear(torch.autograd.Function):
    """y `[M, N]` of x `[M, K]`, weight `[N, K]` (or its square plane) and bias, by a plan.

    `counts`: int64 `[2]` of zeros, to which inexact codes of input and weight are added; None where none are lost.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, plan: Plan, save: bool, counts: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        (m, k), n = x.shape, weight.shape[0]
        need_dx = ctx.needs_input_grad[0]
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.bias_dtype = None if bias is None else bias.dtype
        count_x, count_w = (None, None) if counts is None else counts.unbind()
        kept: tuple[Tensor | None, Tensor | None] = (x, None)
        if save and plan.keep:
            made = plan.squares(x, False) if plan.square_inputs else plan.tiles(x, BOTH, False, count_x)
            codes, scales, *kept = made  # pyright: ignore[reportAssignmentType]
        else:
            codes, scales, _, _ = plan.tiles(x, ALONG_ROWS, False, count_x)
        # Regrouped weights are cast by a kernel for each direction: nothing is saved by doing it early.
        keep_weight = need_dx and not plan.spec.regroups and (n * k <= KEPT_WEIGHT_BYTES or 8 * n <= m)
        if isinstance(weight, PlaneWeight):
            keep_weight, right_t, square_t = False, None, None  # FSDP2 frees it and gathers it again
            right, square = gathered(weight.plane(), transposed=False)
        else:
            right, square, right_t, square_t = plan.weight(weight, BOTH if keep_weight else ALONG_ROWS, count_w)
        y = multiply(codes, right, scales, square, True, BF16)
        if y.shape[0] != m:
            y.resize_(m, n)  # no view: autograd and FSDP2 mind views
        if not keep_weight:
            right_t = square_t = None
        # Tensors go through autograd, so that hooks on saved tensors see them.
        ctx.save_for_backward(weight, right_t, square_t, *(kept if save else (None, None)))
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dy is None:
            return None, None, None, None, None, None
        plan: Plan = ctx.plan
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        weight, right_t, square_t, x, x_scales = ctx.saved_tensors
        if dy.dtype is not BF16 or not fits(dy):
            dy = dy.to(BF16, copy=True, memory_format=torch.contiguous_format)  # new memory lies on 16 bytes
        (m, n), k = dy.shape, weight.shape[1]
        quantise_columns = need_dw and not plan.dense_dw
        dx = dw = db = None
        codes = scales = codes_t = scales_t = None
        if plan.square_gradients and (need_dx or quantise_columns):
            codes, scales, codes_t, scales_t = plan.squares(dy, True)
        elif need_dx or quantise_columns:
            directions = (ALONG_ROWS if need_dx else 0) | (ALONG_COLUMNS if quantise_columns else 0)
            codes, scales, codes_t, scales_t = plan.tiles(dy, directions, True)
        if need_dx:
            assert codes is not None
            assert scales is not None
            if right_t is None and isinstance(weight, PlaneWeight):
                right_t, square_t = gathered(weight.plane(), transposed=True)
            elif right_t is None:
                _, _, right_t, square_t = plan.weight(weight, ALONG_COLUMNS)
            dx = multiply(codes, right_t, scales, square_t, True, BF16)
            if dx.shape[0] != m:
                dx.resize_(m, k)
        if need_dw:
            if not quantise_columns:
                dw = (dy.t() @ x).to(weight.dtype)
            else:
                assert codes_t is not None
                assert scales_t is not None
                if x_scales is None:
                    if plan.square_inputs:
                        _, _, x, x_scales = plan.squares(x, False)
                    else:
                        _, _, x, x_scales = plan.tiles(x, ALONG_COLUMNS, False)
                square = plan.square_inputs
                contraction = codes_t.shape[1]
                pieces = num_pieces(n, k, contraction, num_processors(dy.device)) if square else 1
                if pieces > 1:
                    both = Operands(codes_t, x, scales_t, x_scales, ROWS128, SQUARES128)
                    dw = multiply_pieces(both, pieces, weight.dtype)
                else:
                    dw = multiply(codes_t, x, scales_t, x_scales, square, weight.dtype)
        if need_db and ctx.bias_dtype is not None:
            db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None
