"""How much memory a row will take, from rows that were measured, and whether its GPU has it.

What a step keeps grows with the events of a batch; weights, gradients and optimizer states do not. So the peak of a row
at another batch size, or of the row that it builds on, gives the row's own: `fixed + (peak - fixed) * events ratio`.
Padded rows keep `batch * max_length` events, whatever the law of lengths.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from gemworks.gem.config import GemConfig
from gemworks.gem.data import open_source
from gemworks.gem.efficiency import LengthHistogram
from gemworks.gem.ladder.settings import RUNGS
from gemworks.gem.ladder.tables import NO_ROOM, preset_of, sets_of
from gemworks.gem.model.gem import Gem

DENSE_BYTES = 16  # of a parameter: float32 weight, gradient, and AdamW's two moments
TABLE_BYTES = 4  # row-wise Adagrad has one number a row, and gradients are used as they come
Row = Mapping[str, str]


@dataclass(frozen=True)
class Expected:
    """A row's peak of allocated memory, what it was taken from, and whether that is near enough to refuse the row."""

    gib: float
    source: str
    decides: bool = True


def fixed_gib(config: GemConfig) -> float:
    """What a run holds whatever its batch: weights, gradients, optimizer states, tables.

    >>> from gemworks.gem.presets import get_preset
    >>> round(fixed_gib(get_preset("large")), 1)
    9.1
    """
    model = Gem(open_source(config.data).schema, config, device="meta")
    dense = sum(p.numel() for p in model.dense_parameters())
    tables = sum(p.numel() for p in model.sparse_parameters())
    return (DENSE_BYTES * dense + TABLE_BYTES * tables) / 2**30


def of_model(rows: Iterable[Row], preset: str, sets: Sequence[str]) -> list[Row]:
    """The rows of commands with that `--preset` and these `--set`."""
    return [row for row in rows if (preset_of(row), sets_of(row)) == (preset, shlex.join(sets))]


def expected(config: GemConfig, names: Iterable[str], measured: Sequence[Row], *, fixed_gib: float) -> Expected | None:
    """The peak of a row; None if neither it nor any row that it builds on has been measured.

    Args:
        config: of the row.
        names: of the row, then of rows that take about as much: the first of them that was measured counts. Only the
            row itself and the one that its rung names (`over`) decide: another may have a larger peak than the row
            has, which would then be refused for ever.
        measured: rows of the CSVs; of the same name and batch the last.
        fixed_gib: what the model holds whatever its batch.
    """
    data, names = config.data, list(names)
    own = LengthHistogram.of_law(data.length_law, data.max_length, data.batch_size).num_tokens
    if config.kernels.layout == "padded":
        own = data.batch_size * data.max_length
    near = {*names[:1], *(rung.over for rung in RUNGS if rung.name in names[:1])}
    for name in names:
        found = [
            row for row in measured
            if row["row"] == name and row["attention"] == config.model.attention and row["peak_gib"]
            and row["max_len"] == str(data.max_length) and row["mean_len"] and row.get("num_gpus", "1") == "1"
        ]  # fmt: skip
        if found:
            row = min(reversed(found), key=lambda r: abs(int(r["batch"]) - data.batch_size))
            is_padded = float(row.get("padding") or 0.0) > 0.0
            length = float(row["max_len"] if is_padded else row["mean_len"])
            peak, events = float(row["peak_gib"]), int(row["batch"]) * length
            fixed = min(fixed_gib, peak)
            gib = fixed + (peak - fixed) * own / events
            return Expected(gib, f"{peak:.1f} GiB of {name} at {row['batch']} samples", name in near)
    return None


def builds_on(name: str) -> Iterator[str]:
    """A row, then rows that it differs from in little, the nearest first: of leave-one-out the same without a name of
    its stack, of the ladder what it adds its things to.

    >>> list(builds_on("fused_qk"))[:3]
    ['fused_qk', 'shared_schedule', 'gdpa']
    >>> list(builds_on("stream without GDPA"))[:3]
    ['stream without GDPA', 'without GDPA', 'stream']
    """
    yield name
    stack, without, lost = name.partition(" without ")
    if without:
        yield f"without {lost}"
        yield stack
        name = stack
    names = [rung.name for rung in RUNGS]
    if name in names:
        at = names.index(name)
        if RUNGS[at].over:
            yield RUNGS[at].over
        yield from (above.name for above in reversed(RUNGS[:at]) if not above.side)


def free_gib(device: torch.device) -> tuple[float, float]:
    """What this process can still allocate on a GPU, and what others hold of it."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    own_free = reserved - torch.cuda.memory_allocated(device)
    return (free + own_free) / 2**30, (total - free - reserved) / 2**30


def refusal(
    needed: Expected, free: Callable[[], tuple[float, float]], *, patience_s: float = 20.0, poll_s: float = 0.5
) -> str:
    """Why a row would find no room, or "". Waits a while for those who hold the memory: a process that ends gives it
    back seconds later.

    >>> refusal(Expected(90.0, "45.0 GiB of stream at 256 samples"), lambda: (80.0, 55.5), patience_s=0.0)
    'NoRoom: expected 90.0 GiB (45.0 GiB of stream at 256 samples), 80.0 are free; others and contexts hold 55.5'
    """
    deadline = time.monotonic() + patience_s
    while True:
        available, held = free()
        if available >= needed.gib:
            return ""
        if time.monotonic() >= deadline:
            break
        time.sleep(poll_s)
    return (
        f"{NO_ROOM}: expected {needed.gib:.1f} GiB ({needed.source}), {available:.1f} are free; "
        f"others and contexts hold {held:.1f}"
    )
