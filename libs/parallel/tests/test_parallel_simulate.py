"""The simulator: closed forms, conservation, memory."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import pytest
from gemworks.parallel import GroupShape, ParallelPlan, collective_cost, edge_bytes, presets
from gemworks.parallel.costs import Posting
from gemworks.parallel.lengths import CostModel, LengthLaw, expected_imbalance
from gemworks.parallel.memory import COMMUNICATOR_BYTES, InfeasiblePlan, estimate_memory
from gemworks.parallel.placement import split_shape
from gemworks.parallel.plan import View
from gemworks.parallel.planner import search
from gemworks.parallel.profile import LayerProfile, ModelProfile, gem_like, scaled_batch
from gemworks.parallel.simulation import simulate, with_validation
from gemworks.parallel.splits import layout_of_splits, model_traffic, num_communicators, place_splits
from gemworks.parallel.step_graph import SimulationConfig
from gemworks.parallel.tables import TableSpec
from gemworks.parallel.timeline import Op, run_ops
from hypothesis import given, settings
from hypothesis import strategies as st

STILL = SimulationConfig(sm_slowdown=0.0, balance="none", flat_copies=False)
CONSTANT = LengthLaw(name="uniform", max_len=64, low=64)


def dense_model(n: int = 4, params: int = 1_000_000, us: float = 100.0, **kwargs) -> ModelProfile:
    layers = tuple(
        LayerProfile(name=f"l{i}", params=params, flops=1e9, forward_us=us, backward_us=2 * us, length_share=1.0)
        for i in range(n)
    )
    return ModelProfile(name="dense", layers=layers, law=CONSTANT, optimizer_us_per_million=0.0, **kwargs)


def test_one_gpu_is_the_sum_of_its_layers_exactly() -> None:
    s = simulate(ParallelPlan.for_world(1, shard=1), dense_model(), presets.h200_host(1), STILL)
    assert s.step_us == pytest.approx(4 * 300.0, rel=1e-12)
    assert s.scaling_ratio == pytest.approx(1.0)
    assert s.mfu == pytest.approx(3 * 4e9 / (1200e-6 * 989e12))
    assert s.collectives == {}
    assert s.bytes_by_tier == {}


def test_replication_with_nothing_to_hide_behind_is_compute_plus_the_last_all_reduce() -> None:
    c = presets.h200_host(8)
    m = dense_model(n=1, params=50_000_000)
    s = simulate(ParallelPlan.for_world(8, shard=1), m, c, STILL)
    reduce = collective_cost("all_reduce", GroupShape(size=8), 50e6 * 4, c).us
    assert s.step_us == pytest.approx(300.0 + reduce, rel=1e-12)
    assert s.items["exposed: dense.replica all_reduce"] == pytest.approx(reduce)


def test_fsdp_without_prefetch_of_one_layer_in_closed_form() -> None:
    c = presets.h200_host(8)
    m = dense_model(n=1, params=50_000_000)
    s = simulate(ParallelPlan.for_world(8, shard=8), m, c, STILL)
    gather = collective_cost("all_gather", GroupShape(size=8), 50e6 * 2, c).us
    scatter = collective_cost("reduce_scatter", GroupShape(size=8), 50e6 * 4, c).us
    # The last layer's weights stay for its backward: one gather.
    assert s.step_us == pytest.approx(gather + 300.0 + scatter, rel=1e-12)


def test_fsdp_copies_of_one_layer_in_closed_form() -> None:
    """Gathered weights leave the flat buffer (read + write, bf16), gradients enter it (bf16 read, fp32 written)."""
    c = presets.h200_host(8)
    plan, m = ParallelPlan.for_world(8, shard=8), dense_model(n=3, params=50_000_000, us=100_000.0)
    with_copies = simulate(plan, m, c, dataclasses.replace(STILL, flat_copies=True))
    gathers = 3 + 2  # the last layer's weights stay
    want = 50e6 * (gathers * 2 * 2 + 3 * (2 + 4)) / c.gpu.hbm_bytes_per_s * 1e6
    assert with_copies.items["flat-buffer copies"] == pytest.approx(want)
    assert with_copies.step_us - simulate(plan, m, c, STILL).step_us == pytest.approx(want)


def test_replicated_weights_are_averaged_in_one_piece_after_backward() -> None:
    c, m = presets.h200_host(8), dense_model(n=5, params=10_000_000)
    s = simulate(ParallelPlan.for_world(8, shard=1), m, c, STILL)
    reduce = collective_cost("all_reduce", GroupShape(size=8), 5 * 10e6 * 4, c).us
    assert s.step_us == pytest.approx(5 * 300.0 + reduce, rel=1e-12)
    assert s.collectives["dense.replica all_reduce"][0] == 1


def test_fsdp_hides_all_but_the_first_gather_and_last_scatter_behind_long_layers() -> None:
    c = presets.h200_host(8)
    m = dense_model(n=6, params=1_000_000, us=10_000.0)
    s = simulate(ParallelPlan.for_world(8, shard=8), m, c, STILL)
    gather = collective_cost("all_gather", GroupShape(size=8), 1e6 * 2, c).us
    scatter = collective_cost("reduce_scatter", GroupShape(size=8), 1e6 * 4, c).us
    assert s.step_us == pytest.approx(6 * 30_000.0 + gather + scatter, rel=1e-12)
    without = simulate(ParallelPlan.for_world(8, shard=8), m, c, dataclasses.replace(STILL, prefetch=False))
    # Without prefetch every gather but the kept last layer's is exposed, in forward (6) and in backward (5), and in
    # backward it queues behind the scatter of the layer before.
    assert without.step_us == pytest.approx(6 * 30_000.0 + 11 * gather + 6 * scatter, rel=1e-9)


def test_communication_bound_steps_take_the_time_of_the_network() -> None:
    c = presets.h200_host(8)
    m = dense_model(n=6, params=100_000_000, us=0.001)
    s = simulate(ParallelPlan.for_world(8, shard=8), m, c, STILL)
    total = sum(us for _, us, _ in s.collectives.values())
    assert s.step_us == pytest.approx(total, rel=1e-3)


def test_imbalance_is_the_expected_maximum_over_ranks() -> None:
    law = LengthLaw.named("zipf1.2", 2048)
    m = dataclasses.replace(dense_model(us=100_000.0), law=law, cost=CostModel(linear=1.0), samples_per_rank=1024)
    plan, c = ParallelPlan.for_world(8, shard=8), presets.h200_host(8)
    mean, std = m.cost.mean_and_std(law, 1024)
    none = simulate(plan, m, c, STILL)
    assert none.imbalance == pytest.approx(expected_imbalance(mean, std, 8))
    assert none.items["imbalance"] == pytest.approx(4 * 300_000.0 * (none.imbalance - 1))
    bbs = simulate(plan, m, c, dataclasses.replace(STILL, balance="bbs"))
    assert bbs.imbalance - 1 == pytest.approx((none.imbalance - 1) * 0.3)


def test_sm_contention_stretches_only_what_overlaps() -> None:
    ops = [
        Op("gather", "nvlink", 50.0, [], "g"),
        Op("a", "compute", 100.0, [], "compute"),
        Op("b", "compute", 100.0, [], "compute"),
    ]
    items = run_ops(ops, 0.1)
    # While 50 us of gather run, compute advances 50 / 1.1: the rest takes 100 - 50 / 1.1.
    assert ops[1].end == pytest.approx(100 + 50 - 50 / 1.1)
    assert ops[2].end == pytest.approx(ops[1].end + 100)
    assert sum(items.values()) == pytest.approx(ops[2].end)
    assert items["SM contention"] == pytest.approx(50 - 50 / 1.1)


def test_a_wait_is_charged_to_what_ran_not_to_what_stood_in_line() -> None:
    ops = [
        Op("a", "compute", 10.0, [], "compute"),
        Op("publish", "nvlink", 30.0, [0], "publish"),
        Op("average", "network", 5.0, [1], "average"),
        Op("b", "compute", 1.0, [2], "compute"),
    ]
    items = run_ops(ops, 0.0)
    assert items == pytest.approx({"compute": 11.0, "publish": 30.0, "average": 5.0})


worlds = st.sampled_from([8, 64, 1024, 4096])


@given(
    worlds,
    st.integers(0, 10),
    st.integers(0, 1),
    st.integers(0, 6),
    st.integers(0, 10),
    st.integers(0, 3),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_items_sum_to_the_step_and_bytes_are_conserved(world, a, b, e, g, r, overlap) -> None:
    shard, expert = min(2**a, world), 2**b
    expert_shard = min(2**e, world // expert)
    group = min(2**g, world)
    replica_shard = min(2**r, world // group)
    plan = ParallelPlan.for_world(
        world, shard=shard, expert=expert, expert_shard=expert_shard, table_group=group, replica_shard=replica_shard
    )
    c, m = presets.roce_cluster(world), gem_like(num_layers=3)
    config = SimulationConfig(overlap_exchange=overlap, overlap_tables=overlap, prefetch=overlap)
    if place_splits(plan, m, c) is None:
        return
    s = simulate(plan, m, c, config, check_memory=False)
    assert sum(s.items.values()) == pytest.approx(s.step_us, rel=1e-9)
    assert min(s.items.values()) >= 0
    assert s.step_us >= s.alone_us

    # Bytes by the plan's own arithmetic: what a rank sends of each collective.
    def share(n: int) -> float:
        return (n - 1) / n

    def reduced(view: View, nbytes: float) -> float:
        n = plan.sizes(view)["replica"]
        shape = split_shape(n, s.splits[view]["replica"])
        return edge_bytes("all_reduce", n, nbytes, collective_cost("all_reduce", shape, nbytes, c).algorithm)

    layers = [x for x in m.layers if x.kind == "dense"]
    experts = [x for x in m.layers if x.kind == "expert"]
    gathers = 2 if shard > 1 else 0
    want = sum(share(shard) * x.params * (gathers * 2 + 4) for x in layers)
    want -= share(shard) * layers[-1].params * 2  # the last layer's weights stay
    if shard == 1:  # replicated weights are averaged in one piece
        want += reduced("dense", m.dense_params * 4.0)
    for x in layers if shard > 1 else []:
        want += reduced("dense", x.params / shard * 4)
    for x in experts:
        w = x.params / expert
        want += share(expert_shard) * w * (2 * 2 + 4) + reduced("experts", w / expert_shard * 4)
        want += 4 * share(expert) * x.exchange_bytes * expert
    tables = m.table_bytes / group
    want += share(group) * m.ids_per_batch * (2 * m.bytes_per_row + 8)
    want += share(replica_shard) * (2 * tables + m.table_weight_bytes / group)  # the lookup gathers weights alone
    want += reduced("sparse", tables / replica_shard)
    assert sum(s.bytes_by_tier.values()) == pytest.approx(want, rel=1e-9)
    layout = layout_of_splits(plan, s.splits, c)
    assert num_communicators(plan, s.splits, c) == len({tuple(sorted(x)) for x in layout.communicators(0)})


def test_recompute_optimizer_and_tables_in_closed_form() -> None:
    c = presets.h200_host(8)
    layers = tuple(
        LayerProfile(
            name=f"l{i}",
            params=8_000_000,
            flops=1e9,
            forward_us=100.0,
            backward_us=200.0,
            recompute=0.3,
            length_share=0.0,
        )
        for i in range(3)
    )
    expert = LayerProfile(
        name="e", params=4_000_000, flops=1e9, forward_us=50.0, backward_us=90.0, length_share=0.0, kind="expert"
    )
    model = ModelProfile(
        name="m",
        layers=(*layers, expert),
        num_experts=2,
        law=CONSTANT,
        optimizer_us_per_million=5.0,
        tables=(TableSpec(name="t", num_rows=10**5, dim=64),),
        ids_per_batch=1e5,
        bytes_per_row=128.0,
    )
    plan = ParallelPlan.for_world(8, shard=4, expert=2, expert_shard=2, table_group=8)
    s = simulate(plan, model, c, STILL)
    assert s.items["recompute"] == pytest.approx(3 * 0.3 * 100.0)
    assert s.items["optimizer"] == pytest.approx((24 / 4 + 4 / 2 / 2) * 5.0)
    rows_us = 2 * 1e5 * 128 / c.gpu.hbm_bytes_per_s * 1e6
    assert s.items["lookup and table update"] == pytest.approx(2.5 * rows_us)
    assert s.alone_us == pytest.approx(3 * 300.0 + 140.0 + 2.5 * rows_us)
    timed = simulate(plan, dataclasses.replace(model, lookup_us=7.0, update_us=11.0), c, STILL)
    assert timed.items["lookup and table update"] == pytest.approx(18.0)


def test_overlap_hides_exchange_and_table_gathers_behind_what_is_long_enough() -> None:
    """An exchange that overlaps costs the neighbour's time at most; else it is exposed whole, four times a step."""
    c = presets.h200_host(8)
    dense = [
        LayerProfile(name=f"d{i}", params=8, flops=1e9, forward_us=9e3, backward_us=9e3, length_share=0.0)
        for i in range(4)
    ]
    expert = LayerProfile(
        name="e",
        params=8,
        flops=1e9,
        forward_us=9e3,
        backward_us=9e3,
        length_share=0.0,
        exchange_bytes=2e7,
        kind="expert",
    )
    model = ModelProfile(
        name="m",
        layers=(*dense[:2], expert, *dense[2:]),
        num_experts=2,
        law=CONSTANT,
        optimizer_us_per_million=0.0,
        tables=(TableSpec(name="t", num_rows=10**7, dim=64),),
        ids_per_batch=1.0,
        bytes_per_row=1.0,
    )
    plan = ParallelPlan.for_world(8, shard=1, expert=2, table_group=1, replica_shard=8)

    def exposed(part: str, **changes: bool) -> float:
        s = simulate(plan, model, c, dataclasses.replace(STILL, **changes))
        return sum(us for label, us in s.items.items() if label.startswith("exposed: " + part))

    one = collective_cost("all_gather", GroupShape(size=2), 4e7, c).us
    other = collective_cost("reduce_scatter", GroupShape(size=2), 4e7, c).us
    assert exposed("experts.expert ") == pytest.approx(0.0, abs=1e-6)
    assert exposed("experts.expert ", overlap_exchange=False) == pytest.approx(2 * (one + other), rel=1e-9)
    bytes_ = model.table_weight_bytes, model.table_bytes
    forward, backward = (collective_cost("all_gather", GroupShape(size=8), b, c).us for b in bytes_)
    assert exposed("sparse.replica_shard all_gather") == pytest.approx(forward, rel=1e-9)
    assert exposed("sparse.replica_shard all_gather", overlap_tables=False) == pytest.approx(forward + backward)


