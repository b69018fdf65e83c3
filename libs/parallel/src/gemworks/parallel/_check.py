"""The caller's mistakes, named: argument, got, expected."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


def whole(name: str, value: Any, least: int = 1, unit: str = "") -> None:
    """An int, also NumPy's, not a bool, of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name}: got {value!r}, expected an int >= {least}{unit and f' ({unit})'}")


def number(name: str, value: Any, *, least: float | None = None, above: float | None = None) -> None:
    """A finite number, also NumPy's; bounds as given."""
    good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if good and (least is None or float(value) >= least) and (above is None or float(value) > above):
        return
    bound = f" > {above:g}" if above is not None else "" if least is None else f" >= {least:g}"
    raise ValueError(f"{name}: got {value!r}, expected a finite number{bound}")


def one_of(name: str, value: Any, choices: Iterable[Any]) -> None:
    """One of a few words."""
    known = tuple(choices)
    if value not in known:
        raise ValueError(f"{name}: got {value!r}, expected one of {known}")


def kind(name: str, value: Any, cls: type, fix: str = "") -> None:
    """An instance of a class."""
    if not isinstance(value, cls):
        raise ValueError(f"{name}: got {type(value).__name__}, expected {cls.__name__}{fix and f'; {fix}'}")
