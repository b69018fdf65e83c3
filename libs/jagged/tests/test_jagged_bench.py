"""The benchmark on tiny shapes: its columns, its correctness check, its honesty about peers that do not run."""

from __future__ import annotations

import csv
import multiprocessing
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gemworks.jagged.bench import __main__ as bench
from gemworks.jagged.bench import cases, peers, prepare, report, timing
from gemworks.jagged.bench.timing import Time

pytestmark = pytest.mark.reference
QUICK = [
    "--smoke",
    "--suite",
    "attention",
    "--rounds",
    "1",
    "--repeats",
    "2",
    "--skip",
    "FlexAttention",
]  # FlexAttention compiles for seconds


def run(tmp_path: Path, *more: str) -> list[dict[str, str]]:
    path = tmp_path / "rows.csv"
    assert bench.main([*QUICK, "--out", str(path), *more]) == 0
    with path.open() as file:
        return list(csv.DictReader(file))


def test_smoke_rows_have_every_column_and_keep_failing_peers(tmp_path: Path) -> None:
    rows = run(tmp_path)
    assert tuple(rows[0]) == report.COLUMNS
    attention = [r for r in rows if r["op"] != "tile_schedule"]
    assert {(r["op"], r["shape"]) for r in attention} == {(c.op, c.shape) for c in cases.SMOKE}
    schedules = [r for r in rows if r["op"] == "tile_schedule"]
    assert [(r["shape"], r["impl"]) for r in schedules] == [("B3 max16", report.OURS)]
    assert float(schedules[0]["ratio_to_best_peer"]) > 0
    mine = [r for r in rows if r["impl"] == report.OURS]
    assert {r["direction"] for r in mine} == {"fwd", "bwd"}
    for r in mine:
        assert float(r["ms_p20"]) <= float(r["ms"]) <= float(r["ms_p80"])
        assert r["op"] == "tile_schedule" or float(r["tflops"]) > 0
        assert r["op"] == "tile_schedule" or r["bwd_factor"] == "2.5"
    absent = [r for r in rows if r["impl"] == "flash-attn-4"]
    assert absent
    assert all(not r["ms"] and r["ratio_to_best_peer"].startswith("cannot run: ") for r in absent)


def test_a_backward_in_two_kernels_executes_seven_products_for_five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "architecture_of", lambda device: "sm_90")
    context = report.Context(timing.Ceilings(1e3, 1e3, None), torch.device("cpu"), torch.bfloat16, ())
    times = {d: {report.OURS: Time(1.0, 1.0, 1.0), "peer": Time(1.0, 1.0, 1.0)} for d in ("fwd", "bwd")}
    for width, share in ((64, 1.4), (128, 1.0)):
        x = cases.make_inputs(cases.Case("gdpa", "self", 3, 300, head_dim=width), torch.device("cpu"), torch.bfloat16)
        rows = {(r["direction"], r["impl"]): r for r in report.rows_of(x, times, {}, context)}
        ours = rows["bwd", report.OURS]
        assert float(ours["executed_tflops"]) == pytest.approx(share * float(ours["tflops"]), rel=2e-3)
        assert not any(r["executed_tflops"] for key, r in rows.items() if key != ("bwd", report.OURS))
    assert report.executed_share(x, "cpu") is None


def test_a_wrong_kernel_gets_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: cases.Inputs) -> peers.Contender:
        right = peers.ours(x)
        return replace(right, attend=lambda q, k, v: right.attend(q, k, v) * 1.01)

    monkeypatch.setattr(bench, "ours", wrong)
    path = tmp_path / "rows.csv"
    assert bench.main([*QUICK, "--no-peers", "--out", str(path)]) == 1
    assert not path.exists()


def test_a_peer_of_your_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def attend(q, k, v, cu_q, cu_k, max_q, max_k, scale):\n    return q * v.sum() * k.sum()\n")
    rows = run(tmp_path, "--peer", f"mine={file}:attend", "--only", "max16 uniform", "--skip", "torch varlen_attn")
    assert any(r["impl"] == "mine" and r["ms"] for r in rows)
    with pytest.raises(ValueError, match="expected NAME=FILE"):
        peers.from_file("mine")


