"""The `optimizer` and `train` sections: learning rates, how long, on what, and what is reported. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gemworks.gem.config_checks import check, check_counts, check_finite


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW for the dense part, row-wise Adagrad for the tables.

    Attributes:
        lr: peak learning rate of the dense part.
        weight_decay: of the dense part.
        betas: of AdamW.
        sparse_lr: learning rate of the embedding tables.
        warmup_steps: steps of linear warm-up.
        decay: shape of the schedule after the warm-up.
        clip_norm: largest norm of the dense gradient.
        state_place: where AdamW's two moments are between steps: on the device, or parked in the host's memory
            (gemworks.netmem), which the step waits for twice. One process only, and without CUDA graphs.
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    sparse_lr: float = 1e-2
    warmup_steps: int = 100
    decay: Literal["constant", "cosine"] = "cosine"
    clip_norm: float = 1.0
    state_place: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        for name in ("lr", "sparse_lr", "clip_norm"):
            value = getattr(self, name)
            check(value > 0, f"optimizer.{name}", value, "a positive number")
        check(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "a number, 0 or more")
        check(all(0 <= b < 1 for b in self.betas), "optimizer.betas", self.betas, "two numbers in [0, 1)")
        check_counts("optimizer", self, "warmup_steps", least=0)
        check_finite("optimizer", self)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, where, and what to report.

    Attributes:
        epochs: passes over the training part.
        max_steps: stop earlier after this many steps.
        seed: of initialisation and dropout.
        device: "auto" takes a GPU if there is one.
        dtype: autocast dtype of the dense part.
        log_every: steps between two log lines.
        eval_every: steps between two evaluations; None: at the end of each epoch.
        task_weights: weight of each task's loss; None: all 1.
        accumulate: batches per step; the dense gradient is the mean over the samples of all of them.
        compile: torch.compile of feature tokens, interactions, gates and the head's MLP, or of what
            `kernels.compile_scope` names.
        cuda_graphs: forward and backward of everything but the tables are replayed as CUDA graphs, one per bucket of
            packed rows; the batch is padded to its bucket with samples that no loss sees. On a CPU it is only padded.
        graph_memory: "own": every graph keeps its own inputs and gradients (of the dense parameters, 4 bytes each, and
            of the tables' rows); "shared": all read and write the same, and one graph more costs next to nothing.
        save_every: steps between two checkpoints; None: after each evaluation.
        keep_last: newest checkpoints kept beside the best one.
        max_skipped: steps with a loss or gradient that is not finite are skipped, up to this many in a run.
        spike_factor: a loss above this multiple of its running mean is logged as a spike.
        profile_every: steps between two profiler traces; None: none.
        profile_steps: steps in a trace.
        memory_history: remembers where GPU memory was allocated, for the snapshot that running out of it writes.
        rank_timeout_seconds: of several processes: how long a collective waits for a rank that does not come, before
            the run stops and says which it is. A rank that dies is noticed at once.
        wandb_project: project of Weights & Biases to report to as well; its WANDB_MODE=offline works.
    """

    epochs: int = 1
    max_steps: int | None = None
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    log_every: int = 20
    eval_every: int | None = None
    task_weights: tuple[float, ...] | None = None
    accumulate: int = 1
    compile: bool = False
    cuda_graphs: bool = False
    graph_memory: Literal["own", "shared"] = "own"
    save_every: int | None = None
    keep_last: int = 2
    max_skipped: int = 10
    spike_factor: float = 3.0
    profile_every: int | None = None
    profile_steps: int = 2
    memory_history: bool = False
    rank_timeout_seconds: int = 300
    wandb_project: str | None = None

    def __post_init__(self) -> None:
        check_counts("train", self, "epochs log_every accumulate keep_last profile_steps rank_timeout_seconds")
        check_counts("train", self, "max_steps eval_every save_every", optional=True)
        check_counts("train", self, "max_skipped", least=0)
        check(self.spike_factor > 1, "train.spike_factor", self.spike_factor, "a number above 1")
        check(
            self.profile_every is None or self.profile_every > self.profile_steps,
            "train.profile_every",
            self.profile_every,
            f"more than train.profile_steps = {self.profile_steps}, or 'none'",
        )
        weights = self.task_weights
        check(
            weights is None or (len(weights) > 0 and all(w >= 0 for w in weights) and sum(weights) > 0),
            "train.task_weights",
            weights,
            "one number per task, 0 or more, not all 0",
        )
        check_finite("train", self)
