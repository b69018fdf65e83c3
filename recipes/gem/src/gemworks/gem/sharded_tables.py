"""The model's embedding collections by gemworks.parallel's `FullyShardedEmbeddings`, with torchrec's names.

Letters: B samples, W embedding width, T ids of a feature, N rows of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gemworks.gem.model.gem import Gem
from gemworks.gem.optim import ADAGRAD_EPS
from gemworks.parallel.embeddings import FullyShardedEmbeddings, from_torchrec
from gemworks.parallel.meshes import Meshes
from gemworks.parallel.sparse_optim import RowWiseAdagrad
from gemworks.parallel.table_checkpoint import TablePieces
from gemworks.parallel.tables import TableSpec
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class _Pooled:
    """As much of torchrec's `KeyedTensor` as the model asks for."""

    def __init__(self, found: dict[str, Tensor]) -> None:
        self._found = found

    def to_dict(self) -> dict[str, Tensor]:
        return self._found


class ShardedCollection(nn.Module):
    """Takes the place of an `EmbeddingBagCollection` or an `EmbeddingCollection`.

    Its tables are no parameters; in a state dict they are the pieces that are held here, which a checkpoint reads and
    writes in place.

    Args:
        collection: whole, equal on all ranks; it is not used afterwards.
        meshes: with a sparse view.
        lr: of row-wise Adagrad.
        device: of the tables.
    """

    def __init__(
        self, collection: EmbeddingBagCollection | EmbeddingCollection, meshes: Meshes, lr: float, device: torch.device
    ) -> None:
        super().__init__()
        self.pooled = isinstance(collection, EmbeddingBagCollection)
        configs = getattr(collection, "embedding_bag_configs" if self.pooled else "embedding_configs")()
        tables, features = from_torchrec(configs)
        self.kind = "embedding_bags" if self.pooled else "embeddings"
        whole = {name: weight.detach() for name, weight in collection.named_parameters()}

        def init(table: TableSpec, rows: range) -> Tensor:
            return whole[f"{self.kind}.{table.name}.weight"][rows.start : rows.stop]

        self.optimizer = RowWiseAdagrad(lr=lr, eps=ADAGRAD_EPS)
        self.tables = FullyShardedEmbeddings(tables, features, meshes, self.optimizer, init=init, device=device)

    def forward(self, ids: KeyedJaggedTensor) -> Any:
        """Sums [B, W] per feature, with `to_dict`; or rows [T, W] per feature as torchrec's `JaggedTensor`s."""
        found = self.tables(ids)
        if self.pooled:
            return _Pooled(found)
        return {key: JaggedTensor(rows_TW, lengths=ids[key].lengths()) for key, rows_TW in found.items()}

    def pieces(self, kind: str) -> dict[str, Tensor]:
        """`TablePieces` by `<kind of collection>.<table>.weight`: of "weight" [N, W], or of "state" [N]."""
        stored = self.tables.checkpoint()
        return {f"{self.kind}.{name}.weight": stored[f"{name}.{kind}"] for name in self.tables.tables}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, pieces in self.pieces("weight").items():
            destination[prefix + name] = pieces

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, own in self.pieces("weight").items():
            given = state_dict.get(prefix + name)
            if given is None:
                missing_keys.append(prefix + name)
                continue
            assert isinstance(own, TablePieces)
            for place, (first, rows) in enumerate(own.pieces):
                source = given.pieces[place][1] if isinstance(given, TablePieces) else given[first : first + len(rows)]
                if source.data_ptr() != rows.data_ptr():
                    rows.copy_(source)


class FullyShardedTables:
    """The optimizers of sharded collections, inside backward."""

    def __init__(self, collections: dict[str, ShardedCollection], lr: float) -> None:
        self._collections = collections
        self._groups = [{"lr": lr} for _ in collections]

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        return self._groups

    def begin(self) -> None:
        for group, collection in zip(self._groups, self._collections.values(), strict=True):
            collection.optimizer.lr = group["lr"]

    def accumulators(self) -> dict[str, Tensor]:
        return {
            f"embeddings.{name}.{key}": pieces
            for name, collection in self._collections.items()
            for key, pieces in collection.pieces("state").items()
        }


def shard_tables(model: Gem, meshes: Meshes, lr: float, device: torch.device) -> FullyShardedTables:
    """Puts sharded collections in the place of the model's own; every rank calls it with equal tables."""
    found: dict[str, ShardedCollection] = {}
    for name in ("bags", "rows"):
        collection = getattr(model.embeddings, name)
        if collection is not None:
            found[name] = ShardedCollection(collection, meshes, lr, device)
            setattr(model.embeddings, name, found[name])
    return FullyShardedTables(found, lr)
