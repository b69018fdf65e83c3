"""Synthetic samples whose label can be read from the order and timing of events, and from nothing else.

Every sample is a pure function of (seed, sample number): any batch can be made at any time, on any rank.

The planted rule. Events have a class: A, B or neutral (category modulo 4: 0, 1, the rest). A history has an old part
(more than a day ago) and a recent part (within the last hour), with the boundary at a random place. Some events form
pairs, one in each part and one of each class. A hidden bit z of the sample tilts the pairs: A is the recent one with
probability 0.5 + tilt if z = 1, 0.5 - tilt if z = 0. Labels are z, flipped with a known probability per task.
Which items occur, how often, how many pairs there are and when events happen is independent of z: a model that sees
the events as a bag of items learns nothing, whatever it counts; what happened before what, and how long ago, is all.

The Bayes probability: log odds of z = sum over pairs of +-log((0.5 + tilt) / (0.5 - tilt)), + where A is recent;
P(label = 1) = flip + (1 - 2 flip) sigmoid(log odds).

Shapes: B samples, T packed events, S = B + 1 offsets, K tasks, C columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gemworks.gem.data.hashing import hash_u64, uniform
from gemworks.gem.data.table import EventColumns, IdColumn, Slices, Table
from gemworks.gem.schema import Batch, EventType, IdFeature, Schema
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
UInt64 = NDArray[np.uint64]
LengthLaw = Literal["uniform", "uniform_0.7", "zipf"]
ZIPF_EXPONENT = 1.2
NUM_CATEGORIES = 16
NUM_CLASSES = 4  # A, B and two neutral ones
START_SECONDS = 1_700_000_000
MINUTE_SECONDS = 60.0
RECENT_LOG_AGES = (math.log1p(1.0), math.log1p(60.0))  # log(1 + age / minute): one minute to one hour
OLD_LOG_AGES = (math.log1p(24 * 60.0), math.log1p(5 * 365 * 24 * 60.0))  # one day to five years
TASKS = ("click", "conversion")
# streams of random numbers
_LATENT, _LABEL, _LENGTH, _BOUNDARY, _PAIR, _EVENT, _ID, _DENSE = range(8)


@dataclass(frozen=True, kw_only=True)
class SyntheticSpec:
    """Size and difficulty of a synthetic data set.

    Attributes:
        num_samples: of the train part; valid and test have an eighth of that each, and follow in time.
        max_length: of an event type's history.
        length_law: "uniform" on [1, max], "uniform_0.7" on [0.4 max, max] (mean 0.7 max), "zipf" (n^-1.2 on [1, max]).
        num_id_fields, num_ids: categorical fields of a sample, and ids in each.
        num_dense: float columns of a sample (noise).
        num_event_types: histories per sample.
        num_event_fields: ids per event: item and category, then noise fields.
        num_items: items; a multiple of 16.
        pair_share: share of possible places that hold a pair.
        tilt: of pairs, in (0, 0.5).
        flips: probability per task that the label differs from the hidden bit.
    """

    num_samples: int = 65536
    max_length: int = 64
    length_law: LengthLaw = "uniform"
    seed: int = 0
    num_id_fields: int = 8
    num_ids: int = 1000
    num_dense: int = 8
    num_event_types: int = 2
    num_event_fields: int = 2
    num_items: int = 1024
    pair_share: float = 0.9
    tilt: float = 0.4
    flips: tuple[float, float] = (0.05, 0.15)

    def __post_init__(self) -> None:
        for name, least in {
            "num_samples": 8,
            "max_length": 1,
            "num_id_fields": 0,
            "num_ids": 1,
            "num_dense": 0,
            "num_event_types": 1,
            "num_event_fields": 2,
        }.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least {least}")
        if self.num_items < NUM_CATEGORIES or self.num_items % NUM_CATEGORIES:
            raise ValueError(f"num_items: got {self.num_items}, expected a positive multiple of {NUM_CATEGORIES}")
        if self.length_law not in ("uniform", "uniform_0.7", "zipf"):
            raise ValueError(f"length_law: got {self.length_law!r}, expected 'uniform', 'uniform_0.7' or 'zipf'")
        if not (0 < self.pair_share <= 1 and all(0 <= flip < 0.5 for flip in self.flips)):
            raise ValueError(
                f"pair_share, flips: got {self.pair_share} and {self.flips}, expected a share in (0, 1] and "
                "probabilities in [0, 0.5)"
            )
        if not 0 < self.tilt < 0.5:
            raise ValueError(f"tilt: got {self.tilt}, expected a number between 0 and 0.5")


@dataclass(frozen=True)
class _History:
    """One event type of some samples. T events, oldest first in each sample."""

    lengths_B: Int64
    category_T: Int64
    event_hash_T: UInt64
    log_age_T: Float64
    log_odds_B: Float64


class Synthetic:
    """The data source of a `SyntheticSpec`.

    >>> source = Synthetic(SyntheticSpec(num_samples=64, max_length=8))
    >>> batch = source.read("train", np.array([3, 1]))
    >>> batch.num_samples, bool((batch.labels_BK == source.read("train", np.array([3])).labels_BK[0]).all(1)[0])
    (2, True)
    """

    def __init__(self, spec: SyntheticSpec) -> None:
        self.spec = spec
        held_out = spec.num_samples // 8
        ends = np.cumsum([spec.num_samples, held_out, held_out]).tolist()
        self._bounds = {"train": (0, ends[0]), "valid": (ends[0], ends[1]), "test": (ends[1], ends[2])}
        self._length_cdf = _length_cdf(spec)
        self.schema = _schema(spec)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._bounds)

    def num_samples(self, split: str) -> int:
        start, end = self._range(split)
        return end - start

    def read(self, split: str, rows_B: Int64) -> Batch:
        """Rows of a split as a batch."""
        return self.table(split, rows_B).batch(self.schema, np.arange(len(rows_B), dtype=np.int64))

    def fingerprint(self) -> dict[str, Any]:
        """What must agree for a loader's state to make sense."""
        return {"source": "synthetic", "spec": repr(self.spec)}

    def bayes_probabilities(self, split: str, rows_B: Int64) -> Float64:
        """P(label = 1 | everything in the batch), float64 [B, K]: no model can do better in log-loss."""
        samples_B = rows_B + self._range(split)[0]
        log_odds_B = np.zeros(len(samples_B))
        for index in range(self.spec.num_event_types):
            log_odds_B += self._history(samples_B, index).log_odds_B
        sure_B = 1 / (1 + np.exp(-log_odds_B))
        flips_K = np.array(self.spec.flips)
        return flips_K + (1 - 2 * flips_K) * sure_B[:, None]

    def bayes_ne(self, split: str = "test", *, num_samples: int = 8192) -> dict[str, float]:
        """Normalised entropy of the Bayes probabilities per task: their mean entropy over log 2 (base rate 1/2).

        Args:
            split: part to average over.
            num_samples: at most so many samples of it.
        """
        rows_B = np.arange(min(num_samples, self.num_samples(split)), dtype=np.int64)
        p_BK = self.bayes_probabilities(split, rows_B)
        entropy_BK = -(p_BK * np.log(p_BK) + (1 - p_BK) * np.log1p(-p_BK))
        return dict(zip(TASKS, (entropy_BK.mean(axis=0) / math.log(2)).tolist(), strict=True))

    def describe(self) -> str:
        """One line: law, seed, mean and maximum of the lengths of the first samples."""
        lengths_B = self._lengths(np.arange(min(8192, self.spec.num_samples), dtype=np.int64), 0)
        mean = lengths_B.mean()
        return (
            f"synthetic: seed {self.spec.seed}, lengths {self.spec.length_law}, mean {mean:.1f}, max "
            f"{self.spec.max_length}, mean/max {mean / self.spec.max_length:.2f}"
        )

    def _range(self, split: str) -> tuple[int, int]:
        if split not in self._bounds:
            raise ValueError(f"split: got {split!r}, expected one of {', '.join(self._bounds)}")
        return self._bounds[split]

    def _latent(self, samples_B: Int64) -> NDArray[np.bool_]:
        return uniform(self.spec.seed, _LATENT, samples_B) < 0.5

    def _lengths(self, samples_B: Int64, index: int) -> Int64:
        u_B = uniform(self.spec.seed, _LENGTH, index, samples_B)
        return (np.searchsorted(self._length_cdf, u_B, side="right") + 1).astype(np.int64)

    def _history(self, samples_B: Int64, index: int) -> _History:
        """Event type number `index` of the given samples."""
        spec = self.spec
        lengths_B = self._lengths(samples_B, index)
        ends_B = np.cumsum(lengths_B)
        row_T = np.repeat(np.arange(len(samples_B)), lengths_B)
        position_T = np.arange(len(row_T), dtype=np.int64) - (ends_B - lengths_B)[row_T]
        # Old events come first, recent ones after them; pairs lie mirrored about the boundary between the two.
        u_B = uniform(spec.seed, _BOUNDARY, index, samples_B)
        num_old_B = np.where(lengths_B > 1, 1 + u_B * (lengths_B - 1), 2 * u_B).astype(np.int64)
        num_pairs_B = np.minimum(num_old_B, lengths_B - num_old_B)
        recent_T = position_T >= num_old_B[row_T]
        place_T = np.where(recent_T, position_T - num_old_B[row_T], num_old_B[row_T] - 1 - position_T)
        pair_keys_B = hash_u64(spec.seed, _PAIR, index, samples_B)
        pair_hash_T = hash_u64(pair_keys_B[row_T].view(np.int64), place_T)
        pair_T = (place_T < num_pairs_B[row_T]) & (_bits(pair_hash_T, 0) < spec.pair_share)
        tilt_B = np.where(self._latent(samples_B), spec.tilt, -spec.tilt)
        a_recent_T = _bits(pair_hash_T, 1) < 0.5 + tilt_B[row_T]
        event_keys_B = hash_u64(spec.seed, _EVENT, index, samples_B)
        event_hash_T = hash_u64(event_keys_B[row_T].view(np.int64), position_T)
        class_T = np.where(pair_T, recent_T ^ a_recent_T, 2 + (_bits(event_hash_T, 0) < 0.5)).astype(np.int64)
        group_T = (_bits(event_hash_T, 1) * (NUM_CATEGORIES // NUM_CLASSES)).astype(np.int64)
        # One event in each of the equal strata of log age, so that events come out in order.
        from_newest_T = np.where(recent_T, lengths_B[row_T], num_old_B[row_T]) - 1 - position_T
        num_part_T = np.where(recent_T, (lengths_B - num_old_B)[row_T], num_old_B[row_T])
        fraction_T = (from_newest_T + _bits(event_hash_T, 2)) / num_part_T
        log_age_T = np.where(
            recent_T,
            RECENT_LOG_AGES[0] + (RECENT_LOG_AGES[1] - RECENT_LOG_AGES[0]) * fraction_T,
            OLD_LOG_AGES[0] + (OLD_LOG_AGES[1] - OLD_LOG_AGES[0]) * fraction_T,
        )
        evidence_T = np.where(pair_T & recent_T, np.where(a_recent_T, 1.0, -1.0), 0.0)
        unit = math.log((0.5 + spec.tilt) / (0.5 - spec.tilt))
        return _History(
            lengths_B=lengths_B,
            category_T=group_T * NUM_CLASSES + class_T,
            event_hash_T=event_hash_T,
            log_age_T=log_age_T,
            log_odds_B=np.bincount(row_T, weights=unit * evidence_T, minlength=len(samples_B)).astype(np.float64),
        )

    def table(self, split: str, rows_B: Int64) -> Table:
        """Rows of a split in columns, for writers."""
        spec = self.spec
        samples_B = rows_B + self._range(split)[0]
        num = len(samples_B)
        now_B = START_SECONDS + samples_B
        z_B = self._latent(samples_B)
        flips = [uniform(spec.seed, _LABEL, task, samples_B) < flip for task, flip in enumerate(spec.flips)]
        ids = {
            feature.name: IdColumn.single(
                (hash_u64(spec.seed, _ID, index, samples_B) % np.uint64(feature.num_ids)).astype(np.int64)
            )
            for index, feature in enumerate(self.schema.ids)
        }
        dense_BC = uniform(spec.seed, _DENSE, samples_B[:, None], np.arange(spec.num_dense)[None, :])
        return Table(
            ids=ids,
            events={
                event.name: self._events(event, samples_B, now_B, index)
                for index, event in enumerate(self.schema.events)
            },
            dense_NC=((dense_BC.reshape(num, spec.num_dense) - 0.5) * math.sqrt(12)).astype(np.float32),
            timestamps_N=now_B,
            labels_NK=np.stack([z_B ^ flip for flip in flips], axis=1).astype(np.float32),
            sample_ids_N=samples_B,
        )

    def _events(self, event: EventType, samples_B: Int64, now_B: Int64, index: int) -> EventColumns:
        history = self._history(samples_B, index)
        row_T = np.repeat(np.arange(len(samples_B)), history.lengths_B)
        rank_T = (_bits(history.event_hash_T, 3) * (self.spec.num_items // NUM_CATEGORIES)).astype(np.int64)
        ids = {"item": rank_T * NUM_CATEGORIES + history.category_T, "category": history.category_T}
        for number, feature in enumerate(event.ids[2:]):
            noise_T = hash_u64(history.event_hash_T.view(np.int64), number)
            ids[feature.name] = (noise_T % np.uint64(feature.num_ids)).astype(np.int64)
        age_T = MINUTE_SECONDS * np.expm1(history.log_age_T)
        offsets_S = np.concatenate([[0], np.cumsum(history.lengths_B)])
        noise_T = (hash_u64(history.event_hash_T.view(np.int64), -1) >> np.uint64(40)).astype(np.float64) * 2.0**-24
        return EventColumns(
            ids=ids,
            floats_VC=((noise_T - 0.5) * math.sqrt(12)).astype(np.float32)[:, None],
            timestamps_V=now_B[row_T] - age_T.astype(np.int64),
            slices=Slices(offsets_S[:-1], history.lengths_B),
        )


def _bits(hash_T: UInt64, part: int) -> Float64:
    """One of four independent 16-bit uniform numbers in [0, 1) inside a 64-bit hash."""
    return ((hash_T >> np.uint64(16 * part)) & np.uint64(0xFFFF)).astype(np.float64) * 2.0**-16


def _length_cdf(spec: SyntheticSpec) -> Float64:
    """P(length <= n) for n = 1 .. max_length."""
    n = np.arange(1, spec.max_length + 1, dtype=np.float64)
    if spec.length_law == "uniform":
        weights = np.ones_like(n)
    elif spec.length_law == "uniform_0.7":
        weights = (n >= math.ceil(0.4 * spec.max_length)).astype(np.float64)
    else:
        weights = n**-ZIPF_EXPONENT
    cdf = np.cumsum(weights) / weights.sum()
    cdf[-1] = 1.0
    return cdf


def _schema(spec: SyntheticSpec) -> Schema:
    item = IdFeature(name="item", num_ids=spec.num_items, table="item")
    category = IdFeature(name="category", num_ids=NUM_CATEGORIES, table="category")
    extra = tuple(
        IdFeature(name=f"extra_{i}", num_ids=spec.num_ids, table=f"extra_{i}") for i in range(spec.num_event_fields - 2)
    )
    return Schema(
        ids=tuple(
            IdFeature(name=f"field_{i}", num_ids=spec.num_ids, table=f"field_{i}") for i in range(spec.num_id_fields)
        ),
        dense_names=tuple(f"dense_{i}" for i in range(spec.num_dense)),
        events=tuple(
            EventType(name=f"type_{i}", ids=(item, category, *extra), float_names=("noise",))
            for i in range(spec.num_event_types)
        ),
        tasks=TASKS,
    )
