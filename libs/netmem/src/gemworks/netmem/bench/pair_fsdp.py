"""An FSDP2 stack of GEM layers under several ways to communicate: equal losses and gradients, times in turns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from gemworks.netmem.bench.groups import FEW_CTAS, ctas, few_group, native, trace_of
from gemworks.netmem.bench.rows import Rows, synchronize, timed_ms
from gemworks.netmem.bench.stack import SMOKE, StackSize, make_stack
from gemworks.netmem.copy_engine import (
    copy_engine_all_gather,
    copy_engine_problem,
    copy_engine_reduce_scatter,
    verify_copy_engines,
)
from gemworks.netmem.overlap import overlap_report
from torch import nn
from torch.distributed.tensor import DTensor

# layers wide enough for parameters to be worth gathering (`large`'s width of 512 gathers a megabyte), and enough tokens
# for the GPU to set the pace
WIDE = StackSize(batch=8, length=2048, width=4096, heads=32, keys=256, depth=4)


def pair_fsdp(rows: Rows, device: torch.device, smoke: bool) -> None:
    """An FSDP2 stack of GEM layers under NCCL, NCCL with few CTAs, and copy engines."""
    size = SMOKE if smoke else WIDE
    world_group = dist.group.WORLD
    assert world_group is not None
    problem = copy_engine_problem(world_group, device)
    few = few_group(device)
    impls = {native(device): world_group}
    if few is not None:
        impls[f"nccl {FEW_CTAS} CTAs"] = few
    impls |= {"copy-engine gather": world_group, "copy-engine gather and reduce": world_group}
    stack = _Stacks(rows, device, size, smoke)
    for impl, group in impls.items():
        if impl.startswith("copy") and problem is not None:
            rows.add("fsdp_stack", shape=size.label, impl=impl, setting=f"not run: {problem}")
        elif not impl.endswith("reduce"):
            stack.make(impl, group)
    stack.time()
    if problem is None:
        # by itself, so that the others have their rows if it fails
        stack.make("copy-engine gather and reduce", world_group)
        stack.time([native(device), "copy-engine gather and reduce"])


class _Stacks:
    """The same stack under several ways to communicate."""

    def __init__(self, rows: Rows, device: torch.device, size: StackSize, smoke: bool) -> None:
        self.rows, self.device, self.size, self.smoke = rows, device, size, smoke
        self.steps: dict[str, Callable[[], torch.Tensor]] = {}
        self.texts: dict[str, str] = {}
        self.loss: float | None = None
        self.gradients: torch.Tensor | None = None

    def make(self, impl: str, group: dist.ProcessGroup) -> None:
        """Build the stack, compare loss and gradients with those of the first one, trace a step."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        self.rows.note(f"{impl}: making the model")
        model, batch = make_stack(self.size, self.device)
        mesh = DeviceMesh.from_group(group, self.device.type)
        for part in model.parts:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if impl.startswith("copy"):
            copy_engine_all_gather(model, group)
        if impl.endswith("reduce"):
            copy_engine_reduce_scatter(model, group)
        self.steps[impl] = step = functools.partial(_step, model, batch)
        self.rows.note(f"{impl}: first step")
        loss, gradients = step().item(), _own_gradients(model)
        if self.loss is None or self.gradients is None:
            self.loss, self.gradients = loss, gradients
        off = ((gradients - self.gradients).norm() / self.gradients.norm()).item()
        self.rows.note(f"{impl}: loss {loss:.6g}, gradients differ by {off:.2g}; tracing")
        assert loss == self.loss, f"{impl}: loss {loss} instead of {self.loss}"
        assert off <= 1e-2, f"{impl}: gradients differ by {off:.2g}"
        # where the trace says what took SMs, and for how long
        trace = trace_of(step, self.device)
        report = overlap_report(trace).devices[0]
        check = verify_copy_engines(trace)
        share = "" if report.sm_share is None else f"SM share of communication {report.sm_share:.4f}, "
        if self.device.type == "cuda":
            self.texts[impl] = (
                f"{share}CTAs {ctas(trace)}, exposed {report.exposed_us:.0f} us, "
                f"{check.peer_copies} peer copies, FSDP copies {check.fsdp_copy_us:.0f} us"
            )

    def time(self, impls: Sequence[str] = ()) -> None:
        """Times of those, or of all: interleaved, so that clocks and neighbours treat all alike."""
        impls = impls or list(self.steps)
        self.rows.note(f"timing {', '.join(impls)}")
        repeats, times = (3 if self.smoke else 11), {impl: [] for impl in impls}
        for _ in range(repeats):
            for impl, found in times.items():
                dist.barrier()
                step = self.steps[impl]
                found.append(timed_ms(step, self.device, 1)[0] if self.smoke else _once_ms(step, self.device))
        first_impl = native(self.device)
        first = sorted(times[first_impl])[repeats // 2]
        for impl, found in times.items():
            found.sort()
            self.rows.add(
                "fsdp_stack",
                shape=self.size.label,
                impl=impl if not impl.startswith("copy") else f"gemworks {impl}",
                setting=self.texts.get(impl, ""),
                ms=found[repeats // 2],
                ms_p20=found[round(0.2 * (repeats - 1))],
                ms_p80=found[round(0.8 * (repeats - 1))],
                best_peer=first_impl,
                ratio_to_best_peer=first / found[repeats // 2],
                dtype="bf16" if self.device.type == "cuda" else "float32",
            )


def _step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch)
    loss.backward()
    return loss


def _own_gradients(model: nn.Module) -> torch.Tensor:
    """This rank's shards of all gradients, flat."""
    shards = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
    assert shards
    return torch.cat([s.flatten() for s in shards])


def _once_ms(step: Callable[[], Any], device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    synchronize(device)
    begin.record()
    step()
    end.record()
    synchronize(device)
    return begin.elapsed_time(end)
