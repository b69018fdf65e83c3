"""What may follow `gdpa` in the same kernel: a residual, a norm across heads, and what is added after it.

The custom op `gemworks_jagged::gdpa_norm` and its dispatch. Letters: T packed rows, N heads, V value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from gemworks.jagged._checks import check_float
from gemworks.jagged._custom_op import custom_op
from gemworks.jagged._imports import when_imported
from gemworks.jagged.dispatch import KERNEL_DTYPES, architecture_of
from gemworks.jagged.ops.attention_core import op
from gemworks.jagged.ops.attention_core.call import SETTINGS, Call, Settings
from gemworks.jagged.ops.attention_core.reference import Rule
from gemworks.jagged.ops.norms.custom_op import norm_backward_op
from gemworks.jagged.ops.norms.op import MAX_WIDTH
from gemworks.jagged.ops.norms.reference import norm_reference
from torch import Tensor


@dataclass(frozen=True, eq=False)
class NormEpilogue:
    """`h = o + residual; y = norm(h) * weight + bias + add`, o being the output of `gdpa`, the norm across all heads.

    Rows past the last offset get `y = add` (0 without it), and no gradient but that of `add`.

    Attributes:
        kind: "rms" or "layer".
        residual, add: [T, N, V], before and after the norm; the stream of a post-norm block is `add`.
        weight, bias: [N * V], optional affine; a bias for "layer" only.
        eps: added to the mean square or the variance.
    """

    kind: Literal["rms", "layer"] = "rms"
    residual: Tensor | None = None
    add: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6

    def check(self, q: Tensor, value_dim: int) -> None:
        """Raise ValueError unless it fits the output [T, N, V] of queries q."""
        shape = (q.shape[0], q.shape[1], value_dim)
        if self.kind not in ("rms", "layer"):
            raise ValueError(f"epilogue: got kind {self.kind!r}, expected 'rms' or 'layer'")
        if self.bias is not None and self.kind == "rms":
            raise ValueError("epilogue: got a bias with kind 'rms', expected None; only 'layer' has one")
        if shape[1] * shape[2] > MAX_WIDTH:
            raise ValueError(f"epilogue: got {shape[1] * shape[2]} columns, expected at most {MAX_WIDTH}")
        for name, x in (("residual", self.residual), ("add", self.add)):
            if x is not None:
                check_float(f"epilogue.{name}", x, device=q.device)
                if x.shape != shape:
                    raise ValueError(f"epilogue.{name}: got shape {tuple(x.shape)}, expected the output's {shape}")
        for name, x in (("weight", self.weight), ("bias", self.bias)):
            if x is not None and x.shape != (shape[1] * shape[2],):
                raise ValueError(
                    f"epilogue.{name}: got shape {tuple(x.shape)}, expected {(shape[1] * shape[2],)}; the norm is "
                    f"across heads"
                )


def apply_epilogue(o: Tensor, offsets: Tensor, e: NormEpilogue) -> tuple[Tensor, Tensor]:
    """(y, h) by the definition, in PyTorch; differentiable."""
    live = (torch.arange(o.shape[0], device=o.device) < offsets[-1])[:, None]
    h = o.flatten(1) if e.residual is None else o.flatten(1) + e.residual.to(o.dtype).flatten(1)
    h = torch.where(live, h, 0)
    y, _ = norm_reference(h, e.weight, e.bias, None, None, eps=e.eps, center=e.kind == "layer")
    y = torch.where(live, y, 0)
    if e.add is not None:
        y = y + e.add.flatten(1).to(y.dtype)
    return y.view(o.shape), h.view(o.shape)


def has_kernel(q: Tensor, rule: Rule) -> bool:
    """Whether the op takes the call: masks, a shared query and float64 are the definition's, after `gdpa`."""
    return q.device.type == "cuda" and q.dtype in KERNEL_DTYPES and rule.mask.is_full and not rule.shared_query


def gdpa_norm(q: Tensor, k: Tensor, v: Tensor, settings: Settings, e: NormEpilogue) -> Tensor:
    """y of the op."""
    y, _ = gdpa_norm_op(q, k, v, *settings, e.residual, e.add, e.weight, e.bias, e.eps, e.kind == "layer")
    return y


