"""`probe`: run real batches, measure every layer and product, decide, and write the decision as a recipe file.

For each linear layer the probe captures its input and the gradient of its output, computes the three products in
float64 from those (on a sample of rows) and compares each format with them; on a GPU it also times forward and backward
of the whole layer at its own shape. After LoKA (arXiv 2605.10886): choose per layer by measured error and speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gemworks.precision.backends import shape_rule
from gemworks.precision.casts import CastSpec
from gemworks.precision.checks import as_integer, check_module, check_number
from gemworks.precision.convert import linear_layers
from gemworks.precision.formats import element_spec
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.products import linear_backward, linear_forward
from gemworks.precision.quantization import quantize
from gemworks.precision.recipe import PRESETS, GemmKind, Recipe, recipe
from gemworks.precision.scales import inverse_scale
from gemworks.precision.tensor_scaling import TensorPlane, quantize_tensor
from torch import Tensor, nn

PRODUCTS = ("forward", "dgrad", "wgrad")


def sqnr_db(reference: Tensor, value: Tensor) -> float:
    """Signal to quantisation noise, `10 log10(sum ref^2 / sum (value - ref)^2)`, in dB; inf if equal, nan if not
    finite."""
    reference, value = reference.double(), value.double()
    noise = (value - reference).square().sum().item()
    signal = reference.square().sum().item()
    if not (noise == noise and noise != float("inf")):
        return float("nan")
    if noise == 0:
        return float("inf")
    return float("-inf") if signal == 0 else 10 * torch.log10(torch.tensor(signal / noise)).item()


def saturation_underflow(x: Tensor, plane: MXTensor | TensorPlane) -> tuple[float, float]:
    """Shares of elements beyond the format's range, and of non-zero elements that became zero."""
    if x.numel() == 0:
        return 0.0, 0.0
    if isinstance(plane, TensorPlane):  # its largest element is the format's
        return 0.0, ((plane.dequantize() == 0) & (x != 0)).float().mean().item()
    scaled = x.float().movedim(plane.dim or 0, -1)
    factor = inverse_scale(plane.scales).movedim(plane.dim or 0, -1).repeat_interleave(plane.block, -1)
    scaled = scaled * factor[..., : scaled.shape[-1]]
    saturated = (scaled.abs() > element_spec(plane.format).max_value).float().mean().item()
    values = plane.dequantize()
    return saturated, ((values == 0) & (x != 0)).float().mean().item()


@dataclass(frozen=True)
class ProductReport:
    """One product of one layer in one recipe's arithmetic: its error, and what its left operand loses in the cast (of
    squares, what rows would lose; 0 in bf16)."""

    product: str
    sqnr_db: float
    saturation_pct: float
    underflow_pct: float


@dataclass(frozen=True)
class Candidate:
    """A recipe tried on a layer: its products, the share of inexact codes (regrouping), and its time (None on a
    CPU)."""

    preset: str
    products: tuple[ProductReport, ...]
    inexact_pct: float
    step_ms: float | None

    @property
    def worst_db(self) -> float:
        """Lowest SQNR of the three products; nan counts as lowest."""
        values = [p.sqnr_db for p in self.products]
        return min(values) if all(v == v for v in values) else float("-inf")


@dataclass(frozen=True)
class LayerReport:
    """What the probe found for one layer and what it decided."""

    name: str
    shape: tuple[int, int, int]
    bf16_ms: float | None
    candidates: tuple[Candidate, ...]
    decision: str
    reason: str


@dataclass(frozen=True)
class ProbeReport:
    """All layers, and the recipe that follows."""

    layers: tuple[LayerReport, ...]
    recipe: Recipe

    def save_file(self, path: str | Path) -> None:
        """Write the recipe that `convert` reads."""
        self.recipe.save_file(path)

    def rows(self) -> list[dict[str, Any]]:
        """One flat row per layer, candidate and product: a table to write as CSV."""
        return [
            {
                "layer": layer.name,
                "shape": "x".join(map(str, layer.shape)),
                "format": candidate.preset,
                "product": product.product,
                "sqnr_db": round(product.sqnr_db, 2),
                "saturation_pct": product.saturation_pct,
                "underflow_pct": product.underflow_pct,
                "inexact_pct": candidate.inexact_pct,
                "ms": candidate.step_ms,
                "bf16_ms": layer.bf16_ms,
                "decision": layer.decision,
                "reason": layer.reason,
            }
            for layer in self.layers
            for candidate in layer.candidates
            for product in candidate.products
        ]

    def __str__(self) -> str:
        lines = []
        for layer in self.layers:
            lines.append(f"{layer.name}  M x K x N = {layer.shape}  -> {layer.decision}: {layer.reason}")
            for c in layer.candidates:
                parts = ", ".join(f"{p.product} {p.sqnr_db:.1f} dB" for p in c.products)
                time = "" if c.step_ms is None else f", {c.step_ms:.3f} ms (bf16 {layer.bf16_ms:.3f})"
                lines.append(f"    {c.preset:16} {parts}, inexact {c.inexact_pct:.3f} %{time}")
        return "\n".join(lines)


