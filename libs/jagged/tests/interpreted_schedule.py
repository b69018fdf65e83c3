"""The kernels of the schedules under Triton's interpreter against their definitions in PyTorch.

Run by test_jagged_interpret.
"""

from __future__ import annotations

import pytest
import torch
from gemworks.jagged import offsets_from_lengths
from gemworks.jagged import schedule_op as op
from gemworks.jagged.ops.block_attention import schedule as blocks
from torch import Tensor

DEFINITION, BLOCK_DEFINITION = op.tile_schedule_definition, blocks.block_schedule_definition
BATCHES = {
    "mixed": ([3, 0, 700, 1, 128, 129, 0, 127], [5, 4, 0, 5, 300, 64, 65, 5]),
    "equal": ([64] * 5, [32] * 5),
    "empty": ([0, 0, 0], [0, 0, 0]),
    "nothing": ([], []),
    "giant": ([3000, 1], [1, 3000]),
    "many": ([i * 37 % 101 for i in range(40)], [i * 53 % 97 for i in range(40)]),
}


def offsets_of(lengths: list[int], dtype: torch.dtype) -> Tensor:
    return offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64)).to(dtype)


@pytest.mark.parametrize(
    ("batch", "kind", "tail"),
    [("mixed", kind, tail) for kind in ("self", "cross", "fixed", "shared") for tail in (0, 300)]
    + [(batch, "cross", 3) for batch in ("equal", "empty", "nothing", "giant", "many")],
)
def test_kernel_equals_definition_j6(batch: str, kind: str, tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """J6: every tile of every height, in the same order; blocks so small that every loop turns more than once."""
    monkeypatch.setattr(op, "KERNEL_CONFIG", {"R": 4, "J": 16, "M": 8})
    of_q, of_k = BATCHES[batch]
    q, k = offsets_of(of_q, torch.int32), offsets_of(of_q if kind == "self" else of_k, torch.int64)
    b, total_q, total_k = len(of_q), int(q[-1]) + tail, int(k[-1]) + tail
    if kind == "self":
        args = (q, q, b, total_q, total_q, -1, -1)
    elif kind == "cross":
        args = (q, k, b, total_q, total_k, -1, -1)
    elif kind == "fixed":
        args = (q, None, b, total_q, 33 * b, -1, 33)
    else:
        args = (None, k, b, 70 * b, total_k, 70, -1)
    for heights in ("q128 k64", ""):
        assert torch.equal(op.tile_schedule_kernel(*args, heights), DEFINITION(*args, heights))


@pytest.mark.parametrize(("batch", "tail"), [("mixed", 0), ("mixed", 300), ("empty", 3), ("nothing", 70), ("giant", 1)])
def test_block_kernel_equals_definition_j6(batch: str, tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "KERNEL_CONFIG", {"R": 4, "J": 16, "M": 8})
    offsets = offsets_of(BATCHES[batch][0], torch.int64)
    for limit in (64, 5):
        args = (offsets, int(offsets[-1]) + tail, 64, limit)
        assert torch.equal(blocks.block_schedule_on_a_gpu(*args), BLOCK_DEFINITION(*args))
