"""P11: rows, curves and picture of a loss-parity run, and the batches that its models share."""

import argparse
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
    for name in ("loss_parity", "loss_parity_batches", "loss_parity_plot"):
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
    ne = {("bf16", 0): 1.0, ("bf16", 1): 2.0, ("mxfp8", 0): 1.01, ("mxfp8", 1): 2.06, ("mxfp8", 2): 9.0}
    rows = [
        {"recipe": name, "seed": str(seed), "step": str(step), "examples": str(8 * step), "ne": str(value)}
        for (name, seed), value in ne.items()
        for step in range(1, 4)
    ]
    (name, points), *others = drawing.curve_differences(rows, "bf16").items()
    assert (name, others) == ("mxfp8", [])
    assert [examples for examples, *_ in points] == [8, 16, 24]
    _, mean, low, high = points[0]
    assert mean == pytest.approx(2.0)  # of 1 and 3 per cent
    assert high - mean == pytest.approx(mean - low) == pytest.approx(12.706)
    assert drawing.mean_curves(rows)["mxfp8"][2] == (24, pytest.approx((1.01 + 2.06 + 9) / 3), 1.01, 9.0)


def test_a_point_of_a_curve_is_the_mean_of_the_last_steps(scripts):
    _, drawing = scripts
    rows = [
        {"recipe": "bf16", "seed": "0", "step": str(step), "examples": str(8 * step), "ne": str(float(step))}
        for step in range(drawing.WIDTH + 2, 0, -1)
    ]
    examples, ne = drawing.smooth_curves(rows)["bf16", "0"]
    assert examples == [8 * step for step in range(1, drawing.WIDTH + 3)]
    assert ne[:2] == [1.0, 1.5]
    assert ne[-1] == pytest.approx(2 + (drawing.WIDTH + 1) / 2)


def test_models_train_on_batches_that_were_made_before(scripts, tmp_path):
    """Each step has a loss of its own; another seed has other samples, and all have the same held-out ones."""
    benchmark, _ = scripts
    sets = ["data.source=synthetic", "data.num_samples=512", "data.batch_size=16", "data.max_length=8"]
    sets += ["train.max_steps=3", "train.device=cpu"]
    chosen = argparse.Namespace(preset="tiny", sets=sets, min_features=32, work=tmp_path, recipes=["bf16"], jobs=2)
    for share in (0, 1):
        benchmark.make_batches(share, (0, 1), chosen)
    made = {path.name for path in (tmp_path / "batches").iterdir()}
    assert len(made) == 8 + 64 // 16  # steps of two seeds, two more that a loader reads ahead
    assert "seed 1" in benchmark.run_one("bf16", 1, chosen)
    assert {path.name for path in (tmp_path / "batches").iterdir()} == made
    result = benchmark.result_of(benchmark.result_path(tmp_path, "bf16", 1))
    assert [examples for examples, *_ in result["curve"]] == [16, 32, 48]
    assert all(0.5 < loss < 1 and 0.8 < ne < 1.5 for _, loss, ne in result["curve"])
    assert result["facts"]["num_samples"] == len(result["logits"]) == 64
    assert result["facts"]["commit"] == benchmark.commit()

    source = benchmark.source_of(benchmark.config_of("bf16", 1, chosen), chosen)
    rows = list(benchmark.rows_read(benchmark.config_of("bf16", 1, chosen), source))
    splits, rows_read = zip(*rows, strict=True)
    assert splits == ("train",) * 5 + ("test",) * 4
    assert (rows_read[0][0], rows_read[5][0]) == (48, 0)
    stored, plain = source.read(*rows[0]), source._source.read(*rows[0])
    assert stored.event_ids.values().equal(plain.event_ids.values())
    assert stored.labels_BK.equal(plain.labels_BK)
    assert stored.events["type_0"].timestamps_T.equal(plain.events["type_0"].timestamps_T)


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
            of = {"commit": "aaaaaaa" if seed else "bbbbbbb", "torch": "2.11"}
            result = {"logits": plain + shift, "labels": labels.to(torch.uint8), "facts": facts | of}
            curve = [(8 * step, 0.7 + shift, 1.01 - 0.01 * step + shift) for step in range(1, 31)]
            torch.save(result | {"curve": curve}, benchmark.result_path(work, name, seed))
    out = tmp_path / "parity.csv"
    recipes = ["--recipes", "bf16", "mxfp8"]
    arguments = [*recipes, "--work", str(work), "--out", str(out), "--collect-only", "--resamples", "0"]
    assert benchmark.main([*arguments, "--seeds", "0", "1", "2"]) == 0
    assert "over 3 seeds" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        benchmark.main([*arguments, "--set", "train.max_steps=9"])
    assert "has models of" in capsys.readouterr().err
    rows = drawing.read(out)
    compared = [row for row in rows if row["recipe"] == "mxfp8"]
    assert [row["seed"] for row in compared] == ["0", "1", "2", "mean of 3"]
    # a model's commit is the one that trained it, whoever writes the rows
    assert [row["commit"] for row in compared] == ["bbbbbbb", "aaaaaaa", "aaaaaaa", "bbbbbbb, aaaaaaa"]
    with (tmp_path / "parity.curves.csv").open() as file:
        assert [row["seed"] for row in csv.DictReader(file)] == [seed for seed in "012" for _ in range(2 * 30)]
    alone = tmp_path / "alone.png"
    assert drawing.plot(rows, [], alone)
    assert alone.stat().st_size < (tmp_path / "parity.png").stat().st_size
    assert not drawing.plot(rows[:1], [], alone)
    assert math.isnan(drawing.seeds_interval([1.0])[1])
