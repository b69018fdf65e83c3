"""Element-wise activations of GDPA and their derivatives for the Hopper (Gluon) kernels, in float32, on the ALUs.

The functions of activations.py once more, in the instructions of sm_90: clamps that are a modifier of the last
multiply-add, products in the order that leaves the fewest. So the two round differently.
"""

import struct

from gemworks.jagged._triton.activations import INVERSE_SQRT_TWO_PI, TANH_CUBIC, TANH_SLOPE, THREE_CUBIC
from gemworks.jagged.ops.gdpa import activations as _definition
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_GELU = _definition.FAST_GELU_COEFFICIENTS
G0, G1, G2, G3, G4 = (gl.constexpr(a) for a in _GELU)
R0, R1, R2, R3, R4 = (gl.constexpr(a) for a in _definition.FAST_GELU_SLOPE)
S0, S1, S2, S3, S4, S5, S6, S7 = (gl.constexpr(a) for a in _definition.FAST_SILU_COEFFICIENTS)
T0, T1, T2, T3, T4, T5, T6, T7 = (gl.constexpr(a) for a in _definition.FAST_SILU_SLOPE)
GELU_CUT_SQUARED = gl.constexpr(_definition.FAST_GELU_CUT**2)
SILU_CUT = gl.constexpr(_definition.FAST_SILU_CUT)
MINUS_SILU_CUT = gl.constexpr(-_definition.FAST_SILU_CUT)
LEAKY_SLOPE = gl.constexpr(_definition.LEAKY_RELU_SLOPE)


def _hex(x: float) -> str:
    return "0f" + struct.pack(">f", x).hex().upper()


def _horner(argument: str, coefficients: list[str], last: str) -> str:
    """PTX: a polynomial in `argument` into register a, and `last` after it."""
    lines = ["{ .reg .f32 a;", f"fma.rn.f32 a, {argument}, {coefficients[-1]}, {coefficients[-2]};"]
    lines += [f"fma.rn.f32 a, a, {argument}, {c};" for c in reversed(coefficients[:-2])]
    return "\n".join([*lines, last, "}"])


# clamp(1/2 + x P(t), 0, 1): the clamp is a modifier (.sat) of the last multiply-add, which the compiler does not find.
_GATE = "fma.rn.sat.f32 $0, $1, a, 0f3F000000;"
GATE_PTX = gl.constexpr(_horner("$2", [_hex(a) for a in _GELU], _GATE))
FOLDED_GATE_PTX = gl.constexpr(_horner("$2", ["$3", "$4", "$5", "$6", "$7"], _GATE))


