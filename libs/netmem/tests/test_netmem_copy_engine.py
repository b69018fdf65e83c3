"""The copy-engine all-gather: its protocol on a simulated symmetric memory, the fallback under FSDP2, the trace
check.
"""

from __future__ import annotations

import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gemworks.netmem.copy_engine import (
    CopyEngineAllGather,
    CopyEngineReduceScatter,
    FallbackAllGather,
    copy_engine_all_gather,
    copy_engine_problem,
    copy_engine_reduce_scatter,
    few_ctas_options,
    verify_copy_engines,
)
from gemworks.netmem.errors import CollectiveTimeoutError
from gemworks.netmem.symmetric import _TorchSymmetricMemory, _Watch, wait_for_all
from netmem_ranks import run_ranks as run_processes
from netmem_simulated_memory import CPU, Rank, Shared, run_ranks
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  # its stub does not export it

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_gets_every_shard_over_many_calls_and_sizes(world):
    def work(rank: int, shared: Shared, me: Any) -> None:
        comm = CopyEngineAllGather(me, CPU, num_buffers=2, memory=me)
        for call in range(12):
            n = (5, 8, 0)[call % 3]
            out = comm.allocate((world * n,), dtype=torch.float32, device=CPU)
            own = out[rank * n : (rank + 1) * n]
            own.fill_(100 * call + rank)  # FSDP2's copy-in
            assert comm(out, own, me, async_op=True) is None
            assert out.tolist() == [100 * call + r for r in range(world) for _ in range(n)]
            shared.barrier.wait()
            del out, own

    run_ranks(world, work)


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_gets_its_part_of_the_sum(world, op):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(world * 6, generator=generator).bfloat16() for _ in range(world)]
    exact = torch.stack(inputs).float().sum(0) / (world if op == dist.ReduceOp.AVG else 1)

    def work(rank: int, shared: Shared, me: Any) -> None:
        comm = CopyEngineReduceScatter(me, CPU, num_buffers=2, memory=me)
        kept = []
        for call in range(7):
            n = (6, 0)[call % 2]
            source = comm.allocate((world * n,), dtype=torch.bfloat16, device=CPU)
            out = comm.allocate((n,), dtype=torch.bfloat16, device=CPU)
            out.fill_(float("nan"))
            source.copy_(inputs[rank][: world * n] * (call + 1))
            assert comm(out, source, me, op) is None
            kept.append(out)  # FSDP2 keeps gradients: they must not come from a ring
            if n:
                expected = exact[rank * n : (rank + 1) * n] * (call + 1)
                torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
            del source

    run_ranks(world, work)


def test_reduce_scatter_refuses_what_it_cannot_add():
    me: Any = Rank(Shared(1), 0)
    comm = CopyEngineReduceScatter(me, CPU, memory=me)
    source = comm.allocate((4,), dtype=torch.float32, device=CPU)
    out = comm.allocate((4,), dtype=torch.float32, device=CPU)
    with pytest.raises(ValueError, match=r"SUM or ReduceOp\.AVG"):
        comm(out, source, me, dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="expected 3"):
        comm(out[:3], source, me, dist.ReduceOp.SUM)
    with pytest.raises(ValueError, match="fully_shard"):
        copy_engine_reduce_scatter(nn.Linear(2, 2))


def test_a_buffer_in_use_is_never_handed_out_again():
    me: Any = Rank(Shared(1), 0)
    comm = CopyEngineAllGather(me, CPU, num_buffers=2, memory=me)
    held = [comm.allocate((4,), dtype=torch.bfloat16, device=CPU) for _ in range(2)]
    with pytest.raises(RuntimeError, match="num_buffers"):
        comm.allocate((4,), dtype=torch.bfloat16, device=CPU)
    del held
    comm.allocate((4,), dtype=torch.bfloat16, device=CPU)
    held = [comm.allocate((4,), dtype=torch.bfloat16, device=CPU) for _ in range(2)]  # in turn, not the first one again
    assert held[0].data_ptr() != held[1].data_ptr()
    del held
    with pytest.raises(ValueError, match="allocate"):
        comm(torch.zeros(4), torch.zeros(4), me)
    out = comm.allocate((4,), dtype=torch.float32, device=CPU)
    with pytest.raises(ValueError, match="expected 3"):
        comm(out, torch.zeros(3), me)


