"""Where figures go besides `metrics.jsonl`: TensorBoard, and Weights & Biases if the configuration names a project."""

from __future__ import annotations

import math
import uuid
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Takes the numbers of one row."""

    def log(self, kind: str, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


def scalars(values: dict[str, Any]) -> dict[str, float]:
    """The finite numbers among a row's values.

    >>> scalars({"loss": 0.5, "ne": float("nan"), "name": "identity"})
    {'loss': 0.5}
    """
    return {k: v for k, v in values.items() if isinstance(v, (int, float)) and math.isfinite(v)}


class TensorBoardSink:
    """TensorBoard events as `<kind>/<name>`.

    Args:
        folder: of the events.
        first_step: events of this step and later ones that a run killed earlier left are not shown any more.
    """

    def __init__(self, folder: Path, first_step: int | None) -> None:
        # seconds to import, and only a run that writes needs it
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, kind: str, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases; a run that is resumed goes on under the same id.

    Args:
        project: its project.
        folder: the run's folder; its name is the run's name, and `wandb_id` in it keeps the id.
        config: the resolved configuration.

    Raises:
        ValueError: wandb is not installed.
    """

    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]  # an extra
        except ImportError as error:
            raise ValueError(
                f"train.wandb_project: got {project!r}, but wandb cannot be imported ({error}); "
                "pip install 'gemworks-gem[wandb]', or set train.wandb_project=none"
            ) from error
        id_path = folder / "wandb_id"
        if not id_path.is_file():
            id_path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=id_path.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(folder),
            config=config,
        )

    def log(self, kind: str, step: int, values: dict[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in values.items()} | {"trained_steps": step})

    def close(self) -> None:
        self._run.finish()
