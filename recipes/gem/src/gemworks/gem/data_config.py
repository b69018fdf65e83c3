"""The `data` section: which reader, and how samples become batches. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gemworks.gem.config_checks import check, check_counts, is_power_of_two


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the batches come from.

    Attributes:
        source: the reader.
        path: cache or file folder; files of kuairand, criteo and taobao are prepared once, in `.gemworks` beside them.
        batch_size: samples of a batch, over all ranks together, which share it evenly: a configuration means the same
            steps whatever the number of ranks.
        eval_batch_size: samples of a batch of an evaluation, on each rank; None: batch_size.
        max_length: newest events kept per event type; a power of two.
        id_policy: what to do with an id outside its table.
        length_law: lengths of synthetic histories: uniform on [1, max], uniform on [0.4 max, max], or Zipf 1.2.
        num_samples: samples of the synthetic source.
        shuffle_window: samples among which the order is random; 0 keeps strict time order.
        prefetch: batches prepared ahead.
        prefetch_threads: threads that prepare them.
        num_lanes: groups into which the row groups of a parquet source are dealt, so that a rank decodes its own only:
            a multiple of the number of ranks that divides the samples of a step; 1 turns it off.
        balance_window: training steps among which samples are dealt so that batches hold about as many events each; 0
            leaves them as they come.
        num_id_fields: categorical fields of a synthetic sample.
        num_ids: ids in each of them; of kuairand, criteo and taobao the rows of each table into which ids are hashed.
        num_dense: float columns of a synthetic sample.
        num_event_types: event types of synthetic data; equal to model.num_event_types.
        num_event_fields: ids of a synthetic event.
        seed: of synthetic data and of shuffling.
    """

    source: Literal["movielens", "synthetic", "parquet", "kuairand", "criteo", "taobao"] = "synthetic"
    path: str | None = None
    batch_size: int = 128
    eval_batch_size: int | None = None
    max_length: int = 256
    id_policy: Literal["error", "hash"] = "error"
    length_law: Literal["uniform", "uniform_0.7", "zipf"] = "uniform"
    num_samples: int = 65536
    shuffle_window: int = 0
    prefetch: int = 2
    prefetch_threads: int = 2
    num_lanes: int = 1
    balance_window: int = 0
    num_id_fields: int = 8
    num_ids: int = 1000
    num_dense: int = 8
    num_event_types: int = 2
    num_event_fields: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(
            "data", self, "batch_size num_samples num_ids num_event_types num_event_fields prefetch_threads num_lanes"
        )
        check_counts("data", self, "eval_batch_size", optional=True)
        check_counts("data", self, "shuffle_window balance_window prefetch num_id_fields num_dense seed", least=0)
        check(is_power_of_two(self.max_length), "data.max_length", self.max_length, "a power of two such as 256")
        check(
            self.source != "synthetic" or self.num_samples >= 8,
            "data.num_samples",
            self.num_samples,
            "at least 8: the validation and test parts have an eighth of it each",
        )
