"""The budget solver: against brute force, never above the budget, monotone, honest when infeasible. Case O6."""

from __future__ import annotations

import itertools
import math
import random
import time
import warnings

import pytest
import torch
from gemworks.netmem.budget import CHOICES, Option, Region, StepProfile, evaluate
from gemworks.netmem.errors import InfeasibleBudgetError
from gemworks.netmem.solver import _non_dominated, curve, least_feasible, solve
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.reference


def test_a_plan_that_is_hardly_faster_than_every_uniform_one_is_found():
    a = Region("a", (Option("keep", 1.0, 0, 10, 10, 10), Option("recompute", 1.001, 0, 0, 0, 0)))
    b = Region("b", (Option("keep", 1.0, 0, 10, 10, 10), Option("recompute", 1.0005, 0, 0, 0, 0)))
    plan = solve(StepProfile((a, b)), 10)
    assert plan.choices == {"a": "keep", "b": "recompute"}
    assert plan.gap_s == 0


def random_profile(seed: int, num_regions: int, num_options: int = 3) -> StepProfile:
    """Regions with the shape of real ones: what saves memory costs time, or the link."""
    rng = random.Random(seed)
    regions = []
    for i in range(num_regions):
        f, b, full = rng.uniform(1, 5), rng.uniform(2, 9), rng.randint(20, 100)
        own = rng.randint(0, 30)
        options = [Option("keep", f, b, full, full + own, full + own)]
        x = rng.randint(1, full)
        options.append(Option("recompute", f, b + f, x, full + own, full + own))
        half = full // 2 + rng.randint(0, 3)
        options.append(Option("quantise", f + rng.uniform(0, 1), b + rng.uniform(0, 1), half, full + own, full + half))
        options.append(Option("offload", f, b, 0, full + own, full + own, full))
        options.append(Option("quantise_offload", f + 0.5, b + 0.5, rng.randint(0, 5), full + own, full + half, half))
        options.append(Option("recompute_cheap", f, b + f / 3, rng.randint(x, full), full + own, full + own))
        chosen = [options[0], *rng.sample(options[1:], min(num_options - 1, 5))] if num_options < 6 else options
        regions.append(Region(f"r{i}", tuple(chosen)))
    return StepProfile(
        tuple(regions),
        base_bytes=rng.randint(0, 50),
        up_bytes_per_s=rng.uniform(2, 40),
        down_bytes_per_s=rng.uniform(2, 40),
        window_bytes=rng.randint(0, 120),
        other_s=rng.uniform(0, 3),
        granule_bytes=rng.choice([0, 5, 40]),
    )


def brute_force(profile: StepProfile) -> tuple[torch.Tensor, torch.Tensor]:
    """(peak, time) of every combination, with the definition written again for many combinations at once."""
    combos = torch.cartesian_prod(*[torch.arange(len(r.options)) for r in profile.regions]).view(
        -1, len(profile.regions)
    )
    n = combos.shape[0]
    held, up, down, time_s = (torch.zeros(n, dtype=torch.float64) for _ in range(4))
    peak = torch.full((n,), float(profile.base_bytes), dtype=torch.float64)
    w, r, s = profile.window_bytes, profile.up_bytes_per_s, profile.down_bytes_per_s

    def there(q: torch.Tensor) -> torch.Tensor:
        return (q > 0) * (q + profile.granule_bytes).clamp_max(w)

    for i, region in enumerate(profile.regions):
        cols = {
            name: torch.tensor([getattr(o, name) for o in region.options], dtype=torch.float64)[combos[:, i]]
            for name in ("forward_s", "backward_s", "held_bytes", "forward_bytes", "backward_bytes", "moved_bytes")
        }
        now = profile.base_bytes + held
        peak = torch.maximum(
            peak, torch.maximum(now + there(up) + cols["forward_bytes"], now + there(down) + cols["backward_bytes"])
        )
        if i == len(profile.regions) - 1:
            late = there((up - r * cols["forward_s"]).clamp_min(0))
            peak = torch.maximum(peak, now + late + there(down) + cols["backward_bytes"])
        up = (up - r * cols["forward_s"]).clamp_min(0) + cols["moved_bytes"]
        down = (down - s * cols["backward_s"]).clamp_min(0) + cols["moved_bytes"]
        time_s += cols["forward_s"] + cols["backward_s"] + (up - w).clamp_min(0) / r + (down - w).clamp_min(0) / s
        up, down = up.clamp_max(w), down.clamp_max(w)
        held += cols["held_bytes"]
    peak = torch.maximum(peak, profile.base_bytes + held + there(up))
    return peak, time_s + profile.other_s


