"""P11: rows and picture of a loss-parity run, from models that were trained before and from the measured file."""

import csv
import math
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MEASURED = Path(__file__).parents[3] / "docs/measured/loss_parity_h200.csv"
pytestmark = pytest.mark.reference


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import loss_parity  # pyright: ignore[reportMissingImports]
    import loss_parity_plot  # pyright: ignore[reportMissingImports]

    yield loss_parity, loss_parity_plot
    for name in ("loss_parity", "loss_parity_plot"):
        sys.modules.pop(name)


def test_the_measured_means_are_those_of_the_measured_seeds(scripts):
    """What the picture shows is what the file says."""
    _, drawing = scripts
    rows = drawing.read(MEASURED)
    found = drawing.differences_of(rows)
    means = {row["recipe"]: row for row in rows if row["seed"].startswith("mean of")}
    assert means.keys() == found.keys()
    for name, triples in found.items():
        ours = drawing.seeds_interval([value for value, *_ in triples])
        columns = ("ne_difference_percent", "low_percent", "high_percent")
        assert ours == pytest.approx([float(means[name][column]) for column in columns], rel=1e-6)


def test_curves_are_differences_over_the_seeds_that_both_have(scripts):
    _, drawing = scripts
    losses = {("bf16", 0): 1.0, ("bf16", 1): 2.0, ("mxfp8", 0): 1.01, ("mxfp8", 1): 2.06, ("mxfp8", 2): 9.0}
    rows = [
        {"recipe": name, "seed": str(seed), "step": str(step), "loss": str(loss)}
        for (name, seed), loss in losses.items()
        for step in range(1, 24)
    ]
    (name, points), *others = drawing.curve_differences(rows, "bf16").items()
    assert (name, others) == ("mxfp8", [])
    assert [step for step, *_ in points] == [20, 21, 22, 23]
    _, mean, low, high = points[0]
    assert mean == pytest.approx(2.0)  # of 1 and 3 per cent
    assert high - mean == pytest.approx(mean - low) == pytest.approx(12.706)


def test_models_of_before_make_rows_curves_and_a_picture(scripts, tmp_path, capsys):
    benchmark, drawing = scripts
    generator = torch.Generator().manual_seed(0)
    labels = torch.rand(500, generator=generator) < 0.3
    facts = {"num_layers": 1, "preset": "small", "source": "synthetic", "num_samples": 500, "num_steps": 30}
    facts |= {"batch_size": 8, "dtype": "bfloat16", "device": "cpu", "seconds": 1.0}
    work = tmp_path / "work"
    work.mkdir()
    for seed in (0, 1, 2):
        plain = torch.randn(500, generator=generator)
        for name, shift in (("bf16", 0.0), ("mxfp8", 0.01)):
            result = {"logits": plain + shift, "labels": labels.to(torch.uint8), "facts": facts}
            losses = [0.7 - 0.01 * step + shift for step in range(30)]
            torch.save(result | {"losses": losses}, benchmark.result_path(work, name, seed))
    out = tmp_path / "parity.csv"
    arguments = ["--work", str(work), "--out", str(out), "--collect-only", "--curve", "--resamples", "0"]
    assert benchmark.main([*arguments, "--seeds", "0", "1", "2"]) == 0
    assert "over 3 seeds" in capsys.readouterr().out
    rows = drawing.read(out)
    assert [row["seed"] for row in rows if row["recipe"] == "mxfp8"] == ["0", "1", "2", "mean of 3"]
    with (tmp_path / "parity.curves.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * 3 * 30
    alone = tmp_path / "alone.png"
    assert drawing.plot(rows, [], alone)
    assert alone.stat().st_size < (tmp_path / "parity.png").stat().st_size
    assert not drawing.plot(rows[:1], [], alone)
    assert math.isnan(drawing.seeds_interval([1.0])[1])
