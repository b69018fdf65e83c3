"""Self-attention over packed sequences: blocks, a sliding window, or everything.

Letters: T packed events, N heads, H head width, E = N * H width of the event type.
"""

from __future__ import annotations

import math

import torch
from gemworks.gem.config import EventSizes, ModelConfig
from gemworks.gem.model.events import Sequence
from gemworks.gem.model.layers import linear
from gemworks.jagged import apply_rope, block_attention, flash_attention, rms_norm
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """`s + W_o attend(rope(norm(q)), rope(norm(k)), v)` with `q, k, v = norm(s) W_qkv`; bidirectional.

    QK-norm is an RMS norm per head without affine, before the rotation. `W_o` starts small, so that a fresh layer
    mostly passes its input through and the stream stays near unit scale.
    """

    def __init__(self, sizes: EventSizes, config: ModelConfig, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.num_heads, self.head_dim = sizes.num_heads, sizes.head_dim
        self.kind, self.block, self.window = sizes.attention, config.block, sizes.window
        self.qkv = linear(sizes.dim, 3 * sizes.dim, bias=False, device=device)
        self.out = linear(sizes.dim, sizes.dim, gain=0.5, bias=False, device=device)

    def forward(self, sequence: Sequence) -> Tensor:
        s_TE, offsets_S, max_length = sequence.s_TD, sequence.offsets_S, sequence.max_length
        q_TNH, k_TNH, v_TNH = (
            part.unflatten(-1, (self.num_heads, self.head_dim)) for part in self.qkv(rms_norm(s_TE)).chunk(3, dim=-1)
        )
        scale = 1.0 / math.sqrt(self.head_dim)
        if self.kind == "block":
            o_TNH = block_attention(
                q_TNH, k_TNH, v_TNH, offsets_S, max_length_q=max_length, scale=scale, block=self.block,
                rope=sequence.rope, qk_norm=True,
            )  # fmt: skip
        else:
            q_TNH, k_TNH = rms_norm(q_TNH), rms_norm(k_TNH)
            if sequence.rope is not None:
                q_TNH, k_TNH = apply_rope(q_TNH, sequence.rope), apply_rope(k_TNH, sequence.rope)
            o_TNH = flash_attention(
                q_TNH, k_TNH, v_TNH, offsets_S, max_length_q=max_length, max_length_k=max_length, scale=scale,
                window=(self.window, self.window) if self.kind == "window" else None,
            )  # fmt: skip
        return s_TE + self.out(o_TNH.flatten(-2))
