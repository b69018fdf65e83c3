"""The part of an embedding table that this process holds, for checkpoints.

torchrec gives a sharded table as a `ShardedTensor`, which torch DCP writes, but does not copy for a write in the
background. This class does the little that both need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class TablePieces:
    """Pieces of a tensor, each with its offsets in the whole; implements DCP's `_Checkpointable` protocol.

    Loading writes into the pieces; a deep copy is on the CPU.

    Args:
        shape: of the whole.
        pieces: offsets and tensor of each piece; none where other processes hold all of it.
    """

    def __init__(self, shape: torch.Size, pieces: list[tuple[tuple[int, ...], Tensor]]) -> None:
        self.shape = shape
        self.pieces = pieces

    @staticmethod
    def of(sharded: ShardedTensor) -> TablePieces:
        """The local shards, sharing their memory."""
        local = [(tuple(s.metadata.shard_offsets), s.tensor.detach()) for s in sharded.local_shards()]
        return TablePieces(sharded.metadata().size, local)

    def size(self) -> torch.Size:
        return self.shape

    def __deepcopy__(self, memo: dict[int, Any]) -> TablePieces:
        return TablePieces(self.shape, [(at, torch.empty_like(x, device="cpu").copy_(x)) for at, x in self.pieces])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), x.shape) for at, x in self.pieces]

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(at)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(at), x.shape),
                    properties=TensorProperties.create_from_tensor(x),
                    size=self.shape,
                ),
            )
            for at, x in self.pieces
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for at, x in self.pieces:
            if index.offset is None or torch.Size(at) == index.offset:
                return x
        raise ValueError(f"{index.fqn}: got offset {index.offset}, expected that of a piece held here")
