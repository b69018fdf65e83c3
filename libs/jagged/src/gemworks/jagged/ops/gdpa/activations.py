"""The activations of GDPA. Each maps 0 to 0, so that padding adds nothing.

`fast_gelu` and `fast_silu` are *defined* here: every backend reproduces these polynomials, not the functions they stand
for. They use multiplications, additions and clamps only; coefficients come from tools/fit_activations.py.
"""

from __future__ import annotations

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

# P(t) of `x * (1/2 + clamp(u * P(u^2), -1/2, 1/2))`, u = clamp(x, -c, c); low power first, exact in float32.
FAST_GELU_CUT = 3.75
FAST_GELU_COEFFICIENTS = (
    0.39628270268440247,
    -0.06235940009355545,
    0.007763158529996872,
    -0.0006038033170625567,
    2.5908617317327298e-05,
    -4.6420888111242675e-07,
)
FAST_GELU_MAX_ERROR = 6e-4  # absolute, against the erf GELU, over all finite float32
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


def _odd_gate(x: Tensor, coefficients: tuple[float, ...], cut: float) -> Tensor:
    """`x * (1/2 + clamp(u * P(u^2), -1/2, 1/2))`: exactly x above the cut, exactly 0 below minus the cut."""
    u = x.clamp(-cut, cut)
    t = u * u
    p = torch.full_like(t, coefficients[-1])
    for a in reversed(coefficients[:-1]):
        p = p * t + a
    return x * (0.5 + (u * p).clamp(-0.5, 0.5))


def fast_gelu(x: Tensor) -> Tensor:
    """GELU by a polynomial; within FAST_GELU_MAX_ERROR of it for every finite x.

    >>> fast_gelu(torch.tensor([-1e30, 0.0, 1e30])).tolist() == [0.0, 0.0, torch.tensor(1e30).item()]
    True
    """
    return _odd_gate(x, FAST_GELU_COEFFICIENTS, FAST_GELU_CUT)


def fast_silu(x: Tensor) -> Tensor:
    """SiLU by a polynomial; within FAST_SILU_MAX_ERROR of it for every finite x."""
    return _odd_gate(x, FAST_SILU_COEFFICIENTS, FAST_SILU_CUT)


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
assert tuple(ACTIVATIONS) == get_args(Activation)
