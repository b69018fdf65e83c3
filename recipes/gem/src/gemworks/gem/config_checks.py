"""What the sections of a configuration check of their values; every failure is a ConfigError.

Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from gemworks.gem.typed_config import ConfigError


def check(condition: bool, key: str, got: object, expected: str) -> None:
    """Refuses `got` as the value of the dotted key unless the condition holds.

    >>> check(False, "data.max_length", 100, "a power of two such as 256")
    Traceback (most recent call last):
    gemworks.gem.typed_config.ConfigError: data.max_length: got 100, expected a power of two such as 256
    """
    if not condition:
        raise ConfigError(f"{key}: got {got!r}, expected {expected}")


def check_counts(section: str, config: Any, names: str, *, least: int = 1, optional: bool = False) -> None:
    """Refuses each of the named integer fields (separated by spaces) that is below `least`, 0 or 1; `optional` lets
    None pass."""
    expected = {0: "an integer, 0 or more", 1: "a positive integer"}[least] + (" or 'none'" if optional else "")
    for name in names.split():
        value = getattr(config, name)
        check(optional if value is None else value >= least, f"{section}.{name}", value, expected)


def check_finite(section: str, config: Any) -> None:
    """Refuses infinity and NaN in every float of a dataclass, in tuples of them too."""
    for item in fields(config):
        value = getattr(config, item.name)
        numbers = value if isinstance(value, tuple) else (value,)
        finite = all(math.isfinite(number) for number in numbers if isinstance(number, float))
        check(finite, f"{section}.{item.name}", value, "a finite number")


def check_heads(section: str, dim: int, num_heads: int) -> None:
    """Refuses a width that is not a number of heads times a head width that attention has kernels for."""
    check(num_heads > 0, f"{section}.num_heads", num_heads, "a positive number of heads")
    check(
        dim > 0 and dim % num_heads == 0,
        f"{section}.dim",
        dim,
        f"heads * head width: a multiple of {section}.num_heads = {num_heads}",
    )
    head_dim = dim // num_heads
    check(
        is_power_of_two(head_dim) and 8 <= head_dim <= 256,
        f"{section}.dim",
        dim,
        f"a head width of 8 to 256; set {section}.dim to {section}.num_heads times a power of two",
    )


def is_power_of_two(value: int) -> bool:
    """1, 2, 4, ...; not 0 or less."""
    return value > 0 and value & (value - 1) == 0
