"""The course of one training run, from the data to the summary.

In order: fit the baselines, train with an evaluation now and then, take the model that was best on the validation
part, evaluate it on the test part, write the summary and the picture.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from gemworks.gem import checkpoint
from gemworks.gem.baselines import BaselineResult, BaselineSource, as_dict, baselines
from gemworks.gem.config import GemConfig
from gemworks.gem.curve import draw
from gemworks.gem.data import Source
from gemworks.gem.device import device_name, peak_flops_per_second
from gemworks.gem.efficiency import mfu
from gemworks.gem.evaluate import evaluate, task_table
from gemworks.gem.reporting import Display
from gemworks.gem.run_dir import RunDir
from gemworks.gem.summary import comparison, run_facts
from gemworks.gem.trainer import Trainer


class Run:
    """One run; `go` does it.

    Args:
        config: of the run.
        source: the data.
        trainer: model and optimizers, at the step to start from.
        run_dir: where files go.
        display: where progress goes.
    """

    def __init__(self, config: GemConfig, source: Source, trainer: Trainer, run_dir: RunDir, display: Display) -> None:
        self.config = config
        self.source = source
        self.trainer = trainer
        self.run_dir = run_dir
        self.display = display
        self.best_ne = math.inf
        self.best_step = -1

    def go(self) -> dict[str, Any]:
        """Everything; returns the content of `summary.json`."""
        self._announce()
        fitted = self._baselines()
        began = time.perf_counter()
        self._train()
        train_seconds = time.perf_counter() - began
        summary = self._test(fitted) | {"train_seconds": train_seconds, **self._speed(), **self._facts()}
        self.run_dir.write_summary(summary)
        draw(self.run_dir.curve_path, self.run_dir.rows(), summary)
        return summary

    def _train(self) -> None:
        config, trainer = self.config.train, self.trainer
        eval_every = config.eval_every or trainer.steps_per_epoch
        self.display.start(trainer.total_steps)
        for step in trainer.steps():
            self.display.advance()
            evaluates = step == trainer.total_steps or step % eval_every == 0
            if evaluates or step % config.log_every == 0:
                row = trainer.take_row()
                self.run_dir.log("train", **row.as_dict())
                self.display.row(row)
            if evaluates:
                self._validate()
        self.display.stop()

    def _validate(self) -> None:
        """Evaluates on the validation part, saves, and remembers the best."""
        trainer, folder = self.trainer, self.run_dir.checkpoints
        began = time.perf_counter()
        predictions = evaluate(trainer.model, self.source, self.config, "valid", trainer.device)
        tasks = task_table(predictions, trainer.schema.tasks)
        quality = tasks[trainer.schema.tasks[0]]
        if not math.isfinite(quality["ne"]):
            raise self._no_ne(quality)
        better = quality["ne"] < self.best_ne
        trainer.save(folder)
        if better:
            self.best_ne, self.best_step = quality["ne"], trainer.step
            checkpoint.mark(folder, "best", trainer.step, valid_ne=self.best_ne)
        checkpoint.prune(folder)
        seconds = time.perf_counter() - began
        self.run_dir.log("valid", trainer.step, **quality, best=better, seconds=seconds, tasks=tasks)
        self.display.message(
            f"valid at step {trainer.step}: NE {quality['ne']:.4f}  AUC {quality['auc']:.4f}  "
            f"calibration {quality['calibration']:.3f}  ({seconds:.1f} s){'  best so far' if better else ''}"
        )

    def _no_ne(self, quality: dict[str, Any]) -> Exception:
        """Why the validation part has no NE: its labels, or the model."""
        if math.isfinite(quality["log_loss"]):
            return ValueError(
                f"validation part: got {quality['num_samples']} labels of one class (rate {quality['rate']}), "
                "expected both; NE does not exist there: use more data"
            )
        return RuntimeError(f"the predictions are not finite at step {self.trainer.step}; lower optimizer.lr")

    def _test(self, fitted: list[BaselineResult]) -> dict[str, Any]:
        """The best model on the test part, against the baselines."""
        trainer = self.trainer
        checkpoint.load_model(checkpoint.find(self.run_dir.checkpoints, "best"), trainer.model)
        predictions = evaluate(trainer.model, self.source, self.config, "test", trainer.device)
        tasks = task_table(predictions, trainer.schema.tasks)
        primary = trainer.schema.tasks[0]
        self.run_dir.log("test", self.best_step, **tasks[primary])
        return {
            "task": primary,
            "ne": tasks[primary]["ne"],
            "auc": tasks[primary]["auc"],
            "calibration": tasks[primary]["calibration"],
            **comparison(predictions, fitted, self.config.train.seed),
            "bayes_ne": self.source.bayes_ne("test")[primary] if isinstance(self.source, _PlantedSource) else None,
            "valid_ne": self.best_ne,
            "tasks": tasks,
            "best_step": self.best_step,
            "num_steps": trainer.step,
        }

    def _baselines(self) -> list[BaselineResult]:
        if not isinstance(self.source, BaselineSource):
            self.display.message(f"baselines: none: {self.config.data.source} data has no user and item to compare by")
            return []
        results: list[BaselineResult] = []
        for result in baselines(self.source):
            results.append(result)
            facts = as_dict(result)
            self.run_dir.log("baseline", 0, name=result.chosen.name, **facts)
            self.display.message(
                f"baseline {result.chosen.name}: test NE {facts['ne']:.4f}  AUC {facts['auc']:.4f}  "
                f"valid NE {facts['valid_ne']:.4f}"
            )
        return results

    def _announce(self) -> None:
        counts = ", ".join(f"{self.source.num_samples(split):,} {split}" for split in self.source.splits)
        facts = self._facts()
        self.display.message(f"data: {self.config.data.source}: {counts} samples")
        self.display.message(
            f"model: {self.config.preset}: {facts['num_dense_parameters']:,} dense and "
            f"{facts['num_table_parameters']:,} table parameters on {facts['device']}; "
            f"{self.trainer.total_steps} steps of {self.config.data.batch_size} samples"
        )

    def _facts(self) -> dict[str, Any]:
        model = self.trainer.model
        num_dense = sum(p.numel() for p in model.dense_parameters())
        num_table = sum(p.numel() for p in model.sparse_parameters())
        return run_facts(self.config, device_name(self.trainer.device), num_dense, num_table)

    def _speed(self) -> dict[str, Any]:
        """Means over all training steps; evaluations are not in them."""
        clock, seconds = self.trainer.total, max(self.trainer.total.seconds, 1e-9)
        peak = peak_flops_per_second(self.trainer.device)
        return {
            "samples_per_s": clock.num_samples / seconds,
            "tokens_per_s": clock.num_tokens / seconds,
            "flops_per_s": clock.flops / seconds,
            "mfu": mfu(clock.flops, seconds, peak_flops_per_second=peak) if peak else None,
            "step_ms": 1e3 * seconds / max(clock.num_steps, 1),
            "data_wait_ms": 1e3 * clock.wait_seconds / max(clock.num_steps, 1),
        }


@runtime_checkable
class _PlantedSource(Protocol):
    """A source that knows the true probabilities."""

    def bayes_ne(self, split: str) -> Mapping[str, float]:
        """By task."""
        ...
