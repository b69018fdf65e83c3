"""A model in training: a step, its figures, and everything a checkpoint must hold.

With several ranks each has a part of every step's samples. Loss, gradient norm, counts and metrics are those of the
whole step on every rank, so that all ranks decide alike; times are the rank's own.

Shapes: B samples of a batch, K tasks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gemworks.gem import checkpoint
from gemworks.gem.communication import CommunicationProbe
from gemworks.gem.config import GemConfig
from gemworks.gem.data import Source, open_loader
from gemworks.gem.data.hashing import hash_u64
from gemworks.gem.device import autocast, peak_flops_per_second
from gemworks.gem.efficiency import count_batch_flops, mfu
from gemworks.gem.graphs import GraphedStep
from gemworks.gem.implement import PROBE, ProbedLoss, implement, probe_linears
from gemworks.gem.loss import task_loss, task_weights
from gemworks.gem.metrics import BinaryMetrics
from gemworks.gem.model.gem import Gem
from gemworks.gem.numerics import (
    NonFiniteError,
    SpikeWatch,
    describe_ids,
    first_non_finite,
    first_non_finite_input,
    is_finite,
)
from gemworks.gem.optim import Optimizers
from gemworks.gem.ranks import Ranks
from gemworks.gem.reporting import StepRow
from gemworks.gem.schema import Batch
from gemworks.gem.timing import PhaseTimer, StepClock
from torch import Tensor, nn

if TYPE_CHECKING:
    from gemworks.precision import Recipe


def rank_seed(seed: int, rank: int) -> int:
    """The seed of what a rank draws for itself, such as dropout; ranks and neighbouring seeds share none.

    >>> len({rank_seed(seed, rank) for seed in range(9) for rank in range(9)})
    81
    """
    return int(hash_u64(seed, rank)[0]) >> 1


@dataclass(frozen=True)
class Note:
    """Something that happened in a step and is worth a line: "skipped" or "spike"."""

    kind: str
    step: int
    facts: dict[str, Any]
    text: str


@dataclass
class _Launched:
    """A step on its way: what it learns from, and figures of the device: loss, norm, refusals, then `_counts`."""

    step: int
    batches: list[Batch]
    rng: dict[str, Tensor]
    outcomes: list[tuple[Tensor, Tensor]]
    figures: Tensor
    arrival: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Starts the figures' way to the host."""
        if self.figures.device.type == "cuda":
            pinned = torch.empty(self.figures.shape, dtype=self.figures.dtype, pin_memory=True)
            self.figures = pinned.copy_(self.figures, non_blocking=True)
            self.arrival = torch.cuda.Event()
            self.arrival.record()

    def values(self) -> list[float]:
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.figures.tolist()


