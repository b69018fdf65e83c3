"""All-gather on copy engines: peers push their shards into each other's symmetric memory, no SM moves a byte.

`copy_engine_all_gather` installs it as FSDP2's custom all-gather. Per call: a one-CTA barrier (the peers' buffers are
free), one push per peer by the copy engine, a second barrier (everything has arrived). FSDP2's own copy-in and
copy-out still run on SMs and are reported apart by `verify_copy_engines`. The transfer stays inside one NVLink domain;
between nodes the RDMA path is only modelled (the ledger's `nic` links). Multicast is never used.

Where symmetric memory can't be had, FSDP2 gets the ordinary all-gather, with a warning that says why.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gemworks.netmem.checks import check_kind, check_number
from gemworks.netmem.codec import has_triton
from gemworks.netmem.overlap import Activity, Trace, read_trace
from gemworks.netmem.symmetric import (
    NUM_BUFFERS,
    TIMEOUT_S,
    ReduceScatterRings,
    SymmetricMemory,
    SymmetricRings,
    copy_engine_problem,
)
from torch import nn

# FSDP2's copies between parameters and the communication buffer.
_FSDP_COPY = re.compile(
    r"split_with_sizes_copy|multi_tensor_apply|chunk_cat|CatArrayBatchedCopy|foreach_copy", re.IGNORECASE
)


class CopyEngineAllGather(SymmetricRings):
    """An all-gather in FSDP2's `AllGather` interface (`allocate` and call), over symmetric memory.

    Args:
        group: ranks that can access each other's memory.
        device: this rank's GPU.
        num_buffers: buffers per distinct size.
        memory: symmetric memory; None: torch's.
        timeout_s: longest wait for a peer. Then the device ends it by an error; a log line before it names the
            collective, and so does the `CollectiveTimeoutError` of the next call.

    All ranks make the same calls in the same order, as with any collective.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for the gathered result, from the ring of its size.

        Raises:
            RuntimeError: the oldest buffer of the ring is still in use; more are needed.
            CollectiveTimeoutError: an earlier gather waited too long for a peer.
        """
        return self.take(size, dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather `[n]` of every rank into `[W * n]`; ordered on the current stream.

        Raises:
            ValueError: `output_tensor` is not from `allocate`, or of another size than W inputs.
        """
        world, rank, n = group.size(), group.rank(), input_tensor.numel()
        if n == 0 and output_tensor.numel() == 0:
            return None
        buffer = self.buffer_of(output_tensor)
        handle = buffer.handle
        if output_tensor.numel() != world * n:
            raise ValueError(
                f"output_tensor: expected {world * n} elements, {world} times the input, got {output_tensor.numel()}"
            )
        own = output_tensor.view(-1)[rank * n : (rank + 1) * n]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor.view(-1))
        self.barrier(buffer, 0)
        for step in range(1, world):
            # each rank starts with its next neighbour, so that no GPU is pushed to by everyone at once
            peer = (rank + step) % world
            handle.get_buffer(peer, (n,), output_tensor.dtype, rank * n).copy_(own, non_blocking=True)
        self.barrier(buffer, 1)
        self.mark_done(buffer)
        return None


