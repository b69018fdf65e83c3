"""The benchmark runs on a CPU from end to end, and its CSV has the promised columns."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys

import pytest
import torch
from gemworks.netmem.bench.__main__ import SUITES, main
from gemworks.netmem.bench.plots import plot_budgets, plot_file
from gemworks.netmem.bench.rows import COLUMNS, Rows
from gemworks.netmem.ledger import BandwidthLedger

pytestmark = pytest.mark.reference


def read(path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_smoke_run_of_every_suite(tmp_path):
    out = tmp_path / "netmem.csv"
    assert main(["--smoke", "--out", str(out)]) == 0
    rows = read(out)
    assert tuple(rows[0]) == COLUMNS
    ops = {r["op"] for r in rows}
    budgets_ops = {"budget", "region_price", "free_share"}
    assert ops == {"link", "offload_copy", "small_copy", "small_copy_turns", "quantise", "stash", "hooks", *budgets_ops}
    assert len(ops) == len(SUITES) + 2  # `budgets` also writes what memory costs per region, and what offload is free
    assert all(float(r["ms"]) > 0 for r in rows if r["op"] in ("offload_copy", "quantise", "stash"))
    budgets = [r for r in rows if r["op"] == "budget" and r["ms"] != ""]
    assert {"keep everything", "one global budget", "gemworks", "gemworks offload"} <= {r["impl"] for r in budgets}
    assert any("gradient SQNR" in r["setting"] for r in budgets)
    BandwidthLedger.from_toml(tmp_path / "netmem.cluster.toml")
    assert (tmp_path / "netmem.budgets.png").exists()
    (stash,) = (r for r in rows if r["op"] == "stash")
    assert re.fullmatch(
        r"parked=True, 2 steps in a row, in turns: ([+-][\d.]+, ){2}[+-][\d.]+ % time of the step", stash["setting"]
    )
    (free,) = (r for r in rows if r["op"] == "free_share")
    assert re.search(r"measured ([\d.]+), by round \1$", free["setting"])  # one round, so its share is the median
    # what `Study.row` writes is read again, of plans that move bytes too
    moving = [r for r in budgets if r["impl"] == "gemworks offload"]
    assert all("of waiting" in r["setting"] for r in moving)
    assert plot_budgets(moving, tmp_path / "offload.png")


def test_rows_are_on_disk_as_soon_as_they_are_there(tmp_path):
    rows = Rows(torch.device("cpu"), 1.0, 1.0, path=tmp_path / "rows.csv")
    rows.add("link", setting="a")
    assert len(read(tmp_path / "rows.csv")) == 1
    rows.add("link", setting="b")
    assert [r["setting"] for r in read(tmp_path / "rows.csv")] == ["a", "b"]


def test_budgets_of_the_stack_with_the_most_rows_are_drawn_alone(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("gemworks.netmem.bench.plots._save", lambda figure, axes, rows, path: drawn.extend(rows))
    setting = "keep; predicted 70.00 ms, 20.000 GiB"
    rows = [
        {"op": "budget", "shape": shape, "setting": setting, "impl": "keep everything", "ms": ms, "memory_gib": "20"}
        for shape, ms in (("8 layers", "70"), ("16 layers", "90"), ("8 layers", "71"), ("16 layers", ""))
    ]
    assert plot_budgets(rows, tmp_path / "budgets.png")
    assert [r["ms"] for r in drawn] == ["70", "71"]
    assert not plot_budgets([{"op": "link", "shape": "", "setting": "", "ms": ""}], tmp_path / "nothing.png")


def test_the_title_stays_clear_of_the_legend(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    setting = "keep; predicted 70.00 ms, 20.000 GiB"
    row = {"op": "budget", "shape": "8 layers", "setting": setting, "ms": "70", "memory_gib": "20"}
    rows = [
        row | {"impl": impl, "gpu": "NVIDIA H200", "commit": f"{number:07d}"}
        for number, impl in enumerate(["keep everything", "one global budget", "gemworks", "gemworks offload"] * 2)
    ]
    assert plot_budgets(rows, tmp_path / "budgets.png")
    (figure,) = figures
    figure.canvas.draw()
    title, legend = figure.axes[0].title.get_window_extent(), figure.legends[0].get_window_extent()
    assert not title.overlaps(legend)
    for edge in (title.min, title.max, legend.min, legend.max):
        assert figure.bbox.contains(*edge)


def test_gathers_are_drawn_from_a_csv(tmp_path):
    rows = Rows(torch.device("cpu"), 1.0, 1.0, path=tmp_path / "pair.csv")
    for mib in (64, 128):
        rows.add("all_gather", shape=f"{mib}MiB", impl="nccl", gbps=200.0 + mib, ms=1.0)
    rows.add("all_gather", shape="64MiB", impl="copy engine", setting="not run: no GPU")
    assert [p.name for p in plot_file(tmp_path / "pair.csv")] == ["pair.gathers.png"]


def test_without_a_gpu_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--out", str(tmp_path / "x.csv")]) == 2
    assert "--smoke" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.dist
def test_pair_smoke_run_under_torchrun(tmp_path):
    out = tmp_path / "pair.csv"
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "gemworks.netmem.bench", "--smoke", "--suite", "pair", "--out", str(out)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300)
    rows = read(out)
    quantized = {"quantized_all_gather", "quantized_reduce_scatter"}
    assert {r["op"] for r in rows} == {
        "all_gather",
        "reduce_scatter",
        "gather_beside_offload",
        "fsdp_stack",
        *quantized,
    }
    assert any("not run" in r["setting"] for r in rows)
