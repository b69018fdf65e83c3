"""MovieLens-100K as a data source: two tasks, two event types, strictly causal histories and features.

Order: by timestamp, ties in file order. First 80 % of the events train, next 10 % choose, last 10 % test.
A sample sees only events with a strictly smaller timestamp, in its history and in every count; 76 % of the events share
user and timestamp with another one, so anything weaker leaks.

Shapes: N ratings in time order, C dense features, B samples of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gemworks.gem.data.causal import causal_sums
from gemworks.gem.data.movielens_features import (
    AGE_EDGES,
    LIKE_RATING,
    LOVE_RATING,
    CausalCounts,
    Features,
    causal_features,
)
from gemworks.gem.data.movielens_files import RatingLog, fetch, read_log
from gemworks.gem.data.table import EventColumns, IdColumn, Slices, Table
from gemworks.gem.schema import Batch, EventType, IdFeature, Schema
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
TASKS = ("like", "love")
SPLIT_SHARES = (0.8, 0.1)  # train, valid; the rest is test
USER_ADMISSION_EVENTS = 64
YEAR_EDGES = np.array([1, 1940, 1950, 1960, 1970, 1980, 1985, 1990, 1992, 1993, 1994, 1995, 1996, 1997, 1998])
STANDARD_CLIP = 8.0  # standard deviations
EVENT_FLOATS = ("rating", "surprise", "item_log_count")


@dataclass(frozen=True)
class Identity:
    """User and item of each sample: int64 [N], with the sizes of their vocabularies."""

    user_N: Int64
    item_N: Int64
    num_users: int
    num_items: int


class MovieLens:
    """MovieLens-100K, prepared in memory.

    Ids of users and items: row 0 means "not in the vocabulary of the train part". A user also keeps row 0 until it has
    `USER_ADMISSION_EVENTS` earlier events, as production tables admit an id only once it is frequent: so row 0 is
    trained on users at their start, which is what most of the test part is made of.

    Args:
        log: the ratings (`read_log`).
        max_length: newest events kept per event type.

    Attributes:
        schema: of the batches.
        table: all N samples.
        log: the ratings in time order.
        features: raw dense features; `Batch.dense_BC` holds them standardised by the train part.
    """

    def __init__(self, log: RatingLog, *, max_length: int = 256) -> None:
        if max_length < 1:
            raise ValueError(f"max_length: got {max_length}, expected at least 1 event")
        self.log = log
        num = len(log.user_N)
        num_train = int(num * SPLIT_SHARES[0])
        self._bounds = {
            "train": (0, num_train),
            "valid": (num_train, int(num * (SPLIT_SHARES[0] + SPLIT_SHARES[1]))),
            "test": (int(num * (SPLIT_SHARES[0] + SPLIT_SHARES[1])), num),
        }
        self.features: Features = causal_features(log)
        ids = _sample_ids(log, self.features, num_train)
        self.schema = _schema(log, ids, self.features.names)
        self.table = Table(
            ids={name: column for name, (column, _, _) in ids.items()},
            events=_histories(log, self.features, ids, max_length),
            dense_NC=_standardise(self.features.values_NC, num_train),
            timestamps_N=log.timestamp_N,
            labels_NK=np.stack([log.rating_N >= LIKE_RATING, log.rating_N >= LOVE_RATING], axis=1).astype(np.float32),
            sample_ids_N=np.arange(num, dtype=np.int64),
        )

    @classmethod
    def open(cls, cache_dir: str | Path | None = None, *, max_length: int = 256) -> MovieLens:
        """Fetch if needed, check hashes, prepare (well under 2 s)."""
        return cls(read_log(fetch(cache_dir)), max_length=max_length)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._bounds)

    def bounds(self, split: str) -> tuple[int, int]:
        """First row and row after the last one of a split ("train", "valid", "test")."""
        if split not in self._bounds:
            raise ValueError(f"split: got {split!r}, expected one of {', '.join(self._bounds)}")
        return self._bounds[split]

    def num_samples(self, split: str) -> int:
        start, end = self.bounds(split)
        return end - start

    def read(self, split: str, rows_B: Int64) -> Batch:
        """Rows of a split (0 is its first sample) as a batch."""
        return self.table.batch(self.schema, rows_B + self.bounds(split)[0])

    def identity(self) -> Identity:
        """User and item indices for baselines, over all samples and with nothing held back."""
        return Identity(self.log.user_N, self.log.item_N, len(self.log.user_ids_U), len(self.log.item_ids_I))

    def causal_counts(self) -> CausalCounts:
        """Running counts and rates of user and item just before each sample, for baselines."""
        return self.features.counts

    def fingerprint(self) -> dict[str, Any]:
        """What must agree for a loader's state to make sense."""
        return {"source": "movielens", "num_samples": len(self.log.user_N)}


_IdPlan = dict[str, tuple[IdColumn, int, str]]  # name -> (column, number of ids, table)


