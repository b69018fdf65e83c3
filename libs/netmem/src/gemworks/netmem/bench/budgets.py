"""Activation budgets on a stack of GEM layers: one global budget against a choice per region, the solver's mix, offload
alone, quantised activations.

`memory_gib` is the peak of the whole step. Ratios of activation memory in the setting column leave out what is there
all the time: parameters, gradients, the batch and its gradient.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    QUANTISE_OFFLOAD,
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
TARGET_SHARE = 0.38  # -62 % of the activations
REL_GAP = 0.01
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
        self.arena_bytes = s.gib(6) if not s.smoke else 64 << 20
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


def _solve(study: Study, step: StepProfile, budget_bytes: float) -> Plan | None:
    start = time.perf_counter()
    try:
        plan = solve(step, budget_bytes, rel_gap=REL_GAP)
    except InfeasibleBudgetError as error:
        text = f"budget {budget_bytes / GIB:.3f} GiB: least is {error.least_feasible_bytes / GIB:.3f}"
        study.s.rows.add("budget", shape=study.size.label, setting=f"{text}, {error.held_up_by}")
        return None
    _log(f"solved in {time.perf_counter() - start:.1f} s: {_shares(plan)}, gap {plan.gap_s * 1e3:.3f} ms")
    return plan


def warm_compiler(size: StackSize, timeout_s: float = 90) -> None:
    """Compile the regions under every choice, each in a process of its own, all at once.

    What they compile ends up in the compiler's cache on disk; one after the other it would take minutes.
    """
    choices = [KEEP, *(f"{RECOMPUTE}@{b}" for b in GLOBAL), QUANTISE_FUSED]
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


def budgets(s: Setup, size: StackSize) -> list[tuple[str, list[Point]]]:
    """Measure, predict, and return the curves to plot: (label, points)."""
    partitioned = [f"{RECOMPUTE}@{b}" for b in GLOBAL] if s.compile else ["recompute_cheap", RECOMPUTE]
    study = Study(s, size)
    lossless = [KEEP, *partitioned, OFFLOAD]
    coded = [QUANTISE, QUANTISE_OFFLOAD, *([QUANTISE_FUSED] if study.compiled else [])]
    try:
        step = _profile(study, [*lossless, *coded])
    except _FAILURES:
        # half of the study is better than none; the traceback says what is missing
        traceback.print_exc()
        coded = []
        step = _profile(study, lossless)
    kinds = StepProfile(step.regions[:2])
    _log("profiled\n" + table(kinds))
    _price_rows(study, kinds)
    keep = _everywhere(step, KEEP)
    study.keep_point = study.row("keep", "keep everything", keep)
    mixed, uniform = [study.keep_point], [study.keep_point]
    target = _solve(study, step, step.base_bytes + TARGET_SHARE * (keep.peak_bytes - step.base_bytes))
    name = "-62 %" if target is not None else "least memory"
    target = target or least_feasible(step)
    mixed.append(study.row(f"{name}: {_shares(target)}", "gemworks", target, study.keep_point, "keep everything"))
    for rows in (lambda: _offload_rows(study, step, keep), lambda: _quantise_rows(study, step, coded)):
        try:
            rows()
        except _FAILURES:
            traceback.print_exc()
    peers = {choice: _everywhere(step, choice) for choice in partitioned}
    measured = {choice: study.row(f"global {choice}", "one global budget", plan) for choice, plan in peers.items()}
    uniform += measured.values()
    for choice, plan in peers.items():
        mix = _solve(study, step, plan.peak_bytes)
        if mix is not None:
            text = f"memory of global {choice}: {_shares(mix)}"
            mixed.append(study.row(text, "gemworks", mix, measured[choice], "one global budget"))
    return [("one global budget", uniform), ("per region", mixed)]


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
    """Offload alone, region by region from the first, until the ledger says that compute would wait, and further."""
    num = len(step.regions)
    plans = [evaluate(step, [OFFLOAD] * n + [KEEP] * (num - n)) for n in range(1, num + 1)]
    free = sum(p.stall_s == 0 for p in plans)
    for n in sorted({min(n, num) for n in (1, free, free + 1, 2 * free + 1, 8)} - {0}):
        plan = plans[n - 1]
        name = "free" if plan.stall_s == 0 else f"waits {plan.stall_s * 1e3:.1f} ms"
        share = plan.moved_bytes / max(1, keep.peak_bytes - step.base_bytes)
        text = f"offload {n} of {num} regions, {plan.moved_bytes / GIB:.3f} GiB, {share:.3f} of activations, {name}"
        study.row(text, "gemworks offload", plan, study.keep_point, "keep everything")


def _quantise_rows(study: Study, step: StepProfile, coded: Sequence[str]) -> None:
    """Quantised saved activations in every region: memory, time, error of the gradients."""
    expected = _gradients(study, dict(_everywhere(step, KEEP).choices))
    held = sum(r.option(KEEP).held_bytes for r in step.regions)
    for choice in [c for c in coded if c != QUANTISE_OFFLOAD]:
        plan = _everywhere(step, choice)
        got = _gradients(study, dict(plan.choices))
        sqnr_db = 10 * torch.log10(expected.square().sum() / (got - expected).square().sum()).item()
        ratio = held / sum(r.option(choice).held_bytes for r in step.regions)
        text = f"{choice} everywhere: held {ratio:.3f}x less, gradient SQNR {sqnr_db:.1f} dB"
        study.row(text, f"gemworks {choice}", plan, study.keep_point, "keep everything")


def plot_budgets(curves: Sequence[tuple[str, list[Point]]], path: Path) -> None:
    """Peak memory against step time, measured and predicted."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(6, 4))
    axes = figure.add_subplot()
    for label, points in curves:
        points = sorted((p for p in points if p.ms == p.ms), key=lambda p: p.peak_gib)
        (line,) = axes.plot([p.peak_gib for p in points], [p.ms for p in points], "o-", label=f"{label}, measured")
        points = sorted(points, key=lambda p: p.plan.peak_bytes)
        axes.plot(
            [p.plan.peak_bytes / GIB for p in points],
            [p.plan.step_s * 1e3 for p in points],
            "x:",
            color=line.get_color(),
            label=f"{label}, predicted",
        )
    axes.set_xlabel("peak memory (GiB)")
    axes.set_ylabel("step (ms)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
