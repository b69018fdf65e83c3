"""What each part of GEM costs: matmul FLOPs per sample, per token and per admitted (query, key) pair. No torch.

Rules: a product of [a, b] and [b, c] is 2 a b c; products in their cheapest association; embeddings, norms, gates'
element-wise work, rotations and quantisation count zero; real tokens and admitted pairs only. docs/model.md of the
recipe has the formulas of every part.

Letters: D model width, E width of an event type, W embedding width, F tokens, K PFFN rows, n interaction tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemworks.gem.config import AttentionKind, EventSizes, GemConfig
from gemworks.gem.plan import fmb_tokens, interaction_tokens, layer_parts

if TYPE_CHECKING:
    from gemworks.gem.schema import EventType, Schema


@dataclass(frozen=True, kw_only=True)
class PairRule:
    """Which (query, key) pairs self-attention admits in a sequence."""

    kind: AttentionKind
    block: int
    window: int

    def pairs(self, length: int) -> int:
        """Admitted pairs of a sequence of `length` tokens.

        block: full blocks and a last one of its real length; window: at most `window` keys on each side; full: all.

        >>> PairRule(kind="block", block=64, window=0).pairs(100) == 64 * 64 + 36 * 36
        True
        >>> PairRule(kind="window", block=64, window=1).pairs(4)  # 2 + 3 + 3 + 2
        10
        """
        if self.kind == "full":
            return length * length
        if self.kind == "block":
            whole, rest = divmod(length, self.block)
            return whole * self.block * self.block + rest * rest
        w = min(self.window, max(length - 1, 0))
        return length * (2 * w + 1) - w * (w + 1)


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """Forward FLOPs of one part: `per_sample * B + per_token * T + per_pair * pairs`, T and pairs of its event type.

    Attributes:
        name: dotted, such as "layer0.liked.attention.core".
        event: the event type that tokens and pairs are of; None for a part without either.
        per_sample, per_token, per_pair: FLOPs.
        rule: which pairs count, for a part with `per_pair`.
    """

    name: str
    event: str | None = None
    per_sample: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    rule: PairRule | None = None

    @property
    def is_sequence(self) -> bool:
        """Whether the part grows with the number of events; every other part is "dense non-sequence"."""
        return self.per_token > 0 or self.per_pair > 0


def part_costs(config: GemConfig, schema: Schema) -> tuple[PartCost, ...]:
    """The cost of every part of `Gem(schema, config)`, in the order of the forward pass."""
    model = config.model
    sizes = {event.name: model.event(event.name) for event in schema.events}
    costs = _input_costs(config, schema, sizes)
    num_tokens = model.num_tokens
    for layer in range(model.num_layers):
        costs += _layer_costs(config, sizes, layer, num_tokens)
        num_tokens = interaction_tokens(config, list(sizes.values()))
    head_in = model.head_tokens * model.dim + sum(s.dim for s in sizes.values())
    head = 2 * model.head_tokens * num_tokens * model.dim + _mlp(head_in, model.head_hidden_dim, len(schema.tasks))
    return (*costs, PartCost(name="head", per_sample=head))


def _mlp(num_in: int, hidden: int, num_out: int) -> float:
    return 2.0 * (num_in * hidden + hidden * num_out)


def _input_costs(config: GemConfig, schema: Schema, sizes: dict[str, EventSizes]) -> list[PartCost]:
    model = config.model
    num_ids, num_dense = len(schema.ids), len(schema.dense_names)
    dense_tokens = model.num_dense_tokens if num_dense else 0
    tokens = 2.0 * num_ids * model.embedding_dim * model.dim
    tokens += _mlp(num_dense, model.dense_hidden_dim, dense_tokens * model.dim) if num_dense else 0.0
    tokens += 2.0 * model.num_tokens * (num_ids + dense_tokens) * model.dim
    costs = [PartCost(name="tokens", per_sample=tokens)]
    for event in schema.events:
        merged = merged_width(event, model.embedding_dim)
        per_token = _mlp(merged, model.mask_dim, merged) + 2.0 * merged * sizes[event.name].dim
        costs.append(PartCost(name=f"{event.name}.merge", event=event.name, per_token=per_token))
    return costs


def merged_width(event: EventType, embedding_dim: int) -> int:
    """Columns that the merge of an event type gets: ids and floats, or a constant one when it has neither."""
    return len(event.ids) * embedding_dim + len(event.float_names) or 1


def _layer_costs(config: GemConfig, sizes: dict[str, EventSizes], layer: int, num_tokens: int) -> list[PartCost]:
    model, prefix = config.model, f"layer{layer}"
    dim, num_summary = model.dim, model.num_summary_tokens
    summary = 2.0 * num_summary * num_tokens * dim + num_summary * _mlp(dim, model.gate_dim, dim)
    costs = [PartCost(name=f"{prefix}.summary", per_sample=summary)]
    for name, size in sizes.items():
        parts = layer_parts(config, size, layer)
        if parts.pools:
            costs += _pooling_costs(config, size, name, f"{prefix}.{name}.hsp")
        if parts.pffn:
            costs += _pffn_costs(config, size, name, f"{prefix}.{name}.pffn")
        if parts.attention:
            at = f"{prefix}.{name}.attention"
            rule = PairRule(kind=size.attention, block=model.block, window=size.window)
            costs.append(PartCost(name=f"{at}.projections", event=name, per_token=8.0 * size.dim**2))
            costs.append(PartCost(name=f"{at}.core", event=name, per_pair=4.0 * size.dim, rule=rule))
    experts = (
        model.num_experts * model.expert_layers * _wukong(config, interaction_tokens(config, list(sizes.values())))
    )
    costs.append(PartCost(name=f"{prefix}.experts", per_sample=experts))
    return costs


def _pooling_costs(config: GemConfig, size: EventSizes, event: str, at: str) -> list[PartCost]:
    width, dim, seeds, left = size.dim, config.model.dim, size.num_seeds, size.num_sequence_tokens
    z_first = 2.0 * seeds * left * width + 2.0 * left * width * dim
    w_first = 2.0 * seeds * width * dim + 2.0 * seeds * left * dim
    return [
        PartCost(name=f"{at}.projections", event=event, per_token=4.0 * width**2),
        PartCost(name=f"{at}.core", event=event, per_token=4.0 * seeds * width),
        PartCost(name=f"{at}.kronecker", per_sample=config.model.kronecker_rank * min(z_first, w_first)),
    ]


def _pffn_costs(config: GemConfig, size: EventSizes, event: str, at: str) -> list[PartCost]:
    rows, num_summary, dim, width = config.model.pffn_rows, config.model.num_summary_tokens, config.model.dim, size.dim
    linear_first = 2.0 * num_summary * dim * width + 2.0 * rows * num_summary * width
    map_first = 2.0 * rows * num_summary * dim + 2.0 * rows * dim * width
    return [
        PartCost(name=f"{at}.weights", per_sample=2.0 * min(linear_first, map_first)),  # w1 and w2
        PartCost(name=f"{at}.core", event=event, per_token=4.0 * rows * width),
    ]


def _wukong(config: GemConfig, num_tokens: int) -> float:
    model, n, dim, rank = config.model, num_tokens, config.model.dim, config.model.wukong_rank
    num_fmb = fmb_tokens(n, config)
    products = min(4.0 * n * rank * dim, 2.0 * n * n * dim + 2.0 * n * n * rank)
    return products + _mlp(n * rank, model.expert_dim, num_fmb * dim) + 2.0 * (n - num_fmb) * n * dim
