"""Optimizers of the two kinds of parameters and their common schedule.

Dense: AdamW. Embedding tables: row-wise Adagrad, one accumulator per row. In one process the tables are plain modules
and their optimizer steps like any other, after the gradients have been seen whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gemworks.gem.config import OptimizerConfig
from gemworks.gem.model.gem import Gem
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import AdamW, Optimizer


def learning_rate_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """What both learning rates are multiplied with in step `step` (from 0): linear warm-up, then constant or half a
    cosine to 0.

    >>> config = OptimizerConfig(warmup_steps=2, decay="cosine")
    >>> [round(learning_rate_factor(s, config, 6), 3) for s in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
    return 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


class Optimizers:
    """AdamW for `model.dense_parameters()` and row-wise Adagrad for `model.sparse_parameters()`.

    Args:
        model: the model; its parameters keep their identity.
        config: learning rates, decay, clipping.
        total_steps: where the schedule ends.
    """

    def __init__(self, model: Gem, config: OptimizerConfig, total_steps: int) -> None:
        # torchrec takes seconds to import, and a command line that only prints help must not pay for it
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        self.config = config
        self.total_steps = total_steps
        self._model = model
        self._dense = [p for p in model.dense_parameters() if p.requires_grad]
        matrices = [p for p in self._dense if p.ndim >= 2]
        vectors = [p for p in self._dense if p.ndim < 2]
        dense = AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
        )
        tables = RowWiseAdagrad(list(model.sparse_parameters()), lr=config.sparse_lr, eps=1e-8)
        self.optimizers: list[Optimizer] = [dense, tables]
        self._peak = (config.lr, config.sparse_lr)
        # A checkpoint is read into existing tensors, so they exist from the start, also for a parameter without a
        # gradient.
        for p in self._dense:
            dense.state[p] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
            }

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self, step: int) -> Tensor:
        """Clips the dense gradient and updates everything with the learning rates of step `step`.

        Returns:
            Norm of the dense gradient before clipping, float32 scalar on the device. Tables are not clipped: Adagrad
            already divides by the gradient's own size, and a fused table update could not be scaled afterwards.
        """
        factor = learning_rate_factor(step, self.config, self.total_steps)
        for optimizer, peak in zip(self.optimizers, self._peak, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        norm = nn.utils.clip_grad_norm_(self._dense, self.config.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        return norm

    def learning_rates(self) -> tuple[float, float]:
        """Dense and sparse learning rate of the step done last."""
        dense, tables = (float(optimizer.param_groups[0]["lr"]) for optimizer in self.optimizers)
        return dense, tables

    def state_dict(self) -> dict[str, Any]:
        """Keyed by parameter name, so that it does not depend on the order of parameters."""
        return get_optimizer_state_dict(self._model, self.optimizers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self._model, self.optimizers, optim_state_dict=state)
