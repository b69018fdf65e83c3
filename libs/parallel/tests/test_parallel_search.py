"""The search: ranks, reasons, sensitivity, exhaustion on a small world; the ladders."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
from gemworks.parallel import ParallelPlan, presets
from gemworks.parallel.lengths import LengthLaw
from gemworks.parallel.measured_error import MEASURED, text_of
from gemworks.parallel.planner import ladder_text, ladders, search, why_slower
from gemworks.parallel.profile import LayerProfile, ModelProfile, gem_like
from gemworks.parallel.simulation import simulate
from gemworks.parallel.tables import TableSpec


def test_search_ranks_includes_the_published_plan_and_gives_every_loser_a_reason() -> None:
    c, m = presets.roce_cluster(4096), gem_like(num_layers=4)
    published = ParallelPlan.for_world(4096, shard=256, expert=2, expert_shard=16, table_group=256, replica_shard=8)
    start = time.thread_time()  # a busy machine takes nothing away
    result = search(m, c, include=[published])
    assert time.thread_time() - start < 60
    steps = [x.simulation.step_us for x in result.ranked if x.simulation]
    assert steps == sorted(steps)
    assert any(x.plan == published for x in result.ranked)
    assert result.ranked[0].reason == ""
    assert all(x.reason for x in result.ranked[1:])
    assert all(x.reason for x in result.infeasible)
    assert result.best.memory.fits
    assert [x.split(":")[0] for x in result.sensitivity] == [
        "if NVLink were 2x slower",
        "if the zone network were 2x slower",
        "if cross-zone were 2x slower",
    ]
    json.loads(result.to_json())
    text = result.text(top=10**6)
    assert "256 x 16     2 x 16 x 128      8 x 256 x 2" in text, "the published plan has its line"
    assert text.splitlines()[1:3] == [
        f"best  dense shard {result.best.plan.dense.shard} x replica {result.best.plan.dense.replica}",
        f"      experts {result.best.plan.text().split('; experts ')[1].split(';')[0]}",
    ]
    assert max(map(len, text.splitlines())) <= 80
    assert published.sparse is not None
    late = dataclasses.replace(published, sparse=dataclasses.replace(published.sparse, sync_every=16))
    shown = dataclasses.replace(result, ranked=[dataclasses.replace(result.ranked[0], plan=late)]).text()
    assert "\n    tables averaged every 16 steps\n" in shown
    assert " ".join(result.best.validation.split()) in " ".join(text.split()), "folded, not cut"


def test_the_reason_names_the_items_that_cost_most_and_a_slower_tier_costs_time() -> None:
    c, m = presets.roce_cluster(64), gem_like(num_layers=2, table_rows=10**8)
    found = search(m, c, keep=2)
    assert all("(+" in line for line in found.sensitivity if "NVLink" in line)
    best = found.best
    items = dict(best.items)
    label = next(iter(items))
    worse = {**items, label: items[label] + 5e3, "made up": 7e3, "small": 1.0}
    loser = dataclasses.replace(best, items=worse, step_us=best.step_us + 12001.0)
    assert why_slower(loser, best) == f"12.00 ms slower: made up +7.00 ms, {label} +5.00 ms"
    assert why_slower(best, best) == "as fast as the best"


def test_more_candidates_kept_are_combined() -> None:
    c, m = presets.h200_host(8), gem_like(num_layers=1, table_rows=10**7)
    one, three = (search(m, c, keep=k) for k in (1, 3))
    looked_at = [{x.plan.text() for x in (*r.ranked, *r.infeasible)} for r in (one, three)]
    assert looked_at[0] < looked_at[1]
    assert len(looked_at[1]) >= 2 * 2 * 3


def test_a_plan_that_would_win_on_a_slower_tier_is_named() -> None:
    c = presets.roce_cluster(64).scaled("zone", 0.25)
    found = search(gem_like(num_layers=2, table_rows=10**8), c, keep=2)
    nvlink, zone = found.sensitivity
    assert "; then dense shard 2 x replica 32; " in nvlink
    assert " would win with " in nvlink
    assert zone.endswith("; the same plan stays best")


def test_search_equals_exhaustion_on_a_small_world() -> None:
    c = presets.h200_host(4)
    layers = tuple(
        LayerProfile(name=f"l{i}", params=30_000_000, flops=1e9, forward_us=100.0, backward_us=200.0, length_share=1.0)
        for i in range(4)
    )
    m = ModelProfile(
        name="dense",
        layers=layers,
        law=LengthLaw(name="uniform", max_len=64, low=64),
        optimizer_us_per_million=0.0,
        tables=(TableSpec(name="t", num_rows=10**7, dim=64),),
        ids_per_batch=1e5,
        bytes_per_row=128,
    )
    best = search(m, c).best
    every = []
    for shard in (1, 2, 4):
        for group in (1, 2, 4):
            for r in (1, 2, 4):
                if group * r <= 4:
                    plan = ParallelPlan.for_world(4, shard=shard, table_group=group, replica_shard=r)
                    s = simulate(plan, m, c, check_memory=False)
                    if s.memory.fits:
                        every.append(s.step_us)
    assert best.step_us == pytest.approx(min(every))


@pytest.mark.slow
def test_search_of_16384_gpus_in_a_minute() -> None:
    start = time.thread_time()  # a busy machine takes nothing away
    search(gem_like(), presets.roce_cluster(16384))
    assert time.thread_time() - start < 60


@pytest.mark.parametrize("num_gpus", [1, 3, 7, 64, 72])
def test_ladders_of_any_number_of_gpus(num_gpus: int) -> None:
    """The published sizes are cut to what divides the world, and the experts to what divides them."""
    for num_experts in (2, 3):
        model = gem_like(num_layers=1, num_experts=num_experts)
        rungs = ladders(model, presets.gb200_rack(num_gpus))
        assert [len(steps) for steps in rungs.values()] == [3, 4]
        plan = rungs["dense"][-1].plan
        assert plan.experts is not None
        assert plan.experts.expert == (2 if num_gpus % 2 == 0 and num_experts == 2 else 1)
        assert (plan.dense.shard, plan.sparse and plan.sparse.table_group) == (num_gpus, num_gpus)


def test_ladders_show_every_rung() -> None:
    found = ladders(gem_like(num_layers=4), presets.roce_cluster(4096))
    text = ladder_text(found)
    assert [len(v) for v in found.values()] == [3, 4]
    published = ParallelPlan.for_world(
        4096, shard=256, expert=2, expert_shard=16, table_group=256, replica_shard=8, sync_every=16
    )
    assert [rungs[-1].plan for rungs in found.values()] == [published] * 2
    assert [r.plan.dense.shard for r in found["dense"]] == [4096, 256, 256]
    assert [r.plan.experts.expert_shard for r in found["dense"] if r.plan.experts] == [4096, 256, 16]
    assert [r.plan.sparse.table_group for r in found["sparse"] if r.plan.sparse] == [4096, 256, 256, 256]
    dense = [r.simulation.step_us for r in found["dense"]]
    assert dense[0] > dense[1], "sharding over the world loses to shard x replica"
    v1, v2_each, v2, v3 = (r.simulation for r in found["sparse"])
    assert v2.step_us < v1.step_us, "groups win once replicas are not averaged in every step"
    assert v1.step_us < v2_each.step_us, "and lose if they are, with tables of this size"
    label = "sparse.table_group all_to_all"
    assert v2.collectives[label][1] < v1.collectives[label][1] / 3
    memory = [s.memory.parts["tables and row optimizer"] for s in (v1, v2, v3)]
    assert memory[1] == pytest.approx(16 * memory[0])
    assert memory[2] == pytest.approx(memory[1] / 8)
    assert text.count("\n") == 8
    assert text.endswith(text_of(MEASURED)), "a prediction says how far such predictions were off"
