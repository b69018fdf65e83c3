"""One row of the ladder: real training steps of a configuration, and what they cost.

Letters: B samples of a batch, T packed events.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import torch
from gemworks.gem.config import GemConfig
from gemworks.gem.data import Source, open_loader
from gemworks.gem.efficiency import (
    FlopCount,
    LengthHistogram,
    count_batch_flops,
    mfu,
    mixed_peak,
)
from gemworks.gem.layers.timing import Split, Time, split_call
from gemworks.gem.schema import Batch
from gemworks.gem.trainer import Trainer
from torch import nn


@dataclass(frozen=True)
class StepCost:
    """What a row's steps cost.

    Attributes:
        step: wall time of a step.
        samples_per_s: B by the median step.
        flops: model FLOPs of a step, forward and backward, mean over the batches.
        fp8_flops: of them in FP8 products.
        step_mfu, mixed_mfu: against the bf16 peak, and against the peak of the mix of bf16 and FP8 products.
        peak_gib: most memory allocated; None on a CPU.
        padding: share of the rows between the layers that are padding.
        recompute: FLOPs computed again for backward over model FLOPs; None where a compiler decides what is.
        ne: of the timed steps, each batch before it is learned from.
        loss: mean over the timed steps.
        split: of a step, where it was traced.
        num_skipped: steps, untimed ones too, that were not finite and changed nothing.
    """

    step: Time
    samples_per_s: float
    flops: float
    fp8_flops: float
    step_mfu: float
    mixed_mfu: float
    peak_gib: float | None
    padding: float
    recompute: float | None
    ne: float | None
    loss: float
    split: Split | None
    num_skipped: int = 0


class ReadyBatches:
    """What a trainer asks of its loader, over batches that are there already.

    Attributes:
        num_given: samples given out.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches, self.num_given = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self.num_given += batch.num_samples
            yield batch


def read_batches(config: GemConfig, source: Source, number: int, *, pin: bool) -> list[Batch]:
    """The first batches of the training part, on the host."""
    with_loader = open_loader(source, config.data, "train", pin_memory=pin)
    batches = list(itertools.islice(iter(with_loader), number))
    if len(batches) < number:
        raise ValueError(
            f"data.num_samples: got {config.data.num_samples}, which makes {len(batches)} batches of "
            f"{config.data.batch_size}, expected {number}; raise it, or take fewer steps"
        )
    return batches


class TrainingRow:
    """One row's training: a fresh model, its first steps, then the timed ones.

    Reading and making data is not part of a step here: the batches lie ready in (page-locked) host memory, and their
    way to the device is part of it.

    Args:
        config: of the row.
        source: of the data.
        batches: one per step.
        device: where to train.
        warmup: steps of them that are not timed, at least 1.
    """

    def __init__(
        self, config: GemConfig, source: Source, batches: Sequence[Batch], device: torch.device, *, warmup: int
    ) -> None:
        if not 1 <= warmup < len(batches):
            raise ValueError(
                f"warmup: got {warmup} of {len(batches)} batches, expected at least 1 and one batch after them"
            )
        self.config = replace(config, train=replace(config.train, max_steps=len(batches), epochs=1))
        self.source, self.batches, self.device, self.warmup = source, batches, device, warmup
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.trainer = Trainer(self.config, source, device)
        self.trainer.loader = ReadyBatches(batches)  # pyright: ignore[reportAttributeAccessIssue]
        self._steps = self.trainer.steps()

    def measure(self, *, trace: bool = False) -> StepCost:
        """The timed steps; with `trace` a profiler's view of one more."""
        on_gpu, samples = self.device.type == "cuda", []
        self.trainer.prepare(self.batches)  # before the first step, so that the largest graph comes first
        for _ in itertools.islice(self._steps, self.warmup):
            pass
        self.trainer.take_row()
        if on_gpu:
            torch.cuda.synchronize(self.device)
            if not self.config.train.cuda_graphs:  # a graph's memory was allocated when it was captured
                torch.cuda.reset_peak_memory_stats(self.device)
        # no synchronisation of our own: each step waits for its loss once, so intervals are those of steady training
        mark = time.perf_counter()
        for _ in self._steps:
            now = time.perf_counter()
            samples.append(1e3 * (now - mark))
            mark = now
        row = self.trainer.take_row()
        peak_gib = torch.cuda.max_memory_allocated(self.device) / 2**30 if on_gpu else None
        split = _trace(self.trainer, self.batches[-1]) if trace and on_gpu else None
        return self._cost(Time.of(samples), peak_gib, row.ne, row.loss, split)

    def close(self) -> None:
        """Lets go of the model, the optimizers and the batches."""
        self._steps = iter(())
        del self.trainer, self.batches

    def _cost(
        self, timed: Time, peak_gib: float | None, ne: float | None, loss: float, split: Split | None
    ) -> StepCost:
        config, batches, seconds = self.config, self.batches[self.warmup :], timed.ms / 1e3
        counts = [count_batch_flops(config, self.source.schema, batch) for batch in batches]
        flops = mean(count.training for count in counts)
        fp8 = mean(fp8_flops(self.trainer.model, config, batch) for batch in batches)
        return StepCost(
            timed,
            mean(batch.num_samples for batch in batches) / seconds,
            flops,
            fp8,
            mfu(flops, seconds),
            mfu(flops, seconds, peak_flops_per_second=mixed_peak(flops - fp8, fp8)),
            peak_gib,
            padding_share(config, batches),
            _mean(recompute_share(config, count) for count in counts),
            ne,
            loss,
            split,
            self.trainer.num_skipped,
        )


