"""The cluster file: one TOML file with the measured rates of a cluster.

The schema is specified once, in the README of gemworks-parallel ("The cluster file"); this module checks and writes
that schema and shares no code with it. The checked content stays a plain nested dict, so that a program that rewrites
the file keeps every figure that it did not measure.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemworks.netmem.checks import check_kind

SCHEMA = "gemworks.cluster/1"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")

# name -> (kind, lower limit, required)
_SHAPE = {
    "gpus_per_domain": (int, 1, True),
    "domains_per_zone": (int, 1, True),
    "num_zones": (int, 1, True),
    "oversubscription": (float, 1.0, True),
}
_GPU = {
    "name": (str, None, True),
    "hbm_bytes": (int, 1, True),
    "hbm_bytes_per_s": (float, 0.0, True),
    "num_sms": (int, 1, True),
    "peak_flops_per_s": (dict, None, True),
}
_PEAK = {"bf16": (float, 0.0, True)} | dict.fromkeys(("fp8", "fp16", "tf32", "fp32", "fp64"), (float, 0.0, False))
_LINK = {
    "up_bytes_per_s": (float, 0.0, True),
    "down_bytes_per_s": (float, 0.0, True),
    "duplex_bytes_per_s": (float, 0.0, True),
    "latency_us": (float, None, True),
    "copy_engines_up": (int, 0, True),
    "copy_engines_down": (int, 0, True),
}
_TIER = {"bytes_per_s": (float, 0.0, True), "latency_us": (float, None, True)}
_TOP = {
    "schema": (str, None, True),
    "name": (str, None, True),
    "shape": (dict, None, True),
    "gpu": (dict, None, True),
    "links": (dict, None, True),
    "tiers": (dict, None, True),
    "sources": (dict, None, True),
    "extra": (dict, None, False),
}


def _check_table(where: str, table: Any, spec: Mapping[str, tuple[type, Any, bool]]) -> None:
    if not isinstance(table, dict):
        raise ValueError(f"{where}: expected a table, got {table!r}; write it as [{where}]")
    for key in table:
        if key not in spec:
            raise ValueError(
                f"{where}: unknown key {key!r}, expected some of {sorted(spec)}; put other things in [extra]"
            )
    for key, (kind, least, required) in spec.items():
        path = f"{where}.{key}".removeprefix("top.")
        if key not in table:
            if required:
                raise ValueError(f"{path} is missing; the schema {SCHEMA} requires it")
            continue
        value = table[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = table[key] = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{path}: expected {kind.__name__}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path}: expected a finite number, got {value!r}")
        if isinstance(value, float) and kind is float and least == 0.0 and value <= 0.0:
            raise ValueError(f"{path}: expected a rate above 0, got {value!r}; leave an absent link out")
        if isinstance(value, int | float) and least is not None and value < least:
            raise ValueError(f"{path}: expected at least {least}, got {value!r}")
        if key == "latency_us" and value < 0:
            raise ValueError(f"{path}: expected at least 0, got {value!r}")


def check(data: dict[str, Any]) -> dict[str, Any]:
    """Check a parsed cluster file against the schema and return it.

    Args:
        data: what `tomllib.load` gave; integers where the schema wants floats become floats in place.

    Raises:
        ValueError: names the key, what was expected and what was there.
    """
    _check_table("top", data, _TOP)
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema: expected {SCHEMA!r}, got {data['schema']!r}; convert the file first")
    _check_table("shape", data["shape"], _SHAPE)
    _check_table("gpu", data["gpu"], _GPU)
    _check_table("gpu.peak_flops_per_s", data["gpu"]["peak_flops_per_s"], _PEAK)
    _check_table("links", data["links"], {n: (dict, None, n == "host") for n in ("host", "nvlink", "nic")})
    for name, link in data["links"].items():
        _check_table(f"links.{name}", link, _LINK)
        total = link["up_bytes_per_s"] + link["down_bytes_per_s"]
        if link["duplex_bytes_per_s"] > total * (1 + 1e-9):
            raise ValueError(
                f"links.{name}.duplex_bytes_per_s: expected at most up + down = {total}, got "
                f"{link['duplex_bytes_per_s']}"
            )
    shape = data["shape"]
    needed = {"nvlink": False, "zone": shape["domains_per_zone"] > 1, "cross_zone": shape["num_zones"] > 1}
    _check_table("tiers", data["tiers"], {n: (dict, None, required) for n, required in needed.items()})
    for name, tier in data["tiers"].items():
        _check_table(f"tiers.{name}", tier, dict.fromkeys(COLLECTIVES, (dict, None, True)))
        for collective, figures in tier.items():
            _check_table(f"tiers.{name}.{collective}", figures, _TIER)
    for path, sentence in data["sources"].items():
        if not isinstance(sentence, str):
            raise ValueError(f"sources.{path!r}: expected a sentence, got {sentence!r}")
    if "" not in data["sources"]:
        for path in _figures(data):
            if source_of(data, path) is None:
                raise ValueError(f'sources: {path} has no source; add one for it, or "" for everything left')
    return data


def _figures(data: Mapping[str, Any], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for key, value in data.items():
        if not prefix and key not in ("gpu", "links", "tiers"):
            continue
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            paths += _figures(value, path)
        elif not isinstance(value, str):
            paths.append(path)
    return paths


def source_of(data: Mapping[str, Any], path: str) -> str | None:
    """The sentence that says where the figure at a dotted path comes from, or None.

    >>> source_of({"sources": {"": "guess", "links.host": "measured"}}, "links.host.latency_us")
    'measured'
    """
    parts = path.split(".")
    for end in range(len(parts), -1, -1):
        sentence = data["sources"].get(".".join(parts[:end]))
        if sentence is not None:
            return sentence
    return None


def read(path: str | Path) -> dict[str, Any]:
    """Read and check a cluster file."""
    check_kind("path", path, (str, Path))
    with open(path, "rb") as file:
        try:
            raw = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(
                f"cluster file {str(path)!r}: not TOML: {error}; BandwidthLedger.to_toml writes one"
            ) from None
    return check(raw)


def _key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else _string(key)


def _string(text: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
    return '"' + "".join(escapes.get(c, c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}") for c in text) + '"'


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, float):
        text = repr(value)
        return text if any(c in text for c in ".en") else text + ".0"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return repr(value)


def _write_table(lines: list[str], path: tuple[str, ...], table: Mapping[str, Any]) -> None:
    plain = {k: v for k, v in table.items() if not isinstance(v, dict)}
    if path and (plain or not table):
        lines += ["", f"[{'.'.join(_key(p) for p in path)}]"]
    lines += [f"{_key(k)} = {_value(v)}" for k, v in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            _write_table(lines, (*path, key), value)


def dumps(data: dict[str, Any]) -> str:
    """The TOML text of a cluster file, checked first.

    `tomllib.loads(dumps(data)) == data` for every valid `data`.
    """
    lines: list[str] = []
    _write_table(lines, (), check(data))
    return "\n".join(lines) + "\n"


def write(data: dict[str, Any], path: str | Path) -> None:
    """Check and write a cluster file."""
    Path(path).write_text(dumps(data), encoding="utf-8")
