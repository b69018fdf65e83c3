"""Evaluation of a model on one part of the data, during a run and afterwards from the run's folder.

Shapes: B samples of a batch, K tasks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gemworks.gem import checkpoint
from gemworks.gem.config import GemConfig
from gemworks.gem.data import Source, open_loader, open_source
from gemworks.gem.device import autocast, resolve_device
from gemworks.gem.implement import PROBE, convert_linears
from gemworks.gem.metrics import Predictions
from gemworks.gem.model.gem import Gem
from gemworks.gem.ranks import Ranks
from gemworks.gem.run_dir import RunDir, json_ready
from gemworks.gem.schema import Batch


def evaluate(
    model: Gem,
    source: Source,
    config: GemConfig,
    split: str,
    device: torch.device,
    *,
    after_batch: Callable[[], None] | None = None,
    ranks: Ranks | None = None,
) -> Predictions:
    """Predictions for every sample of a split, in its order; the model is left in the mode it was in.

    The same model, split, batch size and device give the same bits: nothing here depends on what was evaluated before.
    Several ranks share the batches of one process, so that the samples of a batch, and with them its bits, are the
    same; the first one gets all predictions, the others keep their own. A rank whose batches are used up goes on with
    empty ones until all are done. `after_batch` may raise to end it early, on all ranks in the same call.
    """
    ranks = ranks or Ranks()
    was_training = model.training
    model.eval()
    predictions = Predictions(len(source.schema.tasks))
    min_samples = model.embeddings.min_samples
    if not ranks.alone:  # sharded tables want batches of one size on all ranks
        model.embeddings.min_samples = config.data.eval_batch_size or config.data.batch_size
    try:
        with torch.no_grad(), autocast(config, device):
            for batch in _batches(source, config, split, device, ranks):
                logits_BK = model(batch.to(device, non_blocking=True))
                predictions.update(logits_BK, batch.labels_BK, batch.sample_ids_B)
                if after_batch is not None:
                    after_batch()
    finally:
        model.train(was_training)
        model.embeddings.min_samples = min_samples
    if ranks.alone:
        return predictions
    merged = Predictions(predictions.num_tasks)
    for part in ranks.gather_to_first(predictions):
        merged.merge(part)
    return merged


def _batches(source: Source, config: GemConfig, split: str, device: torch.device, ranks: Ranks) -> Iterator[Batch]:
    """This rank's batches of a split, and as many of them on every rank."""
    size = config.data.eval_batch_size or config.data.batch_size
    loader = open_loader(source, config.data, split, pin_memory=device.type == "cuda", batch_size=size)
    share = ranks.share(len(loader))
    loader.position = min(share.start * loader.batch_size, loader.num_samples)
    yield from itertools.islice(loader, len(share))
    for _ in range(-(-len(loader) // ranks.world_size) - len(share)):
        yield source.read(split, np.zeros(0, dtype=np.int64))


def task_table(predictions: Predictions, tasks: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Quality by task name, as plain values."""
    return {name: asdict(quality) for name, quality in zip(tasks, predictions.compute(), strict=True)}


def evaluate_run(
    path: str | Path, *, split: str = "test", which: str = "best", device: str | None = None
) -> dict[str, Any]:
    """Evaluates the stored model of a run.

    Linear layers compute by the recipe that the run trained with; nothing is compiled, which rounds otherwise.

    Args:
        path: the run's folder.
        split: "train", "valid" or "test".
        which: the best checkpoint by validation NE, or the last one.
        device: "auto", "cpu" or "cuda"; None takes the run's own setting.

    Returns:
        `ne`, `auc`, `calibration`, `log_loss`, `rate`, `num_samples` of the primary task, all `tasks`, and where they
        come from. `equals_training` says whether these are to the last bit the figures that the run itself reported;
        None where it reported none for this split and checkpoint.

    Raises:
        ValueError: no run, no checkpoint, or a checkpoint that does not fit the run's configuration.
    """
    run = RunDir.open(path)
    config = run.config()
    place = resolve_device(device or config.train.device)
    found = checkpoint.find(run.checkpoints, which)
    source = open_source(config.data)
    model = Gem(source.schema, config, device=place)
    convert_linears(model, config.kernels, run.linears() if config.kernels.linears == PROBE else None)
    step = checkpoint.load_model(found, model)
    tasks = json_ready(task_table(evaluate(model, source, config, split, place), source.schema.tasks))
    primary = source.schema.tasks[0]
    reported = _reported(run, split, step)
    return {
        "run_dir": str(path),
        "checkpoint": found.name,
        "step": step,
        "split": split,
        "device": str(place),
        **tasks[primary],
        "tasks": tasks,
        "equals_training": None if reported is None else tasks == reported,
    }


def _reported(run: RunDir, split: str, step: int) -> dict[str, Any] | None:
    """What the run said about the model of a step, by task."""
    if split == "test":
        summary = run.summary()
        return summary["tasks"] if summary is not None and summary["best_step"] == step else None
    return next((row["tasks"] for row in run.rows(split) if row["step"] == step and "tasks" in row), None)
