"""A benchmark whose check fails writes no number for it, and ends with exit code 1; the other suites' rows stay."""

import csv

import pytest
import torch
from gemworks.netmem.bench import __main__ as bench
from gemworks.netmem.codec import Fp8Codec

pytestmark = pytest.mark.reference


def test_a_wrong_codec_gets_no_number(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Decoded values that are not what went in."""
    decode = Fp8Codec.decode

    def wrong(self: Fp8Codec, *args, **options) -> torch.Tensor:
        return decode(self, *args, **options) + 1.0

    monkeypatch.setattr(Fp8Codec, "decode", wrong)
    out = tmp_path / "netmem.csv"
    assert bench.main(["--smoke", "--suite", "stash", "quantise", "--out", str(out)]) == 1
    shown = capsys.readouterr()
    assert "[2/2] quantise" in shown.out
    assert "error: suite quantise: AssertionError: " in shown.err
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert any("stash" in row["op"] for row in rows)
    assert not any(row["op"] == "quantise" and "fp8" in row["setting"] for row in rows)
