"""What every part of the benchmark shares: timing, seeded data, rows of the CSV and the run's ceilings."""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gemworks.precision.recipe import BLOCK_KINDS
from torch import Tensor

LEADING = ("op", "shape", "format", "direction", "impl", "ratio_to_bf16", "sqnr_db")
COMMON = (
    "dtype", "law", "mean_len", "max_len", "seed", "ms", "ms_p20", "ms_p80", "tflops", "gbps", "bwd_factor",
    "roofline_fraction", "best_peer", "ratio_to_best_peer", "copy_gbps", "bf16_tflops", "gpu", "num_gpus", "clock_mhz",
    "command", "commit", "torch", "triton",
)  # fmt: skip
KINDS = BLOCK_KINDS
SEED = 0


@dataclass
class Bench:
    """One run: its device, ceilings and rows.

    `clocks`: the clock in MHz of each replay that `time_in_turns` timed last, read while it was timed.
    """

    device: torch.device
    smoke: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    copy_gbps: float = 0.0
    bf16_tflops: float = 0.0
    only: str = ""
    peers: bool = False
    path: Path | None = None
    clocks: dict[int, Any] = field(default_factory=dict)

    def time(self, run: Callable[[], object]) -> tuple[float, float, float]:
        """Median, 20 % and 80 % quantile in milliseconds."""
        if self.device.type == "cuda":
            return self._time_on_gpu(run)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times), min(times), max(times)

    def _time_on_gpu(self, run: Callable[[], object]) -> tuple[float, float, float]:
        """Each repetition starts with a cold L2, and behind a pause of the GPU in which its launches queue up: short
        kernels are timed, not Python.
        """
        run()
        flush = torch.empty(2**28, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(3):
            run()
        host_s = (time.perf_counter() - start) / 3
        torch.cuda.synchronize()
        total_s = (time.perf_counter() - start) / 3
        repetitions = max(5, min(100, int(0.1 / total_s)))
        pause = int(2e9 * min(host_s * 1.2 + 2e-5, 0.01))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
        for first, last in events:
            flush.zero_()
            torch.cuda._sleep(pause)
            first.record()
            run()
            last.record()
        torch.cuda.synchronize()
        times = sorted(first.elapsed_time(last) for first, last in events)
        return statistics.median(times), times[len(times) // 5], times[(4 * len(times)) // 5]

    def time_graph(self, run: Callable[[], object]) -> tuple[float, float, float]:
        """Replays of a CUDA graph, one behind another: the speed of the kernels under a sustained load, as a GPU
        that is kept busy has it. On a CPU, or where the work can't be captured, as `time`.
        """
        if self.device.type != "cuda":
            return self.time(run)
        return self.time_in_turns([self.capture(run)], [0.2], 1)[0]

    def capture(self, run: Callable[[], object], pool: Any = None) -> Callable[[], object]:
        """The replay of a CUDA graph of `run`, which has run three times before; on a CPU `run` itself.

        Graphs of one pool (`torch.cuda.graph_pool_handle()`) share their memory: replay them one behind another, and
        read no results.
        """
        if self.device.type != "cuda":
            return run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
        return graph.replay

    def time_in_turns(
        self, replays: Sequence[Callable[[], object]], bursts_s: Sequence[float], num_turns: int = 2
    ) -> list[tuple[float, float, float]]:
        """Median, 20 % and 80 % quantile of each: in turns, in each of which it runs for about its `bursts_s` without a
        pause, the first half of it untimed.

        A GPU that multiplies without pause lowers its clock until its power fits. Whatever ran before, that has settled
        when a burst is timed, as it has in a training job, which runs one implementation only.
        """
        times: list[list[float]] = [[] for _ in replays]
        self.clocks.clear()
        if self.device.type != "cuda":
            for _ in range(3):
                for run, mine in zip(replays, times, strict=True):
                    start = time.perf_counter()
                    run()
                    mine.append(1e3 * (time.perf_counter() - start))
            return [(statistics.median(t), t[len(t) // 5], t[(4 * len(t)) // 5]) for t in map(sorted, times)]
        counts = []
        for replay, burst_s in zip(replays, bursts_s, strict=True):
            replay()  # the first one uploads the graph
            torch.cuda.synchronize()
            start = time.perf_counter()
            replay()
            torch.cuda.synchronize()
            counts.append(max(5, int(burst_s / 2 / (time.perf_counter() - start))))
        for _ in range(num_turns):
            marks: list[list[torch.cuda.Event]] = []
            for i, (replay, count) in enumerate(zip(replays, counts, strict=True)):
                for _ in range(count):
                    replay()
                events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
                events[0].record()
                for event in events[1:]:
                    replay()
                    event.record()
                marks.append(events)
                events[0].synchronize()
                self.clocks[i] = clock_mhz(self.device)
            torch.cuda.synchronize()
            for events, mine in zip(marks, times, strict=True):
                mine += [first.elapsed_time(last) for first, last in pairwise(events)]
        return [(statistics.median(t), t[len(t) // 5], t[(4 * len(t)) // 5]) for t in map(sorted, times)]

    def time_host(self, run: Callable[[], object]) -> tuple[float, float, float]:
        """How long a call keeps the host busy: 20 calls at a time, whose kernels are short and fit the queue. Without a
        GPU it is this thread's time on the processor, which no other process can lengthen by waiting."""
        clock = time.perf_counter if self.device.type == "cuda" else time.thread_time
        rounds, calls = 15, 20
        for _ in range(calls):
            run()
        times = []
        for _ in range(rounds):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            start = clock()
            for _ in range(calls):
                run()
            times.append(1e3 * (clock() - start) / calls)
        times.sort()
        return statistics.median(times), times[len(times) // 5], times[4 * len(times) // 5]

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal data of the run's seed."""
        generator = torch.Generator(self.device).manual_seed(SEED + sum(shape))
        return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype)

    def save(self) -> None:
        """Write the rows so far to `path`, if there is one: a run that is cut off leaves what it had."""
        if self.path is not None:
            with self.path.open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=[*LEADING, *COMMON], lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.rows)

    def add(self, **row: Any) -> None:
        """Append a row with the columns that all rows share, and show it."""
        base: dict[str, Any] = dict.fromkeys((*LEADING, *COMMON), "")
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        base.update(dtype="bf16", law="normal", seed=SEED, bwd_factor=2, gpu=gpu, num_gpus=1, torch=torch.__version__)
        base.update(
            copy_gbps=round(self.copy_gbps, 1), bf16_tflops=round(self.bf16_tflops, 2), clock_mhz=clock_mhz(self.device)
        )
        base.update(
            command=" ".join(["python -m gemworks.precision.bench", *sys.argv[1:]]),
            commit=commit(),
            triton=triton_version(),
        )
        unknown = set(row) - set(base)
        if unknown:
            raise AssertionError(f"columns that no file has: {unknown}")
        base.update(row)
        self.rows.append(base)
        shown = {
            k: row[k]
            for k in (*LEADING, "ms", "tflops", "gbps", "roofline_fraction", "best_peer", "ratio_to_best_peer")
            if k in row
        }
        print("  ".join(f"{k}={v}" for k, v in shown.items()), flush=True)


def triton_version() -> str:
    """Triton's version, empty if it is not installed."""
    try:
        import triton
    except ImportError:
        return ""
    return triton.__version__


def commit() -> str:
    """The commit of the working tree, or of the environment variable GEMWORKS_COMMIT where there is no git."""
    named = os.environ.get("GEMWORKS_COMMIT")
    if named:
        return named
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def clock_mhz(device: torch.device) -> Any:
    """Current SM clock, empty where it can't be read."""
    if device.type != "cuda":
        return ""
    try:
        return torch.cuda.clock_rate(device)
    except (RuntimeError, ModuleNotFoundError):
        return ""


def time_bytes(
    bench: Bench,
    op: str,
    shape: tuple[int, int],
    format: str,
    impl: str,
    run: Callable[[], object],
    num_bytes: float,
    copy_ms: float | None = None,
) -> float:
    """One bandwidth row; returns milliseconds. copy_ms: how long a copy of as many bytes takes, timed the same way."""
    ms, p20, p80 = bench.time(run)
    gbps = num_bytes / ms / 1e6
    bench.add(
        op=op,
        shape="x".join(map(str, shape)),
        format=format,
        direction="fwd",
        impl=impl,
        ms=round(ms, 4),
        ms_p20=round(p20, 4),
        ms_p80=round(p80, 4),
        gbps=round(gbps, 1),
        roofline_fraction=round(gbps / bench.copy_gbps, 4),
        best_peer="" if copy_ms is None else "copy of as many bytes",
        ratio_to_best_peer="" if copy_ms is None else round(copy_ms / ms, 4),
    )
    return ms


def compiled(run: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    """torch.compile of a peer's few kernels in this process: Inductor's pool has a worker for each processor, all of
    which a program that ends first waits for."""
    from torch._inductor import config

    config.compile_threads = 1
    return torch.compile(run, dynamic=dynamic)


def attempt(what: str, run: Callable[[], object]) -> None:
    """Run a peer; if it can't, say why instead of leaving it out in silence."""
    try:
        run()
    except Exception as error:  # a peer's failure of any kind must not end the run
        print(f"not run: {what}: {type(error).__name__}: {str(error)[:200]}", flush=True)
