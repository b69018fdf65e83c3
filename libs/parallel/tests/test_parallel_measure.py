"""Measuring a cluster on gloo processes."""

from __future__ import annotations

import dataclasses

import pytest
from gemworks.parallel import ClusterSpec, presets
from parallel_spawn import spawn


def _measure(rank: int, world: int) -> dict:
    base = dataclasses.replace(
        presets.roce_cluster(2048), gpus_per_domain=2, domains_per_zone=1, num_zones=2, name="gloo"
    )
    spec = ClusterSpec.measure(base, sizes=(4096, 1 << 18), repeats=2)
    return spec.to_dict()


@pytest.mark.dist
def test_measure_on_gloo_gives_every_rank_the_same_file_with_sources() -> None:
    results = spawn(_measure, 4)
    assert all(r == results[0] for r in results)
    spec = ClusterSpec.from_dict(results[0])
    for tier in ("nvlink", "cross_zone"):
        assert spec.source(f"tiers.{tier}.all_gather.bytes_per_s").startswith("measured: gloo")
        assert all(1e5 < r.bytes_per_s < 1e12 for r in spec.tiers[tier].values())
    assert spec.tiers["zone"] == presets.roce_cluster(2048).tiers["zone"], "an unmeasured tier keeps its figures"
    assert spec.source("tiers.zone.all_gather.bytes_per_s").startswith("estimate")
