"""From a source to batches: order, epochs, ranks, position, prefetch.

The order of an epoch is a pure function of (seed, epoch, window, lanes); a rank's batch is a pure function of that
order and a global position. So the whole state is two numbers, and a run may resume with another number of ranks.

Shapes: B samples of a batch.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from gemworks.gem.data.hashing import permutation
from gemworks.gem.data.lanes import Lanes
from gemworks.gem.schema import Batch, Schema
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
T = TypeVar("T")


class Source(Protocol):
    """What a loader reads from: numbered samples per split, in time order, readable in any order."""

    schema: Schema

    @property
    def splits(self) -> tuple[str, ...]: ...

    def num_samples(self, split: str) -> int: ...

    def read(self, split: str, rows_B: Int64) -> Batch: ...

    def fingerprint(self) -> dict[str, Any]: ...


@runtime_checkable
class RowGroupSource(Protocol):
    """A source that decodes whole row groups, so that it pays to give each rank its own."""

    def row_groups(self, split: str) -> Int64:
        """Rows of each row group of a split, in order: int64 [G]."""
        ...


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
        prefetch: batches prepared ahead by background threads; 0 prepares them in the calling thread.
        prefetch_threads: how many threads; batches come in the same order whatever their number.
        num_lanes: over how many lanes the row groups of the source are dealt (see `lanes`): a multiple of `world_size`
            that divides `world_size * batch_size`. 1: every rank reads from all row groups.
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
        prefetch_threads: int = 1,
        num_lanes: int = 1,
        pin_memory: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, expected at least 1")
        if shuffle_window < 0:
            raise ValueError(f"shuffle_window: got {shuffle_window}, expected 0 (time order) or a number of samples")
        if prefetch < 0:
            raise ValueError(f"prefetch: got {prefetch}, expected 0 (no thread) or a number of batches")
        if prefetch_threads < 1:
            raise ValueError(f"prefetch_threads: got {prefetch_threads}, expected at least 1")
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
        self.prefetch_threads = prefetch_threads
        self.num_lanes = num_lanes
        self.pin_memory = pin_memory
        self.num_samples = source.num_samples(split)
        self._lanes = self._deal()
        self.epoch = 0
        self.position = 0  # samples of this epoch already given out, over all ranks

    @property
    def schema(self) -> Schema:
        return self.source.schema

    @property
    def num_given(self) -> int:
        """Samples given out so far, over all ranks and epochs."""
        return self.epoch * self.num_samples + self.position

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

        if self.prefetch:
            batches = _ahead(make, positions, self.prefetch, self.prefetch_threads)
        else:
            batches = (make(p) for p in positions)
        for position, batch in zip(positions, batches, strict=True):
            self.position = min(position + self.batch_size * self.world_size, self.num_samples)
            yield batch
        self.epoch, self.position = epoch + 1, 0

    def rows_at(self, epoch: int, position: int) -> Int64:
        """This rank's rows (of the split) in the step that begins at a global position: int64 [B]."""
        end = min(position + self.batch_size * self.world_size, self.num_samples)
        lanes = self._lanes
        if lanes is not None and end <= lanes.num_common * lanes.num_lanes and position % lanes.num_lanes == 0:
            own = range(
                self.rank * lanes.num_lanes // self.world_size, (self.rank + 1) * lanes.num_lanes // self.world_size
            )
            first, last = position // lanes.num_lanes, end // lanes.num_lanes
            return np.concatenate([lanes.rows_of_lane(lane, epoch=epoch, first=first, last=last) for lane in own])
        num = end - position
        first = position + num * self.rank // self.world_size
        last = position + num * (self.rank + 1) // self.world_size
        if lanes is not None:
            return lanes.rows_in_order(epoch=epoch, first=first, last=last)
        return self._ordered(epoch, first, last)

    def _deal(self) -> Lanes | None:
        """The lanes, or None where every rank reads from all row groups."""
        grouped = isinstance(self.source, RowGroupSource)
        if self.num_lanes == 1:
            if grouped and self.world_size > 1:
                warnings.warn(
                    f"data.num_lanes is 1, so each of {self.world_size} ranks decodes every row group; set it to a "
                    f"multiple of {self.world_size}, for example {4 * self.world_size}",
                    stacklevel=3,
                )
            return None
        if not isinstance(self.source, RowGroupSource):
            raise ValueError(
                f"num_lanes: got {self.num_lanes}, but {type(self.source).__name__} has no row groups to deal; "
                "set data.num_lanes=1"
            )
        num_samples_per_step = self.batch_size * self.world_size
        if self.num_lanes < 1 or self.num_lanes % self.world_size or num_samples_per_step % self.num_lanes:
            raise ValueError(
                f"num_lanes: got {self.num_lanes}, expected a multiple of the number of ranks, {self.world_size}, that "
                f"divides the {num_samples_per_step} samples of a step (data.batch_size times ranks); change "
                "data.num_lanes or data.batch_size"
            )
        window = -(-self.shuffle_window // self.num_lanes)
        sizes_G = self.source.row_groups(self.split)
        return Lanes(sizes_G, self.num_lanes, shuffle_window=window, seed=self.seed)

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
            "num_lanes": self.num_lanes,
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
        for key in ("fingerprint", "split", "num_samples", "seed", "shuffle_window", "num_lanes"):
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


def _ahead(make: Callable[[int], T], positions: range, depth: int, num_threads: int) -> Iterator[T]:
    """`map(make, positions)` with up to `depth` results prepared by threads, in order.

    An exception in `make` is raised here, after the batches before it. Closing the iterator ends the threads.
    """
    rest = iter(positions)
    ahead: deque[Future[T]] = deque()
    executor = ThreadPoolExecutor(min(num_threads, depth), thread_name_prefix="gemworks-prefetch")

    def submit() -> None:
        position = next(rest, None)
        if position is not None:
            ahead.append(executor.submit(make, position))

    try:
        for _ in range(depth):
            submit()
        while ahead:
            batch = ahead.popleft().result()
            submit()
            yield batch
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
