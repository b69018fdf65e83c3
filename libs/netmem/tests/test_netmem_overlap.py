"""The overlap report on traces with known answers, and on a real one."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from gemworks.netmem.overlap import overlap_report, plot_timeline, rank_waits, read_trace
from gemworks.netmem.overlap.__main__ import main
from gemworks.netmem.overlap.intervals import intersect, subtract, total, union
from gemworks.netmem.overlap.report import _waits
from gemworks.netmem.overlap.trace import Activity
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.reference


def kernel(name, start, dur, stream: int = 7, grid: tuple[int, ...] = (100, 1, 1), **args: object):
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": start,
        "dur": dur,
        "pid": 0,
        "tid": stream,
        "args": {"device": 0, "stream": stream, "grid": list(grid), **args},
    }


def memcpy(way, start, dur, num_bytes, stream=9):
    return {
        "ph": "X",
        "cat": "gpu_memcpy",
        "name": f"Memcpy {way} (Device -> Pinned)",
        "ts": start,
        "dur": dur,
        "pid": 0,
        "tid": stream,
        "args": {"device": 0, "stream": stream, "bytes": num_bytes},
    }


def make_trace(events, rank=0, num_sms=100):
    return {
        "traceEvents": [{"ph": "M", "name": "process_name"}, *events],
        "deviceProperties": [{"id": 0, "numSms": num_sms}],
        "distributedInfo": {"rank": rank},
    }


GATHER = {"Collective name": "_allgather_base", "Process Group Name": "0"}
# compute 0-100 and 150-200; all-gather 50-150 (24 CTAs): 50 hidden, 50 exposed, gemm_2 waits for it
SIMPLE = make_trace(
    [
        kernel("gemm_1", 0, 100),
        kernel("ncclDevKernel_AllGather_RING_LL", 50, 100, stream=20, grid=(24, 1, 1), **GATHER),
        kernel("gemm_2", 150, 50),
    ]
)


def test_exposed_and_hidden_of_one_collective():
    (d,) = overlap_report(SIMPLE).devices
    assert (d.span_us, d.compute_us, d.communication_us, d.hidden_us, d.exposed_us, d.idle_us) == (
        200,
        150,
        100,
        50,
        50,
        0,
    )
    assert d.sm_share == pytest.approx(0.24)
    assert d.communication_by_name == {"_allgather_base": 100}
    (w,) = d.waits
    assert (w.waiter, w.waited_for, w.num_times, w.total_us) == ("gemm_2", "_allgather_base", 1, 50)
    assert (w.waiter_lane, w.waited_for_lane) == ("gpu0 stream 7", "gpu0 stream 20")


def test_copies_per_link_and_idle_time():
    events = [
        kernel("gemm", 0, 10),
        memcpy("DtoH", 5, 10, 1_000_000),
        memcpy("DtoH", 15, 5, 500_000),
        memcpy("HtoD", 0, 10, 700, stream=10),
        memcpy("DtoD", 30, 10, 800, stream=7),
    ]
    (d,) = overlap_report(make_trace(events)).devices
    links = {link.link: link for link in d.links}
    assert (links["host.up"].num_copies, links["host.up"].num_bytes, links["host.up"].busy_us) == (2, 1_500_000, 15)
    assert links["host.up"].hidden_us == 5
    assert links["host.up"].bytes_per_s == pytest.approx(1e11)
    assert links["host.down"].hidden_us == 10
    assert links["hbm"].num_bytes == 800
    assert (d.copy_us, d.exposed_copy_us, d.idle_us, d.exposed_us) == (30, 20, 10, 0)
    assert d.waits == ()


def test_a_copy_engine_gather_takes_no_sms():
    events = [
        kernel("gemm", 0, 100),
        kernel("symm_mem_barrier_kernel", 0, 2, stream=20, grid=(1, 1, 1)),
        memcpy("PtoP", 2, 98, 10**6, stream=20),
    ]
    (d,) = overlap_report(make_trace(events)).devices
    assert d.communication_us == 100
    assert d.exposed_us == 0
    assert d.sm_share == pytest.approx(0.01 * 2 / 100)
    assert {link.link for link in d.links} == {"nvlink"}
    (only_copies,) = overlap_report(make_trace([kernel("gemm", 0, 9), memcpy("PtoP", 0, 9, 9)])).devices
    assert only_copies.sm_share == 0.0


def test_sm_share_is_unknown_rather_than_wrong():
    data = dict(SIMPLE, deviceProperties=[])
    assert overlap_report(data).devices[0].sm_share is None
    assert "not in the trace" in overlap_report(data).to_text()


def test_two_overlapping_collectives_count_once_and_the_later_one_is_waited_for():
    events = [
        kernel("gemm", 0, 10),
        kernel("ncclA", 10, 30, stream=20, grid=(4, 1, 1)),
        kernel("ncclB", 20, 40, stream=21, grid=(8, 1, 1)),
        kernel("norm", 70, 10),
    ]
    (d,) = overlap_report(make_trace(events)).devices
    assert (d.communication_us, d.exposed_us, d.idle_us) == (50, 50, 10)
    assert [(w.waiter, w.waited_for) for w in d.waits] == [("norm", "ncclB")]
    assert d.sm_share == pytest.approx((0.04 * 30 + 0.08 * 40) / 70)


def test_the_text_lists_the_longest_waits_and_adds_up_the_others():
    events = []
    for i in range(15):
        start = 1000.0 * i
        events += [
            kernel("ncclDevKernel_AllReduce", start, 100 + i, stream=2),
            kernel(f"kernel_{i}", start + 100 + i, 10, stream=7),
        ]
    text = overlap_report({"traceEvents": events}).to_text()
    assert text.count(" waited ") == 11
    assert "kernel_14" in text
    assert "kernel_0" not in text
    assert f"5 more waited {sum(range(100, 105)) / 1e3:.3f} ms" in text


def test_two_devices_are_reported_apart():
    other = kernel("ncclX", 0, 5)
    other["args"]["device"] = 1
    report = overlap_report(make_trace([kernel("gemm", 0, 10), other]))
    assert [(d.device, d.compute_us, d.exposed_us) for d in report.devices] == [(0, 10, 0), (1, 0, 5)]
    assert report.devices[1].waits[0].waiter == "end of trace"


def test_who_waited_for_whom_across_ranks_needs_no_common_clock():
    def rank_trace(rank, durations, offset):
        events = [
            kernel("ncclDevKernel", offset + 100 * i, d, stream=20, grid=(24, 1, 1), **GATHER)
            for i, d in enumerate(durations)
        ]
        return read_trace(make_trace(events, rank=rank))

    waits = rank_waits([rank_trace(0, [50, 10], 0), rank_trace(1, [10, 30], 1e9), rank_trace(2, [40, 30], 5)])
    assert waits.num_collectives == 2
    assert waits.waited_us == {0: 40, 1: 20, 2: 50}
    assert waits.caused_us == {0: 40, 1: 70, 2: 0}
    assert sum(waits.waited_us.values()) == sum(waits.caused_us.values())
    with pytest.raises(ValueError, match="times by rank"):
        rank_waits([rank_trace(0, [1], 0), rank_trace(1, [1, 2], 0)])
    with pytest.raises(ValueError, match="at least 2"):
        rank_waits([rank_trace(0, [1], 0)])
    with pytest.raises(ValueError, match="one per rank"):
        rank_waits([rank_trace(0, [1], 0), rank_trace(0, [1], 0)])


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda t: (min(t), max(t))), max_size=8)


@given(spans, spans)
def test_interval_arithmetic_against_sets_of_integers(a, b):
    def points(intervals):
        return {t for s, e in intervals for t in range(s, e)}

    ua, ub = union(a), union(b)
    assert points(ua) == points(a)
    assert total(ua) == len(points(a))
    assert points(subtract(ua, ub)) == points(a) - points(b)
    assert points(intersect(ua, ub)) == points(a) & points(b)
    assert all(x[1] < y[0] for x, y in pairwise(ua))


@given(spans, spans)
def test_who_is_waited_for_against_the_definition(compute, communication):
    work = [Activity("compute", f"k{i}", "a", *span) for i, span in enumerate(sorted(compute))]
    talk = [Activity("communication", f"c{i}", "b", *span) for i, span in enumerate(sorted(communication))]
    exposed = subtract(union(communication), union(compute))
    expected = {}
    for start, end in exposed:
        overlapping = [a for a in talk if a.start_us < end and a.end_us > start]
        culprit = max(overlapping, key=lambda a: min(a.end_us, end))
        waiter = next((a.name for a in work if a.start_us >= end), "end of trace")
        key = (waiter, culprit.name)
        expected[key] = expected.get(key, 0) + end - start
    assert {(w.waiter, w.waited_for): w.total_us for w in _waits(work, talk, exposed)} == expected


def test_text_json_png_and_the_command_line(tmp_path, capsys):
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump(SIMPLE, file)
    assert main([str(path), "--json", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")]) == 0
    text = capsys.readouterr().out
    assert "gemm_2 (gpu0 stream 7) waited 0.050 ms in 1 times for _allgather_base" in text
    assert json.loads((tmp_path / "out.json").read_text())["devices"][0]["exposed_us"] == 50
    assert (tmp_path / "out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (tmp_path / "bad.json").write_text("{")
    assert main([str(tmp_path / "bad.json")]) == 2
    assert "error:" in capsys.readouterr().err


def test_a_real_cpu_trace(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        a = torch.randn(128, 128)
        for _ in range(3):
            a = torch.relu(a @ a) / 100
    path = tmp_path / "real.json"
    prof.export_chrome_trace(str(path))
    report = overlap_report(path)
    assert not report.on_gpu
    (d,) = report.devices
    assert d.device == -1
    assert 0 < d.compute_us <= d.span_us
    assert d.communication_us == 0
    assert d.idle_us == pytest.approx(d.span_us - d.compute_us)
    assert "no GPU activity" in report.to_text()
    plot_timeline(read_trace(path), tmp_path / "real.png")
    assert (tmp_path / "real.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.dist
def test_a_real_gloo_trace_has_its_collectives(tmp_path):
    program = """
import sys, torch, torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}/rendezvous", rank=rank, world_size=2)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
    x = torch.ones(1 << 16)
    for _ in range(3):
        dist.all_reduce(x)
        y = x * 2
prof.export_chrome_trace(f"{path}/rank{rank}.json")
dist.destroy_process_group()
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    ranks = [subprocess.Popen([*command, str(r), str(tmp_path)]) for r in range(2)]
    assert [p.wait(120) for p in ranks] == [0, 0]
    traces = [read_trace(tmp_path / f"rank{r}.json") for r in range(2)]
    assert all(overlap_report(t).devices[0].communication_us > 0 for t in traces)
    assert [t.rank for t in traces] == [0, 1]
    assert rank_waits(traces).num_collectives >= 3


@pytest.mark.parametrize("data", [{}, {"traceEvents": 3}, {"traceEvents": []}, {"traceEvents": [{"ph": "M"}]}])
def test_what_is_no_trace_is_a_value_error(data):
    with pytest.raises(ValueError, match="source"):
        read_trace(data)
