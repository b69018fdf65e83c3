"""The ledger: conservation laws, refusals, known time lines, the cluster file."""

from __future__ import annotations

import tomllib

import pytest
from gemworks.netmem import cluster_file
from gemworks.netmem.errors import OversubscribedError
from gemworks.netmem.ledger import HBM, BandwidthLedger, Link
from gemworks.netmem.measure import measure
from gemworks.netmem.timeline import Segment, Transfer
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.reference

EXAMPLE = """
schema = "gemworks.cluster/1"
name = "two-gpus"
[shape]
gpus_per_domain = 2
domains_per_zone = 1
num_zones = 1
oversubscription = 1
[gpu]
name = "H200"
hbm_bytes = 149250113536
hbm_bytes_per_s = 4.2e12
num_sms = 132
[gpu.peak_flops_per_s]
bf16 = 9.89e14
[links.host]
up_bytes_per_s = 5.5e10
down_bytes_per_s = 5.5e10
duplex_bytes_per_s = 1.0e11
latency_us = 10.0
copy_engines_up = 1
copy_engines_down = 1
[sources]
"" = "measured on two H200 of one host, 2026-11"
"gpu.peak_flops_per_s" = "data sheet"
[tiers]
[extra]
note = "kept \\"as is\\""
[extra.deep]
list = [1, 2.5, "x"]
"""


def make_ledger(engines: int = 1, hbm: float = 1000.0, latency_s: float = 0.0) -> BandwidthLedger:
    links = [
        Link("host.up", 10.0, latency_s, engines, ("host.duplex", HBM)),
        Link("host.down", 10.0, latency_s, engines, ("host.duplex", HBM)),
        Link("nvlink.up", 50.0, 0.0, 0),
    ]
    return BandwidthLedger(links, hbm_bytes_per_s=hbm, shared={"host.duplex": 15.0})


def test_reserve_refuses_oversubscription_and_books_nothing():
    ledger = make_ledger()
    first = ledger.reserve("host.up", 60, start_s=0, end_s=10, owner="offload")
    with pytest.raises(OversubscribedError, match=r"host\.up.*offload"):
        ledger.reserve("host.up", 50, start_s=5, end_s=15, owner="stash")
    with pytest.raises(OversubscribedError, match=r"host\.duplex"):
        ledger.reserve("host.down", 95, start_s=0, end_s=10, owner="stash")
    assert ledger.reservations == (first,)
    ledger.reserve("host.down", 90, start_s=0, end_s=10, owner="stash")
    assert ledger.free_bytes("host.up", 0, 10) == pytest.approx(0)
    ledger.release(first)
    assert ledger.free_bytes("host.up", 0, 10) == pytest.approx(60)
    with pytest.raises(ValueError, match="not booked"):
        ledger.release(first)


def test_device_memory_is_a_limit_of_every_link():
    ledger = make_ledger(hbm=55.0)
    ledger.reserve("nvlink.up", 50, start_s=0, end_s=1, owner="gather")
    with pytest.raises(OversubscribedError, match="hbm"):
        ledger.reserve("host.up", 6, start_s=0, end_s=1, owner="offload")


@pytest.mark.parametrize(
    "call",
    [
        lambda ledger: ledger.reserve("host.left", 1, start_s=0, end_s=1, owner="a"),
        lambda ledger: ledger.reserve("host.up", 1, start_s=1, end_s=1, owner="a"),
        lambda ledger: ledger.reserve("host.up", -1, start_s=0, end_s=1, owner="a"),
        lambda ledger: ledger.predict([], [Transfer("t", 1, "host.left")]),
        lambda ledger: ledger.predict([Segment("a", 1)], [Transfer("t", 1, "host.up", after=0, before=0)]),
        lambda ledger: ledger.predict([Segment("a", 1)], [Transfer("t", 1, "host.up"), Transfer("t", 1, "host.up")]),
        lambda ledger: ledger.predict([Segment("a", 1, hbm_bytes=2000)], []),
        lambda ledger: BandwidthLedger([Link("x", 0.0)], hbm_bytes_per_s=1.0),
        lambda ledger: BandwidthLedger([Link("x", 1.0, resources=("y",))], hbm_bytes_per_s=1.0),
    ],
)
def test_bad_input_is_a_value_error(call):
    with pytest.raises(ValueError, match=r"expected|names must differ|is more than"):
        call(make_ledger())


