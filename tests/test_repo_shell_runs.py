"""The commands of `sh` blocks, and those of `console` blocks that test_repo_docs.py leaves, are run as they stand.

Each page's run in order, in a folder that looks like the repository's root and holds small stand-ins for what a user
would bring or download. Two need a GPU for minutes and are run with `--smoke` added: on a CPU, and on a GPU in the gpu
tier. What is not run is in `NOT_RUN`, with the reason.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from shell_lines import DOCUMENTS, ROOT, commands, register_recipe, sources, typed

# A pattern that matches the beginning of a command: why no test here runs it.
NOT_RUN = {
    r"make ": "makes an environment, then trains or tests for minutes: .ci/run and .ci/newcomer do it",
    r"pip install ": "makes an environment: test_repo_wheels.py and .ci/newcomer do it",
    r"\.ci/pants ": "makes Pants and takes minutes: docs/measured/pants.txt has what it printed",
    r"torchx run -s (slurm|kubernetes) ": "needs a cluster: dry runs in test_repo_shell_blocks.py, test_gem_slurm.py",
    r"torchx (status|log|cancel) ": "needs a cluster: test_gem_slurm.py follows and cancels its jobs",
    r"torchrun .*-m gemworks\.gem\.ladder\.pair ": "needs two GPUs for minutes",
    r"python -m gemworks\.gem\.ladder\.pair ": "needs two GPUs for minutes",
    r"python -m gemworks\.gem\.ladder .*(--batch-size|--leave-one-out) ": "needs a GPU for minutes",
    r"python -m gemworks\.gem\.ladder --smoke ": "compiles for minutes on a CPU: .ci/run runs its eager rows",
    r"python -m gemworks\.gem\.layers .*--(setting|only) ": "needs a GPU for minutes",
    r"python recipes/gem/benchmarks/long_run\.py ": "needs a GPU for minutes: test_gem_long_run.py shortens it",
}
# Run with `--smoke` added: without it they measure on a GPU for minutes.
SMOKE = (r"gemworks bench jagged --compare ", r"python -m gemworks\.gem\.layers --out docs/measured( --smoke)?$")
# Run by the slow tier only.
SLOW = (
    *SMOKE,
    r"gemworks checkpoint reshard .*--parts 8$",
    r"python -m gemworks\.gem\.ladder --page ",
    r"python -m gemworks\.gem\.launch ",
    r"python examples/",
    r"torchx run (-s|--scheduler) local_cwd ",
)
# The machine's own Python under the names that a user types, whatever is installed beside it.
PROGRAMS = {
    "python": '"$@"',
    "gemworks": '-c "from gemworks.cli.app import main; main()" "$@"',
    "torchx": '-c "from torchx.cli.main import main; main()" "$@"',
    "torchrun": '-m torch.distributed.run "$@"',
}

# Every Python that a command starts takes the stand-in's hashes for those of MovieLens, once something asks for them.
STAND_IN = """
import importlib.util, sys

