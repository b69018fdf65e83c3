"""What the reference of every attention op shares: which pairs are admitted, and how groups are computed.

Letters: b sequences of a group, N query heads, M key heads, G = N / M, L query rows, K key rows, H and V head widths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, Literal, ParamSpec, TypeVar

import torch
from gemworks.jagged._packing import Group, Plan, pad_rows, split_groups, unpad_rows
from torch import Tensor

Align = Literal["top_left", "bottom_right"]
_UNBOUNDED = 1 << 60
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Mask:
    """Which (query, key) pairs of one sequence count.

    With positions `p_k = j` for keys and `p_q = i` (top_left) or `i + length_k - length_q` (bottom_right) for queries,
    a pair is admitted when `p_q - left <= p_k <= p_q + right`.
    """

    left: int = _UNBOUNDED
    right: int = _UNBOUNDED
    align: Align = "bottom_right"

    @property
    def is_full(self) -> bool:
        return self.left >= _UNBOUNDED and self.right >= _UNBOUNDED


def without_autocast(function: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """`function` with autocast off: it names the dtype of every product, and autocast would change it."""

    @wraps(function)
    def call(x: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        if x.device.type not in ("cpu", "cuda"):
            return function(x, *args, **kwargs)
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args, **kwargs)

    return call


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def relative_positions(group: Group, align: Align) -> Tensor:
    """`p_k - p_q`, int64 [b or 1, L, K]."""
    device = group.lengths_q_b.device
    k_K = torch.arange(group.length_k, device=device)
    q_L = torch.arange(group.length_q, device=device)
    relative = (k_K[None, :] - q_L[:, None])[None]
    if align == "bottom_right" and not group.same_lengths:
        relative = relative - (group.lengths_k_b - group.lengths_q_b)[:, None, None]
    return relative


def admitted_pairs(group: Group, mask: Mask) -> Tensor | None:
    """Boolean [b or 1, L or 1, K], or None when every key of the group counts for every query."""
    keys = None
    if not group.uniform_k:
        k_K = torch.arange(group.length_k, device=group.lengths_k_b.device)
        keys = (k_K < group.lengths_k_b[:, None])[:, None, :]
    if mask.is_full:
        return keys
    relative = relative_positions(group, mask.align)
    near = (relative <= mask.right) & (relative >= -mask.left)
    return near if keys is None else near & keys


def padded_groups(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, shared_query: bool
) -> list[tuple[Tensor, Tensor, Tensor, Group]]:
    """Of each group: q [b, M, G * L, H] (the query heads of one key head side by side), k and v [b, M, K, ...]."""
    num_heads_k = k.shape[1]
    k_parts = split_groups(pad_rows(k, plan.layout_k), plan.groups, num_heads_k, "k")
    v_parts = split_groups(pad_rows(v, plan.layout_k), plan.groups, num_heads_k, "k")
    if shared_query:
        shared_NRH = q.transpose(0, 1)
        q_parts = [shared_NRH.expand(g.sequences_b.shape[0], *shared_NRH.shape) for g in plan.groups]
    else:
        q_parts = split_groups(pad_rows(q, plan.layout_q), plan.groups, q.shape[1], "q")
    folded = [x.reshape(x.shape[0], num_heads_k, -1, q.shape[-1]) for x in q_parts]
    return list(zip(folded, k_parts, v_parts, plan.groups, strict=True))


GroupFn = Callable[[Tensor, Tensor, Tensor, Group], Tensor]


def run_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    compute: GroupFn,
    *,
    shared_query: bool,
) -> Tensor:
    """Pad, compute every group, and pack again.

    `compute` gets what `padded_groups` gives and returns [b, M, G * L, V].

    Args:
        q: packed [T, N, H]; [R, N, H] with `shared_query`.
        k, v: packed or flattened fixed rows, [rows, M, H] and [rows, M, V].

    Returns:
        [rows of q's side, N, V]; rows of no sequence are zero.
    """
    groups = padded_groups(q, k, v, plan, shared_query=shared_query)
    outs = [compute(*group).reshape(-1, v.shape[-1]) for group in groups]
    # Without any group there is no pair: an empty product keeps zeros tied to the inputs, so every gradient is zero.
    padded = torch.cat(outs) if outs else (v.reshape(-1, v.shape[-1])[:0] + 0 * q.sum() + 0 * k.sum())
    return unpad_rows(padded, plan.layout_q, q.shape[1])
