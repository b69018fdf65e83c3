"""The course of one training run, from the data to the summary, in one go or in several.

In order: fit the baselines, train with an evaluation and a checkpoint now and then, take the model that was best on the
validation part, evaluate it on the test part, write the summary and the picture. A run folder that holds checkpoints is
gone on with from the newest whole one.

With several ranks each goes through all of it. What one process must do (baselines, judging predictions, files) the
first rank does, and the others learn its result or its failure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from gemworks.gem import checkpoint
from gemworks.gem import checkpoint_files as files
from gemworks.gem.baselines import BaselineResult, BaselineSource, as_dict, baselines
from gemworks.gem.config import GemConfig
from gemworks.gem.curve import draw
from gemworks.gem.data import Source
from gemworks.gem.device import device_name
from gemworks.gem.efficiency import mfu
from gemworks.gem.errors import Preempted
from gemworks.gem.evaluate import evaluate, task_table
from gemworks.gem.implement import explain_linears
from gemworks.gem.instruments import Traces, memory_snapshot
from gemworks.gem.metrics import Predictions
from gemworks.gem.numerics import NonFiniteError
from gemworks.gem.reporting import Display
from gemworks.gem.run_dir import RunDir
from gemworks.gem.signals import StopRequest
from gemworks.gem.summary import comparison, run_facts
from gemworks.gem.trainer import Trainer


class Run:
    """One run; `go` does it.

    Args:
        config: of the run.
        source: the data.
        trainer: model and optimizers, fresh.
        run_dir: where files go, claimed by this process, or followed by a rank after the first.
        display: where progress goes.
        stop: says when the scheduler wants the machine back.
    """

    def __init__(
        self,
        config: GemConfig,
        source: Source,
        trainer: Trainer,
        run_dir: RunDir,
        display: Display,
        stop: StopRequest | None = None,
    ) -> None:
        self.config = config
        self.source = source
        self.trainer = trainer
        self.run_dir = run_dir
        self.display = display
        self.stop = stop or StopRequest()
        self.ranks = trainer.ranks
        self.writer = checkpoint.Writer(run_dir.checkpoints, config.train.keep_last, self.ranks)
        self.best_ne = math.inf
        self.best_step = -1
        self.eval_seconds = 0.0
        self._eval_due = self._save_due = False
        self._saved_step = -1
        self._fitted: list[BaselineResult] = []  # on the first rank

    def go(self) -> dict[str, Any]:
        """Everything; returns the content of `summary.json`.

        Raises:
            Preempted: a SIGTERM came; the folder can be gone on with.
            NonFiniteError: too many steps were not finite; `non_finite.json` says more.
            CheckpointError: a checkpoint could not be written.
        """
        self._announce()
        if self.run_dir.resumed:
            self._resume()
        self.ranks.on_first(self._begin)
        self._train()
        best = self.ranks.on_first(lambda: checkpoint.find(self.run_dir.checkpoints, "best"))
        checkpoint.load_model(best, self.trainer.model, self.ranks)
        predictions = self._evaluate("test")
        return self.ranks.on_first(lambda: self._conclude(predictions))

    def _begin(self) -> None:
        self.run_dir.open_sinks()  # what is missing is missing now, not after the first lines
        self._fitted = self._baselines()

    def _conclude(self, predictions: Predictions) -> dict[str, Any]:
        """Judges the best model on the test part, against the baselines; writes the summary and the picture."""
        summary = self._judge(predictions) | {
            "train_seconds": self.trainer.total.seconds,
            "eval_seconds": self.eval_seconds,
            **self._speed(),
            **self._facts(),
        }
        self.run_dir.write_summary(summary)
        draw(self.run_dir.curve_path, self.run_dir.rows(), summary)
        return summary

    def _resume(self) -> None:
        """Goes to the newest whole checkpoint, or to the start if there is none yet."""
        found = self.ranks.on_first(lambda: checkpoint.newest_whole(self.run_dir.checkpoints, self.display.message))
        if found is not None:
            host = self.trainer.load(found)["run"]
            self.best_ne = math.inf if host["best_ne"] is None else host["best_ne"]
            self.best_step, self.eval_seconds = host["best_step"], host["eval_seconds"]
            self._eval_due = host["eval_due"]
            self._saved_step = self.trainer.step
            if not self.ranks.on_first(self._has_best):
                self.best_ne, self.best_step, self._eval_due = math.inf, -1, True
        self.run_dir.rewind(self.trainer.step)
        self.display.message(f"going on after step {self.trainer.step} of {self.trainer.total_steps}")

    def _has_best(self) -> bool:
        """Whether the best model that this run goes on with is there, or there was none yet. It becomes the one that
        `best.json` names: a run that was killed may have written a checkpoint and not yet that it is the best."""
        folder, step = self.run_dir.checkpoints, self.best_step
        if step < 0:
            return True
        path = files.step_dir(folder, step)
        try:
            if step != self.trainer.step:  # which has been read
                files.verify(path)
        except files.DamagedCheckpointError as error:
            kept = f"; it is kept as {files.set_aside(path).name}" if path.is_dir() else ""
            self.display.message(f"the best model so far, of step {step}, is lost ({error}{kept}): going on without it")
            return False
        if files.best_step(folder) != step:
            files.mark_best(folder, step, {"valid_ne": self.best_ne})
        return True

    def _train(self) -> None:
        trainer = self.trainer
        self.display.start(trainer.total_steps, trainer.step)
        own = self.run_dir.path if self.ranks.is_first else self.run_dir.path / f"rank_{self.ranks.rank}"
        traces = Traces(self.config.train, own / "profile", trainer.device, trainer.step)
        try:
            with memory_snapshot(own, trainer.device, history=self.config.train.memory_history):
                if self._eval_due:
                    self._validate()
                for step in trainer.steps():
                    traces.advance()
                    self.display.advance()
                    self._after_step(step)
            if self._eval_due:
                self._end_not_finite()
        except Preempted:
            self._save()
            raise
        except NonFiniteError as error:
            self._notes()
            self.run_dir.write_report("non_finite", error.report)
            raise
        finally:
            traces.close()
            self.writer.wait()
        self.display.stop()

    def _after_step(self, step: int) -> None:
        """Lines, evaluation and checkpoint; the latter two wait for a finite step (case P9)."""
        config, trainer = self.config.train, self.trainer
        self._notes()
        evaluates = step == trainer.total_steps or step % (config.eval_every or trainer.steps_per_epoch) == 0
        self._eval_due |= evaluates
        self._save_due |= config.save_every is not None and step % config.save_every == 0
        if evaluates or step % config.log_every == 0:
            row = trainer.take_row()
            self.run_dir.log("train", **row.as_dict())
            self.display.row(row)
        # asking waits for the device, so one process asks only when the answer matters; several ask alike
        asks = self._eval_due or self._save_due or self.stop.requested or not self.ranks.alone
        if asks and not trainer.last_step_finite:
            return
        if self._eval_due:
            self._validate()
        elif self._save_due:
            self._save()
        self.stop.check()

    def _notes(self) -> None:
        for note in self.trainer.take_notes():
            self.run_dir.log(note.kind, note.step, **note.facts)
            self.display.message(note.text)

    def _validate(self) -> None:
        """Evaluates on the validation part, remembers the best, and saves."""
        trainer = self.trainer
        began = time.perf_counter()
        predictions = self._evaluate("valid")
        tasks = self.ranks.on_first(lambda: task_table(predictions, trainer.schema.tasks))
        quality = tasks[trainer.schema.tasks[0]]
        if not math.isfinite(quality["ne"]):
            raise self._no_ne(quality)
        better = quality["ne"] < self.best_ne
        if better:
            self.best_ne, self.best_step = quality["ne"], trainer.step
        seconds = time.perf_counter() - began
        self.eval_seconds += seconds
        self._eval_due = False
        # the line first: a checkpoint says that everything before it has been logged
        self.run_dir.log("valid", trainer.step, **quality, best=better, seconds=seconds, tasks=tasks)
        self.display.message(
            f"valid at step {trainer.step}: NE {quality['ne']:.4f}  AUC {quality['auc']:.4f}  "
            f"calibration {quality['calibration']:.3f}  ({seconds:.1f} s){'  best so far' if better else ''}"
        )
        self._save(best={"valid_ne": self.best_ne} if better else None)

    def _evaluate(self, split: str) -> Predictions:
        trainer = self.trainer
        return evaluate(
            trainer.model,
            self.source,
            self.config,
            split,
            trainer.device,
            after_batch=self.stop.check,
            ranks=self.ranks,
        )

    def _save(self, best: dict[str, Any] | None = None) -> None:
        """Starts a checkpoint of the step done last, unless there is one or that step was not finite."""
        trainer = self.trainer
        self._save_due = False
        if not trainer.last_step_finite or (trainer.step == self._saved_step and best is None):
            return
        run = {
            "best_ne": self.best_ne if math.isfinite(self.best_ne) else None,
            "best_step": self.best_step,
            "eval_seconds": self.eval_seconds,
            "eval_due": self._eval_due,
        }
        self.writer.save(
            trainer.step, trainer.model, trainer.optimizers, {**trainer.host_state(), "run": run}, best=best
        )
        self._saved_step = trainer.step

    def _end_not_finite(self) -> None:
        """The last step was not finite: its evaluation and its checkpoint are left out."""
        text = f"the last step, {self.trainer.step}, is not finite: no evaluation and no checkpoint of it"
        if self.best_step < 0:
            raise NonFiniteError(
                f"{text}, and there is none before it; lower optimizer.lr", {"step": self.trainer.step}
            )
        self.display.message(f"{text}; the best one before stays the best")

    def _no_ne(self, quality: dict[str, Any]) -> Exception:
        """Why the validation part has no NE: its labels, or the model."""
        if math.isfinite(quality["log_loss"]):
            return ValueError(
                f"validation part: got {quality['num_samples']} labels of one class (rate {quality['rate']}), "
                "expected both; NE does not exist there: use more data"
            )
        return RuntimeError(f"the predictions are not finite at step {self.trainer.step}; lower optimizer.lr")

    def _judge(self, predictions: Predictions) -> dict[str, Any]:
        trainer = self.trainer
        tasks = task_table(predictions, trainer.schema.tasks)
        primary = trainer.schema.tasks[0]
        self.run_dir.log("test", self.best_step, **tasks[primary])
        return {
            "task": primary,
            "ne": tasks[primary]["ne"],
            "auc": tasks[primary]["auc"],
            "calibration": tasks[primary]["calibration"],
            **comparison(predictions, self._fitted, self.config.train.seed),
            "bayes_ne": self.source.bayes_ne("test")[primary] if isinstance(self.source, _PlantedSource) else None,
            "valid_ne": self.best_ne,
            "tasks": tasks,
            "best_step": self.best_step,
            "num_steps": trainer.step,
            "num_skipped": trainer.num_skipped,
        }

    def _baselines(self) -> list[BaselineResult]:
        if not isinstance(self.source, BaselineSource):
            self.display.message(f"baselines: none: {self.config.data.source} data has no user and item to compare by")
            return []
        results: list[BaselineResult] = []
        logged = {row["name"] for row in self.run_dir.rows("baseline")}
        for result in baselines(self.source):
            self.stop.check(alone=True)
            results.append(result)
            facts = as_dict(result)
            if result.chosen.name not in logged:
                self.run_dir.log("baseline", 0, name=result.chosen.name, **facts)
            self.display.message(
                f"baseline {result.chosen.name}: test NE {facts['ne']:.4f}  AUC {facts['auc']:.4f}  "
                f"valid NE {facts['valid_ne']:.4f}"
            )
        return results

    def _announce(self) -> None:
        counts = ", ".join(f"{self.source.num_samples(split):,} {split}" for split in self.source.splits)
        facts = self._facts()
        self.display.message(f"run folder: {self.run_dir.path} (started with this folder again, a stopped run goes on)")
        self.display.message(f"data: {self.config.data.source}: {counts} samples")
        self.display.message(
            f"model: {self.config.preset}: {facts['num_dense_parameters']:,} dense and "
            f"{facts['num_table_parameters']:,} table parameters on {facts['device']}; "
            f"{self.trainer.total_steps} steps of {self.config.data.batch_size * self.config.train.accumulate} samples"
        )
        if self.trainer.linears is not None:
            self.run_dir.write_linears(self.trainer.linears.to_toml())
            chosen = explain_linears(self.trainer.model)
            self.display.message(f"linears as a probe chose ({self.run_dir.linears_path.name}): {chosen}")
        if not self.ranks.alone:
            self.display.message(f"ranks: {self.ranks.world_size}; each takes its part of every batch")

    def _facts(self) -> dict[str, Any]:
        trainer = self.trainer
        facts = run_facts(
            self.config, device_name(trainer.device), trainer.num_dense_parameters, trainer.num_table_parameters
        )
        return facts | {"num_ranks": self.ranks.world_size}

    def _speed(self) -> dict[str, Any]:
        """Means over all training steps; evaluations are not in them."""
        clock, seconds = self.trainer.total, max(self.trainer.total.seconds, 1e-9)
        peak = self.trainer.peak_flops_per_second()
        return {
            "samples_per_s": clock.num_samples / seconds,
            "tokens_per_s": clock.num_tokens / seconds,
            "flops_per_s": clock.flops / seconds,
            "mfu": mfu(clock.flops, seconds, peak_flops_per_second=peak) if peak else None,
            "step_ms": 1e3 * seconds / max(clock.num_steps, 1),
            "data_wait_ms": clock.per_step_ms("wait"),
            "forward_ms": clock.per_step_ms("forward"),
            "backward_ms": clock.per_step_ms("backward"),
            "optimizer_ms": clock.per_step_ms("optimizer"),
        }


@runtime_checkable
class _PlantedSource(Protocol):
    """A source that knows the true probabilities."""

    def bayes_ne(self, split: str) -> Mapping[str, float]:
        """By task."""
        ...
