"""Activation budgets on a stack of GEM layers: one global budget against a choice per region, the solver's mix, offload
alone, quantised activations.

`memory_gib` is the peak of the whole step, `exposed_ms` how long compute stood still for copies in a step of its own
(rows before 7f10bf2: what the plan predicted).
Ratios of activation memory in the setting column leave out what is there all the time: parameters, gradients, the batch
and its gradient.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Sequence

import torch
from gemworks.netmem.bench.single import GIB, Setup
from gemworks.netmem.bench.stack import StackSize
from gemworks.netmem.bench.study import KEEP_EVERYTHING, STEPS, Point, Study, log
from gemworks.netmem.budget import (
    KEEP,
    OFFLOAD,
    QUANTISE,
    QUANTISE_FUSED,
    RECOMPUTE,
    Option,
    Plan,
    StepProfile,
    evaluate,
)
from gemworks.netmem.errors import InfeasibleBudgetError
from gemworks.netmem.profiler import table
from gemworks.netmem.rehearsal import rehearse
from gemworks.netmem.solver import least_feasible, solve

# values of one global partitioner budget, and so the memory budgets at which it is compared
GLOBAL = (0.8, 0.6, 0.4, 0.2, 0.0)
# what a region may choose: 0.85 makes elementwise results again, 0.2 matrix products too, 0.0 everything
FINER = (0.85, 0.2, 0.0)
TARGET_SHARE = 0.38  # -62 % of the activations
CODED_RATIO = 1.9  # fewer bytes by coding inside the graphs
REL_GAP = 0.003
NEARLY = 1.01  # options closer than this are one
MAX_LABELS = 4000
FREE_SLOWDOWN = 0.03
BEYOND_FREE = 0.1  # offload alone is measured up to here
OFFLOAD_ROUNDS = 5
PARTS = ("target", "curve", "quantise", "offload")
_FAILURES = (RuntimeError, AssertionError, ValueError)


def _everywhere(step: StepProfile, choice: str) -> Plan:
    return evaluate(step, [choice] * len(step.regions))


def _shares(plan: Plan) -> str:
    count: dict[str, int] = {}
    for choice in plan.choices.values():
        count[choice] = count.get(choice, 0) + 1
    return ", ".join(f"{n} {choice}" for choice, n in sorted(count.items(), key=lambda kv: -kv[1]))


def _sqnr_db(got: torch.Tensor, expected: torch.Tensor) -> float:
    return 10 * torch.log10(expected.square().sum() / (got - expected).square().sum()).item()


def _solve(step: StepProfile, budget_bytes: float) -> tuple[Plan | None, str]:
    """The plan, or None and why."""
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the row says how large the gap is
            plan = solve(step, budget_bytes, rel_gap=REL_GAP, max_labels=MAX_LABELS)
    except InfeasibleBudgetError as error:
        text = f"budget {budget_bytes / GIB:.3f} GiB: least is {error.least_feasible_bytes / GIB:.3f}"
        return None, f"{text}, {error.held_up_by}"
    took = time.perf_counter() - start
    return plan, f"solved in {took:.1f} s: {_shares(plan)}, gap {plan.gap_s * 1e3:.3f} ms"


def _recomputes(budgets: Sequence[float]) -> list[str]:
    return [f"{RECOMPUTE}@{b}" for b in budgets]


def _fused() -> list[str]:
    return [f"{QUANTISE_FUSED}@{b}" for b in FINER]


def warm_compiler(size: StackSize, parts: Sequence[str] = PARTS, timeout_s: float = 90) -> None:
    """Compile the regions under every choice, each in a process of its own, all at once.

    What they compile ends up in the compiler's cache on disk; one after the other it would take minutes.
    """
    budgets = (*FINER, *GLOBAL) if "curve" in parts else FINER
    choices = [KEEP]
    if set(parts) != {"offload"}:
        choices += [*sorted(set(_recomputes(budgets))), *_fused()]
    code = (
        "import sys, torch\n"
        "from gemworks.netmem.bench.stack import StackSize, make_stack\n"
        "from gemworks.netmem.policy import apply_policy\n"
        "size = StackSize(*map(int, sys.argv[2:-1]), depth=1)\n"
        "model, batch = make_stack(size, torch.device('cuda', 0))\n"
        "with apply_policy(model, {r: sys.argv[1] for r in model.regions}, compile_kwargs={}):\n"
        "    model(batch).backward()\n"
        "torch.cuda.synchronize()\n"
    )
    numbers = [str(n) for n in dataclasses.astuple(size)]
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    processes = {
        c: subprocess.Popen(
            [sys.executable, "-c", code, c, *numbers], env=environment, stderr=subprocess.PIPE, text=True
        )
        for c in choices
    }
    deadline = time.perf_counter() + timeout_s
    for choice, process in processes.items():
        try:
            _, errors = process.communicate(timeout=max(0.1, deadline - time.perf_counter()))
            log(f"compiled {choice}: exit status {process.returncode} {errors[-300:] if process.returncode else ''}")
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            log(f"compiling {choice} takes longer than {timeout_s:.0f} s; it goes on without")


def budgets(s: Setup, size: StackSize, parts: Sequence[str] = PARTS) -> None:
    """Measure and predict. A part that fails leaves its traceback, and the others their rows."""
    study = Study(s, size)
    partitioned = _recomputes(GLOBAL) if s.compile else ["recompute_cheap", RECOMPUTE]
    alone = set(parts) == {"offload"}
    finer = _recomputes(FINER) if s.compile and not alone else []
    fused = _fused() if s.compile and not alone else []
    coded = [QUANTISE] if "quantise" in parts else []
    compared = partitioned if "curve" in parts or not (s.compile or alone) else []
    lossless = [*finer, *(c for c in compared if c not in finer)]
    try:
        step = study.profile([KEEP, *lossless, OFFLOAD, *coded, *fused])
    except _FAILURES:
        traceback.print_exc()
        fused = []
        step = study.profile([KEEP, *lossless, OFFLOAD, *coded])
    kinds = StepProfile(step.regions[:2])
    log("profiled\n" + table(kinds))
    _price_rows(study, kinds)
    keep = _everywhere(step, KEEP)
    study.keep_point = study.row("keep", KEEP_EVERYTHING, keep)
    rows = {
        "target": lambda: _target_rows(study, step, keep, fused),
        "curve": lambda: _curve_rows(study, step, partitioned),
        "quantise": lambda: _quantise_rows(study, step, coded, fused),
        "offload": lambda: _offload_rows(study, step, keep),
    }
    for part in parts:
        try:
            rows[part]()
        except _FAILURES:
            traceback.print_exc()


def _without(step: StepProfile, choices: Sequence[str]) -> StepProfile:
    regions = [
        dataclasses.replace(r, options=tuple(o for o in r.options if o.choice not in choices)) for r in step.regions
    ]
    return dataclasses.replace(step, regions=tuple(regions))


def _distinct(step: StepProfile) -> StepProfile:
    """Without options that another one of their region nearly equals or beats in bytes and time, moving as much."""

    def kept(options: Sequence[Option]) -> tuple[Option, ...]:
        found: list[Option] = []
        for o in options:
            seconds = o.forward_s + o.backward_s
            if not any(
                f.moved_bytes == o.moved_bytes
                and f.held_bytes <= NEARLY * o.held_bytes
                and f.forward_bytes <= NEARLY * o.forward_bytes
                and f.backward_bytes <= NEARLY * o.backward_bytes
                and f.forward_s + f.backward_s <= NEARLY * seconds
                for f in found
            ):
                found.append(o)
        return tuple(found)

    # the fastest first, so that what is dropped is the slower one
    regions = [
        dataclasses.replace(r, options=kept(sorted(r.options, key=lambda o: o.forward_s + o.backward_s)))
        for r in step.regions
    ]
    return dataclasses.replace(step, regions=tuple(regions))


def _target_rows(study: Study, step: StepProfile, keep: Plan, fused: Sequence[str]) -> None:
    """The solver's mix at `TARGET_SHARE` of the activations, with all choices and with those that lose nothing."""
    assert study.keep_point is not None
    base = study.base_bytes
    budget = base + TARGET_SHARE * (study.keep_point.peak_gib * GIB - base)
    expected = study.gradients(dict(keep.choices))
    for name, offered in (("-62 %", step), ("-62 %, nothing coded", _without(step, [QUANTISE, *fused]))):
        # what the prediction counts twice, it counts twice in every plan of the kind
        near = _everywhere(offered, f"{QUANTISE_FUSED if offered is step else RECOMPUTE}@{FINER[1]}" if fused else KEEP)
        peak = study.peak_gib(near)
        twice = max(0.0, near.peak_bytes - peak * GIB) if isinstance(peak, float) else 0.0
        target, text = _solve(_distinct(offered), budget + twice)
        log(text)
        if target is None:
            name, target = f"{name}: least memory ({text})", least_feasible(offered)
        sqnr_db = _sqnr_db(study.gradients(dict(target.choices)), expected)
        text = f"{name}: {_shares(target)}, gradient SQNR {sqnr_db:.1f} dB"
        study.row(text, "gemworks", target, study.keep_point, KEEP_EVERYTHING)


