"""Batches made once for the many models of a loss-parity run, and read by all its processes from files.

Making them takes the longest of all: 1,048,576 synthetic samples with 33 events each are 40 s of one core's work, more
than a small model trains on a GPU.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gemworks.gem.config import GemConfig
from gemworks.gem.data import Loader, open_loader
from gemworks.gem.schema import Batch
from numpy.typing import NDArray


class StoredBatches:
    """A source whose batches are made once, whichever process asks first.

    Args:
        source: where batches come from.
        folder: of the files; may be shared by processes and later runs.
    """

    def __init__(self, source: Any, folder: Path) -> None:
        self._source = source
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def path(self, split: str, rows_B: NDArray[Any]) -> Path:
        """The file of the batch of these rows."""
        key = hashlib.sha256(f"{self._source.fingerprint()} {split} ".encode() + rows_B.tobytes())
        return self._folder / f"{split}-{key.hexdigest()[:24]}.pt"

    def read(self, split: str, rows_B: NDArray[Any]) -> Batch:
        """The batch of these rows."""
        path = self.path(split, rows_B)
        if path.exists():
            return torch.load(path, weights_only=False)  # a file of our own: it holds a Batch
        batch = self._source.read(split, rows_B)
        part = path.with_suffix(f".{os.getpid()}")
        torch.save(batch, part)
        os.replace(part, path)  # never half a file
        return batch


def first_position(seed: int, num_batches: int, batch_size: int, num_samples: int) -> int:
    """Where a seed's training begins: each seed has samples of its own while they last.

    >>> [first_position(seed, 10, 4, 100) for seed in range(4)]
    [0, 40, 80, 20]
    """
    return seed * num_batches % (num_samples // batch_size) * batch_size


def training_start(config: GemConfig, loader: Loader) -> tuple[int, int]:
    """Where the training of the configuration's seed begins, and how many batches it takes."""
    num_batches = len(loader) * config.train.epochs
    if config.train.max_steps is not None:
        num_batches = min(num_batches, config.train.max_steps * config.train.accumulate)
    return first_position(config.train.seed, num_batches, loader.batch_size, loader.num_samples), num_batches


def rows_read(config: GemConfig, source: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """Split and rows of the batches that training with the configuration's seed reads in its first epoch, with those
    that its loader reads ahead, and of the held-out batches."""
    loader = open_loader(source, config.data, "train")
    first, num_batches = training_start(config, loader)
    end = min(first + (num_batches + loader.prefetch) * loader.batch_size, loader.num_samples)
    for position in range(first, end, loader.batch_size):
        yield "train", loader.rows_at(0, position)
    size = config.data.eval_batch_size or config.data.batch_size
    held_out = open_loader(source, config.data, "test", batch_size=size)
    for position in range(0, held_out.num_samples, size):
        yield "test", held_out.rows_at(0, position)
