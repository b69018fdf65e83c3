"""The small parts that everything uses: linear layers with a stated initial scale, MLP, gate, token map.

Letters: D input width, O output width, n tokens. "Unit" means entries of variance 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


def linear(
    num_in: int, num_out: int, *, gain: float = 1.0, bias: bool = True, device: torch.device | None = None
) -> nn.Linear:
    """A linear layer with output variance gain^2 on a unit input: weights normal, std gain / sqrt(num_in), bias 0."""
    layer = nn.Linear(num_in, num_out, bias=bias, device=device)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(num_in))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def normal(*shape: int, std: float, device: torch.device | None = None) -> nn.Parameter:
    """A parameter with independent normal entries."""
    return nn.Parameter(torch.randn(*shape, device=device) * std)


class Mlp(nn.Module):
    """Linear, GELU, linear: [..., num_in] to [..., num_out]."""

    def __init__(
        self, num_in: int, hidden: int, num_out: int, *, gain: float = 1.0, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.up = linear(num_in, hidden, gain=math.sqrt(2.0), device=device)  # GELU halves the second moment
        self.down = linear(hidden, num_out, gain=gain, device=device)

    def forward(self, x_D: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x_D)))


class Gate(nn.Module):
    """`gate(x) = x * sigmoid(mlp(x))`, [..., D] to itself; x / 2 at first. Source: InterFormer, arXiv 2411.09852."""

    def __init__(self, dim: int, hidden: int, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.mlp = Mlp(dim, hidden, dim, gain=0.25, device=device)

    def forward(self, x_D: Tensor) -> Tensor:
        return x_D * torch.sigmoid(self.mlp(x_D))


class TokenMap(nn.Module):
    """`W x` over the token axis: [B, n_in, D] to [B, n_out, D] with one weight [n_out, n_in] for all columns."""

    def __init__(self, num_in: int, num_out: int, *, gain: float = 1.0, device: torch.device | None = None) -> None:
        super().__init__()
        self.weight = normal(num_out, num_in, std=gain / math.sqrt(num_in), device=device)

    def forward(self, x_BnD: Tensor) -> Tensor:
        # A batched product with a stride-0 weight: matmul would transpose x in memory to make one product of it. Cast
        # before it is expanded: autocast would write a weight per sample.
        weight = self.weight.to(product_dtype(x_BnD))
        return torch.bmm(weight.expand(x_BnD.shape[0], -1, -1), x_BnD)


def unit_rms(x_D: Tensor) -> Tensor:
    """Dense (not jagged) RMS norm over the last dim without affine, in the dtype of x."""
    return functional.rms_norm(x_D, x_D.shape[-1:], eps=1e-6)


def product_dtype(x: Tensor) -> torch.dtype:
    """In which autocast computes products of x; x's own without autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
