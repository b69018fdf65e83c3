"""What callers pass, checked where it comes in: a `ValueError` names the argument, what was expected, what came."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], fix: str = "") -> None:
    """Raise unless `value` is an instance.

    >>> check_kind("profile", None, dict, "profile() makes one")
    Traceback (most recent call last):
        ...
    ValueError: profile: expected a dict, got None; profile() makes one
    """
    if isinstance(value, kind):
        return
    kinds = kind if isinstance(kind, tuple) else (kind,)
    text = repr(value)
    raise ValueError(
        f"{name}: expected a {' or '.join(k.__name__ for k in kinds)}, got {text if len(text) <= 60 else type(value)}"
        + (f"; {fix}" if fix else "")
    )


def check_all(name: str, values: Any, kind: type[T], fix: str = "") -> list[T]:
    """The values as a list; raise unless they are iterable, no string, and all of them instances."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name}: expected several {kind.__name__}, got {values!r}" + (f"; {fix}" if fix else ""))
    found = list(values)
    for value in found:
        check_kind(f"each of {name}", value, kind, fix)
    return found


def check_number(
    name: str,
    value: Any,
    least: float = 0.0,
    *,
    above: bool = False,
    finite: bool = True,
    whole: bool = False,
    fix: str = "",
) -> None:
    """Raise unless `value` is a number of at least `least` (or above it) and no NaN.

    >>> check_number("issue_s", float("nan"))
    Traceback (most recent call last):
        ...
    ValueError: issue_s: expected a number of at least 0, got nan
    """
    kinds = (numbers.Integral,) if whole else (numbers.Real,)
    # the first test is for the engine's hooks: an abstract class takes a microsecond to say yes
    is_number = type(value) is int or (issubclass(type(value), kinds) and not isinstance(value, bool))
    if is_number and (value > least if above else value >= least) and (not finite or math.isfinite(value)):
        return
    kind = "a whole number" if whole else "a number" if not finite or value != math.inf else "a finite number"
    bound = "" if least == -math.inf else f" {'above' if above else 'of at least'} {least:g}"
    raise ValueError(f"{name}: expected {kind}{bound}, got {value!r}" + (f"; {fix}" if fix else ""))


def checked_device(device: Any) -> torch.device:
    """The device to work on; None: the current CUDA device if there is one, else the CPU.

    Raises:
        ValueError: neither a CUDA device that is there nor the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'cpu', 'cuda', 'cuda:1' or the like, got {device!r}")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device: got {device!r}, and CUDA is not available here; expected 'cpu'")
        if found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
    return found
