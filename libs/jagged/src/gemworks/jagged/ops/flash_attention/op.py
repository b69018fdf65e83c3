"""Jagged Flash Attention: softmax attention on packed sequences."""

from __future__ import annotations

import math

import torch
from gemworks.jagged._attention_args import AttentionArgs, autocast, check_attention, clear_past_end, make_mask
from gemworks.jagged._checks import check_scale
from gemworks.jagged._dense import Align
from gemworks.jagged._packing import make_plan
from gemworks.jagged.dispatch import warn_once
from gemworks.jagged.ops.attention_core.call import settings_of
from gemworks.jagged.ops.attention_core.op import attention_forward
from gemworks.jagged.ops.attention_core.reference import SOFTMAX, Rule
from gemworks.jagged.ops.flash_attention.bias import AttentionBias
from gemworks.jagged.ops.flash_attention.biased import biased_attention, has_kernel
from gemworks.jagged.ops.flash_attention.reference import flash_attention_reference
from gemworks.jagged.ops.norms.reference import rms_normalize
from gemworks.jagged.ops.rope.custom_op import norm_rope_op, runs_in_one_pass
from gemworks.jagged.ops.rope.reference import RopeTables, apply_rope
from gemworks.jagged.schedule import TileSchedule
from torch import Tensor


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor | None = None,
    *,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    align: Align = "bottom_right",
    bias: AttentionBias | None = None,
    shared_query: bool = False,
    qk_norm: bool = False,
    qk_norm_eps: float = 1e-6,
    rope: RopeTables | None = None,
    rope_k: RopeTables | None = None,
    schedule: TileSchedule | None = None,
) -> Tensor:
    """Softmax attention on packed sequences: `softmax(scale * Q K^T + bias) V` in each sequence, over admitted pairs.

    Args:
        q: packed [Tq, N, H]; with `shared_query` one query [R, N, H] for the whole batch.
        k, v: packed [Tk, M, H] and [Tk, M, V], or [B, K, M, H] and [B, K, M, V] with K rows per sequence. M divides N:
            query heads n * N / M .. (n + 1) * N / M - 1 use key head n. V may differ from H.
        offsets_q: int32 or int64 [B + 1]; None with `shared_query`.
        offsets_k: as `offsets_q`, for packed k and v; None means q's (self-attention), or a 4-D k.
        max_length_q, max_length_k: bounds of the lengths, known on the host. Needed for each packed side;
            `max_length_k` is taken from q where `offsets_k` is.
        scale: factor of the logits; None means 1 / sqrt(H).
        causal: admit keys at positions <= the query's.
        window: w admits keys with |p_k - p_q| < w (with `causal`: the query's own and the w - 1 before it); a pair
            (left, right) admits p_q - left <= p_k <= p_q + right, -1 meaning no bound.
        align: where positions meet when q and k of a sequence differ in length: "bottom_right" puts the last query at
            the last key (as flash-attention does), "top_left" the first at the first.
        bias: learned tables over relative position and time; see `AttentionBias`.
        shared_query: q is one for all sequences (softmax pooling); its gradient is summed over the batch.
        qk_norm: divide each head of q and k by its root mean square, no affine, before rope.
        rope: rotation of q's rows, and of k's unless `rope_k` is given; see `Rope.tables`.
        rope_k: rotation of k's rows.
        schedule: of this batch, shared by its layers; None builds one. Used by the kernels of a GPU only.

    Returns:
        [Tq, N, V], or [B, R, N, V] with `shared_query`, in q's dtype. Computed in float32 (float64 for float64). A
        query without any admitted key, and a row past `offsets_q[-1]`, gets 0 and passes gradient 0.

    Raises:
        ValueError: arguments that do not fit. Values of offsets, and `max_length_*` too small, are found when the
            offsets are on the host. On a device they are not read: the kernels then compute rows past `max_length_*` in
            full, the reference takes them for absent, and neither touches another sequence.

    Source: Jagged Flash Attention, arXiv 2409.15373; FlashAttention-2, arXiv 2307.08691.

    >>> import torch
    >>> x = torch.randn(3, 1, 4)
    >>> out = flash_attention(x, x, x, torch.tensor([0, 1, 3]), max_length_q=2)
    >>> torch.allclose(out[0], x[0])  # a sequence of one row attends to itself
    True
    """
    q, k, v = autocast(q, k, v)
    check_scale(scale)
    mask = make_mask(causal, window, align)
    args = check_attention(
        q, k, v, offsets_q, offsets_k, max_length_q=max_length_q, max_length_k=max_length_k, shared_query=shared_query
    )
    _check_bias_and_rope(args, bias, rope, rope_k)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if q.dtype != torch.float64 and (bias is None or has_kernel(args.q, args.v, bias)):
        q_rows, k_rows = args.q, args.k
        if qk_norm or rope is not None:
            eps = qk_norm_eps if qk_norm else None
            q_rows = _prepare(q_rows, args.side_q.offsets, rope, eps)
            k_rows = _prepare(k_rows, args.side_k.offsets, rope_k or rope, eps)
        rule = Rule(scale, SOFTMAX, mask, shared_query)
        settings = settings_of(args.side_q, args.side_k, args.num_sequences, rule, schedule)
        if bias is None:
            out, _ = attention_forward(q_rows, k_rows, args.v, *settings)
        else:
            out = biased_attention(q_rows, k_rows, args.v, bias, settings)
    else:
        if q.device.type == "cuda" and q.dtype == torch.float64:
            warn_once("flash_attention in float64 runs on the reference backend, padded to max_length")
        plan = make_plan(args.side_q, args.side_k, args.num_sequences, q.shape[1], k.shape[-2], q.device)
        out = flash_attention_reference(
            args.q, args.k, args.v, plan, scale=scale, mask=mask, bias=bias, shared_query=shared_query,
            qk_norm=qk_norm, qk_norm_eps=qk_norm_eps, rope=rope, rope_k=rope_k,
        )  # fmt: skip
    return out.view(args.num_sequences, q.shape[0], *out.shape[1:]) if shared_query else out


