"""Device meshes on gloo and on the fake process group."""

from __future__ import annotations

import dataclasses
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gemworks.parallel import ClusterSpec, Layout, ParallelPlan, build_meshes, place, presets
from gemworks.parallel import meshes as meshes_module
from gemworks.parallel.cluster import Tier
from gemworks.parallel.measure import _tier_group
from gemworks.parallel.meshes import members_group
from gemworks.parallel.placement import ascending
from gemworks.parallel.plan import VIEW_AXES
from parallel_spawn import spawn


def _meshes(rank: int, world: int) -> dict:
    plan = ParallelPlan.for_world(world, shard=2, expert=2, expert_shard=2, table_group=2, replica_shard=2)
    cluster = presets.h200_host(world)
    meshes = build_meshes(plan, cluster)
    sums = {}
    for view, axis in meshes.layout.used_axes():
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=meshes.group(view, axis))
        sums[view, axis] = float(x)
    shard = meshes.mesh("dense")
    assert shard is not None
    return {
        "sums": sums,
        "members": {k: meshes.layout.group_of(rank, *k) for k in sums},
        "dense": (shard.mesh_dim_names, shard.mesh.tolist(), shard.get_local_rank("shard")),
        "count": meshes.num_communicators,
        "want": len(meshes.layout.communicators(rank)),
        "absent": meshes.group("experts", "replica"),
    }


@pytest.mark.dist
def test_m1_groups_hold_the_ranks_of_the_placement_in_its_order() -> None:
    """M1: the permutation is of ranks in the mesh; a reduction over each group sums exactly its members."""
    for rank, r in enumerate(spawn(_meshes, 4)):
        for key, total in r["sums"].items():
            assert total == sum(r["members"][key]), key
            assert rank in r["members"][key]
        names, array, local = r["dense"]
        assert names == ("replica", "shard")
        assert [row[local] for row in array if rank in row] == [rank]
        assert r["count"] == r["want"]
        assert r["absent"] is None


@pytest.fixture
def fake_world():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(world: int, rank: int = 0) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield start
    dist.destroy_process_group()


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 9999])
def test_16384_ranks_on_the_fake_process_group(fake_world, rank: int) -> None:
    """M8: five dimensions at 16,384 ranks need eight communicators, made in seconds."""
    fake_world(16384, rank)
    plan = ParallelPlan.for_world(16384, shard=256, expert=2, expert_shard=16, table_group=256, replica_shard=8)
    start = time.thread_time()  # a busy machine takes nothing away
    meshes = build_meshes(plan, presets.roce_cluster(16384))
    found = {v: meshes.mesh(v) for v in plan.views()}
    assert time.thread_time() - start < 5
    assert meshes.num_communicators <= len(meshes.layout.used_axes())
    for view in plan.views():
        mesh = found[view]
        assert mesh is not None
        assert torch.equal(mesh.mesh, meshes.layout.ranks[view].int())
        for axis in VIEW_AXES[view]:
            got = dist.get_process_group_ranks(mesh.get_group(axis))
            assert tuple(got) == meshes.layout.group_of(rank, view, axis)
    part = meshes.mesh("experts", ["replica", "expert_shard"])
    assert part is not None
    assert part.mesh.numel() == 16384 // 2
    assert rank in part.mesh


