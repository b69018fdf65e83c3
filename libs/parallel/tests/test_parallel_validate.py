"""The comparison of simulator and measurement runs end to end (on a shared CPU its errors mean nothing)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gemworks.parallel import SimulationConfig, presets
from gemworks.parallel.simulation import with_validation
from gemworks.parallel.validate import Case, ErrorRow, HostTimes, predict_ms, validate, write_errors
from parallel_spawn import spawn


def _validate(rank: int, world: int) -> list[tuple]:
    rows, cluster = validate(
        torch.device("cpu"),
        widths=(32,),
        calibrate_tokens=(64, 96, 256),
        validate_tokens=(128,),
        depths=(2,),
        repeats=2,
        budget_s=0.0,
    )
    if world > 1:
        assert cluster.source("tiers.nvlink.all_gather").startswith("measured: gloo")
    return [dataclasses.astuple(r) for r in rows]


@pytest.mark.dist
def test_rows_of_both_splits_and_a_file_that_the_simulator_quotes(tmp_path) -> None:
    names = [f.name for f in dataclasses.fields(ErrorRow)]
    rows = [ErrorRow(**dict(zip(names, values, strict=True))) for values in spawn(_validate, 2)[0]]
    assert [r.config for r in rows if r.split == "validate"] == [
        f"{k} 2x32 tokens 128" for k in ("shard", "replica", "expert")
    ]
    names = [r.config for r in rows if r.split == "calibrate"]
    assert sum("blocks" in n for n in names) == 2 * 2 * 3, "kinds x depths x sizes"
    assert sum("launch" in n for n in names) == 2 * 3
    assert sum("slowdown" in n for n in names) == 1
    for r in rows:
        assert r.measured_ms > 0 or "launch" in r.config
        assert r.predicted_ms > 0 or "launch" in r.config
        assert r.error_pct * r.measured_ms == pytest.approx(100 * (r.predicted_ms - r.measured_ms), abs=1e-6)
    path = tmp_path / "simulator_error.csv"
    other = dataclasses.replace(rows[0], config="somebody else's", split="validate")
    write_errors(path, [other], {"gpu": "cpu"})
    for _ in range(2):  # the second time replaces its own rows and keeps the others
        write_errors(path, rows, {"gpu": "cpu"})
    text = with_validation(SimulationConfig(), path.read_text()).validation
    assert "over 4 measured steps (2 x cpu)" in text


@pytest.mark.dist
def test_one_process_predicts_depths() -> None:
    names = [values[0] for values in spawn(_validate, 1)[0] if values[1] == "validate"]
    assert names == ["alone 2x32 tokens 128"]


def test_a_step_that_the_host_is_too_slow_for_takes_as_long_as_the_host() -> None:
    case = Case(kind="shard", depth=4, width=64, tokens=32)
    times = (1.0, 2.0, 0.0, 0.0)
    hosts = (HostTimes(forward=0.1, backward=0.2), HostTimes(forward=2.0, backward=4.0))
    quick, slow = (predict_ms(case, times, presets.h200_host(2), torch.bfloat16, host=host) for host in hosts)
    assert quick < 4 * 3.0 * 1.3
    # The last block's backward starts when half of its launch is over, and nothing waits for it.
    assert slow == pytest.approx(4 * 6.0 + max(0.0, 2.0 - 4.0 / 2), rel=0.01)


def test_what_the_host_does_once_a_step_is_half_hidden_by_a_busy_device_and_not_at_all_by_an_idle_one() -> None:
    case = Case(kind="replica", depth=4, width=64, tokens=32)
    cluster = presets.h200_host(2)

    def ms(device: float, **host: float) -> float:
        times = (device, 2 * device, 0.0, 0.0)
        return predict_ms(case, times, cluster, torch.bfloat16, host=HostTimes(forward=0.1, backward=0.1, **host))

    # The device waits for half of what begins the step; the rest runs beside it.
    assert ms(5.0, forward_once=2.0) - ms(5.0) == pytest.approx(1.0, abs=0.01)
    assert ms(5.0, backward_once=2.0) - ms(5.0) == pytest.approx(0.0, abs=0.01)
    assert ms(0.001, forward_once=2.0, backward_once=3.0) - ms(0.001) == pytest.approx(5.0, abs=0.2)


def test_a_prediction_of_one_gpu_is_its_layers() -> None:
    case = Case(kind="alone", depth=5, width=64, tokens=32)
    assert predict_ms(case, (1.0, 2.5, 0.1, 0.2), presets.h200_host(2), torch.bfloat16) == pytest.approx(5 * 3.5 + 0.3)
