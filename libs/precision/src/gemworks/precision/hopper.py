"""The linear layer on Hopper's 128-wide FP8 products with little work for the host: no planes, no ops but those that
make memory, cast and multiply.

For eager layers of bf16 activations under recipes of `fp8_block128` (the weight gradient may be bf16) whose features
are multiples of 128; the rest takes the general way (`linear`), which gives the same bits. Operands are made in the
order in which cuBLAS takes them (`scaled_mm`): left `[M, K]`, right `[K, N]` with columns contiguous, fp32 scales.

Shape letters: M rows, P rows rounded up to 128, K input and N output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from gemworks.precision.casts import CastSpec
from gemworks.precision.formats import Format
from gemworks.precision.launch import launch
from gemworks.precision.mxtensor import padded_rows
from gemworks.precision.recipe import GemmKind, Recipe, Save
from gemworks.precision.scaled_mm import (
    PLAIN,
    ROWS128,
    SQUARES128,
    Operands,
    multiply_pieces,
    num_pieces,
    num_processors,
)
from gemworks.precision.tiles import ALONG_COLUMNS, ALONG_ROWS, tile_config
from torch import Tensor

BOTH = ALONG_ROWS | ALONG_COLUMNS
F8, F32 = torch.float8_e4m3fn, torch.float32
# A weight's plane for dgrad is kept from forward to backward where it is smaller than this, or than an eighth of the
# input's: a read of the weight against memory.
KEPT_WEIGHT_BYTES = 2**22


@dataclass(frozen=True, eq=False)
class Plan:
    """What a layer of one recipe does; made once.

    Attributes:
        spec: of all its casts.
        keep: the input is quantised both ways and what the weight gradient takes is kept.
        square_inputs, square_gradients: as in `Recipe`.
        dense_dw: the weight gradient is bf16.
    """

    spec: CastSpec
    keep: bool
    square_inputs: bool
    square_gradients: bool
    dense_dw: bool


def plan_of(chosen: Recipe, dtype: torch.dtype, weight_dtype: torch.dtype, k: int, n: int) -> Plan | None:
    """The plan of a layer, None where the general way is the only one."""
    forward, dgrad, wgrad = chosen.forward, chosen.dgrad, chosen.wgrad
    wide, dense = GemmKind.FP8_BLOCK128, wgrad.kind is GemmKind.BF16
    formats = {forward.left, forward.right, dgrad.left, dgrad.right}
    if not dense:
        formats |= {wgrad.left, wgrad.right}
    if (
        forward.kind is not wide
        or dgrad.kind is not wide
        or not (dense or wgrad.kind is wide)
        or formats != {Format.E4M3}
        or chosen.stochastic_gradients
        or chosen.hadamard_size
        or chosen.row_weights
        or chosen.save is Save.ROW
        or chosen.backend != "auto"
        or dtype is not torch.bfloat16
        or weight_dtype not in (torch.bfloat16, torch.float32)
        or k % 128
        or n % 128
    ):
        return None
    keep = chosen.save is Save.BOTH
    return Plan(
        CastSpec(wide, Format.E4M3, chosen.scale_mode), keep, chosen.square_inputs, chosen.square_gradients, dense
    )


def fits(x: Tensor) -> bool:
    """Can the kernels read this matrix as it lies?"""
    stride = x.stride(0)
    return (
        x.stride(1) == 1
        and stride % 8 == 0
        and 0 < stride < 2**22
        and 0 < x.shape[0] < 2**26
        and (x.data_ptr() % 16 == 0)
    )


SQUARES_OPTIONS = {"num_warps": 8}


@lru_cache(maxsize=1)
def _kernels() -> tuple[Any, Any, Any]:
    from gemworks.precision.kernel_square import cast_squares_kernel, cast_weight_kernel
    from gemworks.precision.kernel_tile import cast_tile_kernel

    return cast_tile_kernel, cast_squares_kernel, cast_weight_kernel


@lru_cache(maxsize=256)
def _tile_setup(spec: CastSpec, directions: int, ragged: bool) -> Any:
    from gemworks.precision.triton_casts import tile_setup

    config = tile_config(128, False, directions)
    return tile_setup(config, spec, 128, directions, PACKED=True, RAGGED=ragged)


@lru_cache(maxsize=256)
def _square_constants(spec: CastSpec, **more: Any) -> dict[str, Any]:
    from gemworks.precision.triton_casts import cast_flags

    flags = cast_flags(spec)
    return {name: flags[name] for name in ("FORMAT", "MODE", "HARDWARE")} | more


def words(directions: int) -> tuple[torch.dtype | None, ...]:
    """What the kernels take activations and codes as."""
    rows = torch.int32 if directions & ALONG_ROWS else torch.uint8
    return torch.int32, rows, None, torch.int64 if directions & ALONG_COLUMNS else torch.uint8


@lru_cache(maxsize=64)
def _nothing(device: torch.device) -> Tensor:
    from gemworks.precision.triton_casts import no_count

    return no_count(device)


def cast_tiles(x: Tensor, spec: CastSpec, directions: int, left: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks of 128 along x's rows (first two: codes `[P, K]`, scales) and along its columns (last two: codes and
    scales, as a left operand `[K, P]` or as a right one `[P, K]`). A direction that is not asked for repeats the other.
    """
    (m, k), device = x.shape, x.device
    p, ragged = padded_rows(m), m % 16 != 0
    codes = scales = codes_t = scales_t = None
    if directions & ALONG_ROWS:
        codes = torch.empty(p, k, dtype=F8, device=device)
        scales = torch.empty_strided((p, k // 128), (1, p), dtype=F32, device=device)
    if directions & ALONG_COLUMNS:
        shape, strides = ((k, p), (p, 1)) if left else ((p, k), (1, p))
        codes_t = torch.empty_strided(shape, strides, dtype=F8, device=device)
        scales_t = torch.empty_strided((k, p // 128), (1, k), dtype=F32, device=device)
    if codes is None or scales is None:
        assert codes_t is not None, "a direction was asked for"
        assert scales_t is not None
        codes, scales = codes_t, scales_t
    if codes_t is None or scales_t is None:
        codes_t, scales_t = codes, scales
    setup = _tile_setup(spec, directions, ragged)
    stride = x.stride(0) // 2
    grid, column_tiles = setup.grid(m, k)
    launch(
        _kernels()[0],
        grid,
        (x, codes, scales, codes_t, scales_t, _nothing(device), p, k, stride, column_tiles, m),
        setup.constants,
        setup.options,
        (setup, stride % 16 == 0),
        words(directions),
    )
    return codes, scales, codes_t, scales_t


def cast_squares(x: Tensor, spec: CastSpec, left: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Squares of 128 x 128, quantised once: codes `[P, K]` with a scale for each row, and what the weight gradient
    takes: as a left operand codes `[K, P]` with a scale for each column of x, as a right one `[P, K]` with one a
    square."""
    (m, k), device = x.shape, x.device
    p, ragged = padded_rows(m), m % 16 != 0
    rows, columns = p // 128, k // 128
    padded = -(-rows // 4) * 4
    codes = torch.empty(p, k, dtype=F8, device=device)
    scales = torch.empty_strided((p, columns), (1, p), dtype=F32, device=device)
    shape, strides = ((k, p), (p, 1)) if left else ((p, k), (1, p))
    codes_t = torch.empty_strided(shape, strides, dtype=F8, device=device)
    scales_t = torch.empty_strided((k, rows), (1, k), dtype=F32, device=device)
    square = torch.empty_strided((padded, columns), (1, padded), dtype=F32, device=device)
    if padded != rows:
        square.fill_(1.0)  # what pads a contraction must be finite
    stride = x.stride(0) // 2
    launch(
        _kernels()[1],
        (rows * columns, 1, 1),
        (x, codes, scales, codes_t, scales_t, square, p, k, stride, columns, padded, m),
        _square_constants(spec, RAGGED=ragged),
        SQUARES_OPTIONS,
        (spec, ragged, stride % 16 == 0),
        (torch.int32, torch.int32, None, torch.int64),
    )
    return codes, scales, codes_t, scales_t if left else square


def cast_weight(weight: Tensor, spec: CastSpec, directions: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A weight `[N, K]` in squares as forward's right operand `[K, N]` and as dgrad's `[N, K]`, with their scales. A
    direction that is not asked for repeats the other."""
    (n, k), device = weight.shape, weight.device
    rows, columns = n // 128, k // 128
    padded, padded_t = -(-columns // 4) * 4, -(-rows // 4) * 4
    codes = square = codes_t = square_t = None
    if directions & 1:
        codes = torch.empty_strided((k, n), (1, k), dtype=F8, device=device)
        square = torch.empty_strided((padded, rows), (1, padded), dtype=F32, device=device)
        if padded != columns:
            square.fill_(1.0)
    if directions & 2:
        codes_t = torch.empty_strided((n, k), (1, n), dtype=F8, device=device)
        square_t = torch.empty_strided((padded_t, columns), (1, padded_t), dtype=F32, device=device)
        if padded_t != rows:
            square_t.fill_(1.0)
    if codes is None or square is None:
        assert codes_t is not None, "a direction was asked for"
        assert square_t is not None
        codes, square = codes_t, square_t
    if codes_t is None or square_t is None:
        codes_t, square_t = codes, square
    packed = weight.dtype is torch.bfloat16
    launch(
        _kernels()[2],
        (rows * columns, 1, 1),
        (weight, codes, square, codes_t, square_t, n, k, padded, padded_t),
        _square_constants(spec, DIRECTIONS=directions, PACKED=packed),
        SQUARES_OPTIONS,
        (spec, directions, packed, padded % 16 == 0, padded_t % 16 == 0),
        (torch.int32 if packed else None, *words(directions)[1:]),
    )
    return codes, square, codes_t, square_t


def multiply(left: Tensor, right: Tensor, scale_a: Tensor, scale_b: Tensor, square: bool, dtype: torch.dtype) -> Tensor:
    """`left @ right` by cuBLAS."""
    return torch._scaled_mm_v2(  # pyright: ignore[reportPrivateImportUsage]
        left, right, [scale_a], ROWS128, PLAIN, [scale_b], SQUARES128 if square else ROWS128, PLAIN, None, dtype
    )


class HopperLinear(torch.autograd.Function):
    """y `[M, N]` of x `[M, K]`, weight `[N, K]` and bias, by a plan."""

    @staticmethod
    def forward(ctx, x, weight, bias, plan: Plan, save: bool, out_dtype):  # pyright: ignore[reportIncompatibleMethodOverride]
        (m, k), n = x.shape, weight.shape[0]
        need_dx = ctx.needs_input_grad[0]
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.bias_dtype = None if bias is None else bias.dtype
        kept: tuple[Tensor | None, Tensor | None] = (x, None)
        if save and plan.keep:
            cast = cast_squares if plan.square_inputs else None
            made = cast(x, plan.spec, False) if cast is not None else cast_tiles(x, plan.spec, BOTH, False)
            codes, scales, *kept = made  # pyright: ignore[reportAssignmentType]
        else:
            codes, scales, _, _ = cast_tiles(x, plan.spec, ALONG_ROWS, False)
        keep_weight = need_dx and (n * k <= KEPT_WEIGHT_BYTES or 8 * n <= m)
        right, square, right_t, square_t = cast_weight(weight, plan.spec, BOTH if keep_weight else ALONG_ROWS)
        y = multiply(codes, right, scales, square, True, out_dtype)
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
        if dy.dtype is not torch.bfloat16 or not fits(dy):
            dy = dy.to(torch.bfloat16).contiguous()
        (m, n), k = dy.shape, weight.shape[1]
        quantise_columns = need_dw and not plan.dense_dw
        dx = dw = db = None
        codes = scales = codes_t = scales_t = None
        if plan.square_gradients and (need_dx or quantise_columns):
            codes, scales, codes_t, scales_t = cast_squares(dy, plan.spec, True)
        elif need_dx or quantise_columns:
            directions = (ALONG_ROWS if need_dx else 0) | (ALONG_COLUMNS if quantise_columns else 0)
            codes, scales, codes_t, scales_t = cast_tiles(dy, plan.spec, directions, True)
        if need_dx:
            assert codes is not None
            assert scales is not None
            if right_t is None:
                _, _, right_t, square_t = cast_weight(weight, plan.spec, ALONG_COLUMNS)
            dx = multiply(codes, right_t, scales, square_t, True, torch.bfloat16)
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
                        _, _, x, x_scales = cast_squares(x, plan.spec, False)
                    else:
                        _, _, x, x_scales = cast_tiles(x, plan.spec, ALONG_COLUMNS, False)
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
