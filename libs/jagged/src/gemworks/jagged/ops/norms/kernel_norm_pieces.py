"""Backward of LayerNorm and RMSNorm with sums over columns, for widths far below the next power of two.

Triton's tiles are powers of two wide: a row of 3,000 columns in a tile of 4,096 pays for 1,096 that it does not have,
in registers and in instructions. Here a row is PIECES tiles of BLOCK_D columns, three of 1,024. What is reduced over
the row is added up piece by piece first, and all of it is then exchanged between the threads at once: two rounds (the
mean, then the rest) where `norm_bwd_kernel` has four.

Letters: D width. Rows are addressed as in `kernel_norm`.
"""

# pyright: reportArgumentType=false, reportOptionalOperand=false, reportOperatorIssue=false
# (Triton's functions are annotated for its tracer, not for type checkers.)
# ruff: noqa: RUF005  (Triton compiles no starred expression.)
from __future__ import annotations

import triton
import triton.language as tl
from gemworks.jagged.ops.norms.kernel_norm import row_start


@triton.jit
def _add_each(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit(do_not_specialize=["num_rows", "end_at"])
def norm_bwd_pieces_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, end_ptr, end_at, num_rows, eps,
    dy_outer, dy_inner, dh_outer, dh_inner, h_outer, h_inner,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PIECES: tl.constexpr, INNER: tl.constexpr, UNIT: tl.constexpr,
    CENTER: tl.constexpr, HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_DWEIGHT: tl.constexpr,
    HAS_DBIAS: tl.constexpr, HAS_END: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `norm_bwd_kernel`, a row at a time: the same arguments, the same results but for the order of sums."""
    program = tl.program_id(0)
    end = num_rows
    if HAS_END:
        end = tl.minimum(tl.load(end_ptr + end_at).to(tl.int32), num_rows)
    col_D = tl.arange(0, BLOCK_D)
    zeros_D = tl.zeros([BLOCK_D], tl.float32)
    weights, dweights, dbiases = (), (), ()
    for p in tl.static_range(PIECES):
        if HAS_WEIGHT:
            col = p * BLOCK_D + col_D
            weights = weights + (tl.load(weight_ptr + col, mask=col < D, other=0.0),)
        dweights = dweights + (zeros_D,)
        dbiases = dbiases + (zeros_D,)
    for row in tl.range(program, num_rows, tl.num_programs(0), num_stages=STAGES):
        r = tl.cast(row, tl.int64)
        live = row < end
        h_row = h_ptr + row_start(r, h_outer, h_inner, INNER, UNIT)
        dy_row = dy_ptr + row_start(r, dy_outer, dy_inner, INNER, UNIT)
        dh_row = dh_ptr + row_start(r, dh_outer, dh_inner, INNER, UNIT)
        hs, dys, dhs = (), (), ()
        sum_D = zeros_D
        for p in tl.static_range(PIECES):
            col = p * BLOCK_D + col_D
            inside = col < D
            if HAS_END:
                inside = inside & live
            h_D = tl.load(h_row + col, mask=inside, other=0.0).to(tl.float32)
            hs = hs + (h_D,)
            dys = dys + (tl.load(dy_row + col, mask=inside, other=0.0),)
            if HAS_DH:
                dhs = dhs + (tl.load(dh_row + col, mask=inside, other=0.0),)
            sum_D += h_D
        mean = 0.0
        if CENTER:
            mean = tl.sum(sum_D, axis=0) / D
        # With c the centred row, its scale s and n = s c: sums of c c, g c and g give s, mean(g n) and mean(g).
        cc_D, gc_D, g_sum_D = zeros_D, zeros_D, zeros_D
        centred = ()
        for p in tl.static_range(PIECES):
            c_D = hs[p]
            if CENTER:
                c_D -= mean
                if (p + 1) * BLOCK_D > D:
                    c_D = tl.where(p * BLOCK_D + col_D < D, c_D, 0.0)
            g_D = dys[p].to(tl.float32)
            if HAS_WEIGHT:
                g_D *= weights[p].to(tl.float32)
            cc_D += c_D * c_D
            gc_D += g_D * c_D
            g_sum_D += g_D
            centred = centred + (c_D,)
        cc, gc, g_sum = tl.reduce((cc_D, gc_D, g_sum_D), 0, _add_each)
        scale = tl.rsqrt(cc / D + eps)
        mean_gn, mean_g = gc * scale / D, g_sum / D
        new_dweights, new_dbiases = (), ()
        for p in tl.static_range(PIECES):
            col = p * BLOCK_D + col_D
            n_D = centred[p] * scale
            g_D = dys[p].to(tl.float32)
            gn_D = g_D * n_D
            if HAS_END:  # such a row has g = 0, but eps = 0 makes its n NaN
                gn_D = tl.where(live, gn_D, 0.0)
            new_dweights = new_dweights + (dweights[p] + gn_D,)
            new_dbiases = new_dbiases + (dbiases[p] + g_D,)
            if HAS_WEIGHT:
                g_D *= weights[p].to(tl.float32)
            dx_D = g_D - n_D * mean_gn
            if CENTER:
                dx_D -= mean_g
            dx_D *= scale
            if HAS_DH:
                dx_D += dhs[p].to(tl.float32)
            if HAS_END:
                dx_D = tl.where(live, dx_D, 0.0)
            tl.store(dx_ptr + r * D + col, dx_D.to(dx_ptr.dtype.element_ty), mask=col < D)
        dweights, dbiases = new_dweights, new_dbiases
    for p in tl.static_range(PIECES):
        col = p * BLOCK_D + col_D
        partial = tl.cast(program, tl.int64) * D + col
        if HAS_DWEIGHT:
            tl.store(dweight_ptr + partial, dweights[p], mask=col < D)
        if HAS_DBIAS:
            tl.store(dbias_ptr + partial, dbiases[p], mask=col < D)
