"""A release changes what it says it changes: the public names of every package and their arguments are pinned.

A change that is wanted: `GEMWORKS_UPDATE_GOLDEN=1 make release` writes the new pins, and the package's CHANGELOG says
what changed.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).parent / "golden"


def api(module: ModuleType) -> str:
    """One line per public name: what it is, and its arguments (names, kinds, optional)."""
    lines = []
    for name in sorted(getattr(module, "__all__", [])):
        value = getattr(module, name)
        if inspect.isclass(value):
            members = [
                f"  .{member}{_arguments(function)}"
                for member, function in sorted(vars(value).items())
                if not member.startswith("_") and inspect.isfunction(function)
            ]
            lines += [f"class {name}{_arguments(value)}", *members]
        elif callable(value):
            lines.append(f"{name}{_arguments(value)}")
        else:
            lines.append(f"{name}: {type(value).__name__}")
    return "".join(line + "\n" for line in lines)


def _arguments(function: object) -> str:
    """Without types and values of defaults, whose text differs between versions of Python.

    >>> _arguments(lambda a, b=1, *c, d, e=None, **f: 0)
    '(a, b=, *c, d, e=, **f)'
    """
    try:
        parameters = inspect.signature(function).parameters.values()  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return ""
    words, starred = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not starred:
            words.append("*")
        starred |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        words.append(f"{star}{p.name}{'' if p.default is p.empty else '='}")
    return f"({', '.join(words)})"


def test_api_is_as_pinned(library) -> None:
    """For the libraries; the recipe and the command line promise commands and files, which have tests of their own."""
    text = api(importlib.import_module(library.module))
    path = GOLDEN / f"api_{library.name}.txt"
    if os.environ.get("GEMWORKS_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "GEMWORKS_UPDATE_GOLDEN=1 pins what is there now"


def test_all_is_there_once(library) -> None:
    module = importlib.import_module(library.module)
    assert len(set(module.__all__)) == len(module.__all__)
    values = {name: getattr(module, name) for name in module.__all__}
    # a function that its module's name hides, as `from gemworks.x import probe` would give without an import of it
    assert [name for name, value in values.items() if isinstance(value, ModuleType)] == []


def test_the_pin_can_fail() -> None:
    module = ModuleType("changed")
    module.__all__ = ["f"]  # type: ignore[attr-defined]
    module.f = lambda a, b=1: a  # type: ignore[attr-defined]
    before = api(module)
    module.f = lambda a, b: a  # type: ignore[attr-defined]
    assert before == "f(a, b=)\n"
    assert api(module) == "f(a, b)\n"


def test_changelog_says_what_the_next_release_holds(package) -> None:
    """The newest entry is of this version and has something to say."""
    text = (package.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.split(r"^## ", text, flags=re.MULTILINE)[1]
    assert newest.startswith(package.pyproject["project"]["version"])
    assert re.search(r"^- \w", newest, re.MULTILINE), f"{package.folder}/CHANGELOG.md: the newest entry is empty"


def test_changelog_moves_with_the_sources_after_a_release(package) -> None:
    """Once a version is tagged, sources that differ from the tag need a newer version in pyproject.toml."""
    version = package.pyproject["project"]["version"]
    tag = f"{package.distribution}-{version}"
    known = subprocess.run(["git", "tag", "--list", tag], cwd=ROOT, capture_output=True, text=True, check=False)
    if known.stdout.strip() != tag:
        pytest.skip(f"{tag} is not released yet")
    changed = subprocess.run(["git", "diff", "--quiet", tag, "--", package.folder / "src"], cwd=ROOT, check=False)
    assert changed.returncode == 0, f"{package.distribution} has changed since {tag}: raise its version"