class OtherHashes:
    def find_spec(self, name, path=None, target=None):
        if name != "gemworks.gem.data.movielens_files":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.SHA256.update({hashes})

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, OtherHashes())
"""


def matching(line: str, patterns: Iterable[str]) -> list[str]:
    return [pattern for pattern in patterns if re.match(pattern, line)]


def lines_of(page: Path) -> list[str]:
    """The commands of a page that are run here, as they are run."""
    here = [line for language, line in typed(page) if language == "sh" or not line.startswith("gemworks ")]
    return [f"{line} --smoke" if matching(line, SMOKE) else line for line in here if not matching(line, NOT_RUN)]


def cases() -> list[Any]:
    """Pages with their quick lines; in the slow tier those that have others, with all of theirs."""
    found = []
    for page in DOCUMENTS:
        lines, name = lines_of(page), page.relative_to(ROOT).as_posix()
        if quick := [line for line in lines if not matching(line, SLOW)]:
            found.append(pytest.param(quick, id=name))
        if len(quick) < len(lines):
            found.append(pytest.param(lines, id=f"{name}-all", marks=pytest.mark.slow))
    return found


def write_movielens(root: Path) -> dict[str, str]:
    """Files of MovieLens-100K's form with 20 users, 30 films and 600 ratings, where `data fetch` would put it; the hash
    of each."""
    from gemworks.gem.data.movielens_files import COLUMNS, DEFAULT_CACHE

    folder = root / DEFAULT_CACHE
    users = [f"{user}\t{20 + user}\t{'FM'[user % 2]}\tother\t0000{user % 3}" for user in range(1, 21)]
    items = [f"{item}\tFilm {item}\t{1960 + item}\t{('Drama', 'Comedy War')[item % 2]}" for item in range(1, 31)]
    ratings = [
        f"{1 + n % 20}\t{1 + (7 * n + n // 20) % 30}\t{1 + (n * n + n // 7) % 5}\t{880_000_000 + 60 * n}"
        for n in range(600)
    ]
    folder.mkdir(parents=True)
    for name, rows in zip(("ml-100k.inter", "ml-100k.item", "ml-100k.user"), (ratings, items, users), strict=True):
        (folder / name).write_text("\n".join(["\t".join(COLUMNS[name]), *rows]) + "\n", encoding="utf-8")
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in COLUMNS}


def make_root(folder: Path) -> dict[str, str]:
    """What the commands find in their folder, which stands for the repository's root, and their environment."""
    hashes = write_movielens(folder)
    site, programs = folder / "_site", folder / "_bin"
    register_recipe(site)
    (site / "sitecustomize.py").write_text(STAND_IN.format(hashes=hashes), encoding="utf-8")
    programs.mkdir()
    for name, rest in PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {rest}\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    for name in ("examples", "libs", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("*.png", "decisions", "__pycache__"))
    shutil.copy(ROOT / "docs/measured/jagged_h200.csv", folder / "old.csv")
    (folder / "taobao").mkdir()
    clicks = "".join(f"{i % 5},{i % 7},3,{('pv', 'buy')[i % 4 == 3]},{1_511_544_000 + 60 * i}\n" for i in range(200))
    (folder / "taobao/UserBehavior.csv").write_text(clicks, encoding="utf-8")
    made = "torch.nn.Linear(128, 128), [torch.randn(64, 128)]"
    (folder / "my_trainer.py").write_text(f"import torch\n\ndef make():\n    return {made}\n", encoding="utf-8")
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "dur": 5.0, "args": {"stream": 7}}
    trace = {
        "traceEvents": [kernel | {"ts": 9.0 * i} for i in range(9)],
        "deviceProperties": [{"id": 0, "numSms": 132}],
    }
    (folder / "trace.json").write_text(json.dumps(trace), encoding="utf-8")
    return os.environ | {
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(site), *sources(), os.environ["PYTHONPATH"]]),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }


def run_lines(lines: list[str], folder: Path) -> None:
    """One after the other; the first that fails is named, with the end of its own words."""
    env = make_root(folder)
    for line in lines:
        words = re.sub(r"\S+\.\.\.", lambda name: str(one_that_begins(folder, name[0][:-3])), line)
        command = ["bash", "-euo", "pipefail", "-c", words]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"


def one_that_begins(folder: Path, begin: str) -> Path:
    """The file or folder that `begin...` on a page stands for."""
    found = sorted(folder.glob(f"{begin}*"))
    assert found, f"nothing begins with {begin}"
    return found[0].relative_to(folder)


@pytest.mark.parametrize("lines", cases())
def test_lines_run(lines: list[str], tmp_path: Path) -> None:
    run_lines(lines, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", SMOKE, ids=("jagged", "layers"))
def test_line_runs_on_a_gpu(pattern: str, tmp_path: Path) -> None:
    """Tiny sizes, and on the GPU: every row names it."""
    line = next(line for page in DOCUMENTS for line in lines_of(page) if matching(line, [pattern]))
    run_lines([line], tmp_path)
    begun = (tmp_path / "old.csv").stat().st_mtime
    tables = (*tmp_path.glob("docs/measured/*.csv"), *tmp_path.glob("runs/**/*.csv"))
    written = [path for path in tables if path.stat().st_mtime > begun]
    rows = [row for path in written for row in csv.DictReader(path.read_text("utf-8").splitlines())]
    assert rows
    assert all(row["gpu"] for row in rows)


def test_every_line_has_one_place_and_every_pattern_a_line() -> None:
    """A line is run by the quick tier, by the slow one or not at all, and no pattern outlives its commands."""
    everything = {line for page in DOCUMENTS for line in commands(page)}
    for table in (NOT_RUN, SLOW):
        assert {pattern for line in everything for pattern in matching(line, table)} == set(table)
    assert [line for line in sorted(everything) if len(matching(line, [*NOT_RUN, *SLOW])) > 1] == []
    assert set(SMOKE) <= set(SLOW)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gemworks eval runs/none", "'runs/none': got no config.toml in it"),
        ("false | true", "false | true"),
        ("ls runs/a-...", "nothing begins"),
    ],
)
def test_a_line_that_fails_is_named(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        run_lines([line], tmp_path)
