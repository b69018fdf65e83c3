"""The interaction of tokens: a mixture of Wukong experts.

Letters: B samples, n tokens, f tokens from the factorisation machine block, k rank, D width, M experts.
Source: Wukong, arXiv 2403.02545; the mixture without a router, Kunlun, arXiv 2602.10016.
"""

from __future__ import annotations

import math

import torch
from gemworks.gem.config import GemConfig
from gemworks.gem.model.layers import Mlp, TokenMap, normal
from gemworks.gem.plan import fmb_tokens
from torch import Tensor, nn
from torch.nn import functional


class WukongLayer(nn.Module):
    """`X' = LN([FMB(X) || LCB(X)] + X)`, [B, n, D] to itself.

    `FMB = reshape(MLP(LN(flatten(X (X^T Y)))))`, `LCB = W_L X`. `X^T Y` with `Y [n, k]` first: never the
    n x n products. Norms have no affine.
    """

    def __init__(self, num_tokens: int, config: GemConfig, *, device: torch.device | None = None) -> None:
        super().__init__()
        model = config.model
        self.dim = model.dim
        num_fmb = fmb_tokens(num_tokens, config)
        self.y_nk = normal(num_tokens, model.wukong_rank, std=1.0 / math.sqrt(num_tokens), device=device)
        self.fmb = Mlp(num_tokens * model.wukong_rank, model.expert_dim, num_fmb * model.dim, gain=0.5, device=device)
        self.lcb = TokenMap(num_tokens, num_tokens - num_fmb, gain=0.5, device=device)

    def forward(self, x_BnD: Tensor) -> Tensor:
        xy_BDk = torch.matmul(x_BnD.transpose(1, 2), self.y_nk)
        interactions_BX = torch.matmul(x_BnD, xy_BDk).flatten(1)
        interactions_BX = functional.layer_norm(interactions_BX, interactions_BX.shape[-1:])
        fmb_BfD = self.fmb(interactions_BX).unflatten(-1, (-1, self.dim))
        both_BnD = torch.cat([fmb_BfD, self.lcb(x_BnD)], dim=1)
        return functional.layer_norm(both_BnD + x_BnD, (self.dim,))


class MixtureOfExperts(nn.Module):
    """`sum_m gate_m expert_m(X)` with learned scalar gates, [B, n, D] to itself: every expert sees every sample.

    `forward(x)` is `finish(run(start(x)))`: what puts the experts elsewhere can have tokens under way between them.

    Attributes:
        experts: the experts, each a module from [B, n, D] to [B, n, D].
        gates_M: their gates, 1 / M at first, so that the sum keeps the scale of one expert.
    """

    def __init__(self, num_tokens: int, config: GemConfig, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(*(WukongLayer(num_tokens, config, device=device) for _ in range(config.model.expert_layers)))
            for _ in range(config.model.num_experts)
        )
        self.gates_M = nn.Parameter(
            torch.full((config.model.num_experts,), 1.0 / config.model.num_experts, device=device)
        )

    def start(self, x_BnD: Tensor) -> Tensor:
        return x_BnD

    def run(self, x_BnD: Tensor) -> Tensor:
        return self(x_BnD)

    def finish(self, x_BnD: Tensor) -> Tensor:
        return x_BnD

    def forward(self, x_BnD: Tensor) -> Tensor:
        outputs = [gate * expert(x_BnD) for gate, expert in zip(self.gates_M, self.experts, strict=True)]
        return torch.stack(outputs).sum(0) if len(outputs) > 1 else outputs[0]
