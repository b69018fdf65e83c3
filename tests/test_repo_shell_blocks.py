"""Commands in Markdown, in READMEs as on the site's pages: none that its program would not understand.

`gemworks` lines go through the command line's own parser, `python -m gemworks...` lines name a module and options that
it has, `torchx run` lines are dry runs, `make` lines name targets. What else may stand there is listed.
test_repo_shell_runs.py runs them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from shell_lines import DOCUMENTS, ROOT, blocks, commands, register_recipe, sources

NOT_LOOKED_AT = ("pip install", "torchx status", "torchx log", "torchx cancel")
COMMANDS = {line: path.relative_to(ROOT).as_posix() for path in DOCUMENTS for line in commands(path)}


def parse_gemworks(words: list[str]) -> None:
    """Raises what the command line would say of wrong words; runs nothing."""
    import typer.main
    from gemworks.cli.app import _one_value_per_set, app

    command: Any = typer.main.get_command(app)
    words = _one_value_per_set(words)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    command.make_context("gemworks", words)


def check_module(module: str, words: list[str]) -> None:
    """The module is there, and the options are written in its source or in a module of its package."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"no module {module}"
    assert spec.origin is not None
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(spec.origin).parent.glob("*.py")))
    launcher = ("--nproc-per-node", "--") if module.endswith(".launch") else ()  # torchrun's
    for word in words:
        name = word.partition("=")[0]
        assert not name.startswith("--") or name in launcher or f'"{name}"' in source, f"{module} has no {name}"


@pytest.mark.parametrize("line", [line for line in COMMANDS if not line.startswith("torchx run ")], ids=COMMANDS.get)
def test_command_is_understood(line: str) -> None:
    words = shlex.split(line.removeprefix("PYTHONPATH=. "))
    if words[0] == "gemworks":
        parse_gemworks(words[1:])
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    elif words[0].startswith(".ci/"):
        assert (ROOT / words[0]).is_file()
    elif words[0] == "torchrun":
        at = words.index("-m")
        check_module(words[at + 1], words[at + 2 :])
    elif words[0].endswith("python"):
        if words[1] == "-m" and words[2].startswith("gemworks."):
            check_module(words[2], words[3:])
        else:
            assert words[1] == "-m" or (ROOT / words[1]).is_file(), f"no file {words[1]}"
    else:
        assert line.startswith(NOT_LOOKED_AT), f"{COMMANDS[line]}: nothing here looks at {line!r}"


@pytest.mark.parametrize(
    "path", [p for p in DOCUMENTS if blocks(p, "toml")], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_toml_block_is_toml(path: Path) -> None:
    for block in blocks(path, "toml"):
        assert tomllib.loads(block)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("torchx run ")], ids=COMMANDS.get)
def test_torchx_line_is_accepted(line: str, tmp_path: Path) -> None:
    """A dry run, with the entry points that an installation would register."""
    register_recipe(tmp_path / "site")
    words = shlex.split(line)
    command = [sys.executable, "-c", "from torchx.cli.main import main; main()", "run", "--dryrun", *words[2:]]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sources()]), "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "=== SCHEDULER REQUEST ===" in done.stdout
    assert "gemworks.gem" in done.stdout.split("=== SCHEDULER REQUEST ===")[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gemworks plan serch", "no command 'serch'"),
        ("gemworks mfu --step-us 3", "No such option: --step-us"),
        ("python -m gemworks.gem.lader", "no module"),
        ("python -m gemworks.gem.ladder --roows=a", "has no --roows"),
        ("curl something", "nothing here looks at"),
    ],
)
def test_a_wrong_command_fails(line: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, line, "a test")
    with pytest.raises(Exception) as caught:  # noqa: PT011  # an assertion, or what the command line's parser raises
        test_command_is_understood(line)
    said = getattr(caught.value, "format_message", lambda: str(caught.value))()
    assert message in said
