"""What a GEM learns from: one log-loss per task, and the tasks' weights.

Shapes: B samples of a batch, K tasks.
"""

from __future__ import annotations

import torch
from gemworks.gem.config import GemConfig
from torch import Tensor
from torch.nn import functional


def task_loss(logits_BK: Tensor, labels_BK: Tensor, weights_K: Tensor) -> Tensor:
    """Weighted mean over tasks of each task's mean log-loss; 0 for an empty batch.

    >>> import math
    >>> task_loss(torch.zeros(3, 2), torch.ones(3, 2), torch.ones(2)).item() == math.log(2)
    False
    >>> round(task_loss(torch.zeros(3, 2), torch.ones(3, 2), torch.tensor([3.0, 1.0])).item(), 4)
    0.6931
    """
    losses_BK = functional.binary_cross_entropy_with_logits(logits_BK, labels_BK, reduction="none")
    return (losses_BK.sum(0) * weights_K).sum() / (max(logits_BK.shape[0], 1) * weights_K.sum())


def task_weights(config: GemConfig, num_tasks: int) -> Tensor:
    """`train.task_weights` as a tensor [K]; ones where none are set.

    Raises:
        ValueError: they are not one per task.
    """
    weights = config.train.task_weights
    if weights is None:
        return torch.ones(num_tasks)
    if len(weights) != num_tasks:
        raise ValueError(
            f"train.task_weights: got {len(weights)} weights, expected {num_tasks}, one per task of the data's schema"
        )
    return torch.tensor(weights, dtype=torch.float32)
