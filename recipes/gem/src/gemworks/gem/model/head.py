"""From the last layer's tokens and sequences to logits.

Letters: B samples, n tokens, t head tokens, D width, K tasks.
"""

from __future__ import annotations

from typing import Any

import torch
from gemworks.gem.config import EventSizes, ModelConfig
from gemworks.gem.kernels import KernelConfig
from gemworks.gem.model.events import Sequence
from gemworks.gem.model.layers import Mlp, TokenMap, unit_rms
from gemworks.gem.model.norms import rms_norm
from gemworks.jagged import mean_pool
from torch import Tensor, nn


class Head(nn.Module):
    """`logits = mlp([W x || mean(norm(s_e)) for each event type e])`: tokens mapped to t, sequences averaged.

    The sequences enter here because the last layer's sequence block has no later summary that would read it.
    """

    def __init__(
        self,
        num_tokens: int,
        events: list[EventSizes],
        num_tasks: int,
        config: ModelConfig,
        kernels: KernelConfig,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.pool = TokenMap(num_tokens, config.head_tokens, device=device)
        num_in = config.head_tokens * config.dim + sum(sizes.dim for sizes in events)
        # Logits start near 0: the first steps learn the base rate, not to undo noise.
        self.mlp = Mlp(num_in, config.head_hidden_dim, num_tasks, gain=0.1, device=device)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BnD: Tensor, sequences: list[Sequence]) -> Tensor:
        parts = [unit_rms(self.pool(x_BnD)).flatten(1)]
        parts += [_mean(rms_norm(s.summed().s_TD, self.kernels.norm), s) for s in sequences]
        return self.mlp(self.dropout(torch.cat([part.to(parts[0].dtype) for part in parts], dim=1)))


class _MeanPool(torch.autograd.Function):
    """`mean_pool`, whose gradient is written once, in the rows' dtype: to every row its sample's, over the length.

    The same bits as through `mean_pool`'s float32, in fewer passes over the rows.
    """

    @staticmethod
    def forward(ctx: Any, s_TD: Tensor, offsets_S: Tensor) -> Tensor:
        ctx.save_for_backward(offsets_S)
        ctx.total, ctx.dtype = s_TD.shape[0], s_TD.dtype
        return mean_pool(s_TD, offsets_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (offsets_S,) = ctx.saved_tensors
        lengths_B = offsets_S.diff()
        wide = torch.promote_types(ctx.dtype, torch.float32)
        grad_BD = (grads[0].to(wide) / lengths_B.clamp(min=1)[:, None]).to(ctx.dtype)
        return torch.repeat_interleave(grad_BD, lengths_B, dim=0, output_size=ctx.total), None


@torch.compiler.allow_in_graph  # Dynamo's own way through an autograd function makes an instance of it, and warns
def _mean_pool(s_TD: Tensor, offsets_S: Tensor) -> Tensor:
    out = _MeanPool.apply(s_TD, offsets_S)
    assert isinstance(out, Tensor)
    return out


def _mean(s_TD: Tensor, sequence: Sequence) -> Tensor:
    """Mean of each sample's real rows, [B, D]; 0 for none."""
    if sequence.lengths_B is None:
        return _mean_pool(s_TD, sequence.offsets_S)
    rows_BLD = s_TD.view(-1, sequence.max_length, s_TD.shape[-1])
    row_L = torch.arange(sequence.max_length, device=s_TD.device)
    inside_BL = (row_L < sequence.lengths_B[:, None]).float()
    summed_BD = torch.where(inside_BL[..., None] > 0, rows_BLD.float(), 0).sum(1)
    return summed_BD / sequence.lengths_B.clamp(min=1)[:, None]
