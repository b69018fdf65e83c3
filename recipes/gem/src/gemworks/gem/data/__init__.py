"""Readers: stateful, in time order, producing `gemworks.gem.schema.Batch`.

source = open_source(config.data)
loader = open_loader(source, config.data, "train")
"""

from __future__ import annotations

from gemworks.gem.config import DataConfig
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
    if config.source == "parquet":
        if config.path is None:
            raise ValueError("data.path: got nothing, expected the folder of a parquet data set; set data.path")
        return ParquetSource(config.path, max_length=config.max_length, id_policy=config.id_policy)
    raise ValueError(f"data.source: got {config.source!r}, expected 'movielens', 'synthetic' or 'parquet'")


def open_loader(
    source: Source, config: DataConfig, split: str, *, rank: int = 0, world_size: int = 1, pin_memory: bool = False
) -> Loader:
    """A loader with a configuration's batch size, window, seed and prefetch; only "train" is ever shuffled."""
    return Loader(
        source,
        split,
        batch_size=config.batch_size,
        shuffle_window=config.shuffle_window if split == "train" else 0,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
        prefetch=config.prefetch,
        pin_memory=pin_memory,
    )
