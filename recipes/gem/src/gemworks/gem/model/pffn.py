"""The per-sample feed-forward network: GDPA whose keys and values are made from the non-sequence summary.

Letters: B samples, T packed events, K rows, n summary tokens, N heads, H head width, E = N * H width of the event type,
D model width.
"""

from __future__ import annotations

import math

import torch
from gemworks.gem.config import Activation, EventSizes, ModelConfig
from gemworks.gem.kernels import KernelConfig, PffnWeightsKernel
from gemworks.gem.model.events import Sequence
from gemworks.gem.model.layers import TokenMap, linear, normal
from gemworks.gem.model.norms import RMS_EPS, layer_norm, sum_rms_norm
from gemworks.gem.model.plain import matmul_pffn
from gemworks.jagged import NormEpilogue, gdpa, token_map
from torch import Tensor, nn


class WeightGenerator(nn.Module):
    """`w(x_sum) = map (x_sum W) + base`: [B, n, D] to [B, K, N, H].

    A token-axis map `[K, n]` and a linear D -> E. Nothing non-linear lies between them, so the linear goes first, over
    n <= K rows, and the map second: the same values for fewer FLOPs. `base [K, E]` is what all samples share: with it
    the PFFN starts as an ordinary feed-forward network that samples then bend.
    """

    def __init__(
        self,
        rows: int,
        num_summary: int,
        dim: int,
        sizes: EventSizes,
        *,
        gain: float,
        kernel: PffnWeightsKernel = "torch",
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.num_heads, self.head_dim = sizes.num_heads, sizes.head_dim
        self.linear = linear(dim, sizes.dim, bias=False, device=device)
        self.map = TokenMap(num_summary, rows, gain=gain, device=device)
        self.base_KE = normal(rows, sizes.dim, std=gain, device=device)

    def forward(self, x_sum_BnD: Tensor) -> Tensor:
        if self.map.weight.shape[0] < self.map.weight.shape[1]:
            w_BKE = self.linear(self.map(x_sum_BnD)) + self.base_KE
        elif self.kernel == "gemworks":
            w_BKE = token_map(self.linear(x_sum_BnD), self.map.weight, self.base_KE)
        else:
            w_BKE = self.map(self.linear(x_sum_BnD)) + self.base_KE
        return w_BKE.unflatten(-1, (self.num_heads, self.head_dim))


class Pffn(nn.Module):
    """`out = RMSNorm(act(scale * LN(s) K^T) V + LN(s)) + s` with `K = w1(x_sum)`, `V = w2(x_sum)`.

    Source: Kunlun, arXiv 2602.10016, and Meta's norm-fusion post of 2026-07; norms have no affine and run across heads.

    Args:
        scale: constant of the activation; never taken from the batch.
    """

    def __init__(
        self,
        sizes: EventSizes,
        config: ModelConfig,
        kernels: KernelConfig,
        *,
        scale: float,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.num_heads, self.head_dim = sizes.num_heads, sizes.head_dim
        self.scale = scale
        self.activation: Activation = config.pffn_activation
        rows, num_summary = config.pffn_rows, config.num_summary_tokens
        self.num_rows = rows
        kernel = kernels.pffn_weights
        self.keys = WeightGenerator(rows, num_summary, config.dim, sizes, gain=1.0, kernel=kernel, device=device)
        # About a third of a sum of K activations is uncorrelated: V starts at the size that keeps o near LN(s).
        self.values = WeightGenerator(
            rows, num_summary, config.dim, sizes, gain=0.5 / math.sqrt(rows), kernel=kernel, device=device
        )

    def forward(self, sequence: Sequence, x_sum_BnD: Tensor) -> Tensor:
        s_TE = sequence.s_TD
        k_BKNH, v_BKNH = self.keys(x_sum_BnD), self.values(x_sum_BnD)
        dtype = torch.promote_types(k_BKNH.dtype, v_BKNH.dtype)
        q_TE = layer_norm(s_TE, self.kernels.norm)
        q_TNH = q_TE.to(dtype).unflatten(-1, (self.num_heads, self.head_dim))
        if self.kernels.fused_pffn_norm:
            add_TNH = s_TE.unflatten(-1, (self.num_heads, self.head_dim))
            after = NormEpilogue(residual=q_TNH, add=add_TNH, eps=RMS_EPS)
            out_TNH = self.attend(q_TNH, k_BKNH.to(dtype), v_BKNH.to(dtype), sequence, after)
            return out_TNH.flatten(-2).to(s_TE.dtype)
        o_TNH = self.attend(q_TNH, k_BKNH.to(dtype), v_BKNH.to(dtype), sequence)
        return sum_rms_norm(o_TNH.flatten(-2), q_TE, self.kernels.norm, add=s_TE)

    def attend(
        self,
        q_TNH: Tensor,
        k_BKNH: Tensor,
        v_BKNH: Tensor,
        sequence: Sequence,
        after: NormEpilogue | None = None,
    ) -> Tensor:
        """`act(scale * Q K^T) V` with each sample's K and V, and GDPA's epilogue: [T, N, H]."""
        if self.kernels.pffn == "matmul":
            return matmul_pffn(
                q_TNH, k_BKNH, v_BKNH, max_length=sequence.max_length, scale=self.scale, activation=self.activation,
                slot_T=sequence.plan.slot_T,
            )  # fmt: skip
        return gdpa(
            q_TNH, k_BKNH, v_BKNH, sequence.offsets_S, max_length_q=sequence.max_length, max_length_k=k_BKNH.shape[1],
            scale=self.scale, activation=self.activation, epilogue=after, schedule=sequence.plan.pffn,
        )  # fmt: skip
