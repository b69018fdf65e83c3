"""FSDP2 gathers in FP8: each rank quantises its shard once and the all-gather moves codes and scales.

`fully_shard` splits parameters along dim 0 and asks a parameter that has `fsdp_pre_all_gather` what to send and
`fsdp_post_all_gather` what to make of it. A shard of N/W rows sends N/W * K bytes of codes and a few of scales instead
of 2 or 4 bytes an element. What the blocks look like follows a rule (`gather_rule`):

- square: a rank's rows are a multiple of the block, so squares never cross ranks. One plane serves forward and dgrad;
  the result is bit-equal to quantising after the gather.
- row: 1x32 along K for `mxfp8` otherwise. Forward is bit-equal; dgrad reads the plane along N, so it is quantised again
  from the dequantised values (rounded twice).
- bf16: one scale for a tensor, which no rank knows before the gather; rows that do not divide by the ranks (FSDP2 pads
  those, scales cannot follow), or 128-wide kinds whose squares would cross ranks. The layer is gathered as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from gemworks.precision.backends import warn_once
from gemworks.precision.casts import cast, cast_backend
from gemworks.precision.checks import as_integer
from gemworks.precision.convert import MXLinear
from gemworks.precision.formats import Format
from gemworks.precision.linear_op import backward_op, forward_op
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.plane_weight import PlaneWeight
from gemworks.precision.products import recipe_of, specs_of
from gemworks.precision.recipe import GemmKind, Recipe
from gemworks.precision.scales import ScaleMode
from torch import Tensor, nn


@dataclass(frozen=True)
class GatherDecision:
    """How one layer's weight is gathered, why, and the bytes a rank receives for it."""

    name: str
    form: str
    reason: str
    nbytes: int


def gather_rule(out_features: int, in_features: int, num_ranks: int, chosen: Recipe) -> tuple[str, str]:
    """`square`, `row` or `bf16`, and the reason.

    >>> from gemworks.precision import recipe
    >>> gather_rule(1024, 512, 8, recipe("mxfp8"))
    ('square', '128 rows a rank are a multiple of 32')
    """
    kind = chosen.forward.kind
    if kind is GemmKind.BF16:
        return "bf16", "forward is not quantised"
    if kind is GemmKind.FP8_TENSOR:
        return "bf16", "one scale for the tensor follows from the shards of all ranks, which a rank does not have"
    if out_features % num_ranks:
        return "bf16", f"{out_features} rows do not divide by {num_ranks} ranks"
    rows, block = out_features // num_ranks, kind.block
    if chosen.dgrad.kind not in (kind, GemmKind.BF16) or chosen.dgrad.right != chosen.forward.right:
        return "bf16", "forward and dgrad read the weight in different arithmetic"
    if rows % block == 0 and not chosen.row_weights:
        return "square", f"{rows} rows a rank are a multiple of {block}"
    why = "row_weights is set" if chosen.row_weights else f"{rows} rows a rank are not a multiple of {block}"
    if kind is GemmKind.MXFP8:
        return "row", f"{why}: 1x32 along K, requantised for dgrad"
    return "bf16", f"{why}: " + ("only squares serve dgrad, too" if chosen.row_weights else "squares would cross ranks")


@dataclass(frozen=True)
class PlaneMeta:
    """What makes a plane of gathered codes and scales."""

    recipe_text: str
    form: str
    format: Format
    scale_mode: ScaleMode
    block: int

    def plane(self, codes: Tensor, scales: Tensor) -> MXTensor:
        """The gathered weight."""
        dim = None if self.form == "square" else 1
        shape = (codes.shape[0], codes.shape[1])
        return MXTensor.unchecked(codes, scales, None, shape, dim, self.block, self.format, self.scale_mode)


class _Wrapper(torch.Tensor):
    """What both tensor classes share: a size and dtype without storage of their own."""

    @staticmethod
    def _make(subclass: type, like: Tensor, dtype: torch.dtype, requires_grad: bool) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            subclass,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=dtype,
            device=like.device,
            requires_grad=requires_grad,
        )


_aten = torch.ops.aten
# What FSDP2 and optimizers do to a parameter that must stay a parameter of its class.
_KEEP = {
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.new_empty.default,
    _aten.slice.Tensor,
    _aten.narrow.default,
    _aten.copy_.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.split.Tensor,
    _aten.chunk.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.alias.default,
}


