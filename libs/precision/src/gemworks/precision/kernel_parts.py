# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""The sum of a product's parts, rounded once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_parts"])
def sum_parts_kernel(parts_ptr, out_ptr, size, num_parts, BLOCK: tl.constexpr):
    """parts: fp32 `[num_parts, size]`, contiguous, added in order; out: `[size]`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(parts_ptr + at, mask=inside, other=0.0)
    for part in range(1, num_parts):
        total += tl.load(parts_ptr + part * size.to(tl.int64) + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)
