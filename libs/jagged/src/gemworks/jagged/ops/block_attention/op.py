"""BlockAttention: self-attention inside fixed blocks of each sequence, O(length)."""

from __future__ import annotations

import math
from typing import Any

import torch
from gemworks.jagged._attention_args import autocast, check_attention, check_qkv, split_heads
from gemworks.jagged._checks import check_max_length, check_offsets, check_scale
from gemworks.jagged.dispatch import BLOCK_HEAD_DIMS, KERNEL_DTYPES
from gemworks.jagged.ops.block_attention.custom_op import block_attention_op, block_attention_qkv_op
from gemworks.jagged.ops.block_attention.reference import block_offsets
from gemworks.jagged.ops.block_attention.schedule import BLOCKS, BlockSchedule
from gemworks.jagged.ops.flash_attention.op import flash_attention
from gemworks.jagged.ops.rope.reference import RopeTables
from torch import Tensor


def max_fp32_tile(block: int, group: int) -> int:
    """Values of q in a float32 block that leave the backward within the shared memory of an SM (compiled for sm_90).

    The backward of grouped heads keeps two sets of tiles, that of 128 rows one of twice as many warps.

    >>> max_fp32_tile(64, 1), max_fp32_tile(64, 4), max_fp32_tile(128, 1)
    (8192, 4096, 4096)
    """
    return 8192 >> ((group > 1) + (block > 64))


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
    schedule: BlockSchedule | None = None,
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
        schedule: `BlockSchedule.make(offsets_q, total=T, block=block)`, so that the layers of a step share it; the
            kernels build one where it is None. The reference backend does not need it.

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
    q, k, v = autocast(q, k, v)
    check_scale(scale)
    if q.dim() != 3:
        raise ValueError(
            f"q: got shape {tuple(q.shape)}, expected packed [T, N, H]; split the heads with .unflatten(-1, (N, H))"
        )
    if k.dim() != 3 or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"k: got shape {tuple(k.shape)} with q {tuple(q.shape)}, expected packed rows of the same sequences; "
            f"block attention is self-attention"
        )
    if has_kernel(q, v.shape[-1], block, q.shape[1] // max(k.shape[1], 1)):
        settings = block_settings(q, k, v, offsets_q, bound, scale, block, causal, rope, qk_norm, qk_norm_eps, schedule)
        return block_attention_op(q, k, v, *settings)
    check_offsets("offsets_q", offsets_q, total=q.shape[0], max_length=bound, device=q.device)
    if schedule is not None:
        schedule.check("schedule", total=q.shape[0], block=block, device=q.device)
    return flash_attention(
        q,
        k,
        v,
        block_offsets(offsets_q, block, q.shape[0]),
        max_length_q=min(block, bound),
        scale=scale,
        causal=causal,
        qk_norm=qk_norm,
        qk_norm_eps=qk_norm_eps,
        rope=rope,
    )


def block_attention_qkv(
    qkv: Tensor,
    offsets: Tensor,
    *,
    num_heads: int,
    max_length: int | None = None,
    scale: float | None = None,
    block: int = 64,
    causal: bool = False,
    rope: RopeTables | None = None,
    qk_norm: bool = False,
    qk_norm_eps: float = 1e-6,
    schedule: BlockSchedule | None = None,
) -> Tensor:
    """`block_attention` of one packed projection; its gradient comes back packed too, without being joined.

    Args:
        qkv: [T, N + 2 M, H]: the heads of q, then those of k, then those of v.
        num_heads: N.

    The other arguments, the result [T, N, H] and the errors are `block_attention`'s.

    >>> import torch
    >>> qkv = torch.randn(70, 3, 8)
    >>> out = block_attention_qkv(qkv, torch.tensor([0, 70]), num_heads=1, max_length=128)
    >>> parts = [part.contiguous() for part in qkv.split(1, dim=1)]
    >>> torch.equal(out, block_attention(*parts, torch.tensor([0, 70]), max_length_q=128))
    True
    """
    check_qkv(qkv, num_heads)
    (qkv,) = autocast(qkv)
    q, k, v = split_heads(qkv, num_heads)
    if not has_kernel(qkv, qkv.shape[-1], block, num_heads // max(k.shape[1], 1)):
        return block_attention(
            q,
            k,
            v,
            offsets,
            max_length_q=max_length,
            scale=scale,
            block=block,
            causal=causal,
            rope=rope,
            qk_norm=qk_norm,
            qk_norm_eps=qk_norm_eps,
            schedule=schedule,
        )
    bound = check_max_length("max_length", max_length)
    settings = block_settings(q, k, v, offsets, bound, scale, block, causal, rope, qk_norm, qk_norm_eps, schedule)
    return block_attention_qkv_op(qkv, num_heads, *settings)


def has_kernel(q: Tensor, value_dim: int, block: int, group: int) -> bool:
    """Whether the kernels take these shapes; everything else is the reference backend's.

    Widths are multiples of 16 (half a head is whole 16-byte vectors) up to 128; float32 tiles have to fit.
    """
    head_dim = q.shape[-1]
    return (
        q.device.type == "cuda"
        and q.dtype in KERNEL_DTYPES
        and block in BLOCKS
        and head_dim in BLOCK_HEAD_DIMS
        and value_dim in BLOCK_HEAD_DIMS
        and (q.dtype != torch.float32 or block * max(head_dim, value_dim) <= max_fp32_tile(block, group))
    )


def block_settings(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    bound: int,
    scale: float | None,
    block: int,
    causal: bool,
    rope: RopeTables | None,
    qk_norm: bool,
    eps: float,
    schedule: BlockSchedule | None,
) -> tuple[Any, ...]:
    """What the custom ops take after their tensors, checked. Of q, k and v only the shapes count."""
    check_attention(q, k, v, offsets, None, max_length_q=bound, max_length_k=None, shared_query=False)
    if schedule is not None:
        schedule.check("schedule", total=q.shape[0], block=block, device=q.device)
    if rope is not None:
        RopeTables.check(rope, "rope", total=q.shape[0], head_dim=q.shape[-1], device=q.device)
    if schedule is None:
        schedule = BlockSchedule.make(offsets, total=q.shape[0], block=block, max_length=bound)
    cos, sin = (None, None) if rope is None else (rope.cos_TJ, rope.sin_TJ)
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    return schedule.table_S3, cos, sin, factor, block, causal, qk_norm, eps
