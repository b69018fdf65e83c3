"""Dense features of MovieLens samples: running counts and rates of the past, and nothing else.

Every feature of a sample is a function of profiles, of its own timestamp and of events with a strictly smaller
timestamp (ties excluded, for item and global statistics too). Residuals are rounded to multiples of 2^-20, so all sums
are exact in float64 and a feature cannot move by a rounding error when an unrelated label changes.

Shapes: N ratings in time order, C features, P (rating, genre) pairs, G genres.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gemworks.gem.data.causal import causal_sums, first_and_last
from gemworks.gem.data.movielens_files import RatingLog
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
LIKE_RATING = 4
LOVE_RATING = 5
RATE_PRIOR = 0.5  # of the global rate, before anything was seen
PRIOR_EVENTS = 5.0  # weight of the parent rate in a smoothed rate, in events
GLOBAL_PRIOR_EVENTS = 100.0
DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class CausalCounts:
    """What was known of user and item just before each sample (float64 [N] each).

    Rates are shares of likes, smoothed: (likes + 5 * global rate) / (count + 5).
    """

    user_count_N: Float64
    user_rate_N: Float64
    item_count_N: Float64
    item_rate_N: Float64
    global_rate_N: Float64


@dataclass(frozen=True)
class Features:
    """Raw (not standardised) features.

    Attributes:
        names: C names.
        values_NC: float64 [N, C].
        counts: the four columns that baselines use.
        surprise_N: float64 [N], like minus the item's smoothed rate just before: what an event says of its user.
    """

    names: tuple[str, ...]
    values_NC: Float64
    counts: CausalCounts
    surprise_N: Float64


def smoothed(sums_N: Float64, counts_N: Float64, prior_N: Float64 | float, weight: float = PRIOR_EVENTS) -> Float64:
    """(sum + weight * prior) / (count + weight)."""
    return (sums_N + weight * prior_N) / (counts_N + weight)


def logit(rate_N: Float64) -> Float64:
    """log(p / (1 - p)); rates here are smoothed and never 0 or 1."""
    return np.log(rate_N) - np.log1p(-rate_N)


def causal_features(log: RatingLog) -> Features:
    """All dense features of all ratings, in the log's order."""
    num = len(log.user_N)
    time_N = log.timestamp_N
    like_N = (log.rating_N >= LIKE_RATING).astype(np.float64)
    stats_N3 = np.stack([np.ones(num), like_N, log.rating_N.astype(np.float64)], axis=1)
    everyone_N = np.zeros(num, dtype=np.int64)
    global_N3 = causal_sums(everyone_N, time_N, stats_N3)
    item_N3 = causal_sums(log.item_N, time_N, stats_N3)
    global_rate_N = smoothed(global_N3[:, 1], global_N3[:, 0], RATE_PRIOR, GLOBAL_PRIOR_EVENTS)
    item_rate_N = smoothed(item_N3[:, 1], item_N3[:, 0], global_rate_N)
    surprise_N = np.round((like_N - item_rate_N) * 2.0**20) * 2.0**-20
    user_stats_N4 = np.concatenate([stats_N3, surprise_N[:, None]], axis=1)
    user_N4 = causal_sums(log.user_N, time_N, user_stats_N4)
    user_rate_N = smoothed(user_N4[:, 1], user_N4[:, 0], global_rate_N)
    counts = CausalCounts(user_N4[:, 0], user_rate_N, item_N3[:, 0], item_rate_N, global_rate_N)
    global_mean_N = smoothed(global_N3[:, 2], global_N3[:, 0], 3.5, GLOBAL_PRIOR_EVENTS)
    user_surprise_N = smoothed(user_N4[:, 3], user_N4[:, 0], 0.0)
    user_first_N, user_last_N = first_and_last(log.user_N, time_N)
    item_first_N, item_last_N = first_and_last(log.item_N, time_N)
    year_N = log.year_I[log.item_N].astype(np.float64)
    columns: dict[str, Float64] = {
        "global_rate": logit(global_rate_N),
        "user_log_count": np.log1p(user_N4[:, 0]),
        "user_rate": logit(user_rate_N),
        "user_mean_rating": smoothed(user_N4[:, 2], user_N4[:, 0], global_mean_N),
        "user_surprise": user_surprise_N,
        "user_log_liked": np.log1p(user_N4[:, 1]),
        "user_log_other": np.log1p(user_N4[:, 0] - user_N4[:, 1]),
        "user_log_days": np.log1p((time_N - user_first_N) / DAY_SECONDS),
        "user_log_gap": np.log1p((time_N - user_last_N).astype(np.float64)),
        "user_is_new": (user_N4[:, 0] == 0).astype(np.float64),
        "item_log_count": np.log1p(item_N3[:, 0]),
        "item_rate": logit(item_rate_N),
        "item_mean_rating": smoothed(item_N3[:, 2], item_N3[:, 0], global_mean_N),
        "item_log_days": np.log1p((time_N - item_first_N) / DAY_SECONDS),
        "item_log_gap": np.log1p((time_N - item_last_N).astype(np.float64)),
        "item_year": np.where(year_N > 0, year_N, 1990.0),
        "user_age": log.age_U[log.user_N].astype(np.float64),
        "expected_rate": logit(item_rate_N) + 4.0 * user_surprise_N,
    }
    columns |= _genre_affinity(log, user_stats_N4)
    columns |= _group_rates(log, stats_N3, item_rate_N)
    return Features(tuple(columns), np.stack(list(columns.values()), axis=1), counts, surprise_N)


