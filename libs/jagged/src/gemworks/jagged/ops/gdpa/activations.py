"""The activations of GDPA. Each maps 0 to 0, so that padding adds nothing.

`fast_gelu` and `fast_silu` are *defined* here: every backend reproduces these polynomials, not the functions they stand
for. They use multiplications, additions and clamps only; coefficients come from tools/fit_activations.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal[
    "identity",
    "relu",
    "squared_relu",
    "leaky_relu",
    "gelu",
    "gelu_tanh",
    "fast_gelu",
    "silu",
    "fast_silu",
    "hardswish",
    "tanh",
]

LEAKY_RELU_SLOPE = 0.01

# fast_gelu(x) = x * clamp(1/2 + x * P(x^2), 0, 1); low power first, exact in float32. The leading coefficient is
# positive, so the gate saturates by itself: at |x| = FAST_GELU_CUT and beyond the result is exactly x or exactly 0.
FAST_GELU_COEFFICIENTS = (
    0.39411699771881104,
    -0.059641171246767044,
    0.006660657934844494,
    -0.0004090711008757353,
    1.0313346137991175e-05,
)
FAST_GELU_CUT = 3.4197
FAST_GELU_MAX_ERROR = 1.2e-3  # absolute, against the erf GELU, over all finite float32
# fast_silu(x) = x * (1/2 + clamp(u * P(u^2), -1/2, 1/2)), u = clamp(x, -c, c).
FAST_SILU_CUT = 8.0
FAST_SILU_COEFFICIENTS = (
    0.24404563009738922,
    -0.016673244535923004,
    0.000978756812401116,
    -3.797409954131581e-05,
    9.22345748222142e-07,
    -1.3400786258443986e-08,
    1.0607228984049755e-10,
    -3.5092935501968014e-13,
)
FAST_SILU_MAX_ERROR = 3e-3  # absolute, against SiLU, over all finite float32


def _polynomial(coefficients: tuple[float, ...], t: Tensor) -> Tensor:
    p = torch.full_like(t, coefficients[-1])
    for a in reversed(coefficients[:-1]):
        p = p * t + a
    return p


def fast_gelu(x: Tensor) -> Tensor:
    """GELU by a polynomial; within FAST_GELU_MAX_ERROR of it for every finite x.

    >>> fast_gelu(torch.tensor([-1e30, 0.0, 1e30])).tolist() == [0.0, 0.0, torch.tensor(1e30).item()]
    True
    """
    t = (x * x).clamp(max=64.0)  # long saturated; keeps infinities out of autograd's products
    return x * (0.5 + x * _polynomial(FAST_GELU_COEFFICIENTS, t)).clamp(0.0, 1.0)


def fast_silu(x: Tensor) -> Tensor:
    """SiLU by a polynomial; within FAST_SILU_MAX_ERROR of it for every finite x."""
    u = x.clamp(-FAST_SILU_CUT, FAST_SILU_CUT)
    return x * (0.5 + (u * _polynomial(FAST_SILU_COEFFICIENTS, u * u)).clamp(-0.5, 0.5))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "leaky_relu": lambda x: F.leaky_relu(x, LEAKY_RELU_SLOPE),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "fast_gelu": fast_gelu,
    "silu": F.silu,
    "fast_silu": fast_silu,
    "hardswish": F.hardswish,
    "tanh": torch.tanh,
}


def _slope_coefficients(coefficients: tuple[float, ...]) -> tuple[float, ...]:
    """`d/dx (x^2 P(x^2)) = x * R(x^2)`: the coefficients of R, low power first."""
    return tuple(2.0 * (k + 1) * a for k, a in enumerate(coefficients))


FAST_GELU_SLOPE = _slope_coefficients(FAST_GELU_COEFFICIENTS)
FAST_SILU_SLOPE = _slope_coefficients(FAST_SILU_COEFFICIENTS)


def _fast_gelu_grad(x: Tensor) -> Tensor:
    # Inside the gate the derivative of x (1/2 + x P) is 1/2 + x R; outside it is the gate, 0 or 1.
    inside = x.abs() < FAST_GELU_CUT
    slope = 0.5 + x * _polynomial(FAST_GELU_SLOPE, (x * x).clamp(max=FAST_GELU_CUT**2))
    return torch.where(inside, slope, (x > 0).to(x.dtype))


def _fast_silu_grad(x: Tensor) -> Tensor:
    u = x.clamp(-FAST_SILU_CUT, FAST_SILU_CUT)
    gate = u * _polynomial(FAST_SILU_COEFFICIENTS, u * u)
    inside = (x.abs() <= FAST_SILU_CUT) & (gate.abs() <= 0.5)
    slope = 0.5 + u * _polynomial(FAST_SILU_SLOPE, u * u)
    return torch.where(inside, slope, 0.5 + gate.clamp(-0.5, 0.5))


def _gelu_grad(x: Tensor) -> Tensor:
    gate = 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))
    return gate + x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _gelu_tanh_grad(x: Tensor) -> Tensor:
    x = x.clamp(-20.0, 20.0)  # long saturated
    slope, cubic = math.sqrt(2.0 / math.pi), 0.044715
    t = torch.tanh(slope * (x + cubic * x * x * x))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope * (1.0 + 3.0 * cubic * x * x)


def _silu_grad(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def _hardswish_grad(x: Tensor) -> Tensor:
    return torch.where(x >= 3.0, 1.0, torch.where(x <= -3.0, 0.0, x / 3.0 + 0.5))


# d act / d x, written out: the backward of the op recomputes the logits and multiplies by these.
DERIVATIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": torch.ones_like,
    "relu": lambda x: (x > 0).to(x.dtype),
    "squared_relu": lambda x: 2.0 * F.relu(x),
    "leaky_relu": lambda x: torch.where(x > 0, torch.ones_like(x), LEAKY_RELU_SLOPE),
    "gelu": _gelu_grad,
    "gelu_tanh": _gelu_tanh_grad,
    "fast_gelu": _fast_gelu_grad,
    "silu": _silu_grad,
    "fast_silu": _fast_silu_grad,
    "hardswish": _hardswish_grad,
    "tanh": lambda x: 1.0 - torch.tanh(x).square(),
}
assert tuple(ACTIVATIONS) == tuple(DERIVATIVES) == get_args(Activation)
