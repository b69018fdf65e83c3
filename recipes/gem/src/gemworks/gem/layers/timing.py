"""Times a part's forward and backward, and splits the time by a profiler trace.

The split: time in which a kernel with matrix products runs, time in which only other kernels run, and gaps in which no
kernel runs. A kernel counts as a product by its name.
"""

from __future__ import annotations

import cProfile
import pstats
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

import torch
from gemworks.gem.layers.parts import Part, Product
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

PRODUCT_NAMES = re.compile(
    r"gemm|nvjet|cutlass|xmma|wgmma|cublas|fmha|flash|attention|(forward|backward)_(kernel|kv|q|hopper|fused)"
    r"|fp8_(hopper_)?kernel|project_kernel|block_fwd|block_bwd|triton_tem|_mm_|bmm",
    re.IGNORECASE,
)
NOT_KERNELS = ("gem::", "Activity Buffer", "Optimizer.")  # what a profiler adds: spans around kernels
HOST_CALLS = 5  # of one host time
NOT_PRODUCTS = re.compile(r"reduce|splitk.*reduce|elementwise|triton_(red|per|poi)", re.IGNORECASE)


@dataclass(frozen=True)
class Time:
    """Of one call, in ms: median, 20th and 80th percentile."""

    ms: float
    ms_p20: float
    ms_p80: float

    @staticmethod
    def of(samples: Sequence[float]) -> Time:
        if len(samples) == 1:
            return Time(samples[0], samples[0], samples[0])
        cuts = quantiles(samples, n=10, method="inclusive")
        return Time(cuts[4], cuts[1], cuts[7])


@dataclass(frozen=True)
class Split:
    """Where the time of one call goes, in ms, and its kernels by time: (name, ms, launches)."""

    tensor_core_ms: float
    memory_ms: float
    gap_ms: float
    kernels: tuple[tuple[str, float, float], ...]


def is_product(kernel: str) -> bool:
    """Whether a kernel of that name works on tensor cores.

    >>> is_product("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"), is_product("backward_fused_hopper_kernel")
    (True, True)
    >>> is_product("triton_red_fused_mean_pow_0"), is_product("triton_per_fused_attention_backward_add_27")
    (False, False)
    """
    return bool(PRODUCT_NAMES.search(kernel)) and not NOT_PRODUCTS.search(kernel)


def call_of(part: Part, dtype: torch.dtype, device: torch.device) -> Callable[[], tuple[Tensor | None, ...]]:
    """Forward and backward of a part under autocast to `dtype`, with fixed random gradients of its outputs.

    The call returns the outputs and the gradients of the leaves that have one.
    """
    assert part.forward is not None
    forward, leaves = part.forward, [x for x in part.leaves if x.requires_grad]
    gradients: list[Tensor] = []

    def run() -> tuple[Tensor | None, ...]:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            out = forward()
        outs = out if isinstance(out, tuple) else (out,)
        if not gradients:
            gradients.extend(torch.randn_like(x) for x in outs)
        return *outs, *torch.autograd.grad(outs, leaves, gradients, allow_unused=True)

    return run


