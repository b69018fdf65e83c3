"""Activation budgets on a stack of GEM layers: one global budget against a choice per region, the solver's mix, offload
alone, quantised activations.

`memory_gib` is the peak of the whole step. Ratios of activation memory in the setting column leave out what is there
all the time: parameters, gradients, the batch and its gradient.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.bench.rows import synchronize, timed_on_device_ms
from gemworks.netmem.bench.single import GIB, Setup
from gemworks.netmem.bench.stack import StackSize, make_stack
from gemworks.netmem.budget import (
    KEEP,
    OFFLOAD,
    QUANTISE,
    QUANTISE_FUSED,
    RECOMPUTE,
    Plan,
    StepProfile,
    evaluate,
)
from gemworks.netmem.errors import InfeasibleBudgetError
from gemworks.netmem.offload import OffloadEngine
from gemworks.netmem.policy import apply_policy
from gemworks.netmem.profiler import profile, table
from gemworks.netmem.solver import least_feasible, solve

# values of one global partitioner budget, and so the memory budgets at which it is compared
GLOBAL = (0.8, 0.6, 0.4, 0.2, 0.0)
# those of them that give both kinds of region something else than their neighbours
NOT_ALIKE = (0.8, 0.2, 0.0)
# what regions may choose beyond these
FINER = (0.9, 0.5)
FUSED = (1.0, 0.8, 0.2)
TARGET_SHARE = 0.38  # -62 % of the activations
REL_GAP = 0.01
MAX_LABELS = 2000
FREE_SLOWDOWN = 0.03
PARTS = ("target", "curve", "quantise", "offload")
_START = time.perf_counter()
_FAILURES = (RuntimeError, AssertionError, ValueError)


def _log(text: str) -> None:
    print(f"[{time.perf_counter() - _START:6.1f} s] {text}", flush=True)


@dataclass(frozen=True)
class Point:
    """One measured plan: predicted and measured."""

    plan: Plan
    ms: float
    peak_gib: float


class Study:
    """The stack with what measuring a plan on it needs."""

    def __init__(self, s: Setup, size: StackSize) -> None:
        self.s, self.size = s, size
        self.model, self.batch = make_stack(size, s.device)
        self.compiled = s.compile
        self.compile_kwargs: dict[str, object] | None = {} if s.compile else None
        self.arena_bytes = s.gib(4) if not s.smoke else 64 << 20
        self.engine = OffloadEngine(
            PinnedArena(self.arena_bytes, pin=s.device.type == "cuda"),
            device=s.device,
            window_bytes=s.gib(3),
            min_bytes=1024 if s.smoke else 1 << 20,
        )
        for p in (self.batch, *self.model.parameters()):
            p.grad = torch.zeros_like(p)
        # what is there all the time
        kept = [*self.model.parameters(), self.batch]
        self.base_bytes = 2 * sum(p.numel() * p.element_size() for p in kept)
        self.keep_point: Point | None = None

    def step(self) -> None:
        """Forward and backward; gradients are added to the ones that are there, so that no memory comes and goes."""
        self.model(self.batch).backward()

    def measure(self, plan: Plan) -> tuple[float, float, float, float | str]:
        """(median, 20th, 80th percentile of milliseconds, peak GiB) of a plan."""
        with apply_policy(self.model, plan, engine=self.engine, compile_kwargs=self.compile_kwargs):
            self.step()
            times = timed_on_device_ms(self.step, self.s.device, 3 if self.s.smoke else 5)
            peak: float | str = ""
            if self.s.device.type == "cuda":
                synchronize(self.s.device)
                torch.cuda.reset_peak_memory_stats(self.s.device)
                self.step()
                synchronize(self.s.device)
                peak = torch.cuda.max_memory_allocated(self.s.device) / GIB
        return *times, peak

    def row(self, setting: str, impl: str, plan: Plan, against: Point | None = None, peer: str = "") -> Point:
        """Measure a plan and report it."""
        if plan.moved_bytes > self.arena_bytes:
            self.s.rows.add("budget", shape=self.size.label, impl=impl, setting=f"{setting}: more than the host arena")
            return Point(plan, float("nan"), float("nan"))
        ms, p20, p80, peak = self.measure(plan)
        text = f"{setting}; predicted {plan.step_s * 1e3:.2f} ms, {plan.peak_bytes / GIB:.3f} GiB"
        point = Point(plan, ms, peak if isinstance(peak, float) else plan.peak_bytes / GIB)
        if self.keep_point is not None:
            keep, base = self.keep_point, self.base_bytes / GIB
            less = 1 - (point.peak_gib - base) / (keep.peak_gib - base)
            text += f"; activations -{100 * less:.1f} %, {100 * (ms / keep.ms - 1):+.1f} % time against keep"
        self.s.rows.add(
            "budget",
            shape=self.size.label,
            setting=text,
            impl=impl,
            memory_gib=peak,
            ms=ms,
            ms_p20=p20,
            ms_p80=p80,
            exposed_ms=plan.stall_s * 1e3,
            best_peer=peer,
            ratio_to_best_peer="" if against is None else against.ms / ms,
            dtype=str(self.batch.dtype).removeprefix("torch."),
            law="fixed",
            mean_len=self.size.length,
            max_len=self.size.length,
            seed=0,
        )
        return point


def _everywhere(step: StepProfile, choice: str) -> Plan:
    return evaluate(step, [choice] * len(step.regions))


def _shares(plan: Plan) -> str:
    count: dict[str, int] = {}
    for choice in plan.choices.values():
        count[choice] = count.get(choice, 0) + 1
    return ", ".join(f"{n} {choice}" for choice, n in sorted(count.items(), key=lambda kv: -kv[1]))


def _gradients(study: Study, choices: Mapping[str, str]) -> torch.Tensor:
    """All gradients of one step, flat, float32."""
    with apply_policy(study.model, choices, engine=study.engine, compile_kwargs=study.compile_kwargs):
        for p in (study.batch, *study.model.parameters()):
            assert p.grad is not None
            p.grad.zero_()
        study.step()
    return torch.cat([p.grad.float().flatten() for p in study.model.parameters() if p.grad is not None])


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
    return [f"{QUANTISE_FUSED}@{b}" for b in FUSED]


def warm_compiler(size: StackSize, timeout_s: float = 90) -> None:
    """Compile the regions under every choice, each in a process of its own, all at once.

    What they compile ends up in the compiler's cache on disk; one after the other it would take minutes.
    """
    choices = [KEEP, *_recomputes((*GLOBAL, *FINER)), *_fused()]
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
            _log(f"compiled {choice}: exit status {process.returncode} {errors[-300:] if process.returncode else ''}")
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            _log(f"compiling {choice} takes longer than {timeout_s:.0f} s; it goes on without")


def _profile(study: Study, choices: Sequence[str]) -> StepProfile:
    return profile(
        study.model,
        study.batch,
        study.model.regions,
        ledger=study.s.ledger,
        engine=study.engine,
        choices=choices,
        repeats=3,
        base_bytes=study.base_bytes,
        compile_kwargs=study.compile_kwargs,
        # every part of a kind has the same code, shapes and dtypes
        alike=lambda name: type(study.model.get_submodule(name)).__name__,
        progress=_log,
    )


def budgets(s: Setup, size: StackSize, parts: Sequence[str] = PARTS) -> None:
    """Measure and predict. A part that fails leaves its traceback, and the others their rows."""
    study = Study(s, size)
    partitioned = _recomputes(GLOBAL) if s.compile else ["recompute_cheap", RECOMPUTE]
    finer = _recomputes(FINER) if s.compile else []
    fused = _fused() if s.compile else []
    coded = [QUANTISE] if "quantise" in parts else []
    lossless = [*finer, *(partitioned if "curve" in parts or not s.compile else _recomputes(NOT_ALIKE))]
    try:
        step = _profile(study, [KEEP, *lossless, OFFLOAD, *coded, *fused])
        coded += fused
    except _FAILURES:
        traceback.print_exc()
        step = _profile(study, [KEEP, *lossless, OFFLOAD, *coded])
    kinds = StepProfile(step.regions[:2])
    _log("profiled\n" + table(kinds))
    _price_rows(study, kinds)
    keep = _everywhere(step, KEEP)
    study.keep_point = study.row("keep", "keep everything", keep)
    rows = {
        "target": lambda: _target_row(study, step, keep),
        "curve": lambda: _curve_rows(study, step, partitioned),
        "quantise": lambda: _quantise_rows(study, step, coded),
        "offload": lambda: _offload_rows(study, step, keep),
    }
    for part in parts:
        try:
            rows[part]()
        except _FAILURES:
            traceback.print_exc()


def _target_row(study: Study, step: StepProfile, keep: Plan) -> None:
    """The solver's mix at `TARGET_SHARE` of the activations."""
    target, text = _solve(step, step.base_bytes + TARGET_SHARE * (keep.peak_bytes - step.base_bytes))
    _log(text)
    name = "-62 %" if target is not None else f"least memory ({text})"
    target = target or least_feasible(step)
    sqnr_db = _sqnr_db(_gradients(study, dict(target.choices)), _gradients(study, dict(keep.choices)))
    text = f"{name}: {_shares(target)}, gradient SQNR {sqnr_db:.1f} dB"
    study.row(text, "gemworks", target, study.keep_point, "keep everything")


