"""One GEM layer: summaries, interaction, sequence block. Which parts a layer has is decided in `plan.py`.

Letters: B samples, n tokens, D width.
"""

from __future__ import annotations

import torch
from gemworks.gem.config import EventSizes, GemConfig
from gemworks.gem.model.attention import SelfAttention
from gemworks.gem.model.events import Sequence
from gemworks.gem.model.layers import Gate, TokenMap
from gemworks.gem.model.pffn import Pffn
from gemworks.gem.model.pooling import SeedPooling
from gemworks.gem.model.wukong import MixtureOfExperts
from gemworks.gem.plan import interaction_tokens, layer_parts, pffn_scale
from torch import Tensor, nn


class EventBlock(nn.Module):
    """What belongs to one event type in a layer: `s' = self_attention(PFFN(s, x_sum))`, and its seed pooling."""

    def __init__(self, config: GemConfig, sizes: EventSizes, layer: int, *, device: torch.device | None = None) -> None:
        super().__init__()
        parts, model = layer_parts(config, sizes, layer), config.model
        kernels, scale = config.kernels, pffn_scale(config, sizes)
        self.pool = SeedPooling(sizes, model, kernels, device=device) if parts.pools else None
        self.pffn = Pffn(sizes, model, kernels, scale=scale, device=device) if parts.pffn else None
        self.attention = SelfAttention(sizes, model, kernels, device=device) if parts.attention else None
        self.late_residual = kernels.late_residual

    def summarise(self, sequence: Sequence, cached_BnD: Tensor | None) -> Tensor:
        """The sequence summary [B, n_tok, D]: fresh, or the layer before's."""
        if self.pool is not None:
            return self.pool(sequence)
        assert cached_BnD is not None
        return cached_BnD

    def mix(self, sequence: Sequence, x_sum_BnD: Tensor) -> Sequence:
        """The sequence after the PFFN."""
        return sequence if self.pffn is None else sequence.replace_tokens(self.pffn(sequence, x_sum_BnD))

    def attend(self, sequence: Sequence) -> Sequence:
        """The sequence after self-attention."""
        if self.attention is None:
            return sequence
        if self.late_residual:
            return sequence.replace_tokens(sequence.s_TD, self.attention(sequence, without_residual=True))
        return sequence.replace_tokens(self.attention(sequence))

    def forward(self, sequence: Sequence, x_sum_BnD: Tensor) -> Sequence:
        return self.attend(self.mix(sequence, x_sum_BnD))


class GemLayer(nn.Module):
    """One layer over all event types.

    `x_sum = gate(W_lce x)`; `h_sum = HSP(s)` per event type; `x' = mixture([x_sum || h_sum])`; `s' = block(s, x_sum)`.
    """

    def __init__(
        self,
        config: GemConfig,
        events: list[EventSizes],
        layer: int,
        num_tokens: int,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        model = config.model
        # The gate halves at first: twice the scale in keeps unit scale out.
        self.summary = TokenMap(num_tokens, model.num_summary_tokens, gain=2.0, device=device)
        self.gate = Gate(model.dim, model.gate_dim, device=device)
        self.interaction = MixtureOfExperts(interaction_tokens(config, events), config, device=device)
        self.blocks = nn.ModuleList(EventBlock(config, sizes, layer, device=device) for sizes in events)

    def forward(
        self, x_BnD: Tensor, sequences: list[Sequence], pooled: list[Tensor | None]
    ) -> tuple[Tensor, list[Sequence], list[Tensor | None]]:
        """One step of tokens and sequences.

        Args:
            x_BnD: tokens of the layer before.
            sequences: one per event type.
            pooled: the layer before's sequence summaries, which this layer may reuse.

        Returns:
            x', s' and this layer's sequence summaries.
        """
        x_sum_BnD = self.gate(self.summary(x_BnD))
        sequences = [sequence.summed() for sequence in sequences]
        blocks = [block for block in self.blocks if isinstance(block, EventBlock)]
        h_sums = [b.summarise(s, cached) for b, s, cached in zip(blocks, sequences, pooled, strict=True)]
        # experts on other ranks have their tokens sent beside the PFFN, and their outputs beside self-attention
        tokens = self.interaction.start(torch.cat([x_sum_BnD, *h_sums], dim=1))
        mixed = [block.mix(sequence, x_sum_BnD) for block, sequence in zip(blocks, sequences, strict=True)]
        outputs = self.interaction.run(tokens)
        updated = [block.attend(sequence) for block, sequence in zip(blocks, mixed, strict=True)]
        return self.interaction.finish(outputs), updated, list(h_sums)
