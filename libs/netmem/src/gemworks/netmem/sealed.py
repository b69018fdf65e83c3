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

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves


class Owner(Protocol):
    """Who parks tensors."""

    parked: dict[int, str]
    """Names of groups by the address of each storage that is not on the device."""

    def refuse(self, name: str, what: str) -> None:
        """Raise the error that names the group and what wanted it."""
        ...


# Subclasses with data of their own (DTensor) keep their class.
_KINDS = (torch.Tensor, nn.Parameter)
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


def seal(tensor: torch.Tensor, owner: Owner, name: str) -> bool:
    """Refuse its use from now on. False for a class of its own, which stays as it is."""
    if type(tensor) not in _KINDS:
        return False
    vars(tensor)["_parked_by"] = (owner, name)
    tensor.__class__ = _sealed_class(type(tensor))
    return True


def unseal(tensor: torch.Tensor) -> None:
    """The tensor has its class back."""
    tensor.__class__ = type(tensor).__mro__[1]
    del vars(tensor)["_parked_by"]


@functools.cache
def _sealed_class(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    def refuse(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            # a tensor restored on another thread meanwhile has no owner any more
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, torch.Tensor) and "_parked_by" in vars(x):
                    owner, name = vars(x)["_parked_by"]
                    owner.refuse(name, torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    return type(f"Parked{kind.__name__}", (kind,), {"__slots__": (), "__torch_function__": classmethod(refuse)})


_COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
_owners: weakref.WeakSet[Any] = weakref.WeakSet()
_originals: dict[str, Any] = {}


def watch_collectives(owner: Owner) -> None:
    """Collectives refuse the owner's parked storages, until nobody has any."""
    _owners.add(owner)
    if not _originals and dist.is_available():
        own = vars(dist.ProcessGroup)  # pybind's descriptors; what getattr gives would no longer bind
        for name in set(_COLLECTIVES) & own.keys():  # torch 2.11 has fewer of them
            _originals[name] = own[name]
            setattr(dist.ProcessGroup, name, _checked(name, getattr(dist.ProcessGroup, name)))


def unwatch_collectives(owner: Owner) -> None:
    """The owner has nothing parked; the last one gives `ProcessGroup` its own methods back."""
    _owners.discard(owner)
    if not _owners:
        for name, original in _originals.items():
            setattr(dist.ProcessGroup, name, original)
        _originals.clear()


def _checked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.layout is torch.strided:
                for owner in list(_owners):
                    group = owner.parked.get(x.untyped_storage()._cdata)
                    if group is not None:
                        owner.refuse(group, f"the collective {name}")
        return original(*args, **kwargs)

    return call