def _curve_rows(study: Study, step: StepProfile, partitioned: Sequence[str]) -> None:
    """One global budget, and the solver's mix in the memory which that one is predicted to take."""
    for choice in partitioned:
        everywhere = _everywhere(step, choice)
        peer = study.row(f"global {choice}", "one global budget", everywhere)
        mix, text = _solve(step, everywhere.peak_bytes)
        _log(text)
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
            extra_ms = 1e3 * (o.forward_s + o.backward_s - first.forward_s - first.backward_s)
            kind = type(study.model.get_submodule(region.name)).__name__
            study.s.rows.add(
                "region_price",
                shape=study.size.label,
                setting=f"{kind} {o.choice}: saves {saved:.3f} GB, {extra_ms / saved:.3f} ms per GB",
                ms=extra_ms,
                memory_gib=o.held_bytes / GIB,
            )


def _offload_rows(study: Study, step: StepProfile, keep: Plan) -> None:
    """Offload alone, of more and more regions from the first; how much of it is free, predicted and measured."""
    num = len(step.regions)
    activations = max(1.0, keep.peak_bytes - step.base_bytes)
    predicted, measured = [(0.0, 0.0)], [(0.0, 0.0)]
    for n in range(1, min(num, 2) + 1):  # beyond it compute does little but wait
        plan = evaluate(step, [OFFLOAD] * n + [KEEP] * (num - n))
        if plan.moved_bytes > study.arena_bytes:
            break
        name = "free" if plan.stall_s == 0 else f"waits {plan.stall_s * 1e3:.1f} ms"
        share = plan.moved_bytes / activations
        text = f"offload {n} of {num} regions, {plan.moved_bytes / GIB:.3f} GiB, {share:.3f} of activations, {name}"
        point = study.row(text, "gemworks offload", plan, study.keep_point, "keep everything")
        assert study.keep_point is not None
        predicted.append((share, plan.step_s / keep.step_s - 1))
        measured.append((share, point.ms / study.keep_point.ms - 1))
    if len(predicted) == 1:
        return  # the host arena holds no region
    free, found = (_share_at(points, FREE_SLOWDOWN) for points in (predicted, measured))
    study.s.rows.add(
        "free_share",
        shape=study.size.label,
        setting=f"share of activations offloaded at {100 * FREE_SLOWDOWN:.0f} % slower: predicted {free:.4f}, "
        f"measured {found:.4f}",
        ratio_to_best_peer=found / free,
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


def _quantise_rows(study: Study, step: StepProfile, coded: Sequence[str]) -> None:
    """Quantised saved activations in every region: memory, time, error of the gradients."""
    expected = _gradients(study, dict(_everywhere(step, KEEP).choices))
    held = sum(r.option(KEEP).held_bytes for r in step.regions)
    for choice in coded:
        plan = _everywhere(step, choice)
        got = _gradients(study, dict(plan.choices))
        sqnr_db = _sqnr_db(got, expected)
        ratio = held / sum(r.option(choice).held_bytes for r in step.regions)
        text = f"{choice} everywhere: held {ratio:.3f}x less, gradient SQNR {sqnr_db:.1f} dB"
        study.row(text, f"gemworks {choice}", plan, study.keep_point, "keep everything")
