"""What callers get wrong, said the same way everywhere: the argument, what it was, what it must be, what to do."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NamedEnum(StrEnum):
    """An enumeration whose refusal of a name lists those that there are."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise ValueError(f"{cls.__name__}: got {value!r}, expected one of {', '.join(repr(m.value) for m in cls)}")


def check_tensor(name: str, value: object) -> None:
    """Raise ValueError for what is no tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a Tensor; torch.as_tensor makes one")


def check_floating(name: str, value: object) -> None:
    """Raise ValueError for what is no tensor of floating point."""
    check_tensor(name, value)
    assert isinstance(value, Tensor)
    if not value.is_floating_point():
        raise ValueError(
            f"{name}: got dtype {value.dtype}, expected floating point; cast it first, e.g. {name}.float()"
        )


def check_same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError for tensors on two devices."""
    if value.device != other.device:
        raise ValueError(
            f"{name}: on {value.device}, {other_name} is on {other.device}; move one of them, e.g. "
            f"{name}.to({other_name}.device)"
        )


def check_dim(x: Tensor, dim: object) -> int:
    """`dim` of x counted from the front; raises ValueError for what is none."""
    if not isinstance(dim, int) or isinstance(dim, bool) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: got {dim!r} for x of shape {tuple(x.shape)}, expected a dim in [{-x.dim()}, {x.dim()})")
    return dim % x.dim()


def check_integer(name: str, value: object, end: int, fix: str = "") -> None:
    """Raise ValueError for what is no integer in [0, end), a power of two."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < end:
        raise ValueError(
            f"{name}: got {value!r}, expected an integer in [0, 2^{end.bit_length() - 1})" + (f"; {fix}" if fix else "")
        )


def check_step(step: object) -> None:
    """Raise ValueError for what is no training step."""
    check_integer("step", step, 2**32, "use the step modulo 2^32")


def check_module(model: object) -> None:
    """Raise ValueError for what is no module."""
    if isinstance(model, type) or not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ValueError(f"model: got {got}, expected an nn.Module instance, e.g. nn.ModuleList for several")


def check_instance(name: str, value: object, expected: type, example: str) -> None:
    """Raise ValueError for what is no instance of a class of this library; None passes, as absence of an option."""
    if value is not None and not isinstance(value, expected):
        raise ValueError(f"{name}: got {value!r}, expected a {expected.__name__}, e.g. {example}")
