"""The backward of k's norm and rotation, for the end of the fused backward for Hopper: kernel_norm_rope_back.py's twin.

A thread of wgmma's layout has both columns of every pair (j, j + J), so turning back moves nothing between threads.

Letters: n key rows of one consumer (64), H head width, J = H / 2 turned pairs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def load_turn(
    tables, rows, inside, head, J: gl.constexpr, NORM: gl.constexpr, ROPE: gl.constexpr, HALF: gl.constexpr
):  # fmt: skip
    """(cosines, sines [n, J], scales [n]) of some rows; 0 where `inside` is not, and where there is none to load."""
    cos_ptr, sin_ptr, scale_ptr, scale_stride_t = tables
    cos_nJ = 0.0
    sin_nJ = 0.0
    scale_n = 0.0
    if ROPE:
        at_nJ = (rows.to(gl.int64) * J)[:, None] + gl.arange(0, J, layout=gl.SliceLayout(0, HALF))[None, :]
        cos_nJ = gl.load(cos_ptr + at_nJ, mask=inside[:, None], other=0.0)
        sin_nJ = gl.load(sin_ptr + at_nJ, mask=inside[:, None], other=0.0)
    if NORM:
        scale_n = gl.load(scale_ptr + rows.to(gl.int64) * scale_stride_t + head, mask=inside, other=0.0)
    return cos_nJ, sin_nJ, scale_n


@gluon.jit
def norm_rope_back(
    dy_nH, ya_smem, yb_smem, turn, NORM: gl.constexpr, ROPE: gl.constexpr, HALF: gl.constexpr
):  # fmt: skip
    """(columns below J, columns from J) of dx, in float32 and in HALF; `turn` is of `load_turn`, y in two halves."""
    H: gl.constexpr = dy_nH.shape[1]
    cos_nJ, sin_nJ, scale_n = turn
    a_nJ, b_nJ = gl.split(gl.permute(gl.reshape(dy_nH, [dy_nH.shape[0], 2, H // 2]), [0, 2, 1]))
    a_nJ = gl.convert_layout(a_nJ, HALF, assert_trivial=True)
    b_nJ = gl.convert_layout(b_nJ, HALF, assert_trivial=True)
    if NORM:
        ya_nJ = ya_smem.load(HALF).to(gl.float32)
        yb_nJ = yb_smem.load(HALF).to(gl.float32)
        mean_n = gl.sum(a_nJ * ya_nJ + b_nJ * yb_nJ, 1) / H
        a_nJ = (a_nJ - ya_nJ * mean_n[:, None]) * scale_n[:, None]
        b_nJ = (b_nJ - yb_nJ * mean_n[:, None]) * scale_n[:, None]
    if ROPE:
        cos_nJ = cos_nJ.to(gl.float32)
        sin_nJ = sin_nJ.to(gl.float32)
        turned_nJ = a_nJ * cos_nJ + b_nJ * sin_nJ
        b_nJ = b_nJ * cos_nJ - a_nJ * sin_nJ
        a_nJ = turned_nJ
    return a_nJ, b_nJ
