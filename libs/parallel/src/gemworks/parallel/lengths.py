"""Laws of sequence length, the cost of a batch under them, and what the slowest of many ranks can be expected to
take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from gemworks.parallel._check import number, one_of, whole
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LengthLaw:
    """A distribution of lengths on 1..max_len.

    Attributes:
        name: "uniform" on [low, max], or "zipf": P(l) proportional to l^-exponent on [low, max].
        max_len: longest.
        low: shortest.
        exponent: of "zipf".

    Example:
        >>> LengthLaw(name="uniform", max_len=3).mean
        2.0
    """

    name: str
    max_len: int
    low: int = 1
    exponent: float = 1.2

    def __post_init__(self) -> None:
        one_of("name", self.name, ("uniform", "zipf"))
        whole("max_len", self.max_len)
        whole("low", self.low)
        number("exponent", self.exponent)
        if not 1 <= self.low <= self.max_len:
            raise ValueError(f"low: got {self.low}, expected 1..max_len = {self.max_len}")

    def probabilities(self) -> Tensor:
        """float64 [max_len - low + 1]: the probability of each length from `low` on."""
        # Dispatch modes make tensors of their own kind, which must not be kept for calls outside of them.
        make = _probabilities.__wrapped__ if torch._C._len_torch_dispatch_stack() else _probabilities
        return make(self)

    def lengths(self) -> Tensor:
        """float64 [max_len - low + 1]: the lengths themselves."""
        return torch.arange(self.low, self.max_len + 1, dtype=torch.float64)

    def moment(self, k: int) -> float:
        """E[l^k]."""
        return float((self.probabilities() * self.lengths() ** k).sum())

    @property
    def mean(self) -> float:
        return self.moment(1)

    def sample(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        """int64 lengths of the given shape."""
        cumulative = self.probabilities().cumsum(0)
        u = torch.rand(tuple(shape), generator=generator, dtype=torch.float64) * cumulative[-1]
        return self.low + torch.searchsorted(cumulative, u).clamp(max=cumulative.numel() - 1)

    @classmethod
    def named(cls, name: str, max_len: int) -> LengthLaw:
        """The laws of the benchmarks: "uniform" [1, max], "uniform0.4" [0.4 max, max], "zipf1.2" (heavy tail)."""
        if name == "uniform":
            return cls(name="uniform", max_len=max_len)
        if name == "uniform0.4":
            return cls(name="uniform", max_len=max_len, low=max(1, round(0.4 * max_len)))
        if name == "zipf1.2":
            return cls(name="zipf", max_len=max_len, exponent=1.2)
        raise ValueError(f"name: got {name!r}, expected 'uniform', 'uniform0.4' or 'zipf1.2'")


@lru_cache(maxsize=32)
def _probabilities(law: LengthLaw) -> Tensor:
    lengths = torch.arange(law.low, law.max_len + 1, dtype=torch.float64)
    weights = torch.ones_like(lengths) if law.name == "uniform" else lengths**-law.exponent
    return weights / weights.sum()


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The time of a batch as a function of its lengths: `per_batch + sum (per_sample + linear l + quadratic l^2)`.

    Linear: projections, PFFN, block attention, embeddings; quadratic: full attention. Units are the caller's, e.g. us.

    Example:
        >>> CostModel(linear=1.0, quadratic=0.5).of_lengths(torch.tensor([2, 4])).item()
        16.0
    """

    linear: float
    quadratic: float = 0.0
    per_sample: float = 0.0
    per_batch: float = 0.0

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic", "per_sample", "per_batch"):
            number(name, getattr(self, name), least=0)

    def of_lengths(self, lengths: Tensor, dim: int = -1) -> Tensor:
        """Cost of batches.

        Args:
            lengths: integers, samples along `dim`.
            dim: summed over.

        Returns:
            float64, `lengths` without `dim`.
        """
        if not isinstance(lengths, Tensor):
            raise ValueError(f"lengths: got {type(lengths).__name__}, expected a tensor of integers")
        x = lengths.to(torch.float64)
        return self.per_batch + (self.per_sample + self.linear * x + self.quadratic * x * x).sum(dim)

    def mean_and_std(self, law: LengthLaw, num_samples: int) -> tuple[float, float]:
        """Of the cost of a batch of independent samples, exactly."""
        x = law.lengths()
        cost = self.per_sample + self.linear * x + self.quadratic * x * x
        p = law.probabilities()
        mean = float((p * cost).sum())
        var = float((p * (cost - mean) ** 2).sum())
        return self.per_batch + num_samples * mean, math.sqrt(num_samples * var)


