"""The backward of k's norm and rotation, for the end of the dK kernel in plain Triton.

Attention saw y = turn(s x): x normed by s = 1 / sqrt(mean(x^2) + eps) and turned. A turn keeps lengths, so with dy the
gradient of y

    dx = s turn_back(dy - y mean(dy y)),

which needs y, already here, and s, one number a row and head, but not x.

Letters: n key rows of a tile, H head width, J = H / 2 turned pairs.
"""

import triton
import triton.language as tl


@triton.jit
def norm_rope_back(
    dy_nH, y_nH, cos, sin, scales, rows, own, scale_st,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """dx in float32. `scales` points at this head's first, `rows` are those of the packed tensors; H a power of two."""
    ROWS: tl.constexpr = dy_nH.shape[0]
    H: tl.constexpr = dy_nH.shape[1]
    J: tl.constexpr = H // 2
    if NORM:
        y_nH = y_nH.to(tl.float32)
        s_n = tl.load(scales + rows.to(tl.int64) * scale_st, mask=own, other=0.0)
        dy_nH = (dy_nH - y_nH * (tl.sum(dy_nH * y_nH, 1) / H)[:, None]) * s_n[:, None]
    if ROPE:
        at_nJ = rows.to(tl.int64)[:, None] * J + tl.arange(0, J)[None, :]
        cos_nJ = tl.load(cos + at_nJ, mask=own[:, None], other=0.0).to(tl.float32)
        sin_nJ = tl.load(sin + at_nJ, mask=own[:, None], other=0.0).to(tl.float32)
        a_nJ, b_nJ = tl.split(tl.permute(tl.reshape(dy_nH, [ROWS, 2, J]), [0, 2, 1]))
        both_nJ2 = tl.join(a_nJ * cos_nJ + b_nJ * sin_nJ, b_nJ * cos_nJ - a_nJ * sin_nJ)
        dy_nH = tl.reshape(tl.permute(both_nJ2, [0, 2, 1]), [ROWS, H])
    return dy_nH
