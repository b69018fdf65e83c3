"""Closed forms of collectives, contention and conservation of bytes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from gemworks.parallel import (
    COLLECTIVES,
    ClusterSpec,
    Collective,
    GroupShape,
    Rate,
    collective_cost,
    edge_bytes,
    presets,
)
from gemworks.parallel.cluster import TIERS, Tier
from gemworks.parallel.costs import Algorithm
from hypothesis import given, settings
from hypothesis import strategies as st


def cluster(domain: int, domains: int, zones: int) -> ClusterSpec:
    rates = {"nvlink": (100e9, 2.0), "zone": (10e9, 5.0), "cross_zone": (1e9, 9.0)}
    return dataclasses.replace(
        presets.roce_cluster(2048),
        gpus_per_domain=domain,
        domains_per_zone=domains,
        num_zones=zones,
        tiers={t: {c: Rate(bytes_per_s=w, latency_us=a) for c in COLLECTIVES} for t, (w, a) in rates.items()},
    )


@pytest.mark.parametrize("n", [2, 3, 8])
def test_closed_forms_on_one_tier_exactly(n: int) -> None:
    c, S, a, w = cluster(n, 1, 1), 1e6, 2.0, 100e9
    shape = GroupShape(size=n)

    def us(x: Collective, algorithm: Algorithm = "auto") -> float:
        return collective_cost(x, shape, S, c, algorithm).us

    part = (n - 1) / n * S / w * 1e6
    assert us("all_gather") == pytest.approx((n - 1) * a + part, rel=1e-12)
    assert us("reduce_scatter") == pytest.approx((n - 1) * a + part, rel=1e-12)
    assert us("all_reduce", "ring") == pytest.approx(2 * (n - 1) * a + 2 * part, rel=1e-12)
    assert us("all_reduce", "tree") == pytest.approx(2 * math.ceil(math.log2(n)) * a + 2 * S / w * 1e6, rel=1e-12)
    assert us("all_reduce") == min(us("all_reduce", "ring"), us("all_reduce", "tree"))
    assert us("all_to_all") == pytest.approx(a + part, rel=1e-12)
    assert us("broadcast") == pytest.approx((n - 1) * a + S / w * 1e6, rel=1e-12)


def test_auto_takes_the_tree_for_small_and_the_ring_for_large_messages() -> None:
    c, shape = cluster(8, 16, 1), GroupShape(size=128, num_domains=16)
    assert collective_cost("all_reduce", shape, 1e3, c).algorithm == "tree"
    assert collective_cost("all_reduce", shape, 1e10, c).algorithm == "ring"


def test_a_group_with_a_whole_domain_uses_all_its_nics() -> None:
    c = cluster(8, 4, 1)
    wide = collective_cost("all_gather", GroupShape(size=32, num_domains=4), 1e9, c)
    thin = collective_cost("all_gather", GroupShape(size=4, num_domains=4), 1e9, c)
    assert wide.us - wide.latency_us == pytest.approx(31 / 32 * 1e9 / (8 * 10e9) * 1e6)
    assert thin.us - thin.latency_us == pytest.approx(3 / 4 * 1e9 / 10e9 * 1e6)
    assert (wide.tier, thin.tier) == ("zone", "zone")


def test_a_group_is_as_fast_as_where_it_has_the_fewest_members() -> None:
    c = cluster(4, 2, 1)
    uneven = collective_cost("all_gather", torch.tensor([[0, 1, 2, 4], [3, 5, 6, 7]]), 1e9, c)
    even = collective_cost("all_gather", torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7]]), 1e9, c)
    assert uneven.us - uneven.latency_us == pytest.approx(3 / 4 * 1e9 / 10e9 * 1e6)
    assert even.us - even.latency_us == pytest.approx(3 / 4 * 1e9 / (2 * 10e9) * 1e6)


def test_latency_over_three_tiers_in_closed_form() -> None:
    """A ring of 8 over 4 domains in 2 zones: 4 edges of 2 us, 2 of 5, 2 of 9, of which a block passes all but one; a
    tree has one level on each tier."""
    c, shape = cluster(2, 2, 2), GroupShape(size=8, num_domains=4, num_zones=2)
    assert collective_cost("all_gather", shape, 0.0, c).latency_us == 4 * 2 + 2 * 5 + 2 * 9 - 2
    assert collective_cost("all_reduce", shape, 0.0, c, "ring").latency_us == 2 * (4 * 2 + 2 * 5 + 2 * 9 - 2)
    assert collective_cost("all_reduce", shape, 0.0, c, "tree").latency_us == 2 * (2 + 5 + 9)
    assert collective_cost("all_to_all", shape, 0.0, c).latency_us == 9


def test_an_all_to_all_takes_as_long_as_its_slowest_tier() -> None:
    """Of a rank's S bytes 1/8 go to its own domain's other rank, 6/8 leave the domain, 4/8 leave the zone."""
    shape = GroupShape(size=8, num_domains=4, num_zones=2)
    for tier, share in (("nvlink", 1 / 8), ("zone", 6 / 8), ("cross_zone", 4 / 8)):
        c = cluster(2, 2, 2)
        for t in TIERS:  # one tier slow, the others fast
            c = c.scaled(t, (1e9 if t == tier else 1e15) / c.tiers[t]["all_to_all"].bytes_per_s)
        cost = collective_cost("all_to_all", shape, 8e6, c)
        assert cost.tier == tier
        assert cost.us - cost.latency_us == pytest.approx(share * 8e6 / 1e9 * 1e6, rel=1e-9)


def test_a_tier_that_the_cluster_lacks_is_named() -> None:
    """A part of a cluster has no links between its hosts until somebody says what they can do."""
    whole = cluster(4, 2, 1)
    lacks = dataclasses.replace(whole, domains_per_zone=1, tiers={"nvlink": whole.tiers["nvlink"]})
    with pytest.raises(ValueError, match=r"tiers: zone is missing .* add \[tiers.zone\] or shrink the shape"):
        dataclasses.replace(lacks, domains_per_zone=2)
    object.__setattr__(lacks, "domains_per_zone", 2)
    with pytest.raises(ValueError, match=r"crosses the tier zone, which roce-3-tier lacks; add \[tiers.zone\]"):
        collective_cost("all_gather", GroupShape(size=8, num_domains=2), 1e6, lacks)


def test_groups_that_cross_zones_share_the_uplink() -> None:
    c = cluster(8, 4, 2)
    one_per_zone = collective_cost("all_reduce", GroupShape(size=2, num_domains=2, num_zones=2), 1e9, c, "ring")
    # Each of the zone's 32 GPUs sends 2 * 1/2 S over an uplink of 32 * 1 GB/s.
    assert one_per_zone.us - one_per_zone.latency_us == pytest.approx(1e9 / 1e9 * 1e6)
    assert one_per_zone.tier == "cross_zone"


def test_an_uplink_is_shared_where_most_groups_leave_a_zone() -> None:
    """Two of three groups join the first two zones of two GPUs; the third stays at home."""
    c = cluster(2, 1, 3)
    cost = collective_cost("all_gather", torch.tensor([[0, 2], [1, 3], [4, 5]]), 1e9, c)
    assert cost.tier == "cross_zone"
    # each sends half of S; the two groups have the zone's uplink of 2 x 1 GB/s
    assert cost.us - cost.latency_us == pytest.approx(0.5 * 1e9 * 2 / (2 * 1e9) * 1e6)


def test_groups_with_one_domain_in_each_zone_pass_its_nics_too() -> None:
    """What leaves a zone leaves a host first: a fast uplink does not make NICs faster, and needs no zone's rate."""
    c = cluster(8, 4, 2).scaled("zone", 0.01).scaled("cross_zone", 100.0)
    for collective in ("all_reduce", "all_to_all"):
        assert (
            collective_cost(collective, GroupShape(size=2, num_domains=2, num_zones=2), 1e9, c, "auto").tier == "zone"
        )
    hosts = dataclasses.replace(c, domains_per_zone=1, tiers={t: c.tiers[t] for t in ("nvlink", "cross_zone")})
    cost = collective_cost("all_gather", GroupShape(size=2, num_domains=2, num_zones=2), 1e9, hosts)
    assert cost.tier == "cross_zone"


