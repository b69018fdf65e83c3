"""The `model` section: sizes and choices of the GEM model, for all event types and for each. Imports no torch.

Letters: B samples, D width, N heads, H head width, L layers, F tokens, K PFFN rows, E event types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gemworks.gem.config_checks import check, check_counts, check_finite, check_heads

AttentionKind = Literal["block", "window", "full"]
# The activations of gemworks.jagged.gdpa, spelled out because importing them would import torch.
Activation = Literal[
    "identity",
    "relu",
    "squared_relu",
    "leaky_relu",
    "gelu",
    "gelu_tanh",
    "fast_gelu",
    "silu",
    "fast_silu",
    "hardswish",
    "tanh",
]


@dataclass(frozen=True, kw_only=True)
class EventConfig:
    """Sizes of one event type's sequence stack; None takes the model's value.

    Attributes:
        dim: width of this type's tokens; num_heads * head width.
        num_heads: heads of its attention, PFFN and seed pooling.
        num_seeds: seeds of its hierarchical seed pooling.
        num_sequence_tokens: tokens its Kronecker compression leaves.
        attention: its kind of self-attention.
        window: keys on each side of a query when attention is "window".
        num_layers: depth. Layers past it leave this type's events alone and reuse its last seed pooling.
    """

    dim: int | None = None
    num_heads: int | None = None
    num_seeds: int | None = None
    num_sequence_tokens: int | None = None
    attention: AttentionKind | None = None
    window: int | None = None
    num_layers: int | None = None


@dataclass(frozen=True, kw_only=True)
class EventSizes:
    """The sizes of one event type with every default filled in."""

    dim: int
    num_heads: int
    num_seeds: int
    num_sequence_tokens: int
    attention: AttentionKind
    window: int
    num_layers: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and choices of the GEM model.

    Attributes:
        dim: D, the width of tokens; D = num_heads * head width.
        num_heads: N.
        num_layers: L.
        num_event_types: E; a schema with another number is refused.
        num_tokens: F, the non-sequence tokens after the token-axis map over the features.
        num_summary_tokens: n_sum, rows of the non-sequence summary.
        num_seeds: n_seed of hierarchical seed pooling (HSP).
        num_sequence_tokens: n_tok that HSP's Kronecker compression leaves per event type.
        kronecker_rank: k, terms of that compression.
        pffn_rows: K, keys per sample in the PFFN (its hidden width; "dff" elsewhere).
        num_experts: Wukong experts of a layer; their outputs are summed with learned scalar gates.
        expert_layers: Wukong layers inside one expert.
        expert_dim: hidden width of an expert's MLP.
        wukong_rank: k of X (X^T Y).
        num_fmb_tokens: output tokens of a Wukong layer that come from the factorisation machine block; the others are
            linear combinations of its inputs. None: half of them.
        embedding_dim: width of the embedding tables.
        num_dense_tokens: tokens made from the dense columns by one MLP.
        dense_hidden_dim: hidden width of that MLP.
        mask_dim: hidden width of the MaskNet gate that merges an event's embeddings.
        gate_dim: hidden width of the summary gate's MLP, x * sigmoid(mlp(x)).
        head_tokens: tokens into which the head maps the last layer's tokens before its MLP.
        head_hidden_dim: hidden width of the head's MLP.
        attention: self-attention inside fixed blocks, in a sliding window, or over the whole sequence.
        block: tokens in a block of block attention.
        window: keys on each side of a query when attention is "window".
        pffn_activation: the activation of the PFFN.
        pffn_scale: the constant scale inside that activation: 1 / sqrt(H), 1 / data.max_length, or a number.
        pooling: seeds attend by softmax, or by GDPA with the PFFN's activation.
        reuse_hsp: odd layers reuse the seed pooling of the layer before.
        skip: "alternate": even layers skip self-attention, odd layers skip the PFFN.
        time_encoding: rotary on position and log(1 + dt / scale), or learned tables of both in buckets.
        time_fraction: share of a head's rotary pairs that turn by time; the others turn by position.
        time_scale_seconds: the scale of that logarithm.
        num_time_buckets: rows of the time and position tables when time_encoding is "buckets".
        dropout: probability, on merged events, non-sequence tokens and hidden units of the head; 0 turns it off.
        events: sizes per event type, by its name in the schema.
    """

    dim: int
    num_heads: int
    num_layers: int
    num_event_types: int
    num_tokens: int
    num_summary_tokens: int
    num_seeds: int
    num_sequence_tokens: int
    kronecker_rank: int
    pffn_rows: int
    num_experts: int
    expert_dim: int
    wukong_rank: int
    embedding_dim: int
    dense_hidden_dim: int
    mask_dim: int
    gate_dim: int
    head_hidden_dim: int
    num_dense_tokens: int = 4
    expert_layers: int = 1
    num_fmb_tokens: int | None = None
    head_tokens: int = 4
    attention: AttentionKind = "block"
    block: int = 64
    window: int = 100
    pffn_activation: Activation = "gelu"
    pffn_scale: float | Literal["head_dim", "max_length"] = "head_dim"
    pooling: Literal["softmax", "gdpa"] = "softmax"
    reuse_hsp: bool = True
    skip: Literal["none", "alternate"] = "none"
    time_encoding: Literal["rotary", "buckets"] = "rotary"
    time_fraction: float = 0.5
    time_scale_seconds: float = 60.0
    num_time_buckets: int = 64
    dropout: float = 0.0
    events: Mapping[str, EventConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_heads("model", self.dim, self.num_heads)
        check_counts(
            "model",
            self,
            "num_layers num_event_types num_tokens num_summary_tokens num_seeds num_sequence_tokens kronecker_rank "
            "pffn_rows num_experts expert_layers expert_dim wukong_rank embedding_dim mask_dim gate_dim head_tokens "
            "num_dense_tokens dense_hidden_dim head_hidden_dim window num_time_buckets",
        )
        check(self.block in (32, 64, 128), "model.block", self.block, "32, 64 or 128")
        if isinstance(self.pffn_scale, float):
            check(self.pffn_scale > 0, "model.pffn_scale", self.pffn_scale, "a positive number")
        check(self.time_scale_seconds > 0, "model.time_scale_seconds", self.time_scale_seconds, "a positive number")
        check(0 <= self.time_fraction <= 1, "model.time_fraction", self.time_fraction, "a share in [0, 1]")
        check(0 <= self.dropout < 1, "model.dropout", self.dropout, "a probability in [0, 1)")
        check(
            len(self.events) <= self.num_event_types,
            "model.events",
            sorted(self.events),
            f"at most model.num_event_types = {self.num_event_types} event types",
        )
        check(
            self.num_fmb_tokens is None or self.num_fmb_tokens > 0,
            "model.num_fmb_tokens",
            self.num_fmb_tokens,
            "a positive integer, or 'none' for half of the tokens",
        )
        check(
            self.num_sequence_tokens <= self.num_seeds,
            "model.num_sequence_tokens",
            self.num_sequence_tokens,
            f"at most model.num_seeds = {self.num_seeds}: the compression leaves fewer tokens than there are seeds",
        )
        for name in self.events:
            self._check_event(name)
        check_finite("model", self)

    def _check_event(self, name: str) -> None:
        sizes, prefix = self.event(name), f"model.events.{name}"
        check_heads(prefix, sizes.dim, sizes.num_heads)
        check_counts(prefix, sizes, "num_seeds num_sequence_tokens window num_layers")
        check(
            sizes.num_sequence_tokens <= sizes.num_seeds,
            f"{prefix}.num_sequence_tokens",
            sizes.num_sequence_tokens,
            f"at most its num_seeds = {sizes.num_seeds}",
        )
        check(
            sizes.num_layers <= self.num_layers,
            f"{prefix}.num_layers",
            sizes.num_layers,
            f"at most model.num_layers = {self.num_layers}",
        )

    @property
    def head_dim(self) -> int:
        """H."""
        return self.dim // self.num_heads

    @property
    def only_full_attention(self) -> bool:
        """Whether every event type has full attention, also those that `events` does not name."""
        return self.attention == "full" and all(self.event(name).attention == "full" for name in self.events)

    def event(self, name: str) -> EventSizes:
        """The sizes of one event type: its own where given, otherwise the model's."""
        own = self.events.get(name, EventConfig())

        def pick(key: str) -> Any:
            value = getattr(own, key)
            return getattr(self, key) if value is None else value

        return EventSizes(
            dim=pick("dim"),
            num_heads=pick("num_heads"),
            num_seeds=pick("num_seeds"),
            num_sequence_tokens=pick("num_sequence_tokens"),
            attention=pick("attention"),
            window=pick("window"),
            num_layers=pick("num_layers"),
        )