def fit_cost_model(batches: Sequence[Tensor], times: Sequence[float]) -> CostModel:
    """Fit a cost model to measured times, with no negative term.

    Least squares of relative errors on the columns (1, samples, sum l, sum l^2); while a coefficient is negative, the
    most negative one is dropped and the rest fitted again. Columns that the batches don't tell apart (every batch of
    equal size, say) are given to the first of them.

    Args:
        batches: lengths of each measured batch, integers [B].
        times: of each, any unit, > 0.

    Raises:
        ValueError: fewer than two batches, one without samples, or a time that is not positive and finite.

    Example:
        >>> batches = [torch.tensor(x) for x in ([1, 2], [5], [3, 3, 9], [7, 1], [4])]
        >>> truth = CostModel(linear=2.0, quadratic=0.5)
        >>> found = fit_cost_model(batches, [truth.of_lengths(b).item() for b in batches])
        >>> round(found.linear, 6), round(found.quadratic, 6)
        (2.0, 0.5)
    """
    if len(batches) < 2 or len(batches) != len(times):
        raise ValueError(
            f"batches: got {len(batches)} batches and {len(times)} times, expected at least two, as many of each"
        )
    for time in times:
        number("times", time, above=0)
    for lengths in batches:
        if not isinstance(lengths, Tensor) or not lengths.numel():
            raise ValueError(f"batches: got {lengths!r}, expected tensors of at least one length")
    t = torch.tensor(list(times), dtype=torch.float64)
    columns = torch.stack(
        [
            torch.tensor(
                [1.0, float(b.numel()), float(b.double().sum()), float((b.double() ** 2).sum())], dtype=torch.float64
            )
            for b in batches
        ]
    )
    # Prefer the physical terms: length before squares before counts when columns are collinear.
    order = [2, 3, 1, 0]
    active: list[int] = []
    for j in order:
        trial = columns[:, [*active, j]] / t[:, None]
        trial = trial / trial.norm(dim=0).clamp_min(1e-300)
        if float(torch.linalg.svdvals(trial)[-1]) > 1e-9 * len([*active, j]) and float(columns[:, j].abs().max()) > 0:
            active.append(j)
    coefficients = torch.zeros(4, dtype=torch.float64)
    while active:
        a = columns[:, active] / t[:, None]
        scale = a.norm(dim=0)
        solved = torch.linalg.lstsq(a / scale, torch.ones(len(t), 1, dtype=torch.float64)).solution[:, 0] / scale
        if float((solved * scale).min()) >= -1e-12:
            coefficients[active] = solved.clamp_min(0)
            break
        active.pop(int((solved * scale).argmin()))
    per_batch, per_sample, linear, quadratic = coefficients.tolist()
    return CostModel(linear=linear, quadratic=quadratic, per_sample=per_sample, per_batch=per_batch)


@lru_cache(maxsize=256)
def expected_max_of_normals(n: int) -> float:
    """E[max of n independent standard normals], by integrating its distribution Phi(x)^n.

    `E = int_0^inf (1 - F) dx - int_-inf^0 F dx` with `F = Phi^n` (David and Nagaraja, Order Statistics, 2003, section
    3.1).

    Example:
        >>> round(expected_max_of_normals(2), 6), round(1 / math.sqrt(math.pi), 6)
        (0.56419, 0.56419)
    """
    whole("n", n)
    x = torch.linspace(-12, 12, 48_001, dtype=torch.float64)
    cdf = torch.exp(n * torch.special.log_ndtr(x))
    half = x.numel() // 2
    right = torch.trapezoid((1 - cdf)[half:], x[half:])
    left = torch.trapezoid(cdf[: half + 1], x[: half + 1])
    return float(right - left)


def expected_imbalance(mean: float, std: float, num_ranks: int) -> float:
    """Expected maximum over ranks / mean, for independent costs that are about normal (a batch sums hundreds of
    samples).

    Args:
        mean, std: of one rank's cost.
        num_ranks: independent ranks.
    """
    if mean <= 0:
        raise ValueError(f"mean: got {mean}, expected > 0")
    return 1 + std / mean * expected_max_of_normals(num_ranks)


def summary(costs: Tensor) -> Mapping[str, float]:
    """Order statistics of costs over ranks, averaged over steps.

    Args:
        costs: float [num_steps, num_ranks].

    Returns:
        max/mean, p99/mean, p50/mean, min/mean.
    """
    mean = costs.mean(dim=1, keepdim=True)
    ratio = costs / mean
    q = torch.quantile(ratio, torch.tensor([0.5, 0.99], dtype=costs.dtype), dim=1).mean(dim=1)
    return {
        "max_over_mean": float(ratio.amax(dim=1).mean()),
        "p99_over_mean": float(q[1]),
        "p50_over_mean": float(q[0]),
        "min_over_mean": float(ratio.amin(dim=1).mean()),
    }
