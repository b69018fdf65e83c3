"""Model FLOPs of real batches, and MFU.

Numerator: matmul FLOPs on real tokens and admitted pairs, backward counted as twice the forward; nothing for recompute,
padding, embeddings, norms or quantisation. Denominator: wall time of the whole step x GPUs x peak. See `flop_costs.py`
for the cost of each part.

Letters: B samples, T packed events of one type.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from gemworks.gem.config import GemConfig
from gemworks.gem.flop_costs import PairRule, PartCost, part_costs
from torch import Tensor

if TYPE_CHECKING:  # its ids need torchrec, which counting does without
    from gemworks.gem.schema import Batch, Schema

BWD_FACTOR = 2.0  # backward FLOPs per forward FLOP
H200_BF16_PEAK_FLOPS = 989e12  # per second; dense, nominal, H100 and H200
H200_FP8_PEAK_FLOPS = 1979e12

LengthLawName = Literal["uniform", "uniform_0.7", "zipf"]


@dataclass(frozen=True)
class LengthHistogram:
    """How many sequences have which length.

    Attributes:
        counts: sequences (or, for a law, the expected number of them) by length; empty sequences included.
    """

    counts: Mapping[int, float]

    @staticmethod
    def of(lengths: Sequence[int] | Tensor) -> LengthHistogram:
        """The histogram of given lengths. A tensor on a GPU is read back: count a batch before it is moved.

        >>> LengthHistogram.of([3, 0, 3]).counts
        {0: 1.0, 3: 2.0}
        """
        lengths_B = torch.as_tensor(lengths, dtype=torch.int64).flatten()
        if lengths_B.numel() and int(lengths_B.min()) < 0:
            raise ValueError(f"lengths: got {int(lengths_B.min())}, expected 0 or more; pass lengths, not differences")
        values, counts = torch.unique(lengths_B, return_counts=True)
        return LengthHistogram(dict(zip(values.tolist(), counts.double().tolist(), strict=True)))

    @staticmethod
    def of_law(law: LengthLawName, max_length: int, num_samples: float) -> LengthHistogram:
        """The expected histogram of `num_samples` lengths under a law.

        uniform: on [1, max]; uniform_0.7: uniform on [0.4 max, max]; zipf: length^-1.2 on [1, max].

        >>> LengthHistogram.of_law("uniform", 4, 8).counts
        {1: 2.0, 2: 2.0, 3: 2.0, 4: 2.0}
        """
        if max_length < 1:
            raise ValueError(f"max_length: got {max_length}, expected 1 or more")
        weights: Mapping[LengthLawName, Callable[[int], float]] = {
            "uniform": lambda length: 1.0,
            "uniform_0.7": lambda length: float(length >= math.ceil(0.4 * max_length)),
            "zipf": lambda length: length**-1.2,
        }
        if law not in weights:
            raise ValueError(f"law: got {law!r}, expected one of {', '.join(weights)}")
        shares = {length: weights[law](length) for length in range(1, max_length + 1)}
        total = sum(shares.values())
        return LengthHistogram({length: num_samples * s / total for length, s in shares.items() if s > 0})

    @property
    def num_samples(self) -> float:
        return sum(self.counts.values())

    @property
    def num_tokens(self) -> float:
        return sum(length * count for length, count in self.counts.items())

    def num_pairs(self, rule: PairRule) -> float:
        """Admitted (query, key) pairs."""
        return sum(rule.pairs(length) * count for length, count in self.counts.items())


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one batch's forward pass, part by part.

    Attributes:
        parts: forward FLOPs by part name ("layer0.liked.pffn.core"), in the order of the forward pass.
        sequence_parts: names of the parts that grow with the number of events.
    """

    parts: Mapping[str, float]
    sequence_parts: frozenset[str]

    @property
    def forward(self) -> float:
        return sum(self.parts.values())

    @property
    def training(self) -> float:
        """Forward and backward."""
        return (1.0 + BWD_FACTOR) * self.forward

    @property
    def sequence(self) -> float:
        """Forward FLOPs of the parts that grow with the number of events."""
        return sum(flops for name, flops in self.parts.items() if name in self.sequence_parts)

    @property
    def dense(self) -> float:
        """Forward FLOPs of the dense non-sequence part: everything whose cost does not depend on the histories."""
        return self.forward - self.sequence

    def by_kind(self) -> dict[str, float]:
        """Forward FLOPs summed over layers and event types: "attention.core", "pffn.weights", "experts", ..."""
        kinds: dict[str, float] = defaultdict(float)
        for name, flops in self.parts.items():
            words = name.split(".")
            if words[0].startswith("layer"):
                words = words[1:] if len(words) == 2 else words[2:]
            elif len(words) > 1:
                words = words[1:]
            kinds[".".join(words)] += flops
        return dict(kinds)


