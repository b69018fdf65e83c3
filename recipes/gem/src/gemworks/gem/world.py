"""Several processes as one run: their process groups, and what happens when one of them fails.

Nobody waits for a rank that has gone. A rank that fails says so in the store and ends; the collectives of the others
break at once (its connections close) or after `train.rank_timeout_seconds` (it hangs, or its machine is lost). Then
they look into the store: who said why, and whose heart has stopped beating. What only the first rank does, the others
wait for through the store, which has no time-out as long as the first rank's heart beats. On GPUs a broken collective
raises nothing where the host waits for the device; `watch.py` ends such a process.

Environment: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun sets them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from gemworks.gem.errors import WRONG_INPUT, exit_code
from gemworks.gem.ranks import Ranks
from gemworks.gem.watch import GRACE_SECONDS, LOST, Watch
from gemworks.parallel.heartbeat import Heartbeat, RankFailure
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")
POLL_SECONDS = 0.05
BEAT_SECONDS = 1.0
BEATS_MISSED = 4.0  # a rank that loses the processor for a moment is not dead
# How a broken collective shows in the text of a RuntimeError: gloo has no type of its own for it.
_BROKEN = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "NCCL")


@dataclass(frozen=True, eq=False)
class World(Ranks):
    """This process among others; made by `open_world`.

    Attributes:
        control: gloo group for what the host decides.
        saving: gloo group for checkpoints, which are written in the background.
        store: connection of its own, because a store serves one call at a time.
        heart: beats of all ranks.
        watch: ends this process for a rank that is gone, where collectives cannot tell; None for gloo alone.
    """

    control: ProcessGroup = field(kw_only=True)
    saving: ProcessGroup = field(kw_only=True)
    store: Any = field(kw_only=True)
    heart: Heartbeat = field(kw_only=True)
    watch: Watch | None = field(default=None, kw_only=True)
    _calls: Iterator[int] = field(default_factory=itertools.count, kw_only=True)

    @property
    def save_group(self) -> ProcessGroup | None:
        return self.saving

    def sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        found = torch.tensor(int(flag))
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.control)
        return bool(found)

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def gather_to_first(self, value: T) -> list[T]:
        values: list[Any] | None = [None] * self.world_size if self.is_first else None
        dist.gather_object(value, values, group=self.control)
        return [value] if values is None else values

    def on_first(self, call: Callable[[], T]) -> T:
        key = f"first/{next(self._calls)}"
        if self.is_first:
            try:
                value = call()
            except Exception as error:
                self.store.set(key, _packed(False, error))
                raise
            self.store.set(key, _packed(True, value))
            return value
        self._wait_for_first(key)
        good, value = pickle.loads(self.store.get(key))
        if not good:
            raise value
        return value

    def _wait_for_first(self, key: str) -> None:
        beats, heard = self.heart.beats(0), time.monotonic()
        while not self.store.check([key]):
            reports = self._said("failure")
            if reports:
                raise RankFailure(_told(reports), tuple(reports))
            now, at = time.monotonic(), self.heart.beats(0)
            if at != beats:
                beats, heard = at, now
            elif now - heard > BEAT_SECONDS * BEATS_MISSED:
                raise RankFailure(_silent((0,)), (0,))
            time.sleep(POLL_SECONDS)

    def explain(self, error: Exception) -> Exception:
        """A broken collective becomes a `RankFailure` that names who broke it; anything else is told to the others."""
        if self.watch is not None:
            self.watch.stop()
        if isinstance(error, RankFailure):
            return error
        try:
            if not _is_broken_collective(error):
                text = f"{type(error).__name__}: {' '.join(str(error).split())}"
                self.store.set(f"failure/{self.rank}", text)
                self.store.compare_set(LOST, "", _told({self.rank: text}))
                return error
            failure = self._blame(error)
            # the others may still be looking, and must not take this one for dead
            self.store.set(f"left/{self.rank}", str(failure))
            return failure
        except (RuntimeError, dist.DistError):
            return RankFailure("the processes have lost each other, and their store with its host; start again", ())

    def _blame(self, error: Exception) -> RankFailure:
        reports = self._said("failure")
        silent = () if reports else self.heart.silent_ranks()
        reports = reports or self._said("failure")
        if reports:
            return RankFailure(_told(reports), tuple(reports))
        left = self._said("left")
        dead = tuple(rank for rank in silent if rank not in left)
        if dead:
            return RankFailure(_silent(dead), dead)
        if left:
            return RankFailure(next(iter(left.values())), ())
        text = "a collective failed although every rank is alive: one was too slow (raise train.rank_timeout_seconds)"
        return RankFailure(f"{text}, or the network is broken: {' '.join(str(error).split())}", ())

    def _said(self, what: str) -> dict[int, str]:
        """What other ranks have left behind: "failure" of their own, or "left" because of somebody else's."""
        keys = {rank: f"{what}/{rank}" for rank in range(self.world_size) if rank != self.rank}
        return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}


