"""Every command of the tree: its help text, an example in it, a --json option, and help without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from gemworks.cli.app import app, run

pytestmark = pytest.mark.reference

# Prints help for each of the argument lists, then which heavy modules that imported.
WATCH = """
import json, sys
from gemworks.cli.app import run
codes = [run(arguments) for arguments in json.loads(sys.argv[1])]
loaded = [name for name in ("torch", "torchrec", "numpy", "matplotlib", "torchx") if name in sys.modules]
print(json.dumps({"codes": codes, "loaded": loaded}), file=sys.stderr)
"""


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group below, with the words that name it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*path, name))


TREE = dict(walk(typer.main.get_command(app)))
LEAVES = {path: command for path, command in TREE.items() if not hasattr(command, "commands")}


def test_the_tree() -> None:
    assert {" ".join(path) for path in LEAVES} == {
        *("train", "eval", "config", "doctor", "probe", "trace", "mfu"),
        *("data fetch", "data inspect"),
        *("checkpoint inspect", "checkpoint convert", "checkpoint reshard"),
        *("plan search", "plan simulate", "plan ranks"),
        *("bench jagged", "bench precision", "bench parallel", "bench netmem", "bench layers"),
        "bench ladder",
    }


@pytest.mark.parametrize("path", TREE, ids=lambda path: " ".join(path) or "gemworks")
def test_help_text(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]
) -> None:
    assert run([*path, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    golden(f"{'_'.join(('help', *path))}.txt", text)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_has_an_example_and_json(path: tuple[str, ...]) -> None:
    help_text = LEAVES[path].help
    assert f"Example: gemworks {' '.join(path)}" in " ".join(help_text.split())
    assert "--json" in [option for parameter in LEAVES[path].params for option in parameter.opts]
    files = [word for word in help_text.split() if word.startswith("docs/")]
    assert [file for file in files if not (Path(__file__).parents[2] / file).exists()] == []


def test_help_does_not_import_torch() -> None:
    calls = [[*path, "--help"] for path in TREE] + [["--version"], ["config", "--preset", "tiny"], ["trani"]]
    done = subprocess.run([sys.executable, "-c", WATCH, json.dumps(calls)], capture_output=True, text=True, check=True)
    found = json.loads(done.stderr.splitlines()[-1])
    assert found["loaded"] == []
    assert found["codes"] == [0] * (len(calls) - 1) + [2]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    """The console script's own: what `gemworks --show-completion` prints for a shell, and what it then asks for."""
    program = "import sys; from gemworks.cli.app import main; sys.argv[0] = 'gemworks'; main()"
    environment = {"_GEMWORKS_COMPLETE": f"complete_{shell}", "COMP_WORDS": "gemworks pl", "COMP_CWORD": "1"}
    environment |= {"_TYPER_COMPLETE_ARGS": "gemworks pl", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    import os

    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert "plan" in done.stdout, done.stderr