def count_flops(
    config: GemConfig,
    schema: Schema,
    lengths: Mapping[str, Sequence[int] | Tensor | LengthHistogram],
    *,
    num_samples: int | None = None,
) -> FlopCount:
    """Forward FLOPs of a batch with given history lengths.

    Args:
        config: of the model.
        schema: of the model.
        lengths: per event type: one length per sample (a list or a tensor [B]), or a histogram.
        num_samples: B; may be left out when there is an event type to take it from.

    Raises:
        ValueError: an event type without lengths, or lengths of different batches.
    """
    names = [event.name for event in schema.events]
    if sorted(lengths) != sorted(names):
        raise ValueError(
            f"lengths: got event types {sorted(lengths)}, expected {sorted(names)}, one entry per event type"
        )
    histograms = {n: x if isinstance(x, LengthHistogram) else LengthHistogram.of(x) for n, x in lengths.items()}
    sizes = {name: histogram.num_samples for name, histogram in histograms.items()}
    batch = float(num_samples) if num_samples is not None else next(iter(sizes.values()), None)
    if batch is None:
        raise ValueError("num_samples: missing, and the schema has no event types to take it from; pass the batch size")
    for name, size in sizes.items():
        if abs(size - batch) > 1e-6 * max(batch, 1.0):
            raise ValueError(
                f"lengths[{name!r}]: got {size:g} samples, expected {batch:g}; pass the lengths of one batch"
            )
    costs = part_costs(config, schema)

    def flops(cost: PartCost) -> float:
        total = cost.per_sample * batch
        if cost.event is not None:
            total += cost.per_token * histograms[cost.event].num_tokens
            total += cost.per_pair * histograms[cost.event].num_pairs(cost.rule) if cost.rule else 0.0
        return total

    return FlopCount({c.name: flops(c) for c in costs}, frozenset(c.name for c in costs if c.is_sequence))


def count_batch_flops(config: GemConfig, schema: Schema, batch: Batch) -> FlopCount:
    """Forward FLOPs of one batch. Reads its offsets: call it on the host's copy, before the batch is moved to a GPU."""
    lengths = {name: events.offsets_S.diff() for name, events in batch.events.items()}
    return count_flops(config, schema, lengths, num_samples=batch.num_samples)


def count_expected_flops(config: GemConfig, schema: Schema, num_samples: int | None = None) -> FlopCount:
    """Expected forward FLOPs of a batch whose histories follow `config.data.length_law` up to `config.data.max_length`.

    Args:
        config: of the run.
        schema: of the model.
        num_samples: B; `config.data.batch_size` when left out.
    """
    batch = config.data.batch_size if num_samples is None else num_samples
    law = LengthHistogram.of_law(config.data.length_law, config.data.max_length, batch)
    return count_flops(config, schema, {event.name: law for event in schema.events}, num_samples=batch)


def mfu(
    flops: float, seconds: float, *, num_gpus: int = 1, peak_flops_per_second: float = H200_BF16_PEAK_FLOPS
) -> float:
    """Model FLOPs Utilization: `flops / (seconds * num_gpus * peak)`, as a fraction.

    Args:
        flops: of the step over all GPUs; `FlopCount.training` for a training step.
        seconds: wall time of the whole step.
        num_gpus: GPUs that took part.
        peak_flops_per_second: of one GPU; the dense bf16 peak of an H100 or H200 by default.

    >>> mfu(989e12, 2.0)
    0.5
    """
    for name, value in (("seconds", seconds), ("num_gpus", num_gpus), ("peak_flops_per_second", peak_flops_per_second)):
        if not value > 0:
            raise ValueError(f"{name}: got {value}, expected a positive number")
    if flops < 0:
        raise ValueError(f"flops: got {flops}, expected 0 or more")
    return flops / (seconds * num_gpus * peak_flops_per_second)


def mixed_peak(bf16_flops: float, fp8_flops: float) -> float:
    """The H200's peak for a step with FLOPs in bf16 and FP8: all of them by the least time that both parts need.

    >>> mixed_peak(1.0, 0.0) == H200_BF16_PEAK_FLOPS
    True
    """
    total = bf16_flops + fp8_flops
    if bf16_flops < 0 or fp8_flops < 0 or total <= 0:
        raise ValueError(f"bf16_flops, fp8_flops: got {bf16_flops}, {fp8_flops}, expected 0 or more and not both 0")
    return total / (bf16_flops / H200_BF16_PEAK_FLOPS + fp8_flops / H200_FP8_PEAK_FLOPS)
