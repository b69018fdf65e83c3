# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""Where norms and activations end: a tile of bf16 becomes planes."""

from __future__ import annotations

import triton
import triton.language as tl
from gemworks.precision.kernel_square import store_squares
from gemworks.precision.kernel_tile import store_tile


@triton.jit
def store_planes(
    ys,
    place,
    planes,
    R8: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    REGROUP: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    SQUARES: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """A tile in pairs of bf16, quantised: planes as in `store_tile`, or of squares as in `store_squares`, whose squares
    go where the transposed scales would."""
    if SQUARES:
        store_squares(ys, place, planes, FORMAT, MODE, HARDWARE)
    else:
        store_tile(ys, place, planes, R8, C, B, FORMAT, MODE, REGROUP, DIRECTIONS, True, HARDWARE)
