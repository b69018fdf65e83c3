"""How many (query, key) pairs an attention call admits, and what they cost: the numerators of MFU.

Counts are exact and stay on the device of the offsets: nothing is read back.
"""

from __future__ import annotations

import torch
from gemworks.jagged._attention_args import make_mask
from gemworks.jagged._dense import Align
from gemworks.jagged._packing import segment_ids
from gemworks.jagged.convert import offsets_from_lengths
from torch import Tensor


def num_pairs(
    lengths_q: Tensor,
    lengths_k: Tensor | int | None = None,
    *,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    align: Align = "bottom_right",
    block: int | None = None,
    total_q: int | None = None,
) -> Tensor:
    """Admitted pairs of a batch, int64 scalar.

    Args:
        lengths_q: int32 or int64 [B]. For a shared query: torch.full((B,), R).
        lengths_k: [B]; an integer for a 4-D k of that many rows; None for self-attention.
        causal, window, align: as for `flash_attention`.
        block: count as `block_attention` does; then lengths_k and window must be None.
        total_q: sum of lengths_q, when the caller knows it; needed off the host for causal or window.

    Raises:
        ValueError: block together with lengths_k or window; total_q missing off the host.

    >>> lengths = torch.tensor([3, 0, 2])
    >>> int(num_pairs(lengths)), int(num_pairs(lengths, causal=True)), int(num_pairs(lengths, 4))
    (13, 9, 20)
    """
    lengths_q = lengths_q.to(torch.int64)
    if block is not None:
        if lengths_k is not None or window is not None:
            raise ValueError("block: got lengths_k or window too, expected neither; blocks are self-attention")
        full, rest = lengths_q // block, lengths_q % block
        if causal:
            return (full * (block * (block + 1) // 2) + rest * (rest + 1) // 2).sum()
        return (full * block * block + rest * rest).sum()
    if lengths_k is None:
        lengths_k = lengths_q
    elif isinstance(lengths_k, int):
        lengths_k = torch.full_like(lengths_q, lengths_k)
    lengths_k = lengths_k.to(torch.int64)
    mask = make_mask(causal, window, align)
    if mask.is_full:
        return (lengths_q * lengths_k).sum()
    if total_q is None:
        if lengths_q.device.type != "cpu":
            raise ValueError(f"total_q: missing with lengths on {lengths_q.device}; pass the number of rows")
        total_q = int(lengths_q.sum())
    offsets = offsets_from_lengths(lengths_q)
    sequence = segment_ids(offsets, total_q)
    zero = lengths_q.new_zeros(1)
    keys = torch.cat([lengths_k, zero])[sequence]  # rows past the end see no key
    position = torch.arange(total_q, device=lengths_q.device) - offsets[sequence]
    if align == "bottom_right":
        position = position + keys - torch.cat([lengths_q, zero])[sequence]
    first = (position - mask.left).clamp(min=0)
    last = torch.minimum(position + mask.right, keys - 1)
    return (last - first + 1).clamp(min=0).sum()


def attention_flops(pairs: int, num_heads: int, head_dim: int, value_dim: int | None = None) -> int:
    """Forward FLOPs of `pairs` admitted pairs: `2 N (H + V)` each, for the two matrix products alone.

    Backward counts twice this in MFU (performance of the model), 2.5 times in torch's FLOP counter (which counts the
    recomputed logits).

    >>> attention_flops(10, 2, 64)
    5120
    """
    return 2 * pairs * num_heads * (head_dim + (head_dim if value_dim is None else value_dim))
