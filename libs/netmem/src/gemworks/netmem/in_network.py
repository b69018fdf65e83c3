"""Reduce-scatter inside the switch (NVLink SHARP): **written, not run**.

Copy engines can't add; an NVSwitch can. A load from a multicast address returns the sum over all GPUs, so a rank reads
its part of the result with one read of n elements over NVLink, by a few CTAs, instead of pulling `(W - 1) n`. torch has
it as `symm_mem::multimem_one_shot_reduce_out`: rank `root` gets the sum of everyone's symmetric buffer.

Nothing here was ever run on a GPU: the machines that this library was measured on have multicast switched off. The
protocol around the operator is tested on a simulated symmetric memory; the operator itself is torch's. Nothing uses
this module unless it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gemworks.netmem.symmetric import NUM_BUFFERS, ReduceScatterRings, SymmetricMemory, copy_engine_problem

# (symmetric input of this root, root, group, output)
ReduceTo = Callable[[torch.Tensor, int, dist.ProcessGroup, torch.Tensor], object]
_DTYPES = (torch.float32, torch.bfloat16)


def _multimem_reduce(part: torch.Tensor, root: int, group: dist.ProcessGroup, out: torch.Tensor) -> object:
    return torch.ops.symm_mem.multimem_one_shot_reduce_out(part, "sum", root, group.group_name, out)


def in_network_problem(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the switch can't reduce for this group, or None if it can.

    A multicast that the environment switches off is not even asked for.
    """
    if (problem := copy_engine_problem(group, device)) is not None:
        return problem
    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0") not in ("", "0"):
        return "TORCH_SYMM_MEM_DISABLE_MULTICAST is set"
    if not hasattr(torch.ops.symm_mem, "multimem_one_shot_reduce_out"):
        return "this torch has no symm_mem::multimem_one_shot_reduce_out"
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    if not _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0):
        return f"{device} has no multicast"
    return None


class InNetworkReduceScatter(ReduceScatterRings):
    """A reduce-scatter in FSDP2's `ReduceScatter` interface, by multicast loads. Not run; see the module.

    Args:
        group, device, num_buffers, memory: as for `CopyEngineAllGather`.
        reduce_to: the operator, for tests; None: torch's, after `in_network_problem`.

    Raises:
        RuntimeError: the switch can't reduce here, and why.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        num_buffers: int = NUM_BUFFERS,
        memory: SymmetricMemory | None = None,
        reduce_to: ReduceTo | None = None,
    ) -> None:
        if reduce_to is None and (problem := in_network_problem(group, device)) is not None:
            raise RuntimeError(f"InNetworkReduceScatter: {problem}; use CopyEngineReduceScatter")
        super().__init__(group, device, num_buffers=num_buffers, memory=memory)
        self._reduce_to = reduce_to or _multimem_reduce

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `[W * n]` of every rank into this rank's `[n]`; the switch adds bf16 with float32 accumulation.

        Raises:
            ValueError: as `CopyEngineReduceScatter`; or a dtype other than float32 and bf16.
        """
        world, n = group.size(), output_tensor.numel()
        buffer = self.checked_input(output_tensor, input_tensor, world, op)
        if input_tensor.dtype not in _DTYPES:
            raise ValueError(f"input_tensor: expected a dtype among {_DTYPES}, got {input_tensor.dtype}")
        if buffer is None:
            return None
        output = output_tensor.view(-1)
        for root in range(world):
            # a collective call: the others only take part in its barriers
            self._reduce_to(input_tensor.view(-1)[root * n : (root + 1) * n], root, group, output)
        if op == dist.ReduceOp.AVG:
            output.div_(world)
        self.mark_done(buffer)
        return None
