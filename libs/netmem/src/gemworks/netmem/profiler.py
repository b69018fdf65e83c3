"""Measure what each choice costs each region: times and bytes, on the device at hand.

Every region is run alone, on the inputs that it gets in the model, once per choice under a memory meter and some times
under a clock. Bytes are exact allocations (allocator counters on a GPU, a count of live storages on a CPU), not
estimates from shapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import statistics
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

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
    evaluate,
)
from gemworks.netmem.codec import Codec
from gemworks.netmem.contention import measure_contention
from gemworks.netmem.ledger import BandwidthLedger
from gemworks.netmem.movers import WAYS
from gemworks.netmem.offload import OffloadEngine
from gemworks.netmem.policy import apply_policy, find_region, room_for_graphs, treated_forward
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# about two milliseconds: what the host needs to issue a region
_SLEEP_CYCLES = 4_000_000


class _Meter(Protocol):
    def __enter__(self) -> Any: ...
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any: ...
    def live(self) -> int: ...
    def peak(self) -> int: ...
    def reset_peak(self) -> None: ...


class _LiveStorages(TorchDispatchMode):
    """Bytes of the storages made while it is on and not freed yet."""

    def __init__(self, exclude: Iterable[torch.UntypedStorage]) -> None:
        super().__init__()
        self._excluded = {s._cdata for s in exclude}
        self._known: set[int] = set()
        self._live = self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._add(x.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or key in self._excluded:
            return
        self._known.add(key)
        self._live += storage.nbytes()
        self._peak = max(self._peak, self._live)
        # a storage keeps its Python object as long as anything holds it
        weakref.finalize(storage, self._drop, key, storage.nbytes())

    def _drop(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._live -= nbytes

    def live(self) -> int:
        return self._live

    def peak(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._live


class _CudaBytes:
    """The caching allocator's counters, from where they are now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = torch.cuda.memory_allocated(device)

    def __enter__(self) -> _CudaBytes:
        return self

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        return None

    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._start

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._start

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def _storages(tensors: Iterable[Any]) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]


class _FromAbove(torch.autograd.Function):
    """Makes a tensor a non-leaf, as a region's inputs are: the graph alone then doesn't hold it."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].new_zeros(0), None


class _Captured:
    """The arguments of a region's call, detached, with what is needed to make fresh ones."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def detach(x: Any) -> Any:
            return (x.detach(), x.requires_grad) if isinstance(x, torch.Tensor) else x

        self._args, self._kwargs = tree_map(detach, (args, kwargs))

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Clones with the same strides; they require gradients where the originals did."""

        def is_pair(x: Any) -> bool:
            return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], torch.Tensor) and isinstance(x[1], bool)

        def clone(x: Any) -> Any:
            if not is_pair(x):
                return x
            if not x[1]:
                return x[0].clone()
            source = torch.zeros(0, dtype=x[0].dtype, device=x[0].device, requires_grad=True)
            return _FromAbove.apply(source, x[0])

        return tree_map(clone, (self._args, self._kwargs), is_leaf=is_pair)


def _edges(out: Any) -> tuple[list[Any], list[tuple[torch.Size, torch.dtype, torch.device]]]:
    outputs = [o for o in tree_leaves(out) if isinstance(o, torch.Tensor) and o.requires_grad]
    return [torch.autograd.graph.get_gradient_edge(o) for o in outputs], [(o.shape, o.dtype, o.device) for o in outputs]


def _measure_bytes(
    call: Callable[..., Any], captured: _Captured, meter: _Meter, engine: OffloadEngine
) -> tuple[int, int, int, tuple[int, ...]]:
    """(held, forward peak, backward peak, sizes of the parcels sent) of one forward and backward."""
    start = engine.position
    with meter:
        args, kwargs = captured.fresh()
        meter.reset_peak()
        out = call(*args, **kwargs)
        forward_bytes = meter.peak()
        del args, kwargs
        edges, metas = _edges(out)
        del out
        engine.synchronize()
        held, parcels = meter.live(), engine.parcel_bytes(start)
        meter.reset_peak()
        if edges:
            grads = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in metas]
            torch.autograd.backward(edges, grads)
            del grads
        backward_bytes = meter.peak()
        del edges
        engine.synchronize()
    return held, forward_bytes, backward_bytes, parcels


class _Clock:
    """Seconds between two points of one stream of work.

    On a GPU by events, after a short sleep of the device: the calls are queued before the clock starts, so host time
    stays out, as it does in a step whose host runs ahead. On a CPU by the wall.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, run: Callable[[], Any]) -> tuple[Any, float]:
        if self._device.type != "cuda":
            start = time.perf_counter()
            out = run()
            return out, time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self._device):  # events and the sleep go to the current device's stream
            torch.cuda.synchronize()
            torch.cuda._sleep(_SLEEP_CYCLES)
            begin.record()
            out = run()
            end.record()
            torch.cuda.synchronize()
        return out, begin.elapsed_time(end) / 1e3


