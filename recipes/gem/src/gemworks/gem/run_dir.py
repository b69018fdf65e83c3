"""The folder of a run: what it holds and how it is written.

| file | what |
|---|---|
| `config.toml` | the resolved configuration |
| `metrics.jsonl` | one JSON object per log line, evaluation and baseline |
| `tensorboard/` | the same figures as TensorBoard events |
| `learning_curve.png` | NE over the run, with both baselines |
| `checkpoints/` | see `checkpoint.py` |
| `summary.json` | the result; it exists only when the run is complete |
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from gemworks.gem.config import GemConfig


def default_run_dir(config: GemConfig, root: str | Path = "runs") -> Path:
    """`runs/<preset>-<source>-<date>-<time>`."""
    return Path(root) / f"{config.preset}-{config.data.source}-{time.strftime('%Y%m%d-%H%M%S')}"


def json_ready(value: Any) -> Any:
    """Plain values with NaN and infinity, which JSON does not have, as None.

    >>> json_ready({"ne": float("nan"), "steps": (1, 2)})
    {'ne': None, 'steps': [1, 2]}
    """
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class RunDir:
    """An open run folder; close it to flush.

    Args:
        path: the folder.

    Use `RunDir.create` for a new run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.toml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.summary_path = self.path / "summary.json"
        self.curve_path = self.path / "learning_curve.png"
        self.checkpoints = self.path / "checkpoints"
        self._writer: Any = None

    @staticmethod
    def create(path: str | Path, config: GemConfig) -> RunDir:
        """A folder for a new run, with the configuration in it.

        Raises:
            ValueError: the folder already holds a run, or something that is not a folder is in the way.
        """
        run = RunDir(path)
        if run.config_path.exists():
            raise ValueError(
                f"run folder {str(path)!r}: got one that holds a run, expected a new one; choose another name"
            )
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(f"run folder {str(path)!r}: a file is in the way; choose another name") from error
        _write(run.config_path, config.to_toml())
        return run

    @staticmethod
    def open(path: str | Path) -> RunDir:
        """The folder of an existing run.

        Raises:
            ValueError: there is no run in it.
        """
        run = RunDir(path)
        if not run.config_path.is_file():
            raise ValueError(
                f"run folder {str(path)!r}: got no config.toml in it, expected the folder of a training run"
            )
        return run

    def config(self) -> GemConfig:
        """The configuration of the run."""
        return GemConfig.from_toml(self.config_path.read_text(encoding="utf-8"))

    def log(self, kind: str, step: int, **values: Any) -> None:
        """Appends one line to `metrics.jsonl`, and its numbers to the TensorBoard events as `<kind>/<name>`."""
        row = json_ready({"kind": kind, "step": step, "time": round(time.time(), 3), **values})
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        if self._writer is None:
            # seconds to import, and only a run that writes needs it
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.path / "tensorboard"))
        for name, value in values.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flushes the TensorBoard events."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def rows(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, of one kind or all."""
        if not self.metrics_path.is_file():
            return []
        rows = [json.loads(line) for line in self.metrics_path.read_text(encoding="utf-8").splitlines()]
        return [row for row in rows if kind is None or row["kind"] == kind]

    def write_summary(self, summary: dict[str, Any]) -> None:
        _write(self.summary_path, json.dumps(json_ready(summary), indent=2, allow_nan=False) + "\n")

    def summary(self) -> dict[str, Any] | None:
        """The result, or None when the run did not end well."""
        return json.loads(self.summary_path.read_text(encoding="utf-8")) if self.summary_path.is_file() else None


def _write(path: Path, text: str) -> None:
    """Writes beside the file and renames, so that readers see the old text or the new one."""
    partial = path.with_name(f".partial_{path.name}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
