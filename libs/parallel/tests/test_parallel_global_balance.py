"""Moving samples between gloo processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gemworks.parallel.global_balance import exchange_samples, global_assignment
from parallel_spawn import spawn


def _exchange(rank: int, world: int, case: str) -> dict:
    g = torch.Generator().manual_seed(rank)
    B = 6
    lengths = torch.randint(0, 9, (B,), generator=g)
    if case == "rank 1 empty" and rank == 1:
        lengths.zero_()
    if case == "all empty":
        lengths.zero_()
    ids = torch.arange(B) + 100 * rank
    rows = torch.repeat_interleave(ids, lengths)
    values = torch.stack([rows.float(), torch.arange(rows.numel()).float()], dim=1)
    before = float(lengths.sum())
    (moved, again), new = exchange_samples([values, rows], lengths, lengths.double())
    assert torch.equal(moved[:, 0].long(), again)
    after = torch.tensor([float(new.sum()), before])
    everyone = [torch.empty(2) for _ in range(world)]
    dist.all_gather(everyone, after)
    samples = [x.tolist() for x in moved.split(new.tolist())]
    return {
        "samples": samples,
        "loads": torch.stack(everyone).tolist(),
        "sent": [x.tolist() for x in values.split(lengths.tolist())],
    }


@pytest.mark.dist
@pytest.mark.parametrize("case", ["mixed", "rank 1 empty", "all empty"])
def test_m2_samples_stay_whole_and_loads_even_out(case: str) -> None:
    """M2: ranks with no token at all are legal."""
    results = spawn(_exchange, 3, case)
    before = sorted(str(s) for r in results for s in r["sent"])
    after = sorted(str(s) for r in results for s in r["samples"])
    assert before == after
    target_RB = global_assignment(torch.tensor([[float(len(s)) for s in r["sent"]] for r in results]))
    for rank, result in enumerate(results):  # to whom they were assigned, by source and then by place there
        assigned = [
            sample
            for source, targets in zip(results, target_RB.tolist(), strict=True)
            for sample, target in zip(source["sent"], targets, strict=True)
            if target == rank
        ]
        assert result["samples"] == assigned
    loads = results[0]["loads"]
    assert max(a for a, _ in loads) - min(a for a, _ in loads) <= 8
    if case == "rank 1 empty":
        assert loads[1][1] == 0
        assert loads[1][0] > 0


def _wrong(rank: int, world: int) -> list[str]:
    lengths, costs = torch.tensor([1, 2]), torch.tensor([1.0, 2.0])
    good, few = torch.ones(3), torch.ones(2)
    found = []
    for values, cost in ((few if rank == 1 else good, costs), (good, costs / 0 if rank == 0 else costs)):
        with pytest.raises(ValueError, match="expected") as caught:
            exchange_samples([values], lengths, cost)
        found.append(str(caught.value))
    exchange_samples([good], lengths, costs)  # nobody waits anywhere: ranks are still in step
    return found


@pytest.mark.dist
def test_samples_that_do_not_fit_on_one_rank_end_the_call_on_all() -> None:
    (first, own), (second, other) = spawn(_wrong, 2)
    assert first.startswith("costs_B: got none from ranks [1]")
    assert second.startswith("values: got shape (2,), expected 3 rows")
    assert own == "costs_B: got a value that is not finite, expected the cost of each sample"
    assert other.startswith("costs_B: got none from ranks [0]")
