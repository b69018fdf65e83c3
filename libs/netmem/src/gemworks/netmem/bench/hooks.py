"""What a saved tensor costs the host: microseconds of the engine's hooks, each way.

On a GPU with the copies that they queue, while the device sleeps and nothing is waited for. On a CPU with a mover that
copies nothing: the Python alone. The host pays it once per tensor, ahead of the device, so it lengthens a step only
where the host is not ahead: after a synchronisation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from gemworks.netmem.arena import Fence, PinnedArena
from gemworks.netmem.bench.rows import synchronize
from gemworks.netmem.bench.single import Setup
from gemworks.netmem.movers import CHUNK_BYTES, NOW, InlineMover, Way, mover_for
from gemworks.netmem.offload import OffloadEngine

NUM = 10  # tensors of one node, as a compiled region of the budgets benchmark saves
SMALL_BYTES = 1 << 20


class _NoCopies(InlineMover):
    def copy(self, way: Way, target: torch.Tensor, source: torch.Tensor, after: Sequence[Fence]) -> Fence:
        return NOW


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: Sequence[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*kept)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        assert len(ctx.saved_tensors) == NUM
        return grads[0].clone(), None


def _host_us(engine: OffloadEngine, size_bytes: int, repeats: int) -> tuple[list[float], list[float]]:
    """Sorted microseconds per tensor of forward and of backward; every tensor leaves and comes back."""
    device, forward, backward = engine.device, [], []
    x = torch.ones(1, device=device, requires_grad=True)
    for _ in range(repeats + 2):
        kept = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(NUM)]
        synchronize(device)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda._sleep(20_000_000)
        position, start = engine.position, time.perf_counter()
        with engine.paced(), engine.saving():
            y = _Node.apply(x, kept)
        engine.end_forward(0)
        forward.append((time.perf_counter() - start) / NUM * 1e6)
        del kept
        start = time.perf_counter()
        engine.begin_backward(position, engine.position, 0)
        y.backward()  # type: ignore[union-attr]
        backward.append((time.perf_counter() - start) / NUM * 1e6)
        del y
        engine.synchronize()
    return sorted(forward[2:]), sorted(backward[2:])


def hooks(s: Setup) -> None:
    """Rows by size: kept, sent in one piece, sent in several."""
    on_gpu = s.device.type == "cuda"
    large_bytes = 4 * CHUNK_BYTES if on_gpu and not s.smoke else SMALL_BYTES
    cases = [("kept", SMALL_BYTES, 2 * SMALL_BYTES), ("sent in 1 piece", SMALL_BYTES, 1)]
    if large_bytes > SMALL_BYTES:
        cases.append((f"sent in {large_bytes // CHUNK_BYTES} pieces", large_bytes, 1))
    for name, size_bytes, min_bytes in cases:
        engine = OffloadEngine(
            PinnedArena(2 * NUM * size_bytes, pin=on_gpu),
            device=s.device,
            window_bytes=NUM * size_bytes,
            min_bytes=min_bytes,
            mover=mover_for(s.device) if on_gpu else _NoCopies(),
        )
        forward, backward = _host_us(engine, size_bytes, s.repeats)
        assert engine.stats().num_moved == (0 if name == "kept" else NUM * (len(forward) + 2)), engine.stats()
        found = [statistics.median(us) for us in (forward, backward)]
        both = sorted(f + b for f, b in zip(forward, backward, strict=True))
        s.rows.add(
            "hooks",
            shape=f"{NUM}x{size_bytes}B",
            setting=f"{name}: host us per tensor {found[0]:.1f} forward, {found[1]:.1f} backward"
            + ("" if on_gpu else ", no copies"),
            ms=sum(found) / 1e3,
            ms_p20=both[round(0.2 * (len(both) - 1))] / 1e3,
            ms_p80=both[round(0.8 * (len(both) - 1))] / 1e3,
        )
