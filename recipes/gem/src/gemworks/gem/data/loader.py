"""From a source to batches: order, epochs, ranks, position, prefetch.

The order of an epoch is a pure function of (seed, epoch, window); a rank's batch is a pure function of that order and
a global position. So the whole state is two numbers, and a run may resume with another number of ranks.

Shapes: B samples of a batch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from gemworks.gem.data.hashing import permutation
from gemworks.gem.schema import Batch, Schema
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
_WAIT_SECONDS = 0.1


class Source(Protocol):
    """What a loader reads from: numbered samples per split, in time order, readable in any order."""

    schema: Schema

    @property
    def splits(self) -> tuple[str, ...]: ...

    def num_samples(self, split: str) -> int: ...

    def read(self, split: str, rows_B: Int64) -> Batch: ...

    def fingerprint(self) -> dict[str, Any]: ...


class Loader:
    """Batches of one split, epoch after epoch, resumable at any batch boundary.

    One pass of `for batch in loader` gives the rest of the current epoch; leaving it early keeps the position. Steps of
    all ranks pair up: step k of the ranks together holds the samples that one process with batches of
    `world_size * batch_size` would see. In the last step the
    remaining samples are spread as evenly as possible, so a rank may get an empty batch.

    Args:
        source: where samples come from.
        split: "train", "valid" or "test".
        batch_size: samples per rank and step.
        shuffle_window: samples are permuted inside consecutive windows of this many; 0 or 1 keeps time order.
        seed: of the permutations.
        rank, world_size: this process and the number of processes.
        prefetch: batches prepared ahead by a background thread; 0 prepares them in the calling thread.
        pin_memory: batches in page-locked memory (needs CUDA).

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        source: Source,
        split: str,
        *,
        batch_size: int,
        shuffle_window: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, expected at least 1")
        if shuffle_window < 0:
            raise ValueError(f"shuffle_window: got {shuffle_window}, expected 0 (time order) or a number of samples")
        if prefetch < 0:
            raise ValueError(f"prefetch: got {prefetch}, expected 0 (no thread) or a number of batches")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank, world_size: got {rank} and {world_size}, expected 0 <= rank < world_size")
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory: got True but no CUDA device is present; pass pin_memory=False on the CPU")
        self.source = source
        self.split = split
        self.batch_size = batch_size
        self.shuffle_window = shuffle_window
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.num_samples = source.num_samples(split)
        self.epoch = 0
        self.position = 0  # samples of this epoch already given out, over all ranks

    @property
    def schema(self) -> Schema:
        return self.source.schema

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on every rank."""
        return -(-self.num_samples // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the current epoch; at its end the next epoch begins."""
        epoch = self.epoch
        positions = range(self.position, self.num_samples, self.batch_size * self.world_size)

        def make(position: int) -> Batch:
            batch = self.source.read(self.split, self.rows_at(epoch, position))
            return batch.pin_memory() if self.pin_memory else batch

        batches = _ahead(make, positions, self.prefetch) if self.prefetch else (make(p) for p in positions)
        for position, batch in zip(positions, batches, strict=True):
            self.position = min(position + self.batch_size * self.world_size, self.num_samples)
            yield batch
        self.epoch, self.position = epoch + 1, 0

    def rows_at(self, epoch: int, position: int) -> Int64:
        """This rank's rows (of the split) in the step that begins at a global position: int64 [B]."""
        end = min(position + self.batch_size * self.world_size, self.num_samples)
        num = end - position
        first = position + num * self.rank // self.world_size
        last = position + num * (self.rank + 1) // self.world_size
        return self._ordered(epoch, first, last)

    def _ordered(self, epoch: int, first: int, last: int) -> Int64:
        """Rows at places [first, last) of the epoch's order."""
        window = self.shuffle_window
        if window <= 1 or first == last:
            return np.arange(first, last, dtype=np.int64)
        parts: list[Int64] = []
        for index in range(first // window, (last - 1) // window + 1):
            start = index * window
            rows = start + permutation(min(window, self.num_samples - start), self.seed, epoch, index)
            parts.append(rows[max(first - start, 0) : last - start])
        return np.concatenate(parts)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch given out last, with what must agree on resume. Equal on every rank."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "split": self.split,
            "seed": self.seed,
            "shuffle_window": self.shuffle_window,
            "num_samples": self.num_samples,
            "fingerprint": self.source.fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of a `state_dict`; batch size and world size may differ from then.

        Raises:
            ValueError: the state belongs to other data, another split, seed or window.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise ValueError(f"loader state: got keys {sorted(state)}, expected {sorted(own)}; it is no loader's state")
        for key in ("fingerprint", "split", "num_samples", "seed", "shuffle_window"):
            if state[key] != own[key]:
                raise ValueError(
                    f"loader state: {key} was {state[key]!r} when saved and is {own[key]!r} now; resume with the data "
                    "and settings of the saved run, or start a new run"
                )
        if not 0 <= state["position"] <= self.num_samples or state["epoch"] < 0:
            raise ValueError(
                f"loader state: epoch {state['epoch']}, position {state['position']}; expected epoch >= 0 and a "
                f"position from 0 to {self.num_samples}"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])


def _ahead(make: Callable[[int], Batch], positions: range, depth: int) -> Iterator[Batch]:
    """`map(make, positions)` with up to `depth` results prepared by a thread.

    An exception in `make` is raised here, after the batches before it. Closing the iterator stops the thread.
    """
    results: queue.Queue[tuple[Batch | None, BaseException | None]] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(batch: Batch | None, error: BaseException | None) -> bool:
        while not stop.is_set():
            try:
                results.put((batch, error), timeout=_WAIT_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for position in positions:
                if not put(make(position), None):
                    return
        except BaseException as error:
            put(None, error)

    thread = threading.Thread(target=work, name="gemworks-prefetch", daemon=True)
    thread.start()
    try:
        for _ in positions:
            batch, error = results.get()
            if error is not None:
                raise error
            assert batch is not None
            yield batch
    finally:
        stop.set()
        thread.join()