shapes = st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))


@st.composite
def group_shapes(draw):
    domain, domains, zones = draw(shapes)
    pick = lambda n: draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))  # noqa: E731
    return (domain, domains, zones), (pick(domain), pick(domains), pick(zones))


@given(group_shapes(), st.sampled_from(COLLECTIVES))
@settings(max_examples=150, deadline=None)
def test_a_shape_costs_what_its_ranks_cost(case, collective) -> None:
    (D, Z, C), (m, d, z) = case
    c = cluster(D, Z, C)
    # Axes (other, group) with the group's share of each tier innermost in that tier.
    array = torch.arange(D * Z * C).reshape(C // z, z, Z // d, d, D // m, m)
    groups = array.permute(0, 2, 4, 1, 3, 5).reshape(-1, m * d * z)
    by_ranks = collective_cost(collective, groups, 1e6, c)
    by_shape = collective_cost(collective, GroupShape(size=m * d * z, num_domains=d * z, num_zones=z), 1e6, c)
    assert by_ranks.us == pytest.approx(by_shape.us, rel=1e-9)
    assert by_ranks.bytes_by_tier == pytest.approx(dict(by_shape.bytes_by_tier))


def _sent_and_received(collective: str, group: list[int], S: float, c: ClusterSpec) -> dict[Tier, float]:
    """An independent count: walk the ring (or every pair) and add what goes over each tier."""
    n = len(group)
    order = sorted(group)  # ranks are numbered along the hierarchy, so sorting visits domains and zones one by one

    def tier(a: int, b: int) -> Tier:
        if a // c.gpus_per_domain == b // c.gpus_per_domain:
            return "nvlink"
        return "zone" if a // c.gpus_per_zone == b // c.gpus_per_zone else "cross_zone"

    sent: dict[Tier, float] = dict.fromkeys(TIERS, 0.0)
    if collective == "all_to_all":
        for a in group:
            for b in group:
                if a != b:
                    sent[tier(a, b)] += S / n
    else:
        for i in range(n):
            sent[tier(order[i], order[(i + 1) % n])] += edge_bytes(collective, n, S)  # type: ignore[arg-type]
    return sent


@given(st.permutations(range(12)), st.sampled_from([2, 3, 4, 6]), st.sampled_from(COLLECTIVES))
@settings(max_examples=150, deadline=None)
def test_conservation_of_bytes(perm, size, collective) -> None:
    c = cluster(3, 2, 2)
    groups = torch.tensor(perm).reshape(-1, size)
    cost = collective_cost(collective, groups, 6000.0, c, "ring")
    want: dict[Tier, float] = dict.fromkeys(TIERS, 0.0)
    for group in groups.tolist():
        for t, b in _sent_and_received(collective, group, 6000.0, c).items():
            want[t] += b / 12
    assert {t: b for t, b in want.items() if b} == pytest.approx(dict(cost.bytes_by_tier))
    assert sum(cost.bytes_by_tier.values()) == pytest.approx(edge_bytes(collective, size, 6000.0))


def test_one_rank_is_free_and_bad_input_is_named() -> None:
    c = cluster(4, 1, 1)
    assert collective_cost("all_gather", GroupShape(size=1), 1e9, c).us == 0
    assert collective_cost("all_gather", torch.arange(4)[:, None], 1e9, c).us == 0
    with pytest.raises(ValueError, match="nbytes"):
        collective_cost("all_gather", GroupShape(size=2), -1, c)
    with pytest.raises(ValueError, match="only all_reduce"):
        collective_cost("all_gather", GroupShape(size=2), 1, c, "tree")
    with pytest.raises(ValueError, match="ranks"):
        collective_cost("all_gather", torch.tensor([[0, 4]]), 1, c)
    with pytest.raises(ValueError, match="the cluster has"):
        collective_cost("all_gather", GroupShape(size=2, num_domains=2), 1, c)
