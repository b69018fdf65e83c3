"""Readers: stateful, in time order, producing `gemworks.gem.schema.Batch`.

source = open_source(config.data)
loader = open_loader(source, config.data, "train")
"""

from __future__ import annotations

from typing import Any

from gemworks.gem.config import DataConfig
from gemworks.gem.data import criteo, kuairand, taobao
from gemworks.gem.data.balanced import BalancedLoader
from gemworks.gem.data.loader import Loader, Source
from gemworks.gem.data.movielens import MovieLens
from gemworks.gem.data.parquet import ParquetSource
from gemworks.gem.data.synthetic import Synthetic, SyntheticSpec

__all__ = [
    "Loader",
    "MovieLens",
    "ParquetSource",
    "Source",
    "Synthetic",
    "SyntheticSpec",
    "open_loader",
    "open_source",
]

SOURCES = ("movielens", "synthetic", "parquet", "kuairand", "criteo", "taobao")


def open_source(config: DataConfig) -> Source:
    """The data source that a configuration names.

    Raises:
        ValueError: an unknown source, or files that are missing or wrong.
    """
    if config.source == "movielens":
        return MovieLens.open(config.path, max_length=config.max_length)
    if config.source == "synthetic":
        return Synthetic(
            SyntheticSpec(
                num_samples=config.num_samples,
                max_length=config.max_length,
                length_law=config.length_law,
                seed=config.seed,
                num_id_fields=config.num_id_fields,
                num_ids=config.num_ids,
                num_dense=config.num_dense,
                num_event_types=config.num_event_types,
                num_event_fields=config.num_event_fields,
            )
        )
    if config.path is None:
        raise ValueError(f"data.path: got nothing, expected the folder of the {config.source} files; set data.path")
    if config.source == "parquet":
        return ParquetSource(config.path, max_length=config.max_length, id_policy=config.id_policy)
    if config.source == "kuairand":
        folder = kuairand.prepare(config.path, num_ids=config.num_ids, max_length=config.max_length)
    elif config.source == "taobao":
        folder = taobao.prepare(config.path, num_ids=config.num_ids, max_length=config.max_length)
    elif config.source == "criteo":
        folder = criteo.prepare(config.path, num_ids=config.num_ids)
    else:
        raise ValueError(f"data.source: got {config.source!r}, expected one of {', '.join(SOURCES)}")
    return ParquetSource(folder, max_length=config.max_length)


def open_loader(
    source: Source,
    config: DataConfig,
    split: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
    batch_size: int | None = None,
) -> Loader:
    """A loader with a configuration's batch size, window, seed and prefetch; only "train" is ever shuffled or balanced.

    Args:
        source, config, split: what is read.
        rank, world_size: each rank gets its part of every batch.
        pin_memory: batches in page-locked memory.
        batch_size: over all ranks, if another one than the configuration's.

    Raises:
        ValueError: a batch that cannot be split evenly over the ranks.
    """
    batch_size = batch_size or config.batch_size
    if batch_size % world_size:
        raise ValueError(
            f"data.batch_size: got {batch_size}, expected a multiple of the number of ranks, {world_size}: each takes "
            "its part of every batch"
        )
    settings: dict[str, Any] = {
        "batch_size": batch_size // world_size,
        "shuffle_window": config.shuffle_window if split == "train" else 0,
        "seed": config.seed,
        "rank": rank,
        "world_size": world_size,
        "prefetch": config.prefetch,
        "prefetch_threads": config.prefetch_threads,
        "num_lanes": config.num_lanes,
        "pin_memory": pin_memory,
    }
    if config.balance_window and split == "train":
        return BalancedLoader(source, split, balance_window=config.balance_window, **settings)
    return Loader(source, split, **settings)