def test_the_traffic_that_decides_places_is_what_a_step_sends() -> None:
    c, m = presets.roce_cluster(64), gem_like(num_layers=3, table_rows=10**8)
    plan = ParallelPlan.for_world(64, shard=64, expert=2, expert_shard=32, table_group=8, replica_shard=8)
    s = simulate(plan, m, c, STILL)
    sizes = {(v, a): n for v in plan.views() for a, n in plan.sizes(v).items()}
    want = sum(t.calls * edge_bytes(t.collective, sizes[t.view, t.axis], t.nbytes) for t in model_traffic(plan, m))
    want -= edge_bytes("all_gather", 64, m.layers[-1].params * m.weight_bytes)  # the last layer's weights stay
    assert sum(s.bytes_by_tier.values()) == pytest.approx(want, rel=1e-9)


def test_slower_tiers_and_larger_batches_do_what_they_must() -> None:
    c, m = presets.roce_cluster(1024), gem_like(num_layers=2)
    plan = ParallelPlan.for_world(1024, shard=256, expert=2, expert_shard=16, table_group=256, replica_shard=4)
    base = simulate(plan, m, c, check_memory=False)
    for tier in ("nvlink", "zone"):
        assert simulate(plan, m, c.scaled(tier, 0.25), check_memory=False).step_us > base.step_us
    big = simulate(plan, scaled_batch(m, 4), c, check_memory=False)
    assert big.scaling_ratio > base.scaling_ratio


