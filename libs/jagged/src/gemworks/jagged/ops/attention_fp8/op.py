"""Attention on FP8 codes and scales: `gemworks_jagged::attention_fp8`, and `flash_attention_fp8`, `gdpa_fp8` over it.

Three arrangements of scales come in: rows and squares (reference.py), and tiles (tiles.py), in which v has four dims.

Letters: T packed rows, N query heads, M key heads, H and V head widths.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from gemworks.jagged._attention_args import check_attention, make_mask
from gemworks.jagged._custom_op import custom_op
from gemworks.jagged._dense import Align
from gemworks.jagged._imports import when_imported
from gemworks.jagged.dispatch import architecture_of, warn_once
from gemworks.jagged.ops.attention_core import table
from gemworks.jagged.ops.attention_core.call import SETTINGS, Call, Settings, settings_of
from gemworks.jagged.ops.attention_core.op import (
    attention_backward,
    attention_forward,
    backward_flops,
    forward_flops,
    make_problem,
)
from gemworks.jagged.ops.attention_core.reference import SOFTMAX, Rule, backward_reference, forward_reference
from gemworks.jagged.ops.attention_fp8.reference import dequantize_rows, scale_block
from gemworks.jagged.ops.attention_fp8.tiles import check_tiles, dequantize_tiles
from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS, Activation
from gemworks.jagged.schedule import TileSchedule
from torch import Tensor

_PLANES = "Tensor q, Tensor k, Tensor v, Tensor q_scales, Tensor k_scales, Tensor? v_scales"
_HOW = f"ScalarType dtype, bool? quantize_p, bool quantize_ds, bool prologue, {SETTINGS}"
_SCHEMA = f"({_PLANES}, Tensor? q_origin, Tensor? k_origin, Tensor? v_origin, {_HOW}) -> (Tensor, Tensor)"
_BACKWARD_SCHEMA = f"(Tensor d_out, {_PLANES}, Tensor? out, Tensor? lse, {_HOW}) -> (Tensor, Tensor, Tensor)"
_NUM_ORIGINS = 3
FP8 = (torch.float8_e4m3fn, torch.float8_e8m0fnu)  # types of codes and of scales; operators take their bytes
Scales = tuple[Tensor, Tensor, Tensor | None]


class How(NamedTuple):
    """The arguments before `Settings`, as `_HOW` has them.

    Attributes:
        dtype: of the products and of the results.
        quantize_p, quantize_ds, prologue: as of `flash_attention_fp8`.
    """

    dtype: torch.dtype
    quantize_p: bool | None
    quantize_ds: bool
    prologue: bool

    @property
    def reads_codes(self) -> bool:
        """Whether attention's own kernels do not do."""
        return bool(self.quantize_p) or self.quantize_ds or self.prologue

    def rule(self, call: Call) -> Rule:
        return replace(call.rule, round_p=bool(self.quantize_p), round_ds=self.quantize_ds)


def _split(rest: tuple[Any, ...]) -> tuple[How, Settings]:
    """Of the arguments from dtype on."""
    count = len(How._fields)
    return How(*rest[:count]), Settings(*rest[count:])


