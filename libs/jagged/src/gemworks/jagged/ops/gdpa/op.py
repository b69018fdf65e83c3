"""GDPA: dot-product attention with any activation in place of the softmax."""

from __future__ import annotations

import torch
from gemworks.jagged._attention_args import autocast, check_attention, make_mask
from gemworks.jagged._checks import check_scale
from gemworks.jagged._dense import Align
from gemworks.jagged._packing import make_plan
from gemworks.jagged.ops.attention_core.call import settings_of
from gemworks.jagged.ops.attention_core.op import attention_forward
from gemworks.jagged.ops.attention_core.reference import Rule
from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS, Activation
from gemworks.jagged.ops.gdpa.epilogue import NormEpilogue, apply_epilogue, gdpa_norm, has_kernel
from gemworks.jagged.ops.gdpa.reference import gdpa_reference
from gemworks.jagged.schedule import TileSchedule
from torch import Tensor


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor | None = None,
    *,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    scale: float,
    activation: Activation = "gelu",
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    align: Align = "bottom_right",
    shared_query: bool = False,
    schedule: TileSchedule | None = None,
    epilogue: NormEpilogue | None = None,
    key_chunk: int | None = None,
) -> Tensor:
    """Generalised dot-product attention: `act(scale * Q K^T) V` in each sequence, over admitted pairs.

    With per-sample k and v [B, K, M, H] this is a feed-forward network whose weights belong to the sample (PFFN); with
    `shared_query` it pools a sequence.

    Args:
        q, k, v, offsets_q, offsets_k, max_length_q, max_length_k, causal, window, align, shared_query: as for
            `flash_attention`.
        scale: factor of the products, required. A constant of the model, never the batch's own longest length: a
            sample must not depend on its neighbours.
        activation: identity, relu, squared_relu, leaky_relu (slope 0.01), gelu (erf), gelu_tanh, fast_gelu, silu,
            fast_silu, hardswish, tanh. The fast ones are polynomials, right for every finite input (see its README).
        schedule: of this batch, shared by its layers; None builds one. Used by the kernels of a GPU only.
        epilogue: a residual and a norm across heads for the output (`norm(o + residual) + add`), in the same kernel
            where there is no mask; not for a shared query.
        key_chunk: with a shared query and no mask, each sequence is pooled in chunks of that many keys, and what they
            give is added up in order. For few and long sequences, of which one program each would leave most of a GPU
            idle; not timed yet. Each chunk's share is rounded to q's dtype, and [B * chunks, R, N, V] of them are made.

    Returns:
        [Tq, N, V], or [B, R, N, V] with `shared_query`, in q's dtype. Rows of empty sequences and rows past
        `offsets_q[-1]` are 0 and pass gradient 0.

    Raises:
        ValueError: as for `flash_attention`; an unknown activation.

    Source: GDPA, Engineering at Meta, 2026-08-03.

    >>> import torch
    >>> q, kv = torch.ones(3, 1, 2), torch.ones(2, 4, 1, 2)
    >>> gdpa(q, kv, kv, torch.tensor([0, 1, 3]), max_length_q=2, scale=0.5, activation="identity")[:, 0, 0].tolist()
    [4.0, 4.0, 4.0]
    >>> settings = {"max_length_q": 2, "scale": 0.5, "epilogue": NormEpilogue(add=q)}
    >>> gdpa(q, kv, kv, torch.tensor([0, 1, 3]), **settings)[:, 0, 0].tolist()
    [2.0, 2.0, 2.0]
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    q, k, v = autocast(q, k, v)
    check_scale(scale)
    mask = make_mask(causal, window, align)
    args = check_attention(
        q, k, v, offsets_q, offsets_k, max_length_q=max_length_q, max_length_k=max_length_k, shared_query=shared_query
    )
    if epilogue is not None:
        if shared_query:
            raise ValueError("epilogue: got one with shared_query=True, expected None; norm the pooled rows afterwards")
        epilogue.check(args.q, args.v.shape[-1])
    if key_chunk is not None:
        if not shared_query or not mask.is_full or schedule is not None or key_chunk < 1:
            raise ValueError(
                f"key_chunk: got {key_chunk}, expected None, or at least 1 with shared_query=True and neither a mask "
                f"nor a schedule, which is one of whole sequences"
            )
        if args.side_k.offsets is None:
            raise ValueError("key_chunk: got one with a 4-D k, expected None; only packed keys are cut")
        if key_chunk < args.side_k.max_length:
            offsets_k, chunks = _cut(args.side_k.offsets, key_chunk, args.side_k.max_length)
            shares = gdpa(
                q, k, v, None, offsets_k, max_length_k=key_chunk, scale=scale, activation=activation, shared_query=True
            )
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            return shares.unflatten(0, (-1, chunks)).sum(1, dtype=wide).to(q.dtype)
    if q.dtype == torch.float64:  # the definition: twice differentiable
        plan = make_plan(args.side_q, args.side_k, args.num_sequences, q.shape[1], k.shape[-2], q.device)
        out = gdpa_reference(
            args.q, args.k, args.v, plan, scale=scale, activation=activation, mask=mask, shared_query=shared_query
        )
    else:
        rule = Rule(scale, activation, mask, shared_query)
        settings = settings_of(args.side_q, args.side_k, args.num_sequences, rule, schedule)
        if epilogue is not None and has_kernel(args.q, rule):
            return gdpa_norm(args.q, args.k, args.v, settings, epilogue)
        out, _ = attention_forward(args.q, args.k, args.v, *settings)
    if epilogue is not None:
        assert args.side_q.offsets is not None
        return apply_epilogue(out, args.side_q.offsets, epilogue)[0]
    return out.view(args.num_sequences, q.shape[0], *out.shape[1:]) if shared_query else out


def _cut(offsets: Tensor, chunk: int, max_length: int) -> tuple[Tensor, int]:
    """Offsets [B * C + 1] of sequences cut every `chunk` rows, the last ones empty where a sequence is short, and C."""
    count = -(-max_length // chunk)
    steps = torch.arange(count, device=offsets.device, dtype=offsets.dtype) * chunk
    begins = torch.minimum(offsets[:-1, None] + steps, offsets[1:, None])
    return torch.cat([begins.flatten(), offsets[-1:]]), count