def test_messages_of_an_all_to_all_are_posted_one_by_one_while_the_wire_works() -> None:
    """LogGP: the larger of posting and of the bytes; peers on NVLink are not posted to."""
    c = presets.roce_cluster(4096, gpus_per_zone=1024)
    shape = GroupShape(size=4096, num_domains=512, num_zones=4)
    posting = Posting(us=3.0, chunk_bytes=131072)

    def us(nbytes: float, posting: Posting | None) -> float:
        return collective_cost("all_to_all", shape, nbytes, c, posting=posting).us

    latency = collective_cost("all_to_all", shape, 0.0, c).us
    assert us(1e6, posting) == pytest.approx(latency + 4088 * 3.0), "244 bytes a peer: all posting"
    assert us(1e12, posting) == us(1e12, None), "244 MB a peer: all wire"
    assert us(0.0, posting) == latency
    assert posting.us_of(10, 131073) == 10 * 2 * 3.0
    near = GroupShape(size=8)
    assert collective_cost("all_to_all", near, 1e3, c, posting=posting) == collective_cost("all_to_all", near, 1e3, c)


def test_replicas_averaged_every_n_steps_cost_an_nth() -> None:
    c, m = presets.roce_cluster(4096), gem_like(num_layers=2)
    config = dataclasses.replace(STILL, posting=None)

    def reduce(n: int) -> tuple[float, float]:
        plan = ParallelPlan.for_world(4096, shard=256, expert=2, expert_shard=16, table_group=256, sync_every=n)
        every = ParallelPlan.for_world(4096, shard=256, expert=2, expert_shard=16, table_group=256)
        s = simulate(plan, m, c, config, splits=place_splits(every, m, c), check_memory=False)
        return s.collectives["sparse.replica all_reduce"][1], sum(s.bytes_by_tier.values())

    (one, sent_one), (ten, sent_ten) = reduce(1), reduce(10)
    assert ten == pytest.approx(one / 10)
    assert sent_ten < sent_one
    with pytest.raises(ValueError, match="sync_every"):
        ParallelPlan.for_world(8, shard=8, table_group=4, sync_every=0)
    plan = ParallelPlan.for_world(8, shard=8, table_group=4, sync_every=5)
    assert plan.text().endswith("averaged every 5 steps")
    assert ParallelPlan.from_dict(plan.to_dict()) == plan


