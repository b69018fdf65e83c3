"""What a data set holds, measured by reading it: schema, counts, history lengths, label rates, time span.

Shapes: B samples of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from gemworks.gem.data.loader import Source
from gemworks.gem.data.parquet import ParquetSource
from gemworks.gem.schema import IdFeature
from numpy.typing import NDArray

BLOCK_SAMPLES = 1024
INK, COLORS = "#1f2933", ("#0b6e99", "#c2571a", "#8a8f98")


def inspect_source(source: Source, *, max_samples: int) -> dict[str, Any]:
    """Figures of every split as plain values, ready for JSON.

    Args:
        source: the data.
        max_samples: read at most so many samples of each split, in blocks spread evenly over it, the first and the
            last sample included. Every figure but `num_samples` is about the samples read (`num_inspected`).

    Returns:
        `schema`, and per split `num_samples`, `num_inspected`, `first_time` and `last_time` (UTC), `label_rates` by
        task, and `events` by type: `num_events`, `mean_length`, `max_length`, `lengths` (samples per range of lengths:
        0, 1, 2 to 3, 4 to 7, ...).

    Raises:
        ValueError: `max_samples` below 2, or bad data.
    """
    if max_samples < 2:
        raise ValueError(f"max_samples: got {max_samples}, expected at least 2: the first sample and the last one")
    schema = source.schema
    return {
        "schema": {
            "ids": [_feature(f) for f in schema.ids],
            "dense": list(schema.dense_names),
            "events": [
                {"name": e.name, "ids": [_feature(f) for f in e.ids], "floats": list(e.float_names)}
                for e in schema.events
            ],
            "tasks": list(schema.tasks),
        },
        "splits": {split: _inspect_split(source, split, max_samples) for split in source.splits},
    }


def check_all(source: ParquetSource) -> int:
    """Decode and check every row group; returns their number.

    Raises:
        ValueError: the first bad value, with file, row group, column and the fix.
    """
    num_groups = 0
    for split in source.splits:
        sizes_G = source.row_groups(split)
        for first in (np.cumsum(sizes_G) - sizes_G)[sizes_G > 0]:
            source.read(split, np.array([first]))
        num_groups += len(sizes_G)
    return num_groups


def _feature(feature: IdFeature) -> dict[str, Any]:
    return {"name": feature.name, "num_ids": feature.num_ids, "table": feature.table}


def _blocks(num_samples: int, max_samples: int) -> Iterator[NDArray[np.int64]]:
    """Rows to read: all, or blocks spread evenly from the first row to the last one."""
    if num_samples <= max_samples:
        for first in range(0, num_samples, BLOCK_SAMPLES):
            yield np.arange(first, min(first + BLOCK_SAMPLES, num_samples), dtype=np.int64)
        return
    num_blocks = max(2, max_samples // BLOCK_SAMPLES)
    size = min(BLOCK_SAMPLES, max_samples // num_blocks)
    starts = np.linspace(0, num_samples - size, num_blocks).astype(np.int64)
    for start in starts.tolist():
        yield np.arange(start, start + size, dtype=np.int64)


def _inspect_split(source: Source, split: str, max_samples: int) -> dict[str, Any]:
    schema = source.schema
    num_samples = source.num_samples(split)
    num_inspected = 0
    times: list[int] = []
    label_sums = np.zeros(len(schema.tasks))
    lengths: dict[str, list[NDArray[np.int64]]] = {e.name: [] for e in schema.events}
    for rows_B in _blocks(num_samples, max_samples):
        batch = source.read(split, rows_B)
        num_inspected += batch.num_samples
        times += [int(batch.timestamps_B.min()), int(batch.timestamps_B.max())]
        label_sums += batch.labels_BK.double().sum(0).numpy()
        for name, events in batch.events.items():
            lengths[name].append(np.diff(events.offsets_S.numpy()))
    rates = label_sums / num_inspected if num_inspected else np.full(len(schema.tasks), np.nan)
    return {
        "num_samples": num_samples,
        "num_inspected": num_inspected,
        "first_time": _utc(min(times)) if times else None,
        "last_time": _utc(max(times)) if times else None,
        "label_rates": dict(zip(schema.tasks, rates.tolist(), strict=True)),
        "events": {
            name: _length_figures(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))
            for name, parts in lengths.items()
        },
    }


def _length_figures(lengths_B: NDArray[np.int64]) -> dict[str, Any]:
    return {
        "num_events": int(lengths_B.sum()),
        "mean_length": float(lengths_B.mean()) if len(lengths_B) else None,
        "max_length": int(lengths_B.max(initial=0)),
        "lengths": length_histogram(lengths_B),
    }


def length_histogram(lengths_B: NDArray[np.int64]) -> list[dict[str, int]]:
    """Samples per range of lengths whose ends are powers of two.

    >>> length_histogram(np.array([0, 1, 2, 3, 3]))[1:]
    [{'from': 1, 'to': 1, 'num_samples': 1}, {'from': 2, 'to': 3, 'num_samples': 3}]
    """
    num_bits_B = np.frexp(lengths_B.astype(np.float64))[1]  # 0 of 0, 1 of 1, 2 of 2 and 3, ...
    counts = np.bincount(num_bits_B, minlength=1)
    return [
        {"from": (1 << bits) >> 1, "to": (1 << bits) - 1, "num_samples": int(count)}
        for bits, count in enumerate(counts)
    ]


def _utc(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def draw_lengths(path: str | Path, result: dict[str, Any]) -> None:
    """Write a PNG with one panel of history lengths per event type, as shares of each split.

    Args:
        path: of the file.
        result: what `inspect_source` returned.

    Raises:
        ValueError: the data has no event types, so there is nothing to draw.
    """
    names = [event["name"] for event in result["schema"]["events"]]
    if not names:
        raise ValueError("png: the data has no event types, so there are no history lengths to draw; leave it out")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6 * len(names) + 0.4), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for name, axes in zip(names, np.atleast_1d(figure.subplots(len(names), 1)), strict=True):
        bins = max((split["events"][name]["lengths"] for split in result["splits"].values()), key=len)
        width = 0.8 / len(result["splits"])
        for index, (split, figures) in enumerate(result["splits"].items()):
            counts = np.array([part["num_samples"] for part in figures["events"][name]["lengths"]], dtype=np.float64)
            places = np.arange(len(counts)) + (index - (len(result["splits"]) - 1) / 2) * width
            axes.bar(places, counts / max(counts.sum(), 1), width, label=split, color=COLORS[index % len(COLORS)])
        axes.set_xticks(np.arange(len(bins)), [range_label(part) for part in bins], color=INK, fontsize=8)
        axes.set_title(f"{name}: events in the history", loc="left", fontsize=10, color=INK)
        axes.set_ylabel("share of samples", fontsize=8, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(Path(path))


def range_label(part: dict[str, int]) -> str:
    """How a range of lengths is written.

    >>> range_label({"from": 4, "to": 7, "num_samples": 0}), range_label({"from": 1, "to": 1, "num_samples": 0})
    ('4-7', '1')
    """
    return str(part["from"]) if part["from"] == part["to"] else f"{part['from']}-{part['to']}"
