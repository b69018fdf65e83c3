"""Element-wise activations of GDPA and their derivatives, as Triton device functions in float32."""

import triton
import triton.language as tl

# fast_gelu(x) = x * clamp(0.5 + x * (A0 + A1 t + A2 t^2 + A3 t^3 + A4 t^4), 0, 1), t = x^2
A0 = tl.constexpr(3.94224158e-01)
A1 = tl.constexpr(-5.97528453e-02)
A2 = tl.constexpr(6.69527287e-03)
A3 = tl.constexpr(-4.13178080e-04)
A4 = tl.constexpr(1.04778555e-05)


@triton.jit
def _fast_gelu(x):
    t = x * x
    p = A0 + t * (A1 + t * (A2 + t * (A3 + t * A4)))
    return x * tl.clamp(0.5 + x * p, 0.0, 1.0)


@triton.jit
def _fast_gelu_grad(x):
    t = x * x
    p = A0 + t * (A1 + t * (A2 + t * (A3 + t * A4)))
    phi = 0.5 + x * p
    slope = A0 + t * (3 * A1 + t * (5 * A2 + t * (7 * A3 + t * (9 * A4))))
    inside = (phi > 0.0) & (phi < 1.0)
    phi = tl.clamp(phi, 0.0, 1.0)
    return x * phi, phi + tl.where(inside, x * slope, 0.0)


@triton.jit
def activate(x, ACT: tl.constexpr):
    if ACT == "identity":
        return x
    elif ACT == "relu":
        return tl.maximum(x, 0.0)
    elif ACT == "fast_gelu":
        return _fast_gelu(x)
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "silu":
        return x * tl.sigmoid(x)


@triton.jit
def activate_with_grad(x, ACT: tl.constexpr):
    if ACT == "identity":
        return x, tl.full(x.shape, 1.0, x.dtype)
    elif ACT == "relu":
        return tl.maximum(x, 0.0), tl.where(x > 0.0, 1.0, 0.0)
    elif ACT == "fast_gelu":
        return _fast_gelu_grad(x)
    elif ACT == "gelu":
        phi = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * phi, phi + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACT == "silu":
        s = tl.sigmoid(x)
        return x * s, s + x * s * (1.0 - s)