def _values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: tuple[Tensor, Tensor, Tensor | None],
    dtype: torch.dtype,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the codes stand for, exactly."""
    sq, sk, sv = scales
    offsets_q = settings.offsets_q
    of_k = offsets_q if settings.offsets_k is None else settings.offsets_k
    if q.is_cuda:
        from gemworks.jagged.ops.attention_fp8.launch import rows_values, tiles_values

        if v.dim() == 3:
            v_values = v if sv is None else rows_values(v, sv, dtype)
            return rows_values(q, sq, dtype), rows_values(k, sk, dtype), v_values
        assert offsets_q is not None
        assert of_k is not None
        assert sv is not None
        q_values = tiles_values(q, sq, offsets_q, q.shape[0], dtype)
        k_values, v_values = (tiles_values(x, s, of_k, k.shape[0], dtype) for x, s in ((k, sk), (v, sv)))
        return q_values, k_values, v_values
    if v.dim() == 3:
        v_values = v if sv is None else dequantize_rows(v, sv, dtype)
        return dequantize_rows(q, sq, dtype), dequantize_rows(k, sk, dtype), v_values
    assert offsets_q is not None
    assert of_k is not None
    assert sv is not None
    return (
        dequantize_tiles(q, sq, offsets_q, q.shape[0], dtype, transposed=False),
        dequantize_tiles(k, sk, of_k, k.shape[0], dtype, transposed=False),
        dequantize_tiles(v, sv, of_k, k.shape[0], dtype, transposed=True),
    )


def _codes(
    q: Tensor, k: Tensor, v: Tensor, scales: Scales, call: Call, how: How, settings: Settings, architecture: str
) -> Any:
    """What launch_codes.py takes; tiles are multiplied out in front of it."""
    from gemworks.jagged.ops.attention_fp8.launch_codes import Codes

    planes: tuple[Tensor | None, Tensor | None, Tensor | None] = scales
    if v.dim() == 4:
        q, k, v = _values(q, k, v, scales, how.dtype, settings)
        planes = (None, None, None)
    problem = make_problem(q, k, v, call, architecture)
    return Codes(replace(problem, rule=how.rule(call)), planes, how.dtype)


def _codes_taken(q: Tensor, v: Tensor, how: How, architecture: str) -> bool:
    """Whether the kernels that read codes cover the call; warns once where the reference has to run on a device."""
    refusal = table.codes_refusal(how.dtype, max(q.shape[2], v.shape[2]), architecture)
    if refusal is not None:
        warn_once(f"FP8 attention runs on the reference backend, padded to max_length: {refusal}")
    return refusal is None


def _on_host(
    q: Tensor, k: Tensor, v: Tensor, q_scales: Tensor, k_scales: Tensor, v_scales: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    how, settings = _split(rest[_NUM_ORIGINS:])
    values = _values(q, k, v, (q_scales, k_scales, v_scales), how.dtype, settings)
    call = Call(q, k, settings)
    return forward_reference(*values, call.plan(q, k), how.rule(call))


def _backward_on_host(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, q_scales: Tensor, k_scales: Tensor, v_scales: Tensor | None,
    out: Tensor | None, lse: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    how, settings = _split(rest)
    values = _values(q, k, v, (q_scales, k_scales, v_scales), how.dtype, settings)
    call = Call(q, k, settings)
    return backward_reference(d_out, *values, out, lse, call.plan(q, k), how.rule(call))


attention_fp8 = custom_op("attention_fp8", _on_host, _SCHEMA, device="cpu")
attention_fp8_backward = custom_op("attention_fp8_backward", _backward_on_host, _BACKWARD_SCHEMA, device="cpu")


@attention_fp8.register_kernel("cuda")
def _(
    q: Tensor, k: Tensor, v: Tensor, q_scales: Tensor, k_scales: Tensor, v_scales: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    how, settings = _split(rest[_NUM_ORIGINS:])
    scales = (q_scales, k_scales, v_scales)
    call, architecture = Call(q, k, settings), architecture_of(q.device)
    if v.dim() == 4 and how.quantize_p is not False:
        from gemworks.jagged.ops.attention_fp8 import launch

        assert v_scales is not None
        rule = call.rule
        refusal = launch.hopper_refusal(
            architecture, how.dtype, q.shape[2], v.shape[2], rule.activation, not rule.mask.is_full, rule.scale
        )
        if refusal is None:
            problem = make_problem(q, k, v, call, architecture)
            return launch.hopper_forward(problem, (q_scales, k_scales, v_scales), how.dtype)
        warn_once(f"FP8 tiles are multiplied out in front of {how.dtype} attention, at its speed at best: {refusal}")
    if how.quantize_p or how.prologue:
        if not _codes_taken(q, v, how, architecture):
            return _on_host(q, k, v, *scales, *rest)
        from gemworks.jagged.ops.attention_fp8 import launch_codes

        return launch_codes.forward(_codes(q, k, v, scales, call, how, settings, architecture))
    values = _values(q, k, v, scales, how.dtype, settings)
    return attention_forward(*values, *settings)


@attention_fp8_backward.register_kernel("cuda")
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, q_scales: Tensor, k_scales: Tensor, v_scales: Tensor | None,
    out: Tensor | None, lse: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    how, settings = _split(rest)
    scales = (q_scales, k_scales, v_scales)
    if not how.reads_codes:
        values = _values(q, k, v, scales, how.dtype, settings)
        return attention_backward(d_out, *values, out, lse, *settings)
    call, architecture = Call(q, k, settings), architecture_of(q.device)
    if not _codes_taken(q, v, how, architecture):
        return _backward_on_host(d_out, q, k, v, *scales, out, lse, *rest)
    from gemworks.jagged.ops.attention_fp8 import launch_codes

    return launch_codes.backward(_codes(q, k, v, scales, call, how, settings, architecture), d_out, out, lse)


@attention_fp8.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, q_scales: Any, k_scales: Any, v_scales: Any, *rest: Any
) -> tuple[Tensor, Tensor]:
    how, settings = _split(rest[_NUM_ORIGINS:])
    rows = q.shape[0] if settings.activation == SOFTMAX else 0
    lse = q.new_empty(q.shape[1], rows, dtype=torch.float32)
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2], dtype=how.dtype), lse


@attention_fp8_backward.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, q_scales: Any, k_scales: Any, v_scales: Any, out: Any, lse: Any,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = _split(rest)[0].dtype
    of_v = (k.shape[0], v.shape[1], v.shape[2])  # of tiles too
    return q.new_empty(q.shape, dtype=dtype), k.new_empty(k.shape, dtype=dtype), v.new_empty(of_v, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_scales, k_scales, v_scales, *origins = inputs[: 6 + _NUM_ORIGINS]
    ctx.how, settings = _split(inputs[6 + _NUM_ORIGINS :])
    offsets_q, offsets_k, tiles, ctx.heights, *ctx.rest = settings
    saved = output if settings.activation == SOFTMAX else (None, None)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, q_scales, k_scales, v_scales, offsets_q, offsets_k, *saved, *tiles)
    ctx.dtypes = [None if x is None else x.dtype for x in (v, *origins)]


def _differentiate(ctx: Any, d_out: Tensor | None, _d_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, q_scales, k_scales, v_scales, offsets_q, offsets_k, out, lse, *tiles = ctx.saved_tensors
    none = (*[None] * (len(ctx.how) + 2), [None] * len(tiles), None, *[None] * len(ctx.rest))
    if d_out is None:
        return *[None] * (6 + _NUM_ORIGINS), *none
    settings = Settings(offsets_q, offsets_k, tiles, ctx.heights, *ctx.rest)
    grads = attention_fp8_backward(d_out, q, k, v, q_scales, k_scales, v_scales, out, lse, *ctx.how, *settings)
    of_v, *of_origins = ctx.dtypes
    to_origins = [None if t is None else g.to(t) for g, t in zip(grads, of_origins, strict=True)]
    d_v = grads[2].to(of_v) if v_scales is None else None
    return None, None, d_v, None, None, None, *to_origins, *none


attention_fp8.register_autograd(_differentiate, setup_context=_save)


def _register_flops(flop_counter: Any) -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None, **_: Any) -> int:
        return forward_flops(q, k, v, _split(rest[3 + _NUM_ORIGINS :])[1])

    def backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None, **_: Any) -> int:
        return backward_flops(q, k, v, _split(rest[5:])[1])

    ops = torch.ops.gemworks_jagged
    flop_counter.register_flop_formula(ops.attention_fp8, get_raw=True)(forward)
    flop_counter.register_flop_formula(ops.attention_fp8_backward, get_raw=True)(backward)


when_imported("torch.utils.flop_counter", _register_flops)


def flash_attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scales: Tensor,
    k_scales: Tensor,
    v_scales: Tensor | None,
    offsets_q: Tensor,
    offsets_k: Tensor | None = None,
    *,
    max_length_q: int,
    max_length_k: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    align: Align = "bottom_right",
    origins: tuple[Tensor, Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    quantize_p: bool | None = None,
    quantize_ds: bool = False,
    prologue: bool = False,
    schedule: TileSchedule | None = None,
) -> Tensor:
    """`flash_attention` of quantised q, k and v: softmax attention of `codes * 2^(byte - 127)`.

    Args:
        q, k: E4M3 codes, uint8 or float8_e4m3fn, packed [Tq, N, H] and [Tk, M, H].
        v: codes [Tk, M, V] with `v_scales`; or values in `dtype`; or tiles of codes, transposed, [C, M, V, 128].
        q_scales, k_scales, v_scales: E8M0 bytes: [T, N], one scale for each row and head; or
            [ceil(T / 32), N, H / 32], squares of 32 rows by 32 of the width; or, with tiles of v, [C, N], one for each
            128 rows of a sequence and head (C = T // 128 + B + 1; tiles.py says which), at least 87. All alike.
        offsets_q, offsets_k, max_length_q, max_length_k, scale, causal, window, align, schedule: as in
            `flash_attention`.
        origins: what q, k and v were quantised from. They receive the gradients (straight through the rounding), which
            are those of the quantised values; they are not read. Without them only values of v receive one.
        dtype: of the result and of the products: bf16, in which the codes are exact, fp16, or fp32.
        quantize_p: round the weights P to MXFP8 (E4M3, a power of two for each 32 along the contraction) in front of
            `P V` and `P^T dO`. False: nowhere. None: where the kernel of tiles on Hopper does it, in its own way.
        quantize_ds: round dS in the same way in front of `dS K` and `dS^T Q`.
        prologue: multiply codes out as the kernel loads them, not in a pass in front of it; the same result but for
            the order of sums. Rounding implies it.

    Returns:
        [Tq, N, V] in `dtype`.

    Raises:
        ValueError: codes, scales or offsets that do not fit.

    Tiles on Hopper, without a mask: both products on the FP8 units, P rounded to E4M3. Everything else multiplies the
    codes out (exact in bf16) in front of `flash_attention`'s kernels. `quantize_p`, `quantize_ds` and `prologue` take
    plain Triton, which those kernels outrun (`explain` with the features of the same names tells).

    Backward: codes are multiplied out and go through `flash_attention`'s own backward; codes and scales, about half the
    bytes, are what is kept for it.

    >>> import torch
    >>> codes = torch.ones(3, 1, 32).to(torch.float8_e4m3fn)
    >>> one = torch.full((3, 1), 127, dtype=torch.uint8)
    >>> v = torch.randn(3, 1, 32).bfloat16()
    >>> out = flash_attention_fp8(codes, codes, v, one, one, None, torch.tensor([0, 1, 3]), max_length_q=2)
    >>> torch.equal(out[0], v[0])
    True
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _attention(
        q, k, v, (q_scales, k_scales, v_scales), offsets_q, offsets_k, (max_length_q, max_length_k), scale, SOFTMAX,
        (causal, window, align), origins, How(dtype, quantize_p, quantize_ds, prologue), schedule,
    )  # fmt: skip


def gdpa_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scales: Tensor,
    k_scales: Tensor,
    v_scales: Tensor | None,
    offsets_q: Tensor,
    offsets_k: Tensor | None = None,
    *,
    max_length_q: int,
    scale: float,
    max_length_k: int | None = None,
    activation: Activation = "gelu",
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    align: Align = "bottom_right",
    origins: tuple[Tensor, Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    quantize_p: bool | None = None,
    quantize_ds: bool = False,
    prologue: bool = False,
    schedule: TileSchedule | None = None,
) -> Tensor:
    """`gdpa` of quantised q, k and v; arguments as in `flash_attention_fp8`, `scale` and `activation` as in `gdpa`."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, expected one of {sorted(ACTIVATIONS)}")
    return _attention(
        q, k, v, (q_scales, k_scales, v_scales), offsets_q, offsets_k, (max_length_q, max_length_k), scale, activation,
        (causal, window, align), origins, How(dtype, quantize_p, quantize_ds, prologue), schedule,
    )  # fmt: skip


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: tuple[Tensor, Tensor, Tensor | None],
    offsets_q: Tensor,
    offsets_k: Tensor | None,
    max_lengths: tuple[int, int | None],
    scale: float,
    activation: str,
    masking: tuple[bool, int | tuple[int, int] | None, Align],
    origins: tuple[Tensor, Tensor, Tensor] | None,
    how: How,
    schedule: TileSchedule | None,
) -> Tensor:
    dtype = how.dtype
    for name, flag in zip(How._fields[1:], how[1:], strict=True):
        if not isinstance(flag, bool) and not (name == "quantize_p" and flag is None):
            raise ValueError(f"{name}: got {flag!r}, expected True or False")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"dtype: got {dtype}, expected torch.bfloat16, float16 or float32")
    if how.prologue and v.dim() == 4:
        raise ValueError("prologue: got True with tiles, which only their own kernel reads; give rows or squares")
    v_shape = v.shape if v.dim() != 4 else torch.Size((k.shape[0], v.shape[1], v.shape[2]))
    shapes = (q.shape, k.shape, v_shape)
    _check_codes(q, k, v, scales, offsets_q, offsets_k, dtype)
    for name, shape, origin in zip("qkv", shapes, origins or (None, None, None), strict=True):
        if origin is not None and origin.shape != shape:
            raise ValueError(f"origins: {name} has shape {tuple(origin.shape)}, expected {tuple(shape)}")
    # The checks want floating tensors; these have the codes' shapes and no memory to speak of.
    like_q, like_k, like_v = (torch.empty((), dtype=dtype, device=q.device).expand(shape) for shape in shapes)
    args = check_attention(
        like_q, like_k, like_v, offsets_q, offsets_k, max_length_q=max_lengths[0], max_length_k=max_lengths[1],
        shared_query=False,
    )  # fmt: skip
    planes = [None if x is None else x.view(torch.uint8) if x.dtype in FP8 else x for x in (q, k, v, *scales)]
    if v.dim() == 4:  # the kernel's descriptors
        planes = [None if x is None else x.contiguous() for x in planes]
    rule = Rule(scale, activation, make_mask(*masking), False)
    settings = settings_of(args.side_q, args.side_k, args.num_sequences, rule, schedule)
    out, _ = attention_fp8(*planes, *(origins or (None, None, None)), *how, *settings)
    return out


def _check_codes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: tuple[Tensor, Tensor, Tensor | None],
    offsets_q: Tensor,
    offsets_k: Tensor | None,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError unless codes and scales are in one of the three arrangements, v alone perhaps in `dtype`."""
    q_scales, k_scales, v_scales = scales
    if v.dim() == 4:
        if v_scales is None:
            raise ValueError("v_scales: got None, expected the scales of v's tiles")
        num_q = offsets_q.shape[0] - 1
        num_k = num_q if offsets_k is None else offsets_k.shape[0] - 1
        check_tiles("q", q, q_scales, q.shape[0], num_q, transposed=False)
        check_tiles("k", k, k_scales, k.shape[0], num_k, transposed=False)
        check_tiles("v", v, v_scales, k.shape[0], num_k, transposed=True)
    elif scale_block("q", q, q_scales)[0] != scale_block("k", k, k_scales)[0]:
        raise ValueError("q_scales, k_scales: one is by rows, the other by squares; quantise q and k alike")
    elif v_scales is not None:
        scale_block("v", v, v_scales)
    elif v.dtype != dtype:
        raise ValueError(f"v: got {v.dtype} without v_scales, expected values in {dtype}, or codes with their scales")
