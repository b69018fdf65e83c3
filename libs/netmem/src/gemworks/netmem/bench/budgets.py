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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.bench.rows import synchronize, timed_on_device_ms
from gemworks.netmem.bench.single import GIB, Setup
from gemworks.netmem.bench.stack import StackSize, make_stack
from gemworks.netmem.bench.waits import MeteredMover
from gemworks.netmem.budget import (
    KEEP,
    OFFLOAD,
    QUANTISE,
    QUANTISE_FUSED,
    RECOMPUTE,
    Option,
    Peak,
    Plan,
    StepProfile,
    evaluate,
)
from gemworks.netmem.errors import InfeasibleBudgetError
from gemworks.netmem.offload import OffloadEngine
from gemworks.netmem.policy import apply_policy
from gemworks.netmem.profiler import profile, table
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
ROUNDS = 3
STEPS = 3  # timed in a row
PARTS = ("target", "curve", "quantise", "offload")
KEEP_EVERYTHING = "keep everything"
_START = time.perf_counter()
_FAILURES = (RuntimeError, AssertionError, ValueError)


def _log(text: str) -> None:
    print(f"[{time.perf_counter() - _START:6.1f} s] {text}", flush=True)


@dataclass(frozen=True)
class Point:
    """One measured plan, with the time of keeping everything in the same minutes."""

    plan: Plan
    ms: float
    peak_gib: float
    keep_ms: float = float("nan")


