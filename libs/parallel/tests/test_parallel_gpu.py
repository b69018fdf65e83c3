"""Two GPUs: FSDP2, expert parallelism and fully sharded tables against one process on one GPU.

One pair of processes runs all cases (starting CUDA and NCCL takes longer than they do); each test looks at its part.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.parallel import ParallelPlan, build_meshes, presets
from gemworks.parallel.collective_log import CollectiveLog, find_order_conflict
from gemworks.parallel.embeddings import FullyShardedEmbeddings
from gemworks.parallel.exposed import traced
from gemworks.parallel.fsdp import FsdpPolicy, apply_fsdp
from gemworks.parallel.sparse_optim import RowSGD, RowWiseAdagrad
from gemworks.parallel.stacks import Stack, on_device
from parallel_spawn import spawn
from test_parallel_embeddings import FEATURES, TABLES, batch_of
from test_parallel_embeddings import loss_of as table_loss
from test_parallel_embeddings import reference as table_reference
from test_parallel_experts import Model, batches, full
from test_parallel_experts import loss_of as expert_loss
from torch import Tensor

pytestmark = pytest.mark.gpu
STEPS, LR = 10, 0.002
TABLE_PLANS = {
    "groups": {"table_group": 2, "replica_shard": 1},
    "sharded replicas": {"table_group": 1, "replica_shard": 2},
    "whole replicas": {"table_group": 1, "replica_shard": 1},
}
EXPERT_CASES = ("equal", "rank 0 empty", "all empty", "ragged")


def _fsdp(rank: int, world: int, device: torch.device) -> dict[str, Any]:
    def data(step: int, r: int) -> Tensor:
        return torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + r)).to(device)

    torch.manual_seed(0)
    alone = Stack(3, 32).to(device)
    torch.manual_seed(0)
    model = Stack(3, 32).to(device)
    plan = ParallelPlan.for_world(world, shard=world)
    meshes = build_meshes(plan, presets.h200_host(world), device_type=device.type)
    apply_fsdp(model, meshes, [f"blocks.{i}" for i in range(3)], FsdpPolicy())
    log = CollectiveLog()
    losses, want = [], []
    opts = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone)]
    for step in range(STEPS):
        with log:
            loss = model(data(step, rank)).pow(2).mean()
            loss.backward()
        losses.append(float(loss.detach()))
        each = [alone(data(step, r)).pow(2).mean() for r in range(world)]
        torch.stack(each).mean().backward()
        want.append(float(each[rank].detach()))
        for opt in opts:
            opt.step()
            opt.zero_grad()
    worst = max(
        float((full(p).cpu() - q.detach().cpu()).abs().max())
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    )
    return {"losses": losses, "want": want, "worst": worst, "events": log.events}


def _experts(rank: int, world: int, device: torch.device, case: str) -> dict[str, Any]:
    alone = Model().to(device)
    plan = ParallelPlan.for_world(world, shard=1, expert=world)
    meshes = build_meshes(plan, presets.h200_host(world), device_type=device.type)
    model = Model(meshes.group("experts", "expert"), overlap=True).to(device)
    apply_fsdp(model, meshes, ["first", "second"], FsdpPolicy())
    opts = [torch.optim.SGD(m.parameters(), lr=LR) for m in (model, alone)]
    log = CollectiveLog()
    losses, want = [], []
    for step in range(STEPS):
        inputs = [x.to(device) for x in batches(world, step, case)]
        with log:
            loss = expert_loss(model(inputs[rank]))
            loss.backward()
        each = [expert_loss(alone(x)) for x in inputs]
        torch.stack(each).mean().backward()
        losses.append(float(loss.detach()))
        want.append(float(each[rank].detach()))
        for opt in opts:
            opt.step()
            opt.zero_grad()
    reference = dict(alone.named_parameters())
    worst = max(float((full(p) - reference[n].detach()).abs().max()) for n, p in model.named_parameters())
    return {"losses": losses, "want": want, "worst": worst, "events": log.events}


def _tables(rank: int, world: int, device: torch.device, plan_args: dict, optimizer: str) -> dict[str, Any]:
    plan = ParallelPlan.for_world(world, shard=1, **plan_args)
    meshes = build_meshes(plan, presets.h200_host(world), device_type=device.type)
    rule = RowSGD(lr=0.1) if optimizer == "sgd" else RowWiseAdagrad(lr=0.1, eps=1e-6)
    emb = FullyShardedEmbeddings(TABLES, FEATURES, meshes, rule, device=device, seed=0)
    log = CollectiveLog()
    for step in range(6):
        batch = {k: (ids.to(device), offsets.to(device)) for k, (ids, offsets) in batch_of(rank, step).items()}
        with log:
            emb.prefetch()
            out = emb(batch)
            loss = emb.gather_in_backward_of(table_loss(out, step))
            loss.backward()
    return {
        "tables": {t.name: emb.full_table(t.name).numpy() for t in TABLES},
        "events": log.events,
        "stored": emb.stored_bytes(),
    }


def _overlap(rank: int, world: int, device: torch.device) -> dict[str, float]:
    """An FSDP step whose layers are far longer than their gathers: how much of the gathers is exposed."""
    n, width, tokens = 6, 2048, 16384
    torch.manual_seed(0)
    model = on_device(lambda: Stack(n, width), device)
    plan = ParallelPlan.for_world(world, shard=world)
    meshes = build_meshes(plan, presets.h200_host(world), device_type=device.type)
    apply_fsdp(
        model, meshes, [f"blocks.{i}" for i in range(n)], FsdpPolicy(param_dtype=torch.bfloat16, reduce_dtype=None)
    )
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)

    def step() -> None:
        model(x).float().pow(2).mean().backward()
        model.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    found = traced(step)["all_gather"]
    return {"calls": found.calls, "ms": found.ms, "exposed_ms": found.exposed_ms}


def _all(rank: int, world: int, kind: str) -> dict[str, Any]:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    found: dict[str, Any] = {"fsdp": _fsdp(rank, world, device)}
    for case in EXPERT_CASES:
        found[f"experts {case}"] = _experts(rank, world, device, case)
    for name, args in TABLE_PLANS.items():
        for optimizer in ("sgd", "adagrad"):
            found[f"tables {name} {optimizer}"] = _tables(rank, world, device, args, optimizer)
    if kind == "cuda":
        found["overlap"] = _overlap(rank, world, device)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return spawn(_all, 2, "cuda", backend="nccl", timeout_s=100)


def _same(results: list[dict[str, Any]], name: str, tolerance: float) -> None:
    for r in results:
        assert r[name]["losses"] == pytest.approx(r[name]["want"], rel=1e-4, abs=1e-5)
        assert r[name]["worst"] < tolerance
    assert find_order_conflict([r[name]["events"] for r in results]) is None


def test_fsdp2_equals_one_gpu_after_ten_steps(results) -> None:
    _same(results, "fsdp", 1e-4)
    losses = results[0]["fsdp"]["losses"]
    assert losses[-1] != losses[0]


@pytest.mark.parametrize("case", EXPERT_CASES)
def test_m2_m3_experts_equal_one_gpu_also_with_empty_ranks(results, case: str) -> None:
    """M3: gradients are not doubled; M2: ranks without rows take part."""
    _same(results, f"experts {case}", 1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("name", list(TABLE_PLANS))
def test_tables_equal_one_process(results, name: str, optimizer: str) -> None:
    plan = ParallelPlan.for_world(2, shard=1, **TABLE_PLANS[name])
    _, tables, _ = table_reference(plan, 6, optimizer)
    for r in results:
        for table, w in r[f"tables {name} {optimizer}"]["tables"].items():
            torch.testing.assert_close(torch.from_numpy(w), tables[table], rtol=1e-4, atol=1e-5)
    assert find_order_conflict([r[f"tables {name} {optimizer}"]["events"] for r in results]) is None


def test_sharded_replicas_store_half(results) -> None:
    whole, half = (results[0][f"tables {n} sgd"]["stored"] for n in ("whole replicas", "sharded replicas"))
    assert half == pytest.approx(whole / 2, rel=0.1)


def test_most_of_the_gathers_hide_behind_long_layers(results) -> None:
    for r in results:
        found = r["overlap"]
        assert found["calls"] >= 6
        assert found["exposed_ms"] < 0.6 * found["ms"]
