"""Attention inside fixed blocks: the offsets are cut every `block` rows, and the rest is flash attention.

Cutting costs O(T / block + B) and no pair across blocks is ever computed: memory and compute grow with T alone.
"""

from __future__ import annotations

import torch
from gemworks.jagged._checks import is_host
from torch import Tensor


def block_offsets(offsets: Tensor, block: int, total: int) -> Tensor:
    """Offsets of all blocks: each sequence is cut every `block` rows, its last block keeps the rest.

    On the host: exactly sum(ceil(length / block)) blocks. On a device, and while a compiler traces, that number can't
    be read, so the result has `total // block + B` blocks, the surplus ones empty at the end.

    >>> block_offsets(torch.tensor([0, 5, 5, 7]), 2, 7).tolist()
    [0, 2, 4, 5, 7]
    """
    lengths_B = offsets.diff()
    ends_B = ((lengths_B + (block - 1)) // block).cumsum(0)  # running number of blocks
    num_sequences = offsets.shape[0] - 1
    if num_sequences == 0:
        return offsets.clone()
    num_blocks = int(ends_B[-1]) if is_host(offsets) else total // block + num_sequences
    slot = torch.arange(num_blocks, device=offsets.device)
    sequence = torch.searchsorted(ends_B, slot, right=True).clamp(max=num_sequences - 1)
    first = torch.cat([ends_B.new_zeros(1), ends_B])[sequence]
    start = torch.minimum(offsets[sequence] + (slot - first).to(offsets.dtype) * block, offsets[sequence + 1])
    return torch.cat([start, offsets[-1:]]).to(offsets.dtype)
