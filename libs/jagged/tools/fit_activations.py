"""Fit the polynomials of `fast_gelu` and `fast_silu` and print their coefficients and errors.

Both functions are `x * s(x)` with `s` rising from 0 to 1 and `s(x) - 1/2` odd. We approximate

    s(x) ~ 1/2 + clamp(u * P(u^2), -1/2, 1/2),    u = clamp(x, -c, c)

by minimising the maximum of `|x * (s(x) - 1/2 - x P(x^2))|` over a grid on [0, c] with a linear programme, under the
constraint `c P(c^2) >= 1/2 + margin`: rounding then can't keep the clamp from saturating, so the result is exactly x
above c and exactly 0 below -c, for every finite x.

    python libs/jagged/tools/fit_activations.py
"""

from __future__ import annotations

import argparse

import numpy as np
from scipy.optimize import linprog
from scipy.special import erf, expit


def fit(s: np.ndarray, x: np.ndarray, degree: int, margin: float) -> tuple[np.ndarray, float]:
    """Minimax coefficients of P (low to high, `degree` + 1 of them) and the bound reached on the grid."""
    c = x[-1]
    t = (x / c) ** 2
    basis = x[:, None] * np.polynomial.chebyshev.chebvander(2 * t - 1, degree)
    weighted = x[:, None] * basis
    target = x * (s - 0.5)
    ones = np.ones((len(x), 1))
    upper = np.concatenate([np.block([[weighted, -ones], [-weighted, -ones]]), np.append(-basis[-1], 0.0)[None]])
    bounds = np.concatenate([target, -target, [-(0.5 + margin)]])
    cost = np.append(np.zeros(degree + 1), 1.0)
    solution = linprog(cost, A_ub=upper, b_ub=bounds, bounds=[(None, None)] * (degree + 2), method="highs")
    if not solution.success:
        raise RuntimeError(solution.message)
    cheb = np.polynomial.chebyshev.Chebyshev(solution.x[:-1], domain=[0.0, 1.0])
    power = cheb.convert(kind=np.polynomial.Polynomial, domain=[-1, 1], window=[-1, 1]).coef
    power = power / c ** (2 * np.arange(degree + 1))
    return power, float(solution.x[-1])


def max_error(coefficients: np.ndarray, c: float, s, dtype=np.float32) -> float:
    """The largest |fast(x) - x s(x)| on [-3 c, 3 c], evaluated in `dtype` as the kernels do."""
    x = np.linspace(-3 * c, 3 * c, 2_000_001).astype(dtype)
    u = np.clip(x, dtype(-c), dtype(c))
    t = u * u
    p = np.full_like(t, dtype(coefficients[-1]))
    for a in coefficients[-2::-1]:
        p = p * t + dtype(a)
    fast = x * (dtype(0.5) + np.clip(u * p, dtype(-0.5), dtype(0.5)))
    x64 = x.astype(np.float64)
    return float(np.abs(fast.astype(np.float64) - x64 * s(x64)).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="errors over a range of cut-offs and degrees")
    args = parser.parse_args()
    functions = {
        "gelu": (lambda x: 0.5 * (1 + erf(x / np.sqrt(2))), [3.0, 3.25, 3.5, 3.75, 4.0, 4.25, 4.5], 3.75, 5),
        "silu": (expit, [7.0, 8.0, 9.0, 10.0, 11.0], 8.0, 7),
    }
    for name, (s, cuts, c, degree) in functions.items():
        for cut in cuts if args.sweep else [c]:
            for d in range(3, 11) if args.sweep else [degree]:
                # Chebyshev nodes: dense near both ends, where the error of a minimax fit peaks.
                x = cut * 0.5 * (1 - np.cos(np.pi * (np.arange(1500) + 0.5) / 1500))
                x = np.append(x, cut)
                coefficients, bound = fit(s(x), x, d, margin=1e-5)
                error = max_error(coefficients, cut, s)
                print(f"fast_{name}: c = {cut}, degree of P = {d}, grid bound {bound:.3e}, float32 error {error:.3e}")
                if not args.sweep:
                    print("  " + ", ".join(repr(float(np.float32(a))) for a in coefficients))


if __name__ == "__main__":
    main()
