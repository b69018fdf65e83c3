"""The declared schema of a parquet data set: `schema.toml` beside the files, and the columns that it implies.

    tasks = ["click"]
    dense = ["price"]

    [[ids]]
    name = "user"
    num_ids = 1000
    table = "user"          # left out: the feature's name

    [[events]]
    name = "view"
    floats = ["dwell"]
    ids = [{ name = "item", num_ids = 500 }]

    [columns]               # only where a column of the file has another name
    "view/item" = "viewed_items"

Columns: `timestamp` (integer seconds), each task (0 or 1), each dense name (number), each id name (integer or list of
integers), and per event type the equally long lists `<event>/timestamp`, `<event>/<id>`, `<event>/<float>`. A column
`sample_id` (integer) is optional; without it samples are numbered.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemworks.gem.schema import EventType, IdFeature, Schema

SCHEMA_FILE = "schema.toml"


@dataclass(frozen=True)
class ParquetSchema:
    """A `Schema` and the names of its columns in the files.

    Attributes:
        schema: what batches hold.
        columns: logical name to the file's name, where they differ.
    """

    schema: Schema
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.logical_names()
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"schema: column {twice[0]!r} is declared twice; give each column its own name")
        unknown = sorted(set(self.columns) - set(self.logical_names()))
        if unknown:
            raise ValueError(
                f"columns: {unknown[0]!r} is no column of this schema; expected some of {self.logical_names()}"
            )

    def column(self, logical: str) -> str:
        """The file's name of a logical column."""
        return self.columns.get(logical, logical)

    def logical_names(self) -> list[str]:
        """All columns in order; `sample_id` last."""
        names = ["timestamp", *self.schema.tasks, *self.schema.dense_names, *(f.name for f in self.schema.ids)]
        for event in self.schema.events:
            names += [
                f"{event.name}/{part}" for part in ("timestamp", *(f.name for f in event.ids), *event.float_names)
            ]
        return [*names, "sample_id"]

    def to_toml(self) -> str:
        """Text that `read_schema` turns into an equal object."""
        text = json.dumps  # a JSON string is a TOML basic string
        lines = [f"tasks = {text(list(self.schema.tasks))}", f"dense = {text(list(self.schema.dense_names))}"]
        for feature in self.schema.ids:
            lines += ["", "[[ids]]", *_feature_lines(feature)]
        for event in self.schema.events:
            ids = ", ".join("{ " + ", ".join(_feature_lines(f)) + " }" for f in event.ids)
            lines += ["", "[[events]]", f"name = {text(event.name)}"]
            lines += [f"floats = {text(list(event.float_names))}", f"ids = [{ids}]"]
        if self.columns:
            lines += ["", "[columns]", *(f"{text(key)} = {text(value)}" for key, value in self.columns.items())]
        return "\n".join(lines) + "\n"


def read_schema(path: str | Path) -> ParquetSchema:
    """Parse a schema file.

    Raises:
        ValueError: no such file, no TOML, an unknown or missing key; names file and key.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is missing; declare the columns there (see gemworks.gem.data.parquet_schema)")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error
    _check_keys(raw, {"tasks"}, {"dense", "ids", "events", "columns"}, f"{path}")
    events = []
    for number, event in enumerate(_tables(raw, "events", f"{path}")):
        where = f"{path}, events[{number}]"
        _check_keys(event, {"name"}, {"ids", "floats"}, where)
        ids = tuple(_feature(f, f"{where}.ids[{i}]") for i, f in enumerate(_tables(event, "ids", where)))
        events.append(EventType(name=event["name"], ids=ids, float_names=_names(event, "floats", where)))
    return ParquetSchema(
        Schema(
            ids=tuple(_feature(f, f"{path}, ids[{i}]") for i, f in enumerate(_tables(raw, "ids", f"{path}"))),
            dense_names=_names(raw, "dense", f"{path}"),
            events=tuple(events),
            tasks=_names(raw, "tasks", f"{path}"),
        ),
        raw.get("columns", {}),
    )


def _names(raw: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """A list of names; a lone string would be taken apart into its letters."""
    found = raw.get(key, [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{where}: {key} is {found!r}, expected a list of names such as ['a', 'b']")
    return tuple(found)


def _tables(raw: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    found = raw.get(key, [])
    if not isinstance(found, list) or not all(isinstance(entry, Mapping) for entry in found):
        raise ValueError(f"{where}: {key} is {found!r}, expected tables, each under [[{key}]] or in braces")
    return found


def _feature(raw: Mapping[str, Any], where: str) -> IdFeature:
    _check_keys(raw, {"name", "num_ids"}, {"table"}, where)
    if not isinstance(raw["num_ids"], int) or raw["num_ids"] < 1:
        raise ValueError(f"{where}: num_ids is {raw['num_ids']!r}, expected a positive integer")
    return IdFeature(name=raw["name"], num_ids=raw["num_ids"], table=raw.get("table", raw["name"]))


def _feature_lines(feature: IdFeature) -> list[str]:
    return [
        f"name = {json.dumps(feature.name)}",
        f"num_ids = {feature.num_ids}",
        f"table = {json.dumps(feature.table)}",
    ]


def _check_keys(raw: Mapping[str, Any], required: set[str], optional: set[str], where: str) -> None:
    unknown, missing = sorted(set(raw) - required - optional), sorted(required - set(raw))
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}, expected some of {sorted(required | optional)}")
    if missing:
        raise ValueError(f"{where}: key {missing[0]!r} is missing; add it")
