"""Attention forward and backward as explicit formulas in PyTorch: the CPU kernel of the custom ops.

One family: `P V` with `P = softmax(scale * Q K^T)` or `P = act(scale * Q K^T)`, over the admitted pairs of each
sequence. The backward recomputes P from q, k and the saved log-sum-exp and holds one group's logits at a time.

Letters: b sequences of a group, T packed rows, N query heads, M key heads, G = N / M, L queries, K keys, H, V widths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from gemworks.jagged._dense import Mask, admitted_pairs, compute_dtype, padded_groups, without_autocast
from gemworks.jagged._packing import Group, Plan, pad_rows, split_groups, unpad_rows
from gemworks.jagged.ops.attention_core.rounding import round_mx
from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS, DERIVATIVES
from torch import Tensor

SOFTMAX = "softmax"
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Rule:
    """What is computed: `scale`, softmax or the name of an activation, and the admitted pairs.

    Attributes:
        round_p, round_ds: round P, and dS, with `round_mx` along the contraction of each product that reads it.
    """

    scale: float
    activation: str
    mask: Mask
    shared_query: bool
    round_p: bool = False
    round_ds: bool = False

    @property
    def is_softmax(self) -> bool:
        return self.activation == SOFTMAX


@without_autocast
def forward_reference(q: Tensor, k: Tensor, v: Tensor, plan: Plan, rule: Rule) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp.

    Args:
        q: packed [T, N, H], or [R, N, H] with `rule.shared_query`.
        k, v: packed or flattened fixed rows, [rows, M, H] and [rows, M, V].

    Returns:
        [rows of q's side, N, V] in q's dtype; 0 for a query without a key and for rows of no sequence. The base-2
        logarithm of the sum of exponentials of the scaled logits, [N, rows of q's side], +inf for a query without a
        key; [N, 0] for an activation. float32 (float64 for float64).
    """
    wide = compute_dtype(q.dtype)
    num_heads = q.shape[1]
    parts = padded_groups(q.to(wide), k.to(wide), v.to(wide), plan, shared_query=rule.shared_query)
    outs, sums = [], []
    for q_bMXH, k_bMKH, v_bMKV, group in parts:
        logits = _logits(q_bMXH, k_bMKH, rule)
        if rule.is_softmax:
            weights, lse_bNL = _softmax(logits, group, rule, num_heads)
            sums.append(lse_bNL.reshape(-1, 1))
            if rule.round_p:
                weights = _round_weights(weights, lse_bNL)
        else:
            weights = _masked(ACTIVATIONS[rule.activation](logits), group, rule, num_heads)
            weights = round_mx(weights, -1) if rule.round_p else weights
        outs.append(torch.matmul(weights, v_bMKV).reshape(-1, v.shape[-1]))
    padded = torch.cat(outs) if outs else q.new_zeros(0, v.shape[-1], dtype=wide)
    out = unpad_rows(padded, plan.layout_q, num_heads).to(q.dtype)
    if not rule.is_softmax:
        return out, q.new_empty(num_heads, 0, dtype=wide)
    lse_P = torch.cat(sums) if sums else q.new_zeros(0, 1, dtype=wide)
    lse_TN = unpad_rows(lse_P, plan.layout_q, num_heads)[:, :, 0]
    holes = plan.layout_q.to_packed.holes
    if holes is not None:
        flat = lse_TN.reshape(-1)
        fill = flat.masked_fill if holes.dtype == torch.bool else lambda at, x: flat.index_fill(0, at, x)
        lse_TN = fill(holes, math.inf).view(lse_TN.shape)
    return out, lse_TN.t().contiguous()


