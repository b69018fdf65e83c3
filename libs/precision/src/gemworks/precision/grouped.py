"""`mx_grouped_linear`: one linear layer per group of packed rows (experts), quantised, with gradients.

Products of planes are exact in bf16 here (see `gemms`); no library we know runs grouped 128-wide FP8 products on Hopper
from PyTorch 2.11, so every kind computes through dequantised operands and `explain_grouped` says so.
"""

from __future__ import annotations

import torch
from gemworks.precision.backends import DeviceSpec, device_spec, warn_once
from gemworks.precision.casts import CastSpec, cast, cast_backend
from gemworks.precision.checks import check_floating, check_same_device, check_step
from gemworks.precision.jagged import check_offsets, pad_rows_unchecked
from gemworks.precision.products import weight_is_square
from gemworks.precision.recipe import GemmKind, Recipe, recipe
from gemworks.precision.rng import Stochastic
from torch import Tensor


def explain_grouped(recipe_or_name: str | Recipe, device: str | torch.device | DeviceSpec = "cpu") -> str:
    """What the grouped layer's products run on.

    >>> explain_grouped("fp8_block128", "sm_90")
    'grouped fp8_block128 on sm_90: dequantise + torch grouped_mm in bf16 (exact operands, bf16 speed at best)'
    """
    chosen, spec = recipe(recipe_or_name), device_spec(device)
    _check_kinds(chosen)
    how = "a loop over groups in fp32" if spec.type == "cpu" else "torch grouped_mm in bf16"
    return f"grouped {chosen.name} on {spec}: dequantise + {how} (exact operands, bf16 speed at best)"


def _check_kinds(chosen: Recipe) -> None:
    """Raise ValueError for one scale a tensor: all groups, whatever their sizes, would share it."""
    if GemmKind.FP8_TENSOR in chosen.kinds:
        raise ValueError(
            f"recipe {chosen.name!r}: 'fp8_tensor' has one scale for the tensor, which all groups would share; use "
            "'fp8_block128' or 'mxfp8'"
        )


def _values(x: Tensor, dim: int | None, spec: CastSpec, backend: str) -> Tensor:
    """Quantise a matrix and read it back, keeping a transform and its padding: what the product sees."""
    plane, _ = cast(x, dim, spec, backend)
    if plane.codes.is_cuda and plane.codes.numel():
        from gemworks.precision.triton_reading import triton_dequantize

        return triton_dequantize(plane)
    return plane.dequantize(torch.float32 if x.device.type == "cpu" else torch.bfloat16, keep_transform=True)


def _jagged_values(x: Tensor, offsets: Tensor, spec: CastSpec, backend: str) -> tuple[Tensor, Tensor]:
    """Like `_values`, along the rows of every group, in the padded buffer; and the padded offsets."""
    # Padding to 128 serves every block, so that left and right operand have the same offsets whatever their formats.
    align = max(128, spec.hadamard.size if spec.hadamard else 1)
    padded, starts = pad_rows_unchecked(x, offsets, align)
    return _values(padded, 0, spec, backend), starts


def _zero_past_end(rows: Tensor, offsets: Tensor) -> Tensor:
    valid = torch.arange(rows.shape[0], device=rows.device) < offsets[-1]
    return torch.where(valid[:, None], rows, torch.zeros((), dtype=rows.dtype, device=rows.device))


