"""What racecheck says of two kernels that are known: one without a race, one with one.

    compute-sanitizer --tool racecheck python libs/jagged/tools/racecheck_control.py clean
    compute-sanitizer --tool racecheck python libs/jagged/tools/racecheck_control.py planted

`clean` is the least that the warp-specialised kernels are made of: one warp loads a tile into shared memory, by plain
stores and then by asynchronous copies, and arrives at a barrier; four warps wait there and read. What racecheck reports
of it, it cannot see the order of. `planted` is the same without the waits: it must be reported.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

ROUNDS = 4


@gluon.jit
def _give(x_ptr, smem, full, free, rounds, WAIT: gl.constexpr):
    at = gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [1], [0]))
    for i in range(rounds):
        if WAIT:  # readers that do not wait arrive twice before this looks, and it would wait for good
            mbarrier.wait(free, (i & 1) ^ 1)
        smem.index(0).store(gl.load(x_ptr + i * 128 + at))
        async_copy.async_copy_global_to_shared(smem.index(1), x_ptr + i * 128 + at)
        async_copy.mbarrier_arrive(full)  # counts itself in
        mbarrier.arrive(full, count=1)


@gluon.jit
def _take(y_ptr, smem, full, free, rounds, WAIT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])  # pyright: ignore[reportAssignmentType]
    at = gl.arange(0, 128, layout=layout)
    for i in range(rounds):
        if WAIT:
            mbarrier.wait(full, i & 1)
        y = smem.index(0).load(layout) + smem.index(1).load(layout)
        mbarrier.arrive(free, count=1)
        gl.store(y_ptr + i * 128 + at, y)


@gluon.jit
def handover_kernel(x_ptr, y_ptr, rounds, WAIT: gl.constexpr):
    smem = gl.allocate_shared_memory(gl.float32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(_take, (y_ptr, smem, full, free, rounds, WAIT)), (_give, (x_ptr, smem, full, free, rounds, WAIT))], [1], [24]
    )


def main() -> int:
    wait = {"clean": True, "planted": False}[sys.argv[1] if len(sys.argv) > 1 else "clean"]
    x = torch.arange(ROUNDS * 128, device="cuda", dtype=torch.float32)
    y = torch.empty_like(x)
    kernel: Any = handover_kernel
    kernel[(4,)](x, y, ROUNDS, WAIT=wait, num_warps=4)
    right = torch.equal(y, 2 * x)
    print(f"{'right' if right else 'wrong'} result", flush=True)
    return 0 if right or not wait else 1


if __name__ == "__main__":
    sys.exit(main())
