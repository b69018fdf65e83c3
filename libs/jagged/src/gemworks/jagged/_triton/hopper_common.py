"""What the Hopper (Gluon) kernels share: tile lookup, the walk over tiles, activations on the ALUs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def zigzag(i, pid, programs):
    """The i-th tile of program `pid`: rounds run forwards and backwards in turn, so sorted costs even out."""
    turn = i % 2
    return i * programs + gl.where(turn == 0, pid, programs - 1 - pid)


@gluon.jit
def tile_of(t, tile_sample, tile_row, offsets_m, offsets_n, HEADS: gl.constexpr):
    """(head, first row of the tile, end of its sequence, begin and length of the other side's sequence)."""
    head = t % HEADS
    tile = t // HEADS
    sample = gl.load(tile_sample + tile)
    row = gl.load(tile_row + tile)
    m_begin = gl.load(offsets_m + sample)
    m_end = gl.load(offsets_m + sample + 1)
    n_begin = gl.load(offsets_n + sample)
    n_len = gl.load(offsets_n + sample + 1) - n_begin
    return head, m_begin + row, m_end, n_begin, n_len


@gluon.jit
def phi_fast(x, t):
    """clamp(0.5 + x (A0 + A1 t + ... + A4 t^4), 0, 1); the clamp is a modifier of the last multiply-add."""
    return gl.inline_asm_elementwise(
        """{ .reg .f32 a;
        fma.rn.f32 a, $2, 0f372FCA0C, 0fB9D89FD3;
        fma.rn.f32 a, a, $2, 0f3BDB6405;
        fma.rn.f32 a, a, $2, 0fBD74BF66;
        fma.rn.f32 a, a, $2, 0f3EC9D7C0;
        fma.rn.sat.f32 $0, $1, a, 0f3F000000; }""",
        "=f,f,f", [x, t], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def activate(x, ACT: gl.constexpr):
    if ACT == "relu":
        return gl.maximum(x, 0.0)
    if ACT == "fast_gelu":
        return x * phi_fast(x, x * x)
    return x


@gluon.jit
def activate_with_grad(x, ACT: gl.constexpr):
    if ACT == "relu":
        return gl.maximum(x, 0.0), gl.where(x > 0.0, 1.0, 0.0)
    if ACT == "fast_gelu":
        t = x * x
        phi = phi_fast(x, t)
        slope = 3.94224158e-01 + t * (-1.792585359e-01 + t * (3.347636435e-02 + t * (-2.89224656e-03 + t * 9.42999e-05)))
        # saturated: phi is exactly 0 or 1, and phi - phi^2 is 0
        inside = (phi - phi * phi) > 0.0
        return x * phi, phi + gl.where(inside, x * slope, 0.0)
    return x, gl.full(x.shape, 1.0, gl.float32, x.type.layout)
