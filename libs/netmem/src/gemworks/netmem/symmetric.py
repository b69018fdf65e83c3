"""Symmetric memory, in rings of buffers: what collectives that reach into the peers' memory are built on."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from gemworks.netmem.checks import check_kind, check_number
from gemworks.netmem.errors import CollectiveTimeoutError
from torch.distributed.distributed_c10d import Store

# Each size gets a ring of this many buffers: one being filled, one being copied out, one that FSDP2 still holds, one
# to spare.
NUM_BUFFERS = 4
# How long a barrier may spin for a peer. NCCL's groups have the same default.
TIMEOUT_S = 600.0
# A wait that is too long is named this much before the device ends it: afterwards the process may be gone.
_NAMED_EARLIER_S = 1.0

_log = logging.getLogger(__name__)


class SymmetricHandle(Protocol):
    """What `torch.distributed._symmetric_memory.rendezvous` returns."""

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None: ...

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor: ...


class SymmetricMemory(Protocol):
    """Allocation and rendezvous of symmetric memory."""

    def empty(self, num_bytes: int, device: torch.device) -> torch.Tensor: ...

    def rendezvous(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> SymmetricHandle: ...


def wait_for_all(store: Store, key: str, num_ranks: int, timeout_s: float = 300.0) -> None:
    """On the host, until every rank has come here with this key.

    Raises:
        CollectiveTimeoutError: not all came in time.
    """
    here, end = store.add(key, 1), time.monotonic() + timeout_s
    while here < num_ranks:
        if time.monotonic() > end:
            here = store.add(key, -1) + 1  # a rank that comes later must not go on without this one
            if here < num_ranks:
                raise CollectiveTimeoutError(f"{key}: {here} of {num_ranks} ranks came within {timeout_s:g} s")
            store.add(key, 1)  # all had come in between, and may have seen it
            return
        time.sleep(1e-3)
        here = store.add(key, 0)


class _TorchSymmetricMemory:
    # Rendezvous so far by name of the group, whoever asked for them: all its ranks count alike.
    _count: ClassVar[Counter[str]] = Counter()

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def empty(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        from torch._C._distributed_c10d import _SymmetricMemory

        # Not `symm_mem.empty`: newer torch takes from a pool, where a rank that has let an older buffer go gets its
        # memory again, with the handle of then, while a rank that still holds it waits in the rendezvous alone.
        buffer = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        # Torch 2.11 zeroes the whole allocation, signals included, by a memset on the default stream that nobody waits
        # for (pytorch/pytorch#192308). A peer may signal its first barrier right after the rendezvous: if that comes
        # before the memset, the signal is lost and the barrier never ends.
        torch.cuda.default_stream(device).synchronize()
        return buffer

    def rendezvous(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> SymmetricHandle:
        import torch.distributed._symmetric_memory as symm_mem

        self._count[group.group_name] += 1
        key = f"gemworks.netmem.symmetric/{self._count[group.group_name]}"
        store, what = group.get_group_store(), f"rendezvous for {buffer.numel()} bytes"
        # Torch's own waits as long as the store does, minutes, and names nothing: only who knows that all come goes in.
        wait_for_all(store, f"{key}: {what} begins", group.size(), self._timeout_s)
        handle = symm_mem.rendezvous(buffer, group.group_name)
        # A rank that is through starts a barrier, which spins until its peers start theirs, and may then load a kernel,
        # for which its device has to be idle. No peer may still be mapping memory by then (decision 0510).
        wait_for_all(store, f"{key}: {what} ends", group.size(), self._timeout_s)
        return handle  # type: ignore[return-value]


_num_exchanges: Counter[str] = Counter()


def _of_every_rank(group: dist.ProcessGroup, text: str) -> list[str]:
    """Each rank's text, through the group's store: no collective, and no device."""
    _num_exchanges[group.group_name] += 1
    key, store = f"gemworks.netmem.exchange/{_num_exchanges[group.group_name]}", group.get_group_store()
    store.set(f"{key}/{group.rank()}", text)
    return [store.get(f"{key}/{rank}").decode() for rank in range(group.size())]


def _host() -> str:
    """This host, also where many have the same name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def copy_engine_problem(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why copy-engine collectives can't run on this group, or None if they can.

    All ranks of the group call it, and all get the same answer: hosts and GPUs are compared through the group's store.
    """
    if device.type != "cuda":
        return f"tensors are on {device.type}, copy engines are a GPU's"
    if not hasattr(dist, "is_nccl_available") or not dist.is_nccl_available():
        return "this torch has no NCCL"
    index = torch.cuda.current_device() if device.index is None else device.index
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    own = next(uuid for uuid, i in seen.items() if i == index)
    ranks = [text.rsplit("/", 1) for text in _of_every_rank(group, f"{_host()}/{own}")]
    hosts, gpus = {host for host, _ in ranks}, [gpu for _, gpu in ranks]
    others = [gpu for rank, gpu in enumerate(gpus) if rank != group.rank()]
    problem = ""
    if len(hosts) > 1:
        problem = f"the group's {group.size()} ranks are on {len(hosts)} hosts, RDMA is not built"
    elif len(set(gpus)) < len(gpus):
        problem = f"ranks share a GPU: {len(gpus)} ranks on {len(set(gpus))}"
    elif hidden := [gpu for gpu in others if gpu not in seen]:
        problem = f"rank {group.rank()} does not see GPUs {hidden} of other ranks (CUDA_VISIBLE_DEVICES?)"
    elif apart := [seen[gpu] for gpu in others if not torch.cuda.can_device_access_peer(index, seen[gpu])]:
        problem = f"GPU {index} can't access the memory of GPUs {apart}"
    return next((text for text in _of_every_rank(group, problem) if text), None)


@dataclass
class Buffer:
    """One symmetric buffer, and who has it."""

    data: torch.Tensor
    handle: SymmetricHandle
    user: weakref.ref[torch.Tensor] | None = None
    # after the last collective over it: no peer touches it any more
    done: torch.cuda.Event | None = None


class Fence(Protocol):
    """A CUDA event, or what stands for one."""

    def query(self) -> bool: ...


class _Watch:
    """Says which collective a rank waits in, without a call to the device in time.

    The device ends a barrier that waits too long by a trap, and whatever the process does next fails with an error that
    names nothing. So a thread looks, once nothing was issued for almost as long, whether the last collective is over.
    """

    def __init__(self, timeout_s: float) -> None:
        self._after_s = max(0.5 * timeout_s, timeout_s - _NAMED_EARLIER_S)
        self._last: tuple[float, str, Fence] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.late: str | None = None

    def issued(self, what: str, done: Fence) -> None:
        """A collective was issued; it is over when `done` is."""
        with self._lock:
            self._last = (time.monotonic(), what, done)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gemworks-symmetric-watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                assert self._last is not None
                issued_s, what, done = self._last
                left_s = issued_s + self._after_s - time.monotonic()
                if left_s <= 0:
                    self._thread = self._last = None
                    break
            time.sleep(left_s)
        try:
            over, state = done.query(), "is not over"
        except RuntimeError as error:
            over, state = False, f"failed ({error})"
        if not over:
            self.late = (
                f"{what} {state} {self._after_s:g} s after it was issued: a peer did not come, or came to another "
                f"collective; the device ends the wait by an error (timeout_s)"
            )
            _log.error("%s", self.late)


class SymmetricRings:
    """Rings of symmetric buffers, one per size. All ranks ask in the same order, so a fixed order of use agrees."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        num_buffers: int = NUM_BUFFERS,
        memory: SymmetricMemory | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        check_number("num_buffers", num_buffers, 2, whole=True)
        check_number("timeout_s", timeout_s, 1e-3)
        check_kind("device", device, torch.device)
        if group is None:
            raise ValueError("group: expected a process group, got None; torch.distributed.group.WORLD is the default")
        self._group, self._device, self._num = group, device, num_buffers
        self._memory = memory or _TorchSymmetricMemory(timeout_s)
        self._timeout_ms, self._watch, self._num_calls = math.ceil(1e3 * timeout_s), _Watch(timeout_s), 0
        self._rings: dict[int, list[Buffer]] = {}
        self._next: dict[int, int] = {}
        self._compute = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def take(self, size: Sequence[int | torch.SymInt], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor in the next buffer of its size.

        Raises:
            RuntimeError: the oldest buffer of the ring is still in use; more are needed.
            CollectiveTimeoutError: an earlier collective waited too long for a peer; or a new buffer is needed, and a
                peer did not ask for one of this size within the time-out.
        """
        if self._watch.late is not None:
            raise CollectiveTimeoutError(self._watch.late)
        num_bytes = math.prod(int(n) for n in size) * dtype.itemsize
        ring = self._rings.setdefault(num_bytes, [])
        if len(ring) < self._num:
            data = self._memory.empty(max(num_bytes, 16), device)
            ring.append(Buffer(data, self._memory.rendezvous(data, self._group)))
            buffer = ring[-1]
        else:
            # a fixed order, not "whichever is free": ranks have to agree without talking
            index = self._next.get(num_bytes, 0)
            self._next[num_bytes] = (index + 1) % self._num
            buffer = ring[index]
            if buffer.user is not None and buffer.user() is not None:
                raise RuntimeError(
                    f"num_buffers: all {self._num} buffers of {num_bytes} bytes are in use; pass more, or prefetch "
                    f"less deep"
                )
            if self._compute is not None:
                # the last owner's copy-out was issued to the compute stream before it let the buffer go
                event = torch.cuda.Event()
                event.record(self._compute)
                torch.cuda.current_stream(device).wait_event(event)
                if buffer.done is not None:
                    torch.cuda.current_stream(device).wait_event(buffer.done)
        out = buffer.data[:num_bytes].view(dtype).view(tuple(int(n) for n in size))
        buffer.user = weakref.ref(out)
        return out

    def buffer_of(self, tensor: torch.Tensor) -> Buffer:
        """The buffer that `take` put a tensor in."""
        for ring in self._rings.values():
            for buffer in ring:
                if buffer.data.data_ptr() == tensor.data_ptr():
                    return buffer
        raise ValueError("tensor: expected one from allocate(), got another one")

    def barrier(self, buffer: Buffer, channel: int) -> None:
        """On the device, until every rank is there; too long a wait ends in a trap, so in an error of the next call."""
        buffer.handle.barrier(channel=channel, timeout_ms=self._timeout_ms)

    def mark_done(self, buffer: Buffer) -> None:
        """After the last work of this rank's stream on the buffer."""
        if self._compute is not None:
            buffer.done = torch.cuda.Event()
            buffer.done.record(torch.cuda.current_stream(self._device))
            if not torch.cuda.is_current_stream_capturing():  # such an event can't be asked
                what = f"{type(self).__name__} number {self._num_calls} over {buffer.data.numel()} bytes"
                self._watch.issued(f"rank {self._group.rank()}: {what}", buffer.done)
        self._num_calls += 1


class ReduceScatterRings(SymmetricRings):
    """What reduce-scatters in FSDP2's interface have in common."""

    _output_size: int | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP2 asks for the input first and for the output next; only the input has to be symmetric.

        Raises:
            RuntimeError: the oldest buffer of the ring is still in use; more are needed.
        """
        numel = math.prod(int(n) for n in size)
        if numel == self._output_size:
            self._output_size = None
            # gradients are views of it and live long: it must not come from a ring
            return torch.empty(tuple(int(n) for n in size), dtype=dtype, device=device)
        self._output_size = numel // self._group.size()
        return self.take(size, dtype, device)

    def checked_input(self, output: torch.Tensor, source: torch.Tensor, world: int, op: Any) -> Buffer | None:
        """The buffer of a reduce-scatter's input; None if there is nothing to reduce.

        Raises:
            ValueError: `source` is not from `allocate`, its size is not W outputs, or `op` is neither SUM nor AVG.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"op: expected ReduceOp.SUM or ReduceOp.AVG, got {op}")
        n = output.numel()
        if source.numel() != world * n:
            raise ValueError(
                f"input_tensor: expected {world * n} elements, {world} times the output, got {source.numel()}"
            )
        return self.buffer_of(source) if n else None
