"""Even batches from uneven histories: base-batch shuffling inside the reader, without a word between ranks.

A window of steps is read at once in sub-batches of an eighth of a batch. Each rank deals its own sub-batches to batches
of about the same number of tokens, and gives the heaviest batch first, so that the heavy ones fall on the same step of
every rank (Engineering at Meta, 2026-08-03). Only windows that fill a whole number of batches are dealt; the rest of an
epoch comes in its own order, so every step has the same samples in number as without.

Shapes: B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gemworks.gem.data.loader import Loader, Source, _ahead
from gemworks.gem.schema import Batch, Events
from gemworks.parallel.shuffler import BaseBatchShuffler
from torch import Tensor

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SUB_BATCHES = 8


class BalancedLoader(Loader):
    """A `Loader` whose batches cost about the same inside a window.

    The order is still a pure function of the loader's state, so that position and epoch alone resume a run. Inside a
    window they mean batches of this size on this many ranks: elsewhere than at a window's edge a run resumes only with
    the same.

    Args:
        source, split: as for `Loader`.
        balance_window: steps that are read and dealt at once; a sample moves in time by as much at most.
        kwargs: of `Loader`; `batch_size` is a multiple of 8.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, source: Source, split: str, *, balance_window: int, **kwargs: Any) -> None:
        super().__init__(source, split, **kwargs)
        if balance_window < 2:
            raise ValueError(f"balance_window: got {balance_window}, expected at least 2 steps to balance between")
        if self.batch_size % SUB_BATCHES:
            raise ValueError(
                f"balance_window: batches of {self.batch_size} samples a rank do not part into {SUB_BATCHES} equal "
                f"sub-batches; make data.batch_size a multiple of {SUB_BATCHES * self.world_size}, or set "
                "data.balance_window=0"
            )
        self.balance_window = balance_window

    @property
    def _window_samples(self) -> int:
        return self.balance_window * self.batch_size * self.world_size

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the current epoch; at its end the next epoch begins."""
        epoch, step = self.epoch, self.batch_size * self.world_size
        starts = range(0, self.num_samples - self._window_samples + 1, self._window_samples)
        done = len(starts) * self._window_samples
        if self.position < done:
            first = self.position // self._window_samples
            windows = self._windows(epoch, starts[first:])
            for batches in windows:
                for batch in batches[self.position % self._window_samples // step :]:
                    self.position += step
                    yield batch
        yield from super().__iter__()

    def _windows(self, epoch: int, starts: range) -> Iterator[list[Batch]]:
        def make(start: int) -> list[Batch]:
            return self._window(epoch, start)

        return _ahead(make, starts, 1, 1) if self.prefetch else (make(s) for s in starts)

    def _window(self, epoch: int, start: int) -> list[Batch]:
        step, size = self.batch_size * self.world_size, self.batch_size // SUB_BATCHES
        positions = range(start, start + self._window_samples, step)
        rows = np.concatenate([self.rows_at(epoch, position) for position in positions])
        parts = [self.source.read(self.split, rows[i : i + size]) for i in range(0, rows.size, size)]
        dealt = BaseBatchShuffler(
            parts, num_tokens, sub_batches_per_batch=SUB_BATCHES, batches_per_window=self.balance_window
        )
        batches = [join(batch) for batch in dealt]
        return [batch.pin_memory() for batch in batches] if self.pin_memory else batches

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "balance_window": self.balance_window,
            "step_samples": self.batch_size * self.world_size,
            "num_ranks": self.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of a `state_dict`.

        Raises:
            ValueError: as for `Loader`; another window; or, inside a window, another number of samples a step.
        """
        if state.get("balance_window", 0) != self.balance_window:
            raise ValueError(
                f"loader state: balance_window was {state.get('balance_window', 0)!r} when saved and is "
                f"{self.balance_window} now; resume with data.balance_window as it was, or start a new run"
            )
        then, now = int(state.get("step_samples", 0)), self.batch_size * self.world_size
        ranks = int(state.get("num_ranks", 0))
        position = int(state.get("position", 0))
        edge = position % (self.balance_window * then or 1) == 0 and position % self._window_samples == 0
        if (then, ranks) != (now, self.world_size) and not edge and position < self.num_samples:
            raise ValueError(
                f"loader state: {then} samples a step on {ranks} ranks when saved, {now} on {self.world_size} now, in "
                "the middle of a balanced window; resume with the same data.batch_size and number of ranks, or from "
                "the end of an epoch"
            )
        super().load_state_dict(state)


def num_tokens(batch: Batch) -> float:
    """Events of all types: what the sequence layers' time follows."""
    return float(sum(e.timestamps_T.shape[0] for e in batch.events.values()))


def join(batches: Sequence[Batch]) -> Batch:
    """Batches one after the other as one.

    Args:
        batches: of one schema, on one device, at least one.
    """
    if len(batches) == 1:
        return batches[0]
    events: dict[str, Events] = {}
    for name in batches[0].events:
        parts = [b.events[name] for b in batches]
        lengths_B = torch.cat([p.offsets_S.diff() for p in parts])
        events[name] = Events(
            floats_TC=torch.cat([p.floats_TC for p in parts]),
            timestamps_T=torch.cat([p.timestamps_T for p in parts]),
            offsets_S=torch.cat([lengths_B.new_zeros(1), lengths_B.cumsum(0)]),
            max_length=max(p.max_length for p in parts),
        )

    def cat(name: str) -> Tensor:
        return torch.cat([getattr(b, name) for b in batches])

    return Batch(
        ids=join_ids([b.ids for b in batches]),
        event_ids=join_ids([b.event_ids for b in batches]),
        dense_BC=cat("dense_BC"),
        timestamps_B=cat("timestamps_B"),
        labels_BK=cat("labels_BK"),
        sample_ids_B=cat("sample_ids_B"),
        events=events,
    )


def join_ids(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Samples of several tensors of the same keys one after the other (torchrec's `concat` joins keys instead)."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # seconds to import, and a schema needs none of it

    keys = parts[0].keys()
    values: list[Tensor] = []
    lengths: list[Tensor] = []
    for key in keys:
        for part in parts:
            one = part[key]
            values.append(one.values())
            lengths.append(one.lengths())
    if not keys:
        return parts[0]
    return KeyedJaggedTensor.from_lengths_sync(keys, torch.cat(values), torch.cat(lengths))
