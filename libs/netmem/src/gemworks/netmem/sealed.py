"""Tensors that refuse to be used: what a parked tensor is until it is restored.

A storage without memory crashes whoever reads it: a segmentation fault on a CPU, an illegal access on a GPU, an abort
in a collective, a checkpoint that can't be read. Two refusals stand before that, and both cost nothing while nothing is
parked:

- the class of the parked tensor objects changes to one whose `__torch_function__` raises, so every torch function that
  is called from Python with one of them is refused, `torch.save`, `state_dict()` and a forward included. What it only
  says about itself (shape, dtype, gradient) stays readable;
- the collectives of `torch.distributed.ProcessGroup` look at the storages that they are given, views included.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

Refuse = Callable[[str, str], None]
"""A bound method that raises the error which names the group (first) and what wanted it."""

_READABLE = (
    "shape", "dtype", "device", "layout", "grad", "grad_fn", "requires_grad", "is_leaf", "ndim", "itemsize",
    "nbytes", "is_sparse", "is_cuda", "is_cpu", "is_meta", "is_nested", "is_quantized", "_version",
)  # fmt: skip
_METHODS = (
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "untyped_storage",
    "is_contiguous", "is_complex", "is_floating_point", "get_device", "__len__",
)  # fmt: skip
_GRADIENT: Any = torch.Tensor.grad
_HARMLESS = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _READABLE]
    + [getattr(torch.Tensor, name) for name in _METHODS]
    + [_GRADIENT.__set__, _GRADIENT.__delete__]
)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that have its memory: those inside a wrapper such as DTensor, else itself."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # newer torch names DTensor's mesh too
                yield from plain_tensors(inner)
    else:
        yield tensor


def seal(tensor: torch.Tensor, name: str, refuse: Refuse) -> None:
    """Refuse its use from now on, unless another group does already, or its class can't be changed."""
    if "_parked_by" in vars(tensor):
        return
    vars(tensor)["_parked_by"] = (refuse, name)
    try:
        tensor.__class__ = _sealed_class(type(tensor))
    except TypeError:  # an object laid out by a class in C
        del vars(tensor)["_parked_by"]


def unseal(tensor: torch.Tensor, name: str, refuse: Refuse) -> None:
    """The tensor has its class back if that group took it. Where it was interrupted a second call goes on."""
    if vars(tensor).get("_parked_by") == (refuse, name):
        kind = vars(type(tensor)).get("_parked_from")
        if kind is not None:
            tensor.__class__ = kind
        del vars(tensor)["_parked_by"]


@functools.cache
def _sealed_class(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    def refused(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            # a tensor restored on another thread meanwhile has no owner any more
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, torch.Tensor) and "_parked_by" in vars(x):
                    refuse, name = vars(x)["_parked_by"]
                    refuse(name, torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def text(self: torch.Tensor) -> str:  # for logs, debuggers and tracebacks, which print what they meet
        return f"<{kind.__name__} {tuple(self.shape)} {self.dtype}, parked>"

    members = {"__slots__": (), "__torch_function__": classmethod(refused), "__repr__": text, "_parked_from": kind}
    return type(f"Parked{kind.__name__}", (kind,), members)


_COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip


class _AtWork(threading.local):
    depth = 0


_at_work = _AtWork()
_lock = threading.Lock()
# Who holds each storage that is not on the device, of all stashes, by its address. Weakly: a stash that is dropped with
# what it has parked leaves an entry that means nothing.
_held: dict[int, tuple[weakref.WeakMethod[Refuse], str]] = {}
_originals: dict[str, Any] = {}


def hold(storage: torch.UntypedStorage, name: str, refuse: Refuse) -> None:
    """Collectives refuse the storage from now on, and no other stash takes it."""
    with _lock:
        if not _held and dist.is_available():
            own = vars(dist.ProcessGroup)  # pybind's descriptors; what getattr gives would no longer bind
            for method in set(_COLLECTIVES) & own.keys():  # torch 2.11 has fewer of them
                # the first time, or again after an interrupt in `release`
                if own[method] is _originals.setdefault(method, own[method]):
                    setattr(dist.ProcessGroup, method, _checked(method, getattr(dist.ProcessGroup, method)))
        _held[storage._cdata] = (weakref.WeakMethod(refuse), name)


def release(storage: torch.UntypedStorage) -> None:
    """The storage is on the device again; the last one gives `ProcessGroup` its own methods back."""
    with _lock:
        _held.pop(storage._cdata, None)
        for address in [address for address, (refuse, _) in _held.items() if refuse() is None]:
            del _held[address]
        if not _held:
            for method, original in _originals.items():
                setattr(dist.ProcessGroup, method, original)
            _originals.clear()


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """Copies of parked memory that stashes make, or an arbiter for them, pass the guards of this thread."""
    _at_work.depth += 1
    try:
        yield
    finally:
        _at_work.depth -= 1


class Guard(TorchDispatchMode):
    """Any operation on memory that some stash holds is refused, by whatever view it comes."""

    def __enter__(self) -> Any:
        _at_work.depth = 0  # an interrupt in the midst of work may have left more
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _at_work.depth:
            refuse_held((args, kwargs), str(func))
        return func(*args, **(kwargs or {}))


def refusal(storage: torch.UntypedStorage) -> Callable[[str], None] | None:
    """What raises for a storage that some stash holds, given what wanted it."""
    entry = _held.get(storage._cdata)
    refuse = entry and entry[0]()
    return functools.partial(refuse, entry[1]) if entry and refuse else None


def refuse_held(values: Any, what: str) -> None:
    """Raise if a tensor among those values has memory that some stash holds."""
    if _held:
        for leaf in tree_leaves(values):
            for x in plain_tensors(leaf) if isinstance(leaf, torch.Tensor) else ():
                refuse = refusal(x.untyped_storage()) if x.layout is torch.strided else None
                if refuse is not None:
                    refuse(what)


def _checked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_held((args, kwargs), f"the collective {name}")
        return original(*args, **kwargs)

    return call
