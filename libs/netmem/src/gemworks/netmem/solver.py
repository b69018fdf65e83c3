"""The best choice per region under a memory budget.

Method: dynamic programming over the regions with sets of non-dominated partial plans, pruned by a Lagrangian lower
bound against the best plan known. A partial plan is (time, held, leaving queue, returning queue);
everything that follows is non-decreasing in each of the four, so a partial plan that is no better in any of them can
be dropped without losing the optimum. The result is exact. If the sets grow beyond `max_labels`, pruning gets a
tolerance and the plan says by how much it may miss (`Plan.gap_s`). Peak memory is at most the budget in either case;
of exact results the step time is monotone in the budget, because every plan for a budget is also one for any larger
budget.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from gemworks.netmem.budget import Option, Plan, StepProfile, evaluate
from gemworks.netmem.checks import check_kind, check_number
from gemworks.netmem.errors import InfeasibleBudgetError

MAX_LABELS = 20_000
# The first, inexact search compares memory and queues in steps of this share of what there is, and goes on with the
# labels of the lowest bounds if there are still too many.
_STEPS = 256
_BEAM = 1024
_BLOCK = 512
_MULTIPLIERS = (0.0, 0.5, 1.0)
_NUM_PRICES = 24
# tolerances tried in turn when the sets get too large; with 1.0 the bound prunes everything
_ESCALATION = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
# columns of a label
_TIME, _HELD, _UP, _DOWN = range(4)


def _non_dominated(labels: torch.Tensor) -> torch.Tensor:
    """Indices of the rows that no other row beats or equals in all columns; of equal rows the first stays."""
    order = torch.arange(labels.shape[0])
    for column in reversed(range(labels.shape[1])):
        order = order[torch.sort(labels[order, column], stable=True).indices]
    kept: list[torch.Tensor] = []
    kept_rows = labels.new_empty((0, labels.shape[1]))
    for start in range(0, order.numel(), _BLOCK):
        index = order[start : start + _BLOCK]
        for rows in torch.split(kept_rows, 4096):
            if index.numel():
                beaten = (rows[None] <= labels[index][:, None]).all(-1).any(1)
                index = index[~beaten]
        if index.numel() == 0:
            continue
        rows = labels[index]
        # sorted order: an earlier row may beat a later one, never the other way round
        beats = (rows[:, None] <= rows[None]).all(-1)
        beaten = torch.triu(beats, diagonal=1).any(0)
        index = index[~beaten]
        kept.append(index)
        kept_rows = torch.cat([kept_rows, labels[index]])
    return torch.cat(kept) if kept else order


@dataclass
class _Table:
    """Options of a region as columns, float64 `[num_options]` each."""

    forward_s: torch.Tensor
    backward_s: torch.Tensor
    held: torch.Tensor
    forward: torch.Tensor
    backward: torch.Tensor
    moved: torch.Tensor

    @classmethod
    def of(cls, options: Sequence[Option]) -> _Table:
        columns = zip(
            *[
                (o.forward_s, o.backward_s, o.held_bytes, o.forward_bytes, o.backward_bytes, o.moved_bytes)
                for o in options
            ],
            strict=True,
        )
        return cls(*[torch.tensor(c, dtype=torch.float64) for c in columns])


def _in_flight(profile: StepProfile, queue: torch.Tensor) -> torch.Tensor:
    """`StepProfile.in_flight_bytes` of many queues."""
    return torch.where(queue > 0, (queue + profile.granule_bytes).clamp_max(profile.window_bytes), 0.0)


def _extend(profile: StepProfile, labels: torch.Tensor, table: _Table, last: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """All extensions of all labels by one region: new labels and the memory peak of the region, `[num_labels,
    num_options, ...]`.
    """
    window, up, down = profile.window_bytes, profile.up_bytes_per_s, profile.down_bytes_per_s
    time, held, queue_up, queue_down = (labels[:, i, None] for i in range(4))
    there = profile.base_bytes + held
    leaving, returning = _in_flight(profile, queue_up), _in_flight(profile, queue_down)
    drained = (queue_up - up * table.forward_s).clamp_min(0)
    late = _in_flight(profile, drained) if last else 0.0
    peak = torch.maximum(there + leaving + table.forward, there + returning + late + table.backward)
    new_up = drained + table.moved
    new_down = (queue_down - down * table.backward_s).clamp_min(0) + table.moved
    stall = (new_up - window).clamp_min(0) / up + (new_down - window).clamp_min(0) / down
    new = torch.stack(
        [
            time + table.forward_s + table.backward_s + stall,
            held + table.held,
            new_up.clamp_max(window),
            new_down.clamp_max(window),
        ],
        dim=-1,
    )
    if last:
        at_the_end = profile.base_bytes + new[..., _HELD] + _in_flight(profile, new[..., _UP])
        peak = torch.maximum(peak, at_the_end)
    return new, peak


class _Bound:
    """Lower bounds on the final time of partial plans.

    For any prices `m >= 0` (memory) and `0 <= u, d <= 1` (links), weak duality gives

        rest >= sum_j min_c [f + b + m held + u (moved / up - f) + d (moved / down - b)] - m (room - held so far)
                + u (queue_up - W) / up + d (queue_down - W) / down

    since the held bytes must fit into the room at the end of forward, and since what has to be moved takes the links
    at least its bytes over their rates, of which compute hides at most its own time.
    """

    def __init__(self, profile: StepProfile, tables: list[_Table], budget_bytes: float) -> None:
        self.profile = profile
        last = tables[-1]
        own = float((torch.maximum(last.forward, last.backward) - last.held).clamp_min(0).min())
        self.room = budget_bytes - profile.base_bytes - own
        slopes = []
        for t in tables:
            seconds, held = t.forward_s + t.backward_s, t.held
            ds, dh = seconds[:, None] - seconds[None], held[None] - held[:, None]
            slopes += (ds / dh)[(ds > 0) & (dh > 0)].tolist()
        low, high = (min(slopes), max(slopes)) if slopes else (1e-12, 1e-12)
        prices = torch.logspace(math.log10(low), math.log10(high * 1.01), _NUM_PRICES, dtype=torch.float64).tolist()
        grid = [(m, u, d) for m in [0.0, *prices] for u in _MULTIPLIERS for d in _MULTIPLIERS]
        self.memory, self.up, self.down = (torch.tensor(c, dtype=torch.float64) for c in zip(*grid, strict=True))
        m, u, d = (x[:, None] for x in (self.memory, self.up, self.down))
        rest = torch.zeros(len(grid), dtype=torch.float64)
        self.rest = [rest]
        for t in reversed(tables):
            cost = (
                (t.forward_s + t.backward_s)
                + m * t.held
                + u * (t.moved / profile.up_bytes_per_s - t.forward_s)
                + d * (t.moved / profile.down_bytes_per_s - t.backward_s)
            )
            rest = rest + cost.amin(1)
            self.rest.append(rest)
        self.rest.reverse()  # rest[i]: regions i, i + 1, ...

    def __call__(self, labels: torch.Tensor, next_region: int) -> torch.Tensor:
        p = self.profile
        value = (
            self.rest[next_region]
            - self.memory * (self.room - labels[:, _HELD, None])
            + self.up * (labels[:, _UP, None] - p.window_bytes) / p.up_bytes_per_s
            + self.down * (labels[:, _DOWN, None] - p.window_bytes) / p.down_bytes_per_s
        )
        return labels[:, _TIME] + value.amax(1).clamp_min(0)


class _TooManyLabelsError(Exception):
    pass


def _search(
    profile: StepProfile,
    tables: list[_Table],
    budget_bytes: float,
    bound: _Bound,
    *,
    cut_s: float,
    beam: int | None,
    max_labels: int,
    slack_s: float = 0.0,
) -> list[int] | None:
    """Option indices of the fastest plan below `cut_s`, or None. With a beam: of a good one, from coarse comparisons.

    With slack a partial plan may be dropped for one that is up to `slack_s / num_regions` slower and no worse in
    memory and queues: the plan found is at most `slack_s` from the fastest.
    """
    grain_s = slack_s / len(tables)
    labels = torch.zeros((1, 4), dtype=torch.float64)
    trail: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i, table in enumerate(tables):
        new, peak = _extend(profile, labels, table, i == len(tables) - 1)
        parent, option = torch.nonzero(peak <= budget_bytes, as_tuple=True)
        labels = new[parent, option]
        lower = bound(labels, i + 1)
        alive = lower < cut_s
        labels, parent, option, lower = labels[alive], parent[alive], option[alive], lower[alive]
        if beam is not None and labels.shape[0] > 8 * beam:
            best = torch.topk(lower, 8 * beam, largest=False).indices
            labels, parent, option, lower = labels[best], parent[best], option[best], lower[best]
        if beam is None and labels.shape[0] > 16 * max_labels:
            raise _TooManyLabelsError
        compared = labels
        if beam is not None:
            steps = torch.tensor([1.0, bound.room, profile.window_bytes, profile.window_bytes], dtype=torch.float64)
            compared = torch.cat([labels[:, :1], torch.floor(labels * (_STEPS / steps.clamp_min(1.0)))[:, 1:]], dim=1)
        elif grain_s > 0:
            compared = torch.cat([torch.floor(labels[:, :1] / grain_s), labels[:, 1:]], dim=1)
        keep = _non_dominated(compared)
        if beam is not None and keep.numel() > beam:
            keep = keep[torch.topk(lower[keep], beam, largest=False).indices]
        if beam is None and keep.numel() > max_labels:
            raise _TooManyLabelsError
        labels = labels[keep]
        trail.append((parent[keep], option[keep]))
        if labels.shape[0] == 0:
            return None
    at = int(labels[:, _TIME].argmin())
    chosen: list[int] = []
    for parent, option in reversed(trail):
        chosen.append(int(option[at]))
        at = int(parent[at])
    return chosen[::-1]


def _plan(profile: StepProfile, chosen: Sequence[int], gap_s: float = 0.0) -> Plan:
    return evaluate(profile, [r.options[c].choice for r, c in zip(profile.regions, chosen, strict=True)], gap_s)


def least_feasible(profile: StepProfile) -> Plan:
    """The plan with the lowest peak memory, exactly; its `peak` says what holds it up.

    The same dynamic programming with the peak in the place of the time.
    """
    check_kind("profile", profile, StepProfile, "profile() measures one")
    labels = torch.zeros((1, 4), dtype=torch.float64)
    labels[0, 0] = profile.base_bytes
    trail: list[tuple[torch.Tensor, torch.Tensor]] = []
    tables = [_Table.of(r.options) for r in profile.regions]
    if not tables:
        return evaluate(profile, [])
    known = min(_uniform(profile), key=lambda plan: plan.peak_bytes).peak_bytes
    for i, table in enumerate(tables):
        new, peak = _extend(profile, labels, table, i == len(tables) - 1)
        new[..., 0] = torch.maximum(labels[:, 0, None], peak)  # the peak stands in the place of the time
        parent, option = torch.nonzero(new[..., 0] <= known, as_tuple=True)
        labels = new[parent, option]
        keep = _non_dominated(labels)
        labels = labels[keep]
        trail.append((parent[keep], option[keep]))
    at = int(labels[:, 0].argmin())
    chosen: list[int] = []
    for parent, option in reversed(trail):
        chosen.append(int(option[at]))
        at = int(parent[at])
    return _plan(profile, chosen[::-1])


def _uniform(profile: StepProfile) -> list[Plan]:
    """Plans that make the same choice everywhere (a region without that choice keeps its first option), and all first
    options.
    """
    names = dict.fromkeys(o.choice for r in profile.regions for o in r.options)
    plans = []
    for name in names:
        choices = [name if any(o.choice == name for o in r.options) else r.options[0].choice for r in profile.regions]
        plans.append(evaluate(profile, choices))
    # the least memory each region can do with, so that some low plan is known
    plans.append(evaluate(profile, [min(r.options, key=lambda o: o.held_bytes).choice for r in profile.regions]))
    return plans


def solve(profile: StepProfile, budget_bytes: float, *, rel_gap: float = 0.0, max_labels: int = MAX_LABELS) -> Plan:
    """The fastest plan whose peak memory is at most the budget.

    Args:
        profile: regions with their options.
        budget_bytes: device memory for everything, `base_bytes` included.
        rel_gap: accept a plan that is at most this share slower than the best; 0: exact.
        max_labels: partial plans kept per region before the search gives up exactness, with a warning.

    Returns:
        The plan. `gap_s == 0`: optimal.

    Raises:
        InfeasibleBudgetError: nothing fits; names the least feasible budget and what holds it up.
        ValueError: no profile, a NaN, a negative `rel_gap`, `max_labels` below 1.
    """
    check_kind("profile", profile, StepProfile, "profile() measures one")
    check_number("budget_bytes", budget_bytes, -math.inf, finite=False)
    check_number("rel_gap", rel_gap)
    check_number("max_labels", max_labels, 1, whole=True)
    if not profile.regions:
        if profile.base_bytes > budget_bytes:
            _refuse(profile, budget_bytes)
        return evaluate(profile, [])
    tables = [_Table.of(r.options) for r in profile.regions]
    # nothing needs more, and prices of memory need a number
    most = [max(o.held_bytes + o.forward_bytes + o.backward_bytes for o in r.options) for r in profile.regions]
    budget_bytes = min(budget_bytes, profile.base_bytes + 2 * profile.window_bytes + sum(most))
    bound = _Bound(profile, tables, budget_bytes)
    known = [p for p in _uniform(profile) if p.peak_bytes <= budget_bytes]
    best = min(known, key=lambda p: (p.step_s, p.peak_bytes), default=None)
    cut = math.inf if best is None else best.step_s - profile.other_s
    beamed = _search(profile, tables, budget_bytes, bound, cut_s=cut, beam=_BEAM, max_labels=max_labels)
    if beamed is not None:
        best = _plan(profile, beamed)  # faster than the cut, so faster than every uniform plan
    exact, gap, slack_s = True, rel_gap, 0.0
    for gap in [rel_gap, *(g for g in _ESCALATION if g > rel_gap)]:
        # half of the tolerance goes to the cut, half to dropping partial plans that are nearly beaten
        best_s = math.inf if best is None else best.step_s - profile.other_s
        cut = best_s * (1 - gap / 2) if gap < 1 else 0.0
        slack_s = 0.0 if best is None else best_s * gap / 2
        try:
            found = _search(
                profile, tables, budget_bytes, bound, cut_s=cut, beam=None, max_labels=max_labels, slack_s=slack_s
            )
        except _TooManyLabelsError:
            exact = False
            if best is None:  # nothing to prune against: start from the plan with the lowest peak
                best = least_feasible(profile)
                if best.peak_bytes > budget_bytes:
                    _refuse(profile, budget_bytes)
            continue
        if found is not None:
            best = _plan(profile, found)
        elif best is None:
            _refuse(profile, budget_bytes)
        break
    assert best is not None
    assert best.peak_bytes <= budget_bytes, "a plan above its budget"
    best_s = best.step_s - profile.other_s
    gap_s = max(gap * best_s, slack_s)  # slack of the plan known before the last search
    if gap_s > 0:
        # no plan is faster than the bound of the empty one
        least_s = float(bound(torch.zeros((1, 4), dtype=torch.float64), 0))
        gap_s = min(gap_s, best_s - least_s)
        gap_s = gap_s if gap_s > 1e-12 * best_s else 0.0
    if not exact and gap_s > 0:
        text = (
            f"more than max_labels = {max_labels} partial plans; the plan may be up to {gap_s / best_s:.3%} from the "
            "best. Raise max_labels, merge regions, or pass rel_gap"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return dataclasses.replace(best, gap_s=gap_s)


def _refuse(profile: StepProfile, budget_bytes: float) -> NoReturn:
    least = least_feasible(profile)
    gib = 2**30
    raise InfeasibleBudgetError(
        f"budget_bytes: {budget_bytes / gib:.3f} GiB asked, the least feasible budget is {math.ceil(least.peak_bytes)} "
        f"bytes "
        f"({least.peak_bytes / gib:.3f} GiB), held up by the {least.peak.explain()}; "
        "give more, split that region, shrink the window, or add options that hold less",
        least_feasible_bytes=math.ceil(least.peak_bytes),
        held_up_by=least.peak.region,
    )


def curve(
    profile: StepProfile, budgets_bytes: Iterable[float], *, rel_gap: float = 0.0, max_labels: int = MAX_LABELS
) -> list[Plan | None]:
    """Plans for several budgets, in the order given; None where a budget is infeasible. Arguments as for `solve`.

    A plan found for a smaller budget is used for a larger one where that search, if it was not exact, came out slower:
    the step time is monotone in the budget whatever `rel_gap` is.
    """
    if isinstance(budgets_bytes, str) or not isinstance(budgets_bytes, Iterable):
        raise ValueError(f"budgets_bytes: expected several budgets, got {budgets_bytes!r}; solve() takes one")
    budgets = list(budgets_bytes)
    for budget_bytes in budgets:
        check_number("budgets_bytes", budget_bytes, -math.inf, finite=False)
    plans: list[Plan | None] = [None] * len(budgets)
    best: Plan | None = None
    for i in sorted(range(len(budgets)), key=lambda i: budgets[i]):
        try:
            plan = solve(profile, budgets[i], rel_gap=rel_gap, max_labels=max_labels)
        except InfeasibleBudgetError:
            continue
        if best is None or plan.step_s <= best.step_s:
            best = plan
        plans[i] = best
    return plans
