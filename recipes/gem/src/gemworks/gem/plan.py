"""Which parts a GEM layer has and how many tokens meet in it: read by the model and by the FLOP counter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gemworks.gem.config import ConfigError, EventSizes, GemConfig


@dataclass(frozen=True)
class LayerParts:
    """What one layer computes for one event type.

    Attributes:
        pools: computes a fresh seed pooling; otherwise it reuses the layer before's.
        pffn: has the PFFN.
        attention: has self-attention.
    """

    pools: bool
    pffn: bool
    attention: bool


def layer_parts(config: GemConfig, sizes: EventSizes, layer: int) -> LayerParts:
    """The parts of layer `layer` (from 0) for an event type.

    Past the event type's own depth nothing is computed. `reuse_hsp` drops the pooling of odd layers; `skip =
    "alternate"` drops the attention of even layers and the PFFN of odd ones: Kunlun's pairs (arXiv 2602.10016), PFFN
    with fresh pooling, attention with cached pooling.
    """
    inside = layer < sizes.num_layers
    odd, alternate = layer % 2 == 1, config.model.skip == "alternate"
    return LayerParts(
        pools=inside and not (odd and config.model.reuse_hsp),
        pffn=inside and not (odd and alternate),
        attention=inside and not (not odd and alternate),
    )


def interaction_tokens(config: GemConfig, events: Sequence[EventSizes]) -> int:
    """n of the interaction: the non-sequence summary and every event type's pooled tokens."""
    return config.model.num_summary_tokens + sum(sizes.num_sequence_tokens for sizes in events)


def fmb_tokens(num_tokens: int, config: GemConfig) -> int:
    """How many of a Wukong layer's `num_tokens` output tokens come from its factorisation machine block."""
    num_fmb = num_tokens // 2 if config.model.num_fmb_tokens is None else config.model.num_fmb_tokens
    if not 0 < num_fmb < num_tokens:
        raise ConfigError(
            f"model.num_fmb_tokens: got {num_fmb}, expected 1..{num_tokens - 1}: a Wukong layer here has {num_tokens} "
            f"tokens (num_summary_tokens plus all num_sequence_tokens) and keeps some for its linear part"
        )
    return num_fmb


def pffn_scale(config: GemConfig, sizes: EventSizes) -> float:
    """The PFFN's constant scale for an event type's head width."""
    scale = config.model.pffn_scale
    if scale == "head_dim":
        return 1.0 / math.sqrt(sizes.head_dim)
    return 1.0 / config.data.max_length if scale == "max_length" else float(scale)