@pytest.mark.dist
# single-process groups make torch warn about devices and about its own deprecated names
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_fsdp2_falls_back_loudly_and_trains_the_same(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        losses = []
        for custom in (False, True):
            torch.manual_seed(0)
            mesh = init_device_mesh("cpu", (1,))
            model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
            if custom:
                with pytest.warns(RuntimeWarning, match="copy engines are a GPU's"):
                    comm = copy_engine_all_gather(model)
                with pytest.warns(RuntimeWarning, match="reduce-scatter is off"):
                    assert copy_engine_reduce_scatter(model) is None
                assert isinstance(comm, FallbackAllGather)
                assert "cpu" in comm.reason
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        comm = FallbackAllGather("test")
        out = comm.allocate((6,), dtype=torch.float32, device=CPU)
        assert dist.group.WORLD is not None
        comm(out, torch.arange(6.0), dist.group.WORLD)
        assert out.tolist() == [0, 1, 2, 3, 4, 5]
        assert copy_engine_problem(dist.group.WORLD, CPU) is not None
    finally:
        dist.destroy_process_group()


def check_capability(rank: int, world: int) -> None:
    """Two ranks of a machine that says it has GPUs: what they see of each other decides, on both alike."""
    group, host, access = dist.group.WORLD, ["one"] * world, [True]
    assert group is not None
    visible: list[list[str]] = [["a", "b"]] * world
    places = list(range(world))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_nccl_available", lambda: True)
        patch.setattr("socket.gethostname", lambda: host[rank])
        patch.setattr(torch.cuda, "device_count", lambda: len(visible[rank]))
        patch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=visible[rank][i]))
        patch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: access[0])

        def problem() -> str:
            return copy_engine_problem(group, torch.device("cuda", places[rank])) or "none"

        assert problem() == "none"
        host[1] = "two"  # as many GPUs visible as there are ranks
        assert problem() == "the group's 2 ranks are on 2 hosts, RDMA is not built"
        host[1] = "one"
        access[0] = rank == 0  # only one rank finds it out
        assert problem() == "GPU 1 can't access the memory of GPUs [0]"
        access[0] = True
        places[1] = 0
        assert problem() == "ranks share a GPU: 2 ranks on 1"
        places[1] = 1
        visible[1], places[1] = ["b"], 0
        assert problem() == "rank 1 does not see GPUs ['a'] of other ranks (CUDA_VISIBLE_DEVICES?)"
        visible[0] = ["a"]
        assert problem().startswith("rank 0 does not see GPUs ['b']")


@pytest.mark.dist
def test_ranks_compare_hosts_and_gpus_and_agree(tmp_path):
    run_processes(2, check_capability, str(tmp_path / "rendezvous"))


def test_a_model_without_fsdp2_is_a_value_error():
    with pytest.raises(ValueError, match="fully_shard"):
        copy_engine_all_gather(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="max_ctas"):
        few_ctas_options(0)


def event(cat, name, start, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": dur, "args": {"device": 0, "stream": 20, **args}}


def test_the_trace_check():
    events = [
        event("kernel", "barrier_kernel", 0, 2, grid=[1, 1, 1]),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 2, 50, bytes=1000),
        event("kernel", "barrier_kernel", 52, 2, grid=[1, 1, 1]),
        event("kernel", "void at::native::split_with_sizes_copy_out", 60, 7, grid=[64, 1, 1]),
    ]
    check = verify_copy_engines({"traceEvents": events})
    assert check.ok
    assert (check.peer_copies, check.peer_bytes, check.barrier_us, check.fsdp_copy_us) == (1, 1000, 4, 7)
    nccl = event("kernel", "ncclDevKernel_AllGather_RING_LL", 0, 50, grid=[24, 1, 1])
    bad = verify_copy_engines({"traceEvents": [*events, nccl]})
    assert not bad.ok
    assert bad.sm_kernels == {"ncclDevKernel_AllGather_RING_LL": 24}
    assert not verify_copy_engines({"traceEvents": [event("kernel", "gemm", 0, 1, grid=[9, 1, 1])]}).ok


def test_importing_everything_touches_no_gpu():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import gemworks.netmem

        for name in gemworks.netmem.__all__:
            assert getattr(gemworks.netmem, name) is not None
    assert not torch.cuda.is_initialized()


