"""Base-batch shuffling (BBS): balance ranks without communication, inside the reader.

A reader emits sub-batches of 128 samples; each rank takes a window of them, sorts them by cost and deals them out to
batches, heaviest with lightest, so that all batches of the window cost about the same (Engineering at Meta,
2026-08-03). Batches then leave the window in order of cost, so that what is left of the difference falls on the same
step of every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from gemworks.parallel._check import number, whole
from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ResumableSource(Protocol[T_co]):
    """An iterable whose position can be saved and restored."""

    def __iter__(self) -> Iterator[T_co]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def deal(costs: Tensor, num_batches: int) -> Tensor:
    """Deal items to batches so that batches cost about the same and differ by at most one in their number of items.

    Items go out in rounds of `num_batches`, heaviest first; in a round the heaviest item goes to the lightest batch so
    far. With two rounds that pairs the heaviest with the lightest. Deterministic: ties go to the lower index.

    Args:
        costs: float [num_items].
        num_batches: >= 1.

    Returns:
        int64 [num_items]: the batch of each item.

    Example:
        >>> deal(torch.tensor([9.0, 1.0, 8.0, 2.0]), 2).tolist()
        [0, 0, 1, 1]
    """
    whole("num_batches", num_batches)
    x = costs.to(torch.float64)
    order = torch.argsort(x, descending=True, stable=True)
    load = torch.zeros(num_batches, dtype=torch.float64)
    batch = torch.empty(x.numel(), dtype=torch.int64)
    for start in range(0, x.numel(), num_batches):
        items = order[start : start + num_batches]
        lightest = torch.argsort(load, stable=True)[: items.numel()]
        batch[items] = lightest
        load[lightest] += x[items]
    return batch


class BaseBatchShuffler(Generic[T]):
    """Groups a stream of sub-batches into balanced batches.

    Ranks need not talk: each balances its own stream. The order depends on the stream alone, so it is the same in
    every run.

    Args:
        source: sub-batches in order. To be resumable it has `state_dict` and `load_state_dict`.
        cost: of one sub-batch, for example `CostModel(...).of_lengths(lengths).item()`.
        sub_batches_per_batch: how many make a batch: 8 of 128 samples make 1,024.
        batches_per_window: how many batches are balanced together; the window is what a sample can move in time.
        align: emit a window's batches heaviest first, so that all ranks run their heavy batches at the same step;
            otherwise in an order drawn from `seed` and the window's index.
        seed: for `align=False`.
        drop_last: drop a last window that does not fill whole batches' worth of sub-batches; otherwise its batches are
            smaller.

    Example:
        >>> bbs = BaseBatchShuffler([1, 9, 2, 8], float, sub_batches_per_batch=2, batches_per_window=2)
        >>> [sorted(batch) for batch in bbs]
        [[1, 9], [2, 8]]
    """

    def __init__(
        self,
        source: Iterable[T] | ResumableSource[T],
        cost: Callable[[T], float],
        *,
        sub_batches_per_batch: int = 8,
        batches_per_window: int = 16,
        align: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        whole("sub_batches_per_batch", sub_batches_per_batch)
        whole("batches_per_window", batches_per_window)
        if not isinstance(source, Iterable):
            raise ValueError(f"source: got {type(source).__name__}, expected an iterable of sub-batches")
        if not callable(cost):
            raise ValueError(f"cost: got {type(cost).__name__}, expected a function of one sub-batch")
        self._source = source
        self._cost = cost
        self._per_batch = sub_batches_per_batch
        self._per_window = batches_per_window
        self._align = align
        self._seed = seed
        self._drop_last = drop_last
        self._window = 0
        self._emitted = 0
        self._source_state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[list[T]]:
        source = iter(self._source)
        while True:
            self._source_state = self._save_source()
            items: list[T] = []
            while len(items) < self._per_batch * self._per_window:
                try:
                    items.append(next(source))
                except StopIteration:
                    break
            if not items:
                break
            batches = self._balance(items)
            while self._emitted < len(batches):
                self._emitted += 1
                yield batches[self._emitted - 1]
            self._window += 1
            self._emitted = 0
        self._window = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, without any sample: the source's state at the window's start and how much of it is
        out.

        Raises:
            ValueError: the source cannot be resumed.
        """
        if not hasattr(self._source, "state_dict"):
            raise ValueError(
                f"source: got {type(self._source).__name__}, expected state_dict and load_state_dict; wrap the reader "
                "in a class with both"
            )
        source = self._source_state if self._source_state is not None else self._save_source()
        return {"source": source, "window": self._window, "emitted": self._emitted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`: the next iteration yields what an unbroken run would have yielded next."""
        if not hasattr(self._source, "load_state_dict"):
            raise ValueError(f"source: got {type(self._source).__name__}, expected load_state_dict")
        if missing := {"source", "window", "emitted"} - set(state):
            raise ValueError(f"state: lacks {sorted(missing)}; expected what `state_dict` returned")
        self._source.load_state_dict(state["source"])  # type: ignore[union-attr]
        self._source_state = state["source"]
        self._window = int(state["window"])
        self._emitted = int(state["emitted"])

    def _save_source(self) -> dict[str, Any] | None:
        return self._source.state_dict() if hasattr(self._source, "state_dict") else None  # type: ignore[union-attr]

    def _balance(self, items: Sequence[T]) -> list[list[T]]:
        num_batches = len(items) // self._per_batch if self._drop_last else -(-len(items) // self._per_batch)
        if num_batches == 0:
            return []
        items = items[: num_batches * self._per_batch]
        found = [float(c) if isinstance(c, Tensor) and not c.ndim else c for c in map(self._cost, items)]
        for value in found:
            number("cost of a sub-batch", value)
        costs = torch.tensor(found, dtype=torch.float64)
        where = deal(costs, num_batches)
        batches = [[items[i] for i in (where == b).nonzero()[:, 0].tolist()] for b in range(num_batches)]
        loads = torch.zeros(num_batches, dtype=torch.float64).index_add_(0, where, costs)
        if self._align:
            order = torch.argsort(loads, descending=True, stable=True)
        else:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._window)
            order = torch.randperm(num_batches, generator=generator)
        return [batches[i] for i in order.tolist()]
