"""What the layers of one batch share: tile schedules and index tables, built once per batch and event type.

Letters: B samples, T packed events, S = B + 1 offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.gem.config import EventSizes, ModelConfig
from gemworks.gem.kernels import KernelConfig
from gemworks.gem.model.plain import slots
from gemworks.jagged import BlockSchedule, TileSchedule
from gemworks.jagged.ops.block_attention.reference import block_offsets
from torch import Tensor


@dataclass(frozen=True)
class SequencePlan:
    """Of one event type's sequences in one batch; None for what the chosen kernels do not read.

    Attributes:
        attention: tiles of full or windowed self-attention.
        blocks_S3: the table of a `BlockSchedule`: the blocks of block attention.
        pffn: tiles of the PFFN, whose keys are K rows per sample.
        pooling: tiles of the seeds' attention.
        cu_attention: int32 offsets of what attends to itself (sequences, or their blocks), for `varlen_attn`.
        cu_sequences: int32 offsets of the sequences.
        cu_seeds: int32 offsets of the seeds, repeated per sample.
        slot_T: the row of each event in a padded batch.
    """

    attention: TileSchedule | None = None
    blocks_S3: Tensor | None = None
    pffn: TileSchedule | None = None
    pooling: TileSchedule | None = None
    cu_attention: Tensor | None = None
    cu_sequences: Tensor | None = None
    cu_seeds: Tensor | None = None
    slot_T: Tensor | None = None


def make_plan(
    offsets_S: Tensor,
    sample_T: Tensor,
    max_length: int,
    sizes: EventSizes,
    config: ModelConfig,
    kernels: KernelConfig,
) -> SequencePlan:
    """The plan of a packed batch, on the device of its offsets; nothing is read back."""
    total, on_gpu = sample_T.shape[0], offsets_S.device.type == "cuda"
    shared = kernels.share_schedule and on_gpu  # the reference backend reads no schedule
    block = sizes.attention == "block"
    parts: dict[str, TileSchedule | Tensor] = {}
    if shared and kernels.attention == "gemworks":
        if block:
            schedule = BlockSchedule.make(offsets_S, total=total, block=config.block, max_length=max_length)
            parts["blocks_S3"] = schedule.table_S3
        else:
            parts["attention"] = _apart(TileSchedule.build(offsets_S, total_q=total))
    if shared and kernels.pffn == "gemworks":
        parts["pffn"] = _apart(TileSchedule.build(offsets_S, total_q=total, rows_k=config.pffn_rows))
    if shared and kernels.pooling == "gemworks":
        parts["pooling"] = _apart(TileSchedule.build(None, offsets_S, total_q=sizes.num_seeds, total_k=total))
    if kernels.attention == "varlen":
        offsets = block_offsets(offsets_S, config.block, total) if block else offsets_S
        parts["cu_attention"] = offsets.to(torch.int32)
    if kernels.pooling == "varlen":
        parts["cu_sequences"] = offsets_S.to(torch.int32)
        steps = torch.arange(offsets_S.shape[0], device=offsets_S.device, dtype=torch.int32)
        parts["cu_seeds"] = steps * sizes.num_seeds
    if kernels.pffn == "matmul":
        parts["slot_T"] = slots(offsets_S, sample_T, max_length)
    return SequencePlan(**parts)  # pyright: ignore[reportArgumentType]


def _apart(schedule: TileSchedule) -> TileSchedule:
    """With tensors of their own: where a view begins is a size to the compiler, and another one compiles again."""
    return TileSchedule(tuple(x.clone() for x in schedule.tensors), schedule.heights)