def _genre_affinity(log: RatingLog, user_stats_N4: Float64) -> dict[str, Float64]:
    """The user's past with the genres of the sample's item, averaged over these genres."""
    event_P, genre_P = np.nonzero(log.genres_IG[log.item_N])
    num_genres = log.genres_IG.shape[1]
    past_P4 = causal_sums(log.user_N[event_P] * num_genres + genre_P, log.timestamp_N[event_P], user_stats_N4[event_P])
    starts_N = np.searchsorted(event_P, np.arange(len(log.user_N)))
    genres_N = np.diff(np.append(starts_N, len(event_P))).astype(np.float64)
    surprise_P = smoothed(past_P4[:, 3], past_P4[:, 0], 0.0)
    return {
        "genre_surprise": np.add.reduceat(surprise_P, starts_N) / genres_N,
        "genre_surprise_min": np.minimum.reduceat(surprise_P, starts_N),
        "genre_surprise_max": np.maximum.reduceat(surprise_P, starts_N),
        "genre_log_count": np.add.reduceat(np.log1p(past_P4[:, 0]), starts_N) / genres_N,
    }


def _group_rates(log: RatingLog, stats_N3: Float64, item_rate_N: Float64) -> dict[str, Float64]:
    """The item's past rate among users like this one, smoothed towards the item's own rate."""
    _, gender_U = np.unique(log.gender_U, return_inverse=True)
    _, occupation_U = np.unique(log.occupation_U, return_inverse=True)
    groups = {
        "gender": gender_U,
        "age": np.searchsorted(AGE_EDGES, log.age_U, side="right"),
        "occupation": occupation_U,
    }
    columns: dict[str, Float64] = {}
    for name, group_U in groups.items():
        group_N = log.item_N * (int(group_U.max()) + 1) + group_U[log.user_N]
        past_N3 = causal_sums(group_N, log.timestamp_N, stats_N3)
        rate_N = smoothed(past_N3[:, 1], past_N3[:, 0], item_rate_N)
        columns[f"item_rate_by_{name}"] = logit(rate_N) - logit(item_rate_N)
    return columns


AGE_EDGES = np.array([18, 25, 30, 35, 45, 50, 56])  # years; eight buckets
