"""BlockAttention: self-attention inside fixed blocks of each sequence, O(length)."""

from __future__ import annotations

from gemworks.jagged._checks import check_max_length, check_offsets
from gemworks.jagged.ops.block_attention.reference import block_offsets
from gemworks.jagged.ops.flash_attention.op import flash_attention
from gemworks.jagged.ops.rope.reference import RopeTables
from torch import Tensor

BLOCKS = (32, 64, 128)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    *,
    max_length_q: int | None = None,
    scale: float | None = None,
    block: int = 64,
    causal: bool = False,
    rope: RopeTables | None = None,
    qk_norm: bool = False,
    qk_norm_eps: float = 1e-6,
) -> Tensor:
    """Softmax self-attention inside blocks: row i of a sequence sees row j when `i // block == j // block`.

    Blocks count from the start of each sequence; the last one is as long as what is left. Compute and memory are
    O(T * block).

    Args:
        q: packed [T, N, H].
        k, v: packed [T, M, H] and [T, M, V]; M divides N.
        offsets_q: int32 or int64 [B + 1], of q, k and v alike.
        max_length_q: a bound of the lengths, known on the host.
        scale: factor of the logits; None means 1 / sqrt(H).
        block: 32, 64 or 128.
        causal: inside a block, admit keys at or before the query.
        rope: rotation of q's and k's rows, after qk_norm; positions are those in the sequence, not in the block.
        qk_norm: divide each head of q and k by its root mean square, no affine.

    Returns:
        [T, N, V] in q's dtype; rows past `offsets_q[-1]` are 0.

    Raises:
        ValueError: as for `flash_attention`; an unknown block.

    Source: BlockAttention, Engineering at Meta, 2026-08-03.

    >>> import torch
    >>> x = torch.randn(70, 1, 8)
    >>> out = block_attention(x, x, x, torch.tensor([0, 70]), max_length_q=128)
    >>> alone = block_attention(x[64:], x[64:], x[64:], torch.tensor([0, 6]), max_length_q=64)
    >>> torch.allclose(out[64:], alone)
    True
    """
    if block not in BLOCKS:
        raise ValueError(f"block: got {block}, expected one of {BLOCKS}; use flash_attention(window=...)")
    bound = check_max_length("max_length_q", max_length_q)
    if q.dim() != 3 or k.dim() != 3 or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"k: got shape {tuple(k.shape)} with q {tuple(q.shape)}, expected packed rows of the same sequences; "
            f"block attention is self-attention"
        )
    check_offsets("offsets_q", offsets_q, total=q.shape[0], max_length=bound, device=q.device)
    return flash_attention(
        q,
        k,
        v,
        block_offsets(offsets_q, block, q.shape[0]),
        max_length_q=min(block, bound) if bound else bound,
        scale=scale,
        causal=causal,
        qk_norm=qk_norm,
        qk_norm_eps=qk_norm_eps,
        rope=rope,
    )
