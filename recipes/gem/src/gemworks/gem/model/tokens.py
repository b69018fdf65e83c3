"""Non-sequence features to F tokens.

Letters: B samples, C dense columns, n id features of the sample, m tokens made from dense columns, W embedding width,
F tokens, D width.
"""

from __future__ import annotations

import math

import torch
from gemworks.gem.config import ModelConfig
from gemworks.gem.model.layers import Mlp, TokenMap, normal, unit_rms
from torch import Tensor, nn


class FeatureTokens(nn.Module):
    """`x = RMSNorm(W [project(embeddings) || mlp(dense)] + bias)`: `[B, n, W]` and `[B, C]` to `x_BFD`.

    Each id feature has its own projection W -> D; the dense columns become `num_dense_tokens` tokens through one MLP; a
    token-axis map `[F, n + m]` mixes all of them. Works without ids, without dense columns, and without both.
    """

    def __init__(
        self, num_ids: int, num_dense: int, config: ModelConfig, *, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.dim = config.dim
        self.num_dense = num_dense
        num_dense_tokens = config.num_dense_tokens if num_dense else 0
        # Embeddings start small (see embeddings.py): the gain brings their tokens near the scale of the dense ones.
        self.project_ids = (
            normal(num_ids, config.embedding_dim, config.dim, std=4.0 / math.sqrt(config.embedding_dim), device=device)
            if num_ids
            else None
        )
        self.dense = (
            Mlp(num_dense, config.dense_hidden_dim, num_dense_tokens * config.dim, device=device) if num_dense else None
        )
        num_features = num_ids + num_dense_tokens
        self.mix = TokenMap(num_features, config.num_tokens, device=device) if num_features else None
        self.bias_FD = normal(config.num_tokens, config.dim, std=0.3, device=device)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, embeddings_BnW: Tensor, dense_BC: Tensor) -> Tensor:
        num_samples = dense_BC.shape[0]
        parts: list[Tensor] = []
        if self.project_ids is not None:
            parts.append(torch.einsum("bnw,nwd->bnd", embeddings_BnW, self.project_ids))
        if self.dense is not None:
            parts.append(self.dense(dense_BC).unflatten(-1, (-1, self.dim)))
        x_BFD = self.bias_FD.expand(num_samples, -1, -1)
        if self.mix is not None:
            x_BFD = x_BFD + self.mix(torch.cat(parts, dim=1))
        return self.dropout(unit_rms(x_BFD))
