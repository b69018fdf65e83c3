"""The rows of norms and block attention: their columns, their checks, their peers."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gemworks.jagged.bench import __main__ as bench
from gemworks.jagged.bench import bandwidth, blocks, norms, report
from gemworks.jagged.bench.timing import Ceilings, Clock

pytestmark = pytest.mark.reference

CPU = torch.device("cpu")
CLOCK = Clock(CPU)
CONTEXT = report.Context(Ceilings(10.0, 0.1, None), CPU, torch.float32, [])
TINY = blocks.Shape(3, 80, 1, 16)


def rows_of(subject: bandwidth.Subject) -> list[report.Row]:
    return bandwidth.measure(subject, CLOCK, CONTEXT, rounds=1, repeats=2)


def block_subject(variant: str) -> bandwidth.Subject:
    ((_, make),) = blocks.subjects(CPU, torch.float32, TINY, (variant,))
    return make()


def norm_subject(variant: str) -> bandwidth.Subject:
    ((_, make),) = norms.subjects(CPU, torch.float32, ((variant, 16),), 64)
    return make()


def test_block_rows_have_the_columns_of_the_protocol() -> None:
    rows = rows_of(block_subject("norm rope qkv"))
    mine = [r for r in rows if r["impl"] == report.OURS]
    assert [r["direction"] for r in mine] == ["fwd", "bwd"]
    lengths = blocks.block_lengths(3, 80)
    pairs = int(((lengths // 64) * 64**2 + (lengths % 64) ** 2).sum())
    for row, factor, tensors in zip(mine, (64, 160), (4, 7), strict=True):
        assert tuple(row) == report.COLUMNS
        assert float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])
        # 2 products of 2 * 16 FLOPs per pair, backward 2.5 times that
        assert float(row["tflops"]) == pytest.approx(factor * pairs / float(row["ms"]) / 1e9, rel=2e-3)
        moved = int(lengths.sum()) * 16 * 4 * (tensors + 1)  # the tables are two halves of a tensor
        assert float(row["gbps"]) == pytest.approx(moved / float(row["ms"]) / 1e6, rel=2e-3)
        assert float(row["roofline_fraction"]) == pytest.approx(float(row["gbps"]) / 10, abs=6e-4)
    refused = [r for r in rows if r["impl"] == "torch varlen_attn"]
    assert len(refused) == 2
    assert all(r["ratio_to_best_peer"].startswith("cannot run: ") and not r["ms"] for r in refused)


def test_a_wrong_result_prints_no_number() -> None:
    for subject, message in (
        (block_subject("plain"), "block_attention forward"),
        (norm_subject("rms_norm affine"), "rms_norm affine forward"),
    ):
        right = subject.ours
        wrong = replace(subject, ours=lambda *leaves, right=right: 1.1 * right(*leaves), peers={})
        with pytest.raises(AssertionError, match=f"{message}: relative error"):
            rows_of(wrong)


def test_a_peer_that_computes_something_else_is_refused() -> None:
    subject = norm_subject("layer_norm affine")
    right = norms.plain("layer_norm affine")
    peers = {
        "wrong": lambda: (lambda *leaves: 1.1 * right(*leaves), subject.leaves),
        "right": lambda: (right, subject.leaves),
    }
    rows = rows_of(replace(subject, peers=peers, same_function=frozenset(peers)))
    assert {r["best_peer"] for r in rows} == {"right"}
    assert all("relative error 1.0" in r["ratio_to_best_peer"] for r in rows if r["impl"] == "wrong")
    assert all(r["ms"] for r in rows if r["impl"] != "wrong")


@pytest.mark.slow
def test_norms_are_compared_with_compiled_and_eager_torch() -> None:
    rows = rows_of(norm_subject("layer_norm affine residual"))
    for direction in ("fwd", "bwd"):
        by_name = {r["impl"]: r for r in rows if r["direction"] == direction}
        assert {n for n, r in by_name.items() if r["ms"]} == {report.OURS, "torch.compile", "torch eager"}
        assert by_name["Liger"]["ratio_to_best_peer"].startswith("cannot run: ")
        best = by_name[report.OURS]["best_peer"]
        assert by_name[best]["ratio_to_best_peer"] == "1.000"


@pytest.mark.slow
def test_the_command_runs_all_suites(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    assert bench.main(["--smoke", "--rounds", "1", "--repeats", "2", "--skip", "FlexAttention", "--out", str(out)]) == 0
    with out.open() as file:
        ops = {r["op"] for r in csv.DictReader(file)}
    assert {"flash_attention", "gdpa", "tile_schedule", "block_attention norm rope qkv"} <= ops
    assert "layer_norm affine residual" in ops
