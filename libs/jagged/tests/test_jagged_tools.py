"""The tools that turn measurements into pages: verdicts, blocks that are up to date, counters as ncu writes them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gemworks.jagged.bench import cases, report

pytestmark = pytest.mark.reference
TOOLS = Path(__file__).parents[1] / "tools"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"jagged_tool_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def targets() -> Any:
    return load("targets")


def row(**given: str) -> dict[str, str]:
    made = dict.fromkeys(report.COLUMNS, "") | {"head_dim": "128", "direction": "fwd", "impl": "gemworks"}
    made |= {"law": "uniform", "copy_gbps": "4000", "best_peer": "peer", "bwd_factor": "2.5"}
    return made | given


def verdict(targets: Any, rows: list[dict[str, str]], op: str, shape: str) -> tuple[str, ...]:
    lines = targets.verdicts(targets.Rows(rows))
    return next(line for line in lines if line[:2] == (f"`{op}` {shape}", "forward"))


def test_a_ratio_decides_and_tflops_do_not(targets: Any) -> None:
    for ratio, expected in (("1.39", "**missed**"), ("1.40", "met")):
        ours = row(op="gdpa", shape="B256 max1024", ms="1", tflops="1", gbps="1", ratio_to_best_peer=ratio)
        assert verdict(targets, [ours], "gdpa", "B256 max1024")[-2] == expected
    assert verdict(targets, [], "gdpa", "B256 max1024")[3:] == ("not measured", "", "-", "")
    alone = row(op="gdpa", shape="B256 max1024", ms="1", tflops="900", gbps="1")
    assert verdict(targets, [alone], "gdpa", "B256 max1024")[-2] == "**missed**"


def test_other_measures_of_a_target(targets: Any) -> None:
    pool = row(op="gdpa", shape="B128 max2048 seeds64", ms="1", tflops="1", gbps="3200")
    assert verdict(targets, [pool], "gdpa", "B128 max2048 seeds64")[-2] == "met"
    assert verdict(targets, [pool | {"gbps": "3190"}], "gdpa", "B128 max2048 seeds64")[-2] == "**missed**"
    whole = row(op="flash_attention", shape="B128 max2048", ms="1.0", tflops="1", gbps="1")
    window = row(op="flash_attention", shape="B128 max2048 window100", ms="0.4", tflops="1", gbps="1")
    assert verdict(targets, [whole, window], "flash_attention", "B128 max2048 window100")[-2] == "met"
    assert verdict(targets, [window], "flash_attention", "B128 max2048 window100")[-2] == "**missed**"
    blocks = row(op="block_attention rope", shape=targets.BLOCKS, law="mean70", ms="1", tflops="1", gbps="3300")
    peer = blocks | {"impl": "torch varlen_attn without rope", "ms": "1.3", "gbps": "1"}
    assert verdict(targets, [blocks, peer], "block_attention rope", targets.BLOCKS)[-2] == "met"
    assert verdict(targets, [blocks, peer | {"ms": "1.2"}], "block_attention rope", targets.BLOCKS)[-2] == "**missed**"


def test_small_sequences_are_compared_with_a_tile_each(targets: Any) -> None:
    base = row(op="gdpa", shape="B256 max1024", ms="1.0", tflops="1", gbps="1")
    for ms, expected in (("1.02", "met"), ("1.3", "**missed**")):
        ones = row(op="gdpa", shape="B1024 max1024", law="ones", ms=ms, tflops="1", gbps="1")
        (line,) = targets.small_sequences(targets.Rows([base, ones]))
        assert line[-2] == expected
        assert "768 tiles" in line[2]
    assert targets.small_sequences(targets.Rows([base])) == []


def test_of_a_shape_the_costliest_tiles_decide(targets: Any) -> None:
    """The ratio is that of one forward to the build: 25 is 4 %, 10 is 10 %."""
    cheap = row(op="tile_schedule", shape="B256 max256", ms="0.007", ratio_to_best_peer="25")
    dear = cheap | {"law": "zipf12", "head_dim": "64", "ratio_to_best_peer": "10"}
    (line,) = targets.tiles(targets.Rows([cheap]))
    assert line[-2] == "met"
    (line,) = targets.tiles(targets.Rows([cheap, dear, cheap]))
    assert line[-2] == "**missed**"
    assert line[3] == "10.0%, 7 us: zipf12, width 64; 1 of 3 batches above"


def test_counters_stand_beside_the_useful_share(targets: Any) -> None:
    """989 TFLOP/s at 1830 MHz is all of it."""
    step = row(op="gdpa", shape="B256 max1024", ms="1", tflops="494.7", gbps="1", clock_mhz="1830")
    kernel = {"op": "gdpa B256 max1024", "direction": "fwd", "kernel": "forward_kernel", "us": "9", "warps_active": "8"}
    kernel |= {
        "tensor_pipe_percent": "60.0",
        "issue_percent": "1",
        "dram_percent": "2",
        "l2_percent": "3",
        "waits": "x 1",
    }
    text = targets.counters_block([kernel, kernel | {"us": "4"}], targets.Rows([step]))
    assert text.count("forward_kernel") == 1
    assert "| 60.0 % | 50% |" in text


def test_executed_rates_stand_beside_useful_ones(targets: Any) -> None:
    split = row(op="gdpa", shape="B256 max1024", head_dim="64", direction="bwd", ms="1", tflops="200", gbps="1")
    split |= {"executed_tflops": "280"}
    whole = split | {"shape": "B128 max2048", "executed_tflops": "200"}
    head, _, first, second = targets.cases_block(targets.Rows([split, whole]), main=False).splitlines()
    assert head == "| op, shape | law | width |  | TFLOP/s | executed | GB/s |"
    assert "| 200 | 280 | 1 |" in first
    assert "| 200 |  | 1 |" in second
    assert "executed" not in targets.cases_block(targets.Rows([whole]), main=False)


def test_kinds_of_triton_stand_beside_what_is_shipped(targets: Any) -> None:
    common = {"op": "gdpa", "shape": "B2 max9", "law": "uniform", "direction": "fwd", "commit": "abc", "note": ""}
    settings = (
        ("GluonConfig(block=64) fold", "1.0", "400", ""),
        ("TritonConfig(block_m=64)", "3.0", "130", ""),
        ("TritonConfig(block_m=128)", "2.0", "200", ""),
        ("SpecialisedConfig(block_n=64, specialised=True)", "", "", "WRONG: not timed"),
    )
    rows = [common | {"setting": s, "ms": ms, "tflops": t, "note": n} for s, ms, t, n in settings]
    last = targets.triton_block(rows).splitlines()[-1]
    assert last == "| `gdpa` B2 max9 | uniform | fwd | 1.000 ms, 400 | 2.000 ms, 200 |  | WRONG |"


def test_every_target_is_a_case_of_the_benchmark(targets: Any) -> None:
    import torch
    from gemworks.jagged.bench import blocks, norms

    known = {(c.op, c.shape, c.law) for c in cases.CASES}
    labels = {label for label, _ in norms.subjects(torch.device("cpu"), torch.float32)}
    variants = {f"block_attention {v}" for v in blocks.VARIANTS}
    for t in targets.TARGETS:
        found = (t.op, t.shape, t.law) in known or f"{t.op} {t.shape}" in labels or t.op in variants
        assert found, t


def test_the_pages_say_what_the_rows_say(targets: Any) -> None:
    """A figure that somebody types, or rows that somebody replaces without the tool, fail here."""
    assert targets.main(["--check"]) == 0
    text = targets.PAGE.read_text()
    changed = text.replace("<!-- measured: targets -->\n", "<!-- measured: targets -->\n999 TFLOP/s\n")
    assert changed != text
    assert targets.filled(changed) == text
    met, all_of_them = re.findall(r"(\d+) of (\d+) met, 0 not measured", text)[0]
    missed = f"{int(all_of_them) - int(met)} of {all_of_them} [targets for attention and norms]"
    assert missed in (targets.ROOT / "README.md").read_text()


NAMES = (
    *("ID", "Kernel Name", "Id:Domain:Start/Stop_Range:PL_Type", "gpu__time_duration.sum"),
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
)
LINES = (
    NAMES,
    ("", "", "", "ns", "%", "%", "register/thread", "inst", "inst"),
    (
        "0",
        "forward_kernel",
        "1 <default domain>:gdpa kv256 @ fwd:none",
        "1,413,216",
        "40.93",
        "55.20",
        "128",
        "0.88",
        "2.42",
    ),
    ("1", "fill", "2 <default domain>:gdpa kv256 @ bwd:none", "2,000", "10", "20", "64", "", ""),
)
NCU = "==PROF== Connected to process 1\n" + "\n".join(",".join(f'"{x}"' for x in line) for line in LINES) + "\n"


def test_counters_are_read_as_ncu_writes_them() -> None:
    counters = load("counters")
    first, second = counters.parse(NCU)
    got = counters.summary(first)
    assert got["us"] == "1413.2"
    assert got["tensor_pipe_percent"] == "55.2"
    assert got["issue_percent"] == "40.9"
    assert got["registers"] == "128"
    assert got["waits"] == "barrier 2.42; wait 0.88"
    assert got["dram_percent"] == ""
    assert [counters.step_of(k) for k in (first, second)] == [("gdpa kv256", d) for d in ("fwd", "bwd")]
    assert counters.summary(second)["us"] == "2.0"
    assert counters.parse("==ERROR== no counters here\n") == []
