"""What callers get wrong, said the same way everywhere: the argument, what it was, what it must be, what to do."""

from __future__ import annotations

import operator
from enum import StrEnum
from numbers import Real
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


def as_integer(value: object) -> int | None:
    """What is used as an integer anywhere in Python, as a plain one: numpy's, a tensor of one integer. None for the
    rest, truth values among them.

    >>> as_integer(torch.tensor(3)), as_integer(3.0), as_integer(True)
    (3, None, None)
    """
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    if isinstance(value, Tensor) and (value.dtype is torch.bool or value.dim()):
        return None
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def check_dim(x: Tensor, dim: object) -> int:
    """`dim` of x counted from the front; raises ValueError for what is none."""
    index = as_integer(dim)
    if index is None or not -x.dim() <= index < x.dim():
        raise ValueError(f"dim: got {dim!r} for x of shape {tuple(x.shape)}, expected a dim in [{-x.dim()}, {x.dim()})")
    return index % x.dim()


def set_integer(owner: object, field: str, value: int) -> None:
    """Make the field of a frozen dataclass a plain integer, where it is another."""
    if type(getattr(owner, field)) is not int:
        object.__setattr__(owner, field, value)


def check_integer(name: str, value: object, end: int, fix: str = "") -> int:
    """`value` as a plain integer; raises ValueError for what is none in [0, end), a power of two."""
    integer = as_integer(value)
    if integer is None or not 0 <= integer < end:
        raise ValueError(
            f"{name}: got {value!r}, expected an integer in [0, 2^{end.bit_length() - 1})" + (f"; {fix}" if fix else "")
        )
    return integer


def check_step(step: object) -> int:
    """`step` as a plain integer; raises ValueError for what is no training step."""
    return check_integer("step", step, 2**32, "use the step modulo 2^32")


def check_number(name: str, value: object) -> None:
    """Raise ValueError for what is no real number; truth values are none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name}: got {value!r}, expected a number")


def check_module(model: object) -> None:
    """Raise ValueError for what is no module."""
    if isinstance(model, type) or not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ValueError(f"model: got {got}, expected an nn.Module instance, e.g. nn.ModuleList for several")


def check_instance(name: str, value: object, expected: type, example: str) -> None:
    """Raise ValueError for what is no instance of a class of this library; None passes, as absence of an option."""
    if value is not None and not isinstance(value, expected):
        raise ValueError(f"{name}: got {value!r}, expected a {expected.__name__}, e.g. {example}")