def _sample_ids(log: RatingLog, features: Features, num_train: int) -> _IdPlan:
    """The categorical fields of every sample."""

    def vocabulary(index_N: Int64) -> tuple[Int64, int]:
        """Ids from 1 in the train part's vocabulary, 0 outside it; and the number of ids."""
        known = np.unique(index_N[:num_train])
        rows = np.zeros(int(index_N.max()) + 1, dtype=np.int64)
        rows[known] = np.arange(1, len(known) + 1)
        return rows[index_N], len(known) + 1

    def codes(values_N: NDArray[Any]) -> tuple[Int64, int]:
        """One id per distinct profile value: profiles are known in advance, so no id for the unknown is needed."""
        names, codes_N = np.unique(values_N, return_inverse=True)
        return codes_N.astype(np.int64), len(names)

    user_N, num_users = vocabulary(log.user_N)
    user_N = np.where(features.counts.user_count_N >= USER_ADMISSION_EVENTS, user_N, 0)
    item_N, num_items = vocabulary(log.item_N)
    genre_I, num_genre_sets = codes(log.genres_IG @ (1 << np.arange(log.genres_IG.shape[1], dtype=np.int64)))
    rows, genres_V = np.nonzero(log.genres_IG)
    starts_I = np.searchsorted(rows, np.arange(len(log.item_ids_I))).astype(np.int64)
    lengths_I = log.genres_IG.sum(axis=1).astype(np.int64)
    genres = IdColumn(genres_V.astype(np.int64), Slices(starts_I[log.item_N], lengths_I[log.item_N]))
    year_N = np.searchsorted(YEAR_EDGES, log.year_I[log.item_N], side="right").astype(np.int64)
    age_N = np.searchsorted(AGE_EDGES, log.age_U[log.user_N], side="right").astype(np.int64)
    gender_U, num_genders = codes(log.gender_U)
    occupation_U, num_occupations = codes(log.occupation_U)
    zip_U, num_zips = codes(np.array([z[0] if z[0].isdigit() else "other" for z in log.zip_U]))
    return {
        "user": (IdColumn.single(user_N), num_users, "user"),
        "item": (IdColumn.single(item_N), num_items, "item"),
        "genre_set": (IdColumn.single(genre_I[log.item_N]), num_genre_sets, "genre_set"),
        "genres": (genres, log.genres_IG.shape[1], "genre"),
        "year": (IdColumn.single(year_N), len(YEAR_EDGES) + 1, "year"),
        "age": (IdColumn.single(age_N), len(AGE_EDGES) + 1, "age"),
        "gender": (IdColumn.single(gender_U[log.user_N]), num_genders, "gender"),
        "occupation": (IdColumn.single(occupation_U[log.user_N]), num_occupations, "occupation"),
        "zip": (IdColumn.single(zip_U[log.user_N]), num_zips, "zip"),
    }


EVENT_IDS = ("item", "genre_set", "year")
EVENT_TYPES = ("liked", "other")


def _schema(log: RatingLog, ids: _IdPlan, dense_names: tuple[str, ...]) -> Schema:
    fields = {name: IdFeature(name=name, num_ids=num, table=table) for name, (_, num, table) in ids.items()}
    event_ids = tuple(fields[name] for name in EVENT_IDS)
    return Schema(
        ids=tuple(fields.values()),
        dense_names=dense_names,
        events=tuple(EventType(name=name, ids=event_ids, float_names=EVENT_FLOATS) for name in EVENT_TYPES),
        tasks=TASKS,
    )


def _histories(log: RatingLog, features: Features, ids: _IdPlan, max_length: int) -> dict[str, EventColumns]:
    """Each user's events of one type in time order; a sample's history is a prefix of them, cut to the newest."""
    liked_N = log.rating_N >= LIKE_RATING
    floats_NC = np.stack(
        [(log.rating_N - 3.5) / 1.1, features.surprise_N * 2.0, np.log1p(features.counts.item_count_N) / 2.0 - 2.0],
        axis=1,
    ).astype(np.float32)
    histories: dict[str, EventColumns] = {}
    for name, member_N in zip(EVENT_TYPES, (liked_N, ~liked_N), strict=True):
        rows_V = np.flatnonzero(member_N)
        rows_V = rows_V[np.argsort(log.user_N[rows_V], kind="stable")]
        user_start_N = np.searchsorted(log.user_N[rows_V], log.user_N)
        past_N = causal_sums(log.user_N, log.timestamp_N, member_N[:, None].astype(np.float64))[:, 0].astype(np.int64)
        lengths_N = np.minimum(past_N, max_length)
        histories[name] = EventColumns(
            ids={feature: ids[feature][0].values_V[rows_V] for feature in EVENT_IDS},
            floats_VC=floats_NC[rows_V],
            timestamps_V=log.timestamp_N[rows_V],
            slices=Slices(user_start_N + past_N - lengths_N, lengths_N),
        )
    return histories


def _standardise(values_NC: NDArray[np.float64], num_train: int) -> NDArray[np.float32]:
    """Zero mean and unit deviation on the train part, clipped; a constant column becomes 0."""
    mean_C = values_NC[:num_train].mean(axis=0)
    deviation_C = values_NC[:num_train].std(axis=0)
    scaled_NC = (values_NC - mean_C) / np.where(deviation_C > 0, deviation_C, 1.0)
    return np.clip(scaled_NC, -STANDARD_CLIP, STANDARD_CLIP).astype(np.float32)