@contextlib.contextmanager
def _captured(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Collect (input, output gradient) of every linear layer while the block runs, of one call of it: the last whose
    backward ran."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = []
    for name, layer in linear_layers(model):

        def after(_module: nn.Module, inputs: tuple, output: Tensor, name: str = name) -> None:
            if output.requires_grad:
                # Each call keeps its own input: a layer may run twice, or again when a checkpoint recomputes it.
                x = _rows(inputs[0])
                output.register_hook(lambda grad: seen.__setitem__(name, (x, _rows(grad))))

        handles.append(layer.register_forward_hook(after))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1])


def measure_layer(x: Tensor, weight: Tensor, dy: Tensor, chosen: Recipe) -> Candidate:
    """SQNR, saturation and underflow of the three products of one layer, against float64 products of the same
    operands."""
    with torch.no_grad():
        y, kept, counts = linear_forward(x, weight, None, chosen, True, torch.float32)
        source = x if kept is None else kept
        dx, dw = linear_backward(dy, source, weight, chosen, 0, True, True, torch.float32, torch.float32)
        assert dx is not None
        assert dw is not None
        xd, wd, dyd = x.double(), weight.double(), dy.double()
        exact = {"forward": xd @ wd.t(), "dgrad": dyd @ wd, "wgrad": dyd.t() @ xd}
        got = {"forward": y, "dgrad": dx, "wgrad": dw}
        left = {"forward": (x, 1), "dgrad": (dy, 1), "wgrad": (dy, 0)}
        products = []
        for name in PRODUCTS:
            gemm = getattr(chosen, name)
            operand, dim = left[name]
            if gemm.kind is GemmKind.BF16:
                plane = None
            elif gemm.kind is GemmKind.FP8_TENSOR:
                plane = quantize_tensor(operand, dim, gemm.left, power_of_two=chosen.power_of_two_scales)
            else:
                plane = quantize(operand, dim, gemm.left, chosen.scale_mode, block=CastSpec(gemm.kind).block)
            saturated, underflow = (0.0, 0.0) if plane is None else saturation_underflow(operand, plane)
            products.append(ProductReport(name, sqnr_db(exact[name], got[name]), 100 * saturated, 100 * underflow))
        inexact = (
            (counts / torch.tensor([max(1, x.numel()), max(1, weight.numel())], device=counts.device)).max().item()
        )
    return Candidate(chosen.name, tuple(products), 100 * inexact, None)


def time_layer(x: Tensor, weight: Tensor, dy: Tensor, chosen: Recipe) -> float:
    """Median milliseconds of forward and backward of the layer on its CUDA device."""
    from gemworks.precision.linear import mx_linear
    from triton.testing import do_bench

    leaf, master = x.detach().requires_grad_(), weight.detach().requires_grad_()

    def step() -> None:
        leaf.grad = master.grad = None
        y = nn.functional.linear(leaf, master.to(x.dtype)) if chosen.is_bf16 else mx_linear(leaf, master, None, chosen)
        y.backward(dy)

    return float(do_bench(step, return_mode="median"))  # pyright: ignore[reportArgumentType]


# Without 'fp8_tensor': its error follows from the largest of all rows, of which `max_rows` may be a part.
CANDIDATES = ("mxfp8", "mxfp8_regroup128", "fp8_block128", "fp8_square128", "fp8_wgrad_bf16")


def probe(
    model: nn.Module,
    batches: Iterable[Any],
    step: Callable[[nn.Module, Any], Tensor] | None = None,
    *,
    candidates: tuple[str | Recipe, ...] = CANDIDATES,
    min_sqnr_db: float = 22.0,
    min_speedup: float = 1.0,
    max_rows: int = 4096,
) -> ProbeReport:
    """Measure each linear layer on real batches and choose a recipe per layer.

    The decision: of the candidates whose worst product reaches `min_sqnr_db` and whose inexact codes stay under the
    recipe's `max_inexact`, the fastest, if it beats bf16 by `min_speedup`; on a CPU, where speed says nothing, the
    first. Otherwise bf16, with the reason. Gradients of the model are left as they were.

    Args:
        model: not converted (or reverted); run as it is.
        batches: passed one by one to `step`; the last one is measured. Layers that it did not run forward and backward
            with at least one row stay bf16, with that reason.
        step: `(model, batch) -> loss`; default: `model(batch).float().square().mean()`.
        candidates: presets or recipes, in order of preference.
        min_sqnr_db: quality floor of every product.
        min_speedup: against bf16, measured.
        max_rows: rows of each layer used for the error (all are timed).

    Returns:
        The report; `report.recipe` names the preset of each layer, `report.save_file(path)` writes it.

    Raises:
        ValueError: no module, batches or candidates, a loss that is no scalar with a gradient, or a model without
            linear layers that ran.
    """
    check_module(model)
    _check_arguments(batches, step, candidates, min_sqnr_db, min_speedup, max_rows)
    kept = {name: p.grad for name, p in model.named_parameters()}
    count = 0
    try:
        with _captured(model) as seen:
            for batch in batches:
                seen.clear()
                for parameter in model.parameters():
                    parameter.grad = None
                loss = step(model, batch) if step is not None else model(batch).float().square().mean()
                if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    got = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                    raise ValueError(
                        f"step: its loss is {got}, expected a scalar tensor with a gradient; has the model parameters "
                        "that require one?"
                    )
                loss.backward()
                count += 1
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = kept[name]
    if count == 0:
        raise ValueError("batches: empty; pass at least one batch")
    layers, ran = [], 0
    for name, layer in linear_layers(model):
        if name not in seen or not seen[name][0].shape[0]:
            why = "the last batch did not run it forward and backward"
            layers.append(LayerReport(name, (0, layer.in_features, layer.out_features), None, (), "bf16", why))
            continue
        x, dy = seen[name]
        layers.append(_probe_layer(name, layer, x, dy, candidates, min_sqnr_db, min_speedup, max_rows))
        ran += 1
    if not ran:
        raise ValueError("model: no linear layer ran forward and backward; is the loss made of its outputs?")
    first = recipe(candidates[0])
    chosen = {report.name: report.decision for report in layers}
    return ProbeReport(tuple(layers), replace(first, name="probed", layers=chosen))


