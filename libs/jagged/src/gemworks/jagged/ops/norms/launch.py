"""Launches of the norm kernels: strides, tile shapes, outputs. Imported when a kernel first runs, never before.

Letters: D width, P programs that hold partial sums.
"""

from __future__ import annotations

import math

import torch
from gemworks.jagged._triton.quick import quick
from gemworks.jagged.dispatch import num_multiprocessors
from gemworks.jagged.jagged import next_power_of_two
from gemworks.jagged.ops.norms.configs import NormConfig, norm_config
from gemworks.jagged.ops.norms.kernel_norm import column_sums_kernel, norm_bwd_kernel, norm_fwd_kernel
from gemworks.jagged.ops.norms.kernel_norm_pieces import norm_bwd_pieces_kernel
from torch import Tensor

_norm_fwd_kernel = quick(norm_fwd_kernel)
_norm_bwd_kernel = quick(norm_bwd_kernel)
_norm_bwd_pieces_kernel = quick(norm_bwd_pieces_kernel)
_column_sums_kernel = quick(column_sums_kernel)
CPU_PROGRAMS = 3  # under the interpreter: several tiles per program even for small tests


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _num_programs(device: torch.device, config: NormConfig) -> int:
    if device.type != "cuda":
        return CPU_PROGRAMS
    return config.programs_per_sm() * num_multiprocessors(device)


def stride_unit(*strides: int) -> int:
    """What the kernels count strides in: the power of two that divides all of them, as far as 8.

    1 where 16 divides them all, which Triton sees by itself.

    >>> stride_unit(1024, 0), stride_unit(3000, 1000), stride_unit(1024, 1002), stride_unit(7)
    (1, 8, 2, 1)
    """
    unit = math.gcd(16, *strides)
    return 1 if unit == 16 else unit


def _inner_rows(*tensors: Tensor | None) -> int:
    """1 if the rows of every tensor are evenly spaced; else the size of the second last dim, addressed on its own."""
    for x in tensors:
        if x is not None and x.dim() > 2 and not x.is_contiguous() and _even_stride(x) is None:
            return x.shape[-2]
    return 1


def _even_stride(x: Tensor) -> int | None:
    """The one distance between neighbouring rows of [..., D], or None if there is none."""
    stride, size = None, 1
    for n, s in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if n == 1:
            continue
        if stride is None:
            stride = s
        elif s != stride * size:
            return None
        size *= n
    return x.shape[-1] if stride is None else stride


def _rows(x: Tensor, inner: int) -> tuple[Tensor, int, int]:
    """x, copied only if its columns or outer dims can't be walked with two strides, and those strides."""
    if inner == 1 and x.is_contiguous():
        return x, x.shape[-1], 0
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    if inner == 1:
        outer = _even_stride(x)
        if outer is None:
            return x.contiguous(), x.shape[-1], 0
        return x, outer, 0
    outer = _even_stride(x[..., 0, :])
    if outer is None:
        x = x.contiguous()
        return x, inner * x.shape[-1], x.shape[-1]
    return x, outer, x.stride(-2)


