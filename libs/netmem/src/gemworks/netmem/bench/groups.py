"""What the benchmarks of several GPUs share: the groups that are compared, and traces of one call."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from gemworks.netmem.bench.rows import synchronize
from gemworks.netmem.copy_engine import few_ctas_options
from gemworks.netmem.overlap import read_trace

FEW_CTAS = 4


def native(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def few_group(device: torch.device) -> dist.ProcessGroup | None:
    if device.type != "cuda":
        return None
    group = dist.new_group(pg_options=few_ctas_options(FEW_CTAS))
    assert isinstance(group, dist.ProcessGroup)
    return group


def trace_of(run: Callable[[], object], device: torch.device) -> Path:
    """A profiler trace of one call, in a temporary file."""
    cpu_or_cuda = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    synchronize(device)
    with torch.profiler.profile(activities=[cpu_or_cuda]) as prof:
        run()
        synchronize(device)
    path = Path(tempfile.mkdtemp()) / f"rank{dist.get_rank()}.json"
    prof.export_chrome_trace(str(path))
    return path


def ctas(trace: Path) -> str:
    """Sizes of the communication kernels, for the setting column."""
    found = {a.num_ctas for a in read_trace(trace).activities if a.kind == "communication" and not a.link}
    return "/".join(str(n) for n in sorted(found)) or "0"
