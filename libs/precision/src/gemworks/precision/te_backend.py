"""Transformer Engine as a backend of whole linear layers, for who has it: `Recipe(backend="transformer_engine")`.

It quantises and multiplies by itself, forward and backward, so codes and scales are its own: scales of
`Float8BlockScaling` are rounded up to powers of two like ours, E4M3 throughout; `Float8CurrentScaling` has one scale a
tensor by the formula of `tensor_scaling`; `MXFP8BlockScaling` is OCP MX. It is never chosen by itself.
`Float8BlockScaling` has run beside ours on an H200, with the same bits, and the benchmark compares current scaling
likewise; `MXFP8BlockScaling`, which needs a Blackwell GPU, has not run.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

import torch
from gemworks.precision.formats import Format
from gemworks.precision.recipe import GemmKind, Recipe
from torch import Tensor, nn

NAME = "transformer_engine"
RECIPES = {
    GemmKind.FP8_BLOCK128: "Float8BlockScaling",
    GemmKind.FP8_TENSOR: "Float8CurrentScaling",
    GemmKind.MXFP8: "MXFP8BlockScaling",
}


def refusal(kind: GemmKind, device_type: str, capability: int) -> str | None:
    """Why Transformer Engine does not compute a layer of this kind there; None if it does."""
    if kind not in RECIPES:
        return f"it has no {kind.value}"
    if device_type != "cuda":
        return "needs a CUDA device"
    if kind is GemmKind.FP8_BLOCK128 and capability != 90:
        return f"its Float8BlockScaling is Hopper's (sm_90), this is sm_{capability}"
    if kind is GemmKind.FP8_TENSOR and capability < 89:
        return f"its Float8CurrentScaling needs sm_89 or later, this is sm_{capability}"
    if kind is GemmKind.MXFP8 and not 100 <= capability < 120:
        return f"its MXFP8BlockScaling needs sm_100, this is sm_{capability}"
    if importlib.util.find_spec(NAME) is None:
        return "transformer_engine is not installed (pip install 'gemworks-precision[transformer-engine]')"
    return None


def check_recipe(chosen: Recipe) -> None:
    """Raise ValueError for what its layers can't do: mixed kinds, E5M2 but of gradients under one scale, our own
    extras."""
    if len(set(chosen.kinds)) != 1:
        raise ValueError(
            f"backend: {NAME!r} runs one arithmetic for all products, got {[k.value for k in chosen.kinds]}"
        )
    extras = {
        "stochastic_gradients": chosen.stochastic_gradients,
        "hadamard_size": chosen.hadamard_size,
        "row_weights": chosen.row_weights,
        "square_weights": chosen.square_weights,
        "square_inputs": chosen.square_inputs,
        "square_gradients": chosen.square_gradients,
    }
    asked = [name for name, value in extras.items() if value]
    gemms = (chosen.forward, chosen.dgrad, chosen.wgrad)
    formats = {f.value for gemm in gemms for f in (gemm.left, gemm.right)}
    if chosen.forward.kind is GemmKind.FP8_TENSOR:
        operands = {chosen.forward.left, *(gemm.right for gemm in gemms)}
        gradients = {chosen.dgrad.left, chosen.wgrad.left}
        if operands != {Format.E4M3} or len(gradients) != 1:
            raise ValueError(
                f"backend: {NAME!r} takes E4M3 for inputs and weights and one format for gradients, got "
                f"{[(gemm.left.value, gemm.right.value) for gemm in gemms]}; use backend='auto'"
            )
        return  # scale modes are of blocks, and a recipe with one scale a tensor has none of the extras
    if asked or formats != {"e4m3"} or chosen.scale_mode.value != "rceil":
        raise ValueError(
            f"backend: {NAME!r} takes E4M3 with scale mode 'rceil' and none of {sorted(extras)}; got formats "
            f"{sorted(formats)}, {chosen.scale_mode.value!r}, {asked}; use backend='auto'"
        )


def made_recipe(chosen: Recipe, te_recipe: Any) -> Any:
    """Its recipe; `te_recipe` is the module that has it."""
    kind = getattr(te_recipe, RECIPES[chosen.forward.kind])
    if chosen.forward.kind is not GemmKind.FP8_TENSOR:
        return kind()
    wide, power = chosen.dgrad.left is Format.E5M2, chosen.power_of_two_scales
    accumulation = {
        f"fp8_gemm_{name}": te_recipe.MMParams(use_split_accumulator=not gemm.fast_accumulation)
        for name, gemm in (("fprop", chosen.forward), ("dgrad", chosen.dgrad), ("wgrad", chosen.wgrad))
    }
    formats = te_recipe.Format.HYBRID if wide else te_recipe.Format.E4M3
    made = kind(use_power_2_scales=power, fp8_format=formats, **accumulation)
    # Its layers read these, which are no arguments and follow an environment variable.
    for tensor in ("fwd_inp", "fwd_weight", "bwd_grad"):
        setattr(made, f"fp8_quant_{tensor}", te_recipe.QParams(power_2_scale=power))
    return made


@lru_cache(maxsize=256)
def _layer(
    in_features: int, out_features: int, has_bias: bool, dtype: torch.dtype, device: torch.device, _recipe_text: str
) -> Any:
    """A layer of its, whose parameters are replaced before each call. One for each recipe: a layer keeps the formats
    and scales that it first computed with."""
    import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]

    return te.Linear(in_features, out_features, bias=has_bias, params_dtype=dtype, device=device)


def te_linear(x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Recipe) -> Tensor:
    """`x W^T + bias` by Transformer Engine, with its gradients.

    Raises:
        ValueError: a recipe that it can't follow, or a weight that is no parameter (it registers what it trains).
    """
    check_recipe(chosen)
    if not isinstance(weight, nn.Parameter) or not (bias is None or isinstance(bias, nn.Parameter)):
        raise ValueError(f"weight: got a {type(weight).__name__}, expected an nn.Parameter for backend {NAME!r}")
    import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]
    from transformer_engine.common import recipe as te_recipe  # pyright: ignore[reportMissingImports]

    sizes = weight.shape[1], weight.shape[0]
    layer = _layer(*sizes, bias is not None, weight.dtype, weight.device, chosen.text)
    layer.weight = weight
    if bias is not None:
        layer.bias = bias
    with te.fp8_autocast(enabled=True, fp8_recipe=made_recipe(chosen, te_recipe)):
        return layer(x)
