"""The worked example of the documentation runs: a click log becomes a data set, and a model trains on it."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from gemworks.gem.data import ParquetSource

pytestmark = pytest.mark.reference
EXAMPLE = Path(__file__).parents[1] / "examples/click_log.py"


def test_the_click_log_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    spec = importlib.util.spec_from_file_location("click_log", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.chdir(tmp_path)
    example.make_log(tmp_path / "clicks.parquet", num_rows=2000)
    example.main(["clicks.parquet"], num_steps=2)
    out = capsys.readouterr().out
    assert "samples: {'train': 1600, 'valid': 200, 'test': 200}" in out
    assert "NE of the test part: " in out
    batch = ParquetSource("click_log/data").read("train", np.arange(1600))
    for events in batch.events.values():
        sample_T = np.repeat(np.arange(1600), np.diff(events.offsets_S.numpy()))
        assert (events.timestamps_T.numpy() < batch.timestamps_B.numpy()[sample_T]).all()
        assert len(sample_T) > 1000
