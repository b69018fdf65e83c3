"""Looking inside a run: profiler traces by schedule, and what filled the GPU when its memory ran out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from gemworks.gem.config import TrainConfig
from torch.profiler import ProfilerActivity, profile

HISTORY_ENTRIES = 100_000


class Traces:
    """Writes a Chrome trace of `profile_steps` steps, every `profile_every` steps; does nothing if that is None.

    The schedule is ours, not `torch.profiler.schedule`: stopping that one while it warms up crashes torch 2.13. So the
    first step of a trace also has the profiler's own start in it.

    Args:
        config: when.
        folder: gets `trace_<last step>.json`.
        device: whose activity is traced besides the CPU's.
        step: steps done already.
    """

    def __init__(self, config: TrainConfig, folder: Path, device: torch.device, step: int = 0) -> None:
        self._every, self._num_steps = config.profile_every, config.profile_steps
        self._folder = folder
        self._step = step
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile: profile | None = None

    def advance(self) -> None:
        """One step is done."""
        self._step += 1
        if self._every is None:
            return
        if self._profile is not None and self._step % self._every == 0:
            self._profile.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._folder / f"trace_{self._step:08d}.json"))
            self._profile = None
        elif (self._step + self._num_steps) % self._every == 0:
            self._profile = profile(activities=self._activities, acc_events=False)
            self._profile.start()

    def close(self) -> None:
        """Ends the profiler; half a trace is not written."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


@contextlib.contextmanager
def memory_snapshot(folder: Path, device: torch.device, *, history: bool) -> Iterator[None]:
    """Around training: running out of GPU memory writes `memory_snapshot.pickle`, for https://pytorch.org/memory_viz.

    Args:
        folder: gets the snapshot.
        device: nothing happens on a CPU.
        history: records every allocation with its Python stack, which the snapshot then shows; costs some speed.
    """
    if device.type != "cuda":
        yield
        return
    if history:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES, stacks="python")
    try:
        yield
    except torch.OutOfMemoryError as error:
        path = folder / "memory_snapshot.pickle"
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        fix = "lower data.batch_size and raise train.accumulate"
        raise RuntimeError(f"out of GPU memory; {path} shows what filled it; {fix}: {error}") from error
    finally:
        if history:
            torch.cuda.memory._record_memory_history(enabled=None)
