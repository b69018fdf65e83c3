"""Plain loops over single sequences: the slow, obvious truth that every backend is tested against.

Written apart from the reference backend on purpose: each pair is admitted by the sentence in the docstring of
`flash_attention`, one sequence at a time, without padding. Use float64 inputs.

Letters: B sequences, N query heads, M key heads, L queries, K keys, H, V head widths.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gemworks.jagged._dense import Align
from gemworks.jagged.ops.flash_attention.bias import AttentionBias
from torch import Tensor

Weigh = Callable[[Tensor, Tensor], Tensor]  # (logits [N, L, K], admitted [L, K]) -> weights [N, L, K]


def softmax_weights(logits: Tensor, admitted: Tensor) -> Tensor:
    """Softmax over the admitted keys; a row without any is zeros."""
    rows = []
    for i in range(logits.shape[1]):
        keys = admitted[i]
        row = torch.zeros_like(logits[:, i])
        if keys.any():
            row = row.masked_scatter(keys.expand_as(row), logits[:, i][:, keys].softmax(-1))
        rows.append(row)
    return torch.stack(rows, dim=1) if rows else logits


def activation_weights(activation: Callable[[Tensor], Tensor]) -> Weigh:
    """`activation` on the admitted pairs, 0 elsewhere."""
    return lambda logits, admitted: torch.where(admitted, activation(logits), torch.zeros_like(logits))


def is_admitted(
    i: int,
    j: int,
    length_q: int,
    length_k: int,
    *,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    align: Align = "bottom_right",
    block: int | None = None,
) -> bool:
    """Whether query i of a sequence sees its key j."""
    p_q = i + (length_k - length_q if align == "bottom_right" else 0)
    if block is not None and i // block != j // block:
        return False
    if causal and j > p_q:
        return False
    if isinstance(window, tuple):
        left, right = window
        return (left == -1 or j >= p_q - left) and (right == -1 or j <= p_q + right)
    return window is None or abs(j - p_q) < window


def attention_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor | None = None,
    *,
    weigh: Weigh,
    scale: float,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    align: Align = "bottom_right",
    block: int | None = None,
    bias: AttentionBias | None = None,
    shared_query: bool = False,
) -> Tensor:
    """`weigh(scale * Q K^T + bias) V`, one sequence at a time; arguments and result as for `flash_attention`."""
    if offsets_k is None and k.dim() == 3:
        offsets_k = offsets_q
    num_sequences = k.shape[0] if offsets_k is None else offsets_k.shape[0] - 1
    group = q.shape[1] // k.shape[-2]
    outs = []
    for b in range(num_sequences):
        start_q = 0 if offsets_q is None else int(offsets_q[b])
        q_b = q if offsets_q is None else q[start_q : int(offsets_q[b + 1])]
        start_k = 0 if offsets_k is None else int(offsets_k[b])
        k_b = k[b] if offsets_k is None else k[start_k : int(offsets_k[b + 1])]
        v_b = v[b] if offsets_k is None else v[start_k : int(offsets_k[b + 1])]
        length_q, length_k = q_b.shape[0], k_b.shape[0]
        admitted = torch.tensor(
            [
                [
                    is_admitted(i, j, length_q, length_k, causal=causal, window=window, align=align, block=block)
                    for j in range(length_k)
                ]
                for i in range(length_q)
            ],
            dtype=torch.bool,
        ).view(length_q, length_k)
        logits = scale * torch.einsum("lnh,knh->nlk", q_b, k_b.repeat_interleave(group, dim=1))
        if bias is not None:
            logits = logits + _bias_loop(bias, length_q, length_k, start_q, start_k, align)
        outs.append(torch.einsum("nlk,knv->lnv", weigh(logits, admitted), v_b.repeat_interleave(group, dim=1)))
    if shared_query:
        return torch.stack(outs) if outs else q.new_zeros(0, q.shape[0], q.shape[1], v.shape[-1])
    used = sum(o.shape[0] for o in outs)
    return torch.cat([*outs, q.new_zeros(q.shape[0] - used, q.shape[1], v.shape[-1])])


def _bias_loop(
    bias: AttentionBias, length_q: int, length_k: int, start_q: int, start_k: int, align: Align
) -> Tensor | float:
    """The bias of one sequence, [N, L, K], pair by pair."""
    if length_q == 0 or length_k == 0:
        return 0.0
    rows = []
    for i in range(length_q):
        p_q = i + (length_k - length_q if align == "bottom_right" else 0)
        row = []
        for j in range(length_k):
            value: Tensor | float = 0.0
            if bias.position_table is not None:
                reach = bias.position_table.shape[0] // 2
                value = value + bias.position_table[max(-reach, min(reach, j - p_q)) + reach]
            if bias.time_table is not None:
                assert bias.timestamps_q is not None
                times_k = bias.timestamps_q if bias.timestamps_k is None else bias.timestamps_k
                units = abs(int(times_k[start_k + j]) - int(bias.timestamps_q[start_q + i])) // bias.time_unit
                value = value + bias.time_table[min(units.bit_length(), bias.time_table.shape[0] - 1)]
            row.append(value)
        rows.append(torch.stack(row))
    return torch.stack(rows).permute(2, 0, 1)
