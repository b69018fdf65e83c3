# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""Activation + cast on tiles of bf16: x is read once, the activation is rounded to bf16 and quantised both ways; and
the same of its gradient, `dy * activation'(x)`."""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_planes import store_planes
from gemworks.precision.kernel_tile import load_tile, store_pairs
from gemworks.precision.kernel_words import round_to_bf16, value

RELU, SILU, GELU, GELU_TANH = 0, 1, 2, 3
ACTIVATIONS = {"relu": RELU, "silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH}


@triton.jit
def times_sigmoid(x, t, HARDWARE: tl.constexpr):
    """`x / (1 + 2^t)`, in hardware by its approximate power and reciprocal (relative error near 2^-22; y keeps 8 bits).

    `tl.exp` and a division also serve subnormal powers, which vanish beside 1, at three times the instructions.
    """
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; ex2.approx.ftz.f32 e, $2; add.rn.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 e, e;"
            " mul.rn.f32 $0, $1, e; }",
            "=f,f,f",
            [x, t],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return x / (1.0 + tl.exp2(t))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, HARDWARE: tl.constexpr):
    """The activation in fp32; each is 0 at 0, so that what lies outside a matrix stays 0."""
    if ACTIVATION == 0:
        return tl.where(x < 0.0, 0.0, x)  # NaN stays
    elif ACTIVATION == 1:
        return times_sigmoid(x, x * -1.4426950408889634, HARDWARE)
    elif ACTIVATION == 2:
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    else:
        # 0.5 (1 + tanh(u)) = 1 / (1 + 2^(-2 log2(e) u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
        return times_sigmoid(x, x * (-2.302208198 - 0.1029432397 * (x * x)), HARDWARE)


@triton.jit
def slope(x, ACTIVATION: tl.constexpr, HARDWARE: tl.constexpr):
    """The activation's derivative in fp32."""
    if ACTIVATION == 0:
        return tl.where(x <= 0.0, 0.0, 1.0)  # at NaN the gradient passes, as in PyTorch
    elif ACTIVATION == 1:
        s = times_sigmoid(1.0, x * -1.4426950408889634, HARDWARE)
        return s + s * (1.0 - s) * x
    elif ACTIVATION == 2:
        density = 0.3989422804014327 * tl.exp2(x * x * -0.7213475204444817)
        return 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476)) + x * density
    else:
        # y = x s with s as in `activate`; ds/dx = s (1 - s) 2 du/dx
        square = x * x
        s = times_sigmoid(1.0, x * (-2.302208198 - 0.1029432397 * square), HARDWARE)
        return s + s * (1.0 - s) * (x * (1.5957691216 + 0.2140644488 * square))


# Else widths of 16 tiles and lucky numbers of rows are other kernels.
@triton.jit(do_not_specialize=["num_column_tiles", "real_rows"])
def activation_tile_kernel(
    x_ptr,
    y_ptr,
    codes_ptr,
    scales_ptr,
    codes_t_ptr,
    scales_t_ptr,
    inexact_ptr,
    num_rows,
    num_columns,
    num_column_tiles,
    real_rows,
    ACTIVATION: tl.constexpr,
    WRITE_Y: tl.constexpr,
    R8: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    RAGGED: tl.constexpr,
    HARDWARE: tl.constexpr,
    SQUARES: tl.constexpr = False,
):
    """x, y: bf16 `[real_rows, K]` contiguous as int32; planes as in `store_planes`."""
    tile = tl.program_id(0)
    first_row = (tile // num_column_tiles).to(tl.int64) * (R8 * 8)
    first_column = (tile % num_column_tiles) * C
    left_rows = real_rows - first_row
    half = (num_columns // 16) * 8
    offset = first_row * half
    xs = load_tile(x_ptr + offset, half, left_rows, first_column, num_columns, R8, C, True, RAGGED, True)
    ys = ()
    for i in tl.static_range(8):
        v = ()
        for j in tl.static_range(4):
            v = v + (activate(value(xs[i], j, True, False, HARDWARE), ACTIVATION, HARDWARE),)  # noqa: RUF005
        pair = (round_to_bf16(v[0], v[1], HARDWARE), round_to_bf16(v[2], v[3], HARDWARE))
        if WRITE_Y:
            store_pairs(pair, y_ptr + offset, i, first_column, left_rows, num_columns, R8, C)
        ys = ys + (pair,)  # noqa: RUF005
    planes = (codes_ptr, scales_ptr, codes_t_ptr, scales_t_ptr, inexact_ptr)
    place = (first_row, first_column, num_rows, num_columns)
    store_planes(ys, place, planes, R8, C, B, FORMAT, MODE, REGROUP, DIRECTIONS, SQUARES, HARDWARE)


@triton.jit(do_not_specialize=["num_column_tiles", "real_rows"])
def activation_gradient_kernel(
    dy_ptr,
    x_ptr,
    dx_ptr,
    codes_ptr,
    scales_ptr,
    codes_t_ptr,
    scales_t_ptr,
    inexact_ptr,
    num_rows,
    num_columns,
    num_column_tiles,
    real_rows,
    ACTIVATION: tl.constexpr,
    WRITE_DX: tl.constexpr,
    R8: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    RAGGED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """dy, x, dx: bf16 `[real_rows, K]` contiguous as int32; planes of dx as in `store_planes`."""
    tile = tl.program_id(0)
    first_row = (tile // num_column_tiles).to(tl.int64) * (R8 * 8)
    first_column = (tile % num_column_tiles) * C
    left_rows = real_rows - first_row
    half = (num_columns // 16) * 8
    offset = first_row * half
    xs = load_tile(x_ptr + offset, half, left_rows, first_column, num_columns, R8, C, True, RAGGED, True)
    ds = load_tile(dy_ptr + offset, half, left_rows, first_column, num_columns, R8, C, True, RAGGED, True)
    gs = ()
    for i in tl.static_range(8):
        v = ()
        for j in tl.static_range(4):
            d = value(ds[i], j, True, False, HARDWARE)
            v = v + (d * slope(value(xs[i], j, True, False, HARDWARE), ACTIVATION, HARDWARE),)  # noqa: RUF005
        pair = (round_to_bf16(v[0], v[1], HARDWARE), round_to_bf16(v[2], v[3], HARDWARE))
        if WRITE_DX:
            store_pairs(pair, dx_ptr + offset, i, first_column, left_rows, num_columns, R8, C)
        gs = gs + (pair,)  # noqa: RUF005
    planes = (codes_ptr, scales_ptr, codes_t_ptr, scales_t_ptr, inexact_ptr)
    place = (first_row, first_column, num_rows, num_columns)
    store_planes(gs, place, planes, R8, C, B, FORMAT, MODE, REGROUP, DIRECTIONS, False, HARDWARE)