def compile_small(config: GemConfig, source: Source, batches: Sequence[Batch], device: torch.device) -> None:
    """Compiles what a row runs, by steps of a model of its own on small batches; the code stays for the row's model."""
    config = replace(config, train=replace(config.train, max_steps=len(batches), epochs=1))
    trainer = Trainer(config, source, device)
    trainer.loader = ReadyBatches(batches)  # pyright: ignore[reportAttributeAccessIssue]
    for _ in trainer.steps():
        pass
    del trainer
    free(device, compiled=False)


def run_steps(
    config: GemConfig, source: Source, batches: Sequence[Batch], device: torch.device, *, warmup: int
) -> StepCost:
    """Trains on the batches, one step each, from a fresh model; the first `warmup` of them are not timed."""
    return TrainingRow(config, source, batches, device, warmup=warmup).measure()


def free(device: torch.device, *, compiled: bool = True) -> None:
    """Drops what a row left: cached memory and, unless another row needs it, compiled code."""
    if compiled:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _trace(trainer: Trainer, batch: Batch) -> Split:
    def run() -> None:
        trainer._train_step([batch])

    run()
    return split_call(run, repeats=2)


def padding_share(config: GemConfig, batches: Sequence[Batch]) -> float:
    """Share of the rows that run between the layers and belong to no event; 0 for packed rows."""
    if config.kernels.layout != "padded":
        return 0.0
    events = [e for batch in batches for e in batch.events.values()]
    rows = sum((e.offsets_S.shape[0] - 1) * e.max_length for e in events)
    return 1.0 - sum(int(e.offsets_S[-1]) for e in events) / rows if rows else 0.0


def _mean(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return mean(known) if len(known) == len(found) else None


def recompute_share(config: GemConfig, count: FlopCount) -> float | None:
    """Products computed again for backward over a step's model FLOPs; what kernels recompute inside is not counted.

    None with a budget per layer: it is the compiler that decides which products come again.
    """
    if config.kernels.activations == "recompute@0.5":
        return None
    if config.kernels.activations != "recompute":
        return 0.0
    return sum(flops for name, flops in count.parts.items() if name.startswith("layer")) / count.training


def fp8_flops(model: nn.Module, config: GemConfig, batch: Batch) -> float:
    """Forward and backward FLOPs of the linear layers that `kernels.linears` quantises, for one batch."""
    if config.kernels.linears == "bf16":
        return 0.0
    from gemworks.precision import MXLinear

    names = list(batch.events)
    tokens = {name: float(LengthHistogram.of(batch.events[name].offsets_S.diff()).num_tokens) for name in names}
    total = 0.0
    for name, layer in model.named_modules():
        if isinstance(layer, MXLinear) and layer.fallback is None and not layer.recipe.is_bf16:
            total += (
                6.0 * layer.in_features * layer.out_features * _rows(name, config, names, tokens, batch.num_samples)
            )
    return total


def _rows(name: str, config: GemConfig, events: list[str], tokens: dict[str, float], num_samples: int) -> float:
    """How many rows a linear layer of the model sees, by its name."""
    words = name.split(".")
    if words[0] == "events":
        return tokens[events[int(words[1])]]
    if "blocks" in words and ("attention" in words or "pool" in words):
        return tokens[events[int(words[words.index("blocks") + 1])]]
    if "blocks" in words or "gate" in words:
        return float(num_samples * config.model.num_summary_tokens)
    return float(num_samples)
