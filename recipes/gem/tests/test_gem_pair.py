"""The ladder of several ranks, on gloo: every row is there, and two ranks learn what one learns from the same data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gemworks.gem.ladder.pair import FILE, LOSS_TOLERANCE, RUNGS, main
from gemworks.gem.ladder.pair_page import latest_in_order, pair_table, pair_takeaways
from gemworks.gem.ladder.tables import read

pytestmark = [pytest.mark.dist, pytest.mark.slow]
LAUNCH = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
SMOKE = ["-m", "gemworks.gem.ladder.pair", "--smoke"]


def test_two_ranks_equal_one_with_the_same_samples(tmp_path: Path) -> None:
    command = [*LAUNCH, "--standalone", *SMOKE, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["row"]: row for row in read(tmp_path / FILE)}
    assert list(rows) == [rung.name for rung in RUNGS]
    for rung in RUNGS:
        row = rows[rung.name]
        assert row["note"] == "", rung.name
        assert float(row["step_ms"]) > 0
        if rung.alone:
            assert row["loss_vs_one_gpu"] == ""
        else:
            assert float(row["scaling_ratio"]) > 0
            assert abs(float(row["loss_vs_one_gpu"])) < LOSS_TOLERANCE
    for name in ("fsdp_float32", "sharded_tables"):
        assert abs(float(rows[name]["loss_vs_one_gpu"])) < 2e-3, name
    page = pair_table(latest_in_order(list(rows.values()))) + pair_takeaways(list(rows.values()))
    assert page.count("\n| ") >= len(RUNGS)
    assert "- `experts` over `fsdp`, batch 32: x" in page
    assert "- `fp8_gather` over `fp8_linears`, batch 32: x" in page
    assert rows["placement"]["loss"] == rows["fsdp"]["loss"]  # two ranks have one order, up to names


def test_rows_name_their_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One process measures rows of several sizes, in the order given; a wrong name is refused with the right ones."""
    names = ["one_gpu_global@4", "one_gpu", "one_gpu@8"]
    rows = [part for name in names for part in ("--rows", name)]
    assert main(["--smoke", "--ranks", "2", "--out", str(tmp_path), *rows]) == 0
    found = [(row["row"], row["batch"]) for row in read(tmp_path / FILE)]
    assert found == [("one_gpu_global", "8"), ("one_gpu", "16"), ("one_gpu", "8")]
    with pytest.raises(SystemExit, match="2"):
        main(["--smoke", "--rows", "fsdpp"])
    assert "got 'fsdpp', expected one of one_gpu," in capsys.readouterr().err


def test_commands_that_take_turns_write_one_ladder(tmp_path: Path) -> None:
    """The second one compares with what the first one wrote."""
    common = [*SMOKE, "--out", str(tmp_path), "--turns", str(tmp_path / "turns"), "--of", "2"]
    commands = [
        # one process for the rows of one GPU
        [*LAUNCH[:3], *common, "--order", "0", "--rows", "one_gpu", "--rows", "one_gpu_global", "--ranks", "2"],
        [*LAUNCH, "--standalone", *common, "--order", "1", "--rows", "experts"],
    ]
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    for process in running:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-2000:]
    rows = read(tmp_path / FILE)
    assert [row["row"] for row in rows] == ["one_gpu", "one_gpu_global", "experts"]
    assert abs(float(rows[2]["loss_vs_one_gpu"])) < LOSS_TOLERANCE
