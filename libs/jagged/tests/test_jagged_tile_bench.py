"""The benchmark of norms and block attention runs, checks before it times, and yields the columns it promises."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.reference,
    # torch's own CPU compiler imports a module of torch that uses what torch deprecates.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"num_sequences": 3, "max_length": 80, "num_heads": 1, "head_dim": 16}


@pytest.fixture(scope="module")
def bench() -> Any:
    path = Path(__file__).parents[1] / "benchmarks/tile_kernels.py"
    spec = importlib.util.spec_from_file_location("tile_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_have_the_columns_of_the_protocol(bench: Any) -> None:
    rows = list(bench.block_rows(CPU, variants=("norm rope qkv",), **TINY))
    assert [row["direction"] for row in rows] == ["fwd", "bwd"]
    for row in rows:
        assert set(row) <= set(bench.COLUMNS)
        assert row["impl"] == "gemworks"
        assert row["ms_p20"] <= row["ms"] <= row["ms_p80"]
    # 3 sequences, mean 0.7 of 80, each of its own length: 2 products of 2 * 16 FLOPs per pair, backward 2.5 times that
    lengths = bench.block_lengths(3, 80)
    pairs = int(((lengths // 64) * 64**2 + (lengths % 64) ** 2).sum())
    assert rows[0]["tflops"] == pytest.approx(64 * pairs / rows[0]["ms"] / 1e9, abs=0.051)
    assert rows[1]["tflops"] == pytest.approx(160 * pairs / rows[1]["ms"] / 1e9, abs=0.051)


def test_a_wrong_result_prints_no_number(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.block_attention
    monkeypatch.setattr(bench, "block_attention", lambda *args, **kwargs: 1.1 * right(*args, **kwargs))
    with pytest.raises(AssertionError, match="block_attention forward: relative error"):
        next(bench.block_rows(CPU, variants=("plain",), **TINY))
    monkeypatch.setattr(bench, "rms_norm", lambda x, **_: 1.1 * x)
    with pytest.raises(AssertionError, match="rms_norm forward: relative error"):
        next(bench.norm_rows(CPU, widths=(16,), num_values=1 << 12, variants=("rms_norm",)))


@pytest.mark.slow
def test_norm_rows_compare_three_implementations(bench: Any) -> None:
    rows = list(bench.norm_rows(CPU, widths=(16,), num_values=1 << 12, variants=("layer_norm affine residual",)))
    assert [row["impl"] for row in rows] == 2 * ["gemworks", "torch.compile", "torch eager"]
    for row in rows:
        assert row["best_peer"] in ("torch.compile", "torch eager")
        if row["impl"] == row["best_peer"]:
            assert row["ratio_to_best_peer"] == 1.0
