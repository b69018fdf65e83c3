"""Every Python block of the READMEs runs, with warnings as errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Applies the warning filters of the root pyproject.toml, then runs the file as a program.
RUNNER = """
import builtins, runpy, sys, tomllib, warnings
settings = tomllib.load(open(sys.argv[1], "rb"))["tool"]["pytest"]["ini_options"]
for line in settings["filterwarnings"]:
    action, message, category, module = (line.split(":") + [""] * 3)[:4]
    warnings.filterwarnings(action, message, getattr(builtins, category or "Warning"), module)
runpy.run_path(sys.argv[2], run_name="__main__")
"""


def program(readme: Path) -> str:
    """The README's Python blocks in order as one program, each at its own line numbers."""
    text = readme.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for match in BLOCK.finditer(text):
        first = text.count("\n", 0, match.start(1))
        block = match.group(1).splitlines()
        lines[first : first + len(block)] = block
    return "\n".join(lines)


def run(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "README.py"
    path.write_text(source, encoding="utf-8")
    command = [sys.executable, "-c", RUNNER, str(ROOT / "pyproject.toml"), str(path)]
    sources = [str(p) for p in (*sorted(ROOT.glob("*/*/src")), ROOT / "tools/src")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_package_readme_has_an_example_that_runs(package, tmp_path):
    """The first block is the package's example, 13 lines with its blank ones at most. Later ones may build on it."""
    readme = package.folder / "README.md"
    blocks = BLOCK.findall(readme.read_text(encoding="utf-8"))
    assert blocks, f"{readme} has no ```python block"
    assert package.module in blocks[0]
    assert len(blocks[0].strip().splitlines()) <= 13, "the first example is about ten lines; 13 is the most"
    done = run(program(readme), tmp_path)
    assert done.returncode == 0, done.stderr


def test_root_readme_runs(tmp_path):
    source = program(ROOT / "README.md")
    assert "import gemworks." in source or "from gemworks." in source
    done = run(source, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_warning_in_a_block_fails(tmp_path):
    """The runner of these tests can fail: on warnings, and at the README's own line."""
    done = run("\n\nimport warnings\nwarnings.warn('old', DeprecationWarning)\n", tmp_path)
    assert done.returncode != 0
    assert "line 4" in done.stderr
    assert "DeprecationWarning: old" in done.stderr
