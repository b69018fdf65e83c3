"""A stack of GEM-like sequence layers to spend memory on: per-sample GDPA feed-forward and block attention, fixed
length.

Shapes: B samples, L events, D width, N heads, H head width, K keys per sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

BLOCK = 64


@dataclass(frozen=True)
class StackSize:
    """Size of the stack; the defaults are those of `large` with a shorter batch."""

    batch: int = 128
    length: int = 2048
    width: int = 512
    heads: int = 4
    keys: int = 256
    depth: int = 8

    @property
    def label(self) -> str:
        """For the CSV's shape column."""
        return f"B{self.batch}xL{self.length}xD{self.width}xK{self.keys}x{self.depth}layers"


SMOKE = StackSize(batch=2, length=128, width=32, heads=2, keys=16, depth=3)


class Pffn(nn.Module):
    """`RMSNorm(gelu(scale Q K^T) V + Q) + s` with K, V from a summary of the sample."""

    def __init__(self, size: StackSize) -> None:
        super().__init__()
        self.size = size
        self.norm = nn.LayerNorm(size.width, elementwise_affine=False)
        self.keys = nn.Linear(size.width, size.keys * 2)
        self.mix = nn.Linear(size.width, size.width)

    def forward(self, s_BLD: torch.Tensor) -> torch.Tensor:
        n, h = self.size.heads, self.size.width // self.size.heads
        b, length, d = s_BLD.shape
        q_BLD = self.norm(s_BLD)
        summary_BD = s_BLD.mean(dim=1)
        gates_BK2 = self.keys(summary_BD).view(b, self.size.keys, 2)
        kv_BK2D = gates_BK2.unsqueeze(-1) * self.mix(summary_BD)[:, None, None]
        k_BNKH, v_BNKH = (kv_BK2D[:, :, i].view(b, -1, n, h).transpose(1, 2) for i in range(2))
        q_BNLH = q_BLD.view(b, length, n, h).transpose(1, 2)
        o_BNLH = torch.nn.functional.gelu(q_BNLH @ k_BNKH.mT * h**-0.5) @ v_BNKH
        o_BLD = o_BNLH.transpose(1, 2).reshape(b, length, d) + q_BLD
        return torch.nn.functional.rms_norm(o_BLD, (d,)) + s_BLD


class BlockAttention(nn.Module):
    """Self-attention inside blocks of 64 events."""

    def __init__(self, size: StackSize) -> None:
        super().__init__()
        self.size = size
        self.norm = nn.LayerNorm(size.width, elementwise_affine=False)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, s_BLD: torch.Tensor) -> torch.Tensor:
        b, length, d = s_BLD.shape
        n = self.size.heads
        q, k, v = self.qkv(self.norm(s_BLD)).view(-1, BLOCK, 3, n, d // n).permute(2, 0, 3, 1, 4)
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return s_BLD + self.out(o.transpose(1, 2).reshape(b, length, d))


class Stack(nn.Module):
    """Alternating PFFN and block attention; every one of them is a region."""

    def __init__(self, size: StackSize) -> None:
        super().__init__()
        self.parts = nn.ModuleList([part(size) for _ in range(size.depth) for part in (Pffn, BlockAttention)])
        self.readout_D: torch.Tensor
        # a loss that saves no tensor of the size of the activations: the regions are what is studied
        self.register_buffer("readout_D", torch.randn(size.width) * size.width**-0.5)

    def forward(self, s_BLD: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            s_BLD = part(s_BLD)
        return (s_BLD @ self.readout_D).float().square().mean()

    @property
    def regions(self) -> list[str]:
        """Names of the regions, in order."""
        return [f"parts.{i}" for i in range(len(self.parts))]


def make_stack(size: StackSize, device: torch.device) -> tuple[Stack, torch.Tensor]:
    """A stack and a random batch `[B, L, D]`: bf16 on a GPU, float32 on a CPU."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch = torch.randn(size.batch, size.length, size.width, device=device, dtype=dtype)
    with device:  # random numbers of a third of a billion parameters take seconds on a CPU
        model = Stack(size).to(dtype)
    return model, batch.requires_grad_()
