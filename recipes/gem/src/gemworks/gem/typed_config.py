"""Typed dataclasses from nested mappings, TOML and `a.b=c` assignments, and back: knows types, nothing about GEM.

Every mistake names the key, what was given and what is expected. None has no TOML spelling, so an optional field reads
and prints it as the string "none".
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

C = TypeVar("C")


class ConfigError(ValueError):
    """The user's configuration is wrong; the message names the key and the fix."""


def describe_type(kind: Any) -> str:
    """How an expected type reads in a message.

    >>> describe_type(int | None), describe_type(Literal["a", "b"]), describe_type(tuple[float, ...])
    ("an integer or 'none'", "one of 'a', 'b'", 'a list of numbers')
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(arm) for arm in get_args(kind))
    if origin is Literal:
        return "one of " + ", ".join(repr(value) for value in get_args(kind))
    if origin is tuple:
        item = {int: "integers", float: "numbers", str: "strings"}.get(get_args(kind)[0], "values")
        fixed = "" if get_args(kind)[-1] is Ellipsis else f"{len(get_args(kind))} "
        return f"a list of {fixed}{item}"
    if dataclasses.is_dataclass(kind) or origin is not None:
        return "a table"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "'none'"}
    return names.get(kind, str(kind))


def unknown_key(path: str, known: Iterable[str], everywhere: Iterable[str] = ()) -> ConfigError:
    """The error for a key that does not exist, with the nearest one that does.

    Args:
        path: the full dotted key.
        known: full dotted keys that exist beside it.
        everywhere: all keys of the configuration; searched when nothing beside it is near.
    """
    known = list(known)
    last = path.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    near = near or [key for key in everywhere if key.rsplit(".", 1)[-1] == last][:1]
    near = near or difflib.get_close_matches(path, list(everywhere), n=1, cutoff=0.75)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return ConfigError(f"unknown key {path!r}; {hint}")


def leaf_keys(value: Any, path: str = "") -> list[str]:
    """The dotted keys of every leaf of a nested mapping.

    >>> leaf_keys({"a": 1, "b": {"c": 2}})
    ['a', 'b.c']
    """
    if not isinstance(value, Mapping):
        return [path]
    return [leaf for key, item in value.items() for leaf in leaf_keys(item, f"{path}.{key}" if path else str(key))]


def convert(kind: Any, value: Any, path: str, everywhere: Iterable[str] = ()) -> Any:
    """`value` as an instance of the annotated type `kind`, or a ConfigError naming `path`."""
    origin, args = get_origin(kind), get_args(kind)
    wrong = ConfigError(f"{path}: got {value!r}, expected {describe_type(kind)}")
    if origin in (Union, types.UnionType):
        if type(None) in args and (value is None or value == "none"):
            return None
        for arm in args:
            if arm is type(None):
                continue
            try:
                return convert(arm, value, path, everywhere)
            except ConfigError:
                if dataclasses.is_dataclass(arm):
                    raise
        raise wrong
    if origin is Literal:
        if value in args and isinstance(value, str):
            return value
        near = difflib.get_close_matches(str(value), [str(arg) for arg in args], n=1)
        raise ConfigError(f"{wrong}; did you mean {near[0]!r}?") if near else wrong
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise wrong
        return build(kind, value, path=path, everywhere=everywhere)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise wrong
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(kinds) != len(value):
            raise wrong
        return tuple(convert(k, item, f"{path}[{i}]") for i, (k, item) in enumerate(zip(kinds, value, strict=True)))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise wrong
        return {str(key): convert(args[1], item, f"{path}.{key}", everywhere) for key, item in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:  # exact: a bool is an int to isinstance
        raise wrong
    return value


def build(cls: type[C], values: Mapping[str, Any], *, path: str = "", everywhere: Iterable[str] = ()) -> C:
    """An instance of the dataclass `cls` from a nested mapping; missing fields take their defaults.

    Raises:
        ConfigError: an unknown key, a missing required key, or a value of another type.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Point:
    ...     x: int
    ...     y: float = 0.5
    >>> build(Point, {"x": 3})
    Point(x=3, y=0.5)
    >>> build(Point, {"xx": 3})
    Traceback (most recent call last):
    gemworks.gem.typed_config.ConfigError: unknown key 'xx'; known keys: x, y
    """
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]

    def full(name: str) -> str:
        return f"{path}.{name}" if path else name

    for name in values:
        if name not in fields:
            raise unknown_key(full(name), [full(known) for known in fields], everywhere)
    required = [
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and name not in values
    ]
    if required:
        raise ConfigError(f"missing key {full(required[0])!r}: expected {describe_type(hints[required[0]])}")
    return cls(**{name: convert(hints[name], value, full(name), everywhere) for name, value in values.items()})


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `overlay` on top; tables merge, everything else is replaced.

    >>> merge({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    out = dict(base)
    for key, value in overlay.items():
        below = out.get(key)
        out[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return out


def parse_assignment(text: str) -> tuple[list[str], Any]:
    """The keys and the value of one `a.b=c`; the value is read as TOML, and as a bare string when it is not TOML.

    >>> parse_assignment("model.dim=64"), parse_assignment("data.source=movielens")
    ((['model', 'dim'], 64), (['data', 'source'], 'movielens'))
    >>> parse_assignment("train.task_weights=[1.0, 0.5]")
    (['train', 'task_weights'], [1.0, 0.5])
    """
    key, equals, value = text.partition("=")
    keys = [part.strip() for part in key.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"cannot read the setting {text!r}; expected KEY=VALUE such as model.dim=128")
    value = value.strip()
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return keys, value
    return keys, parsed["value"] if list(parsed) == ["value"] else value


def assignments(texts: Iterable[str]) -> dict[str, Any]:
    """A nested mapping from many `a.b=c`; the last one wins.

    >>> assignments(["a.b=1", "a.c=x", "a.b=2"])
    {'a': {'b': 2, 'c': 'x'}}
    """
    out: dict[str, Any] = {}
    for text in texts:
        keys, value = parse_assignment(text)
        nested: Any = value
        for key in reversed(keys):
            nested = {key: nested}
        out = merge(out, nested)
    return out


def to_mapping(value: Any) -> Any:
    """Nested plain values of a dataclass: dicts, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_mapping(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_mapping(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_mapping(item) for item in value]
    return value


def to_toml(value: Any) -> str:
    """TOML text of a dataclass or nested mapping: scalars first, then one table per nested mapping.

    >>> print(to_toml({"a": 1, "b": {"c": "x", "d": None}}), end="")
    a = 1
    <BLANKLINE>
    [b]
    c = "x"
    d = "none"
    """
    lines: list[str] = []
    _write_table(to_mapping(value), [], lines)
    return "\n".join(lines) + "\n"


def _write_table(table: Mapping[str, Any], keys: list[str], lines: list[str]) -> None:
    scalars = {key: item for key, item in table.items() if not isinstance(item, Mapping)}
    tables = {key: item for key, item in table.items() if isinstance(item, Mapping)}
    if keys and (scalars or not tables):
        lines.extend([""] if lines else [])
        lines.append(f"[{'.'.join(_toml_key(key) for key in keys)}]")
    lines.extend(f"{_toml_key(key)} = {_toml_value(item)}" for key, item in scalars.items())
    for key, item in tables.items():
        _write_table(item, [*keys, key], lines)


def _toml_key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else _toml_value(key)


def _toml_value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)  # an int, or a float: Python's shortest exact form is valid TOML
