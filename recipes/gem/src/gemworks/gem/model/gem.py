"""The whole model: batch in, logits out.

Letters: B samples, n tokens, D width, K tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from gemworks.gem.config import EventConfig, GemConfig
from gemworks.gem.model.embeddings import SparseEmbeddings
from gemworks.gem.model.events import EventTokens, Sequence
from gemworks.gem.model.head import Head
from gemworks.gem.model.layer import GemLayer
from gemworks.gem.model.tokens import FeatureTokens
from gemworks.gem.plan import interaction_tokens
from gemworks.gem.schema import Batch, Schema
from torch import Tensor, nn


class Gem(nn.Module):
    """GEM for a schema.

    Args:
        schema: features, event types and tasks; the model's input and output sizes.
        config: sizes and choices. Nothing is read from `config.train` or `config.optimizer`.
        device: where parameters are created; "meta" creates none.

    Raises:
        ValueError: a schema that does not fit the configuration, or one table with two sizes.

    Parameters fall in two groups, which want different optimizers: `sparse_parameters()`, the embedding tables (all of
    `embeddings`, and nothing else), and `dense_parameters()`, everything else.
    """

    def __init__(self, schema: Schema, config: GemConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        check_schema(schema, config)
        where = torch.device(device) if device is not None else None
        model = config.model
        self.schema, self.config = schema, config
        sizes = [model.event(event.name) for event in schema.events]
        num_tokens = interaction_tokens(config, sizes)
        self.embeddings = SparseEmbeddings(schema, model.embedding_dim, device=where)
        self.tokens = FeatureTokens(len(schema.ids), len(schema.dense_names), model, device=where)
        self.events = nn.ModuleList(
            EventTokens(event, size, model, config.kernels, device=where)
            for event, size in zip(schema.events, sizes, strict=True)
        )
        self.layers = nn.ModuleList(
            GemLayer(config, sizes, layer, model.num_tokens if layer == 0 else num_tokens, device=where)
            for layer in range(model.num_layers)
        )
        self.head = Head(num_tokens, sizes, len(schema.tasks), model, config.kernels, device=where)

    def sparse_parameters(self) -> Iterator[nn.Parameter]:
        """The embedding tables."""
        return self.embeddings.parameters()

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """All parameters but the embedding tables."""
        for name, parameter in self.named_parameters():
            if not name.startswith("embeddings."):
                yield parameter

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B, K] in float32, one column per task of the schema."""
        embeddings_BnW, event_rows = self.embeddings(batch)
        return self.from_embeddings(embeddings_BnW, event_rows, batch)

    def from_embeddings(self, embeddings_BnW: Tensor, event_rows: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """The dense part of `forward`: what follows the tables.

        Args:
            embeddings_BnW: of the samples' own features.
            event_rows: [T, W] of every event feature, by its key.
            batch: its ids are not read.
        """
        x_BnD = self.tokens(embeddings_BnW, batch.dense_BC)
        sequences: list[Sequence] = []
        for event, tokens in zip(self.schema.events, self.events, strict=True):
            ids_TW = [event_rows[self.schema.event_key(event.name, f.name)] for f in event.ids]
            sequences.append(tokens(ids_TW, batch.events[event.name], batch.timestamps_B))
        pooled: list[Tensor | None] = [None] * len(sequences)
        for layer in self.layers:
            x_BnD, sequences, pooled = layer(x_BnD, sequences, pooled)
        return self.head(x_BnD, sequences).float()


def check_schema(schema: Schema, config: GemConfig) -> None:
    """Raise ValueError when the schema does not fit the configuration."""
    names = [event.name for event in schema.events]
    # An entry that sets nothing only names a type that another data source has.
    unknown = [name for name, own in config.model.events.items() if name not in names and own != EventConfig()]
    if unknown:
        raise ValueError(
            f"model.events: got {unknown[0]!r}, expected event types of the data: {names}; "
            f"rename it, or choose the data.source that has it"
        )
    if not names:
        raise ValueError(
            "schema.events: got no event type, expected at least one: GEM is a model of histories; choose a "
            "data.source that has them (criteo has none)"
        )
    if len(names) != config.model.num_event_types:
        raise ValueError(
            f"model.num_event_types: got {config.model.num_event_types}, but the data has {len(names)} event types "
            f"{names}; set model.num_event_types={len(names)}"
        )
    if not schema.tasks:
        raise ValueError("schema.tasks: got no task, expected at least one binary label")
