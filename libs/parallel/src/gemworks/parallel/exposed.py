"""How much of a collective's time no compute hid: read from a profiler trace.

A collective's kernel is *exposed* while no compute kernel, copy or memset runs on the same GPU. Kernel time includes
waiting for the peer, so on an unbalanced pair the wait shows too. Copies between GPUs and the barriers around them, by
which copy engines gather, are communication of two kinds of their own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gemworks.parallel._spans import covered, union

_NAMES = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "sendrecv": "all_to_all",
    "broadcast": "broadcast",
}
_BUSY = ("kernel", "gpu_memcpy", "gpu_memset")


def _kind_of(event: Mapping[str, Any]) -> str | None:
    """Which kind of communication an activity is; None for all else."""
    name = str(event["name"]).lower()
    if event["cat"] == "gpu_memcpy":
        return "peer_copy" if "ptop" in name else None
    if event["cat"] != "kernel":
        return None
    if "nccl" in name:
        return next((v for k, v in _NAMES.items() if k in name.replace("_", "")), "other")
    return "barrier" if "barrier_kernel" in name or "put_signal" in name or "wait_signal" in name else None


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """One kind of collective in a trace.

    Attributes:
        calls: kernels per step.
        ms: kernel time per step.
        exposed_ms: of that, with nothing else running.
    """

    calls: float
    ms: float
    exposed_ms: float


def exposure(events: Sequence[Mapping[str, Any]], num_steps: int = 1) -> dict[str, Exposure]:
    """Exposed time per kind of collective.

    Args:
        events: `traceEvents` of one process' Chrome trace; times in us.
        num_steps: that the trace covers.

    Returns:
        collective -> `Exposure`, and "compute" (nothing exposed), of the steps' mean.

    Example:
        >>> def kernel(name, ts, dur):
        ...     return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur}
        >>> e = exposure([kernel("ncclDevKernel_AllGather_RING_LL", 0, 100), kernel("gemm", 40, 1000)])
        >>> e["all_gather"].exposed_ms
        0.04
    """
    moves: dict[str, list[tuple[float, float]]] = {}
    busy: list[tuple[float, float]] = []
    for e in events:
        if e.get("ph") != "X" or e.get("cat") not in _BUSY:
            continue
        start = float(e["ts"])
        span = (start, start + float(e.get("dur", 0.0)))
        kind = _kind_of(e)
        if kind is not None:
            moves.setdefault(kind, []).append(span)
        else:
            busy.append(span)
    merged = union(busy)
    found = {
        kind: Exposure(
            calls=len(spans) / num_steps,
            ms=sum(b - a for a, b in spans) / 1e3 / num_steps,
            exposed_ms=sum(b - a - covered(a, b, merged) for a, b in spans) / 1e3 / num_steps,
        )
        for kind, spans in sorted(moves.items())
    }
    found["compute"] = Exposure(
        calls=len(busy) / num_steps, ms=sum(b - a for a, b in merged) / 1e3 / num_steps, exposed_ms=0.0
    )
    return found


def traced(run: Callable[[], object], num_steps: int = 3) -> dict[str, Exposure]:
    """Profile a step on this GPU; every rank of the world calls it.

    Args:
        run: one step, warmed up.
        num_steps: profiled.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return exposure(events, num_steps)
