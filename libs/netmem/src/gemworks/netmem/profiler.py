"""Measure what each choice costs each region: times and bytes, on the device at hand.

Every region is run alone, on the inputs that it gets in the model, once per choice under a memory meter and some times
under a clock (`meters`). Bytes are exact allocations, not estimates from shapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gemworks.netmem.budget import (
    CHOICES,
    KEEP,
    OFFLOAD,
    QUANTISE,
    QUANTISE_OFFLOAD,
    Option,
    Plan,
    Region,
    StepProfile,
    check_plan,
    evaluate,
)
from gemworks.netmem.checks import check_all, check_kind, check_number
from gemworks.netmem.codec import Codec
from gemworks.netmem.contention import Contention, measure_contention
from gemworks.netmem.ledger import BandwidthLedger
from gemworks.netmem.meters import Captured, Clock, allocator_slack, measure_bytes, measure_time, meter_for, storages
from gemworks.netmem.movers import WAYS
from gemworks.netmem.offload import OffloadEngine
from gemworks.netmem.policy import apply_policy, find_region, room_for_graphs, treated_forward
from torch import nn
from torch.utils._pytree import tree_leaves


def _capture(model: nn.Module, batch: Any, regions: Sequence[str]) -> tuple[dict[str, Captured], Callable[[], Any]]:
    """The regions' inputs in the order in which they run, and the forward."""
    captured: dict[str, Captured] = {}
    hooks = []

    def run() -> Any:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple | list) else model(batch)

    for name in regions:

        def note(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            if name in captured:
                raise ValueError(
                    f"regions: {name!r} runs more than once in a forward; make each call a module of its own"
                )
            captured[name] = Captured(args, kwargs)

        hooks.append(find_region(model, name).register_forward_pre_hook(note, with_kwargs=True))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    missing = [name for name in regions if name not in captured]
    if missing:
        raise ValueError(f"regions: {missing} did not run in this forward; leave them out")
    return captured, run


@contextlib.contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Gradients and buffers have the values again that they had; a parameter without a gradient has one of zeros."""
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    buffers = [x.clone() for x in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, grad in zip(model.parameters(), grads, strict=True):
                if grad is not None and p.grad is not None:
                    p.grad.copy_(grad)
            for x, before in zip(model.buffers(), buffers, strict=True):
                x.copy_(before)


def profile(
    model: nn.Module,
    batch: Any,
    regions: Sequence[str],
    *,
    ledger: BandwidthLedger,
    engine: OffloadEngine,
    codec: str | Codec = "fp8_row",
    choices: Sequence[str] = CHOICES,
    repeats: int = 5,
    base_bytes: int | None = None,
    compile_kwargs: Mapping[str, Any] | None = None,
    alike: Callable[[str], Hashable] | None = None,
    progress: Callable[[str], object] | None = None,
) -> StepProfile:
    """Measure every choice of every region.

    Args:
        model: in training mode, on its device. Gradients and buffers are afterwards what they were before, after an
            error too; it gets zero gradients where it has none. The state of random generators moves on.
        batch: what the model is called with: a tensor, a tuple of positional or a mapping of keyword arguments.
        regions: module names; each must run exactly once in a forward.
        ledger: rates of `host.up` and `host.down`. On a GPU a forward beside copies of each way says what compute
            leaves of them, and by how much a moved byte slows compute down; on a CPU that is a byte of device-memory
            traffic.
        engine: the engine that will run the plan; its window and minimum size count.
        codec: for quantise and quantise_offload.
        choices: which to measure.
        repeats: timed runs, of which the median counts.
        base_bytes: memory outside the regions; None: parameters, their gradients, buffers, and the batch. Add your
            optimizer's state. What whole steps, one per choice, need above their prediction is added to it: the loss,
            workspaces of libraries, what lies between the regions. On a GPU 2 MiB come on top, for blocks of the
            caching allocator that another run meets otherwise.
        compile_kwargs: measure regions compiled with these arguments of `torch.compile`.
        alike: key of a region's name; regions with equal keys have the same code, shapes and dtypes, and one of them is
            measured for all. None: every region is measured.
        progress: called with a line of text after each measurement.

    Returns:
        A profile for `solver.solve`. A tensor that is both one region's saved output and the next one's saved input
        counts twice, so the predicted peak errs upwards.

    Raises:
        ValueError: a region that is unknown, runs never or twice; no rate for the host link.
    """
    _check(model, regions, ledger, engine, choices, repeats, base_bytes)
    device = engine.device
    with _as_before(model):
        captured, run = _capture(model, batch, regions)
        engine.arena.prepare()
        parameters = [*model.parameters(), *model.buffers(), *[p.grad for p in model.parameters()]]
        study = _Study(
            engine, codec, compile_kwargs, repeats, [*parameters, engine.arena.region], progress or (lambda _: None)
        )
        gc.collect()
        # the whole step as it runs with every region on its first choice, so that what lies outside the regions is left
        first = dict.fromkeys(captured, choices[0])
        with apply_policy(model, first, engine=engine, codec=codec, compile_kwargs=compile_kwargs):
            run()  # compile
            whole = measure_time(lambda: run(), Captured((), {}), study.clock, repeats)
            contention = measure_contention(run, whole[0], ledger, device, study.clock, repeats)
        byte_s, rates = contention.seconds_per_byte, contention.bytes_per_s
        slower = " and ".join(f"{byte_s[way] * 1e12:.3f} ms {way}" for way in WAYS)
        beside = " and ".join(
            f"{rates[way] / 1e9:.1f} of {ledger.link(f'host.{way}').bytes_per_s / 1e9:.1f} GB/s {way}" for way in WAYS
        )
        study.progress(
            f"step {sum(whole) * 1e3:.3f} ms; a GB moved costs compute {slower}, which leaves the link {beside}"
        )

        known: dict[Hashable, tuple[Option, ...]] = {}
        measured: list[Region] = []
        for name, inputs in captured.items():
            key = name if alike is None else alike(name)
            if key not in known:
                with room_for_graphs() if compile_kwargs is not None else contextlib.nullcontext():
                    known[key] = study.options(name, find_region(model, name), inputs, choices, contention)
            measured.append(Region(name, known[key]))
        inside = sum(r.options[0].forward_s + r.options[0].backward_s for r in measured)
        if base_bytes is None:
            unique = {s._cdata: s.nbytes() for s in storages([*parameters, *tree_leaves(batch)])}
            base_bytes = sum(unique.values())
        step = StepProfile(
            tuple(measured),
            base_bytes=base_bytes,
            up_bytes_per_s=rates["up"],
            down_bytes_per_s=rates["down"],
            window_bytes=engine.window_bytes,
            other_s=max(0.0, sum(whole) - inside) if choices[0] == KEEP else 0.0,
            granule_bytes=engine.stats().largest_parcel_bytes,
        )
        inputs_of_step = [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor)]
        study.fixed.extend([*inputs_of_step, *[x.grad for x in inputs_of_step]])
        missing = study.missing_bytes(model, run, step, choices)
        slack = allocator_slack(device)
        return dataclasses.replace(step, base_bytes=base_bytes + math.ceil(missing) + slack)


def _check(
    model: nn.Module,
    regions: Sequence[str],
    ledger: BandwidthLedger,
    engine: OffloadEngine,
    choices: Sequence[str],
    repeats: int,
    base_bytes: int | None,
) -> None:
    """A ValueError before anything runs."""
    check_kind("model", model, nn.Module)
    check_kind("ledger", ledger, BandwidthLedger, "measure() makes one")
    check_kind("engine", engine, OffloadEngine)
    check_number("repeats", repeats, 1, whole=True)
    if base_bytes is not None:
        check_number("base_bytes", base_bytes)
    for name, values in (("regions", regions), ("choices", choices)):
        found = check_all(name, values, str)
        if not found or len(set(found)) != len(found):
            raise ValueError(f"{name}: expected at least one and different ones, got {found}")
    for way in WAYS:
        ledger.link(f"host.{way}")


@dataclass(frozen=True)
class _Study:
    """What measuring a region needs."""

    engine: OffloadEngine
    codec: str | Codec
    compile_kwargs: Mapping[str, Any] | None
    repeats: int
    fixed: list[torch.Tensor | None]  # there all the time
    progress: Callable[[str], object]

    @property
    def clock(self) -> Clock:
        return Clock(self.engine.device)

    def bytes_of(self, call: Callable[..., Any], inputs: Captured) -> tuple[int, int, int, tuple[int, ...]]:
        meter = meter_for(self.engine.device, storages(self.fixed))
        return measure_bytes(call, inputs, meter, self.engine)

    def options(
        self, name: str, module: nn.Module, inputs: Captured, choices: Sequence[str], contention: Contention
    ) -> tuple[Option, ...]:
        """Every choice of a region, in the order of `choices`."""

        def treated(choice: str) -> Callable[..., Any]:
            return treated_forward(
                module,
                module.forward,
                choice,
                engine=self.engine,
                codec=self.codec,
                compile_kwargs=self.compile_kwargs,
            )

        found: dict[str, Option] = {}
        times: dict[str, tuple[float, float]] = {}
        for choice in sorted(choices, key=lambda c: CHOICES.index(c) if c in CHOICES else -1):
            call = treated(choice)
            args, kwargs = inputs.fresh()
            call(*args, **kwargs)  # compile and warm up outside the meter
            del args, kwargs
            before = self.engine.stats().moved_up_bytes
            held, forward_bytes, backward_bytes, parcels = self.bytes_of(call, inputs)
            moved = self.engine.stats().moved_up_bytes - before
            # an isolated region would wait for its own copies; their time comes from the ledger instead
            timed_as = {OFFLOAD: KEEP, QUANTISE_OFFLOAD: QUANTISE}.get(choice, choice)
            if timed_as not in times:
                times[timed_as] = measure_time(treated(timed_as), inputs, self.clock, self.repeats)
            option = Option(
                choice,
                forward_s=times[timed_as][0] + moved * contention.seconds_per_byte["up"],
                backward_s=times[timed_as][1] + moved * contention.seconds_per_byte["down"],
                held_bytes=held,
                forward_bytes=forward_bytes,
                backward_bytes=backward_bytes,
                moved_bytes=moved,
                parcel_bytes=parcels if sum(parcels) == moved else (),
            )
            found[choice] = option
            self.progress(f"{name} {choice}: {option.forward_s * 1e3:.3f} + {option.backward_s * 1e3:.3f} ms")
        return tuple(found[c] for c in choices)

    def missing_bytes(
        self, model: nn.Module, run: Callable[[], Any], step: StepProfile, choices: Sequence[str]
    ) -> float:
        """The most that a whole step needs above its prediction, over the choices that move nothing."""
        missing = 0.0
        for choice in choices:
            plan = evaluate(step, [choice] * len(step.regions))
            if plan.moved_bytes:
                continue
            with apply_policy(model, plan, engine=self.engine, codec=self.codec, compile_kwargs=self.compile_kwargs):
                self.bytes_of(run, Captured((), {}))  # libraries take their workspaces
                _, forward_bytes, backward_bytes, _ = self.bytes_of(run, Captured((), {}))
            more = max(forward_bytes, backward_bytes) - (plan.peak_bytes - step.base_bytes)
            missing = max(missing, more)
            self.progress(f"{choice} everywhere: {more / 2**20:+.1f} MiB against the prediction")
        return missing


def table(profile: StepProfile, plan: Plan | None = None) -> str:
    """What each choice saves and costs per region, as text; the plan's choice is marked.

    `ms/GB` is the extra time per GB (10^9) of held memory saved, against the region's first option: the price at which
    a region sells memory. Where all regions' prices are equal, one global budget does as well as one per region.
    """
    check_kind("profile", profile, StepProfile, "profile() measures one")
    if plan is not None:
        check_plan(plan, profile)
    lines = [f"{'region':<24} {'choice':<18} {'held MB':>9} {'moved MB':>9} {'fwd ms':>8} {'bwd ms':>8} {'ms/GB':>9}"]
    for region in profile.regions:
        first = region.options[0]
        for o in region.options:
            saved = first.held_bytes - o.held_bytes
            extra_s = o.forward_s + o.backward_s - first.forward_s - first.backward_s
            price = f"{extra_s * 1e3 / (saved / 1e9):9.3f}" if saved > 0 else " " * 9
            mark = "*" if plan is not None and plan.choices[region.name] == o.choice else " "
            lines.append(
                f"{region.name:<24} {mark}{o.choice:<17} {o.held_bytes / 1e6:9.3f} {o.moved_bytes / 1e6:9.3f} "
                f"{o.forward_s * 1e3:8.3f} {o.backward_s * 1e3:8.3f} {price}"
            )
    if plan is not None:
        lines.append(
            f"step {plan.step_s * 1e3:.3f} ms, of it {plan.stall_s * 1e3:.3f} ms waiting; peak: {plan.peak.explain()}"
        )
    return "\n".join(lines)