def _check_arguments(
    batches: object,
    step: object,
    candidates: tuple[str | Recipe, ...],
    min_sqnr_db: float,
    min_speedup: float,
    max_rows: int,
) -> None:
    try:
        # Datasets that know __getitem__ alone are no Iterable, but are iterated all the same.
        iterable = not isinstance(batches, Tensor) and iter(batches) is not None  # pyright: ignore[reportCallIssue, reportArgumentType]
    except TypeError:
        iterable = False
    if not iterable:
        raise ValueError(f"batches: got a {type(batches).__name__}, expected an iterable of batches, e.g. [batch]")
    if step is not None and not callable(step):
        raise ValueError(f"step: got {step!r}, expected a function of (model, batch) that returns the loss")
    if not isinstance(candidates, list | tuple) or not candidates:
        raise ValueError(f"candidates: got {candidates!r}, expected a tuple of recipes, e.g. ('mxfp8',)")
    unknown = sorted({name for name in (recipe(source).name for source in candidates) if name not in PRESETS})
    if unknown:
        raise ValueError(
            f"candidates: recipes are named {unknown}, expected names of presets, by which the recipe that probe "
            f"writes calls layers: {sorted(PRESETS)}"
        )
    for name, value in (("min_sqnr_db", min_sqnr_db), ("min_speedup", min_speedup)):
        check_number(name, value)
    rows = as_integer(max_rows)
    if rows is None or rows < 1:
        raise ValueError(f"max_rows: got {max_rows!r}, expected an integer >= 1")


def _probe_layer(
    name: str,
    layer: nn.Linear,
    x: Tensor,
    dy: Tensor,
    candidates: tuple[str | Recipe, ...],
    min_sqnr_db: float,
    min_speedup: float,
    max_rows: int,
) -> LayerReport:
    weight = layer.weight.detach()
    shape = (x.shape[0], x.shape[1], weight.shape[0])
    on_gpu = x.is_cuda
    if not (x.isfinite().all() and dy.isfinite().all()):
        return LayerReport(name, shape, None, (), "bf16", "its input or output gradient is not finite")
    bf16_ms = time_layer(x, weight, dy, recipe("bf16")) if on_gpu else None
    tried, passed, reasons = [], [], []
    for source in candidates:
        chosen = recipe(source)
        rule = shape_rule(layer.in_features, layer.out_features, chosen)
        if rule is not None:
            reasons.append(f"{chosen.name}: {rule}")
            continue
        found = measure_layer(x[:max_rows], weight, dy[:max_rows], chosen)
        if on_gpu:
            found = replace(found, step_ms=time_layer(x, weight, dy, chosen))
        tried.append(found)
        if found.worst_db < min_sqnr_db:
            reasons.append(f"{chosen.name}: worst product {found.worst_db:.1f} dB < {min_sqnr_db}")
        elif found.inexact_pct > 100 * chosen.max_inexact:
            reasons.append(f"{chosen.name}: {found.inexact_pct:.2f} % of codes inexact")
        elif bf16_ms is not None and found.step_ms is not None and bf16_ms / found.step_ms < min_speedup:
            reasons.append(f"{chosen.name}: {bf16_ms / found.step_ms:.2f}x of bf16 < {min_speedup}")
        else:
            passed.append(found)
    if not passed:
        return LayerReport(name, shape, bf16_ms, tuple(tried), "bf16", "; ".join(reasons) or "no candidate")
    best = min(passed, key=lambda c: c.step_ms) if on_gpu else passed[0]  # pyright: ignore[reportArgumentType]
    speed = "" if bf16_ms is None or best.step_ms is None else f", {bf16_ms / best.step_ms:.2f}x of bf16"
    return LayerReport(name, shape, bf16_ms, tuple(tried), best.preset, f"worst product {best.worst_db:.1f} dB{speed}")
