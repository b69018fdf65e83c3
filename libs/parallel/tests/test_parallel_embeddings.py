"""Fully sharded embeddings on gloo processes, against one process."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from gemworks.parallel import Layout, ParallelPlan, build_meshes, presets
from gemworks.parallel.collective_log import CollectiveLog, find_order_conflict
from gemworks.parallel.embeddings import FeatureSpec, FullyShardedEmbeddings, default_rows
from gemworks.parallel.sparse_optim import RowSGD, RowWiseAdagrad
from gemworks.parallel.tables import TableSpec
from parallel_spawn import spawn
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

TABLES = [
    TableSpec(name="item", num_rows=37, dim=4, sharding="row_wise"),
    TableSpec(name="user", num_rows=11, dim=4, sharding="table_wise"),
    TableSpec(name="ad", num_rows=19, dim=6, sharding="row_wise"),
]
FEATURES = [
    FeatureSpec(name="clicked", table="item"),
    FeatureSpec(name="shown", table="item", pooling="sum"),
    FeatureSpec(name="who", table="user", pooling="mean"),
    FeatureSpec(name="what", table="ad", pooling="sum"),
]
B = 3


def batch_of(rank: int, step: int, empty: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(step * 100 + rank)
    found = {}
    for f in FEATURES:
        rows = next(t.num_rows for t in TABLES if t.name == f.table)
        lengths = torch.zeros(B, dtype=torch.int64) if empty else torch.randint(0, 5, (B,), generator=g)
        ids = torch.randint(0, rows, (int(lengths.sum()),), generator=g)
        found[f.name] = (ids, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    return found


def loss_of(out: dict[str, Tensor], step: int) -> Tensor:
    total = torch.zeros((), device=out["who"].device)
    for i, name in enumerate(sorted(out)):
        x = out[name]
        total = total + ((x - 0.1 * (i + 1)) ** 2 * torch.linspace(0.5, 1.5, x.shape[1], device=x.device)).sum()
    return total / 5


def optimizer_of(name: str):
    return RowSGD(lr=0.1) if name == "sgd" else RowWiseAdagrad(lr=0.1, eps=1e-6)


def _plain_forward(tables: dict[str, Tensor], batch: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    out = {}
    for f in FEATURES:
        ids, offsets = batch[f.name]
        rows = tables[f.table][ids]
        if f.pooling is None:
            out[f.name] = rows
            continue
        bags = [rows[a:b].sum(0) / (max(b - a, 1) if f.pooling == "mean" else 1) for a, b in pairwise(offsets.tolist())]
        out[f.name] = torch.stack(bags)
    return out


def reference(plan: ParallelPlan, steps: int, optimizer: str, empty_rank: int | None = None):
    """R copies, each updated with the mean gradient of its table group, then averaged: plain torch, dense gradients."""
    layout = Layout.row_major(plan)
    sparse = plan.sparse
    assert sparse is not None
    R = sparse.replica_shard * sparse.replica
    copies = [{t.name: default_rows(t, range(t.num_rows), 0).clone() for t in TABLES} for _ in range(R)]
    states = [{t.name: torch.zeros(t.num_rows) for t in TABLES} for _ in range(R)]
    losses = []
    for step in range(steps):
        total = 0.0
        for r in range(R):
            leaf = {n: w.clone().requires_grad_() for n, w in copies[r].items()}
            ranks = [
                k
                for k in range(plan.world_size)
                if (c := layout.coordinates(k, "sparse"))["replica"] * sparse.replica_shard + c["replica_shard"] == r
            ]
            loss = torch.stack(
                [loss_of(_plain_forward(leaf, batch_of(k, step, k == empty_rank)), step) for k in ranks]
            ).mean()
            total += float(loss.detach()) / R
            loss.backward()
            for n, w in leaf.items():
                g = torch.zeros_like(w) if w.grad is None else w.grad
                if optimizer == "sgd":
                    copies[r][n] = w.detach() - 0.1 * g
                else:
                    touched = (g != 0).any(1)
                    s = states[r][n] + (g**2).mean(1) / R
                    step_ND = torch.where(touched[:, None], g / (s.sqrt() + 1e-6)[:, None], 0.0)
                    copies[r][n], states[r][n] = w.detach() - 0.1 * step_ND, s
        # The shards of a replica are averaged in every step, the replicas every so many and at the end.
        everyone = (step + 1) % sparse.sync_every == 0 or step == steps - 1
        size = R if everyone else sparse.replica_shard
        for first in range(0, R, size):
            some = range(first, first + size)
            for n in copies[0]:
                mean = torch.stack([copies[r][n] for r in some]).mean(0)
                state = torch.stack([states[r][n] for r in some]).mean(0)
                for r in some:
                    copies[r][n], states[r][n] = mean, state
        losses.append(total)
    return losses, copies[0], states[0]


def _train(
    rank: int, world: int, plan_args: dict, steps: int, optimizer: str, overlap: bool, empty_rank: int | None
) -> dict:
    plan = ParallelPlan.for_world(world, shard=world, **plan_args)
    # Row-major placement, so that the reference can know the coordinates.
    from gemworks.parallel import place
    from gemworks.parallel.meshes import Meshes

    cluster = presets.h200_host(world)
    placement = place(plan, cluster)
    placement = type(placement)(layout=Layout.row_major(plan), views=placement.views)
    meshes: Meshes = build_meshes(plan, cluster, placement=placement)
    emb = FullyShardedEmbeddings(TABLES, FEATURES, meshes, optimizer_of(optimizer))
    losses, gathered = [], []
    log = CollectiveLog()
    for step in range(steps):
        with log:
            if overlap:
                emb.prefetch()
            out = emb(batch_of(rank, step, rank == empty_rank))
            gathered.append(emb.is_gathered)
            loss = loss_of(out, step)
            if overlap:
                loss = emb.gather_in_backward_of(loss * 1.0)
            loss.backward()
            gathered.append(emb.is_gathered)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    result = {
        "losses": losses,
        "tables": {t.name: emb.full_table(t.name).numpy() for t in TABLES},
        "gathered": gathered,
        "stored": emb.stored_bytes(),
        "events": log.events,
    }
    if optimizer != "sgd":
        result["states"] = {t.name: emb.full_table(t.name, "state").numpy() for t in TABLES}
    return result


PLANS = [
    {"table_group": 4},
    {"table_group": 2, "replica_shard": 2},
    {"table_group": 1, "replica_shard": 4},
    {"table_group": 2, "replica_shard": 1},
    {"table_group": 1, "replica_shard": 2},
]


def _check(plan_args: dict, world: int, optimizer: str, overlap: bool, empty_rank: int | None = None) -> None:
    plan = ParallelPlan.for_world(world, shard=world, **plan_args)
    losses, tables, states = reference(plan, 4, optimizer, empty_rank)
    results = spawn(_train, world, plan_args, 4, optimizer, overlap, empty_rank)
    for r in results:
        assert r["losses"] == pytest.approx(losses, rel=1e-4)
        assert not any(r["gathered"]), "a gathered copy outlived its use"
        for n, w in tables.items():
            torch.testing.assert_close(torch.from_numpy(r["tables"][n]), w, rtol=1e-4, atol=1e-5, msg=n)
        for n, s in (states if optimizer != "sgd" else {}).items():
            torch.testing.assert_close(torch.from_numpy(r["states"][n]), s, rtol=1e-4, atol=1e-6, msg=n)
    assert find_order_conflict([r["events"] for r in results]) is None
    # Between uses the replica shards together hold one padded copy of the group's rows: memory overhead is the padding.
    sparse = plan.sparse
    assert sparse is not None
    one_copy = sum(t.num_rows * (t.dim + (optimizer != "sgd")) * 4 for t in TABLES)
    padding = 2 * (sparse.replica_shard - 1) * 7 * 4 * sparse.table_group
    assert sum(r["stored"] for r in results) <= sparse.replica * (one_copy + padding)


@pytest.mark.dist
@pytest.mark.parametrize(("optimizer", "overlap"), [("sgd", False), ("adagrad", True)])
@pytest.mark.parametrize("plan", [{"table_group": 1, "replica_shard": 2}, {"table_group": 2}])
def test_replicas_averaged_every_few_steps_equal_one_process_that_does_the_same(
    plan: dict, optimizer: str, overlap: bool
) -> None:
    _check({**plan, "sync_every": 3}, 4, optimizer, overlap)


@pytest.mark.dist
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: "-".join(f"{k}{v}" for k, v in p.items()))
def test_sgd_equals_an_unsharded_table_on_the_mean_gradient(plan: dict) -> None:
    _check(plan, 4, "sgd", overlap="replica_shard" in plan)
    # The R copies of the reference are equal to one table updated by the mean over all ranks.
    p = ParallelPlan.for_world(4, shard=4, **plan)
    one = reference(ParallelPlan.for_world(4, shard=4, table_group=4), 4, "sgd")[1]
    for n, w in reference(p, 4, "sgd")[1].items():
        torch.testing.assert_close(w, one[n], rtol=1e-4, atol=1e-5)


@pytest.mark.dist
@pytest.mark.parametrize("plan", PLANS[:4], ids=lambda p: "-".join(f"{k}{v}" for k, v in p.items()))
def test_adagrad_equals_local_updates_then_the_mean(plan: dict) -> None:
    _check(plan, 4, "adagrad", overlap=True)


@pytest.mark.dist
@pytest.mark.parametrize("empty_rank", [0, 1])
def test_m2_a_rank_without_ids(empty_rank: int) -> None:
    """M2 for the all-to-alls."""
    _check({"table_group": 2, "replica_shard": 1}, 2, "adagrad", overlap=False, empty_rank=empty_rank)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_eight_processes_two_by_two_by_two(optimizer: str) -> None:
    _check({"table_group": 2, "replica_shard": 2}, 8, optimizer, overlap=True)


def _save(rank: int, world: int, plan_args: dict, folder: str) -> dict:
    meshes = build_meshes(ParallelPlan.for_world(world, shard=world, **plan_args), presets.h200_host(world))
    emb = FullyShardedEmbeddings(TABLES, FEATURES, meshes, optimizer_of("adagrad"))
    for step in range(2):
        loss_of(emb(batch_of(rank % 2, step)), step).backward()
    save({"tables": emb.checkpoint(), "step": 2}, checkpoint_id=folder)
    return {f"{t.name}.{k}": emb.full_table(t.name, k).numpy() for t in TABLES for k in ("weight", "state")}


def _load(rank: int, world: int, plan_args: dict, folder: str) -> dict:
    meshes = build_meshes(ParallelPlan.for_world(world, shard=world, **plan_args), presets.h200_host(world))
    emb = FullyShardedEmbeddings(TABLES, FEATURES, meshes, optimizer_of("adagrad"), seed=5)
    state = {"tables": emb.checkpoint(), "step": 0}
    load(state, checkpoint_id=folder)
    return {f"{t.name}.{k}": emb.full_table(t.name, k).numpy() for t in TABLES for k in ("weight", "state")}


def _load_other(rank: int, world: int, folder: str) -> str:
    meshes = build_meshes(ParallelPlan.for_world(world, shard=world, table_group=world), presets.h200_host(world))
    tables = [TableSpec(name="item", num_rows=38, dim=4)]
    emb = FullyShardedEmbeddings(tables, FEATURES[:2], meshes, optimizer_of("adagrad"))
    try:
        load({"tables": emb.checkpoint()}, checkpoint_id=folder)
    except BaseException as error:  # torch raises a CheckpointException, which is no Exception
        return str(error)
    return ""


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")  # torch's checkpoint reads a deprecated attribute of its own
def test_checkpoints_reshard_between_groups_of_1_2_and_4(tmp_path) -> None:
    folder = str(tmp_path / "ckpt")
    saved = spawn(_save, 4, {"table_group": 2, "replica_shard": 2}, folder)
    assert abs(saved[0]["item.state"]).max() > 0
    for world, plan in (
        (4, {"table_group": 4}),
        (4, {"table_group": 1, "replica_shard": 4}),
        (2, {"table_group": 2}),
        (1, {"table_group": 1}),
    ):
        for r in spawn(_load, world, plan, folder):
            for name, value in saved[0].items():
                assert (r[name] == value).all(), (name, plan)
    for message in spawn(_load_other, 2, folder):
        assert "38" in message
        assert "37" in message


def _inputs(rank: int, world: int) -> list[str]:
    from gemworks.parallel.embeddings import from_torchrec
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.embedding_configs import PoolingType

    meshes = build_meshes(ParallelPlan.for_world(world, shard=world, table_group=world), presets.h200_host(world))
    configs = [
        EmbeddingBagConfig(name="a", num_embeddings=9, embedding_dim=4, feature_names=["f"], pooling=PoolingType.SUM),
        EmbeddingBagConfig(name="b", num_embeddings=5, embedding_dim=4, feature_names=["g"], pooling=PoolingType.MEAN),
    ]
    emb = FullyShardedEmbeddings(*from_torchrec(configs), meshes, RowSGD(lr=1.0))
    kjt = KeyedJaggedTensor(keys=["f", "g"], values=torch.tensor([1, 2, 8, 4, 4]), lengths=torch.tensor([2, 1, 0, 2]))
    out = emb(kjt)
    table_a, table_b = emb.full_table("a"), emb.full_table("b")
    torch.testing.assert_close(out["f"], torch.stack([table_a[1] + table_a[2], table_a[8]]))
    torch.testing.assert_close(out["g"], torch.stack([torch.zeros(4), table_b[4]]))
    messages = []
    for bad in (
        lambda: emb({"f": (torch.tensor([9]), torch.tensor([0, 1])), "g": (torch.tensor([0]), torch.tensor([0, 1]))}),
        lambda: emb({"f": (torch.tensor([0]), torch.tensor([0, 1]))}),
        lambda: FullyShardedEmbeddings(TABLES, [FeatureSpec(name="x", table="no")], meshes, RowSGD(lr=1.0)),
        lambda: emb.full_table("a", "state"),
        lambda: from_torchrec([3]),
        lambda: emb({k: (torch.tensor([True]), torch.tensor([0, 1])) for k in "fg"}),
        lambda: from_torchrec(
            [EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, feature_names=["f"], pooling=PoolingType.NONE)]
        ),
    ):
        try:
            bad()
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.dist
def test_torchrec_inputs_and_bad_input() -> None:
    for messages in spawn(_inputs, 2):
        words = ["9..9", "lacks the features ['g']", "'no'", "no state", "int", "got ids torch.bool", "got 'none'"]
        for text, word in zip(messages, words, strict=True):
            assert word in text


def _different(rank: int, world: int) -> str:
    meshes = build_meshes(ParallelPlan.for_world(world, shard=world, table_group=1), presets.h200_host(world))
    init = lambda table, rows: torch.full((len(rows), table.dim), float(rank))  # noqa: E731
    try:
        FullyShardedEmbeddings(TABLES, FEATURES, meshes, RowSGD(lr=1.0), init=init)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_m4_table_replicas_that_start_different() -> None:
    """M4: replicas of a table must start equal."""
    for message in spawn(_different, 2):
        assert "tables of width 4" in message


def test_default_rows_do_not_depend_on_the_sharding() -> None:
    t = TableSpec(name="t", num_rows=9000, dim=2)
    whole = default_rows(t, range(9000), 1)
    for a, b in ((0, 10), (4090, 4100), (8999, 9000), (5, 5), (4096, 8192)):
        assert torch.equal(default_rows(t, range(a, b), 1), whole[a:b])
    assert float(whole.abs().max()) <= 1 / math.sqrt(9000)
    assert not torch.equal(default_rows(t, range(10), 2), whole[:10])
