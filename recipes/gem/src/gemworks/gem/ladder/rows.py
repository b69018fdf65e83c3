"""The ladder's CSV: a row per configuration, appended when it is measured; a run goes on where another stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gemworks.gem.config import GemConfig
from gemworks.gem.ladder.settings import OTHER_BATCHES
from gemworks.gem.ladder.step import StepCost
from gemworks.gem.ladder.tables import NO_ROOM, law_of, read
from gemworks.gem.layers.report import PROTOCOL_COLUMNS, Row, Total, append_csv

COLUMNS = (
    *("row", "added", "attention", "samples_per_s", "local_mfu", "step_mfu", "mixed_mfu", "step_ms", "flops_per_step"),
    *("peak_gib", "padding", "recompute", "ne"),
    *("loss", "batch", "steps", "gap_share", "bound_mfu", "note"),
    *PROTOCOL_COLUMNS,
)
NE_TOLERANCE = 0.005  # relative; rows that only round otherwise agree to 0.0005


@dataclass(frozen=True)
class Case:
    """What a ladder is about: its rows compare with each other and with no other ladder's."""

    attention: str
    batch: int
    law: str
    max_len: int


def done(path: Path) -> set[tuple[str, ...]]:
    """Keys of the rows that a CSV has; one that found no room may be tried again."""
    return {_key_in(row) for row in read(path) if not row["note"].startswith(NO_ROOM)}


def wrong_answer(path: Path, name: str, case: Case, steps: int, cost: StepCost) -> str:
    """Why a row gets no number, or "".

    All rows of a case, but for those of `OTHER_BATCHES`, learn from the same batches with the same seed; what differs
    is rounding. A loss that is not finite, or an NE that is not the first row's within `NE_TOLERANCE`, is another
    model's or nobody's.
    """
    if not math.isfinite(cost.loss):
        return f"WrongAnswer: the loss is {cost.loss}"
    if cost.num_skipped:
        return f"WrongAnswer: {cost.num_skipped} steps had a loss or gradient that is not finite"
    if cost.ne is None or name in OTHER_BATCHES:
        return ""
    same = [
        row for row in read(path)
        if key_of(row["row"], case) == _key_in(row) and row["steps"] == str(steps) and row["ne"]
        and row["row"] not in OTHER_BATCHES
    ]  # fmt: skip
    if same and abs(cost.ne / float(same[0]["ne"]) - 1.0) > NE_TOLERANCE:
        return f"WrongAnswer: NE {cost.ne:.4f}, and {same[0]['ne']} on the same batches in row {same[0]['row']}"
    return ""


def key_of(row: str, case: Case) -> tuple[str, ...]:
    return (row, case.attention, str(case.batch), case.law, str(case.max_len))


def _key_in(row: Mapping[str, str]) -> tuple[str, ...]:
    """As `key_of`, of a row that was read."""
    return (row["row"], row["attention"], row["batch"], law_of(row), row["max_len"])


def make_row(
    name: str,
    added: str,
    case: Case,
    config: GemConfig,
    cost: StepCost | None,
    local: Total | None,
    common: Mapping[str, str],
    *,
    steps: int,
    note: str = "",
) -> Row:
    """One line; without a cost it says in `note` why there is none."""
    row = dict.fromkeys(COLUMNS, "") | dict(common)
    row |= {
        "row": name, "added": added, "attention": case.attention, "batch": str(case.batch), "law": case.law,
        "max_len": str(case.max_len), "dtype": config.train.dtype, "seed": str(config.train.seed), "note": note,
    }  # fmt: skip
    if local is not None and _has_peak(common):
        row |= {"local_mfu": f"{local.local_mfu:.4f}", "bound_mfu": f"{local.bound_mfu:.4f}"}
    if cost is not None:
        on_gpu = cost.peak_gib is not None
        row |= {
            "samples_per_s": f"{cost.samples_per_s:.1f}", "step_ms": f"{cost.step.ms:.3f}", "ms": f"{cost.step.ms:.3f}",
            "ms_p20": f"{cost.step.ms_p20:.3f}", "ms_p80": f"{cost.step.ms_p80:.3f}", "steps": str(steps),
            "flops_per_step": f"{cost.flops:.6g}", "tflops": f"{cost.flops / cost.step.ms / 1e9:.4g}",
            "step_mfu": f"{cost.step_mfu:.4f}" if on_gpu else "",
            "mixed_mfu": f"{cost.mixed_mfu:.4f}" if on_gpu else "",
            "peak_gib": f"{cost.peak_gib:.2f}" if cost.peak_gib is not None else "", "padding": f"{cost.padding:.4f}",
            "recompute": "" if cost.recompute is None else f"{cost.recompute:.4f}",
            "ne": "" if cost.ne is None else f"{cost.ne:.5f}",
            "loss": f"{cost.loss:.6f}",
        }  # fmt: skip
        if cost.split is not None:
            busy = cost.split.tensor_core_ms + cost.split.memory_ms
            row["gap_share"] = f"{cost.split.gap_ms / (busy + cost.split.gap_ms):.4f}"
    return row


def _has_peak(common: Mapping[str, str]) -> bool:
    """MFU is stated for GPUs only: a CPU has no peak here."""
    return bool(common.get("gpu"))


def append(path: Path, row: Row) -> None:
    append_csv(path, [row], COLUMNS)