def test_nobody_goes_on_before_all_have_come():
    store, order = HashStore(), []

    def come(rank: int, late_s: float) -> None:
        time.sleep(late_s)
        order.append("came")
        wait_for_all(store, "first", 3)
        order.append("went")

    ranks = [threading.Thread(target=come, args=(rank, 0.05 * rank)) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert order == ["came"] * 3 + ["went"] * 3
    with pytest.raises(CollectiveTimeoutError, match="second: 1 of 2 ranks came"):
        wait_for_all(store, "second", 2, timeout_s=0.02)


@pytest.mark.parametrize("late_s", [0.0, 0.3])
def test_who_comes_after_a_time_out_does_not_go_on_alone(late_s):
    store, went = HashStore(), []

    def come(rank: int) -> None:
        time.sleep(late_s * rank)
        try:
            wait_for_all(store, "late", 2, timeout_s=0.1)
            went.append(rank)
        except CollectiveTimeoutError as error:
            assert "1 of 2 ranks" in str(error)  # noqa: PT017 - not in the test's own thread

    ranks = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert sorted(went) == ([] if late_s else [0, 1])
    assert store.add("late", 0) == (0 if late_s else 2)


class PairAlone:
    """A group of two ranks of which one is here."""

    group_name = "pair alone"

    def __init__(self) -> None:
        self._store = HashStore()

    def get_group_store(self) -> HashStore:
        return self._store

    def size(self) -> int:
        return 2


def test_a_rendezvous_that_a_peer_stays_away_from_is_named_in_time():
    memory: Any = _TorchSymmetricMemory(timeout_s=0.05)
    with pytest.raises(
        CollectiveTimeoutError, match=r"rendezvous for 24 bytes begins: 1 of 2 ranks came within 0\.05 s"
    ):
        memory.rendezvous(torch.empty(24, dtype=torch.uint8), PairAlone())


def _stay(rank: int, world: int) -> None:
    time.sleep(30.0 * rank)


def test_a_rank_that_does_not_end_fails_its_test_in_time(tmp_path):
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"ranks \[1\] did not end within 5 s"):
        run_processes(2, _stay, str(tmp_path / "rendezvous"), limit_s=5.0)
    assert time.monotonic() - start < 20.0


class Point:
    """What an event says of the device: over, not over, or lost."""

    def __init__(self, over: bool | Exception) -> None:
        self.over = over

    def query(self) -> bool:
        if isinstance(self.over, Exception):
            raise self.over
        return self.over


def until(condition) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(5e-3)
    return condition()


@pytest.mark.parametrize("last", [False, RuntimeError("launch failure")])
def test_a_collective_that_waits_too_long_is_named(last, caplog):
    me: Any = Rank(Shared(1), 0)
    comm = CopyEngineAllGather(me, CPU, memory=me, timeout_s=0.2)
    comm._watch.issued("rank 0: first", Point(True))
    comm._watch.issued("rank 0: gather number 7", Point(last))
    assert until(lambda: "gather number 7" in caplog.text)  # written after `late` is set
    assert str(last) in caplog.text or last is False
    with pytest.raises(CollectiveTimeoutError, match=r"gather number 7 .*a peer did not come"):
        comm.allocate((4,), dtype=torch.float32, device=CPU)


def test_what_is_over_is_not_named_and_the_watch_rests(caplog):
    watch = _Watch(0.2)
    for _ in range(2):
        watch.issued("gather", Point(True))
        assert until(lambda: watch._thread is None)
    assert watch.late is None
    assert not caplog.records


def test_every_barrier_has_a_time_out():
    me: Any = Rank(Shared(1), 0)
    seen = []

    def barrier_of(comm: Any) -> torch.Tensor:
        x = comm.allocate((4,), dtype=torch.float32, device=CPU).fill_(1.0)
        comm.buffer_of(x).handle.barrier = lambda channel=0, timeout_ms=0: seen.append((channel, timeout_ms))
        return x

    gather = CopyEngineAllGather(me, CPU, memory=me, timeout_s=2.5)
    x = barrier_of(gather)
    gather(x, x, me)
    reduce = CopyEngineReduceScatter(me, CPU, memory=me, timeout_s=2.5)
    reduce(torch.empty(4), barrier_of(reduce), me, dist.ReduceOp.SUM)
    assert seen == [(channel, 2500) for channel in range(4)]
