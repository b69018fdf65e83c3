"""kill -9 of one of four ranks at some moment of each collective path: the others name it and stop in time; two runs
on one host do not meet."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gemworks.parallel import EnsembleExperts, ParallelPlan, RowWiseAdagrad, apply_fsdp, build_meshes, presets
from gemworks.parallel.embeddings import FullyShardedEmbeddings
from gemworks.parallel.global_balance import exchange_samples
from gemworks.parallel.heartbeat import Heartbeat, RankFailure
from parallel_spawn import spawn
from test_parallel_embeddings import FEATURES, TABLES, batch_of, loss_of
from test_parallel_experts import Block, D, make_expert
from torch import nn

pytestmark = pytest.mark.dist
TIMEOUT_S, DEAD = 10, 2


def experts_step(rank: int, world: int) -> Callable[[], object]:
    plan = ParallelPlan.for_world(world, shard=1, expert=world)
    meshes = build_meshes(plan, presets.h200_host(world), timeout=timedelta(seconds=TIMEOUT_S))
    experts = EnsembleExperts(make_expert, world, meshes.group("experts", "expert"))
    return lambda: experts(torch.ones(rank + 1, D)).sum().backward()


def sharded_step(rank: int, world: int) -> Callable[[], object]:
    plan = ParallelPlan.for_world(world, shard=2)
    meshes = build_meshes(plan, presets.h200_host(world), timeout=timedelta(seconds=TIMEOUT_S))
    model = nn.Sequential(Block(), Block())
    apply_fsdp(model, meshes, ["0", "1"], check=False)
    return lambda: model(torch.ones(rank + 1, D)).sum().backward()


def tables_step(rank: int, world: int) -> Callable[[], object]:
    plan = ParallelPlan.for_world(world, shard=1, table_group=2, replica_shard=2)
    meshes = build_meshes(plan, presets.h200_host(world), timeout=timedelta(seconds=TIMEOUT_S))
    emb = FullyShardedEmbeddings(TABLES, FEATURES, meshes, RowWiseAdagrad(lr=0.1))

    def step() -> None:
        emb.prefetch()
        emb.gather_in_backward_of(loss_of(emb(batch_of(rank, 0)), 0)).backward()

    return step


def balance_step(rank: int, world: int) -> Callable[[], object]:
    lengths = torch.arange(rank, rank + 6)
    values = torch.ones(int(lengths.sum()), 3)
    return lambda: exchange_samples([values], lengths, lengths.double())


STEPS = {"experts": experts_step, "fsdp": sharded_step, "tables": tables_step, "balance": balance_step}


def _killed(rank: int, world: int, path: str) -> tuple[str, tuple[int, ...], float]:
    store = dist.distributed_c10d.PrefixStore("heart", dist.distributed_c10d._get_default_store())
    step = STEPS[path](rank, world)
    with Heartbeat(store, rank, world, interval_s=0.1, patience=30) as beat:  # a busy machine skips beats
        step()
        dist.barrier()
        if rank == DEAD:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        start = time.monotonic()
        found: tuple[str, tuple[int, ...]] = ("", ())
        try:
            with beat.guard("training"):
                while time.monotonic() < start + 60:
                    step()
        except RankFailure as error:
            found = str(error), error.ranks
    # The world is broken: leave without the goodbyes of the launcher.
    dist.barrier = lambda *a, **k: None  # type: ignore[assignment]
    dist.destroy_process_group = lambda *a, **k: None  # type: ignore[assignment]
    return found[0], found[1], time.monotonic() - start


SLOW = ("experts", "fsdp")  # there some ranks wait for the whole time-out


@pytest.mark.parametrize("path", [pytest.param(p, marks=[pytest.mark.slow] * (p in SLOW)) for p in STEPS])
def test_a_killed_rank_is_named_by_all_others_within_the_time_out(path: str) -> None:
    results = spawn(_killed, 4, path, expect_dead=(DEAD,))
    for message, ranks, seconds in results:
        assert message == f"training: a collective failed; ranks [{DEAD}] stopped"
        assert ranks == (DEAD,)
        assert seconds < TIMEOUT_S + 10


def _leaves(rank: int, world: int) -> str:
    store = dist.distributed_c10d.PrefixStore("heart", dist.distributed_c10d._get_default_store())
    try:
        with Heartbeat(store, rank, world, interval_s=0.05, patience=20) as beat, beat.guard("step 7"):
            dist.barrier()
            if rank == 0:
                raise RuntimeError("out of data")
            time.sleep(3)
            raise RuntimeError("a collective that rank 0 did not join")
    except RankFailure as error:
        return str(error)


def test_who_left_by_itself_is_not_called_dead() -> None:
    first, second = spawn(_leaves, 2)
    assert first == "step 7: a collective failed; every rank is alive: ranks disagree on the collective"
    assert second == "step 7: a collective failed; no rank died, but ranks [0] have left"


def test_a_rank_that_goes_on_after_a_failure_can_be_named_dead_later() -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    first, second, third = (Heartbeat(store, r, 3, interval_s=0.01) for r in range(3))  # nobody beats

    def failure(beat: Heartbeat) -> RankFailure:
        with pytest.raises(RankFailure) as caught, beat.guard("step"):
            raise RuntimeError("out of memory")
        return caught.value

    assert (failure(second).ranks, first.left_ranks()) == ((0, 2), (1,))
    assert (failure(first).left, first.left_ranks()) == ((1,), (1, 0))
    again = failure(second)  # it left before the first did; now it has left after it, and does not name itself
    assert (again.left, again.ranks) == ((0,), (2,))
    assert str(again) == "step: a collective failed; ranks [2] stopped"
    with second.guard("step"):
        assert third.left_ranks() == (0,)
    last = failure(third)
    assert (last.ranks, last.left) == ((1,), (0,))


def test_a_store_that_is_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    beat = Heartbeat(store, 0, 1, interval_s=0.001)

    def gone(rank: int) -> int:
        raise dist.DistNetworkError("connection reset")

    monkeypatch.setattr(beat, "beats", gone)
    with pytest.raises(RankFailure, match="the store is gone: its host died or left"), beat.guard("step"):
        raise RuntimeError("a collective")


def _sums(rank: int, world: int, value: float) -> list[float]:
    plan = ParallelPlan.for_world(world, shard=1, table_group=2, expert=2)
    meshes = build_meshes(plan, presets.h200_host(world))
    found: list[Any] = []
    for _ in range(30):
        for group in (None, meshes.group("sparse", "table_group"), meshes.group("dense", "replica")):
            x = torch.full((2,), value)
            dist.all_reduce(x, group=group)
            found.append(float(x[0]))
    return found


def test_two_runs_on_one_host_do_not_meet() -> None:
    """Ports, stores and temporary files are each run's own."""
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(spawn, _sums, 2, value) for value in (1.0, 100.0)]
        for run, value in zip(runs, (1.0, 100.0), strict=True):
            assert run.result() == [[2 * value] * 90] * 2