moves = st.lists(
    st.tuples(
        st.sampled_from(["host.up", "host.down", "nvlink.up"]),
        st.floats(0, 200),
        st.floats(0, 20),
        st.floats(0.1, 10),
    ),
    max_size=12,
)


@given(moves)
@settings(max_examples=60, deadline=None)
def test_no_resource_ever_carries_more_than_its_capacity(asked):
    ledger = make_ledger(hbm=60.0)
    for link, size, start, length in asked:
        try:
            ledger.reserve(link, size, start_s=start, end_s=start + length, owner="x")
        except OversubscribedError:
            free = ledger.free_bytes(link, start, start + length)
            assert size > 0
            assert free < 10 * length * 50  # something was left out: the interval is not wholly free at full rate
    for resource, capacity in ledger.capacity.items():
        booked = [r for r in ledger.reservations if resource in ledger.links[r.link].path]
        for at in {r.start_s for r in booked}:
            assert sum(r.bytes_per_s for r in booked if r.start_s <= at < r.end_s) <= capacity * (1 + 1e-6)


@given(moves, st.sampled_from(["host.up", "host.down", "nvlink.up"]), st.floats(0, 500))
@settings(max_examples=60, deadline=None)
def test_fit_books_exactly_the_bytes_and_release_restores_the_free_bytes(asked, link, size):
    ledger = make_ledger(hbm=60.0)
    for name, num_bytes, start, _ in asked:
        ledger.fit(name, num_bytes, start_s=start, owner="x")
    before = [ledger.free_bytes(name, 0, 1000) for name in ledger.links]
    pieces = ledger.fit(link, size, start_s=3.0, owner="new")
    assert sum(p.num_bytes for p in pieces) == pytest.approx(size, abs=1e-6)
    assert all(p.start_s >= 3.0 for p in pieces)
    assert ledger.free_bytes(link, 0, 1000) <= before[list(ledger.links).index(link)] + 1e-3
    for piece in pieces:
        ledger.release(piece)
    assert [ledger.free_bytes(name, 0, 1000) for name in ledger.links] == pytest.approx(before, abs=1e-3)


def test_a_little_too_much_is_too_much():
    ledger = make_ledger()
    rate = ledger.capacity["host.up"]
    ledger.reserve("host.up", rate, start_s=0.0, end_s=1.0, owner="all")
    with pytest.raises(OversubscribedError):
        ledger.reserve("host.up", 1e-4 * rate, start_s=0.5, end_s=1.0, owner="more")


def test_fit_where_floats_have_no_room_is_refused_by_name():
    with pytest.raises(OversubscribedError, match="do not fit"):
        make_ledger().fit("host.up", 1.0, start_s=1e17, owner="late")


def test_fit_that_misses_its_deadline_books_nothing():
    ledger = make_ledger()
    ledger.reserve("host.up", 100, start_s=0, end_s=10, owner="a")
    with pytest.raises(OversubscribedError, match="do not fit"):
        ledger.fit("host.up", 20, start_s=0, deadline_s=11, owner="b")
    assert len(ledger.reservations) == 1
    (piece,) = ledger.fit("host.up", 20, start_s=0, deadline_s=12, owner="b")
    assert (piece.start_s, piece.end_s) == (10, pytest.approx(12))


def test_a_transfer_that_fits_under_compute_is_hidden_and_one_that_does_not_is_exposed_by_the_difference():
    ledger = make_ledger()
    layers = [Segment("a", 1.0), Segment("b", 3.0), Segment("c", 1.0)]
    hidden = ledger.predict(layers, [Transfer("t", 30, "host.up", after=0, before=2)])
    assert hidden.exposed_s == pytest.approx(0)
    assert hidden.finish_s["t"] == pytest.approx(4.0)
    late = ledger.predict(layers, [Transfer("t", 50, "host.up", after=0, before=2)])
    assert late.exposed_s == pytest.approx(2.0)
    assert [(s.segment, s.transfer) for s in late.stalls] == [("c", "t")]
    assert late.stalls[0].seconds == pytest.approx(2.0)
    tail = ledger.predict(layers, [Transfer("t", 50, "host.up", after=2, before=3)])
    assert tail.total_s == pytest.approx(10.0)
    unwaited = ledger.predict(layers, [Transfer("t", 50, "host.up", after=2)])
    assert unwaited.total_s == pytest.approx(5.0)
    assert unwaited.finish_s["t"] == pytest.approx(10.0)


