"""KuaiRand's logs of a short-video feed, from its `log_*.csv` files.

Comma separated with a header: user_id, video_id, date, hourmin, time_ms (milliseconds), the feedback is_click, is_like,
is_follow, is_comment, is_forward, is_hate and long_view (0 or 1), play_time_ms, duration_ms, profile_stay_time,
comment_stay_time, is_profile_enter, is_rand (the video was chosen at random), tab (the page of the app, an integer).
Source: https://kuairand.com and https://doi.org/10.1145/3511808.3557624 (C. Gao et al., "KuaiRand: An Unbiased
Sequential Recommendation Dataset with Randomly Exposed Videos", CIKM 2022).

Samples: every row of all files. Tasks: is_click, long_view, is_like. Event types: `clicked` and `skipped`, which show
how long the video was watched. A sample itself knows user, video, tab, is_rand and the video's duration. Profiles of
users and videos lie in other files of the data set and are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from gemworks.gem.data.log_files import find_files, read_text
from gemworks.gem.data.log_schema import EventRule, LogSchema
from gemworks.gem.data.prepare import prepare_log
from gemworks.gem.data.prepared import prepared_folder
from gemworks.gem.schema import IdFeature

TASKS = ("is_click", "long_view", "is_like")
NUM_TABS = 32
COLUMNS = {
    **{name: pa.int64() for name in ("user_id", "video_id", "time_ms", *TASKS, "is_rand", "tab")},
    **{name: pa.float64() for name in ("play_time_ms", "duration_ms")},
}


def log_schema(num_ids: int) -> LogSchema:
    """The columns of the log, with tables of `num_ids` rows for users and videos."""
    return LogSchema(
        num_users=num_ids,
        ids=(
            IdFeature(name="video", num_ids=num_ids, table="video"),
            IdFeature(name="tab", num_ids=NUM_TABS, table="tab"),
            IdFeature(name="is_rand", num_ids=2, table="is_rand"),
        ),
        tasks=TASKS,
        events=(
            EventRule(name="clicked", column="is_click", values=(1,)),
            EventRule(name="skipped", column="is_click", values=(0,)),
        ),
        dense_names=("log_duration",),
        event_floats=("log_duration", "log_play_time"),
        columns={"user": "user_id", "time": "time_ms", "video": "video_id"},
        time_unit="ms",
    )


def prepare(folder: str | Path, *, num_ids: int, max_length: int) -> Path:
    """The prepared data set of a folder with KuaiRand's `log_*.csv` files.

    Raises:
        ValueError: missing files, or rows that are not as described; names file, line and the fix.
    """
    files = find_files(folder, ["log_*.csv", "log_*.csv.gz"], what="KuaiRand's log_standard_*.csv and log_random_*.csv")
    log = log_schema(num_ids)
    return prepared_folder(
        files,
        "kuairand",
        {"num_ids": num_ids, "max_length": max_length},
        lambda target: prepare_log(read(files), log, target, max_length=max_length),
    )


def read(files: Sequence[Path]) -> Iterator[tuple[str, pa.Table]]:
    """Rows of all files, with times of playing as log(1 + seconds)."""
    for path in files:
        for table in read_text(path, COLUMNS, delimiter=",", header=True):
            rows = table
            for name in ("duration", "play_time"):
                seconds_N = table[f"{name}_ms"].to_numpy() / 1000  # a missing value is NaN, which the log refuses
                rows = rows.append_column(f"log_{name}", pa.array(np.log1p(np.maximum(seconds_N, 0))))
            yield str(path), rows
