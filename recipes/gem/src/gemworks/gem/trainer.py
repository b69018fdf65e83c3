"""One process's model in training: a step, its figures, and everything a checkpoint must hold.

Shapes: B samples of a batch, K tasks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gemworks.gem import checkpoint
from gemworks.gem.config import GemConfig
from gemworks.gem.data import Source, open_loader
from gemworks.gem.device import autocast, peak_flops_per_second
from gemworks.gem.efficiency import count_batch_flops, mfu
from gemworks.gem.metrics import BinaryMetrics
from gemworks.gem.model.gem import Gem
from gemworks.gem.optim import Optimizers
from gemworks.gem.reporting import StepRow
from gemworks.gem.schema import Batch
from torch import Tensor
from torch.nn import functional


class NonFiniteError(RuntimeError):
    """The loss is no longer a number: the run cannot go on."""


def task_loss(logits_BK: Tensor, labels_BK: Tensor, weights_K: Tensor) -> Tensor:
    """Weighted mean over tasks of each task's mean log-loss; 0 for an empty batch.

    >>> task_loss(torch.zeros(3, 2), torch.ones(3, 2), torch.ones(2)).item() == math.log(2)
    False
    >>> round(task_loss(torch.zeros(3, 2), torch.ones(3, 2), torch.tensor([3.0, 1.0])).item(), 4)
    0.6931
    """
    losses_BK = functional.binary_cross_entropy_with_logits(logits_BK, labels_BK, reduction="none")
    return (losses_BK.sum(0) * weights_K).sum() / (max(logits_BK.shape[0], 1) * weights_K.sum())


class StepClock:
    """Wall time, samples, tokens and FLOPs of training steps; time outside of `wait` and `work` is not counted."""

    def __init__(self) -> None:
        self.wait_seconds = self.work_seconds = self.flops = 0.0
        self.num_steps = self.num_samples = self.num_tokens = 0

    @property
    def seconds(self) -> float:
        return self.wait_seconds + self.work_seconds

    def add(self, other: StepClock) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Trainer:
    """Model, optimizers and the training part's loader.

    Args:
        config: of the run.
        source: the data.
        device: where the model lives.
    """

    def __init__(self, config: GemConfig, source: Source, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.schema = source.schema
        torch.manual_seed(config.train.seed)
        self.model = Gem(source.schema, config, device=device)
        self.loader = open_loader(source, config.data, "train", pin_memory=device.type == "cuda")
        self.total_steps = len(self.loader) * config.train.epochs
        if config.train.max_steps is not None:
            self.total_steps = min(self.total_steps, config.train.max_steps)
        self.optimizers = Optimizers(self.model, config.optimizer, self.total_steps)
        self.step = 0
        self.total = StepClock()
        num_tasks = len(source.schema.tasks)
        self._weights_K = _task_weights(config, num_tasks).to(device)
        self._window = StepClock()
        self._window_metrics = BinaryMetrics(num_tasks, device)
        self._window_loss = torch.zeros((), dtype=torch.float64, device=device)
        self._grad_norm = torch.zeros((), device=device)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.loader)

    def steps(self) -> Iterator[int]:
        """Trains to the end of the run, one step per iteration; yields the number of steps done."""
        self.model.train()
        mark = time.perf_counter()
        while self.step < self.total_steps:
            for batch in self.loader:
                now = time.perf_counter()
                self._window.wait_seconds += now - mark
                self._train_step(batch)
                self._window.work_seconds += time.perf_counter() - now
                yield self.step
                if self.step >= self.total_steps:
                    return
                mark = time.perf_counter()

    def _train_step(self, batch: Batch) -> None:
        self._window.flops += count_batch_flops(self.config, self.schema, batch).training
        self._window.num_steps += 1
        self._window.num_samples += batch.num_samples
        self._window.num_tokens += sum(e.timestamps_T.shape[0] for e in batch.events.values())
        batch = batch.to(self.device, non_blocking=True)
        self.optimizers.zero_grad()
        with autocast(self.config, self.device):
            logits_BK = self.model(batch)
        loss = task_loss(logits_BK, batch.labels_BK, self._weights_K)
        loss.backward()
        self._grad_norm = self.optimizers.step(self.step)
        self._window_loss += loss.detach().double()
        self._window_metrics.update(logits_BK, batch.labels_BK)
        self.step += 1

    def take_row(self) -> StepRow:
        """The figures since the last call.

        Raises:
            NonFiniteError: the loss of one of those steps was NaN or infinite.
        """
        before = time.perf_counter()
        loss = float(self._window_loss) / max(
            self._window.num_steps, 1
        )  # waits for the GPU, which is still at the steps
        self._window.work_seconds += time.perf_counter() - before
        window, seconds = self._window, max(self._window.seconds, 1e-9)
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"the loss is {loss} between steps {self.step - window.num_steps + 1} and {self.step}; "
                "lower optimizer.lr or optimizer.sparse_lr, or lengthen optimizer.warmup_steps"
            )
        peak = peak_flops_per_second(self.device)
        lr, sparse_lr = self.optimizers.learning_rates()
        row = StepRow(
            step=self.step,
            total_steps=self.total_steps,
            loss=loss,
            ne=self._window_metrics.compute()[0].ne,
            samples_per_s=window.num_samples / seconds,
            tokens_per_s=window.num_tokens / seconds,
            flops_per_s=window.flops / seconds,
            mfu=mfu(window.flops, seconds, peak_flops_per_second=peak) if peak else None,
            step_ms=1e3 * seconds / max(window.num_steps, 1),
            data_wait_ms=1e3 * window.wait_seconds / max(window.num_steps, 1),
            lr=lr,
            sparse_lr=sparse_lr,
            grad_norm=float(self._grad_norm),
        )
        self.total.add(window)
        self._window = StepClock()
        self._window_metrics.reset()
        self._window_loss.zero_()
        return row

    def save(self, folder: Path) -> Path:
        """A checkpoint after the step done last. Call `take_row` first: a window in progress is not part of it."""
        host: dict[str, Any] = {"loader": self.loader.state_dict(), "clock": vars(self.total)}
        return checkpoint.save(folder, self.step, self.model, self.optimizers, host)

    def load(self, path: Path) -> None:
        """Goes on where a checkpoint was saved."""
        host = checkpoint.load(path, self.model, self.optimizers)
        self.step = int(host["step"])
        self.loader.load_state_dict(host["loader"])
        vars(self.total).update(host["clock"])


def _task_weights(config: GemConfig, num_tasks: int) -> Tensor:
    weights = config.train.task_weights
    if weights is None:
        return torch.ones(num_tasks)
    if len(weights) != num_tasks:
        raise ValueError(
            f"train.task_weights: got {len(weights)} weights, expected {num_tasks}, one per task of the data's schema"
        )
    return torch.tensor(weights, dtype=torch.float32)
