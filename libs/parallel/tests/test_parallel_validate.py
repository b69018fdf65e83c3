"""The comparison of simulator and measurement runs end to end (on a shared CPU its errors mean nothing)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gemworks.parallel import SimulationConfig, presets
from gemworks.parallel.simulation import with_validation
from gemworks.parallel.validate import Case, ErrorRow, predict_ms, validate, write_errors
from parallel_spawn import spawn


def _validate(rank: int, world: int) -> list[tuple]:
    rows, cluster = validate(
        torch.device("cpu"), widths=(32,), calibrate_tokens=(64, 256), validate_tokens=(128,), depth=2, repeats=2
    )
    assert cluster.source("tiers.nvlink.all_gather").startswith("measured: gloo")
    return [dataclasses.astuple(r) for r in rows]


@pytest.mark.dist
def test_rows_of_both_splits_and_a_file_that_the_simulator_quotes(tmp_path) -> None:
    names = [f.name for f in dataclasses.fields(ErrorRow)]
    rows = [ErrorRow(**dict(zip(names, values, strict=True))) for values in spawn(_validate, 2)[0]]
    assert [r.config for r in rows if r.split == "validate"] == [
        f"{k} 2x32 tokens 128" for k in ("alone", "shard", "replica", "expert")
    ]
    assert sum(r.split == "calibrate" for r in rows) == 2 * 2 * 2, "kinds x depths x sizes"
    for r in rows:
        assert r.measured_ms > 0
        assert r.predicted_ms > 0
        assert r.error_pct == pytest.approx(100 * (r.predicted_ms / r.measured_ms - 1))
    path = tmp_path / "simulator_error.csv"
    other = dataclasses.replace(rows[0], config="somebody else's", split="validate")
    write_errors(path, [other], {"gpu": "cpu"})
    for _ in range(2):  # the second time replaces its own rows and keeps the others
        write_errors(path, rows, {"gpu": "cpu"})
    text = with_validation(SimulationConfig(), path.read_text()).validation
    assert "over 5 measured steps" in text
    assert "(cpu)" in text


def test_a_prediction_of_one_gpu_is_its_layers() -> None:
    case = Case(kind="alone", depth=5, width=64, tokens=32)
    assert predict_ms(case, (1.0, 2.5, 0.1, 0.2), presets.h200_host(2), torch.bfloat16) == pytest.approx(5 * 3.5 + 0.3)
