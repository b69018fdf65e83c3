"""`Recipe`: which arithmetic each of a linear layer's three products uses, as data that travels in a TOML file.

| preset | forward, dgrad, wgrad | on Hopper |
|---|---|---|
| `bf16` | plain | the comparison |
| `mxfp8` | E4M3 in OCP blocks of 32, products exact | bf16 speed at best: the accuracy of MXFP8 without its speed |
| `mxfp8_regroup128` | the same codes, merged to 128-wide blocks; inexact merges are counted, a layer with too many falls back | FP8 speed |
| `fp8_block128` | E4M3 in 1x128 (activations, gradients) and 128x128 (weights) blocks, power-of-two scales | FP8 speed |
| `fp8_square128` | the same with 128x128 blocks of everything, quantised once for both directions | FP8 speed, cheaper casts |
| `fp8_wgrad_bf16` | `fp8_block128` but the weight gradient | no second direction to cast |
| `fp8_tensor` | one fp32 scale a tensor from its own largest value ("current scaling"): E4M3, gradients E5M2, forward with fast accumulation | FP8 speed, the fastest product; one large value costs all others their bits |
"""  # noqa: E501

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

from gemworks.precision.checks import NamedEnum, as_integer, check_integer, set_integer
from gemworks.precision.formats import Format, element_spec
from gemworks.precision.hadamard import HADAMARD_SIZES, Hadamard
from gemworks.precision.scales import ScaleMode, scale_mode_of


class GemmKind(NamedEnum):
    """Arithmetic of one product."""

    BF16 = "bf16"
    MXFP8 = "mxfp8"
    MXFP8_REGROUP128 = "mxfp8_regroup128"
    FP8_BLOCK128 = "fp8_block128"
    FP8_TENSOR = "fp8_tensor"

    @property
    def block(self) -> int:
        """Multiple that the layer's features must be of (1 for bf16)."""
        return {GemmKind.BF16: 1, GemmKind.FP8_TENSOR: 16, GemmKind.MXFP8: 32}.get(self, 128)


BLOCK_KINDS = (GemmKind.MXFP8, GemmKind.MXFP8_REGROUP128, GemmKind.FP8_BLOCK128)
"""Kinds whose scales are those of blocks."""


class Save(NamedEnum):
    """What a layer keeps of its input for the weight gradient.

    `high_precision`: the input itself (2 bytes an element in bf16; free if something else keeps it anyway).
    `row`: the forward's plane (1.03 bytes); the weight gradient sees values rounded twice.
    `both`: the input is quantised both ways in one read and the column plane is kept (1.03 bytes, rounded once).
    """

    HIGH_PRECISION = "high_precision"
    ROW = "row"
    BOTH = "both"


BACKENDS = ("auto", "reference", "triton", "scaled_mm", "transformer_engine")


@dataclass(frozen=True)
class GemmRecipe:
    """One product: its arithmetic and the element formats of its left and right operand.

    forward: left = activations, right = weight; dgrad: left = output gradient, right = weight; wgrad: left = output
    gradient, right = activations.
    fast_accumulation, of `fp8_tensor` alone: the FP8 units add up the whole contraction by themselves, with their 13
    fraction bits, instead of handing sums to fp32 on the way. Only cuBLAS has it; elsewhere sums are fp32 anyway.
    """

    kind: GemmKind = GemmKind.MXFP8
    left: Format = Format.E4M3
    right: Format = Format.E4M3
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "kind", GemmKind(self.kind))
        except ValueError:
            raise ValueError(f"kind: got {self.kind!r}, expected one of {[k.value for k in GemmKind]}") from None
        for name in ("left", "right"):
            spec = element_spec(getattr(self, name))
            if spec.torch_dtype is None:
                raise ValueError(f"{name}: got {spec.format.value!r}, a storage format; products take 'e4m3' or 'e5m2'")
            object.__setattr__(self, name, spec.format)
        if self.left == self.right == Format.E5M2 and self.kind is not GemmKind.BF16:
            raise ValueError("left and right: both 'e5m2', which no tensor core multiplies; use 'e4m3' for one of them")
        if not isinstance(self.fast_accumulation, bool):
            raise ValueError(f"fast_accumulation: got {self.fast_accumulation!r}, expected True or False")
        if self.fast_accumulation and self.kind is not GemmKind.FP8_TENSOR:
            raise ValueError(
                f"fast_accumulation: set with kind {self.kind.value!r}, whose scales are applied on the way; only "
                "'fp8_tensor' has it"
            )