def test_a_small_copy_queues_behind_a_bulk_copy_on_one_engine_but_not_on_two():
    bulk, small = Transfer("bulk", 100, "host.down"), Transfer("small", 1, "host.down", before=0)
    one = make_ledger(engines=1).predict([Segment("a", 1.0)], [bulk, small])
    assert one.stalls[0].seconds == pytest.approx(10.1)
    two = make_ledger(engines=2).predict([Segment("a", 1.0)], [bulk, small])
    assert two.stalls[0].seconds == pytest.approx(0.2)  # both share the link's rate


def test_both_directions_share_the_duplex_total_and_latency_counts():
    ledger = make_ledger(latency_s=1.0)
    out = ledger.predict([], [Transfer("u", 75, "host.up", before=0), Transfer("d", 75, "host.down", before=0)])
    assert out.total_s == pytest.approx(11.0)


def test_memory_bound_compute_slows_down_under_a_transfer():
    ledger = make_ledger(hbm=100.0)
    out = ledger.predict([Segment("norm", 10.0, hbm_bytes=1000)], [Transfer("t", 50, "nvlink.up")])
    # 50 B/s each for one second, then the norm alone has 950 of its 1000 bytes left at 100 B/s
    assert out.total_s == pytest.approx(10.5)
    assert out.slowdown_s == pytest.approx(0.5)
    assert out.exposed_s == pytest.approx(0.5)


@st.composite
def steps(draw):
    segments = [
        Segment(f"s{i}", draw(st.floats(0.1, 5)), draw(st.sampled_from([0.0, 5.0])))
        for i in range(draw(st.integers(0, 6)))
    ]
    transfers = []
    for i in range(draw(st.integers(0, 8))):
        after = draw(st.integers(-1, len(segments) - 1)) if segments else -1
        before = draw(st.one_of(st.none(), st.integers(after + 1, len(segments))))
        link = draw(st.sampled_from(["host.up", "host.down", "nvlink.up"]))
        transfers.append(Transfer(f"t{i}", draw(st.floats(0, 100)), link, after, before))
    return segments, transfers


@given(steps(), st.integers(0, 2), st.sampled_from([0.0, 0.5]))
@settings(max_examples=150, deadline=None)
def test_conservation_laws_of_a_predicted_step(step, engines, latency_s):
    segments, transfers = step
    ledger = make_ledger(engines=engines, hbm=60.0, latency_s=latency_s)
    out = ledger.predict(segments, transfers)
    for name in ledger.links:  # bytes sent = bytes received
        assert out.moved_bytes[name] == pytest.approx(sum(t.num_bytes for t in transfers if t.link == name), abs=1e-5)
    traffic = sum(t.num_bytes for t in transfers) + sum(s.hbm_bytes for s in segments)
    assert out.moved_bytes[HBM] == pytest.approx(traffic, abs=1e-5)
    end = max([out.total_s, *out.finish_s.values()])
    for name, capacity in ledger.capacity.items():  # no resource beyond its rate, none busy longer than the step
        assert out.moved_bytes[name] <= capacity * out.busy_s[name] * (1 + 1e-6) + 1e-6
        assert out.busy_s[name] <= end * (1 + 1e-9) + 1e-9
    assert out.exposed_s >= -1e-9
    assert out.exposed_s == pytest.approx(out.slowdown_s + sum(s.seconds for s in out.stalls), abs=1e-6)
    assert set(out.finish_s) == {t.name for t in transfers}
    for t in transfers:
        least = t.num_bytes / ledger.links[t.link].bytes_per_s + ledger.links[t.link].latency_s
        assert out.finish_s[t.name] - out.start_s[t.name] >= least * (1 - 1e-6) - 1e-6
    # any schedule is at most everything one after the other
    serial = sum(t.num_bytes / 10 + latency_s for t in transfers) + sum(s.duration_s for s in segments)
    assert out.total_s <= serial * (1 + 1e-6) + 1e-6


