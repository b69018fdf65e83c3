# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false
"""Triton kernel: a projection to heads whose epilogue quantises each head of a row under one scale.

Shape letters: M rows, K features, H heads, D head width; BM, BK tile sizes. A tile is one head wide, so the scale of a
row is a maximum over the tile's own columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_common import encode, inverse_power, magnitude, nan_code_of, scale_byte


@triton.jit
def project_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    codes_ptr,
    scales_ptr,
    values_ptr,
    num_rows,
    num_features,
    stride_row,
    num_heads,
    num_coded,
    HAS_BIAS: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    HARDWARE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x `[M, K]`, weight `[H D, K]`; heads below num_coded go to codes `[M, coded, D]` and scales `[M, coded]`, the
    others to values `[M, H - coded, D]`. GROUP blocks of rows take turns over the heads, so that both stay in L2."""
    program = tl.program_id(0)
    num_blocks = (num_rows + BM - 1) // BM
    group = program // (GROUP * num_heads)
    height = tl.minimum(num_blocks - group * GROUP, GROUP)
    within = program % (GROUP * num_heads)
    head = within // height
    row = (group * GROUP + within % height).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < num_rows
    column = tl.arange(0, D)
    step = tl.arange(0, BK)
    x = x_ptr + row[:, None] * stride_row + step[None, :]
    weight = weight_ptr + (head * D + column).to(tl.int64)[None, :] * num_features + step[:, None]
    total = tl.zeros([BM, D], tl.float32)
    for first in range(0, num_features, BK):
        known = step < num_features - first
        a = tl.load(x + first, mask=inside[:, None] & known[None, :], other=0.0)
        b = tl.load(weight + first, mask=known[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + head * D + column).to(tl.float32)[None, :]
    y = total.to(values_ptr.dtype.element_ty)
    if head < num_coded:
        v = y.to(tl.float32)
        amax = tl.max(magnitude(v), axis=1)
        byte = scale_byte(amax, FORMAT, MODE, 0 if D == 32 else 1)
        code = encode(v * inverse_power(byte)[:, None], v, FORMAT, False, HARDWARE)
        code = tl.where((byte == 255)[:, None], nan_code_of(FORMAT), code)
        line = row * num_coded + head
        tl.store(codes_ptr + line[:, None] * D + column[None, :], code.to(tl.uint8), mask=inside[:, None])
        tl.store(scales_ptr + line, byte.to(tl.uint8), mask=inside)
    else:
        line = row * (num_heads - num_coded) + head - num_coded
        tl.store(values_ptr + line[:, None] * D + column[None, :], y, mask=inside[:, None])
