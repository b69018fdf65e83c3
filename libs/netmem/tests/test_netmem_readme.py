"""The code in the README and in the solver's page runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.reference
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["README.md", "docs/budget_solver.md"])
def test_python_blocks_run(page, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})
    if page == "README.md":
        assert "peak:" in capsys.readouterr().out


def test_the_readme_example_is_ten_lines():
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    assert len([line for line in block.group(1).splitlines() if line.strip()]) <= 10
