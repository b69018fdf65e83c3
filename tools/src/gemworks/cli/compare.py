"""Two CSV files of one benchmark, row by row: what became slower, what faster, beyond the spread of both."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemworks.cli.output import console, readable

# What names a measurement; the other columns hold its result, the machine, or who ran it.
KEY_COLUMNS = (
    *("op", "layer", "row", "shape", "head_dim", "direction", "format", "setting", "attention", "impl", "batch"),
    *("dtype", "law", "mean_len", "max_len", "seed", "gpu", "num_gpus"),
)
# Columns that name the row to a reader; the rest of the key says the same in all rows of most files.
NAME_COLUMNS = ("op", "layer", "row")  # one of them is in every file
SHOWN_COLUMNS = (*NAME_COLUMNS, "shape", "head_dim", "direction", "format", "setting", "attention", "impl", "law")
TIME_COLUMNS = ("ms", "ms_p20", "ms_p80")
Row = Mapping[str, str]


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a benchmark's CSV.

    Raises:
        ValueError: there is no such file, it is no benchmark's, its end is missing, or a time in it is no number.
    """
    readable(path, "a CSV that `gemworks bench` wrote")
    try:
        text = path.read_text(encoding="utf-8")
        reader = csv.DictReader(io.StringIO(text, newline=""))
        columns = reader.fieldnames or ()
        rows = list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{str(path)!r}: got no CSV ({error}), expected one that `gemworks bench` wrote") from error
    if "ms" not in columns or not set(NAME_COLUMNS) & set(columns):
        raise ValueError(
            f"{str(path)!r}: got the columns {', '.join(columns) or 'none'}, expected ms and "
            f"{', '.join(NAME_COLUMNS[:-1])} or {NAME_COLUMNS[-1]}, as `gemworks bench` writes them"
        )
    for number, row in enumerate(rows, 2):
        _check_row(f"{str(path)!r}, row {number}", row)
    if not text.endswith("\n"):
        raise ValueError(f"{str(path)!r}: the last row has no end, so the file was cut; copy it again")
    return rows


def _check_row(place: str, row: Mapping[str | None, str | None]) -> None:
    if None in row or None in row.values():
        raise ValueError(f"{place}: got more or fewer values than columns; the file was cut or edited, copy it again")
    for name in TIME_COLUMNS:
        text = row.get(name) or ""
        try:
            # a row may hold a difference of two times (`region_price`), which may be below zero
            wrong = bool(text) and not math.isfinite(float(text))
        except ValueError:
            wrong = True
        if wrong:
            raise ValueError(f"{place}: {name}: got {text!r}, expected milliseconds")


def compare(old: Sequence[Row], new: Sequence[Row]) -> list[dict[str, Any]]:
    """Match rows by what they measured; of several alike the last counts.

    A change is real when the 20 % to 80 % spreads don't touch: "slower", "faster", otherwise "same". A row that only
    one side has, or has without a time, is "new" or "gone".

    Returns:
        One dict per row: the key columns that either has, `old_ms`, `new_ms`, `ratio` (new / old) and `verdict`.
    """
    before, after = ({_key(row): row for row in rows if row.get("ms")} for rows in (old, new))
    found = []
    for key in [*after, *(key for key in before if key not in after)]:
        a, b = before.get(key), after.get(key)
        item: dict[str, Any] = {name: value for name, value in zip(KEY_COLUMNS, key, strict=True) if value}
        item |= {"old_ms": None if a is None else float(a["ms"]), "new_ms": None if b is None else float(b["ms"])}
        if a is None or b is None:
            found.append(item | {"ratio": None, "verdict": "new" if a is None else "gone"})
            continue
        verdict = "same"
        if _bound(b, "ms_p20") > _bound(a, "ms_p80"):
            verdict = "slower"
        elif _bound(b, "ms_p80") < _bound(a, "ms_p20"):
            verdict = "faster"
        ratio = item["new_ms"] / item["old_ms"] if item["old_ms"] > 0 else None
        found.append(item | {"ratio": ratio, "verdict": verdict})
    return found


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row.get(name) or "" for name in KEY_COLUMNS)


def _bound(row: Row, name: str) -> float:
    return float(row.get(name) or row["ms"])


def print_comparison(found: Sequence[Mapping[str, Any]], old: Path) -> None:
    """A table for people; slower rows first."""
    from rich.table import Table
    from rich.text import Text

    order = ("slower", "faster", "new", "gone", "same")
    counts = {verdict: sum(item["verdict"] == verdict for item in found) for verdict in order}
    out, table = console(), Table()
    out.print(
        f"against {old}: " + ", ".join(f"{n} {v}" for v, n in counts.items() if n), style="italic", highlight=False
    )
    table.add_column("what")
    for name in ("old ms", "new ms", "new / old"):
        table.add_column(name, justify="right")
    table.add_column("is")
    colors = {"slower": "red", "faster": "green"}
    for item in sorted(found, key=lambda i: order.index(i["verdict"])):
        figures = ["-" if item[k] is None else f"{item[k]:.4g}" for k in ("old_ms", "new_ms")]
        ratio = "-" if item["ratio"] is None else f"{item['ratio']:.3f}"
        mark = Text(item["verdict"], style=colors.get(item["verdict"], ""))
        table.add_row(" ".join(str(item[k]) for k in SHOWN_COLUMNS if k in item), *figures, ratio, mark)
    out.print(table)