def _curve_rows(study: Study, step: StepProfile, partitioned: Sequence[str]) -> None:
    """One global budget, and the solver's mix in the memory which that one is predicted to take."""
    for choice in partitioned:
        everywhere = _everywhere(step, choice)
        peer = study.row(f"global {choice}", "one global budget", everywhere)
        mix, text = _solve(step, everywhere.peak_bytes)
        log(text)
        if mix is not None:
            study.row(f"memory of global {choice}: {_shares(mix)}", "gemworks", mix, peer, "one global budget")


def _price_rows(study: Study, kinds: StepProfile) -> None:
    """Time per GB that each kind of region asks for each choice."""
    for region in kinds.regions:
        first = region.options[0]
        for o in region.options[1:]:
            saved = (first.held_bytes - o.held_bytes) / 1e9
            if saved <= 0:
                continue
            # by direction: of equal times nothing is left, not even a rounding below zero
            extra_ms = 1e3 * ((o.forward_s - first.forward_s) + (o.backward_s - first.backward_s))
            kind = type(study.model.get_submodule(region.name)).__name__
            study.s.rows.add(
                "region_price",
                shape=study.size.label,
                setting=f"{kind} {o.choice}: saves {saved:.3f} GB, {extra_ms / saved:.3f} ms per GB",
                ms=extra_ms,
                memory_gib=o.held_bytes / GIB,
            )


