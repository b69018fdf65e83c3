# The mistakes are of types too.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""What a caller gets wrong is a ValueError that names the argument, what it was and what it must be."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from gemworks.precision import (
    DeviceSpec,
    Format,
    GemmKind,
    GemmRecipe,
    Hadamard,
    JaggedMX,
    MXLinear,
    MXTensor,
    Recipe,
    Save,
    ScaleMode,
    Stochastic,
    convert,
    decode,
    encode,
    explain,
    explain_grouped,
    fall_back_where_inexact,
    hadamard_inverse,
    hadamard_transform,
    mx_grouped_linear,
    mx_linear,
    probe,
    quantize,
    quantize_both,
    quantize_jagged,
    quantize_square,
    recipe,
    regroup,
    revert,
    set_step,
    support_table,
)
from gemworks.precision.backends import REGISTRY
from gemworks.precision.gemms import gemm
from gemworks.precision.monitor import PrecisionMonitor
from gemworks.precision.probe import measure_layer
from gemworks.precision.recipe import BACKENDS
from torch import Tensor, nn

pytestmark = pytest.mark.reference

X, W = torch.linspace(-2, 2, 1024).reshape(8, 128), torch.linspace(-1, 1, 128 * 128).reshape(128, 128)
GROUPS, OFFSETS = W.expand(2, 128, 128), torch.tensor([0, 3, 8])
PLANE = quantize(X)
WHERE = ((8, 128), 1, 32)
META = torch.zeros(8, 128, device="meta")
MXFP8 = GemmKind.MXFP8


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))


def plane(codes=PLANE.codes, scales=PLANE.scales, where=WHERE, format=Format.E4M3, mode=ScaleMode.RCEIL) -> MXTensor:
    shape, dim, block = where
    return MXTensor(codes, scales, shape, dim, block, format, mode)


