"""Hierarchical seed pooling (HSP): a jagged sequence to a fixed number of tokens.

Letters: B samples, T packed events, S = B + 1 offsets, P seeds (n_seed), n tokens left (n_tok), k rank, N heads,
H head width, E = N * H width of the event type, D model width.
"""

from __future__ import annotations

import math

import torch
from gemworks.gem.config import Activation, EventSizes, ModelConfig
from gemworks.gem.kernels import KernelConfig
from gemworks.gem.model.events import Sequence
from gemworks.gem.model.layers import linear, normal, product_dtype, unit_rms
from gemworks.gem.model.norms import rms_norm
from gemworks.gem.model.plain import padded_gdpa_pool, padded_pool, varlen_attention
from gemworks.jagged import apply_rope, flash_attention, flash_attention_pool, gdpa, kronecker_compress
from torch import Tensor, nn


class SeedPooling(nn.Module):
    """Learned seeds attend over a sequence, then a Kronecker compression: `Sequence` to `[B, n, D]`.

    `H = RMSNorm(attend(norm(seeds), norm(s) W_k, norm(s) W_v))`, then `Y_b = sum_{i <= k} Z_i^T H_b W_i` with
    `Z_i [P, n]`, `W_i [E, D]`. Attention is softmax or GDPA; seeds and keys are RMS-normalised per head, keys rotated
    by position and age. The norm of H makes both kinds of pooling arrive at unit scale; a sample without events gets 0.
    There is no query or output projection: seeds are free parameters and `W_i` follows. Source: Kunlun,
    arXiv 2602.10016.
    """

    def __init__(
        self, sizes: EventSizes, config: ModelConfig, kernels: KernelConfig, *, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.num_heads, self.head_dim = sizes.num_heads, sizes.head_dim
        self.activation: Activation | None = config.pffn_activation if config.pooling == "gdpa" else None
        num_seeds, rank = sizes.num_seeds, config.kronecker_rank
        self.seeds_PNH = normal(num_seeds, sizes.num_heads, sizes.head_dim, std=1.0, device=device)
        self.kv = linear(sizes.dim, 2 * sizes.dim, bias=False, device=device)
        self.z_kPn = normal(rank, num_seeds, sizes.num_sequence_tokens, std=1.0 / math.sqrt(num_seeds), device=device)
        self.w_kED = normal(rank, sizes.dim, config.dim, std=1.0 / math.sqrt(rank * sizes.dim), device=device)

    def forward(self, sequence: Sequence) -> Tensor:
        norm = self.kernels.norm
        kv_TXH = self.kv(rms_norm(sequence.s_TD, norm)).unflatten(-1, (2 * self.num_heads, self.head_dim))
        seeds_PNH = rms_norm(self.seeds_PNH, norm).to(kv_TXH.dtype)
        h_BPNH = self.attend(seeds_PNH, kv_TXH, sequence)
        # Z is expanded over the samples: cast before that, or autocast writes a copy for each.
        return kronecker_compress(unit_rms(h_BPNH.flatten(2)), self.z_kPn.to(product_dtype(h_BPNH)), self.w_kED)

    def attend(self, seeds_PNH: Tensor, kv_TXH: Tensor, sequence: Sequence) -> Tensor:
        """[B, P, N, H] of a projection [T, 2 N, H], its keys' norm and rotation included."""
        kernels = self.kernels
        if kernels.fused_qk and kernels.pooling == "gemworks" and self.activation is None:
            return flash_attention_pool(
                seeds_PNH, kv_TXH, sequence.offsets_S, max_length=sequence.max_length,
                scale=1.0 / math.sqrt(self.head_dim), k_norm=True, rope=sequence.rope, schedule=sequence.plan.pooling,
                backward_epilogue=kernels.fused_qk_backward,
            )  # fmt: skip
        k_TNH, v_TNH = kv_TXH.chunk(2, dim=1)
        k_TNH = rms_norm(k_TNH, kernels.norm)
        if sequence.rope is not None:
            k_TNH = apply_rope(k_TNH, sequence.rope)
        return self._separate(seeds_PNH.to(k_TNH.dtype), k_TNH, v_TNH, sequence)

    def _separate(self, seeds_PNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, sequence: Sequence) -> Tensor:
        """Of keys that are normed and rotated already."""
        scale, plan, bound = 1.0 / math.sqrt(self.head_dim), sequence.plan, sequence.max_length
        if sequence.lengths_B is not None:
            rows = (seeds_PNH, k_TNH, v_TNH, sequence.lengths_B)
            if self.activation is None:
                return padded_pool(*rows, max_length=bound, scale=scale)
            return padded_gdpa_pool(*rows, max_length=bound, scale=scale, activation=self.activation)
        if self.kernels.pooling == "varlen" and self.activation is None:
            assert plan.cu_seeds is not None
            assert plan.cu_sequences is not None
            num_seeds, batch = seeds_PNH.shape[0], sequence.offsets_S.shape[0] - 1
            q = seeds_PNH.to(v_TNH.dtype).expand(batch, -1, -1, -1).flatten(0, 1)
            k_TNH = k_TNH.to(v_TNH.dtype)
            out = varlen_attention(
                q, k_TNH, v_TNH, plan.cu_seeds, plan.cu_sequences, max_q=num_seeds, max_k=bound, scale=scale
            )
            return out.view(batch, num_seeds, *out.shape[1:])
        common = {"max_length_k": bound, "scale": scale, "shared_query": True, "schedule": plan.pooling}
        if self.activation is None:
            return flash_attention(seeds_PNH, k_TNH, v_TNH, None, sequence.offsets_S, **common)
        return gdpa(seeds_PNH, k_TNH, v_TNH, None, sequence.offsets_S, activation=self.activation, **common)