def _check_bias_and_rope(
    args: AttentionArgs, bias: AttentionBias | None, rope: RopeTables | None, rope_k: RopeTables | None
) -> None:
    """Raise ValueError unless they fit the rows of q and k."""
    num_heads, head_dim, device = args.q.shape[1], args.q.shape[2], args.q.device
    if bias is not None:
        if not isinstance(bias, AttentionBias):
            raise ValueError(f"bias: got {type(bias).__name__}, expected an AttentionBias of tables")
        if args.shared_query and bias.time_table is not None:
            raise ValueError("bias.time_table: a shared query has no timestamps; use position_table alone")
        bias.check(num_heads=num_heads, total_q=args.q.shape[0], total_k=args.k.shape[0], device=device)
    if rope is None and rope_k is not None:
        raise ValueError("rope_k: got tables while rope is None; pass rope for q too")
    if rope is not None:
        RopeTables.check(rope, "rope", total=args.q.shape[0], head_dim=head_dim, device=device)
        RopeTables.check(rope_k or rope, "rope_k", total=args.k.shape[0], head_dim=head_dim, device=device)


def _prepare(x: Tensor, offsets: Tensor | None, rope: RopeTables | None, eps: float | None) -> Tensor:
    """QK-norm, then rope, in float32, rounded to x's dtype: what the attention kernels do not do themselves."""
    if runs_in_one_pass(x):
        tables = (None, None) if rope is None else (rope.cos_TJ, rope.sin_TJ)
        return norm_rope_op(x, *tables, None if offsets is None else offsets[-1:], eps)
    y = clear_past_end(x, offsets).to(torch.float32)
    if eps is not None:
        y = rms_normalize(y, eps)
    if rope is not None:
        y = apply_rope(y, rope)
    return y.to(x.dtype)
