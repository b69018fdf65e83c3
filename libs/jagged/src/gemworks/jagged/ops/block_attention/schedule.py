"""Which rows each block holds: a small table made on the device of the offsets, once per batch, for every layer.

Letters: B sequences, S slots for blocks, T packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.jagged._checks import check_max_length, check_offsets
from gemworks.jagged._custom_op import custom_op
from gemworks.jagged.schedule_op import KERNEL_CONFIG, schedule_kernels
from torch import Tensor

BLOCKS = (32, 64, 128)


@dataclass(frozen=True, eq=False)
class BlockSchedule:
    """The blocks of one batch. Build it with `make`, give it to every `block_attention` call on these offsets.

    Attributes:
        table_S3: int32 [S, 3]: first row, number of rows that attend, number of rows to write. The third exceeds the
            second for rows that get 0: those past `offsets[-1]`, which have slots of their own. S = T // block + B + 1
            is a bound from the host, so surplus slots are all zero.
        block: rows of a full block.
        total: T.
    """

    table_S3: Tensor
    block: int
    total: int

    @staticmethod
    def make(offsets: Tensor, *, total: int, block: int = 64, max_length: int | None = None) -> BlockSchedule:
        """Cut each sequence every `block` rows. Nothing is read back from the device.

        Args:
            offsets: int32 or int64 [B + 1].
            total: T, the rows of q.
            block: 32, 64 or 128.
            max_length: a bound of the lengths; None for no bound. Only one below `block` changes anything: rows past it
                are absent.

        Raises:
            ValueError: an unknown block; offsets that do not fit.

        >>> BlockSchedule.make(torch.tensor([0, 40, 40, 45]), total=47, block=32).table_S3.tolist()
        [[0, 32, 32], [32, 8, 8], [40, 5, 5], [45, 0, 2], [0, 0, 0]]
        """
        if block not in BLOCKS:
            raise ValueError(f"block: got {block}, expected one of {BLOCKS}; use flash_attention(window=...)")
        bound = None if max_length is None else check_max_length("max_length", max_length)
        check_offsets("offsets", offsets, total=total, max_length=bound)
        limit = block if bound is None else min(block, bound)
        return BlockSchedule(block_schedule(offsets, total, block, limit), block, total)

    def check(self, name: str, *, total: int, block: int, device: torch.device) -> None:
        """Raise ValueError unless this schedule is of `total` rows, cut every `block`, on `device`."""
        got = (self.total, self.block, self.table_S3.device)
        if got != (total, block, device):
            raise ValueError(
                f"{name}: got total {got[0]}, block {got[1]} on {got[2]}, expected total {total}, block {block} on "
                f"{device}; build it with BlockSchedule.make from the same offsets"
            )


def block_schedule_definition(offsets: Tensor, total: int, block: int, limit: int) -> Tensor:
    """The table of `BlockSchedule`. One more sequence than there are, without keys, holds the rows past the end."""
    num_sequences = offsets.shape[0] - 1
    edges = torch.cat([offsets, offsets.new_full((1,), total)])
    counts = (edges.diff() + (block - 1)) // block
    ends = counts.cumsum(0)
    slot_S = torch.arange(_num_slots(offsets, total, block), device=offsets.device)
    sequence_S = torch.searchsorted(ends, slot_S, right=True).clamp(max=num_sequences)
    start_S = edges[sequence_S] + (slot_S - (ends - counts)[sequence_S]) * block
    stored_S = (edges[sequence_S + 1] - start_S).clamp(0, block)
    length_S = torch.where(sequence_S < num_sequences, stored_S.clamp(max=limit), 0)
    return torch.stack([start_S * (slot_S < ends[-1]), length_S, stored_S], dim=1).to(torch.int32)


block_schedule = custom_op("block_schedule", block_schedule_definition, device="cpu")


@block_schedule.register_fake
def _(offsets: Tensor, total: int, block: int, limit: int) -> Tensor:
    return offsets.new_empty(_num_slots(offsets, total, block), 3, dtype=torch.int32)


@block_schedule.register_kernel("cuda")
def block_schedule_on_a_gpu(offsets: Tensor, total: int, block: int, limit: int) -> Tensor:
    """The same by one kernel; under Triton's interpreter also on a host."""
    out = offsets.new_empty(_num_slots(offsets, total, block), 3, dtype=torch.int32)
    schedule_kernels()[1][(-(-offsets.shape[0] // KERNEL_CONFIG["R"]),)](
        offsets.contiguous(), out, offsets.shape[0] - 1, total, limit, out.shape[0], BLOCK=block, **KERNEL_CONFIG
    )
    return out


def _num_slots(offsets: Tensor, total: int, block: int) -> int:
    """sum(ceil(L / block)) over B + 1 sequences is at most T / block + (B + 1) (block - 1) / block."""
    return total // block + offsets.shape[0]
