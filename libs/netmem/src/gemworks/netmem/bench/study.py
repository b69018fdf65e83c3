"""The stack that budgets are measured on, and what measuring a plan takes: step times, peak, waiting, gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.bench.rows import synchronize, timed_on_device_ms
from gemworks.netmem.bench.single import GIB, Setup
from gemworks.netmem.bench.stack import StackSize, make_stack
from gemworks.netmem.bench.waits import MeteredMover
from gemworks.netmem.budget import KEEP, Peak, Plan, StepProfile
from gemworks.netmem.offload import OffloadEngine
from gemworks.netmem.policy import apply_policy
from gemworks.netmem.profiler import profile

ROUNDS = 3
STEPS = 3  # timed in a row
KEEP_EVERYTHING = "keep everything"
_START = time.perf_counter()


def log(text: str) -> None:
    """Say how far it is."""
    print(f"[{time.perf_counter() - _START:6.1f} s] {text}", flush=True)


@dataclass(frozen=True)
class Point:
    """One measured plan, with the time of keeping everything in the same minutes.

    `slowdowns` has one number a round: how much longer a step was than one that kept everything just before.
    """

    plan: Plan
    ms: float
    peak_gib: float
    keep_ms: float = float("nan")
    slowdowns: tuple[float, ...] = ()


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

    def row(
        self,
        setting: str,
        impl: str,
        plan: Plan,
        against: Point | None = None,
        peer: str = "",
        rounds: int = ROUNDS,
    ) -> Point:
        """Measure a plan, in turns with keeping everything, and report it."""
        if plan.moved_bytes > self.arena_bytes:
            self.s.rows.add("budget", shape=self.size.label, impl=impl, setting=f"{setting}: more than the host arena")
            return Point(plan, float("nan"), float("nan"))
        times: list[float] = []
        keep_times: list[float] = []
        slowdowns = []
        for _ in range(1 if self.s.smoke else rounds):
            if self.keep_point is not None:
                keep_times += self.times(self.keep_point.plan, 2)
            times += self.times(plan, 2)
            if keep_times:
                slowdowns.append(sum(times[-2:]) / sum(keep_times[-2:]) - 1)
        times.sort()
        last = len(times) - 1
        ms, p20, p80 = statistics.median(times), times[round(0.2 * last)], times[round(0.8 * last)]
        keep_ms = statistics.median(keep_times) if keep_times else ms
        peak = self.peak_gib(plan)
        text = f"{setting}; predicted {plan.step_s * 1e3:.2f} ms"
        text += f" with {plan.stall_s * 1e3:.2f} of waiting" if plan.moved_bytes else ""
        text += f", {plan.peak_bytes / GIB:.3f} GiB"
        point = Point(plan, ms, peak if isinstance(peak, float) else plan.peak_bytes / GIB, keep_ms, tuple(slowdowns))
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

    def profile(self, choices: Sequence[str]) -> StepProfile:
        """What each of the choices costs each region."""
        return profile(
            self.model,
            self.batch,
            self.model.regions,
            ledger=self.s.ledger,
            engine=self.engine,
            choices=choices,
            repeats=3,
            base_bytes=self.base_bytes,
            compile_kwargs=self.compile_kwargs,
            # every part of a kind has the same code, shapes and dtypes
            alike=lambda name: type(self.model.get_submodule(name)).__name__,
            progress=log,
        )

    def gradients(self, choices: Mapping[str, str]) -> torch.Tensor:
        """All gradients of one step, flat, float32, in host memory: peaks that are measured later stay free of them."""
        with apply_policy(self.model, choices, engine=self.engine, compile_kwargs=self.compile_kwargs):
            for p in (self.batch, *self.model.parameters()):
                assert p.grad is not None
                p.grad.zero_()
            self.step()
        return torch.cat([p.grad.float().flatten() for p in self.model.parameters() if p.grad is not None]).cpu()