class CopyEngineReduceScatter(ReduceScatterRings):
    """A reduce-scatter in FSDP2's `ReduceScatter` interface: copy engines bring the peers' parts, one kernel adds them.

    Copy engines can't add, so this rank pulls its part of every peer's input into a staging buffer and adds the W
    parts in rank order in float32: `(W - 1) n` elements over NVLink without SMs, then one memory-bound kernel that
    reads `W n` and writes `n`. NCCL moves fewer bytes through device memory and takes SMs all the while.

    The kernel is compiled and loaded here: loading one may wait for the device to be idle, which it is not while a
    barrier waits for a peer.

    Args:
        group, device, num_buffers, memory, timeout_s: as for `CopyEngineAllGather`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        num_buffers: int = NUM_BUFFERS,
        memory: SymmetricMemory | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        super().__init__(group, device, num_buffers=num_buffers, memory=memory, timeout_s=timeout_s)
        if device.type == "cuda":
            for dtype, mean in itertools.product((torch.bfloat16, torch.float32), (False, True)):
                parts = torch.zeros((group.size(), 4096), dtype=dtype, device=device)
                _sum_parts(parts[0], parts, group.rank(), torch.empty_like(parts[0]), mean)
            torch.cuda.synchronize(device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `[W * n]` of every rank into this rank's `[n]`; ordered on the current stream.

        Raises:
            ValueError: `input_tensor` is not from `allocate`, its size is not W outputs, or `op` is neither SUM nor
                AVG.
        """
        world, rank, n = group.size(), group.rank(), output_tensor.numel()
        buffer = self.checked_input(output_tensor, input_tensor, world, op)
        if buffer is None:
            return None
        handle = buffer.handle
        own, output = input_tensor.view(-1)[rank * n : (rank + 1) * n], output_tensor.view(-1)
        parts = input_tensor.new_empty((world, n))
        self.barrier(buffer, 2)
        for step in range(1, world):
            peer = (rank + step) % world
            parts[peer].copy_(handle.get_buffer(peer, (n,), input_tensor.dtype, rank * n), non_blocking=True)
        self.barrier(buffer, 3)  # nobody reads this rank's input any more
        # own part first: the buffer may be handed out again as soon as it is marked
        _sum_parts(own, parts, rank, output, op == dist.ReduceOp.AVG)
        self.mark_done(buffer)
        return None


def _sum_parts(own: torch.Tensor, parts: torch.Tensor, rank: int, out: torch.Tensor, mean: bool) -> None:
    """`out` = sum or mean in float32, in rank order, of the rows of `parts` with `own` in the place of row `rank`."""
    if has_triton() and out.device.type == "cuda":
        from gemworks.netmem import kernel_codec

        kernel_codec.sum_parts(own, parts, rank, out, mean)
        return
    parts[rank] = own
    total = torch.zeros_like(own, dtype=torch.float32)
    for part in parts:
        total += part
    out.copy_(total / parts.shape[0] if mean else total)