def _measure_time(call: Callable[..., Any], captured: _Captured, clock: _Clock, repeats: int) -> tuple[float, float]:
    """Median seconds of forward and of backward."""
    forward, backward = [], []
    for _ in range(repeats + 1):
        args, kwargs = captured.fresh()
        out, seconds = clock(lambda args=args, kwargs=kwargs: call(*args, **kwargs))
        forward.append(seconds)
        edges, metas = _edges(out)
        grads = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in metas]
        del out
        if edges:
            _, seconds = clock(lambda edges=edges, grads=grads: torch.autograd.backward(edges, grads))
            backward.append(seconds)
    return statistics.median(forward[1:]), statistics.median(backward[1:] or [0.0])


def _capture(
    model: nn.Module, batch: Any, regions: Sequence[str]
) -> tuple[dict[str, _Captured], list[str], Callable[[], Any]]:
    captured: dict[str, _Captured] = {}
    order: list[str] = []
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
            captured[name] = _Captured(args, kwargs)
            order.append(name)

        hooks.append(find_region(model, name).register_forward_pre_hook(note, with_kwargs=True))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    missing = [name for name in regions if name not in captured]
    if missing:
        raise ValueError(f"regions: {missing} did not run in this forward; leave them out")
    return captured, order, run


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
        model: in training mode, on its device. Gradients that it has are kept; it gets zero gradients where it has
            none.
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
            workspaces of libraries, what lies between the regions.
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
    for way in WAYS:
        ledger.link(f"host.{way}")  # or a ValueError before anything runs
    device = engine.device
    captured, order, run = _capture(model, batch, regions)
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    saved_grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    engine.arena.prepare()
    fixed = [*model.parameters(), *model.buffers(), *[p.grad for p in model.parameters()], engine.arena.region]
    clock = _Clock(device)

    gc.collect()

    def meter() -> _Meter:
        return _CudaBytes(device) if device.type == "cuda" else _LiveStorages(_storages(fixed))

    # the whole step as it runs with every region on its first choice, so that what lies outside the regions is left
    first = dict.fromkeys(order, choices[0])
    with apply_policy(model, first, engine=engine, codec=codec, compile_kwargs=compile_kwargs):
        run()  # compile
        whole = _measure_time(lambda: run(), _Captured((), {}), clock, repeats)
        contention = measure_contention(run, whole[0], ledger, device, clock, repeats)
    byte_s, rates = contention.seconds_per_byte, contention.bytes_per_s
    if progress is not None:
        slower = " and ".join(f"{byte_s[way] * 1e12:.3f} ms {way}" for way in WAYS)
        beside = " and ".join(
            f"{rates[way] / 1e9:.1f} of {ledger.link(f'host.{way}').bytes_per_s / 1e9:.1f} GB/s {way}" for way in WAYS
        )
        progress(f"step {sum(whole) * 1e3:.3f} ms; a GB moved costs compute {slower}, which leaves the link {beside}")

    def options(name: str) -> tuple[Option, ...]:
        module = find_region(model, name)
        found: dict[str, Option] = {}
        times: dict[str, tuple[float, float]] = {}
        for choice in sorted(choices, key=lambda c: CHOICES.index(c) if c in CHOICES else -1):
            call = treated_forward(
                module, module.forward, choice, engine=engine, codec=codec, compile_kwargs=compile_kwargs
            )
            args, kwargs = captured[name].fresh()
            call(*args, **kwargs)  # compile and warm up outside the meter
            del args, kwargs
            before = engine.stats().moved_up_bytes
            held, forward_bytes, backward_bytes, parcels = _measure_bytes(call, captured[name], meter(), engine)
            moved = engine.stats().moved_up_bytes - before
            # an isolated region would wait for its own copies; their time comes from the ledger instead
            timed_as = {OFFLOAD: KEEP, QUANTISE_OFFLOAD: QUANTISE}.get(choice, choice)
            if timed_as not in times:
                timed = treated_forward(
                    module, module.forward, timed_as, engine=engine, codec=codec, compile_kwargs=compile_kwargs
                )
                times[timed_as] = _measure_time(timed, captured[name], clock, repeats)
            found[choice] = Option(
                choice,
                forward_s=times[timed_as][0] + moved * byte_s["up"],
                backward_s=times[timed_as][1] + moved * byte_s["down"],
                held_bytes=held,
                forward_bytes=forward_bytes,
                backward_bytes=backward_bytes,
                moved_bytes=moved,
                parcel_bytes=parcels if sum(parcels) == moved else (),
            )
            if progress is not None:
                progress(
                    f"{name} {choice}: {found[choice].forward_s * 1e3:.3f} + {found[choice].backward_s * 1e3:.3f} ms"
                )
        return tuple(found[c] for c in choices)

    known: dict[Hashable, tuple[Option, ...]] = {}
    for name in order:
        key = name if alike is None else alike(name)
        if key not in known:
            with room_for_graphs() if compile_kwargs is not None else contextlib.nullcontext():
                known[key] = options(name)
    measured = tuple(Region(name, known[name if alike is None else alike(name)]) for name in order)
    inside = sum(r.options[0].forward_s + r.options[0].backward_s for r in measured)
    if base_bytes is None:
        unique = {s._cdata: s.nbytes() for s in _storages([*fixed[:-1], *tree_leaves(batch)])}
        base_bytes = sum(unique.values())
    step = StepProfile(
        measured,
        base_bytes=base_bytes,
        up_bytes_per_s=rates["up"],
        down_bytes_per_s=rates["down"],
        window_bytes=engine.window_bytes,
        other_s=max(0.0, sum(whole) - inside) if choices[0] == KEEP else 0.0,
        granule_bytes=engine.stats().largest_parcel_bytes,
    )
    fixed += [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor)]
    fixed += [x.grad for x in tree_leaves(batch) if isinstance(x, torch.Tensor)]
    missing = 0.0
    for choice in choices:
        plan = evaluate(step, [choice] * len(measured))
        if plan.moved_bytes:
            continue
        with apply_policy(model, plan, engine=engine, codec=codec, compile_kwargs=compile_kwargs):
            _measure_bytes(run, _Captured((), {}), meter(), engine)  # libraries take their workspaces
            _, forward_bytes, backward_bytes, _ = _measure_bytes(run, _Captured((), {}), meter(), engine)
        more = max(forward_bytes, backward_bytes) - (plan.peak_bytes - base_bytes)
        missing = max(missing, more)
        if progress is not None:
            progress(f"{choice} everywhere: {more / 2**20:+.1f} MiB against the prediction")
    for p, grad in zip(model.parameters(), saved_grads, strict=True):
        if grad is not None and p.grad is not None:
            p.grad.copy_(grad)
    return dataclasses.replace(step, base_bytes=base_bytes + math.ceil(missing))


def table(profile: StepProfile, plan: Plan | None = None) -> str:
    """What each choice saves and costs per region, as text; the plan's choice is marked.

    `ms/GB` is the extra time per GB (10^9) of held memory saved, against the region's first option: the price at which
    a region sells memory. Where all regions' prices are equal, one global budget does as well as one per region.
    """
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