@dataclass(frozen=True)
class Recipe:
    """How linear layers compute. Master weights, their gradients and the optimizer are never touched.

    Attributes:
        name: for reports.
        forward, dgrad, wgrad: arithmetic of each product.
        scale_mode: of every plane of blocks.
        save: what is kept of the input for backward.
        square_weights: 32x32 weight blocks, one plane for forward and dgrad (128-wide kinds use 128x128 by default).
        row_weights: 1x128 weight blocks in the 128-wide kinds: merging loses fewer codes, Hopper's product is slower.
        square_inputs: square blocks of the activations in the weight gradient. Hopper multiplies 1x128 by 128x128
            faster than 1x128 by 1x128; 128 rows then share a scale, so rows much smaller than their neighbours lose.
            With `save="both"` the forward takes the same codes: one quantisation, stored both ways.
        square_gradients: square blocks of the output gradient, quantised once for dgrad and wgrad.
        stochastic_gradients: round output gradients stochastically.
        hadamard_size: random Hadamard transform along the weight gradient's contraction, 0 for none. Only there: the
            planes of the other products have other readers.
        seed: of stochastic rounding and of the transform's signs.
        keep_last_layers_bf16: this many of the model's last linear layers stay bf16.
        min_features: layers with fewer input or output features stay bf16 (their casts cost more than they save).
        power_of_two_scales: scales of `fp8_tensor` are powers of two (those of blocks always are).
        max_inexact: share of inexact codes above which `mxfp8_regroup128` falls back to `mxfp8` for a layer.
        backend: `auto`, or a backend's name to insist on.
        layers: preset name by layer name; overrides this recipe for that layer (`probe` writes it).
        text: the recipe as TOML, the form in which ops carry it; made on construction.
    """

    name: str = "mxfp8"
    forward: GemmRecipe = field(default_factory=GemmRecipe)
    dgrad: GemmRecipe = field(default_factory=GemmRecipe)
    wgrad: GemmRecipe = field(default_factory=GemmRecipe)
    scale_mode: ScaleMode = ScaleMode.RCEIL
    save: Save = Save.HIGH_PRECISION
    square_weights: bool = False
    row_weights: bool = False
    square_inputs: bool = False
    square_gradients: bool = False
    stochastic_gradients: bool = False
    hadamard_size: int = 0
    seed: int = 0
    keep_last_layers_bf16: int = 0
    min_features: int = 128
    max_inexact: float = 1e-3
    power_of_two_scales: bool = False
    backend: str = "auto"
    layers: Mapping[str, str] = field(default_factory=dict)
    text: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "scale_mode", scale_mode_of(self.scale_mode))
        try:
            object.__setattr__(self, "save", Save(self.save))
        except ValueError:
            raise ValueError(f"save: got {self.save!r}, expected one of {[s.value for s in Save]}") from None
        size = as_integer(self.hadamard_size)
        if size is None or (size and size not in HADAMARD_SIZES):
            raise ValueError(f"hadamard_size: got {self.hadamard_size!r}, expected 0 or one of {HADAMARD_SIZES}")
        set_integer(self, "hadamard_size", size)
        if self.hadamard_size and self.save is Save.BOTH:
            raise ValueError(
                "save: 'both' keeps an untransformed plane; with hadamard_size use 'high_precision' or 'row'"
            )
        if self.save is not Save.HIGH_PRECISION and self.forward.kind is GemmKind.BF16:
            raise ValueError(f"save: {self.save.value!r} needs a quantised forward product; use 'high_precision'")
        if self.save is Save.BOTH and (
            self.wgrad.kind is not self.forward.kind or self.wgrad.right != self.forward.left
        ):
            raise ValueError("save: 'both' needs forward and wgrad of one kind and one format for the activations")
        if self.square_weights and self.row_weights:
            raise ValueError("square_weights and row_weights: both set; choose one")
        if (self.square_inputs or self.square_gradients) and self.hadamard_size:
            raise ValueError(
                "square_inputs and square_gradients: do not go with hadamard_size, a transform along one dim"
            )
        if self.square_gradients and (self.dgrad.kind is not self.wgrad.kind or self.dgrad.left != self.wgrad.left):
            raise ValueError("square_gradients: needs dgrad and wgrad of one kind and one format for the gradients")
        blocks = ("square_weights", "row_weights", "square_inputs", "square_gradients")
        blocked = [name for name in (*blocks, "stochastic_gradients", "hadamard_size") if getattr(self, name)]
        if blocked and GemmKind.FP8_TENSOR in self.kinds:
            raise ValueError(
                f"{', '.join(blocked)}: set with a product of kind 'fp8_tensor', which has no blocks and rounds to "
                "nearest; leave them unset, or use 'fp8_block128'"
            )
        unknown = sorted({preset for preset in self.layers.values() if preset not in PRESETS})
        if unknown:
            raise ValueError(f"layers: unknown presets {unknown}, expected {sorted(PRESETS)}")
        object.__setattr__(self, "text", self.to_toml())
        # a compiler reads what is there, but cannot follow how a cached property gets there
        _ = self.is_bf16, self.feature_multiple

    def _check_types(self) -> None:
        """What a file or a caller may get wrong field by field."""
        for name in ("forward", "dgrad", "wgrad"):
            value = getattr(self, name)
            if not isinstance(value, GemmRecipe):
                raise ValueError(f"{name}: got {value!r}, expected a GemmRecipe, e.g. GemmRecipe('mxfp8')")
        for item in fields(self):
            value = getattr(self, item.name)
            if item.default is False and not isinstance(value, bool):
                raise ValueError(f"{item.name}: got {value!r}, expected True or False")
        if not isinstance(self.name, str):
            raise ValueError(f"name: got {self.name!r}, expected a string")
        for name, end in (("seed", 2**63), ("keep_last_layers_bf16", 2**31), ("min_features", 2**31)):
            set_integer(self, name, check_integer(name, getattr(self, name), end))
        share = self.max_inexact
        if not isinstance(share, Real) or isinstance(share, bool) or not 0 <= share <= 1:
            raise ValueError(f"max_inexact: got {share!r}, expected a share in [0, 1]")
        if type(share) not in (int, float):
            object.__setattr__(self, "max_inexact", float(share))
        if self.backend not in BACKENDS:
            raise ValueError(f"backend: got {self.backend!r}, expected one of {BACKENDS}")
        named = isinstance(self.layers, Mapping) and all(isinstance(preset, str) for preset in self.layers.values())
        if not named:
            raise ValueError(
                f"layers: got {self.layers!r}, expected preset names by layer name, e.g. {{'head': 'bf16'}}"
            )

    @property
    def kinds(self) -> tuple[GemmKind, GemmKind, GemmKind]:
        """Kinds of forward, dgrad, wgrad."""
        return self.forward.kind, self.dgrad.kind, self.wgrad.kind

    @cached_property
    def is_bf16(self) -> bool:
        """No product is quantised."""
        return all(kind is GemmKind.BF16 for kind in self.kinds)

    @cached_property
    def feature_multiple(self) -> int:
        """What in and out features must both be a multiple of."""
        return max(kind.block for kind in self.kinds)

    @property
    def hadamard(self) -> Hadamard | None:
        """The weight gradient's transform."""
        return Hadamard(self.hadamard_size, self.seed) if self.hadamard_size else None

    def for_layer(self, name: str) -> Recipe:
        """The recipe of one layer: this one, or the preset that `layers` names for it (keeping the other settings)."""
        preset = self.layers.get(name)
        if preset is None:
            return replace(self, layers={})
        base = PRESETS[preset]
        own = ("name", "forward", "dgrad", "wgrad", "save", "square_inputs", "square_gradients")
        return replace(self, layers={}, **{name: getattr(base, name) for name in own})

    def to_toml(self) -> str:
        """The recipe as TOML; `Recipe.from_toml` reads it back to an equal recipe.

        >>> Recipe.from_toml(recipe("fp8_block128").to_toml()) == recipe("fp8_block128")
        True
        """
        lines = ["[recipe]"]
        tables = []
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, GemmRecipe):
                tables += ["", f"[recipe.{item.name}]", *(f"{k} = {_toml(v)}" for k, v in asdict(value).items())]
            elif item.name not in ("layers", "text"):
                lines.append(f"{item.name} = {_toml(value)}")
        layers = (
            ["", "[layers]", *(f"{json.dumps(k)} = {_toml(v)}" for k, v in self.layers.items())] if self.layers else []
        )
        return "\n".join([*lines, *tables, *layers]) + "\n"

    @staticmethod
    def from_toml(text: str) -> Recipe:
        """Parse a recipe; raises ValueError for unknown keys and values."""
        if not isinstance(text, str):
            raise ValueError(f"recipe file: got {type(text).__name__}, expected its text; recipe(path) reads a file")
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"recipe file: not TOML: {error}") from None
        body = data.get("recipe")
        if not isinstance(body, dict):
            raise ValueError("recipe file: no [recipe] table; Recipe.to_toml() shows the form")
        extra = sorted(set(data) - {"recipe", "layers"})
        known = {item.name for item in fields(Recipe) if item.init} - {"layers"}
        extra += sorted(f"recipe.{key}" for key in set(body) - known)
        if extra:
            raise ValueError(f"recipe file: unknown keys {extra}, expected {sorted(known)}")
        values: dict[str, Any] = dict(body)
        for gemm in ("forward", "dgrad", "wgrad"):
            if gemm in values:
                try:
                    values[gemm] = GemmRecipe(**values[gemm])
                except TypeError as error:
                    known = ", ".join(part.name for part in fields(GemmRecipe))
                    raise ValueError(f"recipe file: [recipe.{gemm}]: {error}; expected some of {known}") from None
        return Recipe(**values, layers=data.get("layers", {}))

    def save_file(self, path: str | Path) -> None:
        """Write `to_toml()`."""
        Path(path).write_text(self.to_toml())


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value))


