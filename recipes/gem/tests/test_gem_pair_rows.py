"""The ladder of several ranks in one process: which rows compare, and who waits for whom."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from gemworks.gem.ladder import pair
from gemworks.gem.ladder.pair import COLUMNS, FILE, SAME, main, read_reference
from gemworks.gem.ladder.pair_page import pair_table, pair_takeaways
from gemworks.gem.ladder.pair_row import PairRow
from gemworks.gem.layers.report import append_csv

pytestmark = pytest.mark.reference


def pair_row(name: str, **cells: str) -> dict[str, str]:
    given = {"row": name, "batch": "8", "num_gpus": "1", "step_ms": "10", "samples_per_s": "800", "commit": "a"}
    return dict.fromkeys(COLUMNS, "") | {"law": "uniform", "gpu": "H200", "loss": "0.6"} | given | cells


def test_a_reference_is_of_the_same_model(tmp_path: Path) -> None:
    """The newest row that agrees in all of `SAME`; a CSV without those columns has none."""
    path, row = tmp_path / FILE, pair_row("fsdp", setting="fast_gelu", sets="data.num_ids=9", preset="large")
    append_csv(path, [row | {"row": "one_gpu", "step_ms": ms} for ms in ("1", "2", "")], COLUMNS)
    found = read_reference(path, "one_gpu", row, 8)
    assert found is not None
    assert found["step_ms"] == "2"
    for key in SAME:
        assert read_reference(path, "one_gpu", row | {key: "other"}, 8) is None, key
    assert read_reference(path, "one_gpu", row | {"law": "zipf"}, 8) is None
    old = tmp_path / "old.csv"
    append_csv(old, [{"row": "one_gpu", "batch": "8", "step_ms": "1"}], ("row", "batch", "step_ms"))
    assert read_reference(old, "one_gpu", row, 8) is None


def test_another_commit_is_marked() -> None:
    """Of the row that the Scaling Ratio divides by, and of the row that a row is compared with."""
    rows = [
        pair_row("fsdp", scaling_ratio="0.9", one_gpu_commit="b", ms_p20="9", ms_p80="11"),
        pair_row("experts", scaling_ratio="0.8", one_gpu_commit="a", ms_p20="10", ms_p80="12", samples_per_s="700"),
        pair_row("bbs", scaling_ratio="0.7", one_gpu_commit="c", commit="c", samples_per_s="900"),
    ]
    table = pair_table(rows)
    assert "| 0.9\\* |" in table
    assert "| 0.8 |" in table
    assert "| 0.7 |" in table
    text = pair_takeaways(rows)
    assert "`experts` over `fsdp`, batch 8: x0.875 (0.75-1.10) samples/s, uncertain (the ranges overlap)." in text
    assert "`bbs` over `fsdp`, batch 8: x1.125\\* samples/s, gains." in text
    assert text.count("different commits") == 1


@pytest.mark.parametrize("name", ["fsdp@", "fsdp@0", "fsdpp", "@4"])
def test_a_wrong_row_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--smoke", "--rows", name])
    assert f"got {name!r}, expected one of one_gpu," in capsys.readouterr().err


@pytest.mark.parametrize("rows", [["--rows", "fsdp", "--rows", "one_gpu@4"], []])
def test_a_row_of_one_gpu_is_alone(rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a command that measures later, others hold models on the same GPU."""
    with pytest.raises(SystemExit, match="2"):
        main(["--smoke", "--turns", str(tmp_path), "--of", "2", "--order", "1", *rows])
    assert "expected rows of all ranks" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["compile_small", "measure"])
def test_nobody_waits_for_a_command_that_failed(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its turn or in it: the others see that it is ready, and that its turn and its rows of one GPU are over."""

    def fail(*args: object, **options: object) -> None:
        raise AssertionError("why")

    monkeypatch.setattr(pair, "compile_small", fail if where == "compile_small" else lambda *args: None)
    monkeypatch.setattr(PairRow, "measure", fail)
    meet, began = tmp_path / "meet", time.monotonic()
    with pytest.raises(AssertionError, match="why"):
        main(["--smoke", "--rows", "one_gpu", "--ranks", "2", "--turns", str(meet), "--out", str(tmp_path)])
    assert all(len(list(meet.glob(kind))) == 1 for kind in ("ready.*", "done.*", "alone/ready.*"))
    assert time.monotonic() - began < 100  # --patience-s is 120
