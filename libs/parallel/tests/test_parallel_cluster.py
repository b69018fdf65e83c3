"""The cluster file, the presets and the measuring of rates."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from gemworks.parallel import COLLECTIVES, ClusterSpec, Link, presets
from gemworks.parallel._toml import dump_toml
from gemworks.parallel.measure import fit_rate, ring_steps
from hypothesis import given, settings
from hypothesis import strategies as st

PRESETS = [presets.h200_host(), presets.h200_host(1), presets.roce_cluster(16384), presets.gb200_rack()]


@pytest.mark.parametrize("spec", PRESETS, ids=lambda s: s.name)
def test_round_trip_through_toml(spec: ClusterSpec, tmp_path) -> None:
    spec = dataclasses.replace(spec, extra={"note": 'a "quoted"\nline', "nested": {"list": [1, 2.5, True]}})
    spec.to_toml(tmp_path / "c.toml")
    assert ClusterSpec.from_toml(tmp_path / "c.toml") == spec


@pytest.mark.parametrize("spec", PRESETS, ids=lambda s: s.name)
def test_every_figure_has_a_source(spec: ClusterSpec) -> None:
    def walk(table: dict, path: str) -> list[str]:
        found = []
        for key, value in table.items():
            here = f"{path}.{key}" if path else key
            found += walk(value, here) if isinstance(value, dict) else [here]
        return found

    content = spec.to_dict()
    for part in ("shape", "gpu", "links", "tiers"):
        for path in walk(content[part], part):
            assert spec.source(path), path


def test_the_readme_example_of_the_cluster_file_is_valid_toml_and_names_only_real_keys() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[1] / "README.md").read_text()
    content = tomllib.loads(text.split("```toml\n")[1].split("```")[0])
    rate = content["tiers"]["nvlink"]["all_gather"]
    content["tiers"]["nvlink"] = dict.fromkeys(COLLECTIVES, rate)
    spec = ClusterSpec.from_dict(content)
    assert spec.source("gpu.peak_flops_per_s.bf16").startswith("NVIDIA")
    assert spec.source("links.host.latency_us").startswith("measured")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("gpu"), "missing keys"),
        (lambda c: c.update(surprise=1), "unknown keys \\['surprise'\\]"),
        (lambda c: c.update(schema="other/2"), "schema"),
        (lambda c: c["shape"].update(num_zones=0), "num_zones"),
        (lambda c: c["shape"].update(num_zones=2), "cross_zone is missing"),
        (lambda c: c["gpu"].update(num_sms=1.5), "gpu.num_sms"),
        (lambda c: c["gpu"]["peak_flops_per_s"].pop("bf16"), "bf16"),
        (lambda c: c["links"]["host"].update(duplex_bytes_per_s=1e12), "sum over both"),
        (lambda c: c["tiers"]["nvlink"].pop("all_gather"), "all_gather"),
        (lambda c: c["tiers"]["nvlink"]["all_gather"].update(bytes_per_s=-1.0), "bytes_per_s"),
    ],
)
def test_bad_files_name_the_key(change, message: str) -> None:
    content = presets.h200_host().to_dict()
    change(content)
    with pytest.raises(ValueError, match=message):
        ClusterSpec.from_dict(content)


def test_resized() -> None:
    c = presets.roce_cluster(4096, gpus_per_zone=1024)
    assert [c.resized(n).shape_text() for n in (4, 64, 2048)] == [
        "1 zones x 1 domains x 4 GPUs",
        "1 zones x 8 domains x 8 GPUs",
        "2 zones x 128 domains x 8 GPUs",
    ]
    with pytest.raises(ValueError, match="whole zones"):
        c.resized(1032)


scalars = st.one_of(st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.booleans(), st.text(max_size=8))
tables = st.recursive(
    st.dictionaries(st.text(max_size=6), scalars, max_size=3),
    lambda inner: st.dictionaries(st.text(max_size=6), st.one_of(scalars, inner), max_size=3),
    max_leaves=8,
)


def test_a_rewritten_file_keeps_whatever_is_in_extra(tmp_path: Path) -> None:
    presets.h200_host().to_toml(tmp_path / "c.toml")
    more = """
[extra]
measured = 2026-11-30T21:02:00Z
day = 2026-11-30
at = 21:02:00
"in words" = "M\u00fcnchen"
[[extra.runs]]
seeds = [[1, 2], [3]]
[[extra.runs]]
of = {a = 1, "b c" = {d = 0.5}}
"""
    with (tmp_path / "c.toml").open("a", encoding="utf-8") as file:
        file.write(more)
    spec = ClusterSpec.from_toml(tmp_path / "c.toml")
    assert spec.extra == tomllib.loads(more)["extra"]
    spec.to_toml(tmp_path / "again.toml")
    assert ClusterSpec.from_toml(tmp_path / "again.toml") == spec


@given(tables)
@settings(max_examples=200, deadline=None)
def test_dump_toml_is_the_inverse_of_tomllib(content: dict) -> None:
    assert tomllib.loads(dump_toml(content)) == content


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_fit_rate_recovers_a_known_line(collective) -> None:
    from gemworks.parallel import edge_bytes

    times = [
        (s, ring_steps(collective, 5) * 7e-6 + edge_bytes(collective, 5, s) / 3e9)
        for s in (10_000, 1_000_000, 50_000_000)
    ]
    rate = fit_rate(collective, 5, times)
    assert rate.latency_us == pytest.approx(7.0, rel=1e-6)
    assert rate.bytes_per_s == pytest.approx(3e9, rel=1e-6)


def test_link_rejects_zero_rate() -> None:
    with pytest.raises(ValueError, match="up_bytes_per_s"):
        Link(
            up_bytes_per_s=0.0,
            down_bytes_per_s=1.0,
            duplex_bytes_per_s=1.0,
            latency_us=0.0,
            copy_engines_up=1,
            copy_engines_down=1,
        )


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("[[")
    with pytest.raises(ValueError, match=r"cluster file '.*cluster.toml': not TOML: .*to_toml writes one"):
        ClusterSpec.from_toml(tmp_path / "cluster.toml")
    (tmp_path / "cluster.toml").write_text('schema = "other/1"')
    with pytest.raises(ValueError, match=r"cluster file '.*cluster.toml': the top level: missing keys"):
        ClusterSpec.from_toml(tmp_path / "cluster.toml")