def _offload_rows(study: Study, step: StepProfile, keep: Plan) -> None:
    """Offload alone, of more and more regions from the first; how much of it is free, predicted and measured.

    Predicted by the rehearsal: beyond the window the engine waits for whole tensors, and the solver's model for bytes.
    Each round has a share of its own, from steps that were timed within seconds of each other.
    """
    num = len(step.regions)
    activations = max(1.0, keep.peak_bytes - step.base_bytes)
    predicted, measured = [(0.0, 0.0)], []
    for n in range(1, num + 1):
        plan = evaluate(step, [OFFLOAD] * n + [KEEP] * (num - n))
        if plan.moved_bytes > study.arena_bytes:
            break
        duplex_bytes_per_s = study.s.ledger.capacity.get("host.duplex")
        played = rehearse(step, plan, duplex_bytes_per_s=duplex_bytes_per_s, num_steps=STEPS)
        name = "free" if played.wait_s == 0 else f"waits {played.wait_s * 1e3:.1f} ms"
        share, slowdown = plan.moved_bytes / activations, played.step_s / keep.step_s - 1
        text = f"offload {n} of {num} regions, {plan.moved_bytes / GIB:.3f} GiB, {share:.3f} of activations, {name}"
        text += f", rehearsed {played.step_s * 1e3:.2f} ms"
        point = study.row(text, "gemworks offload", plan, study.keep_point, KEEP_EVERYTHING, OFFLOAD_ROUNDS)
        predicted.append((share, slowdown))
        measured.append((share, point.slowdowns))
        if slowdown > BEYOND_FREE:
            break  # compute does little but wait
    if len(predicted) == 1:
        return  # the host arena holds no region
    free = _share_at(predicted, FREE_SLOWDOWN)
    rounds = zip(*(slowdowns for _, slowdowns in measured), strict=True)
    found = [
        _share_at([(0.0, 0.0), *zip((share for share, _ in measured), slowdowns, strict=True)], FREE_SLOWDOWN)
        for slowdowns in rounds
    ]
    middle = statistics.median(found)
    study.s.rows.add(
        "free_share",
        shape=study.size.label,
        setting=f"share of activations offloaded at {100 * FREE_SLOWDOWN:.0f} % slower: predicted {free:.4f}, "
        f"measured {middle:.4f}, by round {' '.join(f'{x:.4f}' for x in found)}",
        ratio_to_best_peer=middle / free,
        best_peer="the ledger's prediction",
    )


