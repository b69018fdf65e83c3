"""The simulator states the error that was measured, not one of an older run."""

from pathlib import Path

from gemworks.parallel.measured_error import MEASURED, error_rows

FILE = Path(__file__).parents[1] / "docs" / "measured" / "simulator_error.csv"


def test_what_every_prediction_prints_is_what_the_file_says():
    rows = error_rows(FILE.read_text(encoding="utf-8"))
    assert rows == MEASURED, f"gemworks.parallel.measured_error.rewrite({str(FILE)!r}) brings it up to date"
    assert {gpus for device, gpus, *_ in MEASURED if "H200" in device} == {1, 2}
