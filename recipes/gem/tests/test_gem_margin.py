"""The whole promise of `make train`: `small` beats the strong baseline on MovieLens-100K."""

from __future__ import annotations

import pytest
from gemworks.gem.presets import load_config
from gemworks.gem.train import train


@pytest.mark.slow
def test_small_beats_the_strong_baseline(movielens_folder, tmp_path):
    """By at least 1 % NE, with a paired 95 % interval that excludes zero. Time is not: a machine may be busy."""
    config = load_config("small", sets=[f"data.path={movielens_folder}", "train.device=cpu"])
    summary = train(config, tmp_path / "run")
    gain = summary["baselines"]["history"]["gain"]
    assert gain["ne_gain_percent"] >= 1.0
    assert gain["excludes_zero"]
    assert gain["ne_difference_high"] < 0.0
    assert summary["ne"] < summary["history_baseline_ne"] < summary["baseline_ne"]