class FallbackAllGather:
    """The ordinary all-gather in FSDP2's interface; used where copy engines can't be, and says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A plain buffer."""
        return torch.empty(tuple(int(n) for n in size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """As `torch.distributed.all_gather_into_tensor`."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


def copy_engine_all_gather(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    num_buffers: int = NUM_BUFFERS,
    timeout_s: float = TIMEOUT_S,
) -> CopyEngineAllGather | FallbackAllGather:
    """Let every FSDP2 module in a model gather its parameters over copy engines.

    Args:
        model: after `fully_shard`; the modules share the buffers.
        group: FSDP2's shard group; None: the default group.
        num_buffers: buffers per distinct size.
        timeout_s: as for `CopyEngineAllGather`.

    Returns:
        What was installed: on failure of the capability check the fallback, after a `RuntimeWarning` with the reason.

    Raises:
        ValueError: there is no FSDP2 module in the model, or this torch's has no `set_custom_all_gather`.
    """
    from torch.distributed.fsdp import FSDPModule

    check_kind("model", model, nn.Module)
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not modules or not hasattr(modules[0], "set_custom_all_gather"):
        raise ValueError("model: expected FSDP2 modules with set_custom_all_gather, got none; call fully_shard first")
    group = group or dist.group.WORLD
    assert group is not None
    device = next(p.device for p in model.parameters())
    problem = copy_engine_problem(group, device)
    if problem is None:
        comm: CopyEngineAllGather | FallbackAllGather = CopyEngineAllGather(
            group, device, num_buffers=num_buffers, timeout_s=timeout_s
        )
    else:
        warnings.warn(f"copy-engine all-gather is off, the ordinary one runs: {problem}", RuntimeWarning, stacklevel=2)
        comm = FallbackAllGather(problem)
    for module in modules:
        module.set_custom_all_gather(comm)  # type: ignore[arg-type]
    return comm


def copy_engine_reduce_scatter(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    num_buffers: int = NUM_BUFFERS,
    timeout_s: float = TIMEOUT_S,
) -> CopyEngineReduceScatter | None:
    """Let every FSDP2 module in a model reduce its gradients by copy-engine pulls and one local sum.

    Args:
        model, group, num_buffers, timeout_s: as for `copy_engine_all_gather`.

    Returns:
        What was installed; None, after a `RuntimeWarning` with the reason, where copy engines can't be used: FSDP2's
        own reduce-scatter stays.

    Raises:
        ValueError: there is no FSDP2 module in the model, or this torch's has no `set_custom_reduce_scatter`.
    """
    from torch.distributed.fsdp import FSDPModule

    check_kind("model", model, nn.Module)
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not modules or not hasattr(modules[0], "set_custom_reduce_scatter"):
        raise ValueError(
            "model: expected FSDP2 modules with set_custom_reduce_scatter, got none; call fully_shard first"
        )
    group = group or dist.group.WORLD
    assert group is not None
    device = next(p.device for p in model.parameters())
    problem = copy_engine_problem(group, device)
    if problem is not None:
        warnings.warn(
            f"copy-engine reduce-scatter is off, the ordinary one runs: {problem}", RuntimeWarning, stacklevel=2
        )
        return None
    comm = CopyEngineReduceScatter(group, device, num_buffers=num_buffers, timeout_s=timeout_s)
    for module in modules:
        module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]
    return comm


@dataclass(frozen=True)
class CopyEngineCheck:
    """What a trace says about an all-gather that should run on copy engines.

    Attributes:
        ok: bytes moved between GPUs by copy engines, and no communication kernel was larger than one CTA.
        peer_copies, peer_bytes: pushes.
        barrier_us: time of one-CTA communication kernels.
        sm_kernels: names of communication kernels of more than one CTA, with their number of CTAs.
        fsdp_copy_us: FSDP2's copy-in and copy-out, on SMs.
    """

    ok: bool
    peer_copies: int
    peer_bytes: int
    barrier_us: float
    sm_kernels: Mapping[str, int]
    fsdp_copy_us: float


def verify_copy_engines(source: str | Path | Mapping[str, Any] | Trace) -> CopyEngineCheck:
    """Check a profiler trace: did the transfer run on copy engines, with one-CTA barriers as the only SM work?

    Args:
        source: as for `overlap.read_trace`. Record the all-gather alone: other collectives' kernels count against it.
    """
    trace = source if isinstance(source, Trace) else read_trace(source)

    def us(found: list[Activity]) -> float:
        return sum(a.end_us - a.start_us for a in found)

    pushes = [a for a in trace.activities if a.link == "nvlink"]
    kernels = [a for a in trace.activities if a.kind == "communication" and not a.link]
    large = {a.name: a.num_ctas for a in kernels if a.num_ctas != 1}
    copies = [a for a in trace.activities if a.kind == "compute" and _FSDP_COPY.search(a.name)]
    return CopyEngineCheck(
        ok=bool(pushes) and not large,
        peer_copies=len(pushes),
        peer_bytes=sum(a.num_bytes for a in pushes),
        barrier_us=us([a for a in kernels if a.num_ctas == 1]),
        sm_kernels=large,
        fsdp_copy_us=us(copies),
    )


def few_ctas_options(max_ctas: int) -> Any:
    """Options for an NCCL group that may use at most that many SMs: the comparison to copy engines.

    Raises:
        ValueError: below 1.
        RuntimeError: this torch has no NCCL.
    """
    check_number("max_ctas", max_ctas, 1, whole=True)
    if not dist.is_nccl_available():
        raise RuntimeError("few_ctas_options: this torch has no NCCL")
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max_ctas
    options.config.min_ctas = 1
    return options