def _uniform(name: str, kind: GemmKind) -> Recipe:
    gemm = GemmRecipe(kind)
    return Recipe(name, gemm, gemm, gemm)


PRESETS: dict[str, Recipe] = {}
PRESETS.update({kind.value: _uniform(kind.value, kind) for kind in GemmKind})
_BLOCK128 = PRESETS["fp8_block128"]
PRESETS["fp8_square128"] = replace(
    _BLOCK128, name="fp8_square128", save=Save.BOTH, square_inputs=True, square_gradients=True
)
_TENSOR = GemmRecipe(GemmKind.FP8_TENSOR, Format.E5M2)
PRESETS["fp8_tensor"] = Recipe(
    "fp8_tensor", GemmRecipe(GemmKind.FP8_TENSOR, fast_accumulation=True), dgrad=_TENSOR, wgrad=_TENSOR
)
PRESETS["fp8_wgrad_bf16"] = replace(_BLOCK128, name="fp8_wgrad_bf16", wgrad=GemmRecipe(GemmKind.BF16))


def recipe(source: str | Path | Recipe, **changes: Any) -> Recipe:
    """A recipe by preset name, from a `.toml` file, or as given; keyword arguments replace fields.

    Raises:
        ValueError: no such preset, file or field, or a value that a field does not take.

    >>> recipe("mxfp8", keep_last_layers_bf16=2).keep_last_layers_bf16
    2
    """
    if isinstance(source, Recipe):
        found = source
    elif str(source) in PRESETS:
        found = PRESETS[str(source)]
    elif str(source).endswith(".toml"):
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"recipe: no file {source}; `probe` or Recipe.save_file writes one")
        found = Recipe.from_toml(path.read_text())
    else:
        raise ValueError(f"recipe: got {source!r}, expected one of {sorted(PRESETS)} or the path of a .toml file")
    if not changes:  # on every call of a layer, also while it is being compiled
        return found
    known = {part.name for part in fields(Recipe) if part.init}
    if unknown := sorted(set(changes) - known):
        raise ValueError(f"recipe: got changes {', '.join(unknown)}, expected some of {', '.join(sorted(known))}")
    return replace(found, **changes)