def test_m8_communicators_are_in_the_memory() -> None:
    """M8: the memory estimate counts distinct groups."""
    c, m = presets.h200_host(8), dense_model()
    plan = ParallelPlan.for_world(8, shard=4)
    two = estimate_memory(plan, m, c, 2)
    assert two.parts["communicators (2)"] == 2 * COMMUNICATOR_BYTES
    assert simulate(plan, m, c).memory.parts["communicators (2)"] == 2 * COMMUNICATOR_BYTES


def test_two_gathered_layers_and_the_joint_batch_of_experts_are_in_the_memory() -> None:
    """Of layers that are sharded the two largest are whole at once, and one layer's gradients; an expert's backward
    keeps the samples of its whole group."""
    c = presets.h200_host(8)
    layers = tuple(
        LayerProfile(name=f"l{i}", params=params, flops=1e9, activation_bytes=1000.0, length_share=0.0)
        for i, params in enumerate((1_000_000, 3_000_000, 2_000_000))
    )
    expert = LayerProfile(
        name="e",
        params=800_000,
        flops=1e9,
        activation_bytes=1000.0,
        length_share=0.0,
        exchange_bytes=5e6,
        kind="expert",
    )
    model = ModelProfile(
        name="m", layers=(*layers, expert), num_experts=4, law=CONSTANT, weight_bytes=2.0, gradient_bytes=4.0
    )
    plan = ParallelPlan.for_world(8, shard=8, expert=4, expert_shard=2)
    found = estimate_memory(plan, model, c, 0).parts["activations and gathered layers"]
    assert found == pytest.approx(4 * 1000.0 + 4 * 5e6 + (3e6 + 2e6) * 2.0 + 3e6 * 4.0)