NUM_EPILOGUE = 6  # arguments after those of attention: residual, add, weight, bias, eps, center
_SCHEMA = (
    f"(Tensor q, Tensor k, Tensor v, {SETTINGS}, Tensor? residual, Tensor? add, Tensor? weight, Tensor? bias, "
    "float eps, bool center) -> (Tensor, Tensor)"
)


def _split(rest: tuple[Any, ...]) -> tuple[Settings, NormEpilogue]:
    residual, add, weight, bias, eps, center = rest[-NUM_EPILOGUE:]
    return Settings(*rest[:-NUM_EPILOGUE]), NormEpilogue("layer" if center else "rms", residual, add, weight, bias, eps)


def _composed(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    settings, e = _split(rest)
    assert settings.offsets_q is not None
    o, _ = op.attention_forward(q, k, v, *settings)
    y, h = apply_epilogue(o, settings.offsets_q, e)
    return y.to(q.dtype).contiguous(), h.contiguous()


gdpa_norm_op = custom_op("gdpa_norm", _composed, _SCHEMA, device="cpu")


@gdpa_norm_op.register_kernel("cuda")
def on_a_gpu(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """One kernel where there is one, else the definition."""
    settings, e = _split(rest)
    call, architecture = Call(q, k, settings), architecture_of(q.device)
    if not op.kernels_take(q, k, v, call, architecture):
        return _composed(q, k, v, *rest)
    from gemworks.jagged.ops.gdpa import launch_epilogue

    args = launch_epilogue.NormArgs(e.residual, e.add, e.weight, e.bias, e.eps, e.kind == "layer")
    return launch_epilogue.forward(op.make_problem(q, k, v, call, architecture), args)


@gdpa_norm_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[1], v.shape[-1])
    return q.new_empty(shape), q.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets_q, offsets_k, tiles, ctx.heights, *rest = inputs
    residual, add, weight, bias, ctx.eps, ctx.center = rest[-NUM_EPILOGUE:]
    ctx.rest = rest[:-NUM_EPILOGUE]
    ctx.set_materialize_grads(False)
    ctx.dtypes = tuple(None if x is None else x.dtype for x in (residual, add, bias))
    ctx.save_for_backward(q, k, v, offsets_q, offsets_k, weight, output[1], *tiles)


def _differentiate(ctx: Any, dy: Tensor | None, _dh: Tensor | None) -> tuple[Any, ...]:
    """The norm's backward gives the gradient of h, which is that of the residual and of o alike."""
    q, k, v, offsets_q, offsets_k, weight, h, *tiles = ctx.saved_tensors
    none = (None, None, [None] * len(tiles), None, *[None] * len(ctx.rest))
    if dy is None:
        return None, None, None, *none, *[None] * NUM_EPILOGUE
    residual_dtype, add_dtype, bias_dtype = ctx.dtypes
    dh, dweight, dbias = norm_backward_op(
        dy.flatten(1), None, h.flatten(1), weight, bias_dtype, ctx.eps, ctx.center, offsets_q
    )
    dh = dh.view(h.shape)
    grads = op.attention_backward(dh, q, k, v, None, None, offsets_q, offsets_k, tiles, ctx.heights, *ctx.rest)
    return (
        *grads, *none,
        None if residual_dtype is None else dh.to(residual_dtype),
        None if add_dtype is None else dy.to(add_dtype),
        None if weight is None else dweight,
        None if bias_dtype is None else dbias,
        None, None,
    )  # fmt: skip


gdpa_norm_op.register_autograd(_differentiate, setup_context=_save)


def _register_flops(flop_counter: Any) -> None:
    def flops(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None, **_: Any) -> int:
        return op.forward_flops(q, k, v, _split(rest)[0])

    flop_counter.register_flop_formula(torch.ops.gemworks_jagged.gdpa_norm, get_raw=True)(flops)


when_imported("torch.utils.flop_counter", _register_flops)
