# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false
"""Triton kernels that read planes: codes as bf16, scale bytes as the fp32 that products take."""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_common import decode


@triton.jit
def dequantise_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    num_rows,
    num_columns,
    stride_out_row,
    stride_code_row,
    stride_code_column,
    stride_scale_row,
    stride_scale_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    SWAP: tl.constexpr,
):
    """out `[M, K]`, columns contiguous, bf16: code times scale, exact for scale bytes 3..246; blocks of BLOCK_ROWS x
    BLOCK_COLUMNS."""
    row = tl.program_id(1 if SWAP else 0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0 if SWAP else 1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    wide = column.to(tl.int64)
    code = tl.load(
        codes_ptr + row[:, None] * stride_code_row + wide[None, :] * stride_code_column, mask=inside, other=0
    ).to(tl.int32)
    scale = tl.load(
        scales_ptr
        + (row // BLOCK_ROWS)[:, None] * stride_scale_row
        + (wide // BLOCK_COLUMNS)[None, :] * stride_scale_column,
        mask=inside,
        other=127,
    ).to(tl.int32)
    bits = tl.where(scale == 0, 0x400000, scale << 23)
    bits = tl.where(scale == 255, 0x7FC00000, bits)
    value = decode(code, FORMAT) * bits.to(tl.float32, bitcast=True)
    tl.store(out_ptr + row[:, None] * stride_out_row + column[None, :], value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def wide_scales_kernel(
    scales_ptr,
    out_ptr,
    num_rows,
    num_columns,
    stride_row,
    stride_column,
    out_rows,
    out_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """fp32 2^(byte - 127) of E8M0 bytes 1..254 (255: NaN), stored rows-contiguous `[out_columns, out_rows]`, padded
    with 1."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    pointers = scales_ptr + row[:, None] * stride_row + column.to(tl.int64)[None, :] * stride_column
    byte = tl.load(pointers, mask=inside, other=127).to(tl.int32)
    bits = tl.where(byte == 255, 0x7FC00000, tl.where(byte == 0, 0x400000, byte << 23))
    inside_out = (row < out_rows)[:, None] & (column < out_columns)[None, :]
    target = out_ptr + column.to(tl.int64)[None, :] * out_rows + row[:, None]
    tl.store(target, bits.to(tl.float32, bitcast=True), mask=inside_out)
