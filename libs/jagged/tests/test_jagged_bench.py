"""The benchmark on tiny shapes: its columns, its correctness check, its honesty about peers that do not run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from gemworks.jagged.bench import __main__ as bench
from gemworks.jagged.bench import cases, peers, report
from gemworks.jagged.bench.timing import Time

pytestmark = pytest.mark.reference
QUICK = ["--smoke", "--rounds", "1", "--repeats", "2", "--skip", "FlexAttention"]  # FlexAttention compiles for seconds


def run(tmp_path: Path, *more: str) -> list[dict[str, str]]:
    path = tmp_path / "rows.csv"
    assert bench.main([*QUICK, "--out", str(path), *more]) == 0
    with path.open() as file:
        return list(csv.DictReader(file))


def test_smoke_rows_have_every_column_and_keep_failing_peers(tmp_path: Path) -> None:
    rows = run(tmp_path)
    assert tuple(rows[0]) == report.COLUMNS
    assert {(r["op"], r["shape"]) for r in rows} == {(c.op, c.shape) for c in cases.SMOKE}
    mine = [r for r in rows if r["impl"] == report.OURS]
    assert {r["direction"] for r in mine} == {"fwd", "bwd"}
    for r in mine:
        assert float(r["ms_p20"]) <= float(r["ms"]) <= float(r["ms_p80"])
        assert float(r["tflops"]) > 0
        assert r["bwd_factor"] == "2.5"
    absent = [r for r in rows if r["impl"] == "flash-attn-4"]
    assert absent
    assert all(not r["ms"] and r["ratio_to_best_peer"].startswith("cannot run: ") for r in absent)


def test_a_wrong_kernel_gets_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: cases.Inputs) -> peers.Contender:
        right = peers.ours(x)
        return peers.Contender(lambda q, k, v: right.attend(q, k, v) * 1.01, softmax=right.softmax)

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


def test_budget_stops_and_says_so(tmp_path: Path, capsys: Any) -> None:
    assert bench.main([*QUICK, "--budget-s", "0", "--out", str(tmp_path / "rows.csv")]) == 0
    assert capsys.readouterr().out.count("not run, the budget of 0 s is spent") == len(cases.SMOKE)


def test_laws_of_lengths() -> None:
    for law in cases.LAWS:
        lengths = cases.draw_lengths(law, 4000, 200, seed=3)
        assert int(lengths.min()) >= 1
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
