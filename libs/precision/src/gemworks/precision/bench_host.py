"""How long a linear layer keeps the host busy: forward and backward with so few rows that the device waits for it.

Without a GPU, the same Python runs on CPU tensors that stand for a Hopper's: compiled kernels that start nothing and
products that allocate their result (`nothing_started`). What is left out is the driver, cuBLAS and a GPU's allocator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from gemworks.precision import linear
from gemworks.precision.backends import DeviceSpec
from gemworks.precision.bench_linear import LayerBench, linear_run, variants
from gemworks.precision.bench_run import Bench
from gemworks.precision.launch import Launcher
from gemworks.precision.linear import mx_linear
from torch import Tensor, nn


@contextmanager
def nothing_started() -> Iterator[None]:
    """Layers on CPU tensors take the way that they take on sm_90, up to the calls that start kernels and products."""
    pretended: list[tuple[Launcher, Any]] = []

    def look_up(self: Launcher, _grid: Any, tensors: Any, _numbers: Any, setup: Any, key: Any) -> None:
        start = lambda *_: None  # noqa: E731
        entry = tensors[0].get_device(), key
        self.compiled[entry] = start, (None,) * 9, tuple(setup.constants.values())
        pretended.append((self, entry))

    def scaled(left: Tensor, right: Tensor, *rest: Any, out: Tensor | None = None) -> Tensor:
        return torch.empty(left.shape[0], right.shape[1], dtype=rest[7]) if out is None else out

    def plain(left: Tensor, right: Tensor) -> Tensor:
        return torch.empty(left.shape[0], right.shape[1], dtype=left.dtype)

    def current_device() -> int:
        return -1

    linear._plan_of.cache_clear()
    with (
        mock.patch.object(linear, "device_spec", return_value=DeviceSpec("cuda", 90)),
        mock.patch.object(Launcher, "look_up", look_up),
        mock.patch.object(torch._C, "_cuda_getDevice", current_device, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", abs, create=True),
        mock.patch.object(torch, "_scaled_mm_v2", scaled),
        mock.patch.object(torch, "mm", plain),
    ):
        try:
            yield
        finally:
            linear._plan_of.cache_clear()
            for launcher, entry in pretended:
                del launcher.compiled[entry]


class _Nothing(torch.autograd.Function):
    """What autograd alone takes: a node whose forward and backward allocate their results."""

    @staticmethod
    def forward(ctx, x, w):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, w)
        return x.new_empty(x.shape[0], w.shape[0])

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors)


def bench_host(bench: Bench) -> None:
    """Rows `linear_host`; on a CPU the rows are of Python alone, and autograd with nothing in it stands for bf16."""
    gpu = bench.device.type == "cuda"
    shape = (96, 256, 128) if bench.smoke else (256, 1024, 1024)
    layer = LayerBench.make(bench, shape)
    runs: list[tuple[str, str, Any]] = [("bf16", "torch", nn.functional.linear if gpu else _Nothing.apply)]
    runs += [(f, i, lambda a, b, c=c: mx_linear(a, b, None, c)) for f, i, c in variants()]
    times: dict[tuple[str, str], tuple[float, float, float]] = {}
    with nullcontext() if gpu else nothing_started():
        for format, impl, forward in runs:
            times[format, impl] = bench.time_host(linear_run(layer.x, layer.w, layer.dy, forward))
    for (format, impl), (ms, p20, p80) in times.items():
        bench.add(
            op="linear_host" if gpu else "linear_host_python",
            shape="x".join(map(str, shape)),
            format=format,
            direction="fwd_bwd",
            impl=impl if gpu or format != "bf16" else "autograd_alone",
            ratio_to_bf16=round(times["bf16", "torch"][0] / ms, 4),
            ms=round(ms, 4),
            ms_p20=round(p20, 4),
            ms_p80=round(p80, 4),
        )
