"""The README's example runs."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.reference


def test_the_example_runs(capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 1
    assert blocks[0].count("\n") <= 12
    exec(compile(blocks[0], "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "out_features 16 is not a multiple of 32" in out
    assert "cuBLAS FP8 1x128 x 128x128" in out