def test_the_peak_is_the_larger_of_activations_and_gathered_tables_with_slack_on_what_moves() -> None:
    c = presets.h200_host(8)

    def parts(activation_bytes: float, replica_shard: int = 4) -> dict[str, float]:
        plan = ParallelPlan.for_world(8, shard=1, table_group=2, replica_shard=replica_shard)
        layer = LayerProfile(name="l", params=1, flops=1e9, activation_bytes=activation_bytes)
        table = TableSpec(name="t", num_rows=10**6, dim=255)
        model = ModelProfile(name="m", layers=(layer,), tables=(table,), ids_per_batch=1e3, bytes_per_row=500.0)
        return dict(estimate_memory(plan, model, c, 0).parts)

    copy, rows = 10**6 * 1024 / 2, 2 * 1e3 * 500.0
    small, large = parts(1e6), parts(1e9)
    assert small["tables and row optimizer"] == large["tables and row optimizer"] == copy / 4
    assert small["gathered tables"] == copy
    assert "activations and gathered layers" not in small
    assert small["allocator slack"] == pytest.approx(0.08 * (copy + rows))
    assert large["activations and gathered layers"] == 1e9
    assert "gathered tables" not in large
    assert large["allocator slack"] == pytest.approx(0.08 * (1e9 + rows))
    whole = parts(1e6, replica_shard=1)  # nothing to gather: the stored piece is the buffer
    assert whole["tables and row optimizer"] == copy
    assert "gathered tables" not in whole
    assert whole["activations and gathered layers"] == 1e6


