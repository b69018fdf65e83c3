"""A TOML writer for whatever `tomllib` reads (the standard library only reads)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import date, time
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dump_toml(content: Mapping[str, Any]) -> str:
    """Text that `tomllib.loads` turns back into `content`.

    Example:
        >>> print(dump_toml({"a": 1, "b": {"c.d": 0.5}}), end="")
        a = 1
        <BLANKLINE>
        [b]
        "c.d" = 0.5
    """
    lines: list[str] = []
    _dump(content, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _dump(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    nested = {k: v for k, v in table.items() if isinstance(v, Mapping)}
    if path and (plain or not nested):
        lines.extend(["", f"[{'.'.join(_key(p) for p in path)}]"])
    lines.extend(f"{_key(k)} = {_value(v)}" for k, v in plain.items())
    for key, value in nested.items():
        _dump(value, (*path, key), lines)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's; DEL is the one control character that JSON leaves alone.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if math.isnan(value):
            return "nan"
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(v) for v in value)}]"
    if isinstance(value, Mapping):  # in a list, where a table has no heading of its own
        return f"{{{', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items())}}}"
    if isinstance(value, date | time):
        return value.isoformat()
    raise ValueError(f"value: got {type(value).__name__}, expected str, bool, int, float, date, time, list or table")