def grouped_product(a: Tensor, b_GNK: Tensor, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`a[rows of g] @ b[g]^T` for every group: `[T, K] x [G, N, K] -> [T, N]`; rows past the end are zero."""
    if a.device.type == "cpu":
        out = torch.zeros(a.shape[0], b_GNK.shape[1], dtype=out_dtype)
        bounds = offsets.tolist()
        for g in range(len(bounds) - 1):
            out[bounds[g] : bounds[g + 1]] = (a[bounds[g] : bounds[g + 1]] @ b_GNK[g].t()).to(out_dtype)
        return out
    ends = offsets[1:].to(torch.int32)
    product = torch.nn.functional.grouped_mm(a, b_GNK.transpose(1, 2), offs=ends)
    return _zero_past_end(product, offsets).to(out_dtype)


def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`a[rows of g]^T @ b[rows of g]` for every group: `[P, N] x [P, K] -> [G, N, K]`; an empty group gives zeros."""
    num_groups = offsets.shape[0] - 1
    if a.device.type == "cpu":
        bounds = offsets.tolist()
        products = [a[bounds[g] : bounds[g + 1]].t() @ b[bounds[g] : bounds[g + 1]] for g in range(num_groups)]
        return torch.stack(products).to(out_dtype)
    product = torch.nn.functional.grouped_mm(a.t(), b, offs=offsets[1:].to(torch.int32))
    empty = offsets.diff() == 0
    return torch.where(empty[:, None, None], torch.zeros((), dtype=product.dtype, device=a.device), product).to(
        out_dtype
    )


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, offsets, chosen: Recipe, step: int):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, offsets)
        ctx.chosen, ctx.step, ctx.x_dtype = chosen, step, x.dtype
        x = _zero_past_end(x, offsets)
        gemm = chosen.forward
        if gemm.kind is GemmKind.BF16:
            return grouped_product(x, weight.to(x.dtype), offsets, x.dtype)
        values_x = _values(x, 1, CastSpec(gemm.kind, gemm.left, chosen.scale_mode), cast_backend(chosen))
        values_w = _weight_values(weight, chosen, "forward")
        return grouped_product(values_x, values_w, offsets, x.dtype)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, offsets = ctx.saved_tensors
        chosen: Recipe = ctx.chosen
        noise = Stochastic(chosen.seed, ctx.step) if chosen.stochastic_gradients else None
        dy, dx, dw = _zero_past_end(dy, offsets), None, None
        if ctx.needs_input_grad[0]:
            gemm = chosen.dgrad
            if gemm.kind is GemmKind.BF16:
                dx = grouped_product(dy, weight.to(dy.dtype).transpose(1, 2).contiguous(), offsets, ctx.x_dtype)
            else:
                spec = CastSpec(gemm.kind, gemm.left, chosen.scale_mode, noise)
                values_dy = _values(dy, 1, spec, cast_backend(chosen))
                values_w = _weight_values(weight, chosen, "dgrad").transpose(1, 2).contiguous()
                dx = grouped_product(values_dy, values_w, offsets, ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            gemm = chosen.wgrad
            x = _zero_past_end(x, offsets)
            if gemm.kind is GemmKind.BF16:
                dw = grouped_outer(dy, x.to(dy.dtype), offsets, weight.dtype)
            else:
                left = CastSpec(gemm.kind, gemm.left, chosen.scale_mode, noise, chosen.hadamard)
                right = CastSpec(gemm.kind, gemm.right, chosen.scale_mode, None, chosen.hadamard)
                values_dy, starts = _jagged_values(dy, offsets, left, cast_backend(chosen))
                values_x, _ = _jagged_values(x, offsets, right, cast_backend(chosen))
                dw = grouped_outer(values_dy, values_x, starts, weight.dtype)
        return dx, dw, None, None, None


def _weight_values(weight_GNK: Tensor, chosen: Recipe, product: str) -> Tensor:
    """`[G, N, K]` quantised for one product. N is a multiple of the block, so the groups can be cast as one matrix."""
    gemm = getattr(chosen, product)
    dim = None if weight_is_square(gemm, chosen) else (1 if product == "forward" else 0)
    spec = CastSpec(gemm.kind, gemm.right, chosen.scale_mode)
    return _values(weight_GNK.flatten(0, 1), dim, spec, cast_backend(chosen)).unflatten(0, weight_GNK.shape[:2])


def mx_grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    recipe_or_name: str | Recipe = "mxfp8",
    *,
    step: int = 0,
) -> Tensor:
    """`y[rows of group g] = x[rows of group g] W_g^T`, quantised, without a host sync on CUDA.

    Args:
        x: `[T, K]` packed rows; rows past `offsets[-1]` are never read.
        weight: `[G, N, K]`.
        offsets: int32 or int64 `[G + 1]` on x's device; groups of any size, empty too.
        recipe_or_name: as in `mx_linear`; every kind computes exactly in bf16 (`explain_grouped`).
        step: for stochastic rounding.

    Returns:
        `[T, N]` in x's dtype; rows past `offsets[-1]` are zero, and so are their gradients.

    Raises:
        ValueError: dtypes, devices or shapes that do not fit, or features that the recipe's blocks do not divide.
    """
    chosen = recipe(recipe_or_name)
    check_floating("x", x)
    check_floating("weight", weight)
    step = check_step(step)
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x and weight: got {tuple(x.shape)} and {tuple(weight.shape)}, expected [T, K] and [G, N, K] with one K"
        )
    check_offsets(x, offsets)
    if offsets.shape[0] != weight.shape[0] + 1:
        raise ValueError(
            f"offsets: got {tuple(offsets.shape)}, expected int32 or int64 [{weight.shape[0] + 1}] for the "
            f"{weight.shape[0]} groups of weight"
        )
    check_same_device("weight", weight, "x", x)
    _check_kinds(chosen)
    multiple = chosen.feature_multiple
    if x.shape[1] % multiple or weight.shape[1] % multiple:
        raise ValueError(
            f"weight: shape {tuple(weight.shape)}, recipe {chosen.name!r} needs N and K to be multiples of "
            f"{multiple}; pad the layer or use recipe 'bf16' for it"
        )
    if x.is_cuda and not chosen.is_bf16:
        warn_once(explain_grouped(chosen, x.device))
    return _GroupedLinear.apply(x, weight, offsets, chosen, step)  # pyright: ignore[reportReturnType]