@gluon.jit
def _gate(x, t):
    return gl.inline_asm_elementwise(GATE_PTX, "=f,f,f", [x, t], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _gelu_slope(x, t):
    """1/2 + x R(t) inside the gate, 0 or 1 (by the sign) outside."""
    slope = x * ((((t * R4 + R3) * t + R2) * t + R1) * t + R0) + 0.5
    step = gl.inline_asm_elementwise(
        "mul.rn.sat.f32 $0, $1, 0f7F000000;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )
    return gl.where(t < GELU_CUT_SQUARED, slope, step)


@gluon.jit
def _silu_gate(u, t):
    return u * (((((((t * S7 + S6) * t + S5) * t + S4) * t + S3) * t + S2) * t + S1) * t + S0)


@gluon.jit
def _clamp(x, low, high):
    return gl.minimum(gl.maximum(x, low), high)


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _normal_cdf(x):
    """(Phi(x), exp(-x^2 / 2)); erf by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7."""
    t = 1.0 / (1.0 + 0.23164189 * gl.abs(x))
    e = gl.exp(-0.5 * x * x)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    half = 0.5 * poly * e
    return gl.where(x < 0.0, half, 1.0 - half), e


@gluon.jit
def activate(x, ACT: gl.constexpr):
    if ACT == "identity":
        return x
    elif ACT == "relu":
        return gl.maximum(x, 0.0)
    elif ACT == "squared_relu":
        y = gl.maximum(x, 0.0)
        return y * y
    elif ACT == "leaky_relu":
        return gl.where(x > 0.0, x, x * LEAKY_SLOPE)
    elif ACT == "gelu":
        phi, _e = _normal_cdf(x)
        return x * phi
    elif ACT == "gelu_tanh":
        return x * _sigmoid(x * (x * x * TANH_CUBIC + 1.0) * TANH_SLOPE)
    elif ACT == "fast_gelu":
        return x * _gate(x, x * x)
    elif ACT == "silu":
        return x * _sigmoid(x)
    elif ACT == "fast_silu":
        u = _clamp(x, MINUS_SILU_CUT, SILU_CUT)
        return x * (_clamp(_silu_gate(u, u * u), -0.5, 0.5) + 0.5)
    elif ACT == "hardswish":
        return x * _clamp(x * 0.16666666666666666 + 0.5, 0.0, 1.0)
    else:
        gl.static_assert(ACT == "tanh")
        return 2.0 * _sigmoid(2.0 * x) - 1.0


@gluon.jit
def activate_with_grad(x, ACT: gl.constexpr):
    """(act(x), act'(x))."""
    if ACT == "identity":
        return x, gl.full(x.shape, 1.0, gl.float32, x.type.layout)
    elif ACT == "relu":
        return gl.maximum(x, 0.0), gl.where(x > 0.0, 1.0, 0.0)
    elif ACT == "squared_relu":
        y = gl.maximum(x, 0.0)
        return y * y, 2.0 * y
    elif ACT == "leaky_relu":
        slope = gl.where(x > 0.0, 1.0, LEAKY_SLOPE)
        return x * slope, slope
    elif ACT == "gelu":
        phi, e = _normal_cdf(x)
        return x * phi, phi + x * e * INVERSE_SQRT_TWO_PI
    elif ACT == "gelu_tanh":
        u = _clamp(x, -20.0, 20.0)
        s = _sigmoid(u * (u * u * TANH_CUBIC + 1.0) * TANH_SLOPE)
        return x * s, s + u * s * (1.0 - s) * TANH_SLOPE * (u * u * THREE_CUBIC + 1.0)
    elif ACT == "fast_gelu":
        t = x * x
        gate = _gate(x, t)
        slope = x * ((((t * R4 + R3) * t + R2) * t + R1) * t + R0) + 0.5
        return x * gate, gl.where(t < GELU_CUT_SQUARED, slope, gate)
    elif ACT == "silu":
        s = _sigmoid(x)
        y = x * s
        return y, s + y * (1.0 - s)
    elif ACT == "fast_silu":
        u = _clamp(x, MINUS_SILU_CUT, SILU_CUT)
        t = u * u
        gate = _silu_gate(u, t)
        slope = u * (((((((t * T7 + T6) * t + T5) * t + T4) * t + T3) * t + T2) * t + T1) * t + T0) + 0.5
        clamped = _clamp(gate, -0.5, 0.5)
        inside = (gl.abs(x) <= SILU_CUT) & (gl.abs(gate) <= 0.5)
        return x * (clamped + 0.5), gl.where(inside, slope, clamped + 0.5)
    elif ACT == "hardswish":
        gate = _clamp(x * 0.16666666666666666 + 0.5, 0.0, 1.0)
        return x * gate, gl.where(gl.abs(x) < 3.0, x * 0.3333333333333333 + 0.5, gate)
    else:
        gl.static_assert(ACT == "tanh")
        y = 2.0 * _sigmoid(2.0 * x) - 1.0
        return y, 1.0 - y * y


@gluon.jit
def slope_only(x, ACT: gl.constexpr):
    """act'(x) where act(x) itself is not needed."""
    if ACT == "fast_gelu":
        return _gelu_slope(x, x * x)
    else:
        _y, slope = activate_with_grad(x, ACT)
        return slope


@gluon.jit
def fold(scale):
    """Coefficients of the gate in terms of the raw score s = x / scale: scale^(2 k + 1) G_k."""
    t = scale * scale
    b0 = scale * G0
    b1 = scale * t * G1
    b2 = scale * t * t * G2
    b3 = scale * t * t * t * G3
    b4 = scale * t * t * t * t * G4
    return b0, b1, b2, b3, b4


@gluon.jit
def weigh(s, scale, folded, ACT: gl.constexpr, FOLD: gl.constexpr):
    """act(scale s); with FOLD act(scale s) / scale, one product less. `folded`: of `fold`."""
    if FOLD:
        gl.static_assert(ACT == "fast_gelu")
        t = s * s
        b0, b1, b2, b3, b4 = folded
        gate = gl.inline_asm_elementwise(
            FOLDED_GATE_PTX, "=f,f,f,f,f,f,f,f", [s, t, b0, b1, b2, b3, b4], dtype=gl.float32, is_pure=True, pack=1
        )
        return s * gate
    else:
        return activate(s * scale, ACT)
