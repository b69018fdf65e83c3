"""The ladder of several ranks, on gloo: every row is there, and two ranks learn what one learns from the same data."""

import subprocess
import sys
from pathlib import Path

import pytest
from gemworks.gem.ladder.page import read
from gemworks.gem.ladder.pair import RUNGS


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_equal_one_with_the_same_samples(tmp_path: Path):
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "gemworks.gem.ladder.pair", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["row"]: row for row in read(tmp_path / "ladder_h200x2.csv")}
    assert list(rows) == [rung.name for rung in RUNGS]
    assert abs(float(rows["fsdp"]["loss_vs_one_gpu"])) < 1e-4
    assert rows["fsdp"]["ne"] == rows["one_gpu_global"]["ne"]
    assert float(rows["bbs"]["scaling_ratio"]) > 0
    for rung in RUNGS:
        assert bool(rows[rung.name]["note"]) == bool(rung.refusal), rung.name
        assert bool(rows[rung.name]["step_ms"]) != bool(rung.refusal), rung.name
