"""`Y_b = W X_b + base` for the samples of a batch in Triton, forward and backward, bound by memory.

W, base and the sums of their gradients stay in a program's registers while it walks over samples: what moves is X, Y
and their gradients, once each.

Letters: B samples, N tokens in, K tokens out, D columns.
"""

# pyright: reportArgumentType=false, reportOptionalOperand=false, reportOperatorIssue=false
# (Triton's functions are annotated for its tracer, not for type checkers.)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_samples"])
def token_map_fwd_kernel(
    x_ptr, weight_ptr, base_ptr, y_ptr, num_samples,
    K: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of columns and tokens out, of every so many-th sample."""
    col_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    row_K = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    row_N = tl.arange(0, BLOCK_N)
    inside_KN = (row_K < K)[:, None] & (row_N < N)[None, :]
    inside_KD = (row_K < K)[:, None] & (col_D < D)[None, :]
    inside_ND = (row_N < N)[:, None] & (col_D < D)[None, :]
    at_KN = row_K[:, None] * N + row_N[None, :]
    at_KD = row_K[:, None] * D + col_D[None, :]
    at_ND = row_N[:, None] * D + col_D[None, :]
    w_KN = tl.load(weight_ptr + at_KN, mask=inside_KN, other=0.0).to(x_ptr.dtype.element_ty)
    base_KD = tl.load(base_ptr + at_KD, mask=inside_KD, other=0.0).to(tl.float32)
    for sample in tl.range(tl.program_id(2), num_samples, tl.num_programs(2), num_stages=STAGES):
        b = tl.cast(sample, tl.int64)
        x_ND = tl.load(x_ptr + b * (N * D) + at_ND, mask=inside_ND, other=0.0)
        y_KD = tl.dot(w_KN, x_ND) + base_KD  # [BK, BN] @ [BN, BD]
        tl.store(y_ptr + b * (K * D) + at_KD, y_KD.to(y_ptr.dtype.element_ty), mask=inside_KD)


@triton.jit(do_not_specialize=["num_samples"])
def token_map_bwd_kernel(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, dbase_ptr, num_samples,
    K: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of columns and all tokens, of every so many-th sample: dx, and this program's share of the other two.

    dweight is [programs, K, N], dbase [programs of a tile, K, D], both fp32.
    """
    col_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    row_K, row_N = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    inside_KN = (row_K < K)[:, None] & (row_N < N)[None, :]
    inside_KD = (row_K < K)[:, None] & (col_D < D)[None, :]
    inside_ND = (row_N < N)[:, None] & (col_D < D)[None, :]
    at_KN = row_K[:, None] * N + row_N[None, :]
    at_KD = row_K[:, None] * D + col_D[None, :]
    at_ND = row_N[:, None] * D + col_D[None, :]
    w_KN = tl.load(weight_ptr + at_KN, mask=inside_KN, other=0.0).to(x_ptr.dtype.element_ty)
    dw_KN = tl.zeros([BLOCK_K, BLOCK_N], dtype=tl.float32)
    dbase_KD = tl.zeros([BLOCK_K, BLOCK_D], dtype=tl.float32)
    for sample in tl.range(tl.program_id(1), num_samples, tl.num_programs(1), num_stages=STAGES):
        b = tl.cast(sample, tl.int64)
        dy_KD = tl.load(dy_ptr + b * (K * D) + at_KD, mask=inside_KD, other=0.0)
        x_ND = tl.load(x_ptr + b * (N * D) + at_ND, mask=inside_ND, other=0.0)
        dx_DN = tl.dot(tl.trans(dy_KD), w_KN)  # [BD, BK] @ [BK, BN]: 64 rows, as tensor cores want them
        tl.store(dx_ptr + b * (N * D) + at_ND, tl.trans(dx_DN).to(dx_ptr.dtype.element_ty), mask=inside_ND)
        dw_KN = tl.dot(dy_KD, tl.trans(x_ND), acc=dw_KN)  # [BK, BD] @ [BD, BN]
        dbase_KD += dy_KD.to(tl.float32)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(dweight_ptr + program * (K * N) + at_KN, dw_KN, mask=inside_KN)
    tl.store(dbase_ptr + tl.program_id(1) * (K * D) + at_KD, dbase_KD, mask=inside_KD)
