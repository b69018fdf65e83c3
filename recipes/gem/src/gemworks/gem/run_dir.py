"""The folder of a run: what it holds and how it is written.

| file | what |
|---|---|
| `config.toml` | the resolved configuration |
| `linears.toml` | with `kernels.linears=probe`: which layer computes how; a run that goes on does not probe again |
| `metrics.jsonl` | one JSON object per log line, evaluation and baseline |
| `tensorboard/` | the same figures as TensorBoard events |
| `learning_curve.png` | NE over the run, with both baselines |
| `train.log` | what the run said, with the time of day |
| `checkpoints/` | see `checkpoint_files.py` |
| `non_finite.json`, `memory_snapshot.pickle`, `profile/` | why a run stopped, or where its time went |
| `lock` | which process is at it |
| `summary.json` | the result; it exists only when the run is complete |
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemworks.gem.config import ConfigError, GemConfig
from gemworks.gem.lock import RunLock
from gemworks.gem.sinks import Sink, TensorBoardSink, WandbSink, scalars

if TYPE_CHECKING:
    from gemworks.precision import Recipe


def default_run_dir(config: GemConfig) -> Path:
    """`runs/<preset>-<source>-<date>-<time>`."""
    return Path("runs") / f"{config.preset}-{config.data.source}-{time.strftime('%Y%m%d-%H%M%S')}"


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
    """The folder of a run.

    Args:
        path: the folder.

    `RunDir.claim` is for the job that trains in it, `RunDir.open` for whoever reads.

    Attributes:
        resumed: the folder held a run already when it was claimed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.toml"
        self.linears_path = self.path / "linears.toml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.summary_path = self.path / "summary.json"
        self.curve_path = self.path / "learning_curve.png"
        self.log_path = self.path / "train.log"
        self.checkpoints = self.path / "checkpoints"
        self.resumed = False
        self._lock: RunLock | None = None
        self._sinks: list[Sink] | None = None
        self._config: GemConfig | None = None
        self._first_step: int | None = None

    @staticmethod
    def claim(path: str | Path, config: GemConfig) -> RunDir:
        """The folder for a job to train in: a new one with the configuration in it, or that of a run to go on with.

        Raises:
            ValueError: another job is using it, it holds a run with another configuration (says what differs), it
                cannot be written, or something that is not a folder is in the way. Nothing in it is touched then.
        """
        run = RunDir(path)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run._lock = RunLock(run.path)
            run._adopt(config)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(f"run folder {str(path)!r}: a file is in the way; choose another name") from error
        except OSError as error:
            run.close()
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOENT):
                raise
            named = f": {error.filename}" if error.filename else ""  # a full disk names no file
            raise ValueError(
                f"run folder {str(path)!r}: cannot be written ({error.strerror}{named}); correct that, or "
                "choose another folder"
            ) from error
        except ValueError:
            run.close()
            raise
        return run

    @staticmethod
    def follow(path: str | Path, *, resumed: bool) -> RunDir:
        """The folder of a run that another process has claimed: it is read, and nothing is written."""
        run = _FollowedRunDir(path)
        run.resumed = resumed
        return run

    def _adopt(self, config: GemConfig) -> None:
        self._config = config
        if not self.config_path.exists():
            _write(self.config_path, config.to_toml())
            return
        lines = config_differences(self.config(), config)
        if lines:
            raise ValueError(
                f"run folder {str(self.path)!r}: holds a run with another configuration: {'; '.join(lines)}; "
                "go on with its own (leave --preset, --config and --set out), or choose a new folder"
            )
        self.resumed = True

    def rewind(self, step: int) -> None:
        """Forgets log lines of steps after `step`: the run goes on from there. Half a last line is forgotten too.

        Lines of the baselines stay; those of the test part are written anew at the end.
        """
        self._first_step = step + 1
        if not self.metrics_path.is_file():
            return
        kept = [row for row in self.rows() if row["kind"] != "test" and row["step"] <= step]
        _write(self.metrics_path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in kept))

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
        """The configuration of the run.

        Raises:
            ConfigError: it is damaged, or of a version with other keys.
        """
        try:
            return GemConfig.from_toml(self.config_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(
                f"{str(self.config_path)!r}: {error}; the file was changed or damaged, or another version wrote it: "
                "correct it"
            ) from error

    def linears(self) -> Recipe | None:
        """What a probe chose for this run's linears; None where nothing was probed.

        Raises:
            ValueError: the file is not what a probe wrote.
        """
        if not self.linears_path.is_file():
            return None
        from gemworks.precision import Recipe  # needs torch, which reading a configuration does without

        try:
            return Recipe.from_toml(self.linears_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.linears_path}: {error}; correct it, or delete it to probe again") from error

    def log(self, kind: str, step: int, **values: Any) -> None:
        """Appends one line to `metrics.jsonl`, and gives its numbers to TensorBoard and the other sinks."""
        row = json_ready({"kind": kind, "step": step, "time": round(time.time(), 3), **values})
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        for sink in self.open_sinks():
            sink.log(kind, step, scalars(values))

    def open_sinks(self) -> list[Sink]:
        """Opens TensorBoard and what else the configuration names, unless that has been done.

        Raises:
            ValueError: a package is missing.
        """
        if self._sinks is None:
            self._sinks = [TensorBoardSink(self.path / "tensorboard", self._first_step)]
            if self._config is not None and self._config.train.wandb_project is not None:
                self._sinks.append(WandbSink(self._config.train.wandb_project, self.path, self._config.to_mapping()))
        return self._sinks

    def close(self) -> None:
        """Flushes the sinks and lets other jobs in."""
        for sink in self._sinks or []:
            sink.close()
        self._sinks = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def rows(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, of one kind or all.

        Raises:
            ValueError: a line is not what a run wrote.
        """
        if not self.metrics_path.is_file():
            return []
        rows = []
        for number, line in enumerate(self.metrics_path.read_bytes().split(b"\n")[:-1], 1):
            # what follows the last end of a line is half a line of a process that was killed
            rows.append(_read_json(line, f"{str(self.metrics_path)!r}, line {number}", "correct or delete that line"))
        return [row for row in rows if kind is None or row["kind"] == kind]

    def write_report(self, name: str, report: dict[str, Any]) -> Path:
        """Writes `<name>.json` into the folder."""
        path = self.path / f"{name}.json"
        _write(path, json.dumps(json_ready(report), indent=2, allow_nan=False) + "\n")
        return path

    def write_linears(self, toml: str) -> None:
        """Keeps what a probe chose, unless the folder has a choice."""
        if not self.linears_path.is_file():
            _write(self.linears_path, toml)

    def write_summary(self, summary: dict[str, Any]) -> None:
        _write(self.summary_path, json.dumps(json_ready(summary), indent=2, allow_nan=False) + "\n")

    def summary(self) -> dict[str, Any] | None:
        """The result, or None when the run did not end well.

        Raises:
            ValueError: the file is not what a run wrote.
        """
        if not self.summary_path.is_file():
            return None
        fix = "delete it, and the run's end is done again"
        return _read_json(self.summary_path.read_bytes(), repr(str(self.summary_path)), fix)


class _FollowedRunDir(RunDir):
    """For the ranks after the first."""

    def rewind(self, step: int) -> None:
        pass

    def log(self, kind: str, step: int, **values: Any) -> None:
        pass

    def open_sinks(self) -> list[Sink]:
        return []

    def write_report(self, name: str, report: dict[str, Any]) -> Path:
        return self.path / f"{name}.json"

    def write_linears(self, toml: str) -> None:
        pass

    def write_summary(self, summary: dict[str, Any]) -> None:
        pass


def config_differences(before: GemConfig, now: GemConfig) -> list[str]:
    """Which values differ, one text per key.

    >>> from gemworks.gem.presets import load_config
    >>> config_differences(load_config("tiny"), load_config("tiny", sets=["train.seed=1"]))
    ['train.seed is 0 in the folder, 1 now']
    """
    old, new = _leaves(before.to_mapping()), _leaves(now.to_mapping())
    return [
        f"{k} is {old.get(k)!r} in the folder, {new.get(k)!r} now" for k in {**old, **new} if old.get(k) != new.get(k)
    ]


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for key, item in value.items() for k, v in _leaves(item, f"{path}.{key}" if path else key).items()}


def _read_json(text: bytes, where: str, fix: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: got something that is not JSON ({error}); it was damaged: {fix}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where}: got {found!r}, expected a JSON object; it was damaged: {fix}")
    return found


def _write(path: Path, text: str) -> None:
    """Writes beside the file and renames, so that readers see the old text or the new one, after a power cut too."""
    partial = path.with_name(f".partial_{path.name}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