WRONG = {
    # names of enumerations
    "format": (lambda: Format("e3m2"), "Format: got 'e3m2', expected one of 'e4m3', 'e5m2', 'e2m1'"),
    "kind": (lambda: GemmKind("fp8"), "GemmKind: got 'fp8', expected one of 'bf16'"),
    "save": (lambda: Save(3), "Save: got 3, expected one of 'high_precision', 'row', 'both'"),
    "scale mode": (lambda: ScaleMode(None), "ScaleMode: got None, expected one of 'floor'"),
    # small values
    "device type": (lambda: DeviceSpec("tpu"), "DeviceSpec: got type 'tpu'"),
    "device without capability": (lambda: DeviceSpec("cuda"), "capability 0, expected 'cpu' alone, or 'cuda' with"),
    "device capability": (lambda: DeviceSpec("cuda", "90"), "capability '90'"),
    "capability is a flag": (lambda: DeviceSpec("cuda", True), "capability True"),
    "cpu capability": (lambda: DeviceSpec("cpu", -1), "capability -1"),
    "hadamard seed": (lambda: Hadamard(64, "a"), "Hadamard seed: got 'a', expected an integer in [0, 2^63)"),
    "seed": (lambda: Stochastic(1.5), "seed: got 1.5, expected an integer in [0, 2^63)"),
    "seed is a flag": (lambda: Stochastic(True), "seed: got True"),
    "step of noise": (lambda: Stochastic(1, None), "step: got None, expected an integer in [0, 2^32); use the step"),
    # recipes
    "product of a recipe": (lambda: Recipe(forward="mxfp8"), "forward: got 'mxfp8', expected a GemmRecipe"),
    "product of changes": (lambda: recipe("mxfp8", wgrad="bf16"), "wgrad: got 'bf16', expected a GemmRecipe"),
    "name": (lambda: Recipe(name=3), "name: got 3, expected a string"),
    "flag": (lambda: Recipe(square_weights="yes"), "square_weights: got 'yes', expected True or False"),
    "seed of a recipe": (lambda: Recipe(seed=-1), "seed: got -1"),
    "features": (lambda: Recipe(min_features="a"), "min_features: got 'a', expected an integer"),
    "last layers": (lambda: Recipe(keep_last_layers_bf16=1.5), "keep_last_layers_bf16: got 1.5"),
    "share is a flag": (lambda: Recipe(max_inexact=True), "max_inexact: got True"),
    "transform is a flag": (lambda: Recipe(hadamard_size=False), "hadamard_size: got False, expected 0 or one of"),
    "transform's size": (lambda: Hadamard(32.0), "Hadamard size: got 32.0, expected one of"),
    "share": (lambda: Recipe(max_inexact=float("nan")), "max_inexact: got nan, expected a share in [0, 1]"),
    "backend": (lambda: Recipe(backend="cudnn"), "backend: got 'cudnn', expected one of ('auto', 'reference'"),
    "layers": (lambda: Recipe(layers="abc"), "layers: got 'abc', expected preset names by layer name"),
    "layer": (lambda: Recipe(layers={"a": ["b"]}), "layers: got {'a': ['b']}"),
    "text": (lambda: recipe("mxfp8", text="a"), "recipe: got changes text"),
    "file of bytes": (lambda: Recipe.from_toml(b""), "recipe file: got bytes, expected its text"),
    "file with a bad seed": (lambda: Recipe.from_toml('[recipe]\nseed = "a"\n'), "seed: got 'a'"),
    "operand format": (lambda: GemmRecipe("mxfp8", 4), "format: got 4"),
    # planes
    "codes": (lambda: plane(codes="a"), "codes: got str, expected a Tensor"),
    "plane's dim": (lambda: plane(where=((8, 128), 5, 32)), "dim: got 5, expected one in [0, 2)"),
    "plane's block": (lambda: plane(where=((8, 128), 1, 33)), "block: got 33, expected one of (32, 64, 128, 256)"),
    "plane's format": (lambda: plane(format="e4m3"), "format: got 'e4m3', expected a Format"),
    "plane's mode": (lambda: plane(mode="up"), "scale_mode: got 'up', expected a ScaleMode"),
    "plane's devices": (lambda: plane(scales=PLANE.scales.to("meta")), "scales: on meta, codes are on cpu"),
    "integer values": (lambda: PLANE.dequantize(torch.int32), "dtype: got torch.int32, expected floating point"),
    "no dtype": (lambda: PLANE.dequantize("bf16"), "dtype: got 'bf16'"),
    "jagged plane": (lambda: JaggedMX(X, OFFSETS, OFFSETS), "plane: got Tensor, expected an MXTensor"),
    # encoding
    "decode a list": (lambda: decode([1], "e4m3"), "codes: got list, expected a Tensor"),
    "decode floats": (lambda: decode(X, "e4m3"), "codes: got dtype torch.float32, expected torch.uint8"),
    "decode float8": (lambda: decode(X.to(torch.float8_e4m3fn), "e4m3"), "view float8 as codes.view(torch.uint8)"),
    "decode integers": (lambda: decode(torch.tensor([-1]), "e4m3"), "codes: got dtype torch.int64"),
    "encode integers": (lambda: encode(X.int(), "e4m3"), "x: got dtype torch.int32, expected floating point"),
    "encode complex": (lambda: encode(X.to(torch.complex64), "e4m3"), "x: got dtype torch.complex64"),
    "random words": (lambda: encode(X, "e4m3", X), "random_bits: got (8, 128) torch.float32, expected int64"),
    "random shape": (lambda: encode(X, "e4m3", OFFSETS), "random_bits: got (3,)"),
    # transform
    "transform a string": (lambda: hadamard_transform("a", Hadamard(32)), "x: got str"),
    "transform by a size": (lambda: hadamard_transform(X, 32), "hadamard: got 32, expected a Hadamard"),
    "transform along": (lambda: hadamard_transform(X, Hadamard(32), 5), "dim: got 5 for x of shape (8, 128)"),
    "transform integers": (lambda: hadamard_transform(X.int(), Hadamard(32)), "x: got dtype torch.int32"),
    "inverse of a part": (lambda: hadamard_inverse(X[:, :33], Hadamard(32)), "33 entries, expected a multiple of 32"),
    # quantising
    "dim is a flag": (lambda: quantize(X, True), "dim: got True for x of shape (8, 128)"),
    "dim is half": (lambda: quantize(X, 1.0), "dim: got 1.0 for x of shape (8, 128)"),
    "dim is a fact": (lambda: quantize(X, torch.tensor(True)), "dim: got tensor(True)"),
    "dim is numpy's flag": (lambda: quantize(X, np.True_), "dim: got np.True_"),
    "dims": (lambda: quantize(X, torch.tensor([1])), "dim: got tensor([1])"),
    "dim is a real tensor": (lambda: quantize(X, torch.tensor(1.0)), "dim: got tensor(1.)"),
    "dim is a name": (lambda: quantize(X, "rows"), "dim: got 'rows' for x of shape (8, 128)"),
    "no dim": (lambda: quantize(X, None), "dim: got None, expected the dim of the contraction"),
    "noise is a seed": (lambda: quantize(X, stochastic=3), "stochastic: got 3, expected a Stochastic"),
    "transform is a size": (lambda: quantize(X, hadamard=32), "hadamard: got 32, expected a Hadamard"),
    "sparse": (lambda: quantize(X.to_sparse()), "x: got layout torch.sparse_coo, expected torch.strided"),
    "both of a string": (lambda: quantize_both("a"), "x: got str, expected a Tensor"),
    "square noise": (lambda: quantize_square(X, stochastic=1), "stochastic: got 1"),
    "offsets are a list": (lambda: quantize_jagged(X, [0, 8]), "offsets: got list, expected a Tensor"),
    "offsets past the end": (lambda: quantize_jagged(X, torch.tensor([0, 80])), "no more than x's 8 rows"),
    "offsets fall": (lambda: quantize_jagged(X, torch.tensor([0, 5, 3])), "offsets: got [0, 5, 3] up to 3"),
    "offsets are lengths": (lambda: quantize_jagged(X, torch.tensor([3, 5])), "expected 0 first"),
    "a row is no matrix": (lambda: quantize_jagged(X[0], OFFSETS), "x: got shape (128,), expected packed rows [T, K]"),
    "jagged block": (lambda: quantize_jagged(X, OFFSETS, block="a"), "block: got 'a'"),
    "jagged transform": (lambda: quantize_jagged(X, OFFSETS, hadamard=32), "hadamard: got 32"),
    "regroup a tensor": (lambda: regroup(X), "mx: got Tensor, expected an MXTensor"),
    "squares of a line": (lambda: regroup(quantize(X[0]), square=True), "squares need at least 2 dims"),
    "other signs": (
        lambda: gemm(quantize(X, hadamard=Hadamard(32, 1)), quantize(W, hadamard=Hadamard(32, 2)), MXFP8, X.dtype),
        "need the same length and the same Hadamard transform",
    ),
    "one transform": (lambda: gemm(quantize(X, hadamard=Hadamard(32)), quantize(W), MXFP8, X.dtype), "same Hadamard"),
    "other contraction": (lambda: gemm(PLANE, quantize(W[:, :64]), MXFP8, X.dtype), "contractions 128 (None) and 64"),
    # layers
    "x is a string": (lambda: mx_linear("a", W), "x: got str, expected a Tensor"),
    "no weight": (lambda: mx_linear(X, None), "weight: got NoneType, expected a Tensor"),
    "x of integers": (lambda: mx_linear(X.int(), W), "x: got dtype torch.int32"),
    "x is a number": (lambda: mx_linear(torch.tensor(1.0), W), "x: got shape (), expected last dim 128"),
    "weight of float64": (lambda: mx_linear(X, W.double()), "weight: got dtype torch.float64"),
    "weight is a row": (lambda: mx_linear(X, W[0]), "weight: got shape (128,), expected [out_features, in_features]"),
    "weight elsewhere": (lambda: mx_linear(X, W.to("meta")), "weight: on meta, x is on cpu"),
    "bias is a number": (lambda: mx_linear(X, W, 3), "bias: got int, expected a Tensor"),
    "bias of one": (lambda: mx_linear(X, W, torch.ones(1)), "bias: got shape (1,), expected (128,)"),
    "bias of rows": (lambda: mx_linear(X, W, torch.ones(8, 128)), "bias: got shape (8, 128)"),
    "bias elsewhere": (lambda: mx_linear(X, W, META[0]), "bias: on meta, x is on cpu"),
    "step": (lambda: mx_linear(X, W, step=1.5), "step: got 1.5"),
    "negative step": (lambda: mx_linear(X, W, step=-1), "step: got -1"),
    "grouped x": (lambda: mx_grouped_linear("a", GROUPS, OFFSETS), "x: got str"),
    "grouped offsets": (lambda: mx_grouped_linear(X, GROUPS, [0, 3, 8]), "offsets: got list"),
    "grouped past the end": (lambda: mx_grouped_linear(X, GROUPS, torch.tensor([0, 3, 80])), "x's 8 rows"),
    "too few groups": (lambda: mx_grouped_linear(X, GROUPS, torch.tensor([0, 8])), "offsets: got (2,), expected"),
    "offsets elsewhere": (lambda: mx_grouped_linear(X, GROUPS, OFFSETS.to("meta")), "offsets: on meta, x is on cpu"),
    "grouped elsewhere": (lambda: mx_grouped_linear(X, GROUPS.to("meta"), OFFSETS), "weight: on meta, x is on cpu"),
    "grouped integers": (lambda: mx_grouped_linear(X, GROUPS.int(), OFFSETS), "weight: got dtype torch.int32"),
    "grouped step": (lambda: mx_grouped_linear(X, GROUPS, OFFSETS, step="a"), "step: got 'a'"),
    # models
    "convert a name": (lambda: convert("model"), "model: got str, expected an nn.Module instance"),
    "convert a class": (lambda: convert(nn.Linear), "model: got the class Linear, expected an nn.Module instance"),
    "convert a list": (lambda: convert([model()]), "model: got list, expected an nn.Module"),
    "filter is a pattern": (lambda: convert(model(), "mxfp8", "mlp.*"), "filter: got 'mlp.*', expected a function of"),
    "layer by hand": (lambda: MXLinear(128, 128), "MXLinear: is not constructed; make an nn.Linear and call convert"),
    "revert": (lambda: revert(None), "model: got NoneType"),
    "step of a name": (lambda: set_step("a", 3), "model: got str"),
    "step of a model": (lambda: set_step(model(), -1), "step: got -1"),
    "fall back": (lambda: fall_back_where_inexact("a"), "model: got str"),
    "probe a name": (lambda: probe("a", [X]), "model: got str"),
    "one batch": (lambda: probe(model(), X), "batches: got a Tensor, expected an iterable of batches"),
    "batches": (lambda: probe(model(), 3), "batches: got a int"),
    "step function": (lambda: probe(model(), [X], 3), "step: got 3, expected a function of (model, batch)"),
    "loss": (lambda: probe(model(), [X], lambda m, b: 3), "step: its loss is int, expected a scalar tensor"),
    "loss of many": (lambda: probe(model(), [X], lambda m, b: m(b)), "step: its loss is (8, 128)"),
    "one candidate": (lambda: probe(model(), [X], candidates="mxfp8"), "candidates: got 'mxfp8', expected a tuple"),
    "no candidate": (lambda: probe(model(), [X], candidates=()), "candidates: got ()"),
    "own name": (lambda: probe(model(), [X], candidates=(recipe("mxfp8", name="a"),)), "recipes are named ['a']"),
    "floor": (lambda: probe(model(), [X], min_sqnr_db="a"), "min_sqnr_db: got 'a'"),
    "rows": (lambda: probe(model(), [X], max_rows=0), "max_rows: got 0"),
    "watched class": (lambda: PrecisionMonitor(nn.Linear), "model: got the class Linear"),
    "interval": (lambda: PrecisionMonitor(model(), interval=0), "interval: got 0, expected an integer >= 1"),
    "patience": (lambda: PrecisionMonitor(model(), patience=1.5), "patience: got 1.5, expected an integer >= 1"),
    "watched rows": (lambda: PrecisionMonitor(model(), max_rows=True), "max_rows: got True, expected an integer >= 1"),
    "watched floor": (lambda: PrecisionMonitor(model(), min_sqnr_db="a"), "min_sqnr_db: got 'a', expected a number"),
    # explanations
    "no shape": (lambda: explain(None), "shape: got None, expected (M, K, N)"),
    "a row is a flag": (lambda: explain((True, 128, 128)), "shape: got (True, 128, 128)"),
    "half a row": (lambda: explain((4.5, 128, 128)), "shape: got (4.5, 128, 128)"),
    "grouped device": (lambda: explain_grouped("mxfp8", "tpu"), "device: got 'tpu'"),
    "devices": (lambda: support_table(3), "devices: got 3, expected a tuple of them"),
    "one device": (lambda: support_table("sm_90"), "devices: got 'sm_90', expected a tuple of them"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_named(case):
    call, words = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


@pytest.mark.parametrize("integer", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "tensor"])
def test_integers_of_any_type_are_taken(integer):
    """Steps come from tensors, sizes from numpy: what Python itself takes as an index."""
    layers = model()
    convert(layers, "mxfp8")
    set_step(layers, integer(5))
    assert [layer.step for layer in layers] == [5, 5]
    assert type(layers[0].step) is int
    assert torch.equal(quantize(X, integer(0)).codes, quantize(X, 0).codes)
    noise = Stochastic(integer(3), integer(4))
    assert noise == Stochastic(3, 4)
    assert repr(noise) == repr(Stochastic(3, 4))
    noisy = recipe("mxfp8", stochastic_gradients=True)
    assert torch.equal(mx_linear(X, W, None, noisy, step=integer(2)), mx_linear(X, W, None, noisy, step=2))
    given = recipe("mxfp8", seed=integer(3), min_features=integer(64), hadamard_size=integer(32))
    assert Recipe.from_toml(given.text) == given == recipe("mxfp8", seed=3, min_features=64, hadamard_size=32)
    assert repr(Hadamard(integer(32), integer(1))) == repr(Hadamard(32, 1))
    assert explain((integer(8), integer(128), 128)) == explain((8, 128, 128))
    assert probe(model(), [X], candidates=("mxfp8",), max_rows=integer(4)).layers[0].decision == "mxfp8"


def test_shares_of_numpy_are_taken():
    given = recipe("mxfp8", max_inexact=np.float32(0.5))
    assert Recipe.from_toml(given.text) == given == recipe("mxfp8", max_inexact=0.5)
    assert str(recipe("mxfp8", max_inexact=np.float64(0.5)).text) == given.text
    assert probe(model(), [X], candidates=("mxfp8",), min_sqnr_db=np.float32(60)).layers[0].decision == "bf16"


def test_a_failed_conversion_changes_nothing():
    class Refuses(Exception):
        pass

    def filter(name: str, layer: nn.Linear) -> bool:
        if name == "1":
            raise Refuses
        return True

    layers = model()
    with pytest.raises(Refuses):
        convert(layers, "mxfp8", filter)
    assert [type(layer) for layer in layers] == [nn.Linear, nn.Linear]
    with pytest.raises(ValueError, match="'scaled_mm' cannot run gemm mxfp8 on cpu"):
        convert(layers, recipe("mxfp8", backend="scaled_mm", layers={"0": "bf16"}))
    assert [type(layer) for layer in layers] == [nn.Linear, nn.Linear]


def test_layers_that_no_cast_takes_are_reported():
    assert str(convert(nn.ReLU())) == "no nn.Linear in this model: nothing was converted"
    layers = model()
    layers[1].double()
    report = convert(layers, "mxfp8")
    assert report.converted == ("0",)
    assert report.decisions[1].reason == "stays as it is: its weight is torch.float64, not fp32, bf16 or fp16"


def test_probe_reports_what_it_could_not_measure_and_gives_gradients_back():
    layers = nn.ModuleDict({"ran": nn.Linear(128, 128), "idle": nn.Linear(128, 128)})
    layers["ran"].weight.grad = kept = torch.ones(128, 128)

    def step(_: nn.Module, batch: Tensor) -> Tensor:
        return layers["ran"](batch).square().mean()

    report = probe(layers, [X], step, candidates=("mxfp8",))
    assert report.recipe.layers == {"ran": "mxfp8", "idle": "bf16"}
    assert report.layers[1].reason == "the last batch did not run it forward and backward"
    assert layers["ran"].weight.grad is kept
    report = probe(layers, [torch.full_like(X, float("nan"))], step, candidates=("mxfp8",))
    assert report.layers[0].reason == "its input or output gradient is not finite"
    with pytest.raises(ValueError, match="no linear layer ran"):
        probe(layers, [X[:0]], lambda m, b: step(m, b).nan_to_num(), candidates=("mxfp8",))
    with pytest.raises(ValueError, match="its loss is"):
        probe(layers, [X], lambda *_: None)  # pyright: ignore[reportArgumentType]
    assert layers["ran"].weight.grad is kept
    row = probe(layers, [X[0]], step, candidates=("mxfp8",)).layers[0]
    assert row.shape == (1, 128, 128)


def test_probe_keeps_its_floor_to_the_decibel():
    """MXFP8 on smooth data has 28 dB or a little more: a floor above leaves bf16, one below does not."""
    layers = nn.Sequential(nn.Linear(128, 128))
    batch = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    worst = probe(layers, [batch], candidates=("mxfp8",)).layers[0].candidates[0].worst_db
    for floor, decision in ((worst - 0.1, "mxfp8"), (worst + 0.1, "bf16")):
        assert probe(layers, [batch], candidates=("mxfp8",), min_sqnr_db=floor).layers[0].decision == decision


def test_probe_keeps_to_the_share_of_inexact_codes():
    """A share, where the report has per cent."""
    layers, batch = nn.Sequential(nn.Linear(128, 128)), torch.randn(64, 128)
    batch[:, :32] *= 2.0**12
    kind = "mxfp8_regroup128"
    share = probe(layers, [batch], candidates=(kind,)).layers[0].candidates[0].inexact_pct / 100
    assert 0.1 < share < 0.9
    for limit, decision in ((1.01 * share, kind), (0.99 * share, "bf16")):
        chosen = (recipe(kind, max_inexact=limit),)
        assert probe(layers, [batch], candidates=chosen, min_sqnr_db=0).layers[0].decision == decision


def test_probe_looks_at_each_operand_along_its_contraction():
    """Rows of gradients that are far smaller than others vanish in blocks along the rows' dim, not in their own."""
    x, weight = torch.randn(64, 32), torch.randn(32, 32)
    dy = torch.ones(64, 32)
    dy[::2] = 2.0**-20
    forward, dgrad, wgrad = measure_layer(x, weight, dy, recipe("mxfp8")).products
    assert (dgrad.underflow_pct, wgrad.underflow_pct) == (0.0, 50.0)
    assert forward.product == "forward"


def test_probe_counts_losses_in_the_blocks_of_each_product_and_none_in_bf16():
    """Beside a large value a row vanishes: the 31 others of its block of 32, or the 127 of its block of 128."""
    x, weight, dy = torch.randn(32, 128), torch.randn(128, 128), torch.full((32, 128), 2.0**-20)
    dy[:, 0] = 1.0
    wide, narrow, plain = GemmRecipe("fp8_block128"), GemmRecipe("mxfp8"), GemmRecipe("bf16")
    for dgrad, underflow in ((narrow, 100 * 31 / 128), (wide, 100 * 127 / 128), (plain, 0.0)):
        chosen = Recipe("mixed", narrow, dgrad, plain)
        _, found, last = measure_layer(x, weight, dy, chosen).products
        assert found.underflow_pct == pytest.approx(underflow)
        assert (last.saturation_pct, last.underflow_pct) == (0.0, 0.0)


def test_a_layers_preset_brings_what_it_keeps_and_its_squares():
    own = recipe("mxfp8", seed=3, layers={"a": "fp8_square128"}).for_layer("a")
    assert own == recipe("fp8_square128", seed=3)


def test_recipes_name_the_backends_that_there_are():
    assert {"auto", *REGISTRY} == set(BACKENDS)
