"""Time in collectives out of a profiler's events, and when a step is watched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gemworks.gem.communication import Communication, CommunicationProbe, measure
from torch._C._autograd import DeviceType

pytestmark = pytest.mark.reference


def event(name: str, start_us: float, end_us: float, *, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start_us, end=end_us))


def test_what_compute_hides_is_not_exposed() -> None:
    events = [
        event("ncclDevKernel_AllGather_RING_LL", 0, 4000),
        event("ncclDevKernel_ReduceScatter", 3000, 5000),  # at once with the one before
        event("gemm", 1000, 2000),
        event("Memcpy HtoD", 1500, 2500),
        event("gemm", 4500, 9000),
        event("cudaLaunchKernel", 0, 9000, device=DeviceType.CPU),
    ]
    assert measure(events, cuda=True) == Communication(5.0, 5.0 - 1.5 - 0.5)


def test_gloo_hides_nothing() -> None:
    events = [
        event("gloo:all_reduce", 0, 2000, device=DeviceType.CPU),
        event("gloo:all_gather", 1000, 3000, device=DeviceType.CPU),
        event("aten::mm", 0, 9000, device=DeviceType.CPU),
    ]
    assert measure(events, cuda=False) == Communication(3.0, None)


def test_a_step_in_so_many_seconds_is_watched_and_never_under_another_profiler() -> None:
    probe = CommunicationProbe(torch.device("cpu"), alone=False, every_seconds=3600)
    with probe():
        pass
    assert probe.last is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), probe():
        pass
    assert probe.last is None
    with probe():
        pass
    assert probe.last == Communication(0.0, None)
    probe.last = None
    with probe():
        pass
    assert probe.last is None
    alone = CommunicationProbe(torch.device("cpu"), alone=True, every_seconds=0)
    for _ in range(3):
        with alone():
            pass
    assert alone.last is None
