"""Fit the polynomials of `fast_gelu` and `fast_silu` and print their coefficients and errors.

Both functions are `x * s(x)` with `s` rising from 0 to 1 and `s(x) - 1/2` odd.

`fast_gelu` is `x * clamp(1/2 + x P(x^2), 0, 1)`: one clamp, free on a GPU (a modifier of the last multiply-add). The
leading coefficient of P is positive, so it saturates by itself. Above the point c where even a gate of exactly 1 is
within the error e, overshooting costs nothing; c and e are found together, by repeating the fit.

`fast_silu` is `x * (1/2 + clamp(u P(u^2), -1/2, 1/2))`, `u = clamp(x, -c, c)`. Requiring `c P(c^2) >= 1/2 + margin`
keeps rounding from stopping the clamp short of saturation: the result is exactly x above c and exactly 0 below -c.

Both minimise the largest error on a grid with a linear programme.

    python libs/jagged/tools/fit_activations.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from scipy.optimize import linprog
from scipy.special import erf, expit

Gate = Callable[[np.ndarray], np.ndarray]
MARGIN = 1e-5


def solve(basis: np.ndarray, rows: list[tuple[np.ndarray, np.ndarray, bool]]) -> tuple[np.ndarray, float]:
    """Coefficients a and the least e with `A a <= b + e` (or `<= b` where the flag is false) for each (A, b, flag)."""
    A = np.concatenate([np.hstack([a, np.full((len(a), 1), -1.0 if soft else 0.0)]) for a, _, soft in rows])
    b = np.concatenate([b for _, b, _ in rows])
    cost = np.append(np.zeros(basis.shape[1]), 1.0)
    solution = linprog(cost, A_ub=A, b_ub=b, bounds=[(None, None)] * len(cost), method="highs")
    if not solution.success:
        raise RuntimeError(solution.message)
    return solution.x[:-1], float(solution.x[-1])


def fit_gelu(gate: Gate, degree: int) -> np.ndarray:
    """Coefficients of P, low power first."""
    x = np.linspace(1e-3, 6.0, 3000)
    target = x * (gate(x) - 0.5)
    basis = x[:, None] ** 2 * (x[:, None] ** 2 / 9.0) ** np.arange(degree + 1)
    low, high = 3.0, 4.0
    coefficients = np.zeros(degree + 1)
    for _ in range(40):
        c = (low + high) / 2
        free, saturated = x > c, x >= c + 0.6
        coefficients, error = solve(
            basis,
            [
                (-basis, -target, True),
                (basis[~free], target[~free], True),
                (-basis[saturated] / x[saturated, None], np.full(saturated.sum(), -0.5 - MARGIN), False),
            ],
        )
        # With c too small, a gate of 1 above it is wrong by more than the fit; with c too large the fit is loose.
        low, high = (c, high) if c * (1 - gate(np.array([c])))[0] > error else (low, c)
    return coefficients / 9.0 ** np.arange(degree + 1)


def fit_silu(gate: Gate, c: float, degree: int) -> np.ndarray:
    """Coefficients of P, low power first."""
    # Chebyshev nodes: dense near both ends, where the error of a minimax fit peaks.
    x = np.append(c * 0.5 * (1 - np.cos(np.pi * (np.arange(1500) + 0.5) / 1500)), c)
    basis = x[:, None] * np.polynomial.chebyshev.chebvander(2 * (x / c) ** 2 - 1, degree)
    weighted, target = x[:, None] * basis, x * (gate(x) - 0.5)
    coefficients, _ = solve(
        basis,
        [(weighted, target, True), (-weighted, -target, True), (-basis[-1:], np.array([-0.5 - MARGIN]), False)],
    )
    power = np.polynomial.chebyshev.Chebyshev(coefficients, domain=[0.0, 1.0]).convert(
        kind=np.polynomial.Polynomial, domain=[-1, 1], window=[-1, 1]
    )
    return np.asarray(power.coef, dtype=np.float64) / c ** (2 * np.arange(degree + 1))


def horner(coefficients: np.ndarray, t: np.ndarray) -> np.ndarray:
    p = np.full_like(t, coefficients[-1])
    for a in coefficients[-2::-1]:
        p = p * t + t.dtype.type(a)
    return p


def evaluate(coefficients: np.ndarray, x: np.ndarray, cut: float | None) -> np.ndarray:
    """The fast function in float32, as the kernels compute it."""
    half = np.float32(0.5)
    if cut is None:
        return x * np.clip(half + x * horner(coefficients, x * x), np.float32(0), np.float32(1))
    u = np.clip(x, np.float32(-cut), np.float32(cut))
    return x * (half + np.clip(u * horner(coefficients, u * u), -half, half))


def saturation(coefficients: np.ndarray) -> float:
    """The x where 1/2 + x P(x^2) reaches 1."""
    x = np.linspace(2.0, 5.0, 3_000_001)
    return float(x[np.argmax(0.5 + x * horner(coefficients.astype(np.float64), x * x) >= 1.0)])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    gates: dict[str, Gate] = {"gelu": lambda x: 0.5 * (1 + erf(x / np.sqrt(2))), "silu": expit}
    fits = {"gelu": (fit_gelu(gates["gelu"], 4), None), "silu": (fit_silu(gates["silu"], 8.0, 7), 8.0)}
    for name, (coefficients, cut) in fits.items():
        coefficients = coefficients.astype(np.float32)
        x = np.linspace(-24.0, 24.0, 4_000_001).astype(np.float32)
        truth = x.astype(np.float64) * gates[name](x.astype(np.float64))
        error = np.abs(evaluate(coefficients, x, cut) - truth).max()
        print(f"fast_{name}: float32 error {error:.3e}, coefficients low power first:")
        print("  " + ", ".join(repr(float(a)) for a in coefficients))
        if cut is None:
            print(f"  saturates at |x| = {saturation(coefficients):.6f}")


if __name__ == "__main__":
    main()
