"""Meters of one call: exact bytes, by allocator counters on a GPU and a count of live storages on a CPU, and times.

What is measured is called on its captured inputs, alone: forward, and backward from gradients of ones.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from gemworks.netmem.offload import OffloadEngine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# about two milliseconds: what the host needs to issue a region
_SLEEP_CYCLES = 4_000_000


class Meter(Protocol):
    """Device bytes from where they are when it is made."""

    def __enter__(self) -> Any: ...
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any: ...

    def live(self) -> int:
        """Now."""
        ...

    def peak(self) -> int:
        """The most since `reset_peak`."""
        ...

    def reset_peak(self) -> None:
        """The most is what there is now."""
        ...


class LiveStorages(TorchDispatchMode):
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


def meter_for(device: torch.device, exclude: Iterable[torch.UntypedStorage]) -> Meter:
    """The device's meter. On a CPU it leaves out given storages, on a GPU what is there already."""
    return _CudaBytes(device) if device.type == "cuda" else LiveStorages(exclude)


def allocator_slack(device: torch.device) -> int:
    """Bytes by which two runs of one step may peak differently, for where their blocks happen to lie.

    The caching allocator counts a block whole. It splits one for more than 1 MiB only if over 1 MiB remains, so that
    the same request takes up to 1 MiB more where it meets another block. A measured step includes what it met itself;
    the allowance is for two blocks that another run meets otherwise (seen: 0.9 MiB). It is not a bound.
    """
    return 2 << 20 if device.type == "cuda" else 0


def storages(tensors: Iterable[Any]) -> list[torch.UntypedStorage]:
    """Those of the tensors among them."""
    return [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]


class _FromAbove(torch.autograd.Function):
    """Makes a tensor a non-leaf, as a region's inputs are: the graph alone then doesn't hold it."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].new_zeros(0), None


class Captured:
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


def measure_bytes(
    call: Callable[..., Any], captured: Captured, meter: Meter, engine: OffloadEngine
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


class Clock:
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


def measure_time(call: Callable[..., Any], captured: Captured, clock: Clock, repeats: int) -> tuple[float, float]:
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
