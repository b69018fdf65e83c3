"""`python -m gemworks.gem.ladder.kernel_costs docs/measured`: what a batch costs as a function of its lengths, from
measured kernels.

Reads jagged_h200.csv, draws the lengths of each row again (law, batch, longest and seed are in it) and fits
`gemworks.parallel.CostModel` to full attention, forward and backward. Writes cost_model_h200.csv: the terms in us, how
far the fit is from its own rows, and how far a fit to batches of 256 is from batches of 1,152, which it has not seen.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gemworks.jagged.bench.cases import draw_lengths
from gemworks.parallel import CostModel, fit_cost_model
from torch import Tensor

SMALL = 256


@dataclass(frozen=True, kw_only=True)
class KernelCost:
    """One kernel in one direction; terms are those of `CostModel`, in us; errors in percent of the measured time."""

    op: str
    head_dim: int
    direction: str
    linear: float
    quadratic: float
    per_sample: float
    per_batch: float
    num_rows: int
    median_error_pct: float
    worst_error_pct: float
    unseen_median_error_pct: float
    unseen_worst_error_pct: float
    gpu: str
    commit: str

    def model(self) -> CostModel:
        """For `CostModel.of_lengths`."""
        return CostModel(
            linear=self.linear, quadratic=self.quadratic, per_sample=self.per_sample, per_batch=self.per_batch
        )


def lengths_of(row: dict[str, str]) -> Tensor:
    """The lengths that a row of jagged_h200.csv was measured on, int64 [B].

    Raises:
        ValueError: the row's mean and longest are not those of its law and seed.
    """
    batch, longest = map(int, re.findall(r"\d+", row["shape"]))
    lengths = draw_lengths(row["law"], batch, longest, int(row["seed"]))
    mean, most = float(lengths.double().mean()), int(lengths.max())
    if abs(mean - float(row["mean_len"])) > 0.06 or most != int(row["max_len"]):
        raise ValueError(
            f"row {row['shape']} {row['law']}: got mean {row['mean_len']} and longest {row['max_len']}, expected those "
            f"of its seed, {mean:.1f} and {most}; the laws have changed since: measure it again"
        )
    return lengths


def kernel_costs(path: Path) -> list[KernelCost]:
    """Fit every head width and direction of full attention in a jagged_h200.csv; of a shape measured twice the later
    row counts."""
    groups: dict[tuple[int, str], dict[tuple[str, str], dict[str, str]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            plain = re.fullmatch(r"B(256|1152) max\d+", row["shape"])
            if (row["op"], row["impl"]) == ("flash_attention", "gemworks") and plain:
                group = groups.setdefault((int(row["head_dim"]), row["direction"]), {})
                group[row["shape"], row["law"]] = row
    found: list[KernelCost] = []
    for (head_dim, direction), rows in sorted(groups.items()):
        measured = [(lengths_of(r), 1e3 * float(r["ms"])) for r in rows.values()]
        model = fit_cost_model([x for x, _ in measured], [us for _, us in measured])
        small = [m for m in measured if m[0].numel() == SMALL]
        part = fit_cost_model([x for x, _ in small], [us for _, us in small])
        own = errors_pct(model, measured)
        unseen = errors_pct(part, [m for m in measured if m[0].numel() != SMALL])
        found.append(
            KernelCost(
                op="flash_attention",
                head_dim=head_dim,
                direction=direction,
                **asdict(model),
                num_rows=len(measured),
                median_error_pct=statistics.median(own),
                worst_error_pct=max(own),
                unseen_median_error_pct=statistics.median(unseen),
                unseen_worst_error_pct=max(unseen),
                gpu=next(iter(rows.values()))["gpu"],
                commit=" ".join(sorted({r["commit"] for r in rows.values()})),
            )
        )
    return found


def errors_pct(model: CostModel, measured: Sequence[tuple[Tensor, float]]) -> list[float]:
    """|predicted - measured| / measured of each batch, in percent."""
    return [100 * abs(model.of_lengths(x).item() - us) / us for x, us in measured]


def write(path: Path, rows: Sequence[KernelCost]) -> None:
    """As CSV, four significant figures; the last column is the command."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*asdict(rows[0]), "command"], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            figures = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in asdict(row).items()}
            writer.writerow({**figures, "command": f"python -m gemworks.gem.ladder.kernel_costs {path.parent}"})


def main(argv: Sequence[str] | None = None) -> int:
    """Fits and writes beside the rows."""
    parser = argparse.ArgumentParser(prog="python -m gemworks.gem.ladder.kernel_costs", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="with jagged_h200.csv; cost_model_h200.csv is written there")
    folder = parser.parse_args(argv).folder
    if not (folder / "jagged_h200.csv").is_file():
        parser.error(f"no jagged_h200.csv in {folder}")
    rows = kernel_costs(folder / "jagged_h200.csv")
    write(folder / "cost_model_h200.csv", rows)
    for r in rows:
        print(
            f"{r.op} {r.head_dim} {r.direction}: {r.linear:.3g} us a token, {r.quadratic:.3g} us a token squared, "
            f"{r.num_rows} rows, off by {r.median_error_pct:.1f} % (worst {r.worst_error_pct:.1f} %); unseen batches "
            f"{r.unseen_median_error_pct:.1f} % (worst {r.unseen_worst_error_pct:.1f} %)"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
