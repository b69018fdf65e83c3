"""The cost of a batch as a function of its lengths, fitted to measured kernels."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
from gemworks.gem.ladder.kernel_costs import kernel_costs, lengths_of, main

MEASURED = Path(__file__).parents[3] / "docs" / "measured"


def test_the_committed_fit_is_that_of_the_committed_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(MEASURED / "jagged_h200.csv", tmp_path)
    assert main([str(tmp_path)]) == 0
    with (tmp_path / "cost_model_h200.csv").open() as new, (MEASURED / "cost_model_h200.csv").open() as old:
        found, committed = list(csv.DictReader(new)), list(csv.DictReader(old))
    assert len(found) == len(committed) == 4
    for a, b in zip(found, committed, strict=True):
        for name, value in a.items():
            if name in ("op", "direction", "gpu", "commit"):
                assert value == b[name]
            elif name != "command":  # its folder is another; least squares may round differently elsewhere
                assert float(value) == pytest.approx(float(b[name]), rel=2e-3)
    assert "us a token squared" in capsys.readouterr().out


def test_measured_attention_has_a_linear_and_a_quadratic_part_that_explain_its_times() -> None:
    for cost in kernel_costs(MEASURED / "jagged_h200.csv"):
        assert cost.num_rows >= 18
        assert cost.linear > 0
        assert cost.quadratic > 0
        assert cost.median_error_pct < 5.5
        assert cost.worst_error_pct < 15


def test_rows_that_do_not_match_their_law_are_named() -> None:
    row = {"shape": "B256 max1024", "law": "uniform", "seed": "1", "mean_len": "514.3", "max_len": "1020"}
    assert lengths_of(row).numel() == 256
    with pytest.raises(ValueError, match="measure it again"):
        lengths_of(row | {"mean_len": "500.0"})