@without_autocast
def backward_reference(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, plan: Plan, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), shaped and typed as q, k and v.

    With P as above and dP = dO V^T:

        dV = P^T dO
        dS = P * (dP - rowsum(dO * O))    softmax
        dS = act'(scale * Q K^T) * dP     an activation
        dQ = scale * dS K,  dK = scale * dS^T Q

    Rounding (`rule.round_p`, `rule.round_ds`) is for operands of products: P in dV alone, dS in dQ (along keys) and in
    dK (along queries).

    Args:
        out, lse: of the forward; needed for softmax only.
    """
    wide = compute_dtype(q.dtype)
    num_heads, num_heads_k = q.shape[1], k.shape[1]
    d_out = d_out.to(wide)
    extra: list[list[Tensor]] = []
    if rule.is_softmax:
        assert out is not None
        assert lse is not None
        delta_TN = torch.linalg.vecdot(d_out, out.to(wide))
        for row in (lse.t(), delta_TN):
            padded = pad_rows(row.unsqueeze(-1), plan.layout_q)
            extra.append(split_groups(padded, plan.groups, num_heads, "q"))
    d_parts = split_groups(pad_rows(d_out, plan.layout_q), plan.groups, num_heads, "q")
    dqs, dks, dvs = [], [], []
    parts = padded_groups(q.to(wide), k.to(wide), v.to(wide), plan, shared_query=rule.shared_query)
    for i, (q_bMXH, k_bMKH, v_bMKV, group) in enumerate(parts):
        shape = q_bMXH.shape[:3]
        d_bMXV = d_parts[i].reshape(*shape, v.shape[-1])
        logits = _logits(q_bMXH, k_bMKH, rule)
        dp = torch.matmul(d_bMXV, v_bMKV.mT)
        if rule.is_softmax:
            lse_bMX1, delta_bMX1 = (x[i].reshape(*shape, 1) for x in extra)
            weights = torch.exp2(_masked_logits(logits, group, rule, num_heads) - lse_bMX1)
            ds = dp.sub_(delta_bMX1).mul_(weights)
        else:
            weights = _masked(ACTIVATIONS[rule.activation](logits), group, rule, num_heads)
            ds = _masked(DERIVATIVES[rule.activation](logits).mul_(dp), group, rule, num_heads)
        if rule.round_p:
            weights = _round_queries(_own_queries(weights, group, num_heads), num_heads)
        ds_of_k = ds
        if rule.round_ds:
            ds_of_k, ds = _round_queries(ds, num_heads), round_mx(ds, -1)
        dvs.append(torch.matmul(weights.mT, d_bMXV).reshape(-1, v.shape[-1]))
        dks.append(torch.matmul(ds_of_k.mT, q_bMXH).mul_(rule.scale).reshape(-1, q.shape[-1]))
        dq = torch.matmul(ds, k_bMKH).mul_(rule.scale)
        dqs.append(dq.view(shape[0], num_heads, -1, q.shape[-1]) if rule.shared_query else dq.reshape(-1, q.shape[-1]))
    if not dqs:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dk = unpad_rows(torch.cat(dks), plan.layout_k, num_heads_k)
    dv = unpad_rows(torch.cat(dvs), plan.layout_k, num_heads_k)
    if rule.shared_query:
        dq = torch.stack([x.sum(0) for x in dqs]).sum(0).transpose(0, 1)  # [N, R, H] -> [R, N, H]
    else:
        dq = unpad_rows(torch.cat(dqs), plan.layout_q, num_heads)
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype), dv.to(v.dtype)


def _logits(q_bMXH: Tensor, k_bMKH: Tensor, rule: Rule) -> Tensor:
    """Scaled logits; in units of log 2 for softmax."""
    return torch.matmul(q_bMXH * (rule.scale * (LOG2_E if rule.is_softmax else 1.0)), k_bMKH.mT)


def _softmax(logits: Tensor, group: Group, rule: Rule, num_heads: int) -> tuple[Tensor, Tensor]:
    """Weights in the shape of the logits and log-sum-exp [b, N, L]."""
    logits = _masked_logits(logits, group, rule, num_heads)
    peak = logits.amax(-1, keepdim=True)
    weights = torch.exp2(logits - peak)
    total = weights.sum(-1, keepdim=True)
    weights = weights.div_(total)
    lse = (peak + torch.log2(total)).view(logits.shape[0], num_heads, -1)
    admitted = admitted_pairs(group, rule.mask)
    if admitted is None:
        return weights, lse
    some = admitted.any(-1)[:, None]  # [b or 1, 1, L or 1]
    by_head = weights.view(logits.shape[0], num_heads, -1, logits.shape[-1])
    return (by_head * some[..., None]).view(logits.shape), lse.masked_fill(~some, math.inf)


def _masked_logits(logits: Tensor, group: Group, rule: Rule, num_heads: int) -> Tensor:
    """A large negative number added to pairs that don't count: their weight is an exact 0, and nothing is infinite."""
    admitted = admitted_pairs(group, rule.mask)
    if admitted is None:
        return logits
    floor = torch.finfo(logits.dtype).min / 2
    offset = torch.zeros(admitted.shape, dtype=logits.dtype, device=logits.device).masked_fill_(~admitted, floor)
    by_head = logits.view(logits.shape[0], num_heads, -1, logits.shape[-1])
    return (by_head + offset[:, None]).view(logits.shape)


def _masked(x: Tensor, group: Group, rule: Rule, num_heads: int) -> Tensor:
    """Zero the pairs outside a mask. Padding needs none: it is rows of zeros, and act(0) = 0."""
    if rule.mask.is_full:
        return x
    admitted = admitted_pairs(group, rule.mask)
    assert admitted is not None
    by_head = x.view(x.shape[0], num_heads, -1, x.shape[-1])
    return (by_head * admitted[:, None].to(x.dtype)).view(x.shape)


def _round_weights(weights: Tensor, lse_bNL: Tensor) -> Tensor:
    """Softmax's, as kernels have them before the division by the sum: 2^(logit - an integer)."""
    part = torch.exp2(lse_bNL - lse_bNL.ceil()).nan_to_num(1.0)  # of a row without a key: its weights are 0
    part = part.view(*weights.shape[:-1], 1)
    return round_mx(weights * part, -1) / part


def _round_queries(x: Tensor, num_heads: int) -> Tensor:
    """Along the query rows of each head; `x` is [b, M, G * L, K]."""
    by_head = x.view(x.shape[0], num_heads, -1, x.shape[-1])
    return round_mx(by_head, 2).reshape(x.shape)


def _own_queries(x: Tensor, group: Group, num_heads: int) -> Tensor:
    """Zeros in the rows that pad the queries."""
    own = torch.arange(group.length_q, device=x.device) < group.lengths_q_b[:, None]
    by_head = x.view(x.shape[0], num_heads, -1, x.shape[-1])
    return (by_head * own[:, None, :, None]).view(x.shape)
