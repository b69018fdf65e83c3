"""Optimizer state and embedding tables parked in host memory between their uses.

Parking copies a group's storages to pinned memory and frees them on the device; the tensors stay the same objects, so
optimizers, modules and fused tables keep their references. A parked tensor must not be touched: what does so by
mistake (checkpoints, eval, collectives, any torch function given the tensor) is refused by name; restore points bring
it back in time.

Not seen, and so a crash or wrong bytes: a *view* that is not in the group, made before parking (the collectives of
`torch.distributed` and `guard()` see it); what operators saved of the tensor for a backward while it is parked; C++
code that holds it; functions that ask no class (`torch.tensor`, `torch.func`); a CUDA graph that was captured over it.
Decision 0560 says why. A stash belongs to one thread.
"""

from __future__ import annotations

import enum
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from gemworks.netmem.arena import Block, Fence, PinnedArena
from gemworks.netmem.checks import check_all, check_kind, check_number, checked_device
from gemworks.netmem.errors import ParkedStateError, PinnedMemoryExhaustedError
from gemworks.netmem.movers import CHUNK_BYTES, Mover, as_bytes, mover_for
from gemworks.netmem.sealed import Guard, at_work, hold, plain_tensors, refusal, release, seal, unseal
from torch import nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Place(enum.Enum):
    """Where a group is."""

    DEVICE = "on the device"
    LEAVING = "being parked"
    PARKED = "parked"
    RETURNING = "being restored"


@dataclass
class _Item:
    storage: torch.UntypedStorage
    nbytes: int
    block: Block
    up: Fence
    down: Fence | None = None

    @property
    def fence(self) -> Fence:
        """After the last copy."""
        return self.up if self.down is None else self.down


@dataclass
class _Group:
    tensors: Callable[[], Iterable[torch.Tensor]]
    place: Place = Place.DEVICE
    items: list[_Item] = field(default_factory=list)
    sealed: list[torch.Tensor] = field(default_factory=list)


class _Hook:
    """A hook of a module that its copies, pickled ones too, are without: they have memory of their own."""

    def __init__(self, run: Callable[..., None] = lambda *_: None) -> None:
        self._run = run

    def __call__(self, *args: Any) -> None:
        self._run(*args)

    def __reduce__(self) -> Any:
        return _Hook, ()


def _abandon(arena: PinnedArena, away: list[list[_Item]]) -> None:
    """The host memory of a stash that is gone with what it had parked."""
    for item in (item for items in away for item in items):
        arena.abandon(item.block, [item.fence])


