"""The interaction of tokens: a mixture of Wukong experts.

Letters: B samples, n tokens, f tokens from the factorisation machine block, k rank, D width, M experts.
Source: Wukong, arXiv 2403.02545; the mixture without a router, Kunlun, arXiv 2602.10016.
"""

from __future__ import annotations

import math

import torch
from gemworks.gem.config import GemConfig
from gemworks.gem.model.layers import Mlp, TokenMap, normal, product_dtype
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
        self.batched = config.kernels.experts == "batched"
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
        if self.batched:
            return self._batched(x_BnD)
        num_samples, num_tokens, _ = x_BnD.shape
        outputs = [
            per_token(gate, num_samples, num_tokens) * expert(x_BnD)
            for gate, expert in zip(self.gates_M, self.experts, strict=True)
        ]
        return torch.stack(outputs).sum(0) if len(outputs) > 1 else outputs[0]

    def _batched(self, x_BnD: Tensor) -> Tensor:
        """The same, each product of all experts at once; their weights are stacked in the dtype of the products."""
        layers = [m for m in self.experts.modules() if isinstance(m, WukongLayer)]  # one per expert
        num_samples, num_tokens, dim = x_BnD.shape
        num_experts, dtype = len(layers), product_dtype(x_BnD)
        x_BnD = x_BnD.to(dtype)

        def stack(name: str) -> Tensor:
            return torch.stack([layer.get_parameter(name).to(dtype) for layer in layers])

        # X (X^T Y) as X (Y^T X)^T: no operand is transposed in memory
        y_Xn = stack("y_nk").transpose(1, 2).flatten(0, 1)
        yx_BXD = torch.bmm(y_Xn.expand(num_samples, -1, -1), x_BnD)
        interactions_BnX = torch.bmm(x_BnD, yx_BXD.transpose(1, 2))
        z_MBX = interactions_BnX.unflatten(2, (num_experts, -1)).permute(2, 0, 1, 3).flatten(2)
        z_MBX = functional.layer_norm(z_MBX, z_MBX.shape[-1:]).to(dtype)
        z_MBX = torch.baddbmm(stack("fmb.up.bias")[:, None], z_MBX, stack("fmb.up.weight").transpose(1, 2))
        z_MBX = functional.gelu(z_MBX)
        z_MBX = torch.baddbmm(stack("fmb.down.bias")[:, None], z_MBX, stack("fmb.down.weight").transpose(1, 2))
        fmb_MBfD = z_MBX.unflatten(2, (-1, dim))
        lcb_BXD = torch.bmm(stack("lcb.weight").flatten(0, 1).expand(num_samples, -1, -1), x_BnD)
        lcb_MBlD = lcb_BXD.unflatten(1, (num_experts, -1)).transpose(0, 1)
        both_MBnD = torch.cat([fmb_MBfD, lcb_MBlD], dim=2) + x_BnD
        out_MBnD = functional.layer_norm(both_MBnD, (dim,))
        gates_MBn1 = per_token(self.gates_M[:, None, None, None], num_experts, num_samples, num_tokens)
        return (gates_MBn1 * out_MBnD).sum(0)


def per_token(gate: Tensor, *shape: int) -> Tensor:
    """A gate for each token, [*shape, 1]: its gradient is summed per token first, in the kernel that has the token's
    row, and over tokens afterwards; all at once it is one long sum over everything."""
    return gate.expand(*shape, 1)