class FP8GatherWeight(_Wrapper):
    """A high-precision weight that FSDP2 gathers in FP8. Everything but the gather sees the weight itself."""

    _tensor: Tensor
    _meta: PlaneMeta

    @staticmethod
    def __new__(cls, tensor: Tensor, meta: PlaneMeta, requires_grad: bool = False):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Wrapper._make(cls, tensor, tensor.dtype, requires_grad)

    def __init__(self, tensor: Tensor, meta: PlaneMeta, requires_grad: bool = False) -> None:
        self._tensor, self._meta = tensor, meta

    @property
    def stored(self) -> Tensor:
        """The weight itself, sharing its memory: what a checkpoint holds, which must not need this class."""
        return self._tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"FP8GatherWeight({self._tensor!r}, {self._meta.form})"

    def __tensor_flatten__(self) -> tuple[list[str], PlaneMeta]:
        return ["_tensor"], self._meta

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: PlaneMeta, _size: Any, _stride: Any) -> FP8GatherWeight:
        return FP8GatherWeight(inner["_tensor"], meta)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meta: PlaneMeta | None = None

        def unwrap(value: Any) -> Any:
            nonlocal meta
            if isinstance(value, FP8GatherWeight):
                meta = meta or value._meta
                return value._tensor
            return value

        plain_args, plain_kwargs = pytree.tree_map(unwrap, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func is _aten.copy_.default:
            return args[0]
        if func not in _KEEP or meta is None:
            return out
        wrap = lambda value: FP8GatherWeight(value, meta) if isinstance(value, Tensor) else value  # noqa: E731
        return pytree.tree_map(wrap, out)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Quantise the local shard: what FSDP2 sends, as uint8 codes and scales."""
        chosen = recipe_of(self._meta.recipe_text)
        spec = specs_of(self._meta.recipe_text).forward_weight
        plane, _ = cast(self._tensor, None if self._meta.form == "square" else 1, spec, cast_backend(chosen))
        return (plane.codes.contiguous(), plane.scales.contiguous()), self._meta

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: PlaneMeta,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """The whole weight as a plane. On later gathers `out` already views the buffers that were filled."""
        codes, scales = all_gather_outputs
        if out is not None:
            return None
        return GatheredWeight(codes, scales, metadata, param_dtype), (codes, scales)


class GatheredWeight(PlaneWeight):
    """A whole weight that exists only as codes and scales; `mx_linear` multiplies with them as they are."""

    _codes: Tensor
    _scales: Tensor
    _meta: PlaneMeta

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, meta: PlaneMeta, dtype: torch.dtype, requires_grad: bool = False):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Wrapper._make(cls, codes, dtype, requires_grad)

    def __init__(
        self, codes: Tensor, scales: Tensor, meta: PlaneMeta, dtype: torch.dtype, requires_grad: bool = False
    ) -> None:
        self._codes, self._scales, self._meta = codes, scales, meta
        self.is_square = meta.form == "square"

    def __repr__(self, *, tensor_contents: object = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"GatheredWeight({tuple(self.shape)}, {self._meta.form}, {self._meta.format.value})"

    def plane(self) -> MXTensor:
        """The weight as a plane."""
        return self._meta.plane(self._codes, self._scales)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ops = torch.ops.gemworks_precision
        if func is ops.linear.default:
            x, weight, bias, text, _step, save, out_dtype = args
            return forward_op(x, weight.plane(), bias, recipe_of(text), save, out_dtype)
        if func is ops.linear_backward.default:
            dy, x, weight, *rest = args
            return backward_op(dy, x, weight.plane(), weight.dtype, *rest)
        if func in (_aten.detach.default, _aten.alias.default, _aten.as_strided.default, _aten.view.default):
            same = args[0]
            if func not in (_aten.detach.default, _aten.alias.default) and tuple(args[1]) != tuple(same.shape):
                raise ValueError(f"weight: a gathered FP8 weight cannot be viewed as {tuple(args[1])}")
            return GatheredWeight(same._codes, same._scales, same._meta, same.dtype)
        warn_once(f"{func} on a weight gathered in FP8 dequantises it; only converted layers should read it")

        def unwrap(value: Any) -> Any:
            return value.plane().dequantize(value.dtype) if isinstance(value, GatheredWeight) else value

        plain_args, plain_kwargs = pytree.tree_map(unwrap, (args, kwargs or {}))
        return func(*plain_args, **plain_kwargs)


def gather_in_fp8(
    model: nn.Module, num_ranks: int, filter: Callable[[str, MXLinear], bool] | None = None
) -> list[GatherDecision]:
    """Make FSDP2 gather the converted layers of a model in FP8 where the rule allows; call between `convert` and
    `fully_shard`.

    Args:
        model: converted; parameters on their device, not sharded yet.
        num_ranks: size of the shard axis.
        filter: called with (name, layer); False leaves the layer alone, as one that is not sharded.

    Returns:
        One decision per converted layer, with its reason and bytes.

    Raises:
        ValueError: a parameter is sharded already, or num_ranks is no integer >= 1.
    """
    ranks = as_integer(num_ranks)
    if ranks is None or ranks < 1:
        raise ValueError(f"num_ranks: got {num_ranks!r}, expected the number of ranks that share a weight, >= 1")
    decisions = []
    for name, module in model.named_modules():
        if not isinstance(module, MXLinear) or (filter is not None and not filter(name, module)):
            continue
        weight = module.weight
        if hasattr(weight, "device_mesh"):
            raise ValueError(f"model: {name}.weight is sharded already; call gather_in_fp8 before fully_shard")
        chosen = module.recipe
        form, reason = gather_rule(module.out_features, module.in_features, ranks, chosen)
        nbytes = weight.numel() * weight.element_size()
        if form != "bf16":
            block = chosen.forward.kind.block
            meta = PlaneMeta(chosen.text, form, chosen.forward.right, chosen.scale_mode, block)
            wrapped = FP8GatherWeight(weight.data, meta)
            module.weight = nn.Parameter(wrapped, requires_grad=weight.requires_grad)
            scale_rows = module.out_features // block if form == "square" else module.out_features
            nbytes = weight.numel() + scale_rows * -(-module.in_features // block)
        decisions.append(GatherDecision(name, form, reason, nbytes))
    return decisions
