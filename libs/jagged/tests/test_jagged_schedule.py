"""The schedules' custom ops on a CPU: registered soundly, and built inside of a compiled step."""

from __future__ import annotations

import pytest
import torch
from gemworks.jagged import BlockSchedule, TileSchedule, offsets_from_lengths
from gemworks.jagged import schedule_op as op
from gemworks.jagged.ops.block_attention import schedule as blocks
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("kind", ["self", "fixed", "shared"])
def test_ops_are_registered_soundly(kind: str) -> None:
    offsets = offsets_from_lengths(torch.tensor([3, 0, 17]))
    q, k = (None if kind == "shared" else offsets), (None if kind == "fixed" else offsets)
    torch.library.opcheck(
        op.tile_schedule.overload, (q, k, 3, 22, 40, 64 if q is None else -1, 9 if k is None else -1, "q128 k64")
    )
    torch.library.opcheck(blocks.block_schedule.overload, (offsets, 22, 32, 32))


def test_schedules_inside_a_compiled_step_j7() -> None:
    """J7: one graph for every number of sequences and rows, equal to eager."""
    counter = CompileCounterWithBackend("aot_eager")

    def step(x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        tiles = TileSchedule.build(offsets, total_q=x.shape[0], rows_k=40)
        table = BlockSchedule.make(offsets, total=x.shape[0], block=32).table_S3
        return (*(t + 0 for t in tiles.tensors), tiles.with_height("k64", 999).tensors[-1] + 0, table + 0)

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ([3, 0, 17], [200, 2, 5, 77], [1, 1, 60, 4, 9]):
        x, offsets = torch.zeros(sum(lengths) + 2, 7), offsets_from_lengths(torch.tensor(lengths))
        for got, expected in zip(compiled(x, offsets), step(x, offsets), strict=True):
            assert torch.equal(got, expected)
    assert counter.frame_count == 1
