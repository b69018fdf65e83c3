"""Plans, layouts, placement and who holds what."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable

import pytest
import torch
from gemworks.parallel import COLLECTIVES, Layout, ParallelPlan, Rate, Traffic, default_traffic, place, presets
from gemworks.parallel.describe import describe
from gemworks.parallel.layout import widest_tier
from gemworks.parallel.placement import _swap, ascending, best_split, view_cost_us
from gemworks.parallel.plan import VIEW_AXES, DensePlan, ExpertPlan, SparsePlan
from gemworks.parallel.planner import search
from gemworks.parallel.profile import gem_like
from gemworks.parallel.tables import TableSpec, shard_tables
from hypothesis import given, settings
from hypothesis import strategies as st

PUBLISHED = ParallelPlan.for_world(4096, shard=256, expert=2, expert_shard=16, table_group=256, replica_shard=8)


def cluster(domain: int, domains: int, zones: int):
    rates = {"nvlink": (100e9, 2.0), "zone": (10e9, 5.0), "cross_zone": (1e9, 9.0)}
    return dataclasses.replace(
        presets.roce_cluster(2048),
        gpus_per_domain=domain,
        domains_per_zone=domains,
        num_zones=zones,
        tiers={t: {c: Rate(bytes_per_s=w, latency_us=a) for c in COLLECTIVES} for t, (w, a) in rates.items()},
    )


def test_published_plan_at_4096() -> None:
    assert PUBLISHED.dense == DensePlan(shard=256, replica=16)
    assert PUBLISHED.experts == ExpertPlan(expert=2, expert_shard=16, replica=128)
    assert PUBLISHED.sparse == SparsePlan(table_group=256, replica_shard=8, replica=2)
    assert ParallelPlan.from_dict(json.loads(json.dumps(PUBLISHED.to_dict()))) == PUBLISHED


def test_validation_says_what_to_change() -> None:
    with pytest.raises(ValueError, match=r"nearest divisors are \[4, 8\]"):
        ParallelPlan.for_world(8, shard=5)
    with pytest.raises(ValueError, match=r"set experts.replica=4"):
        ParallelPlan(dense=DensePlan(shard=8), experts=ExpertPlan(expert=2, replica=3))
    with pytest.raises(ValueError, match=r"make expert x expert_shard|make expert_shard x expert"):
        ParallelPlan(dense=DensePlan(shard=8), experts=ExpertPlan(expert=3))
    with pytest.raises(ValueError, match=r"dense\.shard"):
        ParallelPlan(dense=DensePlan(shard=0))
    with pytest.raises(ValueError, match=r"expected dense"):
        ParallelPlan.from_dict({"tensor": {}})
    bad = ParallelPlan.for_world(4096, shard=256, expert=4, table_group=128, replica_shard=32)
    found = bad.problems(presets.roce_cluster(4096), num_experts=6)
    assert any("set replica_shard=8 and replica=4" in p for p in found)
    assert any("a divisor of 6: one of [1, 2, 3, 6]" in p for p in found)
    with pytest.raises(ValueError, match=r"use cluster.resized\(4096\)"):
        bad.validate(presets.h200_host())
    uneven = ParallelPlan.for_world(48, shard=48, table_group=4, replica_shard=6)
    assert "set replica_shard=4 and replica=3" in uneven.problems(presets.roce_cluster(48))[0]


@st.composite
def plans(draw, worlds):
    world = draw(st.sampled_from(worlds))

    def divisor(n: int) -> int:
        return draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))

    expert = divisor(world)
    group = divisor(world)
    return ParallelPlan.for_world(
        world,
        shard=divisor(world),
        expert=expert,
        expert_shard=divisor(world // expert),
        table_group=group,
        replica_shard=divisor(world // group),
    )


def _oracle_group(plan: ParallelPlan, view: str, axis: str, rank: int) -> tuple[int, ...]:
    """Row-major membership by division and remainder alone."""
    sizes = plan.sizes(view)  # type: ignore[arg-type]
    axes = list(sizes)
    stride = 1
    for a in reversed(axes):
        if a == axis:
            break
        stride *= sizes[a]
    mine = rank // stride % sizes[axis]
    return tuple(rank + (i - mine) * stride for i in range(sizes[axis]))


@given(plans([1, 8, 12, 96, 4096, 16384]), st.integers(0, 2**30))
@settings(max_examples=60, deadline=None)
def test_row_major_groups_equal_the_oracle(plan: ParallelPlan, seed: int) -> None:
    layout = Layout.row_major(plan)
    rank = seed % plan.world_size
    for view in plan.views():
        for axis in plan.sizes(view):
            assert layout.group_of(rank, view, axis) == _oracle_group(plan, view, axis, rank)


@given(plans([8, 16, 4096, 16384]))
@settings(max_examples=25, deadline=None)
def test_placed_groups_partition_the_world_and_axes_cross_in_one_rank(plan: ParallelPlan) -> None:
    c = presets.roce_cluster(16384).resized(plan.world_size)
    if plan.problems(c):
        return
    placement = place(plan, c)
    for view, placed in placement.views.items():
        assert placed.cost_us <= placed.row_major_us * (1 + 1e-9)
        for axis, size in plan.sizes(view).items():
            groups = placement.layout.groups(view, axis)
            assert groups.shape == (plan.world_size // size, size)
            assert torch.equal(groups.reshape(-1).sort().values, torch.arange(plan.world_size))
            assert placed.tiers[axis] == (None if size == 1 else widest_tier(groups, c))
        # Group x group of different axes meet in exactly one rank: coordinates are unique.
        rank = int(placed.ranks.reshape(-1)[plan.world_size // 3])
        mine = [set(placement.layout.group_of(rank, view, a)) for a in plan.sizes(view)]
        for a, b in itertools.combinations(mine, 2):
            assert a & b == {rank}


def _brute_force(view, sizes, c, traffic, keep_nvlink_axis=None) -> float:
    from gemworks.parallel.layout import _lines
    from gemworks.parallel.plan import VIEW_AXES

    best = float("inf")
    seen = set()
    world = 1
    for s in sizes:
        world *= s
    for perm in itertools.permutations(range(world)):
        if perm[0] != 0:
            break  # every numbering is equal to one that starts at rank 0, up to a symmetry of the axes
        ranks = torch.tensor(perm).reshape(sizes)
        key = tuple(
            tuple(sorted(tuple(sorted(g)) for g in _lines(ranks, i).tolist()))
            for i in range(len(sizes))
            if sizes[i] > 1
        )
        if key in seen:
            continue
        seen.add(key)
        if keep_nvlink_axis is not None:
            groups = _lines(ranks, VIEW_AXES[view].index(keep_nvlink_axis))
            if groups.shape[1] > 1 and widest_tier(groups, c) != "nvlink":
                continue
        best = min(best, view_cost_us(view, ranks, c, traffic))
    return best


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((2, 2, 2), (2, 4)),
        ((4, 2, 1), (4, 2)),
        ((3, 2, 1), (2, 3)),
        ((3, 2, 1), (3, 2)),
        ((2, 3, 1), (2, 3)),
        ((4, 2, 1), (2, 4)),
    ],
)
def test_dense_placement_equals_brute_force(shape, sizes) -> None:
    c = cluster(*shape)
    plan = ParallelPlan(dense=DensePlan(replica=sizes[0], shard=sizes[1]))
    for traffic in (
        default_traffic(plan),
        (Traffic(view="dense", axis="replica", collective="all_reduce", nbytes=1e9),),
        (
            Traffic(view="dense", axis="replica", collective="all_to_all", nbytes=1e9),
            Traffic(view="dense", axis="shard", collective="all_gather", nbytes=1e8),
        ),
    ):
        found = place(plan, c, traffic, constraints={("dense", "shard"): "cross_zone"}).views["dense"]
        assert found.cost_us == pytest.approx(_brute_force("dense", sizes, c, traffic), rel=1e-9)
        assert found.cost_us <= found.row_major_us
        assert view_cost_us("dense", found.ranks, c, traffic) == pytest.approx(found.cost_us, rel=1e-9)


def test_sparse_placement_equals_brute_force_with_shards_on_nvlink() -> None:
    c = cluster(4, 2, 1)
    plan = ParallelPlan(dense=DensePlan(shard=8), sparse=SparsePlan(table_group=2, replica_shard=2, replica=2))
    traffic = default_traffic(plan)
    found = place(plan, c, traffic).views["sparse"]
    assert found.tiers["replica_shard"] == "nvlink"
    assert found.cost_us == pytest.approx(_brute_force("sparse", (2, 2, 2), c, traffic, "replica_shard"), rel=1e-9)


def test_experts_placement_equals_brute_force() -> None:
    c = cluster(2, 2, 2)
    plan = ParallelPlan(dense=DensePlan(shard=8), experts=ExpertPlan(expert=2, expert_shard=2, replica=2))
    traffic = default_traffic(plan)
    found = place(plan, c, traffic).views["experts"]
    assert found.cost_us == pytest.approx(_brute_force("experts", (2, 2, 2), c, traffic), rel=1e-9)


def test_an_axis_may_be_split_over_tiers_where_no_order_of_axes_is_as_good() -> None:
    c = cluster(3, 2, 2)
    plan = ParallelPlan.for_world(12, shard=12, expert=6)
    traffic = (
        Traffic(view="experts", axis="expert", collective="broadcast", nbytes=8e6),
        Traffic(view="experts", axis="replica", collective="all_to_all", nbytes=12e6),
    )
    found = place(plan, c, traffic).views["experts"]
    assert found.how == "nvlink x zone x cross: replica 1x2x1, expert 3x1x2"
    assert found.cost_us < 0.6 * found.row_major_us
    assert found.cost_us == pytest.approx(view_cost_us("experts", found.ranks, c, traffic))


def test_shard_groups_keep_to_a_zone_unless_the_caller_lifts_that() -> None:
    """Also where the replicas would gain from changing places with them."""
    c, plan = cluster(4, 2, 2), ParallelPlan.for_world(16, shard=8)
    traffic = (Traffic(view="dense", axis="replica", collective="all_reduce", nbytes=1e9),)
    assert place(plan, c, traffic).views["dense"].tiers == {"replica": "cross_zone", "shard": "zone"}
    lifted = place(plan, c, traffic, constraints={("dense", "shard"): "cross_zone"})
    assert lifted.views["dense"].tiers == {"replica": "nvlink", "shard": "cross_zone"}


def test_shard_groups_that_do_not_fill_zones_may_cross_them() -> None:
    """Three groups of eight on two zones of twelve: no numbering keeps each in one zone."""
    placed = place(ParallelPlan.for_world(24, shard=8), cluster(4, 3, 2))
    assert placed.views["dense"].tiers["shard"] == "cross_zone"
    assert place(ParallelPlan.for_world(24, shard=4), cluster(4, 3, 2)).views["dense"].tiers["shard"] == "nvlink"


def test_of_equal_splits_inner_axes_lie_nearest() -> None:
    found = best_split((2, 4, 2), VIEW_AXES["sparse"], cluster(4, 2, 2), (), {})
    assert found == (0.0, ((1, 1, 2), (2, 2, 1), (2, 1, 1)))


def test_ranks_ascend_along_every_axis_as_torch_orders_a_groups_ranks() -> None:
    """Swaps found others where groups do not fit the domains; an order that torch would not keep is worth nothing."""
    c = cluster(2, 2, 3)
    for shard, axis, collective in (
        (4, "shard", "broadcast"),
        (4, "shard", "all_to_all"),
        (3, "replica", "all_gather"),
    ):
        plan = ParallelPlan.for_world(12, shard=shard)
        traffic = (
            Traffic(view="dense", axis="shard", collective="all_gather", nbytes=1e6),
            Traffic(view="dense", axis=axis, collective=collective, nbytes=1e9),  # type: ignore[arg-type]
        )
        placed = place(plan, c, traffic, constraints={("dense", "shard"): "cross_zone"})
        for each in ("shard", "replica"):
            groups = placed.layout.groups("dense", each)
            assert bool((groups.diff(dim=1) > 0).all()), placed.views["dense"].how
        assert placed.views["dense"].cost_us <= placed.views["dense"].row_major_us


@given(st.permutations(range(24)))
@settings(max_examples=30, deadline=None)
def test_a_numbering_sorted_along_every_axis_is_a_permutation_and_stays_sorted(order) -> None:
    found = ascending(torch.tensor(order).reshape(2, 3, 4))
    assert torch.equal(found.reshape(-1).sort().values, torch.arange(24))
    assert all(bool((found.diff(dim=d) > 0).all()) for d in range(3))
    assert torch.equal(ascending(found), found)


def test_swaps_leave_a_bad_numbering() -> None:
    c = cluster(4, 2, 1)
    traffic = (Traffic(view="dense", axis="shard", collective="all_gather", nbytes=1e9),)
    bad = ascending(torch.tensor([[0, 1, 2, 4], [3, 5, 6, 7]]))
    start = (view_cost_us("dense", bad, c, traffic), bad, "bad")
    cost, ranks, how = _swap("dense", start, c, traffic, lambda ranks: True)
    assert how == "swaps"
    assert ranks.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cost == view_cost_us("dense", ranks, c, traffic) < start[0]


def test_default_traffic_divides_what_is_model_parallel() -> None:
    plan = ParallelPlan.for_world(64, shard=16, expert=4, expert_shard=2, table_group=8, replica_shard=4)
    found = {(t.view, t.axis, t.collective): t.nbytes / 2**30 for t in default_traffic(plan)}
    assert found["dense", "replica", "all_reduce"] == 2 / 16
    assert found["experts", "expert", "all_gather"] == 0.25 * 4
    assert found["experts", "expert_shard", "all_gather"] == 4 / 4
    assert found["experts", "replica", "all_reduce"] == 4 / 4 / 2
    assert found["sparse", "replica", "all_reduce"] == 4 / 4
    late = ParallelPlan.for_world(64, shard=16, table_group=8, replica_shard=4, sync_every=5)
    calls = [t.calls for p in (plan, late) for t in default_traffic(p) if (t.view, t.axis) == ("sparse", "replica")]
    assert calls == [1.0, 0.2]


def test_placement_of_the_published_plan_reports_tiers() -> None:
    c = presets.roce_cluster(4096)
    placement = place(PUBLISHED, c)
    tiers = {(v, a): t for v, p in placement.views.items() for a, t in p.tiers.items()}
    assert tiers["experts", "expert"] == "nvlink"
    assert tiers["dense", "shard"] == "zone"
    assert tiers["dense", "replica"] == "cross_zone"
    assert tiers["experts", "expert_shard"] == "zone"
    assert tiers["sparse", "replica_shard"] == "nvlink"
    assert tiers == placement.layout.crossings(c)
    assert "row-major" in placement.text()


def test_16384_ranks_in_seconds() -> None:
    c = presets.roce_cluster(16384)
    plan = ParallelPlan.for_world(16384, shard=256, expert=2, expert_shard=16, table_group=256, replica_shard=8)
    start = time.thread_time()  # a busy machine takes nothing away
    layout = place(plan, c).layout
    for view, axis in layout.used_axes():
        layout.groups(view, axis)
    assert time.thread_time() - start < 5


def test_impossible_constraint_is_an_error() -> None:
    plan = ParallelPlan.for_world(16, shard=16)
    with pytest.raises(ValueError, match="no numbering"):
        place(plan, presets.roce_cluster(16), constraints={("dense", "shard"): "nvlink"})


def test_m8_groups_are_deduplicated_and_only_used_axes_have_one() -> None:
    """M8: a five-dimensional mesh must not make dozens of communicators."""
    plan = ParallelPlan.for_world(8, shard=4, expert=2, expert_shard=4, table_group=4, replica_shard=2)
    layout = Layout.row_major(plan)
    for rank in range(8):
        groups = layout.communicators(rank)
        assert len(groups) == len(set(groups))
        assert all(len(g) > 1 for g in groups)
        per_axis = {layout.group_of(rank, v, a) for v, a in layout.used_axes()}
        assert set(groups) == per_axis - {tuple(range(8))}
    # expert and replica_shard pair the same neighbours: one communicator for both.
    assert layout.group_of(0, "experts", "expert") == layout.group_of(0, "sparse", "replica_shard")
    assert len(layout.communicators(0)) < len(layout.used_axes())
    one = ParallelPlan.for_world(8, shard=8, expert=1, expert_shard=8, table_group=8)
    assert Layout.row_major(one).communicators(3) == []


def test_layout_rejects_what_is_no_permutation() -> None:
    plan = ParallelPlan.for_world(4, shard=2)
    with pytest.raises(ValueError, match="permutation"):
        Layout(plan=plan, ranks={"dense": torch.tensor([[0, 1], [1, 2]])})
    with pytest.raises(ValueError, match="shape"):
        Layout(plan=plan, ranks={"dense": torch.arange(4)})
    layout = Layout.row_major(plan)
    with pytest.raises(ValueError, match="axis"):
        layout.groups("dense", "expert")
    with pytest.raises(ValueError, match="view"):
        layout.groups("sparse", "table_group")
    with pytest.raises(ValueError, match="rank"):
        layout.group_of(4, "dense", "shard")


tables_strategy = st.lists(
    st.tuples(st.integers(1, 400), st.sampled_from([4, 8]), st.sampled_from(["row_wise", "table_wise", None])),
    min_size=1,
    max_size=6,
)


@given(tables_strategy, st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_every_row_of_every_table_has_one_owner_and_one_place(raw, group) -> None:
    specs = [TableSpec(name=f"t{i}", num_rows=n, dim=d, sharding=s) for i, (n, d, s) in enumerate(raw)]
    for shards in shard_tables(specs, group):
        used: dict[int, set[int]] = {r: set() for r in range(group)}
        for t in shards.tables:
            owners = [r for r in range(group) for _ in t.rows_on(r)]
            assert [i for r in range(group) for i in t.rows_on(r)] == list(range(t.spec.num_rows))
            for row, owner in enumerate(owners):
                assert owner == t.first_owner + row // t.block_rows
                place_in_buffer = t.offsets[owner] + row % t.block_rows
                assert place_in_buffer not in used[owner]
                used[owner].add(place_in_buffer)
        assert [used[r] == set(range(shards.num_rows[r])) for r in range(group)] == [True] * group


def test_whole_tables_go_where_the_fewest_bytes_are_and_64_rows_a_rank_are_split() -> None:
    sizes = {"wide": (100, 8), "long": (150, 4), "short": (90, 4)}
    specs = [TableSpec(name=n, num_rows=r, dim=d, sharding="table_wise") for n, (r, d) in sizes.items()]
    owners = {t.spec.name: t.first_owner for s in shard_tables(specs, 2) for t in s.tables}
    assert owners == {"wide": 0, "long": 1, "short": 1}  # 800 elements beside 600 + 360
    for num_rows, of_first in ((64 * 4, 64), (64 * 4 - 1, 64 * 4 - 1)):
        ((table,),) = (s.tables for s in shard_tables([TableSpec(name="t", num_rows=num_rows, dim=4)], 4))
        assert len(table.rows_on(0)) == of_first


def test_m7_describe_says_who_holds_what_in_stable_text_and_json() -> None:
    """M7: which rank holds what, as stable text and as JSON."""
    plan = ParallelPlan.for_world(8, shard=4, expert=2, expert_shard=2, table_group=2, replica_shard=2)
    tables = [TableSpec(name="item", num_rows=1001, dim=16), TableSpec(name="country", num_rows=20, dim=16)]
    c = presets.h200_host()
    d = describe(place(plan, c).layout, c, num_experts=4, tables=tables)
    again = describe(place(plan, c).layout, c, num_experts=4, tables=tables)
    assert d.text() == again.text()
    assert d.to_json() == again.to_json()
    content = json.loads(d.to_json())
    # Every row is held by exactly replica_shard x replica = 4 ranks' groups, every expert by 4 ranks.
    held = [0] * 1001
    experts = [0] * 4
    for r in content["ranks"]:
        for e in r["experts"]["experts"]:
            experts[e] += 1
        for t in r["tables"]:
            if t["table"] == "item":
                for row in range(t["first_row"], t["last_row"] + 1):
                    held[row] += 1
    assert held == [4] * 1001
    assert experts == [4] * 4
    assert "rank 5  zone 0 domain 0 gpu 5" in d.text()
    assert "table item rows 501..1000 of 1001 (dim 16)" in d.text()
    with pytest.raises(ValueError, match="without a sparse view"):
        describe(Layout.row_major(ParallelPlan.for_world(8, shard=8)), c, tables=tables)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ParallelPlan.for_world(8, shard="2"), r"dense.shard: got '2', expected an int >= 1"),  # pyright: ignore
        (lambda: presets.roce_cluster(256, oversubscription=0.0), r"oversubscription: got 0.0, expected >= 1"),
        (lambda: gem_like(width=-1), r"width: got -1, expected an int >= 1"),
        (lambda: search(gem_like(num_layers=1), presets.roce_cluster(8), keep=0), r"keep: got 0, expected an int >= 1"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
