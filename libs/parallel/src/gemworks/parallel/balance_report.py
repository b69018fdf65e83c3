"""How even ranks are before and after balancing: the table of `python -m gemworks.parallel.bench balance`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from gemworks.parallel.global_balance import global_assignment
from gemworks.parallel.lengths import CostModel, LengthLaw, expected_imbalance, summary
from gemworks.parallel.shuffler import deal
from torch import Tensor

SUB_BATCH = 128


@dataclass(frozen=True, kw_only=True)
class BalanceRow:
    """One law, number of ranks and method; costs are relative to the mean over ranks, averaged over steps.

    `method` is "none", "bbs" or "global"; `expected_max_over_mean` is the order statistic of independent normal costs
    (for "none" only). `gain` is the share of the excess over 1 that the method removes.
    """

    law: str
    num_ranks: int
    method: str
    max_over_mean: float
    p99_over_mean: float
    p50_over_mean: float
    min_over_mean: float
    expected_max_over_mean: float | None
    gain: float


def simulate_bbs(costs_RS: Tensor, per_batch: int, align: bool = True) -> Tensor:
    """Batch costs of every rank after BBS over one window.

    Args:
        costs_RS: float [num_ranks, num_sub_batches], the sub-batches of one window.
        per_batch: sub-batches in a batch.
        align: heaviest batch first on every rank.

    Returns:
        float [num_batches, num_ranks].
    """
    num_batches = costs_RS.shape[1] // per_batch
    rows: list[Tensor] = []
    for costs in costs_RS:
        load = torch.zeros(num_batches, dtype=costs.dtype).index_add_(0, deal(costs, num_batches), costs)
        rows.append(load.sort(descending=True).values if align else load)
    return torch.stack(rows, dim=1)


def balance_rows(
    law: LengthLaw,
    num_ranks: int,
    *,
    cost: CostModel,
    per_batch: int = 8,
    batches_per_window: int = 16,
    seed: int = 0,
) -> list[BalanceRow]:
    """One window of `batches_per_window` steps on `num_ranks` ranks, by each method.

    Args:
        law: of lengths; samples are independent.
        num_ranks: ranks.
        cost: of a batch.
        per_batch: sub-batches of 128 samples in a batch.
        batches_per_window: of BBS.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    subs = per_batch * batches_per_window
    costs_RS = torch.stack([cost.of_lengths(law.sample((subs, SUB_BATCH), generator)) for _ in range(num_ranks)])
    by_step = costs_RS.reshape(num_ranks, batches_per_window, per_batch)
    plain = by_step.sum(dim=2).T.contiguous()
    moved = torch.stack(
        [
            torch.zeros(num_ranks, dtype=torch.float64).index_add_(
                0, global_assignment(by_step[:, i]).reshape(-1), by_step[:, i].reshape(-1)
            )
            for i in range(batches_per_window)
        ]
    )
    mean, std = cost.mean_and_std(law, per_batch * SUB_BATCH)
    expected = expected_imbalance(mean, std, num_ranks)
    excess = summary(plain)["max_over_mean"] - 1
    rows: list[BalanceRow] = []
    for method, costs in (("none", plain), ("bbs", simulate_bbs(costs_RS, per_batch)), ("global", moved)):
        s = summary(costs)
        rows.append(
            BalanceRow(
                law=law_name(law),
                num_ranks=num_ranks,
                method=method,
                expected_max_over_mean=expected if method == "none" else None,
                gain=1 - (s["max_over_mean"] - 1) / excess if excess > 0 else 0.0,
                **s,
            )
        )
    return rows


def law_name(law: LengthLaw) -> str:
    """A short name for tables."""
    return f"{law.name}[{law.low},{law.max_len}]" + (f"^{law.exponent:g}" if law.name == "zipf" else "")


def to_csv(rows: Sequence[BalanceRow], same: Mapping[str, str] | None = None) -> str:
    """The rows as CSV with a header.

    Args:
        rows: of one run.
        same: column -> value of further columns, the same in every row: commit, command.
    """
    out = io.StringIO()
    same = same or {}
    writer = csv.DictWriter(out, fieldnames=[*asdict(rows[0]), *same], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = {k: f"{v:.4f}" if isinstance(v, float) else "" if v is None else v for k, v in asdict(row).items()}
        writer.writerow(values | dict(same))
    return out.getvalue()
