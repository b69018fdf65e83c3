"""The reduction in the switch: its capability check, and the protocol around torch's operator on a simulated memory.

The operator itself was not run: it needs multicast.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gemworks.netmem import in_network
from gemworks.netmem.in_network import InNetworkReduceScatter, in_network_problem
from netmem_simulated_memory import CPU, Shared, run_ranks

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_root_gets_its_part(world, op):
    n = 8
    inputs = [torch.randn(world * n, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    exact = torch.stack(inputs).sum(0) / (world if op == dist.ReduceOp.AVG else 1)

    def work(rank: int, shared: Shared, me: Any) -> None:
        def switch(part: torch.Tensor, root: int, group: Any, out: torch.Tensor) -> None:
            mine = next(i for i in range(me.num) if _inside(part, shared.buffers[rank, i]))
            start = (part.data_ptr() - shared.buffers[rank, mine].data_ptr()) // 4
            shared.barrier.wait()
            if rank == root:
                out.zero_()
                for r in range(world):
                    out += shared.buffers[r, mine].view(torch.float32)[start : start + n]
            shared.barrier.wait()

        comm = InNetworkReduceScatter(me, CPU, memory=me, reduce_to=switch)
        for _ in range(3):
            source = comm.allocate((world * n,), dtype=torch.float32, device=CPU)
            out = comm.allocate((n,), dtype=torch.float32, device=CPU)
            source.copy_(inputs[rank])
            comm(out, source, me, op)
            torch.testing.assert_close(out, exact[rank * n : (rank + 1) * n])
            del source

    run_ranks(world, work)


def _inside(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return whole.data_ptr() <= part.data_ptr() < whole.data_ptr() + whole.numel()


def test_what_it_refuses(monkeypatch):
    def work(rank: int, shared: Shared, me: Any) -> None:
        with pytest.raises(RuntimeError, match="use CopyEngineReduceScatter"):
            InNetworkReduceScatter(me, CPU, memory=me)
        comm = InNetworkReduceScatter(me, CPU, memory=me, reduce_to=lambda *a: None)
        source = comm.allocate((4,), dtype=torch.float16, device=CPU)
        out = comm.allocate((4,), dtype=torch.float16, device=CPU)
        with pytest.raises(ValueError, match="bfloat16"):
            comm(out, source, me, dist.ReduceOp.SUM)
        with pytest.raises(ValueError, match="SUM or"):
            comm(out, source, me, dist.ReduceOp.MAX)
        assert "cpu" in str(in_network_problem(me, CPU))
        # a multicast that is switched off is not even asked for
        monkeypatch.setattr(in_network, "copy_engine_problem", lambda *a: None)
        monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        assert "DISABLE_MULTICAST" in str(in_network_problem(me, torch.device("cuda", 0)))

    run_ranks(1, work)