def _share_at(points: Sequence[tuple[float, float]], slowdown: float) -> float:
    """Where the line through (share, slowdown) points first reaches a slowdown; the last share if it doesn't.

    >>> _share_at([(0.0, 0.0), (0.1, 0.01), (0.2, 0.05)], 0.03)
    0.15
    """
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y1 >= slowdown:
            return x0 + (x1 - x0) * (slowdown - y0) / (y1 - y0)
    return points[-1][0]


def _quantise_rows(study: Study, step: StepProfile, coded: Sequence[str], fused: Sequence[str]) -> None:
    """Quantised saved activations in every region: memory, time, error of the gradients.

    Coding inside the graphs comes with the same graphs without coding, and with a mix at `CODED_RATIO`.
    """
    expected = study.gradients(dict(_everywhere(step, KEEP).choices))
    held = sum(r.option(KEEP).held_bytes for r in step.regions)

    def row(plan: Plan, name: str, impl: str, against: Point | None = None, peer: str = KEEP_EVERYTHING) -> Point:
        got = study.gradients(dict(plan.choices))
        sqnr_db = _sqnr_db(got, expected)
        ratio = held / sum(r.option(plan.choices[r.name]).held_bytes for r in step.regions)
        text = f"{name}: held {ratio:.3f}x less, gradient SQNR {sqnr_db:.1f} dB"
        return study.row(text, impl, plan, against, peer)

    plain = f"{RECOMPUTE}@{FINER[0]}"
    for choice in (*coded, *fused[:1]):
        plan, impl = _everywhere(step, choice), f"gemworks {choice}"
        if not choice.startswith(QUANTISE_FUSED):
            row(plan, f"{choice} everywhere", impl)
            continue
        uncoded = row(_everywhere(step, plain), f"{plain} everywhere", "uncoded")
        point = row(plan, f"{choice} everywhere", impl)
        study.s.rows.add(
            "coding",
            shape=study.size.label,
            setting=f"{choice} against {plain}: {100 * (point.ms / uncoded.ms - 1):+.1f} % time of the step",
            ms=point.ms - uncoded.ms,
            impl=impl,
            best_peer=plain,
            ratio_to_best_peer=uncoded.ms / point.ms,
        )
        offered = _distinct(_without(step, [OFFLOAD, *coded]))
        # regions differ in nothing but their kind, so held bytes are what the peak is made of
        for share in (1 / CODED_RATIO, 0.98 / CODED_RATIO, 0.96 / CODED_RATIO, 0.94 / CODED_RATIO):
            mix, _ = _solve(offered, step.base_bytes + share * (_everywhere(step, KEEP).peak_bytes - step.base_bytes))
            if mix is None:
                break
            if held / sum(r.option(mix.choices[r.name]).held_bytes for r in step.regions) >= CODED_RATIO:
                row(mix, f"mix: {_shares(mix)}", "gemworks mix of coded and recomputed")
                break