def test_a_peer_that_says_what_it_computes_is_checked(tmp_path: Path) -> None:
    """Scales of logits and output are its own; a wrong one has a reason instead of a number."""
    file = tmp_path / "made.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from gemworks.jagged.bench.peers import Contender, ours\n"
        "def make(x):\n"
        "    right = ours(replace(x, case=replace(x.case, op='gdpa', activation='relu')))\n"
        "    return Contender(lambda q, k, v: 3 * right.attend(q, k, v), activation='relu', out_scale=SCALE)\n"
    )
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    for path, scale in ((right, "3.0"), (wrong, "2.0")):
        path.write_text(file.read_text().replace("SCALE", scale))
    given = ["--peer", f"right={right}:make", "--peer", f"wrong={wrong}:make", "--only", "max16 uniform"]
    rows = run(tmp_path, *given, "--skip", "torch varlen_attn")
    assert all(r["ms"] for r in rows if r["impl"] == "right")
    refused = [r for r in rows if r["impl"] == "wrong"]
    assert {(r["op"], r["direction"]) for r in refused} == {(o, d) for o in cases.BOTH for d in ("fwd", "bwd")}
    assert all("AssertionError: out of sequence" in r["ratio_to_best_peer"] and not r["ms"] for r in refused)


def test_a_peer_that_fails_while_timed_leaves_the_case_alone(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text(
        "calls = []\n"
        "def attend(q, k, v, cu_q, cu_k, max_q, max_k, scale):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 3:\n"
        "        raise RuntimeError('worn out')\n"
        "    return q * v.sum() * k.sum()\n"
    )
    rows = run(tmp_path, "--peer", f"late={file}:attend", "--only", "gdpa B3 max16 uniform")
    late = [r for r in rows if r["impl"] == "late"]
    assert {r["direction"] for r in late} == {"fwd", "bwd"}
    assert all(r["ratio_to_best_peer"] == "cannot run: RuntimeError: worn out" for r in late if not r["ms"])
    assert any(not r["ms"] for r in late)
    assert {r["direction"] for r in rows if r["impl"] == report.OURS and r["ms"]} == {"fwd", "bwd"}


@pytest.mark.slow
def test_a_peer_that_hangs_is_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "hangs.py"
    file.write_text("import time\n\ndef attend(*args):\n    time.sleep(3600)\n")
    out = tmp_path / "rows.csv"
    command = [sys.executable, "-m", "gemworks.jagged.bench", *QUICK, "--out", str(out), "--limit-s", "2"]
    command += ["--peer", f"hangs={file}:attend", "--only", "uniform", "--skip", "torch varlen_attn"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    with out.open() as f:
        rows = list(csv.DictReader(f))
    hung = [r for r in rows if r["impl"] == "hangs"]
    assert {r["shape"] for r in hung} == {c.shape for c in cases.SMOKE}
    assert any("stopped after 2 s" in r["ratio_to_best_peer"] for r in hung)
    mine = [r for r in rows if r["impl"] == report.OURS and r["op"] != "tile_schedule"]
    assert {(r["op"], r["shape"]) for r in mine} == {(c.op, c.shape) for c in cases.SMOKE}
    assert "--resume" not in rows[-1]["command"]


def test_cases_with_the_same_inputs_share_their_peers() -> None:
    groups = cases.grouped(cases.CASES)
    assert sum(map(len, groups)) == len({replace(c, priority=0) for c in cases.CASES})
    assert [c.op for c in groups[0]] == ["flash_attention", "gdpa"]
    urgent = [min(c.priority for c in g) for g in groups]
    assert urgent == sorted(urgent)


def test_budget_stops_and_says_so(tmp_path: Path, capsys: Any) -> None:
    assert bench.main([*QUICK, "--budget-s", "0", "--out", str(tmp_path / "rows.csv")]) == 0
    assert capsys.readouterr().out.count("not run, the budget of 0 s is spent") == len(cases.grouped(cases.SMOKE))


def test_shards_share_the_cases(tmp_path: Path) -> None:
    """Together they run each case once; none of them draws."""
    shapes = []
    for i in range(2):
        rows = run(tmp_path / str(i), "--no-peers", "--shard", f"{i}/2")
        shapes += list(dict.fromkeys((r["op"], r["shape"]) for r in rows if r["op"] != "tile_schedule"))
        assert not list((tmp_path / str(i)).glob("*.png"))
    assert sorted(shapes) == sorted({(c.op, c.shape) for c in cases.SMOKE})


def chosen(*more: str) -> Any:
    return bench.parser().parse_args([*QUICK, *more])


def test_what_shares_binaries_is_prepared_once(tmp_path: Path) -> None:
    cpu, dtype = torch.device("cpu"), torch.float32
    whole = prepare.units(bench.parser().parse_args([]), cpu, dtype)
    labels = [unit.label for unit in whole]
    assert len(set(labels)) == len(labels)
    assert [unit.rank for unit in whole] == sorted(unit.rank for unit in whole)
    flash = [label for label in labels if label.endswith("gemworks flash_attention")]
    assert [label.split(":")[0] for label in flash if "max1024" in label] == [
        f"flash_attention B256 max1024 {case}" for case in ("uniform H128", "causal uniform H128", "uniform H64")
    ]
    assert not any("B1152 max1024" in label for label in labels)
    flex = [label for label in labels if label.endswith("FlexAttention")]
    assert len(flex) == 2  # of each shape beside which it is measured
    file = tmp_path / "shared.py"
    file.write_text(
        "SHARES, PRIORITY, done = 3, 1, []\ndef make(x): ...\ndef prepare(i, n):\n    print(f'share {i} of {n}')\n"
    )
    shares = [u for u in prepare.units(chosen("--peer", f"mine={file}:make"), cpu, dtype) if u.label.startswith("mine")]
    assert [u.label for u in shares] == [f"mine {i}/3" for i in range(3)]


def test_every_unit_runs(capsys: Any) -> None:
    for unit in prepare.units(chosen("--skip", "flash-attn-4"), torch.device("cpu"), torch.float32):
        unit.run()


def test_units_are_taken_once_and_the_heavy_ones_a_few_at_a_time() -> None:
    plan = [prepare.Unit(str(i), print, i, weight) for i, weight in enumerate((2, 2, 2, 0))]
    taken = multiprocessing.get_context("spawn").Array("i", len(plan))
    assert [prepare._next(plan, taken) for _ in range(4)] == [0, 1, 3, -1]
    taken[0] = 2
    assert [prepare._next(plan, taken) for _ in range(2)] == [2, None]


@pytest.mark.slow
def test_processes_prepare_side_by_side(capfd: Any) -> None:
    assert bench.main([*QUICK, "--skip", "flash-attn-4", "--prepare", "2"]) == 0
    told = capfd.readouterr().out
    assert "gdpa B3 max16 uniform H16: gemworks gdpa: ready" in told
    assert " 0 failed, 0 cut off" in told


def test_long_calls_are_repeated_less() -> None:
    calls = {"quick": 0, "slow": 0}

    class Ticks(timing.Clock):
        def sample(self, run: Any, repeats: int) -> list[float]:
            return [run() for _ in range(repeats)]

    def count(name: str, ms: float) -> Any:
        def call() -> float:
            calls[name] += 1
            return ms

        return call

    runs = {"quick": count("quick", 1.0), "slow": count("slow", 100.0)}
    timing.time_in_turn(Ticks(torch.device("cpu")), runs, rounds=3, repeats=8, round_ms=80.0)
    assert calls == {"quick": 2 + 3 * 8, "slow": 2 + 3}


def test_laws_of_lengths() -> None:
    for law in cases.LAWS:
        lengths = cases.draw_lengths(law, 4000, 200, seed=3)
        assert int(lengths.min()) >= (law != "empties")
        assert int(lengths.max()) <= 200
        assert torch.equal(lengths, cases.draw_lengths(law, 4000, 200, seed=3))
    means = {law: float(cases.draw_lengths(law, 4000, 200, 3).double().mean()) / 200 for law in cases.LAWS}
    assert means["full"] == 1.0
    assert means["uniform"] == pytest.approx(0.5, abs=0.02)
    assert means["mean70"] == pytest.approx(0.7, abs=0.02)
    assert means["zipf12"] < 0.2
    with pytest.raises(ValueError, match="law: got 'x'"):
        cases.draw_lengths("x", 1, 1, 0)


def test_percentiles() -> None:
    t = Time.of([float(n) for n in range(1, 12)])
    assert (t.ms, t.ms_p20, t.ms_p80) == (6.0, 3.0, 9.0)
