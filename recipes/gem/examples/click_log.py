"""From a click log to a trained model: four columns (user, item, time, click) become samples with histories.

    python click_log.py                    # makes a small log first
    python click_log.py clicks.parquet     # your own, with columns user, item, time (seconds) and click (0 or 1)

The data set goes to `click_log/data`, the run to `click_log/run`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from gemworks.gem.data.log_schema import EventRule, LogSchema
from gemworks.gem.data.prepare import prepare_log, read_parquet_log
from gemworks.gem.schema import IdFeature

LOG = LogSchema(
    num_users=1 << 16,
    ids=(IdFeature(name="item", num_ids=1 << 16, table="item"),),
    tasks=("click",),
    events=(
        EventRule(name="clicked", column="click", values=(1,)),
        EventRule(name="skipped", column="click", values=(0,)),
    ),
)
MAX_LENGTH = 32  # newest events kept per event type


def make_log(path: Path, *, num_rows: int = 20_000, seed: int = 0) -> None:
    """A log in which one item in four is popular, and users click such items most of the time."""
    random = np.random.default_rng(seed)
    user_N = random.integers(0, 200, num_rows)
    item_N = random.integers(0, 40, num_rows)
    click_N = random.random(num_rows) < np.where(item_N % 4 == 0, 0.8, 0.1)
    time_N = np.sort(random.integers(1_700_000_000, 1_700_600_000, num_rows))
    pq.write_table(pa.table({"user": user_N, "item": item_N, "time": time_N, "click": click_N}), path)


def main(paths: list[str], *, num_steps: int = 100) -> None:
    """Prepare the log, train a few steps on it, print what came out."""
    home = Path("click_log")
    home.mkdir(exist_ok=True)
    if not paths:
        make_log(home / "clicks.parquet")
        paths = [str(home / "clicks.parquet")]
    parts = read_parquet_log(paths, LOG, batch_rows=65536)
    done = prepare_log(parts, LOG, home / "data", max_length=MAX_LENGTH)
    print(f"samples: {dict(done.num_samples)}")

    from gemworks.gem.presets import load_config
    from gemworks.gem.train import train

    settings = [
        "data.source=parquet",
        f"data.path={home / 'data'}",
        f"data.max_length={MAX_LENGTH}",
        "data.shuffle_window=4096",
        "model.num_event_types=2",
        f"train.max_steps={num_steps}",
        "optimizer.sparse_lr=0.05",
    ]
    summary = train(load_config("tiny", sets=settings), home / "run")
    print(f"NE of the test part: {summary['ne']:.4f} (1 knows nothing but the click rate)")


if __name__ == "__main__":
    main(sys.argv[1:])
