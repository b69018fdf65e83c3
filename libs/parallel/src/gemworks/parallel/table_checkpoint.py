"""A table in a distributed checkpoint: pieces of a global tensor, so that torch's DCP can reshard it to any other
plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class TablePieces(torch.Tensor):
    """The rows of one table that this rank stores, as pieces of the whole table [num_rows, ...].

    It only serves `torch.distributed.checkpoint` (its `_Checkpointable` protocol, also of `async_save`); it cannot be
    computed with.

    Args:
        shape: of the whole table.
        pieces: first row and rows of each piece; loading writes into them.
        like: dtype and device.
    """

    pieces: list[tuple[int, Tensor]]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], pieces: list[tuple[int, Tensor]], like: Tensor) -> TablePieces:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        self.pieces = pieces
        return self  # type: ignore[return-value]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=self._offsets(start), sizes=torch.Size(rows.shape))
            for start, rows in self.pieces
        ]

    def __create_write_items__(self, fqn: str, obj: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, self._offsets(start)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=self._offsets(start), sizes=torch.Size(rows.shape)),
                    properties=TensorProperties.create_from_tensor(rows),
                    size=torch.Size(self.shape),
                ),
            )
            for start, rows in self.pieces
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for start, rows in self.pieces:
            if index.offset is None or tuple(index.offset) == tuple(self._offsets(start)):
                return rows
        raise ValueError(f"checkpoint: no piece of this table begins at {index.offset}")

    def _offsets(self, start: int) -> torch.Size:
        return torch.Size([start] + [0] * (len(self.shape) - 1))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.new_empty.default:
            # DCP copies for a write in the background by making an empty one and copying the attributes into it
            return TablePieces(tuple(args[1]), [], torch.empty(0, dtype=args[0].dtype, device="cpu"))
        raise ValueError(
            f"TablePieces: got {func}, but it only serves checkpoints; use FullyShardedEmbeddings.full_table"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"TablePieces({tuple(self.shape)}, {[(s, tuple(r.shape)) for s, r in self.pieces]})"
