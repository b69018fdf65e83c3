"""Losses and gradients that are not finite, and losses that jump: how they are noticed, and how their origin is found.

Shapes: B samples of a batch, K tasks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from gemworks.gem.schema import Batch

MAX_IDS_IN_A_LINE = 8


class NonFiniteError(RuntimeError):
    """Too many steps had a loss or a gradient that is not finite; `report` says where, as plain values."""

    def __init__(self, message: str, report: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.report = report or {}


class SpikeWatch:
    """Notices a loss far above its running mean.

    The mean is exponential, over about `horizon` losses, and says nothing before it has seen that many. A spike does
    not enter the mean in full, or the next one would look normal.

    Args:
        factor: how many times the mean a loss must be.
        horizon: losses that the mean remembers.

    >>> watch = SpikeWatch(3.0, horizon=4)
    >>> [watch.see(loss) for loss in (1.0, 1.0, 1.0, 1.0, 2.0, 6.0)]
    [None, None, None, None, None, 4.8]
    """

    def __init__(self, factor: float, horizon: int = 50) -> None:
        self.factor = factor
        self.horizon = horizon
        self.mean = 0.0
        self.num_seen = 0

    def see(self, loss: float) -> float | None:
        """The loss over the running mean if that is a spike; takes the loss into the mean."""
        ratio = loss / self.mean if self.num_seen >= self.horizon and self.mean > 0 else 0.0
        is_spike = ratio > self.factor
        weight = 1.0 / min(self.num_seen + 1, self.horizon)
        self.mean += weight * (min(loss, self.factor * self.mean if is_spike else loss) - self.mean)
        self.num_seen += 1
        return ratio if is_spike else None

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "num_seen": self.num_seen}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.mean, self.num_seen = float(state["mean"]), int(state["num_seen"])


def first_non_finite(model: nn.Module, loss_of: Callable[[], Tensor]) -> str | None:
    """Runs forward and backward once with hooks everywhere and names the first place with a value that is not finite.

    Gradients of parameters are overwritten; the caller sees to it that no optimizer acts on them. Forward and backward
    run whatever is found: with a model on several ranks the others take part in them.

    Args:
        model: the model.
        loss_of: computes the loss with it.

    Returns:
        For instance "output of layers.1.gate", "gradient of the output of head", "gradient of head.weight",
        "parameter embeddings.rows.embeddings.item.weight"; None when everything was finite this time.
    """
    found: list[str] = []

    def look(place: str, values: Any) -> None:
        if not found and any(not bool(torch.isfinite(t).all()) for t in _float_tensors(values)):
            found.append(place)

    def watch_gradient(place: str, tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: look(place, gradient))

    def after_forward(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            del module, inputs
            look(f"output of {name}", output)
            for tensor in _float_tensors(output):
                watch_gradient(f"gradient of the output of {name}", tensor)

        return hook

    for name, parameter in model.named_parameters():
        value = parameter.detach()
        look(f"parameter {name}", value.to_local() if isinstance(value, DTensor) else value)
    handles: list[Any] = [m.register_forward_hook(after_forward(name or "the model")) for name, m in _modules(model)]
    for name, parameter in model.named_parameters():
        handles.append(parameter.register_hook(lambda g, name=name: look(f"gradient of {name}", g)))
    try:
        loss = loss_of()
        look("loss", loss)
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Containers are left out: nothing runs through them."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield name, module


def _float_tensors(value: Any) -> Iterator[Tensor]:
    """The floating tensors in whatever a module returns."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _float_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _float_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _float_tensors(getattr(value, field.name))
    else:
        values = getattr(value, "values", None)  # torchrec's JaggedTensor and KeyedTensor
        if callable(values):
            yield from _float_tensors(values())


def describe_ids(sample_ids: list[int]) -> str:
    """A few sample ids for a message.

    >>> describe_ids([3, 1, 2])
    '3, 1, 2'
    >>> describe_ids(list(range(100)))
    '0, 1, 2, 3, 4, 5, 6, 7 and 92 more'
    """
    shown = ", ".join(str(i) for i in sample_ids[:MAX_IDS_IN_A_LINE])
    rest = len(sample_ids) - MAX_IDS_IN_A_LINE
    return shown if rest <= 0 else f"{shown} and {rest} more"


def is_finite(*values: float) -> bool:
    return all(math.isfinite(v) for v in values)


def first_non_finite_input(batch: Batch, dense_names: tuple[str, ...]) -> str | None:
    """What of a batch is not finite, before any model has touched it."""
    bad_C = ~torch.isfinite(batch.dense_BC).all(0)
    if bool(bad_C.any()):
        return f"dense column {dense_names[int(bad_C.nonzero()[0])]!r} of the data"
    if not bool(torch.isfinite(batch.labels_BK).all()):
        return "labels of the data"
    for name, events in batch.events.items():
        if not bool(torch.isfinite(events.floats_TC).all()):
            return f"float columns of event type {name!r} of the data"
    return None
