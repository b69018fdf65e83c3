"""Element-wise activations of GDPA and their derivatives, as Triton device functions in float32.

Only additions, products, clamps, exp and division: no libdevice, so the interpreter runs the same code. The polynomials
are those of ops/gdpa/activations.py.
"""

import triton
import triton.language as tl
from gemworks.jagged.ops.gdpa import activations as _definition

_GELU = _definition.FAST_GELU_COEFFICIENTS
_SILU = _definition.FAST_SILU_COEFFICIENTS
G0, G1, G2, G3, G4 = (tl.constexpr(a) for a in _GELU)
R0, R1, R2, R3, R4 = (tl.constexpr(a) for a in _definition.FAST_GELU_SLOPE)
S0, S1, S2, S3, S4, S5, S6, S7 = (tl.constexpr(a) for a in _SILU)
T0, T1, T2, T3, T4, T5, T6, T7 = (tl.constexpr(a) for a in _definition.FAST_SILU_SLOPE)
GELU_CUT_SQUARED = tl.constexpr(_definition.FAST_GELU_CUT**2)
SILU_CUT = tl.constexpr(_definition.FAST_SILU_CUT)
MINUS_SILU_CUT = tl.constexpr(-_definition.FAST_SILU_CUT)
LEAKY_SLOPE = tl.constexpr(_definition.LEAKY_RELU_SLOPE)
TANH_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): (1 + tanh(y)) / 2 = sigmoid(2 y)
TANH_CUBIC = tl.constexpr(0.044715)
THREE_CUBIC = tl.constexpr(0.134145)
INVERSE_SQRT_TWO_PI = tl.constexpr(0.3989422804014327)
LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x LOG2_E), for every softmax


@triton.jit
def _fast_gelu_gate(x, t):
    p = (((t * G4 + G3) * t + G2) * t + G1) * t + G0
    return tl.clamp(x * p + 0.5, 0.0, 1.0)


@triton.jit
def _fast_gelu_slope(x, t, gate):
    slope = x * ((((t * R4 + R3) * t + R2) * t + R1) * t + R0) + 0.5
    return tl.where(t < GELU_CUT_SQUARED, slope, gate)


@triton.jit
def _fast_silu_gate(u, t):
    """u P(t), not clamped."""
    return u * (((((((t * S7 + S6) * t + S5) * t + S4) * t + S3) * t + S2) * t + S1) * t + S0)


@triton.jit
def _fast_silu_slope(x, u, t, gate):
    slope = u * (((((((t * T7 + T6) * t + T5) * t + T4) * t + T3) * t + T2) * t + T1) * t + T0) + 0.5
    inside = (tl.abs(x) <= SILU_CUT) & (tl.abs(gate) <= 0.5)
    return tl.where(inside, slope, 0.5 + tl.clamp(gate, -0.5, 0.5))


@triton.jit
def _normal_cdf(x):
    """(Phi(x), exp(-x^2 / 2)); erf by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7."""
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    e = tl.exp(-0.5 * x * x)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    half = 0.5 * poly * e  # Phi(-|x|)
    return tl.where(x < 0.0, half, 1.0 - half), e


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, ACT: tl.constexpr):
    if ACT == "identity":
        return x
    elif ACT == "relu":
        return tl.maximum(x, 0.0)
    elif ACT == "squared_relu":
        y = tl.maximum(x, 0.0)
        return y * y
    elif ACT == "leaky_relu":
        return tl.where(x > 0.0, x, x * LEAKY_SLOPE)
    elif ACT == "gelu":
        phi, _ = _normal_cdf(x)
        return x * phi
    elif ACT == "gelu_tanh":
        return x * _sigmoid(x * (x * x * TANH_CUBIC + 1.0) * TANH_SLOPE)
    elif ACT == "fast_gelu":
        return x * _fast_gelu_gate(x, x * x)
    elif ACT == "silu":
        return x * _sigmoid(x)
    elif ACT == "fast_silu":
        u = tl.clamp(x, MINUS_SILU_CUT, SILU_CUT)
        return x * (0.5 + tl.clamp(_fast_silu_gate(u, u * u), -0.5, 0.5))
    elif ACT == "hardswish":
        return x * tl.clamp(x * 0.16666666666666666 + 0.5, 0.0, 1.0)
    else:
        tl.static_assert(ACT == "tanh")
        return 2.0 * _sigmoid(2.0 * x) - 1.0


@triton.jit
def activate_with_grad(x, ACT: tl.constexpr):
    """(act(x), act'(x))."""
    if ACT == "identity":
        return x, tl.full(x.shape, 1.0, x.dtype)
    elif ACT == "relu":
        return tl.maximum(x, 0.0), tl.where(x > 0.0, 1.0, 0.0)
    elif ACT == "squared_relu":
        y = tl.maximum(x, 0.0)
        return y * y, 2.0 * y
    elif ACT == "leaky_relu":
        slope = tl.where(x > 0.0, 1.0, LEAKY_SLOPE)
        return x * slope, slope
    elif ACT == "gelu":
        phi, e = _normal_cdf(x)
        return x * phi, phi + x * INVERSE_SQRT_TWO_PI * e
    elif ACT == "gelu_tanh":
        u = tl.clamp(x, -20.0, 20.0)  # long saturated; keeps 0 * inf out
        s = _sigmoid(u * (u * u * TANH_CUBIC + 1.0) * TANH_SLOPE)
        slope = s + u * s * (1.0 - s) * TANH_SLOPE * (u * u * THREE_CUBIC + 1.0)
        return x * s, slope
    elif ACT == "fast_gelu":
        t = x * x
        gate = _fast_gelu_gate(x, t)
        return x * gate, _fast_gelu_slope(x, t, gate)
    elif ACT == "silu":
        s = _sigmoid(x)
        y = x * s
        return y, s + y * (1.0 - s)
    elif ACT == "fast_silu":
        u = tl.clamp(x, MINUS_SILU_CUT, SILU_CUT)
        t = u * u
        gate = _fast_silu_gate(u, t)
        return x * (0.5 + tl.clamp(gate, -0.5, 0.5)), _fast_silu_slope(x, u, t, gate)
    elif ACT == "hardswish":
        gate = tl.clamp(x * 0.16666666666666666 + 0.5, 0.0, 1.0)
        return x * gate, tl.where(tl.abs(x) < 3.0, x * 0.3333333333333333 + 0.5, gate)
    else:
        tl.static_assert(ACT == "tanh")
        y = 2.0 * _sigmoid(2.0 * x) - 1.0
        return y, 1.0 - y * y
