"""Network tiers made of namespaces: bytes against the plan, placements against each other, a host cut off.

Needs root and iproute2; the measured runs are slow.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import pytest
from gemworks.parallel import ParallelPlan
from gemworks.parallel.emulated_bench import (
    TIER_COLUMNS,
    jobs_of,
    measure_all,
    row_major_splits,
    rows_of,
    text_of,
    worst_splits,
)
from gemworks.parallel.emulated_network import EmulatedNetwork, TierCounters, why_not
from gemworks.parallel.emulated_run import StepShape, launch, step_profile, step_until_failure
from gemworks.parallel.layout import Layout
from gemworks.parallel.simulation import simulate
from gemworks.parallel.splits import layout_of_splits, place_splits
from gemworks.parallel.step_graph import GLOO, SimulationConfig

SHAPE = StepShape(width=128, num_blocks=2, samples=64, num_rows=8192, ids_per_sample=32)
FIVE = ParallelPlan.for_world(8, shard=4, expert=2, expert_shard=2, table_group=2, replica_shard=2)


@pytest.fixture
def network() -> Iterator[EmulatedNetwork]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with EmulatedNetwork(prefix="gwtest-") as up:
        yield up
    assert all(not name.startswith("gwtest-") for name in _namespaces())


def _namespaces() -> list[str]:
    from pathlib import Path

    return [p.name for p in Path("/run/netns").glob("*")]


def test_row_major_and_worst_places_are_what_they_say() -> None:
    cluster = EmulatedNetwork().cluster()
    model = step_profile(SHAPE)
    row_major = row_major_splits(FIVE, cluster)
    layout, want = layout_of_splits(FIVE, row_major, cluster), Layout.row_major(FIVE)
    assert all(layout.ranks[v].equal(want.ranks[v]) for v in FIVE.views())
    best = place_splits(FIVE, model, cluster)
    assert best is not None
    config = SimulationConfig(balance="none", blocking=True, wire_factor=GLOO)
    times = [
        simulate(FIVE, model, cluster, config, splits=s, check_memory=False).step_us
        for s in (best, row_major, worst_splits(FIVE, model, cluster))
    ]
    assert times == sorted(times)
    assert times[0] < times[1] < times[2]


def test_rates_of_the_emulated_cluster_are_shares_of_its_links() -> None:
    """A rank has half of its host's link, and a quarter of its zone's."""
    cluster = EmulatedNetwork(host_mbit=400.0, cross_mbit=80.0).cluster()
    assert cluster.tiers["zone"]["all_gather"].bytes_per_s == 25e6
    assert cluster.tiers["cross_zone"]["all_gather"].bytes_per_s == 2.5e6
    assert cluster.oversubscription == 10.0
    before = TierCounters(nvlink=1.0, zone=2.0, cross_zone=3.0, framing_share=0.1)
    after = TierCounters(nvlink=5.0, zone=10.0, cross_zone=9.0, framing_share=0.2)
    assert after.minus(before, 2) == {"nvlink": 2.0, "zone": 4.0, "cross_zone": 3.0}
    assert GLOO == {"reduce_scatter": 2.0}


def test_a_blocking_step_is_the_sum_of_its_operations() -> None:
    cluster = EmulatedNetwork().cluster()
    s = simulate(
        FIVE, step_profile(SHAPE), cluster, SimulationConfig(blocking=True, sm_slowdown=0.0), check_memory=False
    )
    assert s.step_us == pytest.approx(sum(o.us for o in s.ops))
    ring = simulate(FIVE, step_profile(SHAPE), cluster, SimulationConfig(), check_memory=False).bytes_by_tier
    gloo = simulate(
        FIVE, step_profile(SHAPE), cluster, SimulationConfig(wire_factor=GLOO), check_memory=False
    ).bytes_by_tier
    assert all(gloo[t] >= b for t, b in ring.items())
    assert sum(gloo.values()) > 1.2 * sum(ring.values())


def test_without_root_or_tools_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "needs root" in why_not()
    with pytest.raises(ValueError, match="needs root"):
        EmulatedNetwork().up()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert "ip and tc not found; install iproute2" in why_not()


@pytest.mark.dist
@pytest.mark.slow
def test_bytes_equal_the_plan_and_good_places_are_faster(network: EmulatedNetwork) -> None:
    answers = launch(network, measure_all, (network, 2, (SHAPE,), False), timeout_s=240)
    assert all(good for good, _ in answers), [v for good, v in answers if not good][:1]
    tiers, errors = rows_of(answers[0][1])
    assert set(tiers[0]) <= {*TIER_COLUMNS, "ms"}
    for row in tiers:
        assert row["measured_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.02, abs=50_000), row
        assert row["framing_pct"] < 2.0
    assert {r["split"] for r in errors} == {"calibrate", "validate"}
    best, row_major, worst = (r["measured_ms"] for r in errors if r["split"] == "validate")
    assert best < row_major < worst
    assert "cross-zone" in text_of(tiers, errors)


@pytest.mark.dist
@pytest.mark.slow
def test_a_host_cut_off_in_mid_step_stops_the_others_in_time(network: EmulatedNetwork) -> None:
    cluster, timeout_s = network.cluster(), 5.0
    job = jobs_of(SHAPE, cluster, ladders=False)[0]
    cut: list[float] = []

    def pull() -> None:
        four_steps = 50e6  # bytes between hosts
        end = time.monotonic() + 90
        while network.counters().zone < four_steps and time.monotonic() < end:
            time.sleep(0.2)
        network.cut(3)
        cut.append(time.monotonic())

    thread = threading.Thread(target=pull)
    thread.start()
    answers = launch(network, step_until_failure, (cluster, SHAPE, job, timeout_s, 60.0), timeout_s=240)
    thread.join()
    for good, failure in answers:
        assert good, failure
        assert failure is not None, "nobody noticed"
        assert failure.steps >= 1
        assert cut[0] <= failure.at_s < cut[0] + timeout_s + 5.0, dataclasses.asdict(failure)
    assert any("imed out" in failure.message for _, failure in answers)
