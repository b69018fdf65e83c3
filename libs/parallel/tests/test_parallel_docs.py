"""The README's example, the picture and the benchmark's command line."""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from gemworks.parallel import ParallelPlan, place, presets
from gemworks.parallel.bench import main
from gemworks.parallel.measured_rows import BENCH_COLUMNS
from gemworks.parallel.picture import draw_plan

ROOT = Path(__file__).parents[1]


def test_the_readme_example_runs_and_is_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block is not None
    code = block.group(1)
    assert len(code.strip().splitlines()) <= 10
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "nvlink" in out
    assert "MFU" in out


def test_the_picture_in_the_docs_is_what_the_code_draws() -> None:
    plan = ParallelPlan.for_world(4096, shard=256, expert=2, expert_shard=16, table_group=256, replica_shard=8)
    cluster = presets.roce_cluster(4096)
    layout = place(plan, cluster).layout
    svg = draw_plan(layout, cluster)
    tree = ElementTree.fromstring(svg)
    texts = [t.text or "" for t in tree.iter("{http://www.w3.org/2000/svg}text")]
    for title in (
        "FSDP shard: 256",
        "FSDP replica: 16",
        "experts (EP): 2",
        "table group: 256",
        "table replica, sharded: 8",
    ):
        assert title in texts
    filled = [r.get("fill") for r in tree.iter("{http://www.w3.org/2000/svg}rect")]
    assert filled.count("#2b8a3e") >= 2 + 8, "NVLink groups are drawn whole"
    assert (ROOT / "docs" / "five_dimensions.svg").read_text() == svg, "redraw it: see the README"


def test_bench_runs_on_a_small_table_and_writes_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMWORKS_COMMIT", "abc1234")
    tmp_path = tmp_path / "not" / "there yet"
    assert main(["balance", "ladder", "--max-ranks", "8", "--out", str(tmp_path)]) == 0
    with (tmp_path / "parallel_balance.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * 3
    assert all(
        line["commit"] == "abc1234" and line["command"].startswith("python -m gemworks.parallel.bench")
        for line in lines
    )
    assert "predicted, not measured" in capsys.readouterr().out
    header, *rows = (tmp_path / "plan_predictions.csv").read_text().splitlines()
    assert header.startswith("gpus,plan,e2e_mfu,scaling_ratio,item,ms,")
    assert sum(",step," in row for row in rows) == 7 + 2 * (1 + 5 * 2)
    assert BENCH_COLUMNS[:6] == ["op", "shape", "setting", "impl", "memory_gib", "exposed_ms"]
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "choose from" in capsys.readouterr().err


@pytest.mark.gpu
def test_two_gpus_rows() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    import subprocess
    import sys

    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "gemworks.parallel.bench",
        "gpu",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    assert "gpu step fsdp" in done.stdout
    assert "gpu experts spread" in done.stdout
