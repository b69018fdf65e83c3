"""Evaluation of a model on one part of the data, during a run and afterwards from the run's folder.

Shapes: B samples of a batch, K tasks.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gemworks.gem import checkpoint
from gemworks.gem.config import GemConfig
from gemworks.gem.data import Source, open_loader, open_source
from gemworks.gem.device import autocast, resolve_device
from gemworks.gem.metrics import Predictions
from gemworks.gem.model.gem import Gem
from gemworks.gem.run_dir import RunDir, json_ready


def evaluate(model: Gem, source: Source, config: GemConfig, split: str, device: torch.device) -> Predictions:
    """Predictions for every sample of a split, in its order; the model is left in the mode it was in.

    The same model, split, batch size and device give the same bits: nothing here depends on what was evaluated before.
    """
    was_training = model.training
    model.eval()
    predictions = Predictions(len(source.schema.tasks))
    try:
        with torch.no_grad(), autocast(config, device):
            for batch in open_loader(source, config.data, split, pin_memory=device.type == "cuda"):
                logits_BK = model(batch.to(device, non_blocking=True))
                predictions.update(logits_BK, batch.labels_BK, batch.sample_ids_B)
    finally:
        model.train(was_training)
    return predictions


def task_table(predictions: Predictions, tasks: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Quality by task name, as plain values."""
    return {name: asdict(quality) for name, quality in zip(tasks, predictions.compute(), strict=True)}


def evaluate_run(
    path: str | Path, *, split: str = "test", which: str = "best", device: str | None = None
) -> dict[str, Any]:
    """Evaluates the stored model of a run.

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
