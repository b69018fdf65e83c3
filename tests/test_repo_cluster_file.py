"""One cluster file serves two libraries that never import each other: parallel's README specifies it."""

from __future__ import annotations

import gemworks.netmem as netmem
import gemworks.parallel as parallel
import pytest
from gemworks.parallel.presets import gb200_rack, h200_host, roce_cluster


@pytest.fixture(params=[h200_host, roce_cluster, gb200_rack], ids=lambda preset: preset.__name__)
def spec(request) -> parallel.ClusterSpec:
    """Each preset of gemworks.parallel."""
    return request.param()


def test_ledger_rewrites_what_cluster_spec_wrote(spec, tmp_path):
    spec.to_toml(tmp_path / "cluster.toml")
    netmem.BandwidthLedger.from_toml(tmp_path / "cluster.toml").to_toml(tmp_path / "again.toml")
    assert parallel.ClusterSpec.from_toml(tmp_path / "again.toml") == spec


def test_cluster_spec_reads_what_the_ledger_measured(spec, tmp_path):
    """Measuring replaces this machine's own figures and keeps the tiers, which only several machines can measure."""
    spec.to_toml(tmp_path / "cluster.toml")
    base = netmem.BandwidthLedger.from_toml(tmp_path / "cluster.toml")
    netmem.measure("cpu", num_bytes=1 << 22, base=base.to_dict()).to_toml(tmp_path / "measured.toml")
    measured = parallel.ClusterSpec.from_toml(tmp_path / "measured.toml")
    assert measured.tiers == spec.tiers
    assert measured.gpus_per_domain == spec.gpus_per_domain
    assert measured.gpu.hbm_bytes_per_s != spec.gpu.hbm_bytes_per_s
    assert measured.source("gpu.hbm_bytes_per_s") != spec.source("gpu.hbm_bytes_per_s")
