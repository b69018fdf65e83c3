"""What a team without gemworks.jagged computes attention with: padded `scaled_dot_product_attention`, torch's
`varlen_attn`, and batched products. The ladder's first rows; the same functions as the ops that later rows use.

Letters: B samples, L the batch's bound of lengths, T rows (B * L of a padded batch), N heads, H head width, P seeds,
K PFFN rows, S = B + 1 offsets.
"""

from __future__ import annotations

from typing import Any

import torch
from gemworks.gem.config import Activation
from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS
from torch import Tensor
from torch.nn import functional


class _Move(torch.autograd.Function):
    """Rows to their slots of a padded batch, or back: each is the other's gradient. No slot is used twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot_T: Tensor, num_slots: int | None) -> Tensor:
        ctx.save_for_backward(slot_T)
        ctx.back = x.shape[0] if num_slots is None else None
        if num_slots is None:
            return x.index_select(0, slot_T)
        return x.new_zeros(num_slots, *x.shape[1:]).index_copy_(0, slot_T, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (slot_T,) = ctx.saved_tensors
        return _Move.apply(grads[0], slot_T, ctx.back), None, None


def pad_rows(x: Tensor, slot_T: Tensor, num_slots: int) -> Tensor:
    """[T, ...] to [B * L, ...], zeros where there is no row."""
    out = _Move.apply(x, slot_T, num_slots)
    assert isinstance(out, Tensor)
    return out


def unpad_rows(x: Tensor, slot_T: Tensor) -> Tensor:
    """[B * L, ...] to [T, ...]."""
    out = _Move.apply(x, slot_T, None)
    assert isinstance(out, Tensor)
    return out


def slots(offsets_S: Tensor, sample_T: Tensor, max_length: int) -> Tensor:
    """The row of each event in a padded batch, int64 [T]."""
    position_T = torch.arange(sample_T.shape[0], device=sample_T.device) - offsets_S[sample_T]
    return sample_T * max_length + position_T


def _key_mask(lengths_B: Tensor, max_length: int) -> Tensor:
    """bool [B, L]: real rows. A sequence without any admits its first row: softmax over nothing would be NaN."""
    row_L = torch.arange(max_length, device=lengths_B.device)
    return row_L < lengths_B[:, None].clamp(min=1)


def padded_attention(
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    lengths_B: Tensor,
    *,
    max_length: int,
    scale: float,
    block: int | None = None,
    window: int | None = None,
) -> Tensor:
    """Self-attention of a padded batch, [B * L, N, H]; rows that are padding come out as finite garbage.

    Args:
        block: attend inside blocks of this many rows; None for all.
        window: keys on each side of a query; None for all. It takes a dense [L, L] mask.
    """
    batch, rows = lengths_B.shape[0], max_length
    if block is not None and block < max_length:
        row_L = torch.arange(max_length // block, device=lengths_B.device) * block
        lengths_B = (lengths_B[:, None] - row_L).clamp(0, block).flatten()
        batch, rows = lengths_B.shape[0], block
    mask = _key_mask(lengths_B, rows)[:, None, None, :]
    if window is not None:
        row_L = torch.arange(rows, device=q_TNH.device)
        near_LL = (row_L[:, None] - row_L).abs() <= window
        # a row of padding whose window holds no real key sees itself
        mask = (mask & near_LL) | torch.eye(rows, dtype=torch.bool, device=q_TNH.device)
        own = torch.arange(rows, device=q_TNH.device) < lengths_B[:, None].clamp(min=1)
        mask = mask & (own[:, None, None, :] | ~own[:, None, :, None])
    q, k, v = (x.view(batch, rows, *x.shape[1:]).transpose(1, 2) for x in (q_TNH, k_TNH, v_TNH))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).reshape(-1, *v_TNH.shape[1:])


def padded_pool(
    seeds_PNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lengths_B: Tensor, *, max_length: int, scale: float
) -> Tensor:
    """Seeds attend over padded sequences: [B, P, N, H]; 0 for a sample without events."""
    batch = lengths_B.shape[0]
    mask = _key_mask(lengths_B, max_length)[:, None, None, :]
    q = seeds_PNH.transpose(0, 1).expand(batch, -1, -1, -1)
    k, v = (x.view(batch, max_length, *x.shape[1:]).transpose(1, 2) for x in (k_TNH, v_TNH))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
    return torch.where((lengths_B > 0)[:, None, None, None], out, 0)


def padded_gdpa_pool(
    seeds_PNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    lengths_B: Tensor,
    *,
    max_length: int,
    scale: float,
    activation: Activation,
) -> Tensor:
    """`act(scale * Q K^T) V` with shared seeds over padded sequences: [B, P, N, H]."""
    batch = lengths_B.shape[0]
    inside = (torch.arange(max_length, device=lengths_B.device) < lengths_B[:, None])[:, None, None, :]
    k, v = (x.view(batch, max_length, *x.shape[1:]).transpose(1, 2) for x in (k_TNH, v_TNH))
    weights = ACTIVATIONS[activation](scale * (seeds_PNH.transpose(0, 1) @ k.transpose(-1, -2)))
    return (torch.where(inside, weights, 0) @ v).transpose(1, 2)


def matmul_pffn(
    q_TNH: Tensor,
    k_BKNH: Tensor,
    v_BKNH: Tensor,
    *,
    max_length: int,
    scale: float,
    activation: Activation,
    slot_T: Tensor | None,
) -> Tensor:
    """`act(scale * Q K^T) V` with K and V of each sample, by batched products over a padded batch.

    Args:
        slot_T: of packed rows, which are then padded before and unpadded after; None where q is padded already.
    """
    batch = k_BKNH.shape[0]
    q = q_TNH if slot_T is None else pad_rows(q_TNH, slot_T, batch * max_length)
    q_BNLH = q.view(batch, max_length, *q.shape[1:]).transpose(1, 2)
    k_BNKH, v_BNKH = k_BKNH.transpose(1, 2), v_BKNH.transpose(1, 2)
    weights_BNLK = ACTIVATIONS[activation](scale * (q_BNLH @ k_BNKH.transpose(-1, -2)))
    o_TNH = (weights_BNLK @ v_BNKH).transpose(1, 2).reshape(q.shape)
    return o_TNH if slot_T is None else unpad_rows(o_TNH, slot_T)


def varlen_attention(
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """torch's `varlen_attn` (FlashAttention-2) on packed sequences; fp16 or bf16 on a GPU."""
    from torch.nn.attention.varlen import varlen_attn  # torch 2.10 and later

    size = (-1, -1) if window is None else (window, window)
    out = varlen_attn(q_TNH, k_TNH, v_TNH, cu_q, cu_k, max_q, max_k, scale=scale, window_size=size)
    assert isinstance(out, Tensor)
    return out
