"""Dimensions of different views in pairs, and all five at once, against one process; a checkpoint resharded to another
plan and continued; a rank that dies."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gemworks.parallel import ParallelPlan, build_meshes, presets
from gemworks.parallel.collective_log import CollectiveLog, find_order_conflict
from gemworks.parallel.embeddings import FullyShardedEmbeddings, default_rows
from gemworks.parallel.experts import EnsembleExperts
from gemworks.parallel.fsdp import FsdpPolicy, apply_fsdp
from gemworks.parallel.heartbeat import Heartbeat, RankFailure
from gemworks.parallel.sparse_optim import RowSGD
from parallel_spawn import spawn
from test_parallel_embeddings import FEATURES, TABLES, _plain_forward, batch_of
from test_parallel_experts import Block, D, full, make_expert
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

LR = 0.002


class Five(nn.Module):
    """Embeddings -> dense -> experts beside dense -> dense -> one number per sample."""

    def __init__(self, group=None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bottom = nn.Linear(4 + 4 + 6, D)
        self.first = Block()
        self.second = Block()
        self.experts = EnsembleExperts(make_expert, 4, group)

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        # The unpooled rows join through their sum, so every feature gets a gradient.
        x = torch.cat([rows["shown"], rows["who"], rows["what"]], dim=1)
        h = self.bottom(x) + rows["clicked"].sum() * 0.01
        sent = self.experts.start(h)
        a = self.first(h)
        back = self.experts.run(sent)
        b = self.second(a)
        return (b + self.experts.finish(back)).sum(-1)


def loss_of(y: Tensor) -> Tensor:
    return (y - 0.3).pow(2).mean()


def reference(first_world: int, steps: int, second_world: int, more: int):
    model = Five()
    opt = torch.optim.SGD(model.parameters(), lr=LR)
    tables = {t.name: default_rows(t, range(t.num_rows), 0).requires_grad_() for t in TABLES}
    losses, grads = [], {}
    for step in range(steps + more):
        world = first_world if step < steps else second_world
        opt.zero_grad()
        loss = torch.stack([loss_of(model(_plain_forward(tables, batch_of(r, step)))) for r in range(world)]).mean()
        loss.backward()
        if step == 0:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        opt.step()
        with torch.no_grad():
            for w in tables.values():
                assert w.grad is not None
                w -= LR * w.grad
                w.grad = None
        losses.append(float(loss.detach()))
    params = {n: p.detach() for n, p in model.named_parameters()}
    return losses, params, {n: w.detach() for n, w in tables.items()}, grads


def _run(
    rank: int, world: int, plan_args: dict, first: int, steps: int, load_from: str, save_to: str
) -> dict[str, Any]:
    plan = ParallelPlan.for_world(world, **plan_args)
    meshes = build_meshes(plan, presets.h200_host(world))
    emb = FullyShardedEmbeddings(TABLES, FEATURES, meshes, RowSGD(lr=LR), seed=0 if not load_from else 9)
    model = Five(meshes.group("experts", "expert"))
    apply_fsdp(model, meshes, ["bottom", "first", "second"], FsdpPolicy(min_shard_numel=12))
    opt = torch.optim.SGD(model.parameters(), lr=LR)

    def content() -> dict[str, Any]:
        return {"model": model.state_dict(), "tables": emb.checkpoint(), "step": torch.tensor(first)}

    if load_from:
        state = content()
        load(state, checkpoint_id=load_from)
        model.load_state_dict(state["model"])
        assert int(state["step"]) == first
    losses, grads, log = [], {}, CollectiveLog()
    for step in range(first, first + steps):
        opt.zero_grad()
        with log:
            emb.prefetch()
            y = model(emb(batch_of(rank, step)))
            loss = emb.gather_in_backward_of(loss_of(y))
            loss.backward()
        if step == 0:
            grads = {n: full(p.grad).numpy() for n, p in model.named_parameters() if p.grad is not None}
        opt.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    if save_to:
        state = content()
        state["step"] = torch.tensor(first + steps)
        save(state, checkpoint_id=save_to)
    return {
        "losses": losses,
        "grads": grads,
        "params": {n: full(p).numpy() for n, p in model.named_parameters()},
        "tables": {t.name: emb.full_table(t.name).numpy() for t in TABLES},
        "events": log.events,
        "communicators": (meshes.num_communicators, len(meshes.layout.used_axes())),
    }


def _compare_gradients(results: list[dict], grads: dict[str, Tensor]) -> None:
    assert set().union(*[r["grads"] for r in results]) == set(grads)  # a rank has those of its own experts
    for r in results:
        assert set(r["grads"]) == set(r["params"])
        for n, g in r["grads"].items():
            torch.testing.assert_close(torch.from_numpy(g), grads[n], rtol=2e-4, atol=1e-6, msg=n)


def _compare(results: list[dict], losses: list[float], params: dict[str, Tensor], tables: dict[str, Tensor]) -> None:
    for r in results:
        assert r["losses"] == pytest.approx(losses, rel=1e-4)
        for n, p in r["params"].items():
            torch.testing.assert_close(torch.from_numpy(p), params[n], rtol=5e-4, atol=2e-5, msg=n)
        for n, w in r["tables"].items():
            torch.testing.assert_close(torch.from_numpy(w), tables[n], rtol=5e-4, atol=2e-5, msg=n)
    assert find_order_conflict([r["events"] for r in results]) is None


FOUR = {"shard": 2, "expert": 2, "expert_shard": 1, "table_group": 2, "replica_shard": 2}
OTHER = {"shard": 4, "expert": 1, "expert_shard": 2, "table_group": 4, "replica_shard": 1}
ALONE = {"shard": 1, "expert": 1, "expert_shard": 1, "table_group": 1, "replica_shard": 1}
# what is not named is replicated four times
PAIRS = [
    ALONE | {"shard": 4, "expert": 2},
    ALONE | {"shard": 4, "expert_shard": 2},
    ALONE | {"shard": 2, "table_group": 4},
    ALONE | {"shard": 2, "replica_shard": 4},
    ALONE | {"expert": 2, "table_group": 2},
    ALONE | {"expert": 4, "replica_shard": 2},
    ALONE | {"expert_shard": 2, "table_group": 2},
    ALONE | {"expert_shard": 4, "replica_shard": 2},
]
EIGHT = {"shard": 4, "expert": 2, "expert_shard": 2, "table_group": 2, "replica_shard": 2}


def _one_after_the_other(rank: int, world: int, plans: list[dict], steps: int) -> list[dict[str, Any]]:
    return [_run(rank, world, plan, 0, steps, "", "") for plan in plans]


@pytest.mark.dist
@pytest.mark.slow
def test_every_pair_of_dimensions_of_different_views_on_four_processes() -> None:
    """Pairs inside a view are in test_parallel_experts and test_parallel_embeddings, each dimension alone too."""
    losses, params, tables, grads = reference(4, 10, 4, 0)
    by_rank = spawn(_one_after_the_other, 4, PAIRS, 10)
    for i in range(len(PAIRS)):
        results = [rank[i] for rank in by_rank]
        _compare_gradients(results, grads)
        _compare(results, losses, params, tables)


@pytest.mark.dist
def test_four_processes_then_another_plan_from_the_checkpoint(tmp_path) -> None:
    folder = str(tmp_path / "ckpt")
    losses, params, tables, grads = reference(4, 6, 4, 4)
    assert losses[9] < 0.8 * losses[0], "the example must learn, or equality says little"
    first = spawn(_run, 4, FOUR, 0, 6, "", folder)
    assert all(r["losses"] == pytest.approx(losses[:6], rel=1e-4) for r in first)
    _compare_gradients(first, grads)
    _compare(spawn(_run, 4, OTHER, 6, 4, folder, ""), losses[6:], params, tables)


@pytest.mark.dist
@pytest.mark.slow
def test_m8_eight_processes_all_five_dimensions_then_four_from_the_checkpoint(tmp_path) -> None:
    """All five dimensions with replicas of everything; M8: fewer groups than axes."""
    folder = str(tmp_path / "ckpt")
    losses, params, tables, grads = reference(8, 10, 4, 3)
    first = spawn(_run, 8, EIGHT, 0, 10, "", folder)
    assert all(r["losses"] == pytest.approx(losses[:10], rel=1e-4) for r in first)
    _compare_gradients(first, grads)
    _compare(first, *reference(8, 10, 4, 0)[:3])
    made, axes = first[0]["communicators"]
    assert axes == 8
    assert made < axes
    _compare(spawn(_run, 4, OTHER, 10, 3, folder, ""), losses[10:], params, tables)


def _death(rank: int, world: int) -> tuple[str, tuple[int, ...], float]:
    store = dist.distributed_c10d.PrefixStore("heart", dist.distributed_c10d._get_default_store())
    with Heartbeat(store, rank, world, interval_s=0.1, patience=30) as beat:  # a busy machine skips beats
        dist.barrier()
        if rank == 2:
            os._exit(0)
        start = time.monotonic()
        try:
            with beat.guard("step 3"):
                dist.all_reduce(torch.ones(10))
        except RankFailure as error:
            return str(error), error.ranks, time.monotonic() - start
    return "", (), 0.0


def _death_entry(rank: int, world: int) -> tuple[str, tuple[int, ...], float]:
    result = _death(rank, world)
    # The world is broken: leave without the goodbye barrier of the launcher.
    dist.barrier = lambda *a, **k: None  # type: ignore[assignment]
    dist.destroy_process_group = lambda *a, **k: None  # type: ignore[assignment]
    return result


def test_who_looks_for_silent_ranks_does_not_count_itself() -> None:
    """It is alive, whether its own beats arrive in time or not."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    assert Heartbeat(store, 0, 2, interval_s=0.001).silent_ranks() == (1,)  # neither of them beats


@pytest.mark.dist
def test_a_rank_that_dies_is_named_by_the_others_and_nobody_hangs() -> None:
    results = spawn(_death_entry, 3, expect_dead=(2,))
    for message, ranks, seconds in results:
        assert ranks == (2,)
        assert message == "step 3: a collective failed; ranks [2] stopped"
        assert seconds < 50  # the time-out is 60
