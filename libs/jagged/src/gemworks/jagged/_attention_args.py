"""Checks shared by the attention ops, and the two sides (q rows, k rows) that the plan is made of.

Letters: B sequences, T packed rows, R shared query rows, K fixed key rows, N query heads, M key heads, H and V widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.jagged._checks import check_float, check_head_dim, check_max_length, check_offsets
from gemworks.jagged._dense import Align, Mask
from gemworks.jagged._packing import Side
from torch import Tensor


@dataclass(frozen=True)
class AttentionArgs:
    """Checked arguments: k and v flattened to [rows, M, H], and what the plan needs."""

    q: Tensor
    k: Tensor
    v: Tensor
    side_q: Side
    side_k: Side
    num_sequences: int
    shared_query: bool


def make_mask(causal: bool, window: int | tuple[int, int] | None, align: Align) -> Mask:
    """The admitted pairs as one pair of bounds; see `flash_attention` for the meaning of `causal` and `window`."""
    full = Mask()
    left, right = full.left, full.right
    if isinstance(window, tuple):
        if len(window) != 2 or any(isinstance(w, bool) or not isinstance(w, int) or w < -1 for w in window):
            raise ValueError(f"window: got {window}, expected (left, right), each >= 0, or -1 for no bound")
        left, right = (bound if w == -1 else w for w, bound in zip(window, (left, right), strict=True))
    elif window is not None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"window: got {window}, expected an integer >= 1; 1 lets each row see itself alone")
        left = right = window - 1
    if isinstance(causal, str):
        raise ValueError(f"causal: got {causal!r}, expected True or False; every string would count as True")
    if causal:
        right = min(right, 0)
    if align not in ("top_left", "bottom_right"):
        raise ValueError(f"align: got {align!r}, expected 'top_left' or 'bottom_right'")
    return Mask(left, right, align)


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor | None,
    *,
    max_length_q: int | None,
    max_length_k: int | None,
    shared_query: bool,
) -> AttentionArgs:
    """Raise ValueError for arguments that do not fit; else return them in the reference's form."""
    check_float("q", q)
    check_float("k", k, dtype=q.dtype, device=q.device)
    check_float("v", v, dtype=q.dtype, device=q.device)
    if q.dim() != 3:
        kind = "[R, N, H] (one for the whole batch)" if shared_query else "packed [T, N, H]"
        raise ValueError(f"q: got shape {tuple(q.shape)}, expected {kind}; split the heads with .unflatten(-1, (N, H))")
    if k.dim() not in (3, 4) or v.dim() != k.dim():
        raise ValueError(
            f"k, v: got shapes {tuple(k.shape)} and {tuple(v.shape)}, expected both packed [T, M, H] or both "
            f"[B, K, M, H] (K rows per sequence)"
        )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"v: got shape {tuple(v.shape)}, expected k's {tuple(k.shape[:-1])} before the head width; "
            f"keys and values come in pairs"
        )
    num_heads_q, num_heads_k = q.shape[1], k.shape[-2]
    if num_heads_q == 0:
        raise ValueError(f"q: got shape {tuple(q.shape)} without a head, expected [T, N, H] with N >= 1")
    if num_heads_k == 0 or num_heads_q % num_heads_k:
        raise ValueError(
            f"k: got {num_heads_k} heads, expected a divisor of q's {num_heads_q}; "
            f"each key head serves a group of neighbouring query heads"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k: got head width {k.shape[-1]}, expected q's {q.shape[-1]}; project both to one width")
    check_head_dim("q, k", q.shape[-1])
    check_head_dim("v", v.shape[-1])

    side_q = None if shared_query else _packed_side("q", q, offsets_q, max_length_q, q.device)
    if shared_query and offsets_q is not None:
        raise ValueError("offsets_q: got a tensor with shared_query=True, expected None; q is one for all sequences")
    if k.dim() == 4:
        if offsets_k is not None:
            raise ValueError("offsets_k: got a tensor with a 4-D k, expected None; a 4-D k has K rows per sequence")
        side_k, num_sequences_k = Side(k.shape[0] * k.shape[1], rows=k.shape[1]), k.shape[0]
    elif side_q is not None and (offsets_k is None or offsets_k is offsets_q) and k.shape[0] == q.shape[0]:
        side_k = side_q  # self-attention: the lengths are known to be equal
        num_sequences_k = _num_sequences(side_q)
    else:
        if offsets_k is None and not shared_query:
            raise ValueError(
                f"offsets_k: missing, but k has {k.shape[0]} rows and q has {q.shape[0]}; "
                f"pass the offsets of k, or k with q's rows"
            )
        side_k = _packed_side("k", k, offsets_k, max_length_k, q.device)
        num_sequences_k = _num_sequences(side_k)
    if side_q is None:
        side_q = Side(num_sequences_k * q.shape[0], rows=q.shape[0])
    elif num_sequences_k != _num_sequences(side_q):
        what = "k" if k.dim() == 4 else "offsets_k"
        raise ValueError(
            f"{what}: got {num_sequences_k} sequences, expected {_num_sequences(side_q)} like offsets_q; "
            f"both sides describe the same batch"
        )
    k, v = k.reshape(-1, *k.shape[-2:]), v.reshape(-1, *v.shape[-2:])
    return AttentionArgs(q, k, v, side_q, side_k, num_sequences_k, shared_query)


def check_qkv(qkv: Tensor, num_heads: int) -> None:
    """Raise ValueError unless it is [T, N + 2 M, H] with N = `num_heads` and some M."""
    if qkv.dim() != 3 or not 0 < num_heads < qkv.shape[1] or (qkv.shape[1] - num_heads) % 2:
        raise ValueError(
            f"qkv: got shape {tuple(qkv.shape)} with num_heads {num_heads}, expected [T, N + 2 M, H]: the heads of q, "
            f"k and v side by side"
        )


def split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a packed projection [T, N + 2 M, H]: q, k and v."""
    num_key_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = qkv.split([num_heads, num_key_heads, num_key_heads], dim=1)
    return q, k, v


def _packed_side(
    which: str, rows: Tensor, offsets: Tensor | None, max_length: int | None, device: torch.device
) -> Side:
    if offsets is None:
        hint = ", or shared_query=True for one q for the batch" if which == "q" else ""
        raise ValueError(f"offsets_{which}: missing; pass the offsets of the packed {which}{hint}")
    bound = check_max_length(f"max_length_{which}", max_length)
    check_offsets(f"offsets_{which}", offsets, total=rows.shape[0], max_length=bound, device=device)
    return Side(rows.shape[0], offsets=offsets, max_length=bound)


def _num_sequences(side: Side) -> int:
    assert side.offsets is not None
    return side.offsets.shape[0] - 1


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype when it is on, as `torch.nn.functional.scaled_dot_product_attention` does."""
    if not all(isinstance(t, Tensor) for t in tensors):
        kinds = ", ".join(type(t).__name__ for t in tensors)
        raise ValueError(f"rows of attention: got {kinds}, expected Tensors like [T, N, H]; from_list packs a list")
    kind = tensors[0].device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        target = torch.get_autocast_dtype(kind)
        return tuple(t if t.dtype == torch.float64 else t.to(target) for t in tensors)
    return tensors


def clear_past_end(x: Tensor, offsets: Tensor | None) -> Tensor:
    """Zero the rows that belong to no sequence, so that garbage in them can't turn a zero gradient into NaN."""
    if offsets is None:
        return x
    used = torch.arange(x.shape[0], device=x.device) < offsets[-1]
    return torch.where(used[:, None, None], x, 0)
