"""One row of the ladder of several ranks: real training steps of all of them together, and what they cost.

Letters: B samples of a rank's batch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import torch
from gemworks.gem.communication import CommunicationProbe
from gemworks.gem.config import GemConfig
from gemworks.gem.data import Source, open_loader
from gemworks.gem.ladder.step import ReadyBatches, free
from gemworks.gem.layers.timing import Time
from gemworks.gem.ranks import Ranks
from gemworks.gem.schema import Batch
from gemworks.gem.trainer import Trainer

TRACED_STEPS = 2
# Samples of a rank in the batches that only compile: of two sizes, so that the compiler takes neither for the only one,
# and not tiny, because how a sum is cut into parts follows from the sizes that it saw first.
SMALL_BATCHES = (24, 32)


@dataclass(frozen=True)
class PairCost:
    """What a row's steps cost.

    Attributes:
        step: wall time of a step.
        samples_per_s, flops_per_s: of all ranks together.
        peak_gib: most memory allocated on this rank; None on a CPU.
        ne, loss: over the timed steps.
        exposed_ms: collective -> ms of a step in which it ran and no compute did, the most of any rank; empty where
            nothing was traced.
        communication_ms: of a step, kernels of all collectives added up, the most of any rank.
    """

    step: Time
    samples_per_s: float
    flops_per_s: float
    peak_gib: float | None
    ne: float | None
    loss: float
    exposed_ms: Mapping[str, float]
    communication_ms: float | None


class SharedBatches(ReadyBatches):
    """A rank's batches of steps that `num_ranks` share evenly."""

    def __init__(self, batches: Sequence[Batch], num_ranks: int) -> None:
        super().__init__(batches)
        self._num_ranks = num_ranks

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self.num_given += batch.num_samples * self._num_ranks
            yield batch


def read_share(config: GemConfig, source: Source, ranks: Ranks, number: int, *, pin: bool) -> list[Batch]:
    """This rank's part of the first steps of the training part.

    Raises:
        ValueError: there are not so many steps of whole batches.
    """
    loader = open_loader(
        source, config.data, "train", rank=ranks.rank, world_size=ranks.world_size, pin_memory=pin
    )  # fmt: skip
    batches = list(itertools.islice(loader, number))
    if len(batches) < number or any(b.num_samples * ranks.world_size != config.data.batch_size for b in batches):
        raise ValueError(
            f"data.num_samples: got {config.data.num_samples}, expected enough for {number} whole steps of "
            f"{config.data.batch_size} samples; raise it, or take fewer steps"
        )
    return batches


def compile_small(config: GemConfig, source: Source, ranks: Ranks, device: torch.device) -> None:
    """Compiles what a row runs, by steps of a model of its own on small batches; the code stays for the row's model."""
    for size in SMALL_BATCHES if config.data.batch_size >= SMALL_BATCHES[-1] * ranks.world_size else (8, 16):
        small = config.with_data(batch_size=size * ranks.world_size, balance_window=0)
        row = PairRow(small, source, ranks, device, warmup=1, steps=1)
        row.measure(trace=False)
        row.close()


class PairRow:
    """A row's training: a fresh model, its first steps, then the timed ones.

    As in the ladder of one GPU, batches lie ready in (page-locked) host memory, and their way to the device is part of
    a step.

    Args:
        config: of the row.
        source: of the data.
        ranks: who trains; every one of them makes a row and measures it.
        device: this rank's.
        warmup, steps: how many are not timed, and how many are.
    """

    def __init__(
        self, config: GemConfig, source: Source, ranks: Ranks, device: torch.device, *, warmup: int, steps: int
    ) -> None:
        self.ranks, self.device, self.warmup = ranks, device, warmup
        config = replace(config, train=replace(config.train, max_steps=warmup + steps, epochs=1))
        self.batches = read_share(config, source, ranks, warmup + steps, pin=device.type == "cuda")
        self.trainer = Trainer(config, source, device, ranks)
        self.trainer.loader = SharedBatches(self.batches, ranks.world_size)  # pyright: ignore[reportAttributeAccessIssue]
        self.trainer._communication = CommunicationProbe(device, alone=True)  # it would watch a timed step

    def measure(self, *, trace: bool) -> PairCost:
        """The timed steps; with `trace` a profiler's view of `TRACED_STEPS` more."""
        trainer, cuda, times = self.trainer, self.device.type == "cuda", []
        steps = trainer.steps()
        for _ in itertools.islice(steps, self.warmup):
            pass
        trainer.take_row()
        if cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        mark = time.perf_counter()
        for _ in steps:
            now = time.perf_counter()
            times.append(1e3 * (now - mark))
            mark = now
        row = trainer.take_row()
        peak_gib = torch.cuda.max_memory_allocated(self.device) / 2**30 if cuda else None
        exposed, total = self._traced() if trace and cuda and not self.ranks.alone else ({}, None)
        timed = Time.of(times)
        return PairCost(
            timed,
            row.samples_per_s * row.step_ms / timed.ms,
            row.flops_per_s * row.step_ms / timed.ms,
            peak_gib,
            row.ne,
            row.loss,
            exposed,
            total,
        )

    def _traced(self) -> tuple[dict[str, float], float]:
        from gemworks.parallel.exposed import traced

        own = traced(lambda: self.trainer._train_step([self.batches[-1]]), TRACED_STEPS)
        found = self.ranks.gather({kind: (e.exposed_ms, e.ms) for kind, e in own.items() if kind != "compute"})
        kinds = sorted({kind for one in found for kind in one})
        most = {kind: max(one.get(kind, (0.0, 0.0))[0] for one in found) for kind in kinds}
        return most, max(sum(ms for _, ms in one.values()) for one in found)

    def close(self) -> None:
        """Lets go of the model, the optimizers and the batches; compiled code stays."""
        del self.trainer, self.batches
        free(self.device, compiled=False)


def mean_length(batches: Sequence[Batch]) -> float:
    """Events of a history, over all event types."""
    events = [e for batch in batches for e in batch.events.values()]
    return mean(int(e.offsets_S[-1]) / max(e.offsets_S.shape[0] - 1, 1) for e in events)
