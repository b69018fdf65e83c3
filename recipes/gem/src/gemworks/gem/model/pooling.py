"""Hierarchical seed pooling (HSP): a jagged sequence to a fixed number of tokens.

Letters: B samples, T packed events, S = B + 1 offsets, P seeds (n_seed), n tokens left (n_tok), k rank, N heads,
H head width, E = N * H width of the event type, D model width.
"""

from __future__ import annotations

import math

import torch
from gemworks.gem.config import EventSizes, ModelConfig
from gemworks.gem.model.events import Sequence
from gemworks.gem.model.layers import linear, normal, unit_rms
from gemworks.jagged import apply_rope, flash_attention, gdpa, rms_norm
from torch import Tensor, nn


class KroneckerCompression(nn.Module):
    """`Y_b = sum_{i <= k} Z_i^T H_b W_i`: [B, P, E] to [B, n, D] with `Z_i [P, n]`, `W_i [E, D]`.

    Z^T comes first: with n <= P that is the cheaper association. Source: Kunlun, arXiv 2602.10016 (SumKronLinear).
    """

    def __init__(
        self, num_seeds: int, num_out: int, rank: int, dim_in: int, dim_out: int, *, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.rank, self.num_out = rank, num_out
        self.z_PX = normal(num_seeds, rank * num_out, std=1.0 / math.sqrt(num_seeds), device=device)
        self.w_kED = normal(rank, dim_in, dim_out, std=1.0 / math.sqrt(rank * dim_in), device=device)

    def forward(self, h_BPE: Tensor) -> Tensor:
        num_samples, _, dim = h_BPE.shape
        zh_BknE = torch.matmul(self.z_PX.t(), h_BPE).view(num_samples, self.rank, self.num_out, dim)
        # The sum over k rides in the product: [B n, k E] @ [k E, D].
        zh_BnX = zh_BknE.transpose(1, 2).reshape(num_samples, self.num_out, self.rank * dim)
        return torch.matmul(zh_BnX, self.w_kED.flatten(0, 1))


class SeedPooling(nn.Module):
    """Learned seeds attend over a sequence, then a Kronecker compression: `Sequence` to `[B, n, D]`.

    `H = RMSNorm(attend(norm(seeds), norm(s) W_k, norm(s) W_v))`, by softmax or by GDPA, seeds and keys RMS-normalised per
    head and keys rotated by position and age. The norm of H makes both kinds of pooling arrive at unit scale; a sample
    without events gets 0. There is no query or output projection: seeds are free parameters and `W_i` follows.
    """

    def __init__(self, sizes: EventSizes, config: ModelConfig, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.num_heads, self.head_dim = sizes.num_heads, sizes.head_dim
        self.pooling, self.activation = config.pooling, config.pffn_activation
        self.seeds_PNH = normal(sizes.num_seeds, sizes.num_heads, sizes.head_dim, std=1.0, device=device)
        self.kv = linear(sizes.dim, 2 * sizes.dim, bias=False, device=device)
        self.compress = KroneckerCompression(
            sizes.num_seeds,
            sizes.num_sequence_tokens,
            config.kronecker_rank,
            sizes.dim,
            config.dim,
            device=device,
        )

    def forward(self, sequence: Sequence) -> Tensor:
        offsets_S = sequence.offsets_S
        num_samples = offsets_S.shape[0] - 1
        k_TE, v_TE = self.kv(rms_norm(sequence.s_TD)).chunk(2, dim=-1)
        k_TNH = rms_norm(k_TE.unflatten(-1, (self.num_heads, self.head_dim)))
        v_TNH = v_TE.unflatten(-1, (self.num_heads, self.head_dim))
        if sequence.rope is not None:
            k_TNH = apply_rope(k_TNH, sequence.rope)
        q_PNH = rms_norm(self.seeds_PNH).to(k_TNH.dtype)
        num_seeds, scale = q_PNH.shape[0], 1.0 / math.sqrt(self.head_dim)
        if self.pooling == "softmax":
            h = flash_attention(
                q_PNH, k_TNH, v_TNH, None, offsets_S, max_length_q=num_seeds, max_length_k=sequence.max_length,
                scale=scale, shared_query=True,
            )  # fmt: skip
        else:
            h = gdpa(
                q_PNH, k_TNH, v_TNH, None, offsets_S, max_length_q=num_seeds, max_length_k=sequence.max_length,
                scale=scale, activation=self.activation, shared_query=True,
            )  # fmt: skip
        return self.compress(unit_rms(h.reshape(num_samples, num_seeds, -1)))