def replayed(run: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph, which is what a training step with `train.cuda_graphs` replays; on a GPU only."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        result = run()
    held = result, run  # what the graph reads and writes stays where it is

    def replay() -> object:
        graph.replay()
        return held[0]

    return replay


def time_call(run: Callable[[], object], device: torch.device, *, repeats: int) -> Time:
    """Back to back, so that the host's launches count where they are what is waited for."""
    for _ in range(3):
        run()
    if device.type != "cuda":
        samples = []
        for _ in range(repeats):
            began = time.perf_counter()
            run()
            samples.append(1e3 * (time.perf_counter() - began))
        return Time.of(samples)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize(device)
    return Time.of([a.elapsed_time(b) for a, b in pairwise(marks)])


def host_ms(run: Callable[[], object]) -> float:
    """What the host needs to start one call, with nothing in the device's queue; on a GPU only."""
    samples = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        samples.append(1e3 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    return median(samples)


def host_functions(run: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Functions by their own time on the host, per call: (name, ms, calls); backward runs on this thread for it."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        run()
        profiler.enable()
        for _ in range(HOST_CALLS):
            run()
        profiler.disable()
    rows = []
    for (file, line, name), (_, calls, own, *_) in pstats.Stats(profiler).stats.items():  # pyright: ignore[reportAttributeAccessIssue]
        place = f"{'/'.join(Path(file).parts[-3:])}:{line} " if line else ""
        rows.append((f"{place}{name}", 1e3 * own / HOST_CALLS, calls / HOST_CALLS))
    return sorted(rows, key=lambda row: -row[1])


def split_call(run: Callable[[], object], *, repeats: int = 3) -> Split:
    """The split of one call; on a GPU only."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=False) as trace:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events() or []
        if str(event.device_type).endswith("CUDA") and event.time_range.end > event.time_range.start
    ]
    return split_kernels(kernels, repeats)


def split_kernels(kernels: Sequence[tuple[str, float, float]], repeats: int) -> Split:
    """The split of a list of kernels (name, begin, end in us) that belong to `repeats` calls.

    >>> split_kernels([("gemm", 0, 1000), ("add", 1000, 1500), ("add", 2500, 3000)], 1).gap_ms
    1.0
    >>> split_kernels([("Optimizer.step#AdamW.step", 0, 3000), ("add", 2500, 3000)], 1).memory_ms
    0.5
    """
    kernels = [k for k in kernels if not k[0].startswith(NOT_KERNELS)]
    if not kernels:
        return Split(0.0, 0.0, 0.0, ())
    products = _covered([(a, b) for name, a, b in kernels if is_product(name)])
    busy = _covered([(a, b) for _, a, b in kernels])
    span = max(b for _, _, b in kernels) - min(a for _, a, _ in kernels)
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, begin, end in kernels:
        by_name[name].append(end - begin)
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    table = tuple((name, sum(us) / repeats / 1e3, len(us) / repeats) for name, us in ranked)
    return Split(products / repeats / 1e3, (busy - products) / repeats / 1e3, (span - busy) / repeats / 1e3, table)


def _covered(intervals: list[tuple[float, float]]) -> float:
    total, reach = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return total


class Bound:
    """Least times from this run's rates.

    A linear product takes what cuBLAS needs for it alone; an attention the larger of its FLOPs at the rate of a large
    square product and its bytes at the rate of a copy. Everything else counts as fused away.

    Args:
        copy_gbps, tflops: rates of this run.
        device: where linear products are timed.
    """

    def __init__(self, copy_gbps: float, tflops: float, device: torch.device) -> None:
        self.copy_gbps, self.tflops, self.device = copy_gbps, tflops, device
        self._timed: dict[tuple[int, int, int], float] = {}

    def ms_of(self, part: Part) -> float:
        """Of a part's forward and backward; without a list of products, its FLOPs at the square product's rate."""
        if not part.products:
            return part.flops / self.tflops / 1e9
        return sum(self._ms(product) for product in part.products)

    def _ms(self, product: Product) -> float:
        if product.rows and self.device.type == "cuda":
            return self._linear_ms(product.rows, product.inner, product.columns)
        parts = ((product.flops, product.forward_bytes), (2.0 * product.flops, product.backward_bytes))
        return sum(max(f / self.tflops / 1e9, b / self.copy_gbps / 1e6) for f, b in parts)

    def _linear_ms(self, rows: int, inner: int, columns: int) -> float:
        """Forward, input gradient and weight gradient."""
        key = (rows, inner, columns)
        if key not in self._timed:
            x, w, y = (
                torch.randn(*shape, device=self.device, dtype=torch.bfloat16)
                for shape in ((rows, inner), (columns, inner), (rows, columns))
            )
            out_x, out_w, out_y = torch.empty_like(x), torch.empty_like(w), torch.empty_like(y)

            def run() -> None:
                torch.mm(x, w.t(), out=out_y)
                torch.mm(y, w, out=out_x)
                torch.mm(y.t(), x, out=out_w)

            self._timed[key] = time_call(run, self.device, repeats=10).ms
        return self._timed[key]
