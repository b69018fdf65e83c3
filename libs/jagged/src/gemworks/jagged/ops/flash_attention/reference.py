"""Softmax attention on packed sequences: the definition, in PyTorch.

Letters: b sequences of a group, N query heads, M key heads, G = N / M, L queries, K keys, H and V head widths.
"""

from __future__ import annotations

import torch
from gemworks.jagged._dense import Mask, admitted_pairs, compute_dtype, run_groups, without_autocast
from gemworks.jagged._packing import Group, Layout, Plan, clear_holes
from gemworks.jagged.ops.flash_attention.bias import AttentionBias, group_bias
from gemworks.jagged.ops.norms.reference import rms_normalize
from gemworks.jagged.ops.rope.reference import RopeTables, apply_rope
from torch import Tensor


@without_autocast
def flash_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float,
    mask: Mask,
    bias: AttentionBias | None = None,
    shared_query: bool = False,
    qk_norm: bool = False,
    qk_norm_eps: float = 1e-6,
    rope: RopeTables | None = None,
    rope_k: RopeTables | None = None,
) -> Tensor:
    """`softmax(scale * Q K^T + bias) V` over the admitted pairs of each sequence; 0 for a query without any.

    Arguments as in `op.flash_attention`, checked there; k and v come flattened to [rows, M, H].

    Returns:
        [rows of q's side, N, V] in q's dtype.
    """
    dtype = q.dtype
    wide = compute_dtype(dtype)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    if qk_norm or rope is not None:
        q, k = q if shared_query else clear_holes(q, plan.layout_q), clear_holes(k, plan.layout_k)
    if qk_norm:
        q, k = rms_normalize(q, qk_norm_eps), rms_normalize(k, qk_norm_eps)
    if rope is not None:
        q = apply_rope(q, rope)
        k = apply_rope(k, rope if rope_k is None else rope_k)
    heads_per_key = q.shape[1] // k.shape[1]
    starts = {id(g): s for g, s in zip(plan.groups, _group_starts(plan), strict=True)}

    def compute(q_bMLH: Tensor, k_bMKH: Tensor, v_bMKV: Tensor, group: Group) -> Tensor:
        b, num_heads_k = q_bMLH.shape[:2]
        logits = torch.matmul(q_bMLH * scale, k_bMKH.mT)  # [b, M, G * L, K]
        logits = logits.view(b, num_heads_k * heads_per_key, -1, group.length_k)
        if bias is not None:
            start_q, start_k = starts[id(group)]
            with_times = bias.time_table is not None
            rows_q = _rows(plan.layout_q, start_q, b, group.length_q, q.shape[1]) if with_times else None
            rows_k = _rows(plan.layout_k, start_k, b, group.length_k, k.shape[1]) if with_times else None
            logits = logits + group_bias(bias, group, mask.align, rows_q, rows_k).to(wide)
        weights = _masked_softmax(logits, admitted_pairs(group, mask), some_empty=not _all_rows_see_a_key(group, mask))
        out = torch.matmul(weights.view(b, num_heads_k, -1, group.length_k), v_bMKV)
        return out

    return run_groups(q, k, v, plan, compute, shared_query=shared_query).to(dtype)


def _masked_softmax(logits: Tensor, admitted: Tensor | None, *, some_empty: bool) -> Tensor:
    """Softmax over the admitted keys [b or 1, L or 1, K]; a row without any is all zeros."""
    if admitted is None:
        return logits.softmax(-1)
    # Finite, so that a row of nothing but masked keys gives numbers (zeroed below) instead of NaN.
    # Added rather than filled: several times faster on a CPU, and the weight is the same exact 0.
    floor = torch.finfo(logits.dtype).min / 2
    offset = torch.zeros(admitted.shape, dtype=logits.dtype, device=logits.device).masked_fill_(~admitted, floor)
    weights = (logits + offset[:, None]).softmax(-1)
    if some_empty:
        weights = weights * admitted.any(-1, keepdim=True)[:, None]
    return weights


def _all_rows_see_a_key(group: Group, mask: Mask) -> bool:
    """Known on the host without reading: a real query row of this group always has an admitted key."""
    if group.lengths_q_b.device.type != "cpu":
        return False
    return mask.is_full or (group.same_lengths and mask.left >= 0 and mask.right >= 0)


def _group_starts(plan: Plan) -> list[tuple[int, int]]:
    """Padded rows before each group, on both sides, for one head."""
    starts, at_q, at_k = [], 0, 0
    for g in plan.groups:
        starts.append((at_q, at_k))
        at_q += g.sequences_b.shape[0] * g.length_q
        at_k += g.sequences_b.shape[0] * g.length_k
    return starts


def _rows(layout: Layout, start: int, b: int, length: int, num_heads: int) -> Tensor:
    """Packed row of each padded row of one group, [b, length]."""
    rows = layout.to_padded.rows[start * num_heads : (start + b * length) * num_heads]
    return rows.view(b, num_heads, length)[:, 0] // num_heads