@given(seed=st.integers(0, 10**6), num_regions=st.integers(1, 8), num_options=st.integers(2, 4), where=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_equal_to_brute_force_up_to_8_regions(seed, num_regions, num_options, where):
    profile = random_profile(seed, num_regions, num_options)
    peak, step = brute_force(profile)
    budget = float(peak.min() + where * (peak.max() - peak.min()))
    fits = peak <= budget
    plan = solve(profile, budget)
    assert plan.gap_s == 0
    assert plan.peak_bytes <= budget
    assert plan.step_s == pytest.approx(float(step[fits].min()), rel=1e-9)
    assert least_feasible(profile).peak_bytes == pytest.approx(float(peak.min()), rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_without_a_budget_the_fastest_plan_is_found(seed):
    profile = random_profile(seed, 4, 4)
    _, step = brute_force(profile)
    (with_infinity,) = curve(profile, [math.inf])
    for plan in (solve(profile, math.inf), solve(profile, 1e300), with_infinity):
        assert plan is not None
        assert plan.gap_s == 0
        assert plan.step_s == pytest.approx(float(step.min()), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_equal_to_brute_force_8_regions_all_choices(seed):
    profile = random_profile(seed, 8, 6)
    peak, step = brute_force(profile)
    for where in (0.0, 0.1, 0.3, 0.6, 1.0):
        budget = float(peak.min() + where * (peak.max() - peak.min()))
        assert solve(profile, budget).step_s == pytest.approx(float(step[peak <= budget].min()), rel=1e-9)


@given(seed=st.integers(0, 10**6), num_regions=st.integers(1, 14))
@settings(max_examples=15, deadline=None)
def test_o6_peak_within_budget_time_monotone_and_never_worse_than_uniform(seed, num_regions):
    profile = random_profile(seed, num_regions, 4)
    least = least_feasible(profile).peak_bytes
    highest = evaluate(profile, ["keep"] * num_regions).peak_bytes
    assume(highest > least)
    budgets = [least + k / 6 * (highest - least) for k in range(7)]
    previous = float("inf")
    for budget in budgets:
        plan = solve(profile, budget)
        assert plan.peak_bytes <= budget
        assert plan.step_s <= previous * (1 + 1e-12)
        previous = plan.step_s
        for choice in CHOICES:
            if all(any(o.choice == choice for o in r.options) for r in profile.regions):
                uniform = evaluate(profile, [choice] * num_regions)
                if uniform.peak_bytes <= budget:
                    assert plan.step_s <= uniform.step_s * (1 + 1e-12)


@given(seed=st.integers(0, 10**6), num_regions=st.integers(1, 8))
@settings(max_examples=20, deadline=None)
def test_infeasible_names_the_least_budget_and_what_holds_it_up(seed, num_regions):
    profile = random_profile(seed, num_regions)
    least = least_feasible(profile)
    with pytest.raises(InfeasibleBudgetError, match="held up by") as caught:
        solve(profile, least.peak_bytes - 1e-3)
    error = caught.value
    assert error.least_feasible_bytes >= least.peak_bytes
    assert error.least_feasible_bytes < least.peak_bytes + 1
    assert error.held_up_by in str(error)
    assert error.held_up_by in [*[r.name for r in profile.regions], "end of forward", "start"]
    assert solve(profile, error.least_feasible_bytes).peak_bytes <= error.least_feasible_bytes


def test_a_transformer_sized_stack_is_solved_exactly_and_quickly():
    keep = Option("keep", 1e-3, 2e-3, 800, 900, 1000)
    options = (
        keep,
        Option("recompute", 1e-3, 3e-3, 100, 900, 1000),
        Option("quantise", 1.1e-3, 2.1e-3, 420, 900, 1100),
        Option("offload", 1e-3, 2e-3, 0, 900, 1000, 800),
        Option("quantise_offload", 1.1e-3, 2.1e-3, 0, 900, 1100, 420),
    )
    profile = StepProfile(
        tuple(Region(f"layer{i}.{part}", options) for i in range(8) for part in ("pffn", "attention", "pool")),
        up_bytes_per_s=1.2e5,
        down_bytes_per_s=1.2e5,
        window_bytes=1600,
    )
    start = time.thread_time()  # a busy machine takes nothing away
    plans = curve(profile, [3000, 5000, 8000, 12000, 20000])
    assert time.thread_time() - start < 60
    times = [p.step_s for p in plans if p is not None]
    assert len(times) == 5
    assert times == sorted(times, reverse=True)
    assert all(p is not None and p.gap_s == 0 for p in plans)
    assert times[-1] == pytest.approx(24 * 3e-3)


def test_a_gap_is_reported_and_holds():
    profile = random_profile(7, 10, 5)
    least, highest = least_feasible(profile).peak_bytes, evaluate(profile, ["keep"] * 10).peak_bytes
    budget = least + 0.4 * (highest - least)
    exact, rough = solve(profile, budget), solve(profile, budget, rel_gap=0.05)
    assert exact.gap_s == 0
    assert 0 <= rough.gap_s <= 0.05 * (rough.step_s - profile.other_s)
    assert rough.step_s - rough.gap_s <= exact.step_s * (1 + 1e-12)
    assert exact.step_s <= rough.step_s


def test_the_first_inexact_search_comes_close_where_a_narrow_one_by_bounds_did_not():
    """Many equal regions with close prices: every partial plan has nearly the same bound."""
    choices = {"keep": (1950, 3.34), "a": (1077, 3.75), "b": (805, 4.36), "c": (537, 4.01), "d": (268, 4.63)}
    other = {"keep": (1617, 5.66), "a": (1076, 6.09), "b": (675, 6.79), "c": (270, 6.77), "d": (268, 6.78)}

    def region(i: int) -> Region:
        return Region(
            str(i),
            tuple(
                Option(name, ms / 3, 2 * ms / 3, held_bytes=mb, forward_bytes=mb + 300, backward_bytes=3480)
                for name, (mb, ms) in (other if i % 2 else choices).items()
            ),
        )

    profile = StepProfile(
        tuple(region(i) for i in range(16)), up_bytes_per_s=54, down_bytes_per_s=54, window_bytes=3000
    )
    exact = solve(profile, 12000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        capped = solve(profile, 12000, max_labels=1)
    assert capped.step_s <= 1.005 * exact.step_s
    assert capped.step_s - capped.gap_s <= exact.step_s * (1 + 1e-12)


def test_too_many_partial_plans_give_a_warning_and_an_honest_gap():
    num_warned = 0
    for seed in range(12):
        profile = random_profile(seed, 10, 5)
        least, highest = least_feasible(profile).peak_bytes, evaluate(profile, ["keep"] * 10).peak_bytes
        budget = least + 0.3 * (highest - least)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            capped = solve(profile, budget, max_labels=1)
        num_warned += any("max_labels" in str(w.message) for w in caught)
        assert (capped.gap_s > 0) == bool(caught)
        assert capped.peak_bytes <= budget
        exact = solve(profile, budget)
        assert capped.step_s - capped.gap_s <= exact.step_s * (1 + 1e-12)
        assert exact.step_s <= capped.step_s * (1 + 1e-12)
    assert num_warned > 0


def test_curve_is_monotone_also_with_a_gap():
    profile = random_profile(3, 9, 5)
    least, highest = least_feasible(profile).peak_bytes, evaluate(profile, ["keep"] * 9).peak_bytes
    budgets = [least - 1, *[least + k / 9 * (highest - least) for k in range(10)]]
    plans = curve(profile, budgets, rel_gap=0.1)
    assert plans[0] is None
    times = [p.step_s for p in plans if p is not None]
    assert len(times) == 10
    assert times == sorted(times, reverse=True)


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=40))
def test_non_dominated_against_the_definition(rows):
    kept = _non_dominated(torch.tensor(rows, dtype=torch.float64)).tolist()
    front = {r for r in rows if not any(all(a <= b for a, b in zip(o, r, strict=True)) and o != r for o in rows)}
    assert sorted(rows[i] for i in kept) == sorted(front)


def test_no_regions():
    assert solve(StepProfile((), base_bytes=5), 5).step_s == 0
    with pytest.raises(InfeasibleBudgetError):
        solve(StepProfile((), base_bytes=5), 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda p: solve(p, 1e9, rel_gap=-1),
        lambda p: evaluate(p, ["keep"]),
        lambda p: evaluate(p, {"r0": "keep"}),
        lambda p: evaluate(p, ["keep", "levitate"]),
        lambda p: Option("keep", -1.0, 0.0, 0, 0, 0),
        lambda p: Region("r", ()),
        lambda p: StepProfile((p.regions[0], p.regions[0])),
        lambda p: StepProfile((), up_bytes_per_s=0),
    ],
)
def test_bad_input_is_a_value_error(call):
    with pytest.raises(ValueError, match=r"expected|must differ"):
        call(random_profile(0, 2))


def test_brute_force_agrees_with_evaluate():
    profile = random_profile(11, 4, 4)
    peak, step = brute_force(profile)
    for k, combo in enumerate(itertools.product(*[r.options for r in profile.regions])):
        plan = evaluate(profile, [o.choice for o in combo])
        assert plan.peak_bytes == pytest.approx(float(peak[k]))
        assert plan.step_s == pytest.approx(float(step[k]))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), num_regions=st.integers(1, 7))
def test_a_pace_that_is_used_to_the_full_stays_within_the_peak(seed, num_regions):
    profile, rng = random_profile(seed, num_regions, num_options=6), random.Random(seed)
    plan = evaluate(profile, [rng.choice(r.options).choice for r in profile.regions])
    options = [r.option(plan.choices[r.name]) for r in profile.regions]
    held = float(profile.base_bytes)
    for i, (region, o) in enumerate(zip(profile.regions, options, strict=True)):
        pace = plan.pace[region.name]
        assert 0 <= pace.leaving_bytes <= profile.window_bytes
        assert 0 <= pace.returning_bytes <= profile.window_bytes
        if i < num_regions - 1:
            back = held + profile.in_flight_bytes(pace.returning_bytes) + o.backward_bytes
            assert back <= plan.peak_bytes + 1e-6
        held += o.held_bytes
        own = options[i + 1].forward_bytes if i < num_regions - 1 else 0
        assert held + profile.in_flight_bytes(pace.leaving_bytes) + own <= plan.peak_bytes + 1e-6