@given(steps(), st.floats(1.0, 3.0))
@settings(max_examples=50, deadline=None)
def test_faster_links_never_expose_more_without_queues(step, factor):
    segments, transfers = step
    slow = make_ledger(engines=0, hbm=1e9)
    fast = BandwidthLedger(
        [Link(k.name, k.bytes_per_s * factor, k.latency_s, 0, k.resources) for k in slow.links.values()],
        hbm_bytes_per_s=1e9,
        shared={"host.duplex": 15.0 * factor},
    )
    assert fast.predict(segments, transfers).total_s <= slow.predict(segments, transfers).total_s * (1 + 1e-9) + 1e-9


def test_cluster_file_round_trip(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(EXAMPLE)
    ledger = BandwidthLedger.from_toml(path)
    assert ledger.links["host.up"].latency_s == pytest.approx(1e-5)
    assert ledger.capacity["host.duplex"] == 1e11
    ledger.to_toml(tmp_path / "again.toml")
    assert tomllib.loads((tmp_path / "again.toml").read_text()) == tomllib.loads(
        EXAMPLE.replace("oversubscription = 1", "oversubscription = 1.0")
    )


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("num_sms = 132", "num_sm = 132", "num_sm"),
        ("num_sms = 132", "", r"gpu\.num_sms"),
        ("num_sms = 132", "num_sms = 1.5", r"gpu\.num_sms"),
        ("up_bytes_per_s = 5.5e10", "up_bytes_per_s = 0.0", r"links\.host\.up_bytes_per_s"),
        ("duplex_bytes_per_s = 1.0e11", "duplex_bytes_per_s = 2.0e11", "duplex"),
        ("num_zones = 1", "num_zones = 2", r"tiers\.cross_zone"),
        ("cluster/1", "cluster/2", "schema"),
        ('"" = "measured on two H200 of one host, 2026-11"', "", "no source"),
        ("[tiers]", "[tiers.nvlink.all_gather]\nbytes_per_s = 1e9\nlatency_us = 1.0", r"tiers\.nvlink\.reduce_scatter"),
        ("[links.host]", "[links.pigeon]\n[links.host]", "pigeon"),
    ],
)
def test_cluster_file_errors_name_the_key(old, new, named):
    assert old in EXAMPLE
    with pytest.raises(ValueError, match=named):
        cluster_file.check(tomllib.loads(EXAMPLE.replace(old, new, 1)))


def test_measure_writes_a_valid_file_and_keeps_what_it_did_not_measure(tmp_path):
    ledger = measure("cpu", num_bytes=1 << 20, repeats=3)
    ledger.to_toml(tmp_path / "here.toml")
    again = BandwidthLedger.from_toml(tmp_path / "here.toml")
    assert again.links == ledger.links
    assert "standing in" in (cluster_file.source_of(again.to_dict(), "links.host.up_bytes_per_s") or "")
    for way in ("up", "down"):
        source = cluster_file.source_of(again.to_dict(), f"links.host.copy_engines_{way}")
        assert source == "assumed: one each way"
    based = measure("cpu", num_bytes=1 << 20, repeats=3, base=tomllib.loads(EXAMPLE)).to_dict()
    assert based["shape"]["gpus_per_domain"] == 2
    assert based["gpu"]["peak_flops_per_s"] == {"bf16": 9.89e14}
    assert based["sources"]["gpu.peak_flops_per_s"] == "data sheet"
    assert based["extra"]["deep"]["list"] == [1, 2.5, "x"]


def test_a_ledger_of_bare_links_has_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"from_toml"):
        make_ledger().to_toml(tmp_path / "x.toml")


def test_a_file_that_is_no_toml_is_named(tmp_path):
    (tmp_path / "cluster.toml").write_text("[[")
    with pytest.raises(ValueError, match=r"cluster file '.*cluster.toml': not TOML: .*to_toml writes one"):
        BandwidthLedger.from_toml(tmp_path / "cluster.toml")