def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    add: Tensor | None,
    *,
    eps: float,
    center: bool,
    config: NormConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, h) as `norm_reference`; h is empty without a residual."""
    width = x.shape[-1]
    config = config or norm_config(width)
    y = x.new_empty(x.shape)
    h = x.new_empty(x.shape if residual is not None else 0)
    num_rows = x.numel() // width
    if num_rows == 0:
        return y, h
    inner = _inner_rows(x, residual, add)
    x, x_outer, x_inner = _rows(x, inner)
    residual, residual_outer, residual_inner = (x, 0, 0) if residual is None else _rows(residual, inner)
    has_add = add is not None
    add, add_outer, add_inner = (x, 0, 0) if add is None else _rows(add, inner)
    unit = stride_unit(x_outer, x_inner, residual_outer, residual_inner, add_outer, add_inner)
    _norm_fwd_kernel[(_cdiv(num_rows, config.rows),)](
        x,
        residual,
        x if weight is None else weight.contiguous(),
        x if bias is None else bias.contiguous(),
        add,
        y,
        h,
        num_rows,
        eps,
        x_outer // unit,
        x_inner // unit,
        residual_outer // unit,
        residual_inner // unit,
        add_outer // unit,
        add_inner // unit,
        D=width,
        BLOCK_D=next_power_of_two(width),
        ROWS=config.rows,
        INNER=inner,
        UNIT=unit,
        CENTER=center,
        HAS_RESIDUAL=h.numel() > 0,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        HAS_ADD=has_add,
        num_warps=config.num_warps,
    )
    return y, h


def norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    *,
    eps: float,
    center: bool,
    offsets: Tensor | None = None,
    config: NormConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias); the latter two are empty without weight or bias. Bit-equal from run to run on one GPU.

    With `offsets` (integers on the device) rows past the last of them get 0 and add nothing to dweight and dbias.
    """
    width = h.shape[-1]
    has_affine = weight is not None or bias_dtype is not None
    config = config or norm_config(width, sums_columns=has_affine)
    dx = h.new_empty(h.shape)
    num_rows = h.numel() // width
    num_tiles = _cdiv(num_rows, config.rows)
    num_programs = min(num_tiles, _num_programs(h.device, config)) if has_affine else num_tiles
    num_partials = 0 if weight is None else num_programs
    dweight = torch.empty(num_partials, width, dtype=torch.float32, device=h.device)
    num_partials = 0 if bias_dtype is None else num_programs
    dbias = torch.empty(num_partials, width, dtype=torch.float32, device=h.device)
    if num_rows > 0:
        inner = _inner_rows(dy, dh, h)
        dy, dy_outer, dy_inner = _rows(dy, inner)
        h, h_outer, h_inner = _rows(h, inner)
        has_dh = dh is not None
        dh, dh_outer, dh_inner = (h, 0, 0) if dh is None else _rows(dh, inner)
        unit = stride_unit(dy_outer, dy_inner, dh_outer, dh_inner, h_outer, h_inner)
        if config.columns is None:
            kernel, tile = _norm_bwd_kernel, {"BLOCK_D": next_power_of_two(width), "ROWS": config.rows}
        else:
            kernel = _norm_bwd_pieces_kernel
            tile = {"BLOCK_D": config.columns, "PIECES": _cdiv(width, config.columns)}
        if (registers := config.max_registers()) is not None:
            tile["maxnreg"] = registers
        kernel[(num_programs,)](
            dy,
            dh,
            h,
            h if weight is None else weight.contiguous(),
            dx,
            dweight,
            dbias,
            h if offsets is None else offsets.contiguous(),
            0 if offsets is None else offsets.shape[0] - 1,
            num_rows,
            eps,
            dy_outer // unit,
            dy_inner // unit,
            dh_outer // unit,
            dh_inner // unit,
            h_outer // unit,
            h_inner // unit,
            D=width,
            INNER=inner,
            UNIT=unit,
            CENTER=center,
            HAS_DH=has_dh,
            HAS_WEIGHT=weight is not None,
            HAS_DWEIGHT=weight is not None,
            HAS_DBIAS=bias_dtype is not None,
            HAS_END=offsets is not None,
            STAGES=config.stages,
            num_warps=config.num_warps,
            **tile,
        )
    wanted = [(x, t) for x, t in ((dweight, None if weight is None else weight.dtype), (dbias, bias_dtype)) if t]
    sums = iter(_column_sums(wanted))
    return (
        dx,
        dweight.view(-1) if weight is None else next(sums),
        dbias.view(-1) if bias_dtype is None else next(sums),
    )


def _column_sums(wanted: list[tuple[Tensor, torch.dtype]]) -> list[Tensor]:
    """The sum over P of one matrix or two of partial sums [P, D], by one kernel."""
    outs = [torch.empty(x.shape[1], dtype=dtype, device=x.device) for x, dtype in wanted]
    if outs:
        (num_partials, width), cols = wanted[0][0].shape, 16
        _column_sums_kernel[(_cdiv(width, cols), len(outs))](
            wanted[0][0], wanted[-1][0], outs[0], outs[-1], num_partials, width, ROWS=512, COLS=cols, num_warps=8
        )
    return outs
