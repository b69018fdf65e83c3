"""`PrecisionMonitor`: the probe's figures during training, at intervals, and demotion of layers that drift."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemworks.precision.checks import as_integer, check_module, check_number
from gemworks.precision.convert import MXLinear, fall_back_where_inexact
from gemworks.precision.probe import measure_layer
from torch import Tensor, nn


@dataclass
class PrecisionMonitor:
    """Watches a converted model. Between measurements it costs nothing; at one it reads the device.

    Call `before_step(step)` ahead of the forward and `after_step(step)` after the backward. Every `interval` steps it
    captures each converted layer's input and output gradient, logs SQNR, saturation, underflow and inexact codes, makes
    regrouped layers with too many inexact codes exact, and demotes to bf16 any layer whose worst product is below
    `min_sqnr_db` for `patience` measurements in a row.

    Attributes:
        model: converted.
        interval: steps between measurements.
        min_sqnr_db: floor of the worst product.
        patience: measurements below the floor before a layer is demoted.
        max_rows: rows measured.

    Raises:
        ValueError: no module, a count that is no integer >= 1, or a floor that is no number.
    """

    model: nn.Module
    interval: int = 500
    min_sqnr_db: float = 20.0
    patience: int = 2
    max_rows: int = 1024
    _below: dict[str, int] = field(default_factory=dict)
    _seen: dict[str, list[Tensor]] = field(default_factory=dict)
    _handles: list = field(default_factory=list)

    def __post_init__(self) -> None:
        check_module(self.model)
        for name in ("interval", "patience", "max_rows"):
            integer = as_integer(getattr(self, name))
            if integer is None or integer < 1:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected an integer >= 1")
        check_number("min_sqnr_db", self.min_sqnr_db)

    def before_step(self, step: int) -> None:
        """Install capture hooks if this step is measured."""
        if step % self.interval or self._handles:
            return
        for name, module in self.model.named_modules():
            if isinstance(module, MXLinear) and not module._active.is_bf16:
                self._handles.append(module.register_forward_hook(self._capture(name)))

    def _capture(self, name: str):
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = inputs[0].detach().flatten(0, -2)[: self.max_rows]
            if output.requires_grad:
                output.register_hook(
                    lambda grad: self._seen.__setitem__(name, [x, grad.detach().flatten(0, -2)[: self.max_rows]])
                )

        return hook

    def after_step(self, step: int) -> dict[str, float]:
        """Measure what was captured; returns metrics by name, `precision/<layer>/<metric>(unit)`, empty in between."""
        if not self._handles:
            return {}
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        metrics: dict[str, float] = {}
        fall_back_where_inexact(self.model)
        modules = dict(self.model.named_modules())
        for name, (x, dy) in self._seen.items():
            layer = modules[name]
            assert isinstance(layer, MXLinear)
            found = measure_layer(x, layer.weight.detach(), dy, layer._active)
            for product in found.products:
                prefix = f"precision/{name}/{product.product}"
                metrics[f"{prefix}/sqnr(dB)"] = product.sqnr_db
                metrics[f"{prefix}/saturation(%)"] = product.saturation_pct
                metrics[f"{prefix}/underflow(%)"] = product.underflow_pct
            metrics[f"precision/{name}/inexact(%)"] = found.inexact_pct
            below = self._below.get(name, 0) + 1 if found.worst_db < self.min_sqnr_db else 0
            self._below[name] = below
            if below >= self.patience:
                worst = f"worst product {found.worst_db:.1f} dB under {self.min_sqnr_db} at step {step}"
                layer.demote("bf16", f"{worst}, {below} measurements in a row")
                metrics[f"precision/{name}/demoted"] = 1.0
        self._seen.clear()
        return metrics
