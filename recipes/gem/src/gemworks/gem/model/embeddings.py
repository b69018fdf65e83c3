"""Embedding tables: bags for the sample's own ids, rows for the ids of events. Everything sparse lives here.

Letters: B samples, n id features of the sample, W embedding width, T packed events of one type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from gemworks.gem.model.gate import GradientGate
from gemworks.gem.schema import Batch, IdFeature, Schema
from gemworks.jagged import mean_pool
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

INIT_STD = 0.05  # small against the unit scale of what they join, so that an id never trained says little


def _init_rows(weight: Tensor) -> None:
    bound = INIT_STD * math.sqrt(3.0)
    with torch.no_grad():
        weight.uniform_(-bound, bound)


class SparseEmbeddings(nn.Module):
    """Looks up every id of a batch.

    Tables that some event type uses are read row by row, by an `EmbeddingCollection`, and so are the sample's features
    that share such a table (they are averaged per sample afterwards): this way the item of the sample and the items of
    the history have the same rows. Tables of the sample alone are read by an `EmbeddingBagCollection` that adds up;
    the division is here, because torchrec's sharded mean divides by 1e-6 more than the number of ids.

    The collections fail at a batch of no samples, so they are asked about one sample without ids then (`min_samples`).

    Args:
        schema: names of features and their tables.
        dim: W.
        device: where the tables are created.

    Raises:
        ValueError: two features of one table with different `num_ids`.

    Attributes:
        gate: what every gradient passes on its way to a table.
        min_samples: a smaller batch is filled up to this many samples, with samples that have no ids, before the
            collections see it. Whoever puts collections into `rows` and `bags` that want batches of one size sets it.
    """

    def __init__(self, schema: Schema, dim: int, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.gate = GradientGate()
        self.min_samples = 1
        events = [(schema.event_key(event.name, f.name), f) for event in schema.events for f in event.ids]
        row_tables = {f.table for _, f in events}
        pooled = [f for f in schema.ids if f.table in row_tables]
        bagged = [f for f in schema.ids if f.table not in row_tables]
        sizes = _table_sizes([*schema.ids, *(f for _, f in events)])
        self._sample_names = tuple(f.name for f in schema.ids)
        self._pooled_names = tuple(f.name for f in pooled)
        self._bagged_names = tuple(f.name for f in bagged)
        where = device or torch.device("cpu")
        self.bags: EmbeddingBagCollection | None = None
        self.rows: EmbeddingCollection | None = None
        if bagged:
            self.bags = EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(
                        name=table,
                        num_embeddings=sizes[table],
                        embedding_dim=dim,
                        feature_names=names,
                        pooling=PoolingType.SUM,
                        init_fn=partial(_init_rows),
                    )
                    for table, names in _features_by_table([(f.name, f) for f in bagged]).items()
                ],
                device=where,
            )
        if events:
            self.rows = EmbeddingCollection(
                tables=[
                    EmbeddingConfig(
                        name=table,
                        num_embeddings=sizes[table],
                        embedding_dim=dim,
                        feature_names=names,
                        init_fn=partial(_init_rows),
                    )
                    for table, names in _features_by_table([(f.name, f) for f in pooled] + events).items()
                ],
                device=where,
            )

    def sparse_parameters(self) -> Iterator[nn.Parameter]:
        """The tables, each once."""
        return self.parameters()

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The batch's embeddings.

        Returns:
            `[B, n, W]` with the sample's features in schema order (an id list is averaged, an empty one is 0), and the
            packed rows `[T, W]` of every event feature by its key.
        """
        sample_ids, event_ids = batch.ids, batch.event_ids
        missing = self.min_samples - batch.num_samples
        if missing > 0:
            sample_ids, event_ids = _filled_up(sample_ids, missing), _filled_up(event_ids, missing)
        found: dict[str, Tensor] = {}
        if self.bags is not None:
            ids = sample_ids if not self._pooled_names else _select(sample_ids, self._bagged_names)
            found.update(_means(self.bags(ids).to_dict(), ids))
        event_rows: dict[str, Tensor] = {}
        if self.rows is not None:
            ids = event_ids
            if self._pooled_names:
                ids = KeyedJaggedTensor.concat([_select(sample_ids, self._pooled_names), ids])
            for key, jagged in self.rows(ids).items():
                if key in self._pooled_names:
                    found[key] = _mean_rows(jagged)
                else:
                    event_rows[key] = jagged.values()
        if self._sample_names:
            sample_BnW = torch.stack([found[name] for name in self._sample_names], dim=1)[: batch.num_samples]
        else:
            sample_BnW = batch.dense_BC.new_empty(batch.num_samples, 0, self.dim)
        # all through the gate together, so that it decides before the first table is updated
        sample_BnW, *rows = self.gate(sample_BnW, *event_rows.values())
        return sample_BnW, dict(zip(event_rows, rows, strict=True))


def _table_sizes(features: list[IdFeature]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for f in features:
        if sizes.setdefault(f.table, f.num_ids) != f.num_ids:
            raise ValueError(
                f"schema: feature {f.name!r} says table {f.table!r} has {f.num_ids} ids, another feature says "
                f"{sizes[f.table]}; give features of one table the same num_ids, or tables of their own"
            )
    return sizes


def _features_by_table(features: list[tuple[str, IdFeature]]) -> dict[str, list[str]]:
    tables: dict[str, list[str]] = {}
    for key, f in features:
        tables.setdefault(f.table, []).append(key)
    return tables


def _select(ids: KeyedJaggedTensor, names: tuple[str, ...]) -> KeyedJaggedTensor:
    keys = ids.keys()
    return ids.permute([keys.index(name) for name in names])


def _filled_up(ids: KeyedJaggedTensor, num: int) -> KeyedJaggedTensor:
    """The same with `num` samples more, which have no ids."""
    keys = ids.keys()
    lengths_KB = ids.lengths().view(len(keys), ids.stride())
    filled_KB = torch.cat([lengths_KB, lengths_KB.new_zeros(len(keys), num)], dim=1)
    return KeyedJaggedTensor(keys, ids.values(), lengths=filled_KB.reshape(-1))


def _means(sums: dict[str, Tensor], ids: KeyedJaggedTensor) -> dict[str, Tensor]:
    """Sums [B, W] over each sample's ids to means; 0 for none."""
    lengths_KB = ids.lengths().view(len(ids.keys()), ids.stride()).clamp(min=1)
    return {key: sums[key] / lengths_B[:, None] for key, lengths_B in zip(ids.keys(), lengths_KB, strict=True)}


def _mean_rows(jagged: JaggedTensor) -> Tensor:
    """Mean of each sample's rows, [B, W]; 0 for none."""
    return mean_pool(jagged.values(), jagged.offsets())