class Study:
    """The stack with what measuring a plan on it needs."""

    def __init__(self, s: Setup, size: StackSize) -> None:
        self.s, self.size = s, size
        self.model, self.batch = make_stack(size, s.device)
        self.compiled = s.compile
        self.keep_point: Point | None = None
        self.compile_kwargs: dict[str, object] | None = {} if s.compile else None
        self.arena_bytes = s.gib(4) if not s.smoke else 64 << 20
        self.mover = MeteredMover(s.device) if s.device.type == "cuda" else None
        self.engine = OffloadEngine(
            PinnedArena(self.arena_bytes, pin=s.device.type == "cuda"),
            device=s.device,
            window_bytes=s.gib(3),
            min_bytes=1024 if s.smoke else 1 << 20,
            mover=self.mover,
        )
        for p in (self.batch, *self.model.parameters()):
            p.grad = torch.zeros_like(p)
        # what is there all the time
        kept = [*self.model.parameters(), self.batch]
        self.base_bytes = 2 * sum(p.numel() * p.element_size() for p in kept)
        if s.device.type == "cuda":
            self.times(Plan(dict.fromkeys(self.model.regions, KEEP), 0, 0, 0, Peak(0, "", "", 0, 0, 0, 0), 0), 1)
            # with the workspaces of libraries
            self.base_bytes = max(self.base_bytes, torch.cuda.memory_allocated(s.device))

    def step(self) -> None:
        """Forward and backward; gradients are added to the ones that are there, so that no memory comes and goes."""
        self.model(self.batch).backward()

    def times(self, plan: Plan, repeats: int) -> list[float]:
        """Milliseconds of a step, from that many runs of some steps in a row, as training runs them.

        After a synchronisation the host is ahead of nothing, and the device waits while it issues the copies of the
        first region.
        """
        with apply_policy(self.model, plan, engine=self.engine, compile_kwargs=self.compile_kwargs):
            self.step()
            return [timed_on_device_ms(self.step, self.s.device, 1, STEPS)[0] for _ in range(repeats)]

    def peak_gib(self, plan: Plan) -> float | str:
        """Peak of a step."""
        if self.s.device.type != "cuda":
            return ""
        with apply_policy(self.model, plan, engine=self.engine, compile_kwargs=self.compile_kwargs):
            self.step()
            synchronize(self.s.device)
            torch.cuda.reset_peak_memory_stats(self.s.device)
            self.step()
            synchronize(self.s.device)
            return torch.cuda.max_memory_allocated(self.s.device) / GIB

    def exposed_ms(self, plan: Plan) -> float | str:
        """How long compute waits for copies in a step."""
        if self.mover is None:
            return ""
        with apply_policy(self.model, plan, engine=self.engine, compile_kwargs=self.compile_kwargs):
            self.step()
            return self.mover.measure_ms(self.step)

    def row(self, setting: str, impl: str, plan: Plan, against: Point | None = None, peer: str = "") -> Point:
        """Measure a plan, in turns with keeping everything, and report it."""
        if plan.moved_bytes > self.arena_bytes:
            self.s.rows.add("budget", shape=self.size.label, impl=impl, setting=f"{setting}: more than the host arena")
            return Point(plan, float("nan"), float("nan"))
        times: list[float] = []
        keep_times: list[float] = []
        for _ in range(1 if self.s.smoke else ROUNDS):
            if self.keep_point is not None:
                keep_times += self.times(self.keep_point.plan, 2)
            times += self.times(plan, 2)
        times.sort()
        last = len(times) - 1
        ms, p20, p80 = statistics.median(times), times[round(0.2 * last)], times[round(0.8 * last)]
        keep_ms = statistics.median(keep_times) if keep_times else ms
        peak = self.peak_gib(plan)
        text = f"{setting}; predicted {plan.step_s * 1e3:.2f} ms"
        text += f" with {plan.stall_s * 1e3:.2f} of waiting" if plan.moved_bytes else ""
        text += f", {plan.peak_bytes / GIB:.3f} GiB"
        point = Point(plan, ms, peak if isinstance(peak, float) else plan.peak_bytes / GIB, keep_ms)
        if self.keep_point is not None:
            keep, base = self.keep_point, self.base_bytes / GIB
            less = 1 - (point.peak_gib - base) / (keep.peak_gib - base)
            text += f"; activations {-100 * less:+.1f} %, {100 * (ms / keep_ms - 1):+.1f} % time against keep"
        against_ms = keep_ms if peer == KEEP_EVERYTHING else ms if against is None else against.ms
        self.s.rows.add(
            "budget",
            shape=self.size.label,
            setting=text,
            impl=impl,
            memory_gib=peak,
            ms=ms,
            ms_p20=p20,
            ms_p80=p80,
            exposed_ms=self.exposed_ms(plan) if plan.moved_bytes else 0.0,
            best_peer=peer,
            ratio_to_best_peer=against_ms / ms if peer else "",
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
    """All gradients of one step, flat, float32, in host memory: the peaks that are measured later stay free of them."""
    with apply_policy(study.model, choices, engine=study.engine, compile_kwargs=study.compile_kwargs):
        for p in (study.batch, *study.model.parameters()):
            assert p.grad is not None
            p.grad.zero_()
        study.step()
    return torch.cat([p.grad.float().flatten() for p in study.model.parameters() if p.grad is not None]).cpu()


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
    alone = set(parts) == {"offload"}
    finer = _recomputes(FINER) if s.compile and not alone else []
    fused = _fused() if s.compile and not alone else []
    coded = [QUANTISE] if "quantise" in parts else []
    compared = partitioned if "curve" in parts or not (s.compile or alone) else []
    lossless = [*finer, *(c for c in compared if c not in finer)]
    try:
        step = _profile(study, [KEEP, *lossless, OFFLOAD, *coded, *fused])
    except _FAILURES:
        traceback.print_exc()
        fused = []
        step = _profile(study, [KEEP, *lossless, OFFLOAD, *coded])
    kinds = StepProfile(step.regions[:2])
    _log("profiled\n" + table(kinds))
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
    expected = _gradients(study, dict(keep.choices))
    for name, offered in (("-62 %", step), ("-62 %, nothing coded", _without(step, [QUANTISE, *fused]))):
        # what the prediction counts twice, it counts twice in every plan of the kind
        near = _everywhere(offered, f"{QUANTISE_FUSED if offered is step else RECOMPUTE}@{FINER[1]}" if fused else KEEP)
        peak = study.peak_gib(near)
        twice = max(0.0, near.peak_bytes - peak * GIB) if isinstance(peak, float) else 0.0
        target, text = _solve(_distinct(offered), budget + twice)
        _log(text)
        if target is None:
            name, target = f"{name}: least memory ({text})", least_feasible(offered)
        sqnr_db = _sqnr_db(_gradients(study, dict(target.choices)), expected)
        text = f"{name}: {_shares(target)}, gradient SQNR {sqnr_db:.1f} dB"
        study.row(text, "gemworks", target, study.keep_point, KEEP_EVERYTHING)


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
    """Offload alone, of more and more regions from the first; how much of it is free, predicted and measured.

    Predicted by the rehearsal: beyond the window the engine waits for whole tensors, and the solver's model for bytes.
    """
    num = len(step.regions)
    activations = max(1.0, keep.peak_bytes - step.base_bytes)
    predicted, measured = [(0.0, 0.0)], [(0.0, 0.0)]
    for n in range(1, min(num, 2) + 1):  # beyond it compute does little but wait
        plan = evaluate(step, [OFFLOAD] * n + [KEEP] * (num - n))
        if plan.moved_bytes > study.arena_bytes:
            break
        duplex_bytes_per_s = study.s.ledger.capacity.get("host.duplex")
        played = rehearse(step, plan, duplex_bytes_per_s=duplex_bytes_per_s, num_steps=STEPS)
        name = "free" if played.wait_s == 0 else f"waits {played.wait_s * 1e3:.1f} ms"
        share = plan.moved_bytes / activations
        text = f"offload {n} of {num} regions, {plan.moved_bytes / GIB:.3f} GiB, {share:.3f} of activations, {name}"
        text += f", rehearsed {played.step_s * 1e3:.2f} ms"
        point = study.row(text, "gemworks offload", plan, study.keep_point, KEEP_EVERYTHING)
        predicted.append((share, played.step_s / keep.step_s - 1))
        measured.append((share, point.ms / point.keep_ms - 1))
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


def _quantise_rows(study: Study, step: StepProfile, coded: Sequence[str], fused: Sequence[str]) -> None:
    """Quantised saved activations in every region: memory, time, error of the gradients.

    Coding inside the graphs comes with the same graphs without coding, and with a mix at `CODED_RATIO`.
    """
    expected = _gradients(study, dict(_everywhere(step, KEEP).choices))
    held = sum(r.option(KEEP).held_bytes for r in step.regions)

    def row(plan: Plan, name: str, impl: str, against: Point | None = None, peer: str = KEEP_EVERYTHING) -> Point:
        got = _gradients(study, dict(plan.choices))
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
