"""Hierarchical seed pooling (HSP): a jagged sequence to a fixed number of tokens.

Letters: B samples, T packed events, S = B + 1 offsets, P seeds (n_seed), n tokens left (n_tok), k rank, N heads,
H head width, E = N * H width of the event type, D model width.
"""

from __future__ import annotations

import math

import torch
from gemworks.gem.config import Activation, EventSizes, ModelConfig
from gemworks.gem.model.events import Sequence
from gemworks.gem.model.layers import linear, normal, unit_rms
from gemworks.jagged import apply_rope, kronecker_compress, rms_norm, seed_pool
from torch import Tensor, nn


class SeedPooling(nn.Module):
    """Learned seeds attend over a sequence, then a Kronecker compression: `Sequence` to `[B, n, D]`.

    `H = RMSNorm(attend(norm(seeds), norm(s) W_k, norm(s) W_v))`, then `Y_b = sum_{i <= k} Z_i^T H_b W_i` with
    `Z_i [P, n]`, `W_i [E, D]`. Attention is softmax or GDPA; seeds and keys are RMS-normalised per head, keys rotated
    by position and age. The norm of H makes both kinds of pooling arrive at unit scale; a sample without events gets 0.
    There is no query or output projection: seeds are free parameters and `W_i` follows. Source: Kunlun,
    arXiv 2602.10016.
    """

    def __init__(self, sizes: EventSizes, config: ModelConfig, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.num_heads, self.head_dim = sizes.num_heads, sizes.head_dim
        self.activation: Activation | None = config.pffn_activation if config.pooling == "gdpa" else None
        num_seeds, rank = sizes.num_seeds, config.kronecker_rank
        self.seeds_PNH = normal(num_seeds, sizes.num_heads, sizes.head_dim, std=1.0, device=device)
        self.kv = linear(sizes.dim, 2 * sizes.dim, bias=False, device=device)
        self.z_kPn = normal(rank, num_seeds, sizes.num_sequence_tokens, std=1.0 / math.sqrt(num_seeds), device=device)
        self.w_kED = normal(rank, sizes.dim, config.dim, std=1.0 / math.sqrt(rank * sizes.dim), device=device)

    def forward(self, sequence: Sequence) -> Tensor:
        k_TE, v_TE = self.kv(rms_norm(sequence.s_TD)).chunk(2, dim=-1)
        k_TNH = rms_norm(k_TE.unflatten(-1, (self.num_heads, self.head_dim)))
        if sequence.rope is not None:
            k_TNH = apply_rope(k_TNH, sequence.rope)
        h_BPNH = seed_pool(
            rms_norm(self.seeds_PNH).to(k_TNH.dtype),
            k_TNH,
            v_TE.unflatten(-1, (self.num_heads, self.head_dim)),
            sequence.offsets_S,
            max_length_k=sequence.max_length,
            activation=self.activation,
        )
        return kronecker_compress(unit_rms(h_BPNH.flatten(2)), self.z_kPn, self.w_kED)