def _told(reports: dict[int, str]) -> str:
    return "; ".join(f"rank {rank} failed: {text}" for rank, text in reports.items())


def _silent(ranks: tuple[int, ...]) -> str:
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"{names} stopped without a word: killed, hanging, or on a machine that is lost; start again"


def _packed(good: bool, value: object) -> bytes:
    if isinstance(value, ValueError) and exit_code(value) != WRONG_INPUT:
        # where it was raised, which says whose mistake it is, does not travel with it
        value = RuntimeError(f"{type(value).__name__}: {value}")
    try:
        return pickle.dumps((good, value))
    except Exception:  # what cannot be pickled raises anything; a failure still has to reach the others
        if good:
            raise
        return pickle.dumps((False, RuntimeError(f"{type(value).__name__}: {value}")))


def _is_broken_collective(error: BaseException) -> bool:
    """Whether some other rank's end is the cause, anywhere in the chain of causes."""
    seen: list[BaseException] = []
    rest: list[BaseException | None] = [error]
    while rest:
        at = rest.pop()
        if at is None or at in seen:
            continue
        seen.append(at)
        if isinstance(at, dist.DistError) or (isinstance(at, RuntimeError) and any(b in str(at) for b in _BROKEN)):
            return True
        if isinstance(at, CheckpointException):
            rest += [failure[0] for failure in at.failures.values()]
        rest += [at.__cause__, at.__context__]
    return False


def _quiet() -> None:
    """Warnings that a user of several processes can do nothing about."""
    # FSDP2 and torchrec call collectives by names that torch 2.13 has deprecated
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    # the model has no in-place operation on what a layer returned
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)


@contextlib.contextmanager
def open_world(
    timeout_seconds: float, *, cuda: bool, watched: bool | None = None, grace_seconds: float = GRACE_SECONDS
) -> Iterator[Ranks]:
    """This process among those that the environment describes.

    Args:
        timeout_seconds: after it a collective that some rank did not join breaks.
        cuda: collectives of tensors on GPUs, with NCCL; gloo alone otherwise.
        watched: whether a `Watch` ends the process when another rank is gone; None: on GPUs, where it is needed.
        grace_seconds: how long the watch lets the main thread end by itself.

    Raises:
        ValueError: the environment is incomplete.
    """
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"environment: got WORLD_SIZE={os.environ.get('WORLD_SIZE')} without {', '.join(missing)}; start several "
            "processes with `python -m gemworks.gem.launch` or torchrun"
        )
    _quiet()
    timeout = timedelta(seconds=timeout_seconds)
    store: Any
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=timeout
    )
    control, saving, watching = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(3))
    assert isinstance(control, ProcessGroup)
    assert isinstance(saving, ProcessGroup)
    assert isinstance(watching, ProcessGroup)
    own, beats, news = (PrefixStore(name, store.clone()) for name in ("gem", "beat", "gem"))
    heart = Heartbeat(beats, rank, size, interval_s=BEAT_SECONDS, patience=BEATS_MISSED)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    with heart:
        watch: Watch | None = None
        if cuda if watched is None else watched:
            watch = Watch(
                watching,
                news,
                Heartbeat(PrefixStore("beat", store.clone()), rank, size),  # read only: it is not entered
                rank,
                size,
                # before NCCL's own watchdog, which knows no names
                silent_seconds=max(timeout_seconds / 2, timeout_seconds - 2 * grace_seconds),
                grace_seconds=grace_seconds,
                blame=lambda gone: _silent((gone,)),
            )
        world = World(
            rank, size, local_rank, local_size, control=control, saving=saving, store=own, heart=heart, watch=watch
        )
        try:
            yield world
        finally:
            if watch is not None:
                watch.leave()
        # only after a good end: a broken group has no goodbyes, and waiting for them would hide what broke it
        if watch is not None:
            watch.join()
        dist.destroy_process_group()
