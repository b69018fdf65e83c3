"""The kernels of the schedules on a GPU against their definitions in PyTorch."""

from __future__ import annotations

import pytest
import torch
from gemworks.jagged import BlockSchedule, TileSchedule, offsets_from_lengths
from gemworks.jagged import schedule_op as op
from gemworks.jagged.ops.block_attention import schedule as blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
LENGTHS = {
    "uniform": torch.randint(0, 1025, (256,), generator=torch.Generator().manual_seed(1)),
    "many": torch.randint(0, 300, (5000,), generator=torch.Generator().manual_seed(2)),
    "giant": torch.tensor([0, 300_000, 1, 0, 129]),
    "empty": torch.zeros(3, dtype=torch.int64),
    "nothing": torch.zeros(0, dtype=torch.int64),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", LENGTHS)
def test_kernels_equal_their_definitions_j6(name: str, dtype: torch.dtype) -> None:
    """J6: bit-equal, garbage in the memory that the kernel fills included."""
    lengths = LENGTHS[name]
    q = offsets_from_lengths(lengths).to(dtype)
    k = offsets_from_lengths(lengths.flip(0)).to(dtype)
    b, total = len(lengths), int(q[-1]) + 70
    for args in (
        (q, q, b, total, total, -1, -1),
        (q, k, b, total, total, -1, -1),
        (q, None, b, total, 256 * b, -1, 256),
        (None, k, b, 64 * b, total, 64, -1),
    ):
        truth = op.tile_schedule(*args, "q128 q192 k128 k64")
        junk = torch.full_like(truth, -7, device="cuda")
        del junk
        on_device = [x.cuda() if isinstance(x, torch.Tensor) else x for x in args]
        assert torch.equal(op.tile_schedule(*on_device, "q128 q192 k128 k64").cpu(), truth)
    for block, limit in ((32, 32), (64, 7), (128, 128)):
        truth = blocks.block_schedule(q, total, block, limit)
        assert torch.equal(blocks.block_schedule(q.cuda(), total, block, limit).cpu(), truth)


def test_no_host_sync_and_one_binary_j9_t1() -> None:
    """J9, T1: nothing waits for the device, and other batches compile nothing anew."""
    from gemworks.jagged._triton.kernel_schedule import block_schedule_kernel, schedule_kernel

    def build(seed: int, batch: int) -> None:
        lengths = torch.randint(0, 999, (batch,), generator=torch.Generator().manual_seed(seed))
        total, offsets = int(lengths.sum()), offsets_from_lengths(lengths).cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            TileSchedule.build(offsets, total_q=total)
            BlockSchedule.make(offsets, total=total)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    build(0, 64)
    kernels = (schedule_kernel, block_schedule_kernel)
    binaries = [len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels]  # pyright: ignore[reportFunctionMemberAccess]
    for seed in range(1, 6):
        build(seed, 60 + 17 * seed)
    assert binaries == [len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels]  # pyright: ignore[reportFunctionMemberAccess]
