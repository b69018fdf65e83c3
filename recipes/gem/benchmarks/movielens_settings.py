"""Trains the `small` preset on MovieLens-100K under several settings and tabulates the test part.

    python recipes/gem/benchmarks/movielens_settings.py --out docs/measured/movielens_small_h200.csv --parallel 8 \
        --settings train.seed=0 train.seed=1 "train.seed=0 train.epochs=2"

One row per setting: NE, AUC and calibration of the primary task, the gain against the strong baseline with its paired
95 % interval, seconds, device, versions and commit. A setting that fails leaves a row that says so.
Where the checkout has no git, GEMWORKS_COMMIT names the commit.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.5


def commit() -> str:
    """The checkout's commit: of git, or what GEMWORKS_COMMIT says."""
    if "GEMWORKS_COMMIT" in os.environ:
        return os.environ["GEMWORKS_COMMIT"]
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def start(setting: str, run_dir: Path, preset: str, path: str | None) -> subprocess.Popen[bytes]:
    """One training run in a process of its own; its output goes to a file beside the run folder."""
    values = setting.split() + ([f"data.path={path}"] if path else [])
    command = [sys.executable, "-m", "gemworks.gem.train", "--preset", preset, "--run-dir", str(run_dir)]
    command += ["--set", *values] if values else []
    with run_dir.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def row(setting: str, run_dir: Path, num_parallel: int) -> dict[str, Any]:
    """The table's row of a finished run."""
    summary_path = run_dir / "summary.json"
    if not summary_path.exists():
        lines = run_dir.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return {"setting": setting, "error": lines[-1] if lines else "no output"}
    summary = json.loads(summary_path.read_text(encoding="utf-8"))
    gain = summary["baselines"]["history"]["gain"]
    return {
        "setting": setting,
        "ne": summary["ne"],
        "auc": summary["auc"],
        "calibration": summary["calibration"],
        "valid_ne": summary["valid_ne"],
        "history_baseline_ne": summary["history_baseline_ne"],
        "ne_gain_percent": gain["ne_gain_percent"],
        "ne_difference_low": gain["ne_difference_low"],
        "ne_difference_high": gain["ne_difference_high"],
        "train_seconds": summary["train_seconds"],
        "runs_at_once": num_parallel,
        "device": summary["device"],
        "torch": summary["versions"]["torch"],
        "torchrec": summary["versions"]["torchrec"],
        "commit": commit(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=[""], metavar="'KEY=VALUE ...'", help="one run each")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--path", help="folder with the MovieLens files, instead of fetching them")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once")
    parser.add_argument("--out", type=Path, required=True, help="CSV file")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        queue = [(setting, Path(scratch) / f"run{number}") for number, setting in enumerate(given.settings)]
        running: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
        while queue or running:
            while queue and len(running) < given.parallel:
                setting, run_dir = queue.pop(0)
                running.append((setting, run_dir, start(setting, run_dir, given.preset, given.path)))
            ended = [run for run in running if run[2].poll() is not None]
            running = [run for run in running if run not in ended]
            for setting, run_dir, _ in ended:
                rows.append(row(setting, run_dir, min(given.parallel, len(given.settings))))
                print(json.dumps(rows[-1]), flush=True)
            time.sleep(POLL_SECONDS)
    columns = list(dict.fromkeys(key for one in rows for key in one))
    with given.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda one: given.settings.index(one["setting"])))
    return int(any("error" in one for one in rows))


if __name__ == "__main__":
    sys.exit(main())
