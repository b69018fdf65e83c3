"""Readers: stateful, in time order, producing `gemworks.gem.schema.Batch`.

source = open_source(config.data)
loader = open_loader(source, config.data, "train")
"""

from __future__ import annotations

from gemworks.gem.config import DataConfig
from gemworks.gem.data.loader import Loader, Source
from gemworks.gem.data.movielens import MovieLens

__all__ = ["Loader", "MovieLens", "Source", "open_loader", "open_source"]


def open_source(config: DataConfig) -> Source:
    """The data source that a configuration names.

    Raises:
        ValueError: an unknown source, or files that are missing or wrong.
    """
    if config.source == "movielens":
        return MovieLens.open(config.path, max_length=config.max_length)
    raise ValueError(f"data.source: got {config.source!r}, expected 'movielens'")


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
