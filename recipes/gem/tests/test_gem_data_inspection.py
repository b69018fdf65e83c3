"""What an inspection says is what a count of the whole data set says."""

from pathlib import Path

import numpy as np
import pytest
from gemworks.gem.data import MovieLens, Synthetic, SyntheticSpec
from gemworks.gem.data.inspection import draw_lengths, inspect_source, length_histogram

pytestmark = pytest.mark.reference


def test_movielens_figures(movielens: MovieLens):
    result = inspect_source(movielens, max_samples=10**6)
    train = result["splits"]["train"]
    log = movielens.log
    assert (train["num_samples"], train["num_inspected"]) == (80000, 80000)
    assert train["label_rates"]["like"] == pytest.approx((log.rating_N[:80000] >= 4).mean())
    assert (train["first_time"], result["splits"]["test"]["last_time"]) == (
        "1997-09-20 03:05:10",
        "1998-04-22 23:10:38",
    )
    lengths = movielens.table.events["liked"].slices.lengths_N[:80000]
    liked = train["events"]["liked"]
    assert (liked["num_events"], liked["max_length"]) == (int(lengths.sum()), int(lengths.max()))
    assert liked["mean_length"] == pytest.approx(lengths.mean())
    assert sum(part["num_samples"] for part in liked["lengths"]) == 80000
    assert [f["name"] for f in result["schema"]["ids"]] == [f.name for f in movielens.schema.ids]


@pytest.mark.parametrize("max_samples", [2, 3, 700, 2000, 4095])
def test_a_part_of_the_samples_is_spread_over_all_and_none_is_read_twice(max_samples: int):
    source = Synthetic(SyntheticSpec(num_samples=4096, max_length=2, num_id_fields=0, num_dense=0))
    seen: list[int] = []
    read = source.read

    def watched(split: str, rows_B: np.ndarray):
        if split == "train":
            seen.extend(rows_B.tolist())
        return read(split, rows_B)

    source.read = watched
    result = inspect_source(source, max_samples=max_samples)
    assert len(seen) == len(set(seen)) == result["splits"]["train"]["num_inspected"] <= max_samples
    assert (min(seen), max(seen)) == (0, 4095)
    assert result["splits"]["train"]["num_samples"] == 4096


def test_histogram_counts_every_sample_once():
    lengths = np.random.default_rng(0).integers(0, 5000, 2000)
    parts = length_histogram(lengths)
    for part in parts:
        inside = (lengths >= part["from"]) & (lengths <= part["to"])
        assert part["num_samples"] == inside.sum()
    assert [(p["from"], p["to"]) for p in parts[:4]] == [(0, 0), (1, 1), (2, 3), (4, 7)]
    assert sum(p["num_samples"] for p in parts) == 2000
    assert length_histogram(np.zeros(0, dtype=np.int64)) == [{"from": 0, "to": 0, "num_samples": 0}]


def test_the_picture_is_a_png_and_data_without_histories_has_none(tmp_path: Path):
    source = Synthetic(SyntheticSpec(num_samples=64, max_length=4, num_id_fields=0, num_dense=0))
    result = inspect_source(source, max_samples=64)
    draw_lengths(tmp_path / "lengths.png", result)
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no event types"):
        draw_lengths(tmp_path / "none.png", {"schema": {"events": []}, "splits": {}})
    with pytest.raises(ValueError, match="max_samples: got 1, expected at least 2"):
        inspect_source(source, max_samples=1)