class StateStash:
    """Groups of tensors that can be parked.

    Args:
        arena: host memory.
        device: where the tensors live; None: the current CUDA device, else the CPU.
        min_bytes: smaller storages stay (an optimizer's step counters), and so does what is not torch's own to free and
            to have again: other devices, sparse tensors, memory of NumPy or shared with other processes.
        mover: who copies; None: chosen by the device.

    From `park` to `restore` torch functions given one of the group's tensors raise `ParkedStateError`, except what the
    tensor says about itself (shape, dtype, `grad`), and so do collectives given their memory.

    >>> stash = StateStash(PinnedArena(1 << 20, pin=False), device="cpu", min_bytes=0)
    >>> table = torch.ones(1000)
    >>> stash.add("table", [table])
    >>> stash.park("table", wait=True)
    >>> table.untyped_storage().nbytes(), stash.place("table").value
    (0, 'parked')
    >>> stash.restore("table")
    >>> table.sum().item()
    1000.0
    """

    def __init__(
        self,
        arena: PinnedArena,
        *,
        device: str | torch.device | None = None,
        min_bytes: int = 1 << 16,
        chunk_bytes: int = CHUNK_BYTES,
        mover: Mover | None = None,
    ) -> None:
        check_kind("arena", arena, PinnedArena)
        check_number("min_bytes", min_bytes)
        self._arena = arena
        self._min_bytes = min_bytes
        self._device = checked_device(device)
        self._mover = mover or mover_for(self._device, chunk_bytes)
        self._groups: dict[str, _Group] = {}
        self._away: list[list[_Item]] = []  # of each group; not the groups, whose tensors know the stash
        weakref.finalize(self, _abandon, arena, self._away).atexit = False
        self._warned = False
        self._restored_at_step: set[str] = set()

    # -- groups --------------------------------------------------------------------------------------------------------

    def add(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Make a group of tensors, such as the weights of embedding tables.

        Raises:
            ValueError: the name is taken, or something is no tensor.
        """
        held = check_all("tensors", tensors, torch.Tensor)
        self._add(name, lambda: held)

    def add_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Make a group of an optimizer's state; what state there is is looked up at each parking.

        Its `state_dict()` is refused while the state is parked.
        """

        check_kind("optimizer", optimizer, torch.optim.Optimizer)

        def tensors() -> list[torch.Tensor]:
            return [x for x in tree_leaves(list(optimizer.state.values())) if isinstance(x, torch.Tensor)]

        self._add(name, tensors)
        optimizer.register_state_dict_pre_hook(lambda _: self.require(name, "state_dict()"))
        optimizer.register_step_pre_hook(
            lambda *_: None if name in self._restored_at_step else self.require(name, "step()")
        )

    def add_module(self, name: str, module: nn.Module) -> None:
        """Make a group of a module's parameters and buffers.

        Its `state_dict()` and its forward, in training and in eval, are refused while they are parked, except at a
        restore point.
        """
        check_kind("module", module, nn.Module)
        self.add(name, [*module.parameters(), *module.buffers()])
        module.register_state_dict_pre_hook(_Hook(lambda *_: self.require(name, "state_dict()")))
        module.register_forward_pre_hook(
            _Hook(lambda m, _: self.require(name, "training forward" if m.training else "eval forward"))
        )

    def _add(self, name: str, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        check_kind("name", name, str)
        if name in self._groups:
            raise ValueError(f"name: got {name!r}, which is taken, expected a new one besides {sorted(self._groups)}")
        self._groups[name] = _Group(tensors)
        self._away.append(self._groups[name].items)

    def _group(self, name: str) -> _Group:
        if name not in self._groups:
            raise ValueError(f"name: got {name!r}, expected one of {sorted(self._groups)}")
        return self._groups[name]

    def place(self, name: str) -> Place:
        """Where the group is."""
        self.poll()
        return self._group(name).place

    # -- moving --------------------------------------------------------------------------------------------------------

    @_disable_dynamo
    def park(self, name: str, *, wait: bool = False) -> None:
        """Start parking a group; the device memory goes when the copies are done (`poll`), at once with `wait`.

        A storage for which the arena has no room stays where it is, with one warning. Parking a parked group does
        nothing. It reads on the compute stream: collectives and work on other streams have to be waited for before.
        """
        with at_work():
            group = self._group(name)
            if group.place is Place.RETURNING:
                self.restore(name)
            if group.place is Place.DEVICE:
                mark = self._mover.mark()
                tensors = list(group.tensors())
                group.place = Place.LEAVING  # from now on, so that what has left when an error comes can be restored
                try:
                    for tensor in tensors:
                        for part in plain_tensors(tensor):
                            self._send(group, name, part, mark)
                finally:
                    self._seal(group, name, tensors)
                if not group.items:
                    group.place = Place.DEVICE
            if wait:
                self._free(group)
            else:
                self.poll()

    def _send(self, group: _Group, name: str, x: torch.Tensor, mark: Fence) -> None:
        if not self._can_leave(x):
            return
        storage = x.untyped_storage()
        try:
            block = self._arena.allocate(storage.nbytes())
        except PinnedMemoryExhaustedError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"host memory is exhausted, state stays on the device: {error}", RuntimeWarning, stacklevel=3
                )
            return
        try:
            up = self._mover.copy("up", block.data, as_bytes(storage), [mark, *block.fences])
        except BaseException:
            self._arena.free(block, list(block.fences))
            raise
        block.fences.clear()
        group.items.append(_Item(storage, storage.nbytes(), block, up))
        hold(storage, name, self._refuse)

    def _can_leave(self, x: torch.Tensor) -> bool:
        """Is that memory on the stash's device, large enough, nobody else's, and can it be freed and had again?"""
        if x.layout is not torch.strided or x.device != self._device:
            return False
        storage = x.untyped_storage()
        # one that is held is of this group or of another one that came first, of whatever stash; one that other
        # processes share can't be freed by one of them (storages of a GPU always say that they are shared)
        if refusal(storage) is not None or storage.nbytes() < max(1, self._min_bytes):
            return False
        return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())

    def _seal(self, group: _Group, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """The group's tensors that have memory which left, and what is inside them, refuse to be used."""
        left = {item.storage._cdata for item in group.items}
        for tensor in tensors:
            parts = list(plain_tensors(tensor))
            if any(p.layout is torch.strided and p.untyped_storage()._cdata in left for p in parts):
                for x in (tensor, *parts):
                    group.sealed.append(x)
                    seal(x, name, self._refuse)

    def _free(self, group: _Group) -> None:
        if group.place is Place.LEAVING:
            group.place = Place.PARKED  # before the first goes: who is interrupted here brings back all of them
            for item in group.items:
                if not item.up.done():
                    self._mover.compute_waits(item.up)  # whoever gets this memory next runs after the copy
                item.storage.resize_(0)

    @_disable_dynamo
    def poll(self) -> None:
        """Free the device memory of groups whose copies are done. Never blocks; call it between layers."""
        with at_work():
            for group in self._groups.values():
                if group.place is Place.LEAVING and all(item.up.done() for item in group.items):
                    self._free(group)

    @_disable_dynamo
    def prefetch(self, name: str) -> None:
        """Start restoring; `restore` completes it. A group still leaving has nothing to bring."""
        with at_work():
            group = self._group(name)
            self.poll()
            if group.place is Place.PARKED:
                for item in group.items:
                    item.storage.resize_(item.nbytes)
                    item.down = self._mover.copy(
                        "down", as_bytes(item.storage), item.block.data, [self._mover.mark(), item.up]
                    )
                group.place = Place.RETURNING

    def restore(self, name: str) -> None:
        """The group is on the device for everything issued from now on. Does nothing if it is there already."""
        if self._group(name).place is not Place.DEVICE:
            self._restore(name)

    @_disable_dynamo
    def _restore(self, name: str) -> None:
        with at_work():
            group = self._group(name)
            self.prefetch(name)
            for item in group.items:
                # of a group restored while it was leaving its owner may write to it now, so that copy has to be over
                self._mover.compute_waits(item.fence)
            for tensor in group.sealed:
                unseal(tensor, name, self._refuse)
            # after an error up to here, and in the loop, another restore goes on from it
            while group.items:
                item = group.items[-1]
                release(item.storage)
                group.items.pop()
                self._arena.free(item.block, [item.fence])
            group.sealed.clear()
            group.place = Place.DEVICE

    # -- restore points ------------------------------------------------------------------------------------------------

    def restore_before_forward(self, name: str, module: nn.Module) -> None:
        """Restore the group when the module's forward starts; compiled, that breaks the graph while it is parked."""
        module.register_forward_pre_hook(_Hook(lambda *_: self.restore(name)), prepend=True)

    def restore_before_gradient(self, name: str, tensor: torch.Tensor) -> None:
        """Restore the group when the gradient of this tensor has been computed, in the midst of backward."""
        tensor.register_hook(lambda _: self.restore(name))

    def around_step(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Restore the group before each `step()` and park it after."""
        self._restored_at_step.add(name)  # the refusing hook of add_optimizer may run before this one
        optimizer.register_step_pre_hook(lambda *_: self.restore(name))
        optimizer.register_step_post_hook(lambda *_: self.park(name))

    # -- guards --------------------------------------------------------------------------------------------------------

    def require(self, name: str, what: str) -> None:
        """Raise unless the group is on the device.

        Raises:
            ParkedStateError: names the group, where it is, and what wanted it.
        """
        if self._group(name).place is not Place.DEVICE:
            self._refuse(name, what)

    def _refuse(self, name: str, what: str) -> None:
        place = self._groups[name].place.value
        raise ParkedStateError(
            f"{what} needs group {name!r}, which is {place}; call restore({name!r}) first or add a restore point"
        )

    def guard(self) -> TorchDispatchMode:
        """A context in which any operation on parked memory raises `ParkedStateError`, by whatever view it comes.

        Of any stash. Without it, the groups' own tensors and collectives are refused; views from outside are not seen.
        Costs a Python call per operation: for debugging, and around code that you don't trust.
        """
        return Guard()
