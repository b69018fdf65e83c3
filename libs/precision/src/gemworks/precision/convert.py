"""`convert` turns a model's linear layers into quantised ones, in place and back, without touching its state dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from gemworks.precision.backends import choose, cost_note, device_spec, shape_rule, warn_once
from gemworks.precision.casts import cast_backend
from gemworks.precision.checks import SUPPORTED_DTYPES, check_module, check_step
from gemworks.precision.linear import linear_with_counts
from gemworks.precision.quantization import quantize
from gemworks.precision.recipe import PRESETS, GemmKind, Recipe, recipe
from gemworks.precision.regroup import regroup
from torch import Tensor, nn


class MXLinear(nn.Linear):
    """An `nn.Linear` that computes by a recipe. Made by `convert`; parameters, hooks and state dict are the layer's
    own.

    Attributes:
        recipe: the layer's recipe.
        layer_name: its name in the converted model.
        step: training step for stochastic rounding; `set_step` sets it for a whole model.
        fallback: why the layer computes in another arithmetic than its recipe's (None: it does not).
        inexact_codes: int64 `[2]` on the device: inexact codes of input and weight in the last forward.
    """

    recipe: Recipe
    layer_name: str
    step: int
    fallback: str | None
    inexact_codes: Tensor | None
    input_numel: int
    _active: Recipe

    def __init__(self, *_args: object, **_options: object) -> None:
        raise ValueError("MXLinear: is not constructed; make an nn.Linear and call convert(model, recipe) on its model")

    def forward(self, input: Tensor) -> Tensor:
        """`input W^T + bias` by the recipe."""
        if self._active.is_bf16:
            return nn.functional.linear(input, self.weight, self.bias)
        y, counts = linear_with_counts(input, self.weight, self.bias, self._active, self.step)
        if self._active.forward.kind is GemmKind.MXFP8_REGROUP128:
            self.inexact_codes, self.input_numel = counts.detach(), input.numel()
        return y

    def demote(self, preset: str, reason: str) -> None:
        """Compute by another preset from now on (`bf16`, or `mxfp8` for a regrouped layer); said once in a warning."""
        self.fallback = f"{preset}: {reason}"
        # A recipe that insists on cuBLAS would have no product of this arithmetic on Hopper.
        backend = cast_backend(self.recipe)
        self._active = Recipe(**{**_settings(self.recipe), **_arithmetic(PRESETS[preset]), "backend": backend})
        warn_once(f"layer {self.layer_name!r} computes in {preset} from now on: {reason}")

    def use_row_weights(self, reason: str) -> None:
        """Merge the weight's blocks to 1x128 instead of 128x128 from now on; said once in a warning."""
        self.fallback = f"row_weights: {reason}"
        self._active = replace(self._active, row_weights=True, square_weights=False)
        warn_once(f"layer {self.layer_name!r} uses 1x128 weights from now on: {reason}")

    def extra_repr(self) -> str:
        """Adds the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}" + (
            f", fallback={self.fallback}" if self.fallback else ""
        )


def _row_share(layer: nn.Linear) -> float:
    """Share of weight codes that merging to 1x128 makes inexact, the worse of the two directions."""
    with torch.no_grad():
        return max(regroup(quantize(layer.weight, dim))[1].item() for dim in (0, 1)) / max(1, layer.weight.numel())


def _settings(chosen: Recipe) -> dict:
    return {name: getattr(chosen, name) for name in ("scale_mode", "square_weights", "seed", "min_features")}


def _arithmetic(chosen: Recipe) -> dict:
    return {name: getattr(chosen, name) for name in ("name", "forward", "dgrad", "wgrad")}


@dataclass(frozen=True)
class LayerDecision:
    """What became of one layer: the arithmetic it has now and the rule that decided."""

    name: str
    in_features: int
    out_features: int
    decision: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """One decision per linear layer of the model, in module order."""

    decisions: tuple[LayerDecision, ...]

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of the layers that are quantised now."""
        return tuple(d.name for d in self.decisions if d.decision != "bf16")

    def __str__(self) -> str:
        if not self.decisions:
            return "no nn.Linear in this model: nothing was converted"
        width = max(len(d.name) for d in self.decisions)
        return "\n".join(
            f"{d.name:{width}}  {d.in_features:6} -> {d.out_features:6}  {d.decision:16} {d.reason}"
            for d in self.decisions
        )


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Every `nn.Linear` and `MXLinear` of a model, by name, in module order; subclasses with their own forward are
    left."""
    for name, module in model.named_modules():
        # FSDP2 exchanges a module's class for a subclass of its own: still an MXLinear.
        if isinstance(module, MXLinear) or type(module) is nn.Linear:
            yield name, module


def convert(
    model: nn.Module,
    recipe_or_name: str | Recipe = "mxfp8",
    filter: Callable[[str, nn.Linear], bool] | None = None,
) -> ConversionReport:
    """Make a model's linear layers compute by a recipe, in place.

    Layers stay bf16, and the report says so, when: the filter says no; they are among the last
    `keep_last_layers_bf16`; the recipe's `layers` table names `bf16` for them; their features are not multiples of the
    recipe's block, or fewer than `min_features`; their weights are not fp32, bf16 or fp16. Where an error is raised, no
    layer has been changed.

    Args:
        model: any module; parameters, optimizer and state dict stay as they are. Converting again replaces the recipe.
        recipe_or_name: a recipe, a preset name, or the path of a recipe file.
        filter: called with (name, layer); False leaves the layer alone.

    Returns:
        One decision per layer.

    Raises:
        ValueError: no module, recipe or filter; the recipe names layers that the model does not have, or a backend that
            cannot run it here.
    """
    check_module(model)
    if filter is not None and not callable(filter):
        raise ValueError(
            f"filter: got {filter!r}, expected a function of (name, layer) that says whether to convert it, e.g. "
            "lambda name, layer: 'head' not in name"
        )
    chosen = recipe(recipe_or_name)
    layers = list(linear_layers(model))
    missing = sorted(set(chosen.layers) - {name for name, _ in layers})
    if missing:
        raise ValueError(
            f"recipe {chosen.name!r}: names layers that the model does not have: {missing}; it has "
            f"{[name for name, _ in layers][:8]}...; write the recipe again with probe(), or delete these entries"
        )
    kept_last = {name for name, _ in layers[len(layers) - chosen.keep_last_layers_bf16 :]}
    decisions: list[tuple[Recipe, str | None]] = []
    for name, layer in layers:
        own = chosen.for_layer(name)
        reason = None
        if filter is not None and not filter(name, layer):
            reason = "the filter left it out"
        elif name in kept_last:
            reason = f"among the last {chosen.keep_last_layers_bf16} layers"
        elif own.is_bf16:
            reason = "the recipe says bf16"
        elif layer.weight.dtype not in SUPPORTED_DTYPES:
            reason = f"stays as it is: its weight is {layer.weight.dtype}, not fp32, bf16 or fp16"
        else:
            reason = shape_rule(layer.in_features, layer.out_features, own)
        if reason is None:
            _check_backend(own, layer)
        decisions.append((own, reason))
    report = []
    for (name, layer), (own, reason) in zip(layers, decisions, strict=True):
        if reason is None:
            _convert_layer(name, layer, own)
        else:
            _revert_layer(layer)
        decision, why = ("bf16", reason) if reason is not None else (own.name, "every rule passed")
        report.append(LayerDecision(name, layer.in_features, layer.out_features, decision, why))
    return ConversionReport(tuple(report))


def revert(model: nn.Module) -> None:
    """Undo `convert`: every layer is the `nn.Linear` it was. Raises ValueError for what is no module."""
    check_module(model)
    for _, layer in list(linear_layers(model)):
        _revert_layer(layer)


def set_step(model: nn.Module, step: int) -> None:
    """Tell every converted layer the training step (stochastic rounding draws from it).

    Raises:
        ValueError: no module, or a step outside of [0, 2^32).
    """
    check_module(model)
    step = check_step(step)
    for module in model.modules():
        if isinstance(module, MXLinear):
            module.step = step


def _check_backend(own: Recipe, layer: nn.Linear) -> None:
    if layer.weight.device.type not in ("cpu", "cuda"):
        return
    device = device_spec(layer.weight.device)
    for gemm in (own.forward, own.dgrad, own.wgrad):
        # Rows are not known yet and no rule depends on them.
        choice = choose("gemm", gemm.kind, (4096, layer.in_features, layer.out_features), device, own.backend)
        note = cost_note(choice, device)
        if note is not None:
            warn_once(note)


def _convert_layer(name: str, layer: nn.Linear, own: Recipe) -> None:
    # The class is exchanged, not the object: hooks, tied parameters, optimizers and wrappers keep what they hold.
    layer.__class__ = MXLinear
    assert isinstance(layer, MXLinear)
    layer.recipe, layer.layer_name, layer.step = own, name, 0
    layer.fallback, layer.inexact_codes, layer.input_numel, layer._active = None, None, 0, own


def _revert_layer(layer: nn.Module) -> None:
    if isinstance(layer, MXLinear):
        for attribute in ("recipe", "layer_name", "step", "fallback", "inexact_codes", "input_numel", "_active"):
            layer.__dict__.pop(attribute, None)
        object.__setattr__(layer, "__class__", nn.Linear)


def fall_back_where_inexact(model: nn.Module) -> list[str]:
    """Change regrouped layers whose last forward had more inexact codes than `max_inexact` allows (reads the device).

    Where only 128x128 weights lose too much, the layer takes 1x128 weights; otherwise it computes in exact `mxfp8`.

    Returns:
        Names of the layers changed.

    Raises:
        ValueError: no module.
    """
    check_module(model)
    demoted = []
    for module in model.modules():
        if isinstance(module, MXLinear) and module.fallback is None and module.inexact_codes is not None:
            counts = module.inexact_codes.tolist()
            share_weight = counts[1] / max(1, module.weight.numel())
            share_input = counts[0] / max(1, module.input_numel)
            share, limit = max(share_weight, share_input), module.recipe.max_inexact
            if share > limit >= share_input and _row_share(module) <= limit:
                module.use_row_weights(f"{share:.2%} of 128x128 weight codes are inexact after regrouping")
                demoted.append(module.layer_name)
            elif share > limit:
                module.demote("mxfp8", f"{share:.2%} of its codes are inexact after regrouping")
                demoted.append(module.layer_name)
    return demoted
