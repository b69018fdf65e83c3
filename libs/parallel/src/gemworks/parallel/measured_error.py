"""How far this simulator was off where it was measured: what every prediction prints unless told otherwise.

`rewrite("docs/measured/simulator_error.csv")` brings it up to date; a test compares it with that file.
"""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

# (device, GPUs, steps, median, worst): errors in percent of the measured time, of steps not used to calibrate; a CPU's
# are those of eight processes on an emulated network of three tiers
MEASURED: tuple[tuple[str, int, int, float, float], ...] = (
    ("H200", 1, 8, 2.5, 6.0),
    ("H200", 2, 12, 1.5, 6.5),
    ("cpu x86_64", 8, 10, 2.3, 9.1),
)


def error_rows(csv_text: str) -> tuple[tuple[str, int, int, float, float], ...]:
    """Rows like `MEASURED`'s from the text of simulator_error.csv.

    Args:
        csv_text: columns config, split, error_pct, and if it has them gpu and num_gpus; only rows with split "validate"
            count.

    Raises:
        ValueError: there is no such row, a column is missing, or an error is no number.
    """
    reader = csv.DictReader(io.StringIO(csv_text))
    if missing := sorted({"split", "error_pct"} - set(reader.fieldnames or ())):
        raise ValueError(f"csv_text: lacks the columns {missing}; it has {reader.fieldnames or []}")
    rows = [r for r in reader if r["split"] == "validate"]
    if not rows:
        raise ValueError(
            "csv_text: got no row with split=validate, expected measurements that were not used to calibrate"
        )
    by_run: dict[tuple[str, int], list[float]] = {}
    for r in rows:
        device = re.sub(r"^NVIDIA ", "", r.get("gpu", "")) or "device not named"
        by_run.setdefault((device, int(r.get("num_gpus") or 0)), []).append(abs(float(r["error_pct"])))
    return tuple(
        (device, gpus, len(found), round(statistics.median(found), 1), round(max(found), 1))
        for (device, gpus), found in sorted(by_run.items())
    )


def text_of(rows: Sequence[tuple[str, int, int, float, float]]) -> str:
    """In words.

    >>> text_of([("H200", 2, 12, 3.8, 10.8)])
    'prediction error: median 3.8 %, worst 10.8 % over 12 measured steps (2 x H200); none of them was used to calibrate, and beyond them it is extrapolation'
    """  # noqa: E501 - one line of output
    said = "; ".join(
        f"median {median:.1f} %, worst {worst:.1f} % over {steps} measured steps "
        f"({f'{gpus} x ' if gpus else ''}{device})"
        for device, gpus, steps, median, worst in rows
    )
    return f"prediction error: {said}; none of them was used to calibrate, and beyond them it is extrapolation"


def rewrite(csv_path: str | Path) -> None:
    """Puts what a simulator_error.csv says into `MEASURED` of this file, in a checkout."""
    rows = error_rows(Path(csv_path).read_text(encoding="utf-8"))
    lines = "".join(f"    {row!r},\n".replace("'", '"') for row in rows)
    own = Path(__file__)
    text = re.sub(r"(\nMEASURED: [^=]*= )\([\s\S]*?\)\n\n\n", rf"\1(\n{lines})\n\n\n", own.read_text(encoding="utf-8"))
    own.write_text(text, encoding="utf-8")
