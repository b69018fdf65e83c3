"""What autograd stores in the place of a saved tensor, and how it comes back: kept, moved as bytes, or coded."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from gemworks.netmem.codec import Codec, decode_checked
from gemworks.netmem.errors import ModifiedAfterSaveError
from gemworks.netmem.movers import nothing
from gemworks.netmem.parcels import Parcel, State
from torch.multiprocessing.reductions import StorageWeakRef


class Owner(Protocol):
    """Whoever made the parcels."""

    def let_go(self, parcels: tuple[Parcel, ...]) -> None:
        """A handle died. May be called in any thread, while the owner is in the middle of something."""
        ...


class Probe:
    """Watches a tensor's version counter without holding its memory."""

    def __init__(self, x: torch.Tensor) -> None:
        self._alias = x.detach()
        self.version = x._version
        # assigning .data swaps the storage for an empty one and keeps the shared version counter
        self._alias.data = nothing(x.dtype, x.device)

    @property
    def now(self) -> int:
        return self._alias._version


class Handle(abc.ABC):
    """What autograd stores instead of the tensor."""

    parcels: tuple[Parcel, ...] = ()

    def __init__(self, owner: Owner, x: torch.Tensor, parcels: tuple[Parcel, ...]) -> None:
        for parcel in parcels:
            parcel.num_handles += 1
        self.parcels, self.owner = parcels, owner
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.version = x._version

    @abc.abstractmethod
    def version_now(self) -> int:
        """The tensor's version counter, read without holding its memory."""

    def check(self) -> None:
        """Raise if the tensor was changed in place since it was saved."""
        now = self.version_now()
        if now != self.version:
            raise ModifiedAfterSaveError(
                f"a {tuple(self.shape)} {self.dtype} tensor was saved for backward at version {self.version} and is at "
                f"version {now} now: an in-place operation changed it in between; use the out-of-place form, or clone "
                f"it"
            )

    def __del__(self) -> None:
        # may run in any thread, inside a locked section: only leave a note
        if self.parcels:
            self.owner.let_go(self.parcels)


class Kept(Handle):
    def __init__(self, owner: Owner, x: torch.Tensor) -> None:
        super().__init__(owner, x, ())
        self.x = x

    def version_now(self) -> int:
        return self.x._version


class Moved(Handle):
    """A view of a storage that travels as raw bytes."""

    def __init__(self, owner: Owner, x: torch.Tensor, parcel: Parcel, compact: bool, probe: Probe | None) -> None:
        super().__init__(owner, x, (parcel,))
        self.probe = probe or Probe(x)
        self.stride = row_major(x.shape) if compact else x.stride()
        self.offset = 0 if compact else x.storage_offset()

    def version_now(self) -> int:
        return self.probe.now


class Coded(Handle):
    """A tensor in coded form; each code tensor is either a parcel or stays on the device.

    A dense tensor is coded with its dims in the order of memory and comes back with the strides it had: compiled code
    relies on them. Any other tensor comes back contiguous.
    """

    def __init__(self, owner: Owner, x: torch.Tensor, codec: Codec, codes: Codes) -> None:
        super().__init__(owner, x, tuple(c for c, _, _ in codes if isinstance(c, Parcel)))
        self.probe = Probe(x)
        self.codec, self.codes = codec, codes
        self.decoded: StorageWeakRef | None = None  # for its parts
        self.order = memory_order(x) or tuple(range(x.dim()))

    def restore(self, codes: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The tensor again."""
        shape = [self.shape[d] for d in self.order]
        x = decode_checked(self.codec, codes, shape, self.dtype, self.device)
        return x.permute([self.order.index(d) for d in range(len(self.order))])

    def version_now(self) -> int:
        return self.probe.now


class Part(Handle):
    """A view of a storage that is coded whole: interleaved queries, keys and values can't be coded one by one without
    losing their strides. The handles of one storage share its codes, and what is decoded as long as any of it lives.
    """

    def __init__(self, owner: Owner, x: torch.Tensor, whole: Coded) -> None:
        super().__init__(owner, x, ())
        self.probe, self.whole = Probe(x), whole
        self.stride, self.offset = x.stride(), x.storage_offset()

    def version_now(self) -> int:
        return self.probe.now


# each code tensor: where it is, its shape, its dtype
Codes = tuple[tuple[Parcel | torch.Tensor, torch.Size, torch.dtype], ...]


@dataclass(frozen=True)
class Filed:
    """What is known about a storage that was saved before, valid while it lives and its version stays."""

    content: Any  # a Parcel, or codes
    storage: StorageWeakRef
    probe: Probe

    def valid(self) -> bool:
        content = [self.content] if isinstance(self.content, Parcel) else [c for c, _, _ in self.content]
        closed = any(isinstance(c, Parcel) and c.state is State.CLOSED for c in content)
        return not closed and not self.storage.expired() and self.probe.now == self.probe.version


def memory_order(x: torch.Tensor) -> tuple[int, ...] | None:
    """The dims of a dense tensor from the slowest in memory to the fastest; None where elements overlap or leave gaps.

    >>> memory_order(torch.empty(2, 3, 4).transpose(0, 2)), memory_order(torch.empty(4, 4)[:, :2])
    ((2, 1, 0), None)
    """
    order = sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))
    expected = 1
    for d in reversed(order):
        if x.shape[d] != 1:
            if x.stride(d) != expected:
                return None
            expected *= x.shape[d]
    return tuple(order)


def whole_of(x: torch.Tensor, most_bytes: int) -> torch.Tensor | None:
    """The storage of a view with gaps as rows of the view's last dim; None if that is no row of memory, or too much.

    >>> whole_of(torch.empty(4, 6)[:, :2], 200).shape, whole_of(torch.empty(4, 6)[:, ::2], 200)
    (torch.Size([12, 2]), None)
    """
    row, size = x.shape[-1] if x.dim() else 0, x.untyped_storage().nbytes() // x.element_size()
    if not row or x.stride(-1) != 1 or size % row or size * x.element_size() > most_bytes:
        return None
    return x.detach().as_strided((size // row, row), (row, 1), 0)  # a view, so that it has x's version counter


def alive(reference: StorageWeakRef | None) -> torch.UntypedStorage | None:
    """The storage, if anybody still holds it."""
    if reference is None or reference.expired():
        return None
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def row_major(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def view_of(storage: torch.UntypedStorage, dtype: torch.dtype, offset: Any, shape: Any, stride: Any) -> torch.Tensor:
    return nothing(dtype, storage.device).new_empty(0).set_(storage, offset, shape, stride)  # type: ignore[arg-type]


def own_storage(x: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a contiguous tensor, copied if it holds more than the tensor."""
    whole = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return (x if whole else x.clone()).untyped_storage()


def movable(x: torch.Tensor) -> bool:
    """A plain tensor, and no view of a parameter: FSDP2 gathers those of inner modules after `saving` was entered."""
    plain = type(x) is torch.Tensor and x.layout is torch.strided and not x.is_conj() and not x.is_neg()
    return plain and type(x._base) is not torch.nn.Parameter