@pytest.mark.dist
def test_axes_in_another_order_and_time_outs_reach_the_groups(fake_world, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_world(8, 5)
    seen: list[timedelta] = []
    real = meshes_module.members_group

    def watched(members, timeout):
        seen.append(timeout)
        return real(members, timeout)

    monkeypatch.setattr(meshes_module, "members_group", watched)
    plan = ParallelPlan.for_world(8, shard=4, expert=2, expert_shard=2)
    meshes = build_meshes(plan, presets.h200_host(8), timeout=timedelta(seconds=7))
    assert seen == [timedelta(seconds=7)] * meshes.num_communicators
    ranks = meshes.layout.ranks["dense"]
    mesh = meshes.mesh("dense", ["shard", "replica"])
    assert mesh is not None
    assert mesh.mesh_dim_names == ("shard", "replica")
    assert torch.equal(mesh.mesh, ranks.T.int())
    assert (mesh.get_local_rank("shard"), mesh.get_local_rank("replica")) == (1, 1)


@pytest.mark.dist
def test_a_numbering_that_torch_would_not_keep_is_refused(fake_world) -> None:
    """torch sorts a group's ranks, so the second coordinate of an axis would be the first place in its group."""
    fake_world(4)
    plan = ParallelPlan.for_world(4, shard=4, table_group=2, replica_shard=2)
    cluster = presets.h200_host(4)
    placed = place(plan, cluster)
    ranks = dict(placed.layout.ranks)
    ranks["sparse"] = torch.tensor([[[0, 1], [3, 2]]])
    turned = dataclasses.replace(placed, layout=Layout(plan=plan, ranks=ranks))
    with pytest.raises(ValueError, match=r"sparse.replica_shard group \[3, 2\], expected ranks that ascend"):
        build_meshes(plan, cluster, placement=turned)
    ranks["sparse"] = ascending(ranks["sparse"])
    build_meshes(plan, cluster, placement=dataclasses.replace(placed, layout=Layout(plan=plan, ranks=ranks)))


@pytest.mark.dist
@pytest.mark.parametrize(("tier", "members"), [("nvlink", [4, 5]), ("zone", [5, 7]), ("cross_zone", [1, 5])])
def test_a_tier_is_measured_on_groups_that_cross_it_alone(fake_world, tier: Tier, members: list[int]) -> None:
    fake_world(8, 5)
    base = dataclasses.replace(presets.roce_cluster(2048), gpus_per_domain=2, domains_per_zone=2, num_zones=2)
    assert dist.get_process_group_ranks(_tier_group(base, tier)) == members


@pytest.mark.dist
def test_world_of_another_size_is_an_error(fake_world) -> None:
    plan = ParallelPlan.for_world(8, shard=8)
    fake_world(4)
    with pytest.raises(ValueError, match="expected 4, the world"):
        build_meshes(plan, presets.h200_host())
    with pytest.raises(ValueError, match="axes"):
        build_meshes(
            ParallelPlan.for_world(4, shard=4),
            presets.h200_host(4),
            placement=place(ParallelPlan.for_world(4, shard=4), presets.h200_host(4)),
        ).mesh("dense", ["nope"])


def test_without_a_process_group_the_message_says_so() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        build_meshes(ParallelPlan.for_world(8, shard=8), presets.h200_host())


def _measure_then_build(rank: int, world: int) -> tuple[bool, float]:
    base = dataclasses.replace(
        presets.roce_cluster(2048), gpus_per_domain=2, domains_per_zone=1, num_zones=2, name="gloo"
    )
    measured = ClusterSpec.measure(base, sizes=(4096, 1 << 16), repeats=1)
    plan = ParallelPlan.for_world(world, shard=2)
    first, second = build_meshes(plan, measured), build_meshes(plan, measured)
    group = second.group("dense", "shard")
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    return first.group("dense", "shard") is group, float(x)


@pytest.mark.dist
def test_groups_are_made_once_so_that_measuring_does_not_break_what_comes_after() -> None:
    """A group destroyed and made again would find its old address in the store: the connection is refused."""
    assert spawn(_measure_then_build, 4) == [(True, 2.0)] * 4


def test_groups_are_made_outside_the_binding_of_the_world(fake_world, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound world would split its communicator, which waits for ranks that are no members."""
    fake_world(4)
    world, device = dist.group.WORLD, torch.device("cuda", 0)
    assert world is not None
    world.bound_device_id = device
    seen: list[object] = []
    real = dist.new_group

    def watched(*args, **kwargs):
        seen.append(world.bound_device_id)
        return real(*args, **kwargs)

    monkeypatch.setattr(dist, "new_group", watched)
    group = members_group([0, 2])
    assert members_group([0, 2]) is group
    assert members_group([0, 1]) is not group
    assert members_group(range(4)) is world
    assert seen == [None, None]
    assert world.bound_device_id == device