def test_m6_a_plan_that_does_not_fit_says_need_capacity_largest_tables_and_what_to_change() -> None:
    """M6: the report of an infeasible plan."""
    c = presets.roce_cluster(64)
    m = gem_like(num_layers=1, table_rows=10**10)
    plan = ParallelPlan.for_world(64, shard=64, expert=2, expert_shard=32, table_group=8, replica_shard=1)
    with pytest.raises(InfeasiblePlan) as caught:
        simulate(plan, m, c)
    text = str(caught.value)
    for part in (
        "need ",
        "GiB a GPU, H200 has 139.0 GiB",
        "largest tables:",
        "table0: 1250000000 x 128",
        "raise sparse.replica_shard above 1",
        "raise sparse.table_group above 8",
    ):
        assert part in text, text
    whole = ParallelPlan.for_world(64, shard=64, expert=2, expert_shard=32)
    assert simulate(whole, dataclasses.replace(m, tables=()), c).memory.fits
    # The report itself must not crash, whatever is the largest part.
    for change in ({"optimizer_bytes": 1e7}, {"table_state_bytes": 1e6}):
        with pytest.raises(InfeasiblePlan, match="change: "):
            simulate(plan, dataclasses.replace(m, **change), c)
    with pytest.raises(ValueError, match="no plan fits"):
        search(gem_like(num_layers=1, table_rows=10**12), presets.h200_host(8))


def test_text_json_and_trace_agree() -> None:
    c, m = presets.roce_cluster(1024), gem_like(num_layers=2)
    plan = ParallelPlan.for_world(1024, shard=256, expert=2, expert_shard=16, table_group=256, replica_shard=4)
    s = simulate(plan, m, c)
    content = json.loads(s.to_json())
    assert content["mfu"] == pytest.approx(content["local_mfu"] * content["scaling_ratio"])
    assert sum(content["items_us"].values()) == pytest.approx(content["step_us"])
    assert "error:" in s.text()
    trace = json.loads(s.chrome_trace())["traceEvents"]
    assert max(e["ts"] + e["dur"] for e in trace if e["ph"] == "X") == pytest.approx(s.step_us)
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for e in trace:
        if e["ph"] == "X":
            by_thread.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in by_thread.values():
        assert all(b <= a2 + 1e-6 for (_, b), (a2, _) in pairwise(spans))


def test_profile_round_trip_and_errors(tmp_path) -> None:
    m = gem_like(num_layers=1)
    (tmp_path / "m.json").write_text(m.to_json())
    assert ModelProfile.from_json(tmp_path / "m.json") == m
    with pytest.raises(ValueError, match="model profile"):
        ModelProfile.from_dict({"layers": [{"nope": 1}], "name": "x"})
    for text, message in (
        ("[]", "got list, expected an object"),
        ("{", "m.json': not JSON"),
        ("{}", "no 'layers' in it"),
    ):
        (tmp_path / "m.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            ModelProfile.from_json(tmp_path / "m.json")
    with pytest.raises(ValueError, match="num_experts"):
        dataclasses.replace(m, num_experts=0)
    with pytest.raises(ValueError, match="a divisor of 2"):
        simulate(ParallelPlan.for_world(8, shard=8, expert=4), gem_like(), presets.h200_host())


def test_validation_text_comes_from_the_measurements() -> None:
    rows = "\n".join(
        [
            "config,split,predicted_ms,measured_ms,error_pct,gpu",
            "a,calibrate,1,2,50,H200",
            "b,validate,1,1,2.0,H200",
            "c,validate,1,1,-4.0,H200",
        ]
    )
    config = with_validation(SimulationConfig(), rows)
    assert "median 3.0 %, worst 4.0 % over 2" in config.validation
    with pytest.raises(ValueError, match="split=validate"):
        with_validation(SimulationConfig(), rows.replace("validate", "calibrate"))
