"""The linear layer of `mxfp8` with little work for the host: casts, one kernel that reads a plane as bf16, and bf16
products, without planes between them.

For eager layers of bf16 activations whose products are all `mxfp8` on a device that multiplies them in bf16 (the weight
gradient may be plain bf16), with one plane of the weight for each product; the rest takes the general way (`linear`),
which gives the same bits.

Shape letters: M rows, P rows rounded up to 128, L the rows that a weight gradient contracts over (M, or P where M is no
multiple of 8: zeros), K input and N output features.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from gemworks.precision.casts import CastSpec
from gemworks.precision.formats import Format
from gemworks.precision.gemms import product_bf16
from gemworks.precision.mxtensor import padded_rows
from gemworks.precision.recipe import GemmKind, Recipe, Save
from gemworks.precision.short_casts import BF16, BOTH, Cache, Four, Reading, TileCast, fits, unread_count
from gemworks.precision.tiles import ALONG_COLUMNS, ALONG_ROWS
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ExactPlan:
    """What a layer of one recipe, device and shape of weight does; made once.

    Attributes:
        spec: of all its casts.
        keep: the input is quantised both ways and the plane along its rows' dim is kept for the weight gradient.
        dense_dw: the weight gradient is bf16.
        made: casts and readings, by the sizes that they are for.
    """

    spec: CastSpec
    keep: bool
    dense_dw: bool
    made: Cache = field(default_factory=Cache)

    def cast(self, x: Tensor, directions: int) -> Four:
        """`TileCast` of a matrix, column codes as a left operand lies."""
        m, k = x.shape
        key = (m, k, x.stride(0), x.dtype, directions)
        cast = self.made.get(key)
        if cast is None:
            cast = self.made.keep(key, TileCast(self.spec, directions, True, m, k, key[2], x.dtype))
        return cast(x, unread_count(x.device))

    def read_rows(self, codes: Tensor, scales: Tensor, m: int, k: int, right: bool) -> Tensor:
        """`[M, K]` of the row plane of a matrix, as a right operand `[K, M]`."""
        read = self.made.get((m, k, ALONG_ROWS, right))
        if read is None:
            made = Reading(m, k, k, 1, padded_rows(m), right)
            read = self.made.keep((m, k, ALONG_ROWS, right), made)
        return read(codes, scales)

    def read_columns(self, codes: Tensor, scales: Tensor, m: int, k: int, right: bool) -> Tensor:
        """`[K, L]` of the column plane of a matrix, as a right operand `[L, K]`."""
        read = self.made.get((m, k, ALONG_COLUMNS, right))
        if read is None:
            from gemworks.precision.triton_reading import readable_length

            made = Reading(k, readable_length(m), padded_rows(m), 1, k, right)
            read = self.made.keep((m, k, ALONG_COLUMNS, right), made)
        return read(codes, scales)


def exact_plan_of(chosen: Recipe, dtype: torch.dtype, weight_dtype: torch.dtype, k: int, n: int) -> ExactPlan | None:
    """The plan of a layer on a device that has no units for blocks of 32; None where the general way is the only
    one."""
    forward, dgrad, wgrad = chosen.forward, chosen.dgrad, chosen.wgrad
    exact, dense = GemmKind.MXFP8, wgrad.kind is GemmKind.BF16
    formats = {forward.left, forward.right, dgrad.left, dgrad.right}
    if not dense:
        formats |= {wgrad.left, wgrad.right}
    if (
        forward.kind is not exact
        or dgrad.kind is not exact
        or not (dense or wgrad.kind is exact)
        or formats != {Format.E4M3}
        or chosen.stochastic_gradients
        or chosen.hadamard_size
        or chosen.square_weights
        or chosen.square_inputs
        or chosen.square_gradients
        or chosen.save is Save.ROW
        or chosen.backend != "auto"
        or dtype is not BF16
        or weight_dtype not in (BF16, torch.float32)
        or k % 32
        or n % 32
    ):
        return None
    return ExactPlan(CastSpec(exact, Format.E4M3, chosen.scale_mode), chosen.save is Save.BOTH, dense)


class ExactLinear(torch.autograd.Function):
    """y `[M, N]` of x `[M, K]`, weight `[N, K]` and bias, by a plan."""

    @staticmethod
    def forward(ctx, x, weight, bias, plan: ExactPlan, save: bool, _counts):  # pyright: ignore[reportIncompatibleMethodOverride]
        (m, k), n = x.shape, weight.shape[0]
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.bias_dtype = None if bias is None else bias.dtype
        keep = save and plan.keep
        codes, scales, codes_t, scales_t = plan.cast(x, BOTH if keep else ALONG_ROWS)
        codes_w, scales_w, _, _ = plan.cast(weight, ALONG_ROWS)
        left, right = plan.read_rows(codes, scales, m, k, False), plan.read_rows(codes_w, scales_w, n, k, True)
        y = torch.mm(left, right)
        # Tensors go through autograd, so that hooks on saved tensors see them.
        if keep:
            ctx.save_for_backward(weight, codes_t, scales_t)
        else:
            ctx.save_for_backward(weight, x if save else None, None)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dy is None:
            return None, None, None, None, None, None
        plan: ExactPlan = ctx.plan
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        weight, x, x_scales = ctx.saved_tensors
        if x_scales is not None and x_scales.stride(1) != x_scales.shape[0]:  # a hook kept the shapes alone
            x, x_scales = x.contiguous(), x_scales.t().contiguous().t()
        if dy.dtype is not BF16 or not fits(dy):
            dy = dy.to(BF16, copy=True, memory_format=torch.contiguous_format)  # new memory lies on 16 bytes
        (m, n), k = dy.shape, weight.shape[1]
        dx = dw = db = None
        quantise_columns = need_dw and not plan.dense_dw
        if need_dx or quantise_columns:
            directions = (ALONG_ROWS if need_dx else 0) | (ALONG_COLUMNS if quantise_columns else 0)
            codes, scales, codes_t, scales_t = plan.cast(dy, directions)
            if need_dx:
                _, _, codes_w, scales_w = plan.cast(weight, ALONG_COLUMNS)
                left = plan.read_rows(codes, scales, m, n, False)
                dx = torch.mm(left, plan.read_columns(codes_w, scales_w, n, k, True))
            if quantise_columns:
                if x_scales is None:
                    _, _, x, x_scales = plan.cast(x, ALONG_COLUMNS)
                left = plan.read_columns(codes_t, scales_t, m, n, False)
                dw = product_bf16(left, plan.read_columns(x, x_scales, m, k, True), weight.dtype)
        if need_dw and plan.dense_dw:
            dw = (dy.t() @ x).to(weight.dtype)
        if need_db and ctx.bias_dtype is not None:
            db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None
