# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false
"""Bytes of a matrix exchanged over its diagonal: the codes of a weight that was gathered one way only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def transpose_kernel(x_ptr, out_ptr, num_rows, num_columns, column_tiles, SIZE: tl.constexpr):
    """uint8 `[M, K]` to `[K, M]`, both contiguous; a program a square of SIZE."""
    tile = tl.program_id(0)
    row = (tile // column_tiles).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    column = (tile % column_tiles).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * num_columns + column[None, :], mask=inside, other=0)
    tl.store(out_ptr + column[:, None] * num_rows + row[None, :], tl.trans(x), mask=tl.trans(inside))
