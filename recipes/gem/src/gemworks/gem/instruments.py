"""Looking inside a run: profiler traces by schedule, and what filled the GPU when its memory ran out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from gemworks.gem.config import TrainConfig
from torch.profiler import ProfilerActivity, profile, schedule

HISTORY_ENTRIES = 100_000


class Traces:
    """Writes a Chrome trace of `profile_steps` steps, every `profile_every` steps; does nothing if that is None.

    Args:
        config: when.
        folder: gets `trace_<last step>.json`.
        device: whose activity is traced besides the CPU's.
        step: steps done already.
    """

    def __init__(self, config: TrainConfig, folder: Path, device: torch.device, step: int = 0) -> None:
        self._folder = folder
        self._step = step
        self._profile: profile | None = None
        if config.profile_every is None:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        wait = config.profile_every - config.profile_steps - 1
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=1, active=config.profile_steps),
            on_trace_ready=self._write,
            acc_events=False,
        )
        self._profile.start()

    def _write(self, finished: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._folder / f"trace_{self._step:08d}.json"))

    def advance(self) -> None:
        """One step is done."""
        self._step += 1
        if self._profile is not None:
            self._profile.step()

    def close(self) -> None:
        """Ends the profiler; a trace that is not complete is written as far as it goes."""
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
        torch.cuda.memory._dump_snapshot(str(path))
        fix = "lower data.batch_size and raise train.accumulate"
        raise RuntimeError(f"out of GPU memory; {path} shows what filled it; {fix}: {error}") from error
    finally:
        if history:
            torch.cuda.memory._record_memory_history(enabled=None)
