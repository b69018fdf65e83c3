"""Taobao's user behaviour log, from `UserBehavior.csv`.

About 100 million rows of a million users over nine days of 2017, comma separated, no header: user id, item id, category
id, behaviour (`pv` a page view, `buy`, `cart`, `fav`), timestamp in seconds.
Source: https://tianchi.aliyun.com/dataset/649 ("User Behavior Data from Taobao for Recommendation"; H. Zhu et al.,
"Learning Tree-based Deep Model for Recommender Systems", KDD 2018).

Samples: every row. Tasks, about the row itself, so that no label lies in a sample's future: `intent`, it is more than a
page view; `buy`, it is a purchase. Event types: the four behaviours. Rows whose time lies outside of the nine days are
kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from gemworks.gem.data.log_files import find_files, read_text
from gemworks.gem.data.log_schema import EventRule, LogSchema
from gemworks.gem.data.prepare import prepare_log
from gemworks.gem.data.prepared import prepared_folder
from gemworks.gem.schema import IdFeature

BEHAVIOURS = ("pv", "cart", "fav", "buy")
COLUMNS = {
    "user": pa.int64(),
    "item": pa.int64(),
    "category": pa.int64(),
    "behaviour": pa.string(),
    "time": pa.int64(),
}


def log_schema(num_ids: int) -> LogSchema:
    """The columns of the log, with tables of `num_ids` rows."""
    return LogSchema(
        num_users=num_ids,
        ids=tuple(IdFeature(name=name, num_ids=num_ids, table=name) for name in ("item", "category")),
        tasks=("intent", "buy"),
        events=tuple(EventRule(name=name, column="behaviour", values=(i,)) for i, name in enumerate(BEHAVIOURS)),
    )


def prepare(folder: str | Path, *, num_ids: int, max_length: int) -> Path:
    """The prepared data set of a folder with `UserBehavior.csv`.

    Raises:
        ValueError: missing files, or rows that are not as described; names file, line and the fix.
    """
    files = find_files(folder, ["UserBehavior.csv", "UserBehavior.csv.gz"], what="Taobao's UserBehavior.csv")[:1]
    log = log_schema(num_ids)
    return prepared_folder(
        files,
        "taobao",
        {"num_ids": num_ids, "max_length": max_length},
        lambda target: prepare_log(read(files[0]), log, target, max_length=max_length),
    )


def read(path: Path) -> Iterator[tuple[str, pa.Table]]:
    """Rows with integers for the behaviours and with both labels."""
    num_read = 0
    for table in read_text(path, COLUMNS, delimiter=",", header=False):
        names_N = table["behaviour"].to_numpy()
        behaviour_N = np.full(len(names_N), -1)
        for number, name in enumerate(BEHAVIOURS):
            behaviour_N[names_N == name] = number
        bad = np.flatnonzero(behaviour_N < 0)
        if len(bad):
            raise ValueError(
                f"{path}, line {num_read + int(bad[0]) + 1}: behaviour {names_N[bad[0]]!r}, expected one of "
                f"{', '.join(BEHAVIOURS)}; is it UserBehavior.csv?"
            )
        num_read += table.num_rows
        rows = table.set_column(3, "behaviour", pa.array(behaviour_N))
        rows = rows.append_column("intent", pa.array((behaviour_N > 0).astype(np.int8)))
        yield str(path), rows.append_column("buy", pa.array((behaviour_N == BEHAVIOURS.index("buy")).astype(np.int8)))