class Trainer:
    """Model, optimizers and the training part's loader.

    Args:
        config: of the run.
        source: the data.
        device: where the model lives.
        ranks: this process among those that train together. All of them make a trainer, and do everything with it
            together: a step, a row of figures, a save.
        linears: what a probe chose before in this run, with `kernels.linears="probe"`; None: it probes.

    Attributes:
        linears: what the probe chose; None where nothing is probed.
        num_dense_parameters, num_table_parameters: of the whole model.
    """

    def __init__(
        self,
        config: GemConfig,
        source: Source,
        device: torch.device,
        ranks: Ranks | None = None,
        linears: Recipe | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.ranks = ranks or Ranks()
        self.schema = source.schema
        torch.manual_seed(config.train.seed)
        self.model = Gem(source.schema, config, device=device)
        self.linears: Recipe | None = None
        if config.kernels.linears == PROBE:
            self._check_probe()
            self.linears = linears or probe_linears(self.model, config.kernels, self._probed_loss(source))
        implement(self.model, config, self.linears)
        if config.train.cuda_graphs and not self.ranks.alone:
            raise ValueError(
                f"train.cuda_graphs: got True in {self.ranks.world_size} processes, expected one: a graph would hold "
                "FSDP's collectives; set train.cuda_graphs=false"
            )
        self.num_dense_parameters = sum(p.numel() for p in self.model.dense_parameters())
        self.num_table_parameters = sum(p.numel() for p in self.model.sparse_parameters())
        spread = None
        if not self.ranks.alone:
            from gemworks.gem.parallelize import parallelize  # seconds to import, and one process has no use for it

            spread = parallelize(self.model, config, self.ranks, device)
            self.model.embeddings.min_samples = config.data.batch_size // self.ranks.world_size  # one size on all ranks
            # one seed made equal models; from here on each rank draws its own dropout
            torch.manual_seed(rank_seed(config.train.seed, self.ranks.rank))
        self.loader = open_loader(
            source,
            config.data,
            "train",
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            pin_memory=device.type == "cuda",
        )
        self.steps_per_epoch = -(-len(self.loader) // config.train.accumulate)
        self.total_steps = self.steps_per_epoch * config.train.epochs
        if config.train.max_steps is not None:
            self.total_steps = min(self.total_steps, config.train.max_steps)
        self.optimizers = Optimizers(self.model, config.optimizer, self.total_steps, spread)
        self.step = 0
        self.total = StepClock()
        self.num_skipped = 0
        self._last_step_finite = True
        self._launched: _Launched | None = None
        num_tasks = len(source.schema.tasks)
        self._weights_K = task_weights(config, num_tasks).to(device)
        self._graphs = GraphedStep(self.model, config, self._loss, device) if config.train.cuda_graphs else None
        self._phase = PhaseTimer(device)
        self._communication = CommunicationProbe(device, alone=self.ranks.alone)
        self._spikes = SpikeWatch(config.train.spike_factor)
        self._notes: list[Note] = []
        self._window = StepClock()
        self._window_metrics = BinaryMetrics(num_tasks, device)
        self._window_loss = 0.0
        self._window_skipped = 0
        self._grad_norm = 0.0
        self._num_step_samples = 0

    def _check_probe(self) -> None:
        if not self.ranks.alone:
            raise ValueError(
                f"kernels.linears: got 'probe' in {self.ranks.world_size} processes, expected one: ranks would choose "
                "differently; name a recipe such as 'fp8_block128'"
            )

    def _probed_loss(self, source: Source) -> ProbedLoss:
        """The loss of a model on the first batch, which the training's own loader gives once more."""
        batch = next(iter(open_loader(source, self.config.data, "train"))).to(self.device)
        weights_K = task_weights(self.config, len(source.schema.tasks)).to(self.device)

        def loss_of(model: nn.Module) -> Tensor:
            with autocast(self.config, self.device):
                logits_BK = model(batch)
            return task_loss(logits_BK, batch.labels_BK, weights_K)

        return loss_of

    def steps(self) -> Iterator[int]:
        """Trains to the end of the run, one step per iteration; yields the number of steps done.

        Raises:
            NonFiniteError: more than `train.max_skipped` steps of the run had a loss or gradient that is not finite.
        """
        self.model.train()
        mark = time.perf_counter()
        while self.step < self.total_steps:
            batches = iter(self.loader)
            before = self.loader.num_given
            while group := list(itertools.islice(batches, self.config.train.accumulate)):
                self._num_step_samples, before = self.loader.num_given - before, self.loader.num_given
                now = time.perf_counter()
                self._window.wait_seconds += now - mark
                with self._communication():
                    self._train_step(group)
                    if self.step >= self.total_steps:
                        self.settle()
                self._window.work_seconds += time.perf_counter() - now
                yield self.step
                if self.step >= self.total_steps:
                    return
                mark = time.perf_counter()

    def _train_step(self, batches: list[Batch]) -> None:
        self.optimizers.begin(self.step)
        gate = self.model.embeddings.gate
        gate.reset()
        rng = checkpoint.rng_state()
        loss = torch.zeros((), device=self.device)
        outcomes: list[tuple[Tensor, Tensor]] = []
        for host_batch in batches:
            batch = host_batch.to(self.device, non_blocking=True)
            with self._phase("forward"):
                # By its share of the samples, so that the sum is the mean over all of them. Gradients are averaged over
                # the ranks, so the share is of what one rank has on average.
                share = batch.num_samples * self.ranks.world_size / max(self._num_step_samples, 1)
                if self._graphs is not None and self._graphs.takes(batch):
                    logits_BK, part, backward = self._graphs(batch, share)
                else:
                    logits_BK, part = self._forward(batch)
                    part = part if share == 1 else part * share
                    backward = part.backward
            with self._phase("backward"):
                backward()
            loss += part.detach()
            outcomes.append((logits_BK.detach(), batch.labels_BK))
        with self._phase("optimizer"):
            norm = self.optimizers.clip()
            refused = torch.zeros_like(norm) if gate.finite is None else (~gate.finite).to(norm.dtype)
            counts = [torch.full((), n, dtype=torch.float64, device=self.device) for n in self._counts(batches)]
            figures = self.ranks.sum(torch.stack([*(x.double() for x in (loss, norm, refused)), *counts]))
            if self.optimizers.skips_on_device:
                self.optimizers.step_dense(skip=~figures[:2].isfinite().all() | (figures[2] != 0))
            else:
                figures = figures.cpu()  # whether this step counts must be known before it ends
                if _counts_as_step(figures.tolist()):
                    self.optimizers.step_dense()
        self.step += 1
        launched = _Launched(self.step, batches, rng, outcomes, figures)
        if not self.optimizers.skips_on_device:
            self._settle(launched)
            return
        # The device decides by itself whether the step counts. So the host looks at the step before, and this one keeps
        # the device busy meanwhile.
        launched.fetch()
        self.settle()
        self._launched = launched

    def settle(self) -> None:
        """Waits for the step begun last and counts it; figures, notes and checkpoints do so first.

        Raises:
            NonFiniteError: it was one too many that is not finite.
        """
        launched, self._launched = self._launched, None
        if launched is not None:
            self._settle(launched)

    def _settle(self, launched: _Launched) -> None:
        figures = launched.values()  # the one place where the host waits for the device
        loss_value, norm_value, _, *totals = figures
        self._last_step_finite = _counts_as_step(figures)
        self._add_counts(totals)
        loss_value /= self.ranks.world_size
        norm_value /= self.ranks.world_size  # it is the whole gradient's on each rank
        if not self._last_step_finite:
            self._skip(launched, loss_value, norm_value)
            return
        self._grad_norm = norm_value
        self._window_loss += loss_value
        for logits_BK, labels_BK in launched.outcomes:
            self._window_metrics.update(logits_BK, labels_BK)
        self._watch(launched, loss_value)

    @property
    def last_step_finite(self) -> bool:
        """Whether the step begun last changed the model."""
        self.settle()
        return self._last_step_finite

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [B, K] and the loss."""
        with autocast(self.config, self.device):
            logits_BK = self.model(batch)
        return logits_BK, self._loss(logits_BK, batch.labels_BK)

    def _loss(self, logits_BK: Tensor, labels_BK: Tensor) -> Tensor:
        return task_loss(logits_BK, labels_BK, self._weights_K)

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Captures the graphs that these batches will need; without `train.cuda_graphs` nothing."""
        if self._graphs is not None:
            for batch in sorted(batches, key=lambda b: -sum(e.timestamps_T.shape[0] for e in b.events.values())):
                self._graphs.prepare(batch.to(self.device))

    def _counts(self, batches: list[Batch]) -> list[float]:
        """Samples, tokens and training FLOPs of this rank's batches."""
        return [
            sum(batch.num_samples for batch in batches),
            sum(e.timestamps_T.shape[0] for batch in batches for e in batch.events.values()),
            sum(count_batch_flops(self.config, self.schema, batch).training for batch in batches),
        ]

    def _add_counts(self, totals: list[float]) -> None:
        num_samples, num_tokens, flops = totals
        self._window.num_steps += 1
        self._window.num_samples += int(num_samples)
        self._window.num_tokens += int(num_tokens)
        self._window.flops += flops

    def _watch(self, launched: _Launched, loss: float) -> None:
        ratio = self._spikes.see(loss)
        if ratio is None:
            return
        ids, step = self._sample_ids(launched.batches), launched.step
        text = f"loss spike in step {step}: {loss:.4f}, {ratio:.1f} times its running mean; samples "
        self._note("spike", step, {"loss": loss, "ratio": ratio, "sample_ids": ids}, text + describe_ids(ids))

    def _skip(self, launched: _Launched, loss: float, norm: float) -> None:
        """Counts a step that changed nothing, and ends the run when there were too many."""
        self.num_skipped += 1
        self._window_skipped += 1
        step, ids = launched.step, self._sample_ids(launched.batches)
        facts = {"loss": loss, "grad_norm": norm, "num_skipped": self.num_skipped, "sample_ids": ids}
        what = f"loss {loss:.4g}, gradient norm {norm:.4g}, samples {describe_ids(ids)}"
        limit = self.config.train.max_skipped
        if self.num_skipped <= limit:
            text = f"step {step} is not finite and is skipped ({self.num_skipped} of at most {limit}): {what}"
            self._note("skipped", step, facts, text)
            return
        where, culprits = self._search(launched.batches, launched.rng)
        begins = where or "nowhere when the step is run once more"
        raise NonFiniteError(
            f"step {step} is not finite, and {limit} steps of this run have been skipped already: {what}. "
            f"It begins at: {begins}. Lower optimizer.lr or optimizer.sparse_lr, lengthen optimizer.warmup_steps, "
            "or look at these samples",
            {"step": step, **facts, "first_non_finite": where, "non_finite_sample_ids": culprits},
        )

    def _search(self, batches: list[Batch], rng: dict[str, Tensor]) -> tuple[str | None, list[int]]:
        """Runs the step once more with hooks: where it begins, and the samples whose own logits are not finite.

        Every rank runs all of it, whatever it finds, because others wait for it in between; the first that found
        something is believed.
        """
        gate = self.model.embeddings.gate
        gate.closed = True
        found: list[tuple[str, list[int]]] = []
        try:
            checkpoint.set_rng_state(rng)
            for host_batch in batches:
                in_data = first_non_finite_input(host_batch, self.schema.dense_names)
                batch = host_batch.to(self.device)
                in_model = first_non_finite(self.model, lambda batch=batch: self._forward(batch)[1])
                with torch.no_grad():
                    bad_B = ~torch.isfinite(self._forward(batch)[0]).all(1)
                where = in_data or in_model
                if where is not None:
                    found.append((where, host_batch.sample_ids_B[bad_B.cpu()].tolist()))
        finally:
            gate.closed = False
        for rank, places in enumerate(self.ranks.gather(found[:1])):
            for where, culprits in places:
                return where if self.ranks.alone else f"{where} on rank {rank}", culprits
        return None, []

    def _sample_ids(self, batches: list[Batch]) -> list[int]:
        own = [i for batch in batches for i in batch.sample_ids_B.tolist()]
        return [i for ids in self.ranks.gather(own) for i in ids]

    def _note(self, kind: str, step: int, facts: dict[str, Any], text: str) -> None:
        self._notes.append(Note(kind, step, facts, text))

    def take_notes(self) -> list[Note]:
        """What happened since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def take_row(self) -> StepRow:
        """The figures since the last call. Skipped steps are in its times, not in its loss and NE."""
        before = time.perf_counter()
        self.settle()
        for phase, seconds in self._phase.drain().items():
            name = f"{phase}_seconds"
            setattr(self._window, name, getattr(self._window, name) + seconds)
        self._window.work_seconds += time.perf_counter() - before  # on a GPU `drain` waits for the step done last
        window, seconds = self._window, max(self._window.seconds, 1e-9)
        peak = self.peak_flops_per_second()
        lr, sparse_lr = self.optimizers.learning_rates()
        communication = self._communication.last
        num_counted = window.num_steps - self._window_skipped
        row = StepRow(
            step=self.step,
            total_steps=self.total_steps,
            loss=self._window_loss / num_counted if num_counted else float("nan"),
            ne=self._all_metrics().compute()[0].ne,
            samples_per_s=window.num_samples / seconds,
            tokens_per_s=window.num_tokens / seconds,
            flops_per_s=window.flops / seconds,
            mfu=mfu(window.flops, seconds, peak_flops_per_second=peak) if peak else None,
            step_ms=1e3 * seconds / max(window.num_steps, 1),
            data_wait_ms=window.per_step_ms("wait"),
            forward_ms=window.per_step_ms("forward"),
            backward_ms=window.per_step_ms("backward"),
            optimizer_ms=window.per_step_ms("optimizer"),
            communication_ms=communication and communication.ms,
            exposed_communication_ms=communication and communication.exposed_ms,
            lr=lr,
            sparse_lr=sparse_lr,
            grad_norm=self._grad_norm,
            num_skipped=self.num_skipped,
        )
        self.total.add(window)
        self._window = StepClock()
        self._window_metrics.reset()
        self._window_loss = 0.0
        self._window_skipped = 0
        return row

    def peak_flops_per_second(self) -> float | None:
        """Of all ranks together; None for devices whose peak we do not state."""
        peak = peak_flops_per_second(self.device)
        return peak and peak * self.ranks.world_size

    def _all_metrics(self) -> BinaryMetrics:
        """The metrics since the last row, of all ranks."""
        metrics = BinaryMetrics(self._window_metrics.num_tasks, self.device)
        metrics.merge(self._window_metrics)
        if not self.ranks.alone:
            counts = torch.tensor([metrics.num_samples], dtype=torch.float64, device=self.device)
            sums = self.ranks.sum(torch.cat([metrics.sums_3K.reshape(-1), counts]))
            metrics.sums_3K, metrics.num_samples = sums[:-1].view_as(metrics.sums_3K), int(sums[-1])
        return metrics

    def host_state(self) -> dict[str, Any]:
        """Everything of this trainer that is not a tensor of the model or its optimizers, as JSON."""
        self.settle()
        metrics = self._all_metrics().state_dict()
        return {
            "loader": self.loader.state_dict(),
            "clock": vars(self.total),
            "num_skipped": self.num_skipped,
            "spikes": self._spikes.state_dict(),
            "window": {
                "clock": vars(self._window),
                "loss": self._window_loss,
                "skipped": self._window_skipped,
                "metrics": {"sums": torch.as_tensor(metrics["sums"]).tolist(), "num_samples": metrics["num_samples"]},
            },
        }

    def save(self, folder: Path) -> Path:
        """A checkpoint after the step done last; waits until it is written."""
        return checkpoint.save(folder, self.step, self.model, self.optimizers, self.host_state(), ranks=self.ranks)

    def load(self, path: Path) -> dict[str, Any]:
        """Goes on where a checkpoint was saved; returns the host's state, in which the caller may have things too."""
        host = checkpoint.load(path, self.model, self.optimizers, self.ranks)
        self.loader.load_state_dict(host["loader"])
        self.step = int(host["step"])
        vars(self.total).update(host["clock"])
        self.num_skipped = int(host["num_skipped"])
        self._spikes.load_state_dict(host["spikes"])
        window = host["window"]
        vars(self._window).update(window["clock"])
        self._window_loss, self._window_skipped = float(window["loss"]), int(window["skipped"])
        metrics = window["metrics"]
        self._window_metrics.reset()
        if self.ranks.is_first:  # they are of all ranks, which add theirs up again
            self._window_metrics.load_state_dict(
                {"sums": torch.tensor(metrics["sums"], dtype=torch.float64), "num_samples": metrics["num_samples"]}
            )
        return host


def _counts_as_step(figures: list[float]) -> bool:
    """Of loss, gradient norm and refusals of the gate: all finite, and none refused."""
    loss, norm, num_refused, *_ = figures
    return is_finite(loss, norm) and num_refused == 0
